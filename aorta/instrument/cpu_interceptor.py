"""Interceptor for collectives of CPU tensors in a run on a device: issues and times each one, and returns what its
caller expects (in a run on a CPU: `python_interceptor`). And the stall cut-off of this host: how long a backend's call
may take and still only have handed a collective over.

It is called by the dispatcher interception with an operator's name, arguments and original implementation. The caller
gets the original's result with a `TimedWork` in it; the recorder gets an `InFlight` row. A CPU backend runs collectives
on its own threads, so they are timed where they run (R6); collectives of device tensors are handled in
`device_interceptor`.

A call of the backend that takes longer than the cut-off counts as a stall of the training thread, a shorter one as host
work. How long handing over takes is a property of the host and its load, so it is measured when a run begins, on a gloo
group of this process alone, which wakes a worker thread as every collective does and exchanges nothing.

Must not change a value, an exception, a dtype or an order, or fail a run.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import cache, partial
from typing import Any, Final, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch.autograd import profiler

from aorta.instrument.dispatcher import (
    DispatcherHook,
    Interception,
    Original,
    Work,
    counts_point_to_point,
    first_tensor,
    group_in,
    synchronous,
    with_work,
    work_in,
    worker_threads,
)
from aorta.instrument.emulation.emulated_link import HostLinks
from aorta.instrument.event_clock import EventClock, on_host
from aorta.instrument.in_flight import Group, InFlight, KeptAlive, TimedWork, Waited, name_of
from aorta.instrument.operators import (
    OPERATORS,
    Operator,
    is_async,
    offered,
    position_of_async_op,
    position_of_group,
    position_of_peer,
)
from aorta.instrument.step_recorder import StepRecorder
from aorta.records.progress_file import NOWHERE, WHEN_UNKNOWN
from aorta.records.schema import STALL_CUTOFF_NS, EndSource, InstrumentMode, StallCutoff

_T = TypeVar("_T")


def labelled(kind: str, seq: int, group: str, issue: Callable[[], _T]) -> Callable[[], _T]:
    """Return `issue` unchanged, or wrapped in its label `comm:<kind>#<seq> group=<name>` while a profiler is on (C17).

    gloo's own rows of a trace carry no sequence number, by which they could be matched across ranks. Where no profiler
    is on, this costs the check of one flag of torch.
    """
    if not profiler._is_profiler_enabled:
        return issue

    def call() -> _T:
        with profiler.record_function(f"comm:{kind}#{seq} group={group}"):
            return issue()

    return call


_CPU = torch.device("cpu")
CALLBACKS_S = 1.0
"""How long `close` waits for callbacks; those of collectives that never end do not come."""


class _Signature(NamedTuple):
    """What an operator's schema says about its arguments, looked up once."""

    operator: Operator
    number: int
    group_at: int
    async_at: int | None
    peer_at: int | None


class Member(NamedTuple):
    """What the interceptor needs of a process group at every call. `on_device`: waiting for its collectives of device
    tensors blocks the device and not the host. `early`: their futures fire before the device finishes
    (`dispatcher.ends_on_streams`). `shared`: see `dispatcher.shares_communicator`. `listed`: its index in the progress
    file.
    """

    name: str
    size: int
    on_device: bool
    early: bool
    shared: bool | None
    listed: int


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return the name without its module: `torch.float32` -> `float32`."""
    return str(dtype).removeprefix("torch.")


DTYPES: Final = tuple(
    sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=dtype_name)
)
"""Every dtype of this torch; a progress file has their positions."""


def group_seen(process_group: dist.ProcessGroup) -> Group:
    return Group(tuple(dist.get_process_group_ranks(process_group)), worker_threads(process_group, _CPU))


class CpuInterceptor:
    """Interceptor for CPU backends, the base of `DeviceInterceptor`.

    The end of a collective is stamped by the backend's completion callback, or by the caller's own wait where there is
    none (gloo's reduce-scatter, send and receive), whichever comes first.

    Args:
        groups: filled with every process group when first seen, by name.
        recorder: is given each collective before it is issued, each wait of the caller, also one that did not block,
            and the host's times round each call of a backend that took longer than `shortest_call_ns`: handing a
            collective over is host work, and a stall only from a length on that the step builder knows. Collectives are
            noted in its progress file.
        links: of the emulated fabric, which delays completion; None = the real network.
    """

    def __init__(
        self,
        clock: EventClock,
        groups: dict[str, Group],
        recorder: StepRecorder,
        links: HostLinks | None = None,
        shortest_call_ns: int = STALL_CUTOFF_NS,
    ) -> None:
        self._progress = recorder.progress
        self.clock, self._groups = clock, groups
        self._on_issue, self._on_wait, self._on_call = recorder.on_issue, recorder.on_wait, recorder.on_call
        self._add_underway = recorder.add_underway
        self._links, self._shortest_call_ns = links, shortest_call_ns
        self._kept = KeptAlive()
        self._count: dict[str, Iterator[int]] = {}
        self._calls = {
            name: _Signature(
                operator, number, position_of_group(name), position_of_async_op(name), position_of_peer(name)
            )
            for number, (name, operator) in enumerate(offered().items())
        }
        # Keyed by identity, so that C++ need not be asked for a name or a size; the groups stay alive until `close`.
        self._members: dict[dist.ProcessGroup, Member] = {}
        self._futureless: set[tuple[str, str]] = set()
        self._called_back: dict[int, InFlight] = {}

    def __call__(self, name: str, args: tuple[Any, ...], original: Original) -> Any:
        self._add_underway(1)
        try:
            return self._issue(name, args, original)
        finally:
            self._add_underway(-1)

    def _issue(self, name: str, args: tuple[Any, ...], original: Original) -> Any:
        call = self._calls[name]
        operator, group_at, async_at = call.operator, call.group_at, call.async_at
        tensor = first_tensor(args)
        process_group = group_in(args[group_at])
        member = self._member(process_group)
        group = member.name
        # Not every rank sends or receives: counted separately, they keep collective numbers equal on all ranks.
        seq = self._next(f"{group}/{operator.kind}" if operator.point_to_point else group)
        on_host = tensor is None or tensor.is_cpu
        self._be_late(on_host=on_host)
        issued = InFlight(
            kind=operator.kind,
            group=group,
            seq=seq,
            bytes=operator.full_array_bytes(args, member.size),
            dtype=None if tensor is None or operator.argument is None else dtype_name(tensor.dtype),
            issue_ns=time.perf_counter_ns(),
            number=None if operator.point_to_point else seq,
            waiters=len(args[0]) if operator.coalesced else 1,
            counted=not operator.point_to_point
            or tensor is None
            or counts_point_to_point(process_group, tensor.device),
        )
        self._on_issue(issued)
        self._note_progress(call, member, args, issued)
        asynchronous = is_async(args, async_at)
        # The host waits for a barrier, whatever its backend.
        elsewhere = on_host or operator.argument is None
        if not elsewhere and asynchronous and self._is_moved(member, async_at):
            original = synchronous(original, async_at)
        original = labelled(issued.kind, seq, group, original)
        if elsewhere or not (member.on_device or (member.early and not asynchronous)):
            return self._on_host(name, issued, original, early=member.early and not on_host)
        return self._on_device(operator, member, issued, args, asynchronous, original)

    def open(self, device: torch.device, on_captured: Callable[[], None]) -> Interception:
        """Start intercepting; `close` of the returned object ends it. `on_captured`: see `DispatcherHook`."""
        return DispatcherHook(OPERATORS, device, self, on_captured)

    def begin(self) -> None:
        """Prepare for a step that begins."""

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

    def _next(self, counter: str) -> int:
        # Atomic: threads of one process issue collectives of one group.
        return next(self._count.setdefault(counter, itertools.count()))

    def _note_progress(self, call: _Signature, member: Member, args: tuple[Any, ...], issued: InFlight) -> None:
        """Note a collective in the rank's progress file; sends and receives are counted by peer, as both ranks agree on
        that.
        """
        peer = NOWHERE if call.peer_at is None else args[call.peer_at]
        number = self._next(f"{issued.group}/{issued.kind}/{peer}") if call.operator.point_to_point else issued.seq
        issued.noted = self._progress.issue(
            member.listed, number, call.number, issued.dtype, issued.bytes, peer, issued.issue_ns
        )

    def _be_late(self, *, on_host: bool) -> None:
        if self._links is not None and on_host:
            self._links.be_late()

    def _member(self, group: dist.ProcessGroup) -> Member:
        member = self._members.get(group)
        if member is None:
            name = group.group_name
            self._groups[name] = seen = group_seen(group)
            listed = self._progress.group(name, seen.ranks)
            member = self._members[group] = Member(name, group.size(), *self._on_streams(group), listed)
        return member

    def _is_moved(self, _member: Member, _async_at: int | None) -> bool:
        """Return whether an asynchronous collective of device tensors is issued synchronously, on AORTA's stream."""
        return False

    def _on_streams(self, _group: dist.ProcessGroup) -> tuple[bool, bool, bool | None]:
        return False, False, None

    def _on_host(self, name: str, issued: InFlight, original: Original, *, early: bool) -> Any:
        """Issue and time one collective; `early`: its future says nothing about its end."""
        transfer, in_place = None, False
        if self._links is not None:
            transfer = self._links.arrive(issued, self._groups[issued.group].ranks)
        result = original()
        # The caller's thread was inside the backend: enqueueing, or blocked where the backend works synchronously.
        if (returned_ns := time.perf_counter_ns()) - issued.issue_ns > self._shortest_call_ns:
            self._on_call(issued.issue_ns, returned_ns)
        work = work_in(result)
        if work is None:  # it is over, and there is nothing to wait for
            self._over(issued)
            if issued.end is not None:
                self._host_wait(Waited(name_of(issued), issued.issue_ns, issued.end, blocked=False))
            return result
        if self._links is not None and transfer is not None:
            work = cast(Work, self._links.carry(transfer, work))
            transfer.gate.add_done_callback(lambda _gate: None if issued.end is None else self._over(issued))
        elif not early:
            in_place = self._notice_end(name, issued, work)
        wait = partial(self._wait, issued)
        return with_work(result, TimedWork(work, wait, self._kept, issued.waiters, in_place=in_place, issued=issued))

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

    def _wait(self, issued: InFlight, inner: Callable[[], bool], _limited: bool) -> bool:
        """Wait for the caller, timed as a stall, and as the end where nothing else has stamped it. A caller that
        arrives after the collective has ended is not blocked.
        """
        begin, blocked, over = time.perf_counter_ns(), not issued.look(), False
        try:
            outcome = inner()
            self._over(issued)  # not reached after an error: a timeout, say, is not the end
            over = True
            return outcome
        finally:
            self._host_wait(Waited(name_of(issued), begin, time.perf_counter_ns(), blocked, over))

    def _over(self, issued: InFlight, source: EndSource = "wait") -> None:
        issued.stamp(source)
        end = issued.end
        self._progress.completed(issued.noted, int(end) if end is not None and on_host(end) else WHEN_UNKNOWN)

    def _host_wait(self, wait: Waited) -> None:
        self._on_wait(wait)

    def _on_device(
        self,
        operator: Operator,
        member: Member,
        issued: InFlight,
        args: tuple[Any, ...],
        asynchronous: bool,
        original: Original,
    ) -> Any:
        raise NotImplementedError("a collective of device tensors in a run on the CPU")


LEAST_NS: Final = 100_000
MOST_NS: Final = 1_000_000
"""Bounds of a calibrated cut-off. Below: handing over to gloo was seen to take 20 to 195 us. Above: a
call that blocks waits for peers or for a transfer, and these are to be seen."""
TIMES: Final = 5
"""Cut-off over the 99th percentile of the calls that are measured. They are cheaper than a run's, which pass the
dispatcher and concern several ranks: where 0.2 ms was found to lie above a run's calls, theirs is about 40 us."""
CALLS: Final = 1_000
FEWEST_CALLS: Final = 200
LIMIT_S: Final = 0.03
LONGEST_S: Final = 0.2
"""For the fewest calls, on a host so slow or loaded that the default would be too short for it."""


def stall_cutoff(asked_us: float | None, device: torch.device, mode: InstrumentMode) -> StallCutoff | None:
    """Return the cut-off of this process; None where no call on the host can stall what computes (an accelerator), or
    where nothing is looked at.

    Args:
        asked_us: as configured; None: measured.
    """
    if device.type != "cpu" or mode == "off":
        return None
    if asked_us is not None:
        return StallCutoff(round(asked_us * 1000), "configured")
    try:
        return cutoff_from(hand_over_ns())
    except (RuntimeError, OSError, AttributeError) as error:  # no gloo here, or no network interface for it
        return StallCutoff(STALL_CUTOFF_NS, "default", problem=f"not measured: {error}".splitlines()[0])


def hand_over_ns() -> list[int]:
    """Return the durations of calls that only hand a collective over to gloo.

    Raises:
        RuntimeError, OSError, AttributeError: there is no gloo in this torch, or it finds no network interface.
    """
    group: Any = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=5))
    tensor = torch.zeros(256)
    taken: list[int] = []
    until_ns, last_ns = (time.perf_counter_ns() + round(limit_s * 1e9) for limit_s in (LIMIT_S, LONGEST_S))
    while len(taken) < CALLS and (now_ns := time.perf_counter_ns()) < last_ns:
        if now_ns > until_ns and len(taken) >= FEWEST_CALLS:
            break
        begin_ns = time.perf_counter_ns()
        work = group.allreduce([tensor])
        taken.append(time.perf_counter_ns() - begin_ns)
        work.wait()
    return taken


def cutoff_from(taken_ns: Sequence[int]) -> StallCutoff:
    """Return the cut-off from durations of calls; the default where they are too few for a 99th percentile."""
    if len(taken_ns) < FEWEST_CALLS:
        problem = f"only {len(taken_ns)} calls in {LONGEST_S * 1000:g} ms, {FEWEST_CALLS} are needed"
        return StallCutoff(STALL_CUTOFF_NS, "default", problem=problem)
    high_ns = sorted(taken_ns)[len(taken_ns) * 99 // 100]
    return StallCutoff(min(max(TIMES * high_ns, LEAST_NS), MOST_NS), "calibrated", high_ns)


def slowest_of_host(mine: StallCutoff | None, host: str, facts: Sequence[Mapping[str, Any]]) -> StallCutoff | None:
    """Return the largest cut-off among the ranks of a host, which all of them use: it is a property of the host.

    Args:
        facts: of every rank, each with `host` and `stall_cutoff` (JSON types).
    """
    if mine is None:
        return None
    of_host = [StallCutoff(**each["stall_cutoff"]) for each in facts if each["host"] == host and each["stall_cutoff"]]
    return max([mine, *of_host], key=lambda each: (each.cutoff_ns, each.hand_over_ns or 0))
