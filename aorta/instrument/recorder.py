"""Records the steps of one rank as rows of its ring, and makes lines of many steps at once, unless another process
does.

The interceptor, compiled (`native/ring.hpp`) or in Python, appends collectives, waits and passes of blocks; here steps,
ranges and values are. A killed rank loses no step that has ended: what is in its ring and not in its record is read
later (`aorta.records.salvage`). Must not wait for anything inside the loop.
"""

from __future__ import annotations

import logging
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import torch

from aorta.errors import RecordWriteError
from aorta.instrument.event_clock import Mark
from aorta.instrument.sampling import PASSED, Sampler
from aorta.instrument.user_marks import MOST_PER_STEP, UserMarks
from aorta.records import ring_file as rf
from aorta.records.ring_file import RingFile
from aorta.records.ring_steps import MOST, RingSteps
from aorta.records.schema import Step
from aorta.records.step_line import StepFacts
from aorta.records.window_kernels import WindowKernels
from aorta.timeline.overlap import NO_COPIES, NOT_SAMPLED, Unseen

if TYPE_CHECKING:  # its events are part of the steps
    from aorta.instrument.native.native_interceptor import NativeInterceptor
    from aorta.instrument.python_interceptor import PythonInterceptor

FINISH_GRACE_S = 2.0
"""How long to wait for the last steps once the device is idle."""
LOOK_AFTER_S = 5.0
"""After so long lines are made of the steps that there are. Of many together each costs a fraction of one alone, and a
kill loses none."""
ELSEWHERE_WITHIN_S = 10.0
"""A process that has read none of the rows for so long does not make lines of them."""
_PASSED_OVER: Final = Unseen(NOT_SAMPLED, compute=True)
_NOT_COUNTED: Final[tuple[dict[int, int | None], tuple[int, int]]] = {}, (0, 0)
_log = logging.getLogger(__name__)
_bits = struct.Struct("<d").pack
_signed = struct.Struct("<q").unpack


class Elsewhere(Protocol):
    """A record that is lent to another process, which makes the lines.

    Attributes:
        anchor_interval: training steps from one reading of the clocks to the next in the record.
    """

    anchor_interval: int

    def lend(self, ring: RingFile) -> None:
        """Write nothing until it is taken back: the lines follow from a ring that is not read here."""

    def take_back(self, *, wait: bool) -> bool:
        """Return whether the record is this process's again, which goes on behind its last line.

        Args:
            wait: some seconds at most, until the other process has written the lines that it is at.
        """


class Rows(Protocol):
    """The rows of a ring, appended by compiled code or by Python."""

    def end_step(self, index: int, b: int, y: int) -> None:
        """End the row of a step; `y`: the index behind its last row."""

    def time_step(self, index: int, a: int, b: int) -> None:
        """Note when a step began and ended on a device."""


@dataclass(slots=True)
class OwnTime:
    """Wall-clock time of the thread that trains, in nanoseconds, in which AORTA did its own work outside compiled code.

    Attributes:
        marks_ns: since the step began: marks, phases, counts of the backends.
        counted: compiled code counts its part as well, or there is nothing to count.
    """

    marks_ns: int = 0
    counted: bool = False


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


class _Span:
    """A row that opens and ends with a `with` block, and the phase of the rank, where it has the name of one;
    `restores`: the phase before it continues afterwards.
    """

    __slots__ = ("_arguments", "_before", "_index", "_recorder", "_restores", "ended", "name")

    def __init__(self, recorder: Recorder, name: str, *arguments: int, restores: bool = True) -> None:
        self._recorder, self.name, self._arguments, self._restores = recorder, name, arguments, restores
        self.ended = False

    def __enter__(self) -> None:
        recorder, began_ns = self._recorder, time.perf_counter_ns()
        if self._arguments[0] == rf.AUX:
            recorder.last_aux = self
        self._before = recorder.progress.enter(self.name)
        self._index = recorder.begin_span(*self._arguments)
        recorder.own.marks_ns += time.perf_counter_ns() - began_ns

    def __exit__(self, kind: type[BaseException] | None, *_how: object) -> None:
        recorder, began_ns = self._recorder, time.perf_counter_ns()
        recorder.end_span(self._index)
        self.ended = True
        if kind is None and self._restores:  # after an error the phase stays, for whoever asks where it happened
            recorder.progress.enter(self._before)
        recorder.own.marks_ns += time.perf_counter_ns() - began_ns


class _Phase:
    """The same in a step that is not observed: a phase, and no row."""

    __slots__ = ("_before", "_recorder", "_restores", "ended", "name")

    def __init__(self, recorder: Recorder, name: str, *, restores: bool) -> None:
        self._recorder, self.name, self._restores, self.ended = recorder, name, restores, False

    def __enter__(self) -> None:
        began_ns, recorder = time.perf_counter_ns(), self._recorder
        recorder.last_aux = self
        self._before = recorder.progress.enter(self.name)
        recorder.own.marks_ns += time.perf_counter_ns() - began_ns

    def __exit__(self, kind: type[BaseException] | None, *_how: object) -> None:
        self.ended = True
        if kind is None and self._restores:
            began_ns, recorder = time.perf_counter_ns(), self._recorder
            recorder.progress.enter(self._before)
            recorder.own.marks_ns += time.perf_counter_ns() - began_ns


class Recorder:
    """Records the steps of one rank on a CPU; `DeviceRecorder` is derived from it.

    Args:
        interceptor: of the collectives; one that is not open where nothing is looked at.
        issued_by_backends: identity of each process group -> how many collectives its backend counted (R8).
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
        own: AORTA's own time, until a step takes it.
        steps_lost: how many steps ended and have no line; known at the end.
        last_aux: the auxiliary range of the step that began last.
    """

    def __init__(
        self,
        ring: RingFile,
        interceptor: NativeInterceptor | PythonInterceptor,
        issued_by_backends: Callable[[], dict[int, int | None]],
        sink: Callable[[Step], None],
        elsewhere: Elsewhere | None = None,
    ) -> None:
        self.progress = ring.progress
        self.unseen: Unseen | None = None
        self.sampler: Sampler | None = None
        self.passes_over = False
        self.no_copies: str | None = NO_COPIES
        self.user_marks = UserMarks()
        self.kernels: WindowKernels | None = None
        self.own = OwnTime()
        self.steps_written = self.steps_lost = self.outside = 0
        self.boundary: str | None = None
        self._captured, self._thread = 0, threading.get_ident()
        self._ring, self._interceptor, self._elsewhere = ring, interceptor, elsewhere
        self.rows: Rows = interceptor.rows
        self.begin_span: Callable[..., int]
        self.end_span: Callable[[int], None]
        self.begin_span, self.end_span, self._append = interceptor.functions()
        self._end_step = self.rows.end_step
        self._issued_by_backends, self._sink = issued_by_backends, sink
        self._lines, self._read = deque[Step](), RingSteps(ring)
        self._is_open = self._between = False
        self._counted: tuple[dict[int, int | None], tuple[int, int]] = {}, (0, 0)
        self._before, self._outside = self._counted, 0
        self._step, self._behind = -1, 0
        self.last_aux: _Span | _Phase | None = None
        self._unread, self._looked_s = 0, time.monotonic()
        self._ended, self._seen_read = 0, -1
        if elsewhere is None:
            ring.owner = os.getpid()
        self._lines_ns, self._shares = 0, 1
        self._has_stopped = False

    # --- while a step runs -------------------------------------------------------------------------------------------

    @contextmanager
    def step(self, facts: StepFacts) -> Iterator[None]:
        """Record one iteration, a `with` block. A step that fails is not recorded."""
        self.begin(facts)
        try:
            yield
        except BaseException:
            self.abandon()
            raise
        self.end()

    def begin(self, facts: StepFacts, *, continues: bool = False) -> None:
        """Begin a step on the calling thread; one that was open is discarded.

        Args:
            continues: what was issued since the last step ended is part of this one, although it began before it.
                Otherwise it is part of none, and only counted.
        """
        began_ns = time.perf_counter_ns()
        continues = continues and self._between
        if not continues:
            self.own.marks_ns = 0
            self._forget_caller()
        self.progress.begin_step(facts.global_step)
        drawn, came_from_passed = self._draw(facts), self.passes_over
        self.passes_over = drawn == PASSED
        # What was issued behind a step that was passed over is not known.
        continues = continues and not (came_from_passed and not self.passes_over)
        dropped, first = self._interceptor.begin(continues=continues, observed=not self.passes_over)
        self.outside += dropped
        self._thread, self._is_open, self._between, self.last_aux = threading.get_ident(), True, False, None
        at_ns, numbers = self._moment_ns(), facts.epoch << 32 | facts.step
        if continues:
            first, self._before = self._behind, self._counted
        elif not self.passes_over:
            self._before = self._issued_so_far()
        unseen, flags = self.unseen, rf.STEP_PHASES.index(facts.phase) << rf.PHASE_SHIFT
        if self.passes_over:
            unseen, flags = _PASSED_OVER, flags | rf.PASSED_OVER
        flags |= (
            facts.warmup * rf.WARMUP | continues * rf.CONTINUES | (unseen is not None and unseen.compute) * rf.BLIND
        )
        why = 0 if unseen is None else self._ring.text(unseen.reason)
        self._step = self._append(rf.STEP, flags, why, at_ns, 0, facts.global_step, 0, first, numbers)
        if facts.lr is not None:
            self._value(rf.LR, facts.lr)
        if drawn is not None and not self.passes_over:
            self._append(rf.NOTE, rf.DRAWN, 0, drawn, 0, 0, 0, 0, self._step)
        self._outside, self.outside = self.outside, 0
        self.own.marks_ns += time.perf_counter_ns() - began_ns

    def _draw(self, facts: StepFacts) -> int | None:
        """Return what `Sampler.draw` says of a step; None where it is not asked."""
        if self.sampler is None or facts.phase != "train":
            return None
        return self.sampler.draw(facts.global_step, always=self.kernels is not None)

    def end(self) -> None:
        """End the open step. What is issued from now on is part of the next one, where that continues it."""
        began_ns = time.perf_counter_ns()
        self._behind, compiled_ns = self._interceptor.end()
        self._counted = _NOT_COUNTED if self.passes_over else self._issued_so_far()
        (before, ahead_before), (after, ahead) = self._before, self._counted
        self.progress.end_step()
        self._append_ranges()
        issued: int | None = None if self.passes_over else 0
        for group, count in after.items():
            base = before.get(group, 0)
            issued = None if count is None or base is None or issued is None else issued + count - base
        share_ns = self._lines_ns // self._shares
        self._lines_ns, self._shares = self._lines_ns - share_ns, max(self._shares - 1, 1)
        why, self.boundary = 0 if self.boundary is None else self._ring.text(self.boundary), None
        own_ns = sum(compiled_ns) + share_ns + self.own.marks_ns + time.perf_counter_ns() - began_ns
        self._append(
            rf.SUMMARY,
            rf.OWN_COUNTED if self.own.counted else 0,
            why,
            own_ns,
            self._step,
            rf.NOT_COUNTED if issued is None else issued,
            self._outside,
            _packed(ahead_before),
            _packed(ahead),
        )
        self._close_step(began_ns)
        if self.sampler is not None:
            self.sampler.took(own_ns, observed=not self.passes_over)
        self._between, self._outside, self.own.marks_ns = True, 0, 0
        self._ended += 1
        self._unread += 1
        if self._elsewhere is not None:
            if self._must_go_on():
                self._go_on(wait=False)
        elif (
            self._unread >= MOST
            or time.monotonic() - self._looked_s > LOOK_AFTER_S
            or self._ring.count - self._read.next_row > self._ring.slots // 2
        ):
            self.catch_up()

    def _moment_ns(self) -> int:
        """Return when a step begins."""
        return time.perf_counter_ns()

    def _close_step(self, ended_ns: int) -> None:
        """Note that the step has ended, whose last row stands."""
        self._end_step(self._step, ended_ns, self._behind)

    def leave(self) -> None:
        """In a forked child: record nothing; compiled code appends no rows there."""
        self.user_marks, self._has_stopped = UserMarks(), True
        self._sink = lambda _step: None
        self._lines.clear()
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

    def _issued_so_far(self) -> tuple[dict[int, int | None], tuple[int, int]]:
        underway = self._interceptor.underway()
        return self._issued_by_backends(), (-underway, self._interceptor.count())

    def _append_ranges(self) -> None:
        marks = self.user_marks.take()
        if marks is None:
            return
        text = self._ring.text
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
        if self.passes_over:
            return _Phase(self, name, restores=restores)
        return _Span(self, name, rf.AUX, self._ring.text(name), restores=restores)

    def lacks(self, name: str) -> bool:
        """Return whether the calling thread is the one that trains, within a step, and in no auxiliary range `name`."""
        if not self._is_open or self._between or threading.get_ident() != self._thread:
            return False
        last = self.last_aux
        return last is None or last.ended or last.name != name

    def pipeline(self, group: str) -> AbstractContextManager[None]:
        """Return a `with` block in which the stages of a pipeline work on a step; what is waited for in their process
        group is a bubble.
        """
        return nullcontext() if self.passes_over else _Span(self, group, rf.PIPELINE, self._ring.text(group))

    def computes(self, block: str, phase: str) -> AbstractContextManager[None]:
        """Return a `with` block in which a block computes. Steps that are not observed have no such ranges."""
        if self.unseen is not None or self.passes_over:  # with the instrument off nothing is recorded
            return nullcontext()
        return _Span(self, block, rf.COMPUTE, self._ring.text(block), self._ring.text(phase))

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

    def _value(self, which: int, value: float) -> None:
        self._append(rf.VALUE, which, 0, time.perf_counter_ns(), 0, bits_of(value), 0, 0, 0)

    # --- lines -------------------------------------------------------------------------------------------------------

    def _must_go_on(self) -> bool:
        """Return whether the process that should make lines does not: it gave up, or is dead, stopped or too slow."""
        ring, now_s = self._ring, time.monotonic()
        if ring.owner == rf.GIVEN_UP or ring.count - ring.read > ring.slots // 2:
            return True
        if now_s - self._looked_s < ELSEWHERE_WITHIN_S:
            return False
        self._looked_s, before, self._seen_read = now_s, self._seen_read, ring.read
        return before == ring.read

    def _go_on(self, *, wait: bool) -> None:
        """Make lines here from now on, if the other process is not at it."""
        elsewhere, ring = self._elsewhere, self._ring
        if elsewhere is None or self._has_stopped:
            return
        try:
            if not elsewhere.take_back(wait=wait):
                return
        except RecordWriteError as error:  # the program goes on, and what was recorded stays in the ring
            self._has_stopped = True
            _log.error("no further step is in the record: %s", error)
            return
        self._elsewhere = None
        self._unread = self._ended - ring.written[0]
        self._read = RingSteps(ring, behind_ns=ring.written[1])
        _log.debug("lines are made in this process from row %d on: %d steps", ring.read, self._unread)

    # --- afterwards --------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Wait for the device and write every remaining step. Only after the last step."""
        self.abandon()
        self._go_on(wait=True)
        # A backend wakes waiting threads before it runs callbacks, so the last ends may still be pending.
        deadline = time.monotonic() + FINISH_GRACE_S
        while self._unread and time.monotonic() < deadline:
            self._write(late=False)
            if self._unread:
                time.sleep(0.001)
        self.salvage()

    def salvage(self) -> None:
        """Write the remaining steps that can be read; after an error, when the device may never answer."""
        self.abandon()
        self._go_on(wait=True)
        self._write(late=True)
        if self._unread and not self._has_stopped and self._elsewhere is None:
            _log.warning(
                "%d steps are not in the record: their rows were overwritten before they were read, or a device never "
                "reached their end",
                self._unread,
            )
            self.steps_lost, self._unread = self._unread, 0

    @property
    def is_whole(self) -> bool:
        """Whether every step that has ended was written."""
        return not (self._unread or self._lines or self._has_stopped or self._elsewhere)

    def catch_up(self) -> None:
        """Write the steps that are complete. Nothing while a graph is being captured: to ask for an event would end the
        capture with an error.
        """
        self._looked_s = time.monotonic()
        self._write(late=False)

    def _settle(self) -> None:
        """Store in rows what was not known when they were appended."""

    def _write(self, *, late: bool) -> None:
        if self._has_stopped or self._elsewhere is not None:
            return
        self._settle()
        began_ns = time.perf_counter_ns()
        try:
            lines = self._read.take(late=late)
        except Exception:  # noqa: BLE001  the program goes on, and what was recorded stays in the ring
            self._has_stopped = True
            _log.exception("%d steps are not in the record: no lines can be made of their rows", self._unread)
            return
        self._lines += lines
        self._unread -= len(lines)
        try:
            while self._lines:
                self._sink(self._lines.popleft())
                self.steps_written += 1
        finally:
            self._lines_ns += time.perf_counter_ns() - began_ns
            self._shares = max(len(lines), 1)
        self._ring.note_written(self._read.next_row)


def bits_of(value: float) -> int:
    """Return the bits of a float, as rows have them."""
    (bits,) = _signed(_bits(value))
    return int(bits)


def _packed(ahead: tuple[int, int]) -> int:
    return ahead[0] << 32 | ahead[1]
