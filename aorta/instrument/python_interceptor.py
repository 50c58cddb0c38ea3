"""Interceptor in Python for collectives of CPU tensors: issues each one, returns what its caller expects, and appends
rows of it to a ring. The same as the compiled one does; it also serves an emulated fabric.

It is called by the dispatcher interception with an operator's name, arguments and original implementation. The caller
gets the original's result with a `TimedWork` in it. A CPU backend runs collectives on its own threads, so they end
where its completion callback says so, or, without one (gloo's reduce-scatter, send and receive), at the caller's own
wait; whichever comes first (R6).

Must not change a value, an exception, a dtype or an order, or fail a run.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist

from aorta.instrument.backend_calls import CALLBACKS_S, DTYPES, group_seen, labelled
from aorta.instrument.compute_ranges import RowRanges
from aorta.instrument.dispatcher import (
    DispatcherHook,
    Interception,
    Original,
    Work,
    backward_pass,
    first_tensor,
    group_in,
    with_work,
    work_in,
)
from aorta.instrument.emulation.emulated_link import HostLinks
from aorta.instrument.in_flight import InFlight, KeptAlive, TimedWork
from aorta.instrument.operators import (
    OPERATORS,
    Operator,
    offered,
    position_of,
    position_of_group,
)
from aorta.instrument.recorder import Counts, StepFunctions, bits_of
from aorta.instrument.ring_rows import NOWHERE, RingRows
from aorta.records import ring_file as rf
from aorta.records.progress import NO_PEER
from aorta.records.ring_file import RingFile, RingGroup
from aorta.records.schema import STALL_CUTOFF_NS, EndSource

_NUMBERS = {dtype: number for number, dtype in enumerate(DTYPES)}


class _CallFacts(NamedTuple):
    """An operator, its number, and what its schema says about its arguments; looked up once."""

    operator: Operator
    number: int
    group_at: int
    peer_at: int | None


class _Member(NamedTuple):
    """What is needed of a process group at every call. `number`: in the ring."""

    name: str
    size: int
    ranks: tuple[int, ...]
    number: int


class PythonInterceptor:
    """Interceptor for CPU backends.

    Args:
        groups: filled with every process group when first seen, by name.
        links: of the emulated fabric, which delays completion; None = the real network.
        shortest_call_ns: a backend's call that takes longer is noted, as it may have been a stall.
        on_device: it is not opened, as only compiled code looks at a device; the rows of steps are all there is, whose
            ends its clock tells later.

    Attributes:
        rows: of the ring.
        marks: none: only compiled code brackets spans on a device.
        is_open: a step is observed: its collectives and spans have rows.
        own_ns: AORTA's own time since the step began.
        ranges: passes of blocks, as rows.
    """

    def __init__(
        self,
        groups: dict[str, RingGroup],
        ring: RingFile,
        links: HostLinks | None = None,
        shortest_call_ns: int = STALL_CUTOFF_NS,
        *,
        on_device: bool = False,
    ) -> None:
        self._groups, self._ring, self._links, self._shortest_call_ns = groups, ring, links, shortest_call_ns
        self.rows, self.marks = RingRows(ring), None
        self.ranges = RowRanges(ring, self.rows, self)
        self.progress, self._on_device = ring.progress, on_device
        self.begin_span, self.end_span = self.rows.begin_span, self.rows.end_span
        self._kept = KeptAlive()
        self._calls = {
            name: _CallFacts(operator, number, position_of_group(name), position_of(name, "dst", "src"))
            for number, (name, operator) in enumerate(offered().items())
        }
        # Keyed by identity, so that C++ need not be asked for a name or a size; the groups stay alive until `close`.
        self._members: dict[dist.ProcessGroup, _Member] = {}
        self._futureless: set[tuple[str, str]] = set()
        self._called_back: dict[int, InFlight] = {}
        # What follows changes under the lock, so that rows stand in the order of numbers, and in one step.
        self._lock = threading.RLock()
        self._count: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
        self._issued: list[InFlight] = []
        self.is_open = self._has_left = False
        self._thread = self._underway = self._watched_passes = 0
        self.own_ns, self._index, self._observed = 0, NOWHERE, False
        self._counts: Counts = dict
        self._before: tuple[dict[int, int | None], int] = {}, 0
        self._after = self._before

    def __call__(self, name: str, args: tuple[Any, ...], original: Original) -> Any:
        if self._has_left:
            return original()
        self._add_underway(1)
        try:
            return self._issue(name, args, original)
        finally:
            self._add_underway(-1)

    def functions(self, counts: Counts) -> StepFunctions:
        """As `NativeInterceptor.functions`."""
        self._counts = counts
        return StepFunctions(self.begin, self.end, partial(_RowSpan, self), self.value, self.rows.append)

    def open(self, device: torch.device, on_captured: Callable[[], None]) -> Interception:
        """Start intercepting; `close` of the returned object ends it. There is no graph capture on a CPU."""
        return DispatcherHook(OPERATORS, device, self, on_captured)

    # --- steps -------------------------------------------------------------------------------------------------------

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
        with self._lock:
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
        with self._lock:
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
        return self._counts(), -underway << 32 | len(self._issued)

    def abandon(self) -> int:
        """Stop recording, and discard what was recorded since the last step ended; returns how many collectives."""
        self.ranges.end()
        with self._lock:
            self.is_open = False
            return self._taken()

    def add_watched(self, passes: int) -> None:
        """Note that backward passes that reached what is watched begin (1) or end (-1); one may run within another, of
        a checkpoint.
        """
        with self._lock:
            self._watched_passes = max(self._watched_passes + passes, 0)

    def settle(self, at_ns: int) -> None:
        """End, at the latest then, what the backend has completed: the training thread has continued because it was;
        callbacks may still wait for the interpreter.
        """
        for issued in tuple(self._issued):
            if issued.has_completed is not None and issued.has_completed():
                self._over(issued, "future", at_ns)

    def close(self) -> None:
        """End, once no further collective will arrive.

        Waits a moment for callbacks of futures: a caller that drops a process group next joins the backend's threads
        with the interpreter locked, and a thread that needs the interpreter for its callback would never end.
        """
        deadline = time.monotonic() + CALLBACKS_S
        while self._called_back and time.monotonic() < deadline:
            time.sleep(0.001)
        self._members.clear()
        if self._links is not None:
            self._links.close()

    def leave(self) -> None:
        """In a forked child: leave everything to the backend. Locks may be held by threads that it does not have."""
        self._has_left, self._lock = True, threading.RLock()
        self.rows.leave()
        self.ranges.leave()

    def _taken(self) -> int:
        count, self._watched_passes = len(self._issued), 0  # a pass that failed has no end
        self._issued = []
        return count

    def _add_underway(self, calls: int) -> None:
        with self._lock:
            self._underway += calls

    def _holds_up(self) -> bool:
        """Return whether the thread that trains calls: on another one a call or a wait holds up no computation."""
        return self.is_open and threading.get_ident() == self._thread

    # --- a collective ------------------------------------------------------------------------------------------------

    def _issue(self, name: str, args: tuple[Any, ...], original: Original) -> Any:
        call, tensor = self._calls[name], first_tensor(args)
        member, transfer, in_place = self._member(group_in(args[call.group_at])), None, False
        if self._links is not None and (tensor is None or tensor.is_cpu):
            self._links.be_late()
        issued = self._recorded(call, member, args, tensor)
        original = labelled(issued.kind, issued.seq, issued.group, original)
        if self._links is not None:
            transfer = self._links.arrive(issued, member.ranks)
        result = original()
        # The caller's thread was inside the backend: enqueueing, or blocked where the backend works synchronously.
        if (returned_ns := time.perf_counter_ns()) - issued.issue_ns > self._shortest_call_ns and self._holds_up():
            self.rows.returned(issued.row, returned_ns)
        work = work_in(result)
        if work is None:  # it is over, and there is nothing to wait for
            self._over(issued)
            if issued.end is not None:
                self._waited(issued, issued.issue_ns, issued.end, blocked=False, over=True)
            return result
        if self._links is not None and transfer is not None:
            work = cast(Work, self._links.carry(transfer, work))
            transfer.gate.add_done_callback(lambda _gate: None if issued.end is None else self._over(issued))
        else:
            in_place = self._notice_end(name, issued, work)
        wait, waiters = partial(self._wait, issued), len(args[0]) if call.operator.coalesced else 1
        return with_work(result, TimedWork(work, wait, self._kept, waiters, in_place=in_place, issued=issued))

    def _recorded(
        self, call: _CallFacts, member: _Member, args: tuple[Any, ...], tensor: torch.Tensor | None
    ) -> InFlight:
        """Number a collective, and append its row if a step is open."""
        operator, rows = call.operator, self.rows
        typed = None if operator.argument is None or tensor is None else tensor.dtype
        peer = NO_PEER if call.peer_at is None else args[call.peer_at] & NO_PEER
        size = operator.full_array_bytes(args, member.size)
        issued = InFlight(operator.kind, member.name, 0, size, 0, op=call.number, of_group=member.number)
        # Not every rank sends or receives: counted separately, they keep collective numbers equal on all ranks.
        counter = f"{member.name}/{operator.kind}" if operator.point_to_point else member.name
        with self._lock:
            issued.seq = next(self._count[counter])
            issued.number = None if operator.point_to_point else issued.seq
            of_pair = next(self._count[f"{counter}/{peer}"]) if operator.point_to_point else 0
            issued.rows = rows
            issued.row, issued.issue_ns = rows.issue(
                rf.UNWATCHED if self._watched_passes == 0 and backward_pass() != -1 else 0,
                call.number,
                rf.NO_DTYPE if typed is None else _NUMBERS[typed],
                member.number,
                size,
                issued.seq,
                of_pair << 32 | peer,
            )
            if self.is_open:
                if self._links is not None:
                    issued.link = rows.append(rf.LINK, x=issued.row)
                self._issued.append(issued)
        return issued

    def _member(self, group: dist.ProcessGroup) -> _Member:
        member = self._members.get(group)
        if member is None:
            name = group.group_name
            self._groups[name] = seen = group_seen(group)
            member = self._members[group] = _Member(name, group.size(), seen.ranks, self._ring.group(seen))
        return member

    def _notice_end(self, name: str, issued: InFlight, work: Work) -> bool:
        """Register for the backend's completion callback; returns whether it has a future.

        Without one, only the caller's wait marks the end. A missing future is probed once per operator and group, since
        the answer is an exception, the most expensive event on this path.
        """
        kind_of_work = (issued.group, name)
        if kind_of_work in self._futureless:
            return False
        try:
            future = work.get_future()
        except RuntimeError:
            self._futureless.add(kind_of_work)
            return False
        issued.has_completed = future.done
        self._called_back[id(issued)] = issued  # alive until then, so that its id is its own

        def over(_done: Any) -> None:
            self._over(issued, "future")
            self._called_back.pop(id(issued), None)

        future.add_done_callback(over)
        return True

    def _wait(self, issued: InFlight, inner: Callable[[], bool]) -> bool:
        """Wait for the caller, timed as a stall, and as the end where nothing else has stamped it. A caller that
        arrives after the collective has ended is not blocked.
        """
        begin_ns, blocked, over = time.perf_counter_ns(), issued.end is None, False
        try:
            outcome = inner()
            self._over(issued)  # not reached after an error: a timeout, say, is not the end
            over = True
            return outcome
        finally:
            self._waited(issued, begin_ns, time.perf_counter_ns(), blocked=blocked, over=over)

    def _over(self, issued: InFlight, source: EndSource = "wait", at_ns: int | None = None) -> None:
        """Store its end. The first call counts; what an emulated link has set is stored by each, as it may be set
        again.
        """
        with self._lock:
            if issued.end is not None and issued.link == NOWHERE:
                return
            issued.stamp(source, at_ns)
            end_ns = int(issued.end or 0)
            if issued.start is not None:
                by_fabric = rf.BY_FABRIC if issued.end_source == "emulated" else 0
                self.rows.linked(issued.link, by_fabric, issued.start, issued.backend_end_ns or 0)
            self.rows.complete(issued.row, end_ns, by_wait=issued.end_source == "wait")

    def _waited(self, issued: InFlight, begin_ns: int, end_ns: int, *, blocked: bool, over: bool) -> None:
        if self._holds_up():
            flags = blocked * rf.BLOCKED | over * rf.OVER
            self.rows.append(rf.WAIT, flags, a=begin_ns, b=end_ns, y=issued.seq, op=issued.op, group=issued.of_group)


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

    def __init__(self, steps: PythonInterceptor, kind: int, number: int, name: str, x: int, restores: bool) -> None:
        self._steps, self._kind, self._number, self._x, self._restores = steps, kind, number, x, restores
        self.name, self.is_open, self._index, self._before = name, False, NOWHERE, name

    def __enter__(self) -> None:
        steps, began_ns = self._steps, time.perf_counter_ns()
        self.is_open, self._before = True, steps.progress.enter(self.name)
        if steps.is_open:
            self._index = steps.begin_span(self._kind, self._number, self._x)
        steps.own_ns += time.perf_counter_ns() - began_ns

    def __exit__(self, kind: type[BaseException] | None, *_how: object) -> None:
        steps, began_ns = self._steps, time.perf_counter_ns()
        self.is_open = False
        if self._index != NOWHERE:
            steps.end_span(self._index)
        if kind is None and self._restores:  # after an error the phase stays, for whoever asks where it happened
            steps.progress.enter(self._before)
        steps.own_ns += time.perf_counter_ns() - began_ns
