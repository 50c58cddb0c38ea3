"""Decides which steps the profiler skips, warms up on, keeps, and saves after. Pure: step number -> action.

Steps are global and 0-based, so all ranks and attempts of a run agree on them without communication. Must not know
torch, or what is done in a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Action(Enum):
    """What the profiler does with one step."""

    NONE = "none"
    WARMUP = "warmup"
    ACTIVE = "active"
    ACTIVE_AND_SAVE = "active_and_save"

    @property
    def kept(self) -> bool:
        """Whether the step is in a trace."""
        return self in (Action.ACTIVE, Action.ACTIVE_AND_SAVE)


@dataclass(frozen=True)
class Schedule:
    """Cycles of `wait`, `warmup` and `active` steps; `repeat` cycles, 0 for unlimited.

    Attributes:
        skip_first: steps skipped before the first cycle.
        steps_per_epoch: restart counting in every epoch of this many steps, whose last one saves if it is kept; None:
            never.
        resumed_at: global step at which the run resumed; within that epoch, `skip_first` counts from there. Without
            epochs it changes nothing: windows lie on the same global steps as in an uninterrupted run.

    Raises:
        ValueError: a number is below its minimum; names all of them.
    """

    wait: int
    warmup: int
    active: int
    repeat: int
    skip_first: int = 0
    steps_per_epoch: int | None = None
    resumed_at: int = 0

    def __post_init__(self) -> None:
        if self.wait < 0 or self.warmup < 0 or self.active < 1 or self.repeat < 0 or self.skip_first < 0:
            raise ValueError(
                f"wait={self.wait}, warmup={self.warmup}, active={self.active}, repeat={self.repeat}, "
                f"skip_first={self.skip_first}: active must be at least 1, the others at least 0"
            )

    @classmethod
    def periodic(cls, period: int, warmup: int, active: int) -> Schedule:
        """Unlimited cycles of `period` steps each.

        Raises:
            ValueError: warm-up and kept steps do not fit; names the three.
        """
        if warmup < 0 or active < 1 or period < warmup + active:
            raise ValueError(
                f"period={period}, warmup={warmup}, active={active}: period must be at least warmup + active, warmup "
                "at least 0 and active at least 1"
            )
        return cls(period - warmup - active, warmup, active, repeat=0)

    @property
    def cycle(self) -> int:
        """Number of steps of one cycle."""
        return self.wait + self.warmup + self.active

    def __call__(self, step: int) -> Action:
        """The action of 0-based global `step`."""
        place, left = self._place(step)
        if place is None or place < self.wait:
            return Action.NONE
        if place < self.wait + self.warmup:
            # Skip a warm-up if the epoch ends before any step is kept: torch would warn about it.
            return Action.WARMUP if place + left >= self.wait + self.warmup else Action.NONE
        return Action.ACTIVE_AND_SAVE if place == self.cycle - 1 or left == 0 else Action.ACTIVE

    def whole(self, first: int, last: int) -> bool:
        """Whether kept steps `first` to `last` (global, inclusive) are as many as a cycle keeps."""
        return last - first + 1 == self.active

    def _place(self, step: int) -> tuple[int | None, int]:
        """Position in the cycle (None: before the first or after the last), and steps left in the epoch after this
        one.
        """
        left = self.cycle
        if self.steps_per_epoch is not None:
            epoch, step = divmod(step, self.steps_per_epoch)
            left = self.steps_per_epoch - 1 - step
            if self.resumed_at and epoch == self.resumed_at // self.steps_per_epoch:
                step -= self.resumed_at % self.steps_per_epoch
        step -= self.skip_first
        if step < 0 or (self.repeat and step >= self.cycle * self.repeat):
            return None, left
        return step % self.cycle, left
