"""Records the steps of one rank as rows of its ring, and makes lines of many steps at once, unless another process
does.

The interceptor, compiled (`native/ring.hpp`) or in Python, appends collectives, waits and passes of blocks; here steps,
ranges and values are. A killed rank loses no step that has ended: what is in its ring and not in its record is read
later (`aorta.records.salvage`). Must not wait for anything inside the loop.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Final, Protocol

import torch

from aorta.errors import RecordWriteError
from aorta.instrument.event_clock import Mark
from aorta.instrument.row_steps import Span, bits_of
from aorta.instrument.sampling import PASSED, Sampler
from aorta.instrument.user_marks import MOST_PER_STEP, UserMarks
from aorta.records import ring_file as rf
from aorta.records.ring_file import RingFile
from aorta.records.ring_rows import NOWHERE
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
LOOK_EVERY_NS: Final = 1_000_000_000
"""So often it is looked at who makes lines, and whether it is time to, where the ring does not fill before."""
_log = logging.getLogger(__name__)


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
        own_is_counted: compiled code counts AORTA's own time, too, or there is nothing to count.
        steps_lost: how many steps ended and have no line; known at the end.
        last_aux: the auxiliary range of the step that was asked for last.
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
        self.own_is_counted = False
        self.steps_written = self.steps_lost = self.outside = 0
        self.boundary: str | None = None
        self._captured, self._thread = 0, threading.get_ident()
        self._ring, self._interceptor, self._elsewhere = ring, interceptor, elsewhere
        self._begin, self._finish, self._close, self._span, self._append = interceptor.functions()
        self._issued_by_backends, self._sink = issued_by_backends, sink
        self._lines, self._read = deque[Step](), RingSteps(ring)
        self._is_open = self._between = False
        self._counted: tuple[dict[int, int | None], tuple[int, int]] = {}, (0, 0)
        self._before, self._outside = self._counted, 0
        self._step, self._behind = -1, 0
        self.last_aux: Span | None = None
        self._marks_ns = 0  # AORTA's own time in Python, until a step takes it
        self._unread, self._looked_s = 0, time.monotonic()
        self._looked_row, self._looked_ns = 0, time.perf_counter_ns()
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
            self._marks_ns = 0
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
        self._before = self._counted if continues else self._issued_so_far()
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
        self._behind = self._finish()
        issued, ahead_before, ahead = (rf.NOT_COUNTED, 0, 0) if self.passes_over else self._issued()
        self._append_ranges()
        why = flags = 0
        if self.boundary is not None:
            why, self.boundary = self._ring.text(self.boundary), None
        if self.own_is_counted:
            flags = rf.OWN_COUNTED
        more_ns, self._marks_ns = self._marks_ns + self._share_ns(), 0
        outside, self._outside = self._outside, 0
        own_ns, ended_ns = self._close(self._step, flags, why, issued, outside, ahead_before, ahead, more_ns)
        self._closed()
        if self.sampler is not None and self.sampler.every is None:
            self.sampler.took(own_ns, observed=not self.passes_over)
        self._between = True
        self._ended += 1
        self._unread += 1
        self._look(ended_ns)

    def _closed(self) -> None:
        """Note what is known once a step has ended."""

    def _issued_so_far(self) -> tuple[dict[int, int | None], tuple[int, int]]:
        underway = self._interceptor.underway()
        return self._issued_by_backends(), (-underway, self._interceptor.count())

    def _issued(self) -> tuple[int, int, int]:
        """Return how many collectives the backends have counted since the step began, and by how many their counts may
        be ahead of the rows, then and now.
        """
        self._counted = self._issued_so_far()
        (before, ahead_before), (after, ahead) = self._before, self._counted
        issued = 0
        for group, count in after.items():
            base = before.get(group, 0)
            if count is None or base is None:
                issued = rf.NOT_COUNTED
                break
            issued += count - base
        return issued, _packed(ahead_before), _packed(ahead)

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

    def _value(self, which: int, value: float) -> None:
        self._append(rf.VALUE, which, 0, time.perf_counter_ns(), 0, bits_of(value), 0, 0, 0)

    # --- lines -------------------------------------------------------------------------------------------------------

    def _look(self, now_ns: int) -> None:
        """Make lines, or see to it that another process does, where it is time to; seldom, as it costs a step."""
        is_soon = now_ns - self._looked_ns < LOOK_EVERY_NS and self._behind - self._looked_row < self._ring.slots // 8
        if is_soon and (self._unread < MOST or self._elsewhere is not None):
            return
        self._looked_ns, self._looked_row = now_ns, self._behind
        if self._elsewhere is not None:
            if self._must_go_on():
                self._go_on(wait=False)
        elif (
            self._unread >= MOST
            or time.monotonic() - self._looked_s > LOOK_AFTER_S
            or self._ring.count - self._read.next_row > self._ring.slots // 2
        ):
            self.catch_up()

    def _share_ns(self) -> int:
        """Return what a step takes of the time in which lines were made of several."""
        share_ns = self._lines_ns // self._shares
        self._lines_ns, self._shares = self._lines_ns - share_ns, max(self._shares - 1, 1)
        return share_ns

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


def _packed(ahead: tuple[int, int]) -> int:
    return ahead[0] << 32 | ahead[1]
