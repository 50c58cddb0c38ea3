"""The rules by which launches are judged, as chosen on the command line.

Must not: let a choice be made after the results were seen; every rule is written into the summary.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Final

from aorta.analysis.metrics import JOB_STEP, STEP_METRIC_NAMES, metric_named
from aorta.errors import InputError

LEVEL: Final = 0.95
"""Coverage of the bootstrap interval of one side's median."""
LEAST_LAUNCHES: Final = 4
"""Launches per side. With three against three the smallest two-sided Mann-Whitney p is 2 / C(6, 3) = 0.10."""
ALL: Final = "all"
SEQUENCE: Final = ("overlap_ratio", "exposed_comm_ms", "compute_stall_ms")
"""Metrics that are tested one after the other, behind the primary one: each only where the one before it differed."""
GUARD: Final = JOB_STEP
"""Step time guards every verdict: where it got worse, a better ratio is no improvement."""


@dataclass(frozen=True)
class Rules:
    """Rules of a comparison. `margin` is in the unit of an effect: a difference of ratios, or a fraction of the
    reference's milliseconds.
    """

    primary: str = "overlap_ratio"
    alpha: float = 0.05
    margin: float = 0.02
    allow_unlike: tuple[str, ...] = ()
    judge_milliseconds: bool = False
    assume_no_drift: bool = False
    """Judge launch sets also where they did not take turns in time (`launch_order`)."""

    def __post_init__(self) -> None:
        """Validate the rules.

        Raises:
            InputError: a number is out of range, or the primary metric has no better direction.
        """
        if not 0 < self.alpha <= 0.5:
            raise InputError(f"--alpha {self.alpha:g}: above 0 and at most 0.5; 0.05 is the default")
        if not 0 < self.margin < 1:
            raise InputError(f"--margin {self.margin:g}: above 0 and below 1; 0.02 is the default")
        if self.primary not in STEP_METRIC_NAMES or metric_named(self.primary).better is None:
            judged = [name for name in STEP_METRIC_NAMES if metric_named(name).better is not None]
            near = difflib.get_close_matches(self.primary, judged, n=1, cutoff=0.6)
            meant = f"did you mean {near[0]}? " if near else ""
            raise InputError(f"--primary {self.primary}: {meant}the metrics that can be judged are {', '.join(judged)}")

    @property
    def sequence(self) -> tuple[str, ...]:
        """The metrics tested one after the other, the primary one first."""
        return tuple(dict.fromkeys((self.primary, *SEQUENCE)))

    def role(self, name: str) -> str:
        """`primary` decides the verdict, `guard` can withhold an improvement, `sequence` is tested where the metric
        before it differed, and `secondary` is corrected for multiple testing.
        """
        if name == self.primary:
            return "primary"
        return "guard" if name == GUARD else "sequence" if name in SEQUENCE else "secondary"

    def allows(self, key: str) -> bool:
        """Whether runs may differ in a key: given in full, without its first component, or as a prefix
        of components.
        """
        names = {key, key.partition(".")[2]}
        return any(
            word == ALL or name == word or name.startswith(f"{word}.") for word in self.allow_unlike for name in names
        )
