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
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist

from aorta.instrument.backend_calls import CALLBACKS_S, DTYPES, group_seen, labelled
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
from aorta.instrument.operators import (
    OPERATORS,
    Operator,
    offered,
    position_of,
    position_of_group,
)
from aorta.instrument.row_steps import RowSteps
from aorta.instrument.timed_work import InFlight, KeptAlive, TimedWork
from aorta.records import ring_file as rf
from aorta.records.progress import NO_PEER
from aorta.records.ring_file import RingFile, RingGroup
from aorta.records.schema import STALL_CUTOFF_NS

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
        steps, rows: of the ring.
        marks: none: only compiled code brackets spans on a device.
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
        self.steps, self.marks = RowSteps(ring, on_device=on_device), None
        self.rows, self.ranges, self.functions = self.steps.rows, self.steps.ranges, self.steps.functions
        self._kept = KeptAlive()
        self._calls = {
            name: _CallFacts(operator, number, position_of_group(name), position_of(name, "dst", "src"))
            for number, (name, operator) in enumerate(offered().items())
        }
        # Keyed by identity, so that C++ need not be asked for a name or a size; the groups stay alive until `close`.
        self._members: dict[dist.ProcessGroup, _Member] = {}
        self._futureless: set[tuple[str, str]] = set()
        self._called_back: dict[int, InFlight] = {}
        self._count: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
        self._has_left = False

    def __call__(self, name: str, args: tuple[Any, ...], original: Original) -> Any:
        if self._has_left:
            return original()
        self.steps.add_underway(1)
        try:
            return self._issue(name, args, original)
        finally:
            self.steps.add_underway(-1)

    def open(self, device: torch.device, on_captured: Callable[[], None]) -> Interception:
        """Start intercepting; `close` of the returned object ends it. There is no graph capture on a CPU."""
        return DispatcherHook(OPERATORS, device, self, on_captured)

    def abandon(self) -> int:
        """Stop recording, and discard what was recorded since the last step ended; returns how many collectives."""
        return self.steps.abandon()

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
        """In a forked child: leave everything to the backend."""
        self._has_left = True
        self.steps.leave()

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
        if (returned_ns := time.perf_counter_ns()) - issued.issue_ns > self._shortest_call_ns and self.steps.holds_up():
            self.rows.returned(issued.row, returned_ns)
        work = work_in(result)
        if work is None:  # it is over, and there is nothing to wait for
            self.steps.over(issued)
            if issued.end is not None:
                self.steps.waited(issued, issued.issue_ns, issued.end, blocked=False, over=True)
            return result
        if self._links is not None and transfer is not None:
            work = cast(Work, self._links.carry(transfer, work))
            transfer.gate.add_done_callback(lambda _gate: None if issued.end is None else self.steps.over(issued))
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
        with self.steps.lock:
            issued.seq = next(self._count[counter])
            issued.number = None if operator.point_to_point else issued.seq
            of_pair = next(self._count[f"{counter}/{peer}"]) if operator.point_to_point else 0
            issued.rows = rows
            issued.row, issued.issue_ns = rows.issue(
                rf.UNWATCHED if self.steps.watched_passes == 0 and backward_pass() != -1 else 0,
                call.number,
                rf.NO_DTYPE if typed is None else _NUMBERS[typed],
                member.number,
                size,
                issued.seq,
                of_pair << 32 | peer,
            )
            if self.steps.is_open:
                if self._links is not None:
                    issued.link = rows.append(rf.LINK, x=issued.row)
                self.steps.issued.append(issued)
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
            self.steps.over(issued, "future")
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
            self.steps.over(issued)  # not reached after an error: a timeout, say, is not the end
            over = True
            return outcome
        finally:
            self.steps.waited(issued, begin_ns, time.perf_counter_ns(), blocked=blocked, over=over)
