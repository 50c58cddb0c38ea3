"""Records the steps of one rank on a device as rows of its ring.

Rows say when the host recorded the marks of a span. When the device passed them is asked at the end of each step,
without waiting for it, and stored in place; a step is complete once the device has passed its end (R4). Must not wait
for anything inside the loop, or ask for an event while a graph is being captured: that would end the capture with an
error.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from aorta.distributed.cuda import is_capturing
from aorta.instrument.event_clock import HostClock, Mark, on_host
from aorta.instrument.recorder import Counts, Recorder, Scalar, bits_of
from aorta.instrument.ring_rows import RingRows
from aorta.records import ring_file as rf
from aorta.records.ring_file import RingFile
from aorta.records.schema import Step
from aorta.records.step_line import StepFacts

if TYPE_CHECKING:  # its events are part of the steps
    from aorta.instrument.native.native_interceptor import NativeInterceptor
    from aorta.instrument.python_interceptor import PythonInterceptor

_CAPTURED = "a CUDA graph was being captured when the step began or ended: only the host's clock says when that was"


class _Passing(NamedTuple):
    """A step that the host has ended and the device may not have: its row, its marks, and what is on the device."""

    row: int
    start: Mark
    end: Mark
    scalars: dict[int, Scalar]


class DeviceRecorder(Recorder):
    """Records the steps of one rank; arguments as of `Recorder`. `clock`: the device's."""

    def __init__(
        self,
        ring: RingFile,
        interceptor: NativeInterceptor | PythonInterceptor,
        clock: HostClock,
        counts: Counts,
        sink: Callable[[Step], None],
    ) -> None:
        super().__init__(ring, interceptor, counts, sink)
        self._clock = clock
        self._marks = interceptor.marks
        self._rows: RingRows = interceptor.rows
        self._start: Mark = None
        self._scalars: dict[int, Scalar] = {}
        self._passing = deque[_Passing]()

    # --- while a step runs -------------------------------------------------------------------------------------------

    def begin(self, facts: StepFacts, *, continues: bool = False) -> None:
        began_ns = time.perf_counter_ns()
        if not (continues and self._between):
            self._discard()
        self._clock.new_epoch()
        spent_ns = time.perf_counter_ns() - began_ns
        super().begin(facts, continues=continues)
        began_ns = time.perf_counter_ns()
        # A mark would become part of a graph that is being captured: then only the host's clock tells.
        self._start = self._clock.mark() or began_ns
        if self.no_copies is not None and not self.passes_over:
            self._note(rf.NO_COPIES, self._step, text=self._ring.text(self.no_copies))
        if self.kernels is not None:
            self._read.kernels[self._step] = self.kernels
        self._marks_ns += spent_ns + time.perf_counter_ns() - began_ns

    def end(self) -> None:
        began_ns = time.perf_counter_ns()
        self._end_mark = self._clock.mark()
        self._marks_ns += time.perf_counter_ns() - began_ns
        super().end()
        self._settle()

    def _step_ended(self, now_ns: int, behind: int) -> None:
        start, end = self._start, self._end_mark
        if end is None or on_host(start):
            start, end = self._on_host(start), self._on_host(end)
            self._note(rf.UNSEEN, self._step, text=self._ring.text(_CAPTURED))
        if self._captured:
            self._note(rf.CAPTURED, self._step, many=self._captured)
        self._passing.append(_Passing(self._step, start, end, self._scalars))
        self._start, self._scalars = None, {}
        super()._step_ended(now_ns, behind)

    def _on_host(self, mark: Mark | None) -> int:
        """Return when the host reached a mark, or now where none could be taken."""
        if mark is None or on_host(mark):
            return time.perf_counter_ns() if mark is None else int(mark)
        sent_ns = self._clock.sent_ns(mark)
        self._clock.forget(mark)
        assert sent_ns is not None  # only readings of the host's clock have none
        return sent_ns

    def _note(self, what: int, step: int, *, text: int = 0, many: int = 0, value: int = 0) -> None:
        self._append(rf.NOTE, what, text, many, 0, value, 0, 0, step)

    def on_stall(self, begin: Mark | None, end: Mark | None) -> None:
        if self._marks is not None and self._is_open and not self.passes_over:
            self._marks.append(rf.STALL, begin or 0, end or 0)
            return
        for mark in (begin, end):
            self._clock.forget(mark)

    def note(self, loss: Scalar | None, grad_norm: Scalar | None, lr: float | None = None) -> None:
        if not self._is_open:
            return
        for which, scalar in ((rf.LOSS, loss), (rf.GRAD_NORM, grad_norm)):
            if scalar is not None:
                self._scalars[which] = scalar
        super().note(None, None, lr)

    def abandon(self) -> None:
        self._discard()
        super().abandon()

    def _discard(self) -> None:
        """Drop what was taken for a step that is not recorded."""
        start, self._start, self._scalars = self._start, None, {}
        self._clock.forget(start)

    def leave(self) -> None:
        super().leave()
        self._passing.clear()

    # --- afterwards --------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Store what the device has passed."""
        if self._has_stopped or is_capturing():
            return
        began_ns = time.perf_counter_ns()
        if self._marks is not None:
            self._marks.settle()
        while self._passing:
            row, start, end, scalars = self._passing[0]
            start_ns, end_ns = self._clock.read_ns(start), self._clock.read_ns(end)
            if start_ns is None or end_ns is None:
                break
            self._passing.popleft()
            self._clock.release(start)
            self._clock.release(end)
            for which, scalar in scalars.items():
                self._note(which, row, value=bits_of(scalar.read()))
            self._rows.time_step(row, start_ns, end_ns)
        self._lines_ns += time.perf_counter_ns() - began_ns

    def finish(self) -> None:
        self.abandon()
        self._give_up_kernels()
        self._clock.drain()
        super().finish()

    def salvage(self) -> None:
        self._give_up_kernels()
        super().salvage()

    def catch_up(self) -> None:
        if not is_capturing():
            super().catch_up()

    def _give_up_kernels(self) -> None:
        for kernels in self._read.kernels.values():
            if not kernels.known:
                kernels.failed("the run ended in the window")
