"""Mutants of the device path's C++, which `native_mutants.yaml` lists: each takes one rule away.

`switched` compiles all of them into one library. The text between ⟪ and ⟫ is what changes; what stands around it only
says which occurrence is meant. An expression becomes a conditional one, a statement (it ends in `;` or `}`) a
conditional statement.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import yaml

from tests.mutation.operators import ROOT

FOLDER: Final = "aorta/instrument/native"


@dataclass(frozen=True)
class NativeMutant:
    """`quote` stands once in the file, without its two brackets; what is between them becomes `new`."""

    rule: str
    file: str
    quote: str
    new: str

    @property
    def name(self) -> str:
        """The file, and what is then wrong."""
        return f"{FOLDER}/{self.file}: {self.rule}"

    @property
    def path(self) -> Path:
        """Of the source."""
        return ROOT / FOLDER / self.file

    @property
    def old(self) -> str:
        """What changes."""
        return self.quote.partition("⟪")[2].partition("⟫")[0]

    def diff(self) -> str:
        """What changes, and what it becomes."""
        return f"- {self.old}\n+ {self.new}"

    def span(self) -> tuple[int, int]:
        """Where it stands in the file.

        Raises:
            ValueError: the quote does not stand there exactly once.
        """
        text, around = self.path.read_text(), self.quote.replace("⟪", "").replace("⟫", "")
        if text.count(around) != 1 or not self.old:
            raise ValueError(f"{self.name}: the quote stands {text.count(around)} times in {self.file}")
        begin = text.index(around) + self.quote.index("⟪")
        return begin, begin + len(self.old)


NATIVE_MUTANTS: Final = tuple(
    NativeMutant(file=file, **mutant)
    for file, mutants in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text()).items()
    for mutant in mutants
)
