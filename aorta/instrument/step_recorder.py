"""Collects the marks of a step while it runs, and emits its record line once everything in it has happened.

Issued collectives, stalls, block ranges and auxiliary ranges come in as marks; `records.schema.Step` objects go to
a sink, in order, some steps late (R4). Must not wait for anything inside the loop.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

from aorta.distributed.cuda import is_capturing
from aorta.instrument.compute_ranges import Range
from aorta.instrument.dispatcher import backward_pass
from aorta.instrument.event_clock import EventClock, Mark, on_host
from aorta.instrument.in_flight import InFlight, Waited
from aorta.instrument.open_step import OpenStep, Scalar, UserMarks
from aorta.instrument.recorder import FINISH_GRACE_S, OwnTime, Recorder
from aorta.instrument.step_builder import StepBuilder
from aorta.records.progress_file import WHEN_UNKNOWN, Progress
from aorta.records.schema import Step
from aorta.records.step_line import Name, StepFacts
from aorta.timeline.overlap import Unseen

MAX_STEPS_LATE = 8
"""How many steps may stay unread because a collective has not ended; after that, coverage reports it as missing."""

_CAPTURED = "a CUDA graph was being captured when the step began or ended: only the host's clock says when that was"
_UNNOTED = Progress()


class _Bracket:
    """A range that is noted in `rows` of the step that was running when it began; None: there was none. In `progress`
    it is a phase, where it has the name of one; `restores`: the phase before it continues afterwards.
    """

    __slots__ = ("_before", "_clock", "_name", "_own", "_phase", "_progress", "_restores", "_rows", "_span")

    def __init__(
        self,
        clock: EventClock,
        own: OwnTime,
        rows: list[Range] | None,
        name: str,
        phase: str,
        progress: Progress = _UNNOTED,
        *,
        restores: bool = True,
    ) -> None:
        self._clock, self._own, self._rows, self._name, self._phase = clock, own, rows, name, phase
        self._progress, self._restores = progress, restores

    def __enter__(self) -> None:
        began_ns = time.perf_counter_ns()
        self._before = self._progress.enter(self._name)
        if self._rows is not None:
            self._span = Range(self._name, self._phase, self._clock.mark())
            self._rows.append(self._span)
        self._own.marks_ns += time.perf_counter_ns() - began_ns

    def __exit__(self, kind: type[BaseException] | None, *_how: object) -> None:
        began_ns = time.perf_counter_ns()
        if self._rows is not None:
            self._span.end = self._clock.mark()
        if kind is None and self._restores:  # after an error the phase stays, for whoever asks where it happened
            self._progress.enter(self._before)
        self._own.marks_ns += time.perf_counter_ns() - began_ns


class StepRecorder(Recorder):
    """Records the steps of a rank that runs on a device.

    Args:
        issued_by_backends: identity of each process group -> how many collectives its backend counted (R8).
        sink: receives finished steps in order.

    Attributes:
        on_begin: called when a step begins, on the training thread and stream.
    """

    def __init__(
        self,
        clock: EventClock,
        builder: StepBuilder,
        issued_by_backends: Callable[[], dict[int, int | None]],
        sink: Callable[[Step], None],
        progress: Progress | None = None,
    ) -> None:
        super().__init__(progress)
        self._clock, self._builder = clock, builder
        self._issued_by_backends, self._sink = issued_by_backends, sink
        self._current: OpenStep | None = None
        self._between = False
        self._counted: tuple[dict[int, int | None], tuple[int, int]] = {}, (0, 0)
        # What other threads add to a step must not come behind its reading; native rows have a lock of their own.
        self._lock = threading.Lock()
        self._underway = 0
        self._unread: deque[OpenStep] = deque()
        self.on_begin: Callable[[], None] = lambda: None
        self._watched_passes = 0

    # --- while a step runs -------------------------------------------------------------------------------------------

    def begin(self, facts: StepFacts, *, continues: bool = False) -> None:
        began_ns = time.perf_counter_ns()
        continues = continues and self._between
        if not continues:
            self.own.marks_ns = 0
            self._forget_caller()
            self._discard(OpenStep(facts))
        begun = self._current
        assert begun is not None  # made above, or when the last step ended
        self._clock.new_epoch()
        self.progress.begin_step(facts.global_step)
        self.on_begin()
        self._thread, self._between, self._watched_passes = threading.get_ident(), False, 0
        # A mark would become part of a graph that is being captured: then only the host's clock tells.
        begun.facts, begun.start = facts, self._clock.mark() or time.perf_counter_ns()
        begun.unseen, begun.no_copies, begun.continues = self.unseen, self.no_copies, continues
        begun.issued_before, begun.ahead_before = self._counted if continues else self._issued_so_far()
        begun.kernels, begun.noted = self.kernels, range(issued := self.progress.issued, issued)
        begun.outside, self.outside = self.outside, 0
        self.own.marks_ns += time.perf_counter_ns() - began_ns

    def end(self) -> None:
        began_ns = time.perf_counter_ns()
        done = self._current
        assert done is not None  # begin comes before end
        done.end = self._clock.mark()
        if done.end is None or on_host(done.start) != on_host(done.end):
            done.start, done.end = self._on_host(done.start), self._on_host(done.end)
            done.unseen = Unseen(_CAPTURED, compute=True)
        with self._lock:
            self._current = OpenStep(done.facts)
            self._between = True
        done.issued_after, done.ahead_after = self._counted = self._issued_so_far()
        done.captured, done.noted = self._captured, range(done.noted.start, self.progress.issued)
        self.progress.end_step()
        done.user_marks = self.user_marks.take()
        done.boundary, self.boundary = self.boundary, None
        self._unread.append(done)
        if self.own.counted:
            done.own_ns = {"marks": self.own.marks_ns + time.perf_counter_ns() - began_ns}
        self.own.marks_ns = 0
        # A step that is not read keeps its events and its collectives' tensors alive (R2).
        self.catch_up()

    def leave(self) -> None:
        self._lock, self.user_marks = threading.Lock(), UserMarks()
        self._thread = 0
        self._sink = lambda _step: None
        self.progress.leave()

    def abandon(self) -> None:
        if self._current is None:
            return
        self._forget_caller()
        self._discard()

    def _forget_caller(self) -> None:
        """Drop the caller's ranges of an open step."""
        if self._current is not None and not self._between:
            self.user_marks.take()

    def _discard(self, following: OpenStep | None = None) -> None:
        """Drop what Python code recorded since the last step ended, and count its collectives."""
        with self._lock:
            dropped, self._current, self._between = self._current, following, False
        if dropped is not None:
            self._forget(*dropped.marks())
            self.outside += dropped.outside + len(dropped.collectives)

    def _issued_so_far(self) -> tuple[dict[int, int | None], tuple[int, int]]:
        """Return what each backend has counted, and the range by which that may exceed what is recorded in the steps
        that have ended: a call of another thread is counted while it is underway, and so is what
        was issued since.
        """
        underway, counted = self._underway, self._issued_by_backends()
        assert self._current is not None  # a step begins, or the next one was prepared
        return counted, (-underway, len(self._current.collectives))

    def aux(self, name: str, *, restores: bool = True) -> AbstractContextManager[None]:
        rows = None if self._current is None else self._current.aux
        return _Bracket(self._clock, self.own, rows, name, "aux", self.progress, restores=restores)

    def lacks(self, name: str) -> bool:
        if self._current is None or self._between or threading.get_ident() != self._thread:
            return False
        last = self._current.aux[-1] if self._current.aux else None
        return last is None or last.end is not None or last.block != name

    def pipeline(self, group: str) -> AbstractContextManager[None]:
        rows = None if self._current is None else self._current.pipeline
        return _Bracket(self._clock, self.own, rows, group, "pipeline")

    def computes(self, block: str, phase: str) -> AbstractContextManager[None]:
        rows = None if self._current is None or self.unseen is not None else self._current.compute
        return _Bracket(self._clock, self.own, rows, block, phase)

    def add_underway(self, calls: int) -> None:
        """Note that calls of backends begin, or have returned (-1): meanwhile they may have counted their collectives
        or not.
        """
        with self._lock:
            self._underway += calls

    def on_issue(self, issued: InFlight) -> None:
        with self._lock:
            if self._current is None:
                self.outside += 1
                return
            self._current.collectives.append(issued)
            self._current.unwatched += self._watched_passes == 0 and backward_pass() != -1

    def add_watched(self, passes: int) -> None:
        """Note that backward passes that reached what is watched begin (1) or end (-1); one may run within another, of
        a checkpoint.
        """
        self._watched_passes = max(self._watched_passes + passes, 0)

    def on_stall(self, begin: Mark, end: Mark) -> None:
        with self._lock:
            if self._current is not None:
                self._current.stalls.append((begin, end))
                return
        self._forget(begin, end)

    def on_call(self, begin_ns: int, end_ns: int) -> None:
        """Note a backend's call, on the host's clock; whether it is a stall depends on the cut-off. On another thread
        than the one that trains it holds up no computation.
        """
        with self._lock:
            if self._current is not None and threading.get_ident() == self._thread:
                self._current.calls.append((begin_ns, end_ns))

    def on_wait(self, wait: Waited) -> None:
        """Note that what computes waited for a collective. A wait on the host, on another thread than the one that
        trains, holds up no computation.
        """
        if on_host(wait.begin) and threading.get_ident() != self._thread:
            return
        with self._lock:
            if self._current is not None:
                self._current.waits.append(wait)
                return
        self._forget(wait.begin, wait.end)

    def on_stream_wait(self, begin: Mark, end: Mark, joined: tuple[Name, ...]) -> None:
        """Note that between these marks the compute stream may have waited for a stream of the strategy, and so for the
        collectives that this one had `joined`; the part that coincides with communication is a stall.
        """
        with self._lock:
            if self._current is not None:
                self._current.stream_waits.append((begin, end, joined))
                return
        self._forget(begin, end)

    def on_range(self, opened: Range) -> None:
        if self._current is not None:
            self._current.compute.append(opened)

    def on_backward_tail(self, begin: Mark, end: Mark) -> None:
        """Note marks around the strategy's work between a backward pass's last node and its return.

        DDP waits there on futures in C++, bypassing our work handles; the part that coincides with communication is a
        stall.
        """
        if self._current is None:
            self._forget(begin, end)
            return
        self._current.tails.append((begin, end))
        for issued in self._current.collectives:
            # The training thread continues because they are done; their callbacks may still wait for the GIL.
            if issued.has_completed is not None and issued.has_completed():
                issued.stamp("future", int(end) if on_host(end) else None)

    def note(self, loss: Scalar | None, grad_norm: Scalar | None, lr: float | None = None) -> None:
        step = self._current
        if step is None:
            return
        step.loss, step.grad_norm = loss or step.loss, grad_norm or step.grad_norm
        if lr is not None:
            step.facts = replace(step.facts, lr=lr)

    def _on_host(self, mark: Mark | None) -> int:
        """Return when the host reached a mark, or now where none could be taken."""
        if mark is None or on_host(mark):
            return time.perf_counter_ns() if mark is None else int(mark)
        sent_ns = self._clock.sent_ns(mark)
        self._clock.forget(mark)
        assert sent_ns is not None  # only readings of the host's clock have none
        return sent_ns

    def _forget(self, *marks: Mark | None) -> None:
        for mark in marks:
            self._clock.forget(mark)

    # --- afterwards --------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        self.abandon()
        self._give_up_kernels()
        self._clock.drain()
        # A backend wakes waiting threads before it runs callbacks, so the last ends may still be pending.
        deadline = time.monotonic() + FINISH_GRACE_S
        while self._unread:
            self._write_readable(lambda: time.monotonic() > deadline)
            if self._unread:
                time.sleep(0.001)

    def salvage(self) -> None:
        self.abandon()
        self._give_up_kernels()
        self._write_readable(lambda: True)

    def _give_up_kernels(self) -> None:
        for step in self._unread:
            if step.kernels is not None and not step.kernels.known:
                step.kernels.failed("the run ended in the window")

    def catch_up(self) -> None:
        if is_capturing():
            return
        self._write_readable(lambda: len(self._unread) > MAX_STEPS_LATE)

    def _write_readable(self, late: Callable[[], bool]) -> None:
        began_ns = time.perf_counter_ns()
        while self._unread and self._readable(self._unread[0], late=late()):
            step = self._unread.popleft()
            if step.own_ns is not None:
                step.own_ns["lines"], self.own.lines_ns = self.own.lines_ns, 0
            self._sink(self._builder.line(step))
            self.steps_written += 1
            before_ns, began_ns = began_ns, time.perf_counter_ns()
            self.own.lines_ns += began_ns - before_ns
        self.own.lines_ns += time.perf_counter_ns() - began_ns

    def _readable(self, step: OpenStep, *, late: bool) -> bool:
        """Return whether step, collectives and copies have ended on the device; `late`: without waiting for these."""
        if (step.kernels is not None and not step.kernels.known) or not self._happened(step.end):
            return False
        ended = True
        for issued in step.collectives:  # query all, so that each end is known as early as possible
            ended &= issued.look() and self._happened(issued.end)
        if ended and not on_host(step.end):  # the interceptors have noted those on the host already
            for index in step.noted:
                self.progress.completed(index, WHEN_UNKNOWN)
        ended &= all(copied.end is None or self._happened(copied.end) for copied in step.copies)
        return ended or late

    def _happened(self, mark: Mark | None) -> bool:
        return mark is not None and (on_host(mark) or self._clock.read_ns(mark) is not None)
