"""Shows rank 0's progress: a bar on a terminal, plain lines otherwise; or the lines of a profiling tutorial.

It gets finished steps, which come some steps late. Must not wait for a device.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from tqdm import tqdm

from aorta.command_line import rounded_time
from aorta.config.schema import Training, Wording
from aorta.records.schema import Step
from aorta.runner.rank_process import EVERY_RANK

_log = logging.getLogger(__name__)


def progress_of(
    training: Training, first: int, stop: int, samples: int, *, shown: bool, alone: bool = False
) -> TutorialProgress:
    """Return what `training.progress` asks for; the other arguments are those of `OverlapProgress`."""
    if training.progress is Wording.tutorial:
        return TutorialProgress(stop, training.log_interval, shown=shown)
    return OverlapProgress(first, stop, training.log_interval, samples, shown=shown, alone=alone)


@contextmanager
def announced(wording: Wording, rank: int) -> Iterator[None]:
    """Log, in the tutorial's wording, every rank's start, and its end if there was no error."""
    if wording is not Wording.tutorial:
        yield
        return
    _log.info("[rank %d] starting worker", rank, extra=EVERY_RANK)
    yield
    _log.info("[rank %d] finished worker", rank, extra=EVERY_RANK)


class TutorialProgress:
    """One line every `interval` steps, on rank 0; takes finished steps in order. Args: last + 1 global step, interval,
    and whether to show it.
    """

    def __init__(self, stop: int, interval: int, *, shown: bool) -> None:
        self._stop, self._interval, self._shown = stop, interval, shown

    def show(self, step: Step) -> None:
        """Show a finished step."""
        number = step.global_step + 1
        if self._shown and number % self._interval == 0:
            loss = "-" if step.loss is None else f"{step.loss:.4f}"
            _log.info("[rank 0] step %d/%d loss=%s", number, self._stop, loss)

    def close(self) -> None:
        """Remove the progress line from the terminal; here, only complete lines were printed."""


class OverlapProgress(TutorialProgress):
    """Args: first and last + 1 global step, how often to print, samples of a step over all ranks, whether this rank
    shows anything at all, and whether it is the only one: then its overlap says nothing.
    """

    def __init__(self, first: int, stop: int, interval: int, samples: int, *, shown: bool, alone: bool) -> None:
        super().__init__(stop, interval, shown=shown)
        self._alone = alone
        self._so_far = _SoFar(stop, samples, alone=alone)
        self._bar: Any = None
        if shown and sys.stderr.isatty():
            self._bar = tqdm(total=stop, initial=first, unit="step", dynamic_ncols=True, file=sys.stderr)

    def show(self, step: Step) -> None:
        """Show a finished step."""
        if not self._shown:
            return
        self._so_far.add(step)
        due = (step.global_step + 1) % self._interval == 0 or step.global_step + 1 == self._stop
        if self._bar is not None:
            self._bar.set_postfix_str(f"{_summary(step, alone=self._alone)}{self._so_far.shares()}", refresh=False)
            self._bar.update(1)  # it draws itself ten times a second at most, with steps per second and the time left
        if due:
            # With a bar the lines would only repeat it; the log file has them anyway.
            level = logging.DEBUG if self._bar is not None else logging.INFO
            line = f"{_summary(step, alone=self._alone)}{self._so_far.shares()}{self._so_far.pace()}"
            _log.log(level, "step %d/%d  %s", step.global_step + 1, self._stop, line)

    def close(self) -> None:
        """Remove the progress line from the terminal."""
        if self._bar is not None:
            self._bar.close()


class _SoFar:
    """What the steps until now amount to; the first one, which pays for the start, counts in no rate."""

    def __init__(self, stop: int, samples: int, *, alone: bool) -> None:
        self._stop, self._samples, self._alone = stop, samples, alone
        self._began_ns, self._ended_ns, self._steps, self._left = 0, 0, 0, 0
        self._by_marks, self._by_kernels = _Hidden(), _Hidden()

    def add(self, step: Step) -> None:
        """Count a step."""
        self._left = self._stop - step.global_step - 1
        self._ended_ns = step.t_end_ns
        if not self._began_ns:
            self._began_ns = step.t_end_ns
            return
        self._steps += 1
        (self._by_kernels if step.measured_by == "kernels" else self._by_marks).add(step)

    def shares(self) -> str:
        """Return the hidden share of all communication and the samples per second, as far as they are known."""
        hidden = "" if self._alone else self._hidden()
        return hidden if self._rate is None else f"{hidden}  {self._rate * self._samples:.0f} samples/s"

    def _hidden(self) -> str:
        """Return the hidden share of steps measured by marks; where these leave it open, by kernels."""
        by_marks, by_kernels = self._by_marks.share(), self._by_kernels.share()
        if by_kernels is not None and (by_marks is None or _TO in by_marks):
            steps = self._by_kernels.steps
            return f" ({by_kernels} in {steps} step{'s' * (steps > 1)} by kernels)"
        return "" if by_marks is None else f" ({by_marks} so far)"

    def pace(self) -> str:
        """Return the steps per second and the time left, which a bar shows by itself."""
        if self._rate is None:
            return ""
        left = f"  {rounded_time(self._left / self._rate)} left" if self._left else ""
        return f"  {self._rate:.3g} steps/s{left}"

    @property
    def _rate(self) -> float | None:
        """Return steps per second."""
        passed_ns = self._ended_ns - self._began_ns
        return self._steps * 1e9 / passed_ns if self._steps and passed_ns > 0 else None


_TO = " to at most "


class _Hidden:
    """How much of the communication of some steps was hidden and exposed, each at least and at most."""

    def __init__(self) -> None:
        self.steps = 0
        self._hidden_ms, self._exposed_ms = (0.0, 0.0), (0.0, 0.0)

    def add(self, step: Step) -> None:
        """Count a step, unless it says nothing of the two."""
        hidden, exposed = _ends(step, "compute_comm_ms"), _ends(step, "exposed_comm_ms")
        if hidden is None or exposed is None:
            return
        self.steps += 1
        self._hidden_ms = self._hidden_ms[0] + hidden[0], self._hidden_ms[1] + hidden[1]
        self._exposed_ms = self._exposed_ms[0] + exposed[0], self._exposed_ms[1] + exposed[1]

    def share(self) -> str | None:
        """Return the hidden share, or between what it is; None where nothing communicated."""
        (low, high), (least, most) = self._hidden_ms, self._exposed_ms
        return _between(low / (low + most), high / (high + least)) if low + most and high + least else None


def _ends(step: Step, name: str) -> tuple[float, float] | None:
    """Return a metric of a step at least and at most; None where it says nothing of it."""
    value = step.overlap[name]
    if value is not None:
        return value, value
    return None if step.bounds is msgspec.UNSET else step.bounds.get(name)


def _between(low: float, high: float) -> str:
    ends = f"{low:.2f}", f"{high:.2f}"
    return ends[0] if ends[0] == ends[1] else _TO.join(ends)


def _summary(step: Step, *, alone: bool) -> str:
    window, ratio = step.overlap["window_ms"], _ends(step, "overlap_ratio")
    by = " by kernels" if step.measured_by == "kernels" else ""
    overlap = "n/a (1 rank)" if alone else "-" if ratio is None else f"{_between(*ratio)}{by}"
    return "  ".join(
        [
            "loss -" if step.loss is None else f"loss {step.loss:.4f}",
            f"step {window:.1f} ms",
            f"comm {step.overlap['comm_ms']:.1f} ms" if step.overlap["comm_ms"] is not None else "comm -",
            f"overlap {overlap}",
        ]
    )
