"""What reading steps and writing their lines costs, told apart from the steps at whose end it happens.

A run reads several steps at once (`step_recorder.TOGETHER`): a median over steps would leave that out, and a mean would
put it into one block of several.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from aorta.instrument.step_recorder import StepRecorder


class Reading:
    """Counted where it happens.

    Args:
        recorder: whose `catch_up` is counted from now on.
        now: readings of the clocks and counters that count, as an array.
        least: steps that must be there to be read.

    Attributes:
        spent: by all calls so far.
    """

    def __init__(self, recorder: StepRecorder, now: Callable[[], Any], least: int = 1) -> None:
        self._recorder, self._now, self._least = recorder, now, least
        self._catch_up = recorder.catch_up
        self.spent = np.zeros_like(now())
        recorder.catch_up = self._counted  # type: ignore[method-assign]

    def _counted(self) -> None:
        if len(self._recorder._unread) >= self._least:
            before = self._now()
            self._catch_up()
            self.spent = self.spent + self._now() - before

    def outside(self, step: Callable[[], None]) -> Any:
        """What a step takes, without what was read at its end."""
        before, spent = self._now(), self.spent
        step()
        return self._now() - before - (self.spent - spent)
