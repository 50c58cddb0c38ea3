"""Records the steps of one rank as rows of its ring.

The interceptor, compiled (`native/ring.hpp`) or in Python, appends collectives, waits and passes of blocks; here steps,
ranges and values are. A training step that is not drawn (`sampling`) is passed over, which has a path of its own, as
short as can be. A killed rank loses no step that has ended: what is in its ring and not in its record is read later
(`aorta.records.ring_record`). Must not wait for anything inside the loop.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, TypeAlias

import torch

from aorta.instrument.event_clock import Mark
from aorta.instrument.ring_lines import LentRecord, RingLines
from aorta.instrument.ring_rows import NOWHERE
from aorta.instrument.sampling import PASSED, Sampler
from aorta.instrument.user_marks import MOST_PER_STEP, UserMarks
from aorta.records import ring_file as rf
from aorta.records.ring_file import RingFile
from aorta.records.schema import Step
from aorta.records.step_line import StepFacts
from aorta.records.window_kernels import WindowKernels
from aorta.timeline.overlap import NO_COPIES, NOT_SAMPLED, Unseen

if TYPE_CHECKING:  # its events are part of the steps
    from aorta.instrument.native.native_interceptor import NativeInterceptor
    from aorta.instrument.python_interceptor import PythonInterceptor

_double: Final = struct.Struct("<d")
_signed: Final = struct.Struct("<q")


def bits_of(value: float) -> int:
    """Return the bits of a float, as rows have them."""
    (bits,) = _signed.unpack(_double.pack(value))
    return int(bits)


class StepSpan(AbstractContextManager[None], Protocol):
    """A row that opens and ends with a `with` block in steps that are observed, and the phase of the rank, where it has
    the name of one.
    """

    name: str
    is_open: bool


Counts: TypeAlias = Callable[[], dict[int, int | None]]
"""Returns how many collectives the backends of each process group have counted, by its identity; None: not known."""


class StepFunctions(NamedTuple):
    """What is called at every step, and in it; of compiled code C functions.

    Attributes:
        begin: takes when AORTA's own work began, flags of the row, the number of why it is not observed, the global
            step, epoch << 32 | step, the first row of the step or `NOWHERE`, its learning rate or None, and as one of
            how many it was drawn, or None. Returns the index of its row, and how many collectives since the last step
            are part of none.
        end: takes when AORTA's own work began, flags of the SUMMARY of the step, the number of why its boundary is
            unclear, how many collectives were issued outside of steps, AORTA's own time beside what is counted, and
            None or what appends the caller's ranges. Returns AORTA's own time, when the step ended, and the index
            behind its rows. What is recorded from now on is part of the next one, where that continues it.
        span: takes a kind, the number of a name, the name, `x`, and whether the phase before continues afterwards.
        value: takes which value of the step it is, and the value; returns the index of its row.
        append: takes the fields of any row; returns its index.
    """

    begin: Callable[..., tuple[int, int]]
    end: Callable[[int, int, int, int, int, Callable[[], None] | None], tuple[int, int, int]]
    span: Callable[..., StepSpan]
    value: Callable[[int, float], int]
    append: Callable[..., int]


class Scalar:
    """The value of a one-element tensor, as it is now.

    On CUDA/HIP it is copied to page-locked memory in the current stream; `read` must be called only once the stream is
    known to have passed that point (the recorder of a device reads it once the step has ended there).
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._copy: torch.Tensor | None = None
        if tensor.is_cpu:
            self._value = float(tensor.item())
        else:
            self._copy = torch.empty_like(tensor.detach(), device="cpu", pin_memory=True)
            self._copy.copy_(tensor.detach(), non_blocking=True)

    def read(self) -> float:
        return self._value if self._copy is None else float(self._copy)


class RecordedStep(AbstractContextManager[None]):
    """One iteration, a `with` block. A step that fails is not recorded."""

    __slots__ = ("_facts", "_recorder")

    def __init__(self, recorder: Recorder, facts: StepFacts) -> None:
        self._recorder, self._facts = recorder, facts

    def __enter__(self) -> None:
        self._recorder.begin(self._facts)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._recorder.end()
        else:
            self._recorder.abandon()


class Recorder(RingLines):
    """Records the steps of one rank on a CPU; `DeviceRecorder` is derived from it.

    Args:
        interceptor: of the collectives; one that is not open where nothing is looked at.
        counts: of the backends (R8).
        sink: receives finished steps in order.
        elsewhere: the record, where another process may make the lines; None: this one does.

    Attributes:
        unseen: why steps that begin now are not observed; None when they are.
        sampler: chooses the training steps that are observed; None: all are.
        passes_over: the newest step is not observed, as it was not drawn.
        no_copies: why the copies of steps that begin now are not looked at; None when they are.
        kernels: of the window that steps which begin now are part of; None: of none. Its steps are read once it knows
            them, and so are those behind them.
        boundary: why it is unclear where the step that ends next begins or ends; None: it is not.
        outside: how many collectives were issued since the last step ended that are part of none.
        own_is_counted: compiled code counts AORTA's own time, too, or there is nothing to count.
        last_aux: the auxiliary range of the step that was asked for last.
    """

    def __init__(
        self,
        ring: RingFile,
        interceptor: NativeInterceptor | PythonInterceptor,
        counts: Counts,
        sink: Callable[[Step], None],
        elsewhere: LentRecord | None = None,
    ) -> None:
        super().__init__(ring, sink, elsewhere)
        self.progress = ring.progress
        self.unseen: Unseen | None = None
        self.sampler: Sampler | None = None
        self.passes_over = False
        self.no_copies: str | None = NO_COPIES
        self.user_marks = UserMarks()
        self.kernels: WindowKernels | None = None
        self.own_is_counted = False
        self.outside = 0
        self.boundary: str | None = None
        self._captured, self._thread = 0, threading.get_ident()
        self._interceptor = interceptor
        self._begin, self._end, self._span, self._value, self._append = interceptor.functions(counts)
        self._is_open = self._between = False
        self._step, self._behind, self._outside = -1, 0, 0
        self.last_aux: StepSpan | None = None
        self._marks_ns = 0  # AORTA's own time in Python, until a step takes it

    def step(self, facts: StepFacts) -> RecordedStep:
        """Return a `with` block that records one iteration."""
        return RecordedStep(self, facts)

    def begin(self, facts: StepFacts, *, continues: bool = False) -> None:
        """Begin a step on the calling thread; one that was open is discarded.

        Args:
            continues: what was issued since the last step ended is part of this one, although it began before it.
                Otherwise it is part of none, and only counted.
        """
        began_ns = time.perf_counter_ns()
        continues = continues and self._between
        if not continues:
            self._marks_ns = 0
            if self._is_open and not self._between:
                self._forget_caller()
        drawn = None
        if self.sampler is not None and facts.phase == "train":
            drawn = self.sampler.draw(facts.global_step, always=self.kernels is not None)
        begin = self._pass_over if drawn == PASSED else self._observe
        self._step, dropped = begin(began_ns, facts, drawn, continues=continues)
        self._outside, self.outside = self.outside + dropped, 0
        self._thread, self._is_open, self._between, self.last_aux = threading.get_ident(), True, False, None

    def _observe(self, began_ns: int, facts: StepFacts, drawn: int | None, *, continues: bool) -> tuple[int, int]:
        """Begin a step whose collectives, passes, waits and spans have rows, and whose coverage is known."""
        if self.passes_over:  # what was issued behind a step that was passed over is not known
            continues = self.passes_over = False
        flags = rf.STEP_PHASES.index(facts.phase) << rf.PHASE_SHIFT | facts.warmup * rf.WARMUP
        why, first = 0, NOWHERE
        if continues:
            flags, first = flags | rf.CONTINUES, self._behind
        if self.unseen is not None:
            flags, why = flags | self.unseen.compute * rf.BLIND, self._ring.text(self.unseen.reason)
        numbers = facts.epoch << 32 | facts.step
        return self._begin(began_ns, flags, why, facts.global_step, numbers, first, facts.lr, drawn)

    def _pass_over(self, began_ns: int, facts: StepFacts, _drawn: object, *, continues: bool) -> tuple[int, int]:
        """Begin a training step that was not drawn: it has its length, values and named ranges; its collectives and
        phases are noted for who watches. There are many of these, and they decide what being always on costs.
        """
        self.passes_over = True
        flags = rf.PASSED_OVER | rf.BLIND | facts.warmup * rf.WARMUP | continues * rf.CONTINUES
        why, numbers = self._ring.text(NOT_SAMPLED), facts.epoch << 32 | facts.step
        first = self._behind if continues else NOWHERE
        return self._begin(began_ns, flags, why, facts.global_step, numbers, first, facts.lr, None)

    def end(self) -> None:
        """End the open step. What is issued from now on is part of the next one, where that continues it."""
        began_ns, why, flags = time.perf_counter_ns(), 0, 0
        if self.boundary is not None:
            why, self.boundary = self._ring.text(self.boundary), None
        if self.own_is_counted:
            flags = rf.OWN_COUNTED
        more_ns, self._marks_ns = self._marks_ns, 0
        if self._lines_ns:
            more_ns += self._share_ns()
        outside, self._outside = self._outside, 0
        ranges = self._append_ranges if self.user_marks.has_ranges else None
        own_ns, ended_ns, self._behind = self._end(began_ns, flags, why, outside, more_ns, ranges)
        if self.sampler is not None and self.sampler.every is None:
            self.sampler.took(own_ns, observed=not self.passes_over)
        self._between = True
        self._step_ended(ended_ns, self._behind)

    def leave(self) -> None:
        """In a forked child: record nothing; compiled code appends no rows there."""
        self.user_marks = UserMarks()
        self._stop()
        self.progress.leave()

    def abandon(self) -> None:
        """Discard the open step, if any, and record nothing until the next one begins."""
        if not self._is_open:
            return
        self._forget_caller()
        self._is_open = self._between = False
        self.outside += self._interceptor.abandon()

    def _forget_caller(self) -> None:
        """Drop the caller's ranges of an open step, and count the collectives before it again."""
        if self._is_open and not self._between:
            self.user_marks.take()
            self.outside += self._outside
            self._outside = 0

    def _append_ranges(self) -> None:
        marks, text = self.user_marks.take(), self._ring.text
        for name, thread, depth, start_ns, end_ns, error in marks.ranges:
            why = 0 if error is None else text(error)
            self._append(rf.RANGE, 0, text(name), start_ns, end_ns, thread, depth, why, self._step)
        if marks.left_out:
            self._append(rf.LEFT_OUT, 0, 0, marks.left_out, MOST_PER_STEP, 0, 0, 0, self._step)

    def on_captured(self) -> None:
        """Note that a collective became part of a CUDA graph: from now on it may run whenever that is replayed."""
        self._captured += 1

    def aux(self, name: str, *, restores: bool = True) -> AbstractContextManager[None]:
        """Return a `with` block of work that is neither compute nor communication.

        Args:
            name: of the range; the rank is in the phase of that name, if it is one of `PHASES`.
            restores: the phase before it continues afterwards; False where another begins at once, which saves a note.
        """
        span = self.last_aux = self._span(rf.AUX, self._ring.text(name), name, 0, restores)
        return span

    def lacks(self, name: str) -> bool:
        """Return whether the calling thread is the one that trains, within a step, and in no auxiliary range `name`."""
        if not self._is_open or self._between or threading.get_ident() != self._thread:
            return False
        last = self.last_aux
        return last is None or not last.is_open or last.name != name

    def pipeline(self, group: str) -> AbstractContextManager[None]:
        """Return a `with` block in which the stages of a pipeline work on a step; what is waited for in their process
        group is a bubble.
        """
        return self._span(rf.PIPELINE, self._ring.text(group), group, 0, True)

    def computes(self, block: str, phase: str) -> AbstractContextManager[None]:
        """Return a `with` block in which a block computes. Steps that are not observed have no such ranges."""
        if self.unseen is not None:  # with the instrument off nothing is recorded
            return nullcontext()
        return self._span(rf.COMPUTE, self._ring.text(block), block, self._ring.text(phase), True)

    def on_stall(self, begin: Mark, end: Mark) -> None:
        """Note that the caller was waiting for a collective between these marks."""
        self._append(rf.STALL, 0, 0, begin, end, 0, 0, 0, 0)

    def note(self, loss: Scalar | None, grad_norm: Scalar | None, lr: float | None = None) -> None:
        """Record scalars of the current step, read when the step is, and its learning rate; None keeps the previous
        value.
        """
        for which, scalar in ((rf.LOSS, loss), (rf.GRAD_NORM, grad_norm)):
            if scalar is not None:
                self._value(which, scalar.read())
        if lr is not None:
            self._value(rf.LR, lr)

    def finish(self) -> None:
        """Wait for the device and write every remaining step. Only after the last step."""
        self.abandon()
        super().finish()

    def salvage(self) -> None:
        self.abandon()
        super().salvage()
