"""One collective passing the seam: issue it, time it, and hand back what its caller expects.

Enters: an operator's name, arguments and original, from the seam. Leaves: the original's result with a `TimedWork` in
it, and an `Issued` row for the recorder. On a CPU the backend runs collectives on its own threads, so they are timed
where they are (R6); on CUDA/HIP they go to a stream of their own (`dedicated`, R2) or are timed beside it (`observe`,
R3). Must not: change a value, an exception, a dtype or an order; wait on the host for a device.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist

from aorta.instrument.clock import Clock, Mark
from aorta.instrument.labels import labelled
from aorta.instrument.links import DelayedOnDevice, DeviceLink, HostLinks
from aorta.instrument.operators import OPERATORS, is_async, position_of_async_op
from aorta.instrument.seam import Original, Work, first_tensor, group_of, unpack, worker_threads
from aorta.instrument.streams import Streams
from aorta.instrument.works import KeptAlive, TimedWork
from aorta.telemetry.schema import EndSource

_CPU = torch.device("cpu")

ENQUEUE_NS = 200_000
"""A call of the backend that returns sooner only handed the collective over, which is work of the host, not a stall:
measured 20 to 195 us on gloo (docs/log.md). Half the stalls of a record were such calls."""


@dataclass
class Issued:
    """One collective, while it is under way. `start` is None where it has to be derived from the backend's order.
    `number` counts what all ranks of a group take part in, so it is the same on each; None for send and receive.
    """

    kind: str
    group: str
    seq: int
    bytes: int
    dtype: str | None
    issue_ns: int
    number: int | None = None
    start: Mark | None = None
    end: Mark | None = None
    end_source: EndSource | None = None
    waiters: int = 1
    alive: Any = field(default=None, repr=False)
    has_completed: Callable[[], bool] | None = field(default=None, repr=False)

    def stamp(self, source: EndSource) -> None:
        """It has ended by now, on the host's clock; the first to notice counts."""
        if self.end is None:
            self.end, self.end_source = time.perf_counter_ns(), source
            self.has_completed = None


@dataclass(frozen=True)
class Group:
    """A process group that was seen: its global ranks, and how many of its collectives a CPU backend runs at once."""

    ranks: tuple[int, ...]
    lanes: int


class HostTap:
    """CPU backends.

    The end is stamped by the backend's completion callback, or by the caller's own wait where there is none (gloo's
    reduce-scatter, send and receive), whichever is earlier.

    Args:
        clock: of the device.
        groups: filled with every process group as it is first seen, by name.
        on_issue: called in issue order with each collective, before it is issued.
        on_stall: called with two marks between which the caller stood waiting.
        links: of the emulated fabric, which delays completion; None = the real one.
    """

    def __init__(
        self,
        clock: Clock,
        groups: dict[str, Group],
        on_issue: Callable[[Issued], None],
        on_stall: Callable[[Mark, Mark], None],
        links: HostLinks | None = None,
    ) -> None:
        self.clock, self._groups = clock, groups
        self._on_issue, self._on_stall = on_issue, on_stall
        self._links = links
        self._kept = KeptAlive()
        self._count: dict[str, int] = {}
        self._async_at = {name: position_of_async_op(name) for name in OPERATORS if hasattr(torch.ops.c10d, name)}

    def __call__(self, name: str, args: tuple[Any, ...], original: Original) -> Any:
        """The seam's handler."""
        operator, group, tensor = OPERATORS[name], group_of(args), first_tensor(args)
        known = group.group_name
        if known not in self._groups:
            lanes = worker_threads(group, tensor.device if tensor is not None else _CPU)
            self._groups[known] = Group(tuple(dist.get_process_group_ranks(group)), lanes)
        # Not every rank sends or receives: counted by themselves, they leave the numbers of collectives equal on all.
        counter = f"{known}/{operator.kind}" if operator.point_to_point else known
        seq = self._count.get(counter, 0)
        self._count[counter] = seq + 1
        on_host = tensor is None or tensor.device.type == "cpu"
        self._be_late(on_host=on_host)
        issued = Issued(
            kind=operator.kind,
            group=known,
            seq=seq,
            bytes=operator.full_array_bytes(args, group.size()),
            dtype=None if tensor is None or operator.argument is None else str(tensor.dtype).removeprefix("torch."),
            issue_ns=time.perf_counter_ns(),
            number=None if operator.point_to_point else seq,
            waiters=len(args[0]) if operator.coalesced else 1,
        )
        self._on_issue(issued)
        original = labelled(issued.kind, seq, known, original)
        if on_host:
            return self._on_host(issued, original)
        return self._on_device(issued, args, is_async(args, self._async_at[name]), original)

    def close(self) -> None:
        """No collective will pass any more."""
        if self._links is not None:
            self._links.close()

    def _be_late(self, *, on_host: bool) -> None:
        if self._links is not None and on_host:
            self._links.be_late()

    def _on_host(self, issued: Issued, original: Original) -> Any:
        transfer = None
        if self._links is not None:
            transfer = self._links.arrive(issued, self._groups[issued.group].ranks)
        result = original()
        # The caller's thread was inside the backend: to hand it over, or, where the backend works in the call, blocked.
        if (returned_ns := time.perf_counter_ns()) - issued.issue_ns > ENQUEUE_NS:
            self._host_stall(issued.issue_ns, returned_ns)
        work, repack = unpack(result)
        if self._links is not None and transfer is not None:
            work = cast(Work, self._links.carry(transfer, work))
            return repack(TimedWork(work, self._wait(issued), self._kept, issued.waiters))

        with contextlib.suppress(RuntimeError):  # no future: the caller's wait is all there is
            future = work.get_future()
            issued.has_completed = future.done
            future.add_done_callback(lambda _: issued.stamp("future"))

        return repack(TimedWork(work, self._wait(issued), self._kept, issued.waiters))

    def _wait(self, issued: Issued) -> Callable[[Callable[[], bool]], bool]:
        """How the caller waits: timed as a stall, and as the end where nothing else told it."""

        def wait(inner: Callable[[], bool]) -> bool:
            begin = time.perf_counter_ns()
            try:
                return inner()
            finally:
                issued.stamp("wait")
                self._host_stall(begin, time.perf_counter_ns())

        return wait

    def _host_stall(self, begin: Mark, end: Mark) -> None:
        self._on_stall(begin, end)

    def _on_device(self, issued: Issued, args: tuple[Any, ...], asynchronous: bool, original: Original) -> Any:
        raise NotImplementedError("a collective of device tensors in a run on the CPU")


class DeviceTap(HostTap):
    """CUDA/HIP backends; collectives of CPU tensors beside them are timed as on a CPU.

    Args:
        dedicated: run collectives on our own stream of their group; otherwise leave them where they are and let that
            stream only wait, for the timing.
        device_link: of the emulated fabric, for collectives of device tensors; None = the real one.
    """

    def __init__(
        self,
        clock: Clock,
        groups: dict[str, Group],
        on_issue: Callable[[Issued], None],
        on_stall: Callable[[Mark, Mark], None],
        streams: Streams,
        *,
        dedicated: bool,
        links: HostLinks | None = None,
        device_link: DeviceLink | None = None,
    ) -> None:
        super().__init__(clock, groups, on_issue, on_stall, links)
        self._streams, self._dedicated, self._device_link = streams, dedicated, device_link
        self._under_way: deque[Issued] = deque()

    def _on_device(self, issued: Issued, args: tuple[Any, ...], asynchronous: bool, original: Original) -> Any:
        self._let_go()
        if self._dedicated:
            return self._moved(issued, args, asynchronous, original)
        if asynchronous:
            return self._watched(issued, args, original)
        # The backend runs it on the caller's own stream: two marks there bracket it.
        issued.start = self.clock.mark()
        result = original()
        unpack(result)[0].wait()
        self._delay(issued)
        issued.end, issued.end_source = self.clock.mark(), "event"
        return result

    def _moved(self, issued: Issued, args: tuple[Any, ...], asynchronous: bool, original: Original) -> Any:
        """Run it on our stream (R2), whichever stream the backend would have taken."""
        side = self._streams.of_group(issued.group)
        side.wait_stream(self._streams.current())  # the inputs must be ready (W2)
        with self._streams.use(side):
            issued.start = self.clock.mark()
            result = original()
            work, repack = unpack(result)
            done = self._ended_on(side, issued, work, args)

        def join(_inner: Callable[[], bool]) -> bool:
            begin = self.clock.mark()
            self._streams.current().wait_event(done)  # this collective only, not what was issued behind it
            self._on_stall(begin, self.clock.mark())
            return True

        if not asynchronous:
            join(work.wait)
        return repack(TimedWork(self._delayed(side, work, done), join, self._kept, issued.waiters, repeatable=True))

    def _watched(self, issued: Issued, args: tuple[Any, ...], original: Original) -> Any:
        """Leave it on the backend's stream and let ours wait beside it, for the marks (R3)."""
        side = self._streams.of_group(issued.group)
        side.wait_stream(self._streams.current())
        with self._streams.use(side):
            issued.start = self.clock.mark()
        result = original()
        work, repack = unpack(result)
        with self._streams.use(side):
            done = self._ended_on(side, issued, work, args)

        def wait(inner: Callable[[], bool]) -> bool:
            begin = self.clock.mark()
            outcome = inner()
            if self._device_link is not None:
                self._streams.current().wait_event(done)  # the backend's stream knows nothing of the emulated time
            self._on_stall(begin, self.clock.mark())
            return outcome

        return repack(TimedWork(self._delayed(side, work, done), wait, self._kept, issued.waiters, repeatable=True))

    def _host_stall(self, begin: Mark, end: Mark) -> None:
        """The host waits for a collective of CPU tensors; the compute stream does not."""

    def _be_late(self, *, on_host: bool) -> None:
        super()._be_late(on_host=on_host)
        if self._device_link is not None and not on_host:
            self._device_link.be_late()

    def _delay(self, issued: Issued) -> None:
        """The emulated time, behind the backend's collective on the current stream."""
        if self._device_link is not None:
            self._device_link.delay(issued, self._groups[issued.group].ranks)

    def _delayed(self, side: Any, work: Work, done: Any) -> Work:
        """What the caller's handle stands for: with an emulated fabric, its future too must wait for `side`."""
        if self._device_link is None:
            return work
        with self._streams.use(side):
            return cast(Work, DelayedOnDevice(work, done, self._device_link.devices))

    def _ended_on(self, side: Any, issued: Issued, work: Any, args: tuple[Any, ...]) -> Any:
        """Mark the end on `side`, which is current; returns an event that nobody else records again."""
        work.wait()  # makes `side` wait, not the host; without it the end event would time the launch (W1)
        self._delay(issued)
        issued.end, issued.end_source = self.clock.mark(), "event"
        # Waiting released the backend's own references, and synchronous ones hold none (W3).
        issued.alive = args
        self._under_way.append(issued)
        return side.record_event()

    def _let_go(self) -> None:
        """Drop the tensors of collectives that have ended: they hold memory that a sharded model counts on."""
        while self._under_way:
            oldest = self._under_way[0]
            if oldest.alive is not None and self.clock.read_ns(oldest.end) is None:
                return
            self._under_way.popleft().alive = None
