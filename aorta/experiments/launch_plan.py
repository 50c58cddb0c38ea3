"""What a plan is: its sides, how often each is launched, in which order, and the command line of each launch.

`plan_options` makes one from what a user gave; `launch_engine` carries it out. Must not touch the disk, or start
anything.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from aorta.documents.comparison import SIDES
from aorta.documents.plans import TORCHRUN, Side
from aorta.installation import training_program
from aorta.redaction import hide

REFERENCE, CANDIDATE = SIDES
PLACEHOLDERS: Final = (TORCHRUN, "{python}", "{tree}", "{plan}", "{output}", "{side}", "{launch}")
"""What words of a launcher or a command may hold: the side's torchrun, its interpreter, its checkout, the plan folder,
the run folder of the launch, the side's name, the number of the launch.
"""


@dataclass(frozen=True)
class PlannedLaunch:
    """A launch of a plan: its number among all, its side, and its number on that side; both from 0."""

    order: int
    side: Side
    number: int

    @property
    def name(self) -> str:
        """The folder of its run inside the plan folder: `candidate/03`."""
        return f"{self.side.name}/{self.number:02d}"

    @property
    def shown(self) -> str:
        """Its name; of one of several candidates with what it sets, secrets redacted: `candidate-2/00 (CAP=8)`."""
        settings = self.side.settings()
        return f"{self.name} ({settings})" if self.side.name.startswith("candidate-") and settings else self.name


@dataclass(frozen=True)
class Plan:
    """Everything that is launched.

    Attributes:
        output: the plan folder, absolute.
        folder: where the launches run, absolute; relative words are seen from it.
        launches: of each side.
        words: overrides for train.py in every launch, before the side's.
        timeout_s: a launch that lasts longer is ended, and failed.
        aa: both sides are the reference.
    """

    output: Path
    folder: Path
    sides: tuple[Side, ...]
    launches: int
    words: tuple[str, ...] = ()
    nproc_per_node: int = 2
    timeout_s: float | None = None
    aa: bool = False

    def order(self) -> Iterator[PlannedLaunch]:
        """Yield the launches in the order A B B A A B B A ...: a drift of the machine that is linear in time falls on
        both sides alike (docs/dev/measuring.md, section 5). One side: one launch after the other.
        """
        position = 0
        for number in range(self.launches):
            for side in self.sides if number % 2 == 0 else reversed(self.sides):
                yield PlannedLaunch(position, side, number)
                position += 1

    def run_folder(self, launch: PlannedLaunch) -> Path:
        """Return where a launch writes: the folder of one run."""
        return self.output / launch.name

    def words_of(self, side: Side) -> list[str]:
        """Return the overrides for train.py, without those that place a launch."""
        return [*self.words, *side.words]

    def command(self, launch: PlannedLaunch) -> list[str]:
        """Return the command line of a launch. The last overrides win, so that no other moves its run folder."""
        side, output = launch.side, self.run_folder(launch)
        values = {
            "{python}": side.python or "",
            "{tree}": side.tree or "",
            "{plan}": str(self.output),
            "{output}": str(output),
            "{side}": side.name,
            "{launch}": f"{launch.number:02d}",
        }
        words: list[str] = []
        for word in side.command or side.launcher or (TORCHRUN,):
            filled = word
            for mark, value in values.items():
                filled = filled.replace(mark, value)
            words += [str(side.python), "-m", "torch.distributed.run"] if word == TORCHRUN else [filled]
        if side.command:
            recorded = any("{output}" in word for word in side.command)
            return words if recorded else [sys.executable, "-m", "aorta", "record", str(output), "--", *words]
        words += ["--standalone", "--nproc_per_node", str(self.nproc_per_node)]
        words += [*training_program(None if side.tree is None else Path(side.tree)), *self.words_of(side)]
        placed = f"training.output_dir={output}"
        if not re.fullmatch(r"[A-Za-z0-9_/.-]+", str(output)):  # quotes only where Hydra's grammar needs them
            from aorta.config.override_words import quoted  # brings Hydra along, for which --help need not wait

            placed = quoted("training.output_dir", str(output))
        return [*words, placed, "label=null"]

    def as_json(self) -> dict[str, Any]:
        """Return what was asked for, as `plan.json` keeps it: two plans are the same if this is equal."""
        return {
            "launches": self.launches,
            "aa": self.aa,
            "nproc_per_node": self.nproc_per_node,
            "words": hide(self.words),
            "timeout_s": self.timeout_s,
            "folder": str(self.folder),
            "sides": {side.name: msgspec.to_builtins(side.without_secrets()) for side in self.sides},
        }
