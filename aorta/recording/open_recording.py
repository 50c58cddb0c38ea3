"""An open recording of a loop that AORTA did not write: what the loop calls.

Must not change what is trained, or issue a collective.
"""

from __future__ import annotations

import shlex
import sys
import weakref
from contextlib import AbstractContextManager
from contextvars import ContextVar
from multiprocessing.util import Finalize
from pathlib import Path

import torch
from torch import nn

from aorta.command_line import shown_path
from aorta.errors import ConfigError
from aorta.instrument.recorder import Recorder, Scalar
from aorta.profiling.window_recording import StepMarkers
from aorta.recording.calibration import Calibrator
from aorta.recording.loop_profiler import LoopProfiler
from aorta.records.step_line import StepFacts

Number = float | torch.Tensor
without_lines = ContextVar("without_lines", default=False)
"""Whether `aorta record` begins the recording: the optimizer ends its steps, and no call can be advised."""


class Recording:
    """An open recording. Steps cover the time from its beginning to the last call of `step` without gaps.

    Attributes:
        path: the run's folder.
        blocks: names of the modules whose compute is timed.
        watched: these modules and the models, without those compiled in place, which cannot be hooked. The recording
            keeps none of them alive.
    """

    def __init__(
        self,
        path: Path,
        blocks: tuple[str, ...],
        recorder: Recorder,
        first: int,
        warmup: int,
        profiler: LoopProfiler,
        calibrator: Calibrator,
    ) -> None:
        self.path, self.blocks = path, blocks
        self._recorder, self._first, self._warmup, self._profiler = recorder, first, warmup, profiler
        self._calibrator = calibrator
        self._markers = StepMarkers(None)
        self._next = first
        self._is_open, self._without_lines = True, without_lines.get()
        self._started: AbstractContextManager[Recording] | None = None
        """Of `start`; None where a `with` block ends the recording."""
        self._at_exit: Finalize
        self.watched: tuple[weakref.ref[nn.Module], ...] = ()
        self._begin()

    def step(self) -> None:
        """End an optimizer step, and begin the next one. Call it once at the end of every iteration.

        A full disk ends the record, which is logged once and in its footer, and not the loop.
        """
        self._must_be_open("step")
        self._recorder.end()
        self._calibrator.after(self._next)
        with self._recorder.progress.phase("trace"):
            self._profiler.step()
        self._next += 1
        self._begin(continues=True)

    def restart(self) -> None:
        """Begin the current step here: an evaluation or a checkpoint before is no part of it."""
        self._must_be_open("restart")
        self._begin()

    def pause(self) -> AbstractContextManager[None]:
        """Tell the watchdog to wait, for a debugger or a long evaluation: `with recording.pause(): ...`."""
        self._must_be_open("pause")
        return self._recorder.progress.phase("paused")

    def note(self, *, loss: Number | None = None, lr: float | None = None, grad_norm: Number | None = None) -> None:
        """Add values to the current step; call it before `step`. Tensors must hold one element; those on a device are
        copied and read some steps later, without waiting.
        """
        self._must_be_open("note")
        self._recorder.note(_scalar("loss", loss), _scalar("grad_norm", grad_norm), None if lr is None else float(lr))

    def aux(self, name: str) -> AbstractContextManager[None]:
        """Mark work that is neither compute nor communication: `with recording.aux("optimizer"): ...`."""
        self._must_be_open("aux")
        return self._recorder.aux(name)

    def range(self, name: str) -> AbstractContextManager[None]:
        """Name a part of the loop: `with recording.range("tokenize"): ...`, on any thread; ranges may nest.

        It is recorded with the step that ends next, and changes no metric. In traces it is called `range NAME`.
        """
        self._must_be_open("range")
        return self._recorder.user_marks.range(name)

    def unclear(self, why: str) -> None:
        """Record why it is unclear where the current step begins or ends."""
        self._recorder.boundary = self._recorder.boundary or why

    def ended(self, count: int, *, in_place: bool) -> str:
        """Return how many steps were recorded, and the command that reads them, if they are still there."""
        if self._next == self._first:
            why = "call recording.step() at the end of every step"
            if self._without_lines:
                why = "no further optimizer step was seen; inside of torch.compile none is"
            return f"aorta: 0 steps recorded in {shown_path(self.path)}: {why}"
        steps = "1 step" if count == 1 else f"{count} steps"
        if not in_place:
            return f"aorta: {steps} recorded, but {shown_path(self.path)} was removed, renamed or replaced meanwhile"
        return f"aorta: {steps} recorded; aorta report {shlex.quote(shown_path(self.path))}"

    def close(self, error: BaseException | None = None) -> None:
        """End a recording that `aorta.start` began, at the last `step`. A second call does nothing.

        Args:
            error: what ended the loop, for the record; not raised here.

        Raises:
            ConfigError: a `with` block ends this recording.
            RecordWriteError, TracesIncomplete: as at the end of `record`.
        """
        if self._started is None:
            raise ConfigError("recording.close(): only for aorta.start(...); `with aorta.record(...)` ends by itself")
        if self._is_open:
            self._at_exit.cancel()
            trace = None if error is None else error.__traceback__
            self._started.__exit__(None if error is None else type(error), error, trace)

    def _close_at_exit(self) -> None:
        # Set by the interpreter when it has printed what ended the program; at a prompt by any error.
        last = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
        self.close(sys.exc_info()[1] or last)

    def _end(self) -> None:
        self._is_open = False
        self._recorder.abandon()
        self._markers.end()

    def _begin(self, *, continues: bool = False) -> None:
        self._calibrator.before(self._next)
        facts = StepFacts(0, self._next, self._next, None, self._next - self._first < self._warmup)
        self._recorder.begin(facts, continues=continues)
        self._markers.begin(self._next)

    def _must_be_open(self, name: str) -> None:
        if not self._is_open:
            raise ConfigError(f"recording.{name}(): the recording has ended; call it inside `with aorta.record(...)`")


def _scalar(name: str, value: Number | None) -> Scalar | None:
    if value is None:
        return None
    tensor = value if isinstance(value, torch.Tensor) else torch.tensor(float(value))
    if hasattr(tensor, "full_tensor"):
        # Gathering it is a collective, which only the caller may issue.
        raise ConfigError(f"recording.note: {name} is spread over ranks (a DTensor); give {name}.full_tensor()")
    if tensor.numel() != 1:
        raise ConfigError(f"recording.note: {name} has {tensor.numel()} elements, must have one")
    return Scalar(tensor)
