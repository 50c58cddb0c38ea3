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
from typing import Any

import torch
import torch.distributed as dist

from aorta.instrument.clock import Clock, Mark
from aorta.instrument.operators import OPERATORS, is_async, position_of_async_op
from aorta.instrument.seam import Original, first_tensor, group_of, unpack, worker_threads
from aorta.instrument.streams import Streams
from aorta.instrument.works import KeptAlive, TimedWork
from aorta.telemetry.schema import EndSource

_CPU = torch.device("cpu")


@dataclass
class Issued:
    """One collective, while it is under way. `start` is None where it has to be derived from the backend's order."""

    kind: str
    group: str
    seq: int
    bytes: int
    dtype: str | None
    issue_ns: int
    start: Mark | None = None
    end: Mark | None = None
    end_source: EndSource | None = None
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
    """

    def __init__(
        self,
        clock: Clock,
        groups: dict[str, Group],
        on_issue: Callable[[Issued], None],
        on_stall: Callable[[Mark, Mark], None],
    ) -> None:
        self.clock, self._groups = clock, groups
        self._on_issue, self._on_stall = on_issue, on_stall
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
        seq = self._count.get(known, 0)
        self._count[known] = seq + 1
        issued = Issued(
            kind=operator.kind,
            group=known,
            seq=seq,
            bytes=operator.full_array_bytes(args, group.size()),
            dtype=None if tensor is None or operator.argument is None else str(tensor.dtype).removeprefix("torch."),
            issue_ns=time.perf_counter_ns(),
        )
        self._on_issue(issued)
        if tensor is None or tensor.device.type == "cpu":
            return self._on_host(issued, original)
        return self._on_device(issued, args, is_async(args, self._async_at[name]), original)

    def _on_host(self, issued: Issued, original: Original) -> Any:
        result = original()
        # The caller's thread was inside the backend: short for an enqueue, long where the backend works in the call.
        self._on_stall(issued.issue_ns, time.perf_counter_ns())
        work, repack = unpack(result)

        with contextlib.suppress(RuntimeError):  # no future: the caller's wait is all there is
            future = work.get_future()
            issued.has_completed = future.done
            future.add_done_callback(lambda _: issued.stamp("future"))

        def wait(inner: Callable[[], bool]) -> bool:
            begin = time.perf_counter_ns()
            try:
                return inner()
            finally:
                issued.stamp("wait")
                self._on_stall(begin, time.perf_counter_ns())

        return repack(TimedWork(work, wait, self._kept))

    def _on_device(self, issued: Issued, args: tuple[Any, ...], asynchronous: bool, original: Original) -> Any:
        raise NotImplementedError("a collective of device tensors in a run on the CPU")


class DeviceTap(HostTap):
    """CUDA/HIP backends; collectives of CPU tensors beside them are timed as on a CPU.

    Args:
        dedicated: run collectives on our own stream of their group; otherwise leave them where they are and let that
            stream only wait, for the timing.
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
    ) -> None:
        super().__init__(clock, groups, on_issue, on_stall)
        self._streams, self._dedicated = streams, dedicated
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
        return repack(TimedWork(work, join, self._kept))

    def _watched(self, issued: Issued, args: tuple[Any, ...], original: Original) -> Any:
        """Leave it on the backend's stream and let ours wait beside it, for the marks (R3)."""
        side = self._streams.of_group(issued.group)
        side.wait_stream(self._streams.current())
        with self._streams.use(side):
            issued.start = self.clock.mark()
        result = original()
        work, repack = unpack(result)
        with self._streams.use(side):
            self._ended_on(side, issued, work, args)

        def wait(inner: Callable[[], bool]) -> bool:
            begin = self.clock.mark()
            outcome = inner()
            self._on_stall(begin, self.clock.mark())
            return outcome

        return repack(TimedWork(work, wait, self._kept))

    def _ended_on(self, side: Any, issued: Issued, work: Any, args: tuple[Any, ...]) -> Any:
        """Mark the end on `side`, which is current; returns an event that nobody else records again."""
        work.wait()  # makes `side` wait, not the host; without it the end event would time the launch (W1)
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
