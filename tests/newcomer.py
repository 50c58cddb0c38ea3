"""What a newcomer types: the commands of README.md and docs/getting-started.md, as they are printed.

Every command stands in exactly one of two places: `HERE`, run by `tests/test_package.py` as printed, or `ELSEWHERE`,
with what it needs that the tests do not have, or with the test that runs it. Must not: run anything by itself.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.docs.pages import ROOT, fenced
from tests.runs import HANGS_S

PAGES: Final = (ROOT / "README.md", ROOT / "docs" / "getting-started.md")
_COMMANDS: Final = json.loads(Path(__file__).with_suffix(".json").read_text())
HERE: Final[dict[str, int]] = _COMMANDS["here"]
"""Command -> exit code."""
ELSEWHERE: Final[dict[str, str]] = _COMMANDS["elsewhere"]
"""Command -> why it is not run as a newcomer would."""


@dataclass(frozen=True)
class Answer:
    """How one command ended, and what it printed."""

    code: int
    out: str
    err: str


def printed() -> Iterator[str]:
    """Every command of the pages, once, in the order a reader meets them."""
    lines = [line for page in PAGES for block in fenced(page, "bash") for line in block.splitlines()]
    yield from dict.fromkeys(line for line in lines if line.strip() and not line.startswith("#"))


def checkout(folder: Path, programs: Path) -> None:
    """A clean checkout, whose environment (`programs`: its bin) set-up finds ready, and traces of two other runs."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in names.split("\0")[:-1]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    for name in ("cuda_traces", "rocm_traces"):
        shutil.copytree(ROOT / "tests/samples/two_gloo_ranks/torch_profiler", folder / name)
    (folder / ".venv").symlink_to(programs.parent)
    if not (programs / "torchrun").exists():  # torch is another environment's, as after set-up beside a torch
        (programs / "torchrun").write_text(f'#!/bin/sh\nexec "{programs}/python" -m torch.distributed.run "$@"\n')
        (programs / "torchrun").chmod(0o755)
    # What scripts/setup.sh compares: made from these files, in this place.
    made_from = ["pyproject.toml", "constraints.txt", "scripts/setup.sh"]
    made_from += sorted(str(path.relative_to(folder)) for path in (folder / "aorta/instrument/native").glob("*.?pp"))
    stamp = f"{folder}\n" + "".join((folder / name).read_text() for name in made_from)
    (programs.parent / "run.stamp").write_text(stamp)


def typed(commands: list[str], folder: Path, variables: dict[str, str]) -> dict[str, Answer]:
    """The commands one after the other in one shell, as somebody types them."""
    notes = folder.with_name(f"{folder.name}-answers")
    notes.mkdir()
    lines = [
        f"{{ {line}\n}} >{notes}/{n}.out 2>{notes}/{n}.err; echo $? >{notes}/{n}.code"
        for n, line in enumerate(commands)
    ]
    subprocess.run(
        ["bash", "-c", "\n".join(lines)],
        cwd=folder,
        env=variables,
        stdin=subprocess.DEVNULL,
        timeout=2 * HANGS_S,
        check=True,
    )

    def read(number: int, what: str) -> str:
        return (notes / f"{number}.{what}").read_text()

    return {line: Answer(int(read(n, "code")), read(n, "out"), read(n, "err")) for n, line in enumerate(commands)}
