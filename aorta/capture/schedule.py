"""Which steps a profiler leaves alone, warms up on, keeps, and saves after. Pure: step number -> action."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Action(Enum):
    """What happens to one step."""

    NONE = "none"
    WARMUP = "warmup"
    ACTIVE = "active"
    ACTIVE_AND_SAVE = "active_and_save"


@dataclass(frozen=True)
class Schedule:
    """Cycles of `wait`, `warmup` and `active` steps; `repeat` cycles, 0 for ever."""

    wait: int
    warmup: int
    active: int
    repeat: int

    @property
    def cycle(self) -> int:
        """Steps in one cycle."""
        return self.wait + self.warmup + self.active

    def __call__(self, step: int) -> Action:
        """The action of 0-based `step`."""
        cycles, place = divmod(step, self.cycle)
        if self.repeat and cycles >= self.repeat:
            return Action.NONE
        if place < self.wait:
            return Action.NONE
        if place < self.wait + self.warmup:
            return Action.WARMUP
        return Action.ACTIVE_AND_SAVE if place == self.cycle - 1 else Action.ACTIVE
