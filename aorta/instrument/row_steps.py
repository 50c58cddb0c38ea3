"""Steps, their collectives' ends and waits, spans and values as rows of a ring, in Python: as `native/loop.hpp` and
`native/step.hpp` append them in compiled code.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

from aorta.instrument.recorder import Counts, StepFunctions, bits_of
from aorta.instrument.ring_rows import NOWHERE, RingRows
from aorta.instrument.row_ranges import RowRanges
from aorta.instrument.timed_work import InFlight
from aorta.records import ring_file as rf
from aorta.records.ring_file import RingFile
from aorta.records.schema import EndSource


class RowSteps:
    """The rows of one rank's steps.

    Args:
        on_device: the rows of steps are all there is, whose ends the device's clock tells later.

    Attributes:
        rows: of the ring.
        is_open: a step is observed: its collectives and spans have rows.
        own_ns: AORTA's own time since the step began.
        issued: collectives since the last step ended.
        watched_passes: backward passes that run and have reached what is watched.
        ranges: passes of blocks.
        lock: rows are appended under it, so that they stand in the order of numbers, and in one step.
    """

    def __init__(self, ring: RingFile, *, on_device: bool = False) -> None:
        self.rows, self.progress, self._on_device = RingRows(ring), ring.progress, on_device
        self.lock = threading.RLock()
        self.issued: list[InFlight] = []
        self.is_open = False
        self._thread = self._underway = self.watched_passes = 0
        self.ranges = RowRanges(ring, self)
        self.own_ns, self._index, self._observed = 0, NOWHERE, False
        self._counts: Counts = dict
        self._before: tuple[dict[int, int | None], int] = {}, 0
        self._after = self._before

    def functions(self, counts: Counts) -> StepFunctions:
        """As `NativeInterceptor.functions`."""
        self._counts = counts
        return StepFunctions(self.begin, self.end, partial(_RowSpan, self), self.value, self.rows.append)

    def begin(
        self,
        began_ns: int,
        flags: int,
        why: int,
        step: int,
        numbers: int,
        first: int,
        lr: float | None,
        drawn: int | None,
    ) -> tuple[int, int]:
        """As `StepFunctions.begin`."""
        observed = not flags & rf.PASSED_OVER
        self.ranges.begin(observed=observed)
        with self.lock:
            self.is_open, self._thread = observed and not self._on_device, threading.get_ident()
            dropped = 0 if flags & rf.CONTINUES else self._taken()
            self.progress.begin_step(step)
            append = self.rows.append
            first = self.rows.count() if first == NOWHERE else first
            index = self._index = append(rf.STEP, flags, why, time.perf_counter_ns(), 0, step, 0, first, numbers)
            if lr is not None:
                self.value(rf.LR, lr)
            if drawn is not None:
                append(rf.NOTE, rf.DRAWN, a=drawn, b2=index)
            self._observed = observed
            self.own_ns = self.own_ns if flags & rf.CONTINUES else 0
        if observed:
            self._before = self._after if flags & rf.CONTINUES else self._counted()
        self.own_ns += time.perf_counter_ns() - began_ns
        return index, dropped

    def end(
        self, began_ns: int, flags: int, why: int, outside: int, more_ns: int, ranges: Callable[[], None] | None
    ) -> tuple[int, int, int]:
        """As `StepFunctions.end`."""
        with self.lock:
            self._taken()
            ended_ns, behind = time.perf_counter_ns(), self.rows.count()
        self.ranges.end()
        issued, ahead_before, ahead = rf.NOT_COUNTED, 0, 0
        if self._observed:
            (before, ahead_before), self._after = self._before, self._counted()
            after, ahead = self._after
            issued = _issued_between(before, after)
        if ranges is not None:
            ranges()
        self.progress.end_step()
        own_ns, self.own_ns = self.own_ns + more_ns + time.perf_counter_ns() - began_ns, 0
        self.rows.append(rf.SUMMARY, flags, why, own_ns, self._index, issued, outside, ahead_before, ahead)
        self.rows.end(self._index, 0 if self._on_device else ended_ns, behind)
        return own_ns, ended_ns, behind

    def value(self, which: int, value: float) -> int:
        """As `StepFunctions.value`."""
        return self.rows.append(rf.VALUE, which, a=time.perf_counter_ns(), x=bits_of(value))

    def _counted(self) -> tuple[dict[int, int | None], int]:
        """Return what backends have counted, and by how few and how many collectives that may be ahead of the rows: as
        many of their calls less as have not returned, in the upper half, and as many more as were recorded since the
        last step ended.
        """
        underway = self._underway
        return self._counts(), -underway << 32 | len(self.issued)

    def abandon(self) -> int:
        """Stop recording, and discard what was recorded since the last step ended; returns how many collectives."""
        self.ranges.end()
        with self.lock:
            self.is_open = False
            return self._taken()

    def add_watched(self, passes: int) -> None:
        """Note that backward passes that reached what is watched begin (1) or end (-1); one may run within another, of
        a checkpoint.
        """
        with self.lock:
            self.watched_passes = max(self.watched_passes + passes, 0)

    def add_underway(self, calls: int) -> None:
        """Note that calls of a backend begin (1) or return (-1)."""
        with self.lock:
            self._underway += calls

    def settle(self, at_ns: int) -> None:
        """End, at the latest then, what the backend has completed: the training thread has continued because it was;
        callbacks may still wait for the interpreter.
        """
        for issued in tuple(self.issued):
            if issued.has_completed is not None and issued.has_completed():
                self.over(issued, "future", at_ns)

    def over(self, issued: InFlight, source: EndSource = "wait", at_ns: int | None = None) -> None:
        """Store its end. The first call counts; what an emulated link has set is stored by each, as it may be set
        again.
        """
        with self.lock:
            if issued.end is not None and issued.link == NOWHERE:
                return
            issued.stamp(source, at_ns)
            end_ns = int(issued.end or 0)
            if issued.start is not None:
                by_fabric = rf.BY_FABRIC if issued.end_source == "emulated" else 0
                self.rows.linked(issued.link, by_fabric, issued.start, issued.backend_end_ns or 0)
            self.rows.complete(issued.row, end_ns, by_wait=issued.end_source == "wait")

    def waited(self, issued: InFlight, begin_ns: int, end_ns: int, *, blocked: bool, over: bool) -> None:
        if self.holds_up():
            flags = blocked * rf.BLOCKED | over * rf.OVER
            self.rows.append(rf.WAIT, flags, a=begin_ns, b=end_ns, y=issued.seq, op=issued.op, group=issued.of_group)

    def leave(self) -> None:
        """In a forked child: append nothing. Locks may be held by threads that it does not have."""
        self.lock = threading.RLock()
        self.rows.leave()
        self.ranges.leave()

    def holds_up(self) -> bool:
        """Return whether the thread that trains calls: on another one a call or a wait holds up no computation."""
        return self.is_open and threading.get_ident() == self._thread

    def _taken(self) -> int:
        count, self.watched_passes = len(self.issued), 0  # a pass that failed has no end
        self.issued = []
        return count


def _issued_between(before: dict[int, int | None], after: dict[int, int | None]) -> int:
    issued = 0
    for group, count in after.items():
        base = before.get(group, 0)
        if count is None or base is None:
            return rf.NOT_COUNTED
        issued += count - base
    return issued


class _RowSpan(AbstractContextManager[None]):
    __slots__ = ("_before", "_index", "_kind", "_number", "_restores", "_steps", "_x", "is_open", "name")

    def __init__(self, steps: RowSteps, kind: int, number: int, name: str, x: int, restores: bool) -> None:
        self._steps, self._kind, self._number, self._x, self._restores = steps, kind, number, x, restores
        self.name, self.is_open, self._index, self._before = name, False, NOWHERE, name

    def __enter__(self) -> None:
        steps, began_ns = self._steps, time.perf_counter_ns()
        self.is_open, self._before = True, steps.progress.enter(self.name)
        if steps.is_open:
            self._index = steps.rows.begin_span(self._kind, self._number, self._x)
        steps.own_ns += time.perf_counter_ns() - began_ns

    def __exit__(self, kind: type[BaseException] | None, *_how: object) -> None:
        steps, began_ns = self._steps, time.perf_counter_ns()
        self.is_open = False
        if self._index != NOWHERE:
            steps.rows.end_span(self._index)
        if kind is None and self._restores:  # after an error the phase stays, for whoever asks where it happened
            steps.progress.enter(self._before)
        steps.own_ns += time.perf_counter_ns() - began_ns
