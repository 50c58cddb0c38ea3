"""Shows rank 0's progress: a bar on a terminal, plain lines otherwise; or the lines of a profiling tutorial.

It gets finished steps, which come some steps late. Must not wait for a device.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from tqdm import tqdm

from aorta.config.schema import Training, Wording
from aorta.records.schema import Step
from aorta.runner.logs import EVERY_RANK

_log = logging.getLogger(__name__)


class ProgressBar(Protocol):
    """Takes finished steps in order."""

    def show(self, step: Step) -> None:
        """Called with each finished step."""

    def close(self) -> None:
        """Leave the terminal clean."""


def progress_of(training: Training, first: int, stop: int, *, shown: bool) -> ProgressBar:
    """What `training.progress` asks for; the other arguments are those of `Progress`."""
    if training.progress is Wording.tutorial:
        return TutorialProgress(stop, training.log_interval, shown=shown)
    return Progress(first, stop, training.log_interval, shown=shown)


@contextmanager
def announced(wording: Wording, rank: int) -> Iterator[None]:
    """With the tutorial's wording, every rank logs its start, and its end if there was no error."""
    if wording is not Wording.tutorial:
        yield
        return
    _log.info("[rank %d] starting worker", rank, extra=EVERY_RANK)
    yield
    _log.info("[rank %d] finished worker", rank, extra=EVERY_RANK)


class TutorialProgress:
    """One line every `interval` steps, on rank 0. Args: last + 1 global step, interval, and whether to show it."""

    def __init__(self, stop: int, interval: int, *, shown: bool) -> None:
        self._stop, self._interval, self._shown = stop, interval, shown

    def show(self, step: Step) -> None:
        """Called with each finished step."""
        number = step.global_step + 1
        if self._shown and number % self._interval == 0:
            loss = "-" if step.loss is None else f"{step.loss:.4f}"
            _log.info("[rank 0] step %d/%d loss=%s", number, self._stop, loss)

    def close(self) -> None:
        """No-op: only complete lines were printed."""


class Progress:
    """Args: first and last + 1 global step, how often to print, and whether this rank shows anything at all."""

    def __init__(self, first: int, stop: int, interval: int, *, shown: bool) -> None:
        self._stop, self._interval = stop, interval
        self._shown = shown
        self._bar: Any = None
        if shown and sys.stderr.isatty():
            self._bar = tqdm(total=stop, initial=first, unit="step", dynamic_ncols=True, file=sys.stderr)

    def show(self, step: Step) -> None:
        """Called with each finished step."""
        if not self._shown:
            return
        if self._bar is not None:
            self._bar.update(1)
            self._bar.set_postfix_str(_summary(step))
        if (step.global_step + 1) % self._interval == 0 or step.global_step + 1 == self._stop:
            # With a bar the lines would only repeat it; the log file has them anyway.
            level = logging.DEBUG if self._bar is not None else logging.INFO
            _log.log(level, "step %d/%d  %s", step.global_step + 1, self._stop, _summary(step))

    def close(self) -> None:
        """Leave the terminal clean."""
        if self._bar is not None:
            self._bar.close()


def _summary(step: Step) -> str:
    ratio, window = step.overlap["overlap_ratio"], step.overlap["window_ms"]
    return "  ".join(
        [
            "loss -" if step.loss is None else f"loss {step.loss:.4f}",
            f"step {window:.1f} ms",
            f"comm {step.overlap['comm_ms']:.1f} ms" if step.overlap["comm_ms"] is not None else "comm -",
            "overlap -" if ratio is None else f"overlap {ratio:.2f}",
        ]
    )
