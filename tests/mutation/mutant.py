"""A mutant: one rule of the code taken away, as data. Must not: touch a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Mutant:
    """`old` stands once in the module and becomes `new`; `name` says what is then wrong."""

    name: str
    module: str
    old: str
    new: str

    @property
    def file(self) -> str:
        """Of the source, from the repository's root."""
        return f"{self.module.replace('.', '/')}.py"

    @property
    def path(self) -> Path:
        """Of the source."""
        return ROOT / self.file

    def source(self) -> str:
        """Mutated.

        Raises:
            ValueError: the old text does not stand there exactly once.
        """
        text = self.path.read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: the old text stands {text.count(self.old)} times in {self.file}")
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class CheckedMutant(Mutant):
    """A mutant that some of `tests` (files or node ids of pytest) fail with; `equivalent`: why none can."""

    tests: tuple[str, ...]
    equivalent: str | None = None


def rules(
    module: str, tests: Sequence[str], *taken: tuple[str, str, str], equivalent: str | None = None
) -> list[CheckedMutant]:
    """The mutants of one module that the same tests kill, each as its name, old text and new text."""
    return [CheckedMutant(name, module, old, new, tuple(tests), equivalent) for name, old, new in taken]
