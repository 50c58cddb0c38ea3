"""Compiled interceptors: collectives of CPU tensors timed without the interpreter, those of an accelerator's tensors
issued, marked, waited for and ended without Python; block ranges, marked without Python; interval arithmetic.

Events are fetched once per step, and become `InFlight` rows, stalls and passes of blocks in the order in which they
happened. The rules on a device are those of `device_interceptor` and are explained there; the same tests run against
both. Must not be on the path of a collective (except once for each process group, each stream, and each batch that a
backend coalesces), or run Python code in a backward pass.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from aorta.instrument.compute_ranges import Range, observe
from aorta.instrument.cpu_interceptor import DTYPES, dtype_name, group_seen
from aorta.instrument.device_interceptor import on_streams
from aorta.instrument.device_streams import DeviceStreams, StreamOrder, StreamWaits
from aorta.instrument.dispatcher import Coalescing, Interception, check_torch, counts_point_to_point
from aorta.instrument.event_clock import HostClock, Mark
from aorta.instrument.in_flight import NO_STREAM, STACKED_IN_A_BATCH, Group, InFlight, Waited
from aorta.instrument.open_step import COMPILED_PARTS, DIRECTIONS, Copied, NativeEvents, OpenStep
from aorta.instrument.operators import offered, position_of_async_op, position_of_group, position_of_peer
from aorta.instrument.step_recorder import StepRecorder
from aorta.instrument.transparent import not_compiled
from aorta.records.progress_file import RING_WORDS, Progress, ProgressFile
from aorta.records.ring_file import COUNT_AT, ROWS_AT, RingFile, RingGroup, RingOperator
from aorta.records.schema import STALL_CUTOFF_NS, DeviceClockFacts
from aorta.records.step_line import Name
from aorta.timeline.intervals import Interval
from aorta.timeline.overlap import Algebra


def compiled_algebra(module: Any) -> Algebra[Iterable[Interval], Any]:
    """Return the operations of `module`, which give what `overlap.PAIRS` gives for nanoseconds that fit in int64.

    Their results are opaque, except those of `pairs`.
    """
    return Algebra(
        module.lane,
        module.unite,
        module.intersect,
        module.subtract,
        module.measure,
        module.tile,
        module.pairs,
    )


class NativeRanges:
    """Compiled counterpart of `compute_ranges.BlockRanges`; `tap` is notified when a backward pass has ended. `ring`:
    where passes are rows.
    """

    def __init__(self, module: Any, tap: Any, ring: RingFile | None = None) -> None:
        self.compiled: Any = module.Ranges(tap)
        self._ring = ring
        self._names: list[str] = []
        self._ends: list[Callable[[], None]] = []

    def watch(self, name: str, block: nn.Module) -> None:
        number = self.compiled.add_block(0 if self._ring is None else self._ring.text(name))
        self._names.append(name)
        before, after = self.compiled.before_forward(block, number), self.compiled.after_forward(block, number)
        self._ends.append(observe(block, before=before, after=after))
        self.compiled.look()

    def watch_backward(self, module: nn.Module) -> None:
        """Mark the ends of backward passes, as `BlockRanges.watch_backward` does."""
        self._ends.append(observe(module, after=self.compiled.after_watched_forward(module)))
        self.compiled.look()

    def read(self, noted: Any) -> tuple[list[Range], list[tuple[Mark, Mark]]]:
        """Return what `end` of the compiled part gave, on a device."""
        rows, tails = noted.rows()
        return [
            Range(self._names[block], "backward" if back else "forward", start or None, end or None)
            for block, back, start, end in rows
        ], tails

    def close(self) -> None:
        self.compiled.ignore()
        while self._ends:
            self._ends.pop()()


_CPU = torch.device("cpu")


def ring_operators() -> tuple[RingOperator, ...]:
    """Return what the numbers of operators in rows stand for."""
    return tuple(RingOperator(operator.kind, operator.point_to_point) for operator in offered().values())


class _NativeInterceptor:
    """What both compiled interceptors have in common; neither supports an emulated fabric.

    Args:
        module: of `build.load`.
        groups: filled with every process group when first seen, by name.
        device: the compiled module's device object, for a run on an accelerator; None: rows are appended to `ring`.
        shortest_call_ns: a backend's call that takes longer is reported, as it may have been a stall.
        progress: compiled code notes collectives, steps and phases there.

    Raises:
        InstrumentError: see `dispatcher.check_torch`.
    """

    def __init__(
        self,
        module: Any,
        groups: dict[str, Group],
        device: Any | None = None,
        ring: RingFile | None = None,
        shortest_call_ns: int = STALL_CUTOFF_NS,
        progress: Progress | None = None,
    ) -> None:
        check_torch()
        self._groups, self._ring = groups, ring
        self._progress = progress or Progress()
        self._counts_point_to_point: dict[str, bool] = {}
        here = offered()
        self._operators = tuple(here.values())
        operators = [
            (
                name,
                module.Operator(
                    kind=operator.kind,
                    group_at=position_of_group(name),
                    argument=operator.argument,
                    one_part=operator.one_part,
                    coalesced=operator.coalesced,
                    point_to_point=operator.point_to_point,
                    stacks=operator.stacks,
                    async_at=position_of_async_op(name),
                    peer_at=position_of_peer(name),
                ),
            )
            for name, operator in here.items()
        ]
        noted = None
        if isinstance(self._progress, ProgressFile):
            noted = module.Progress(os.fsencode(self._progress.path), *RING_WORDS, list(DTYPES))
            self._progress.compile_phases(noted)
        self.rows: Any = None
        if ring is not None:
            self.rows = module.Ring(ring.file, ring.address, COUNT_AT, ROWS_AT, ring.slots, list(DTYPES))
        self._tap: Any = module.Tap(operators, shortest_call_ns, self._saw, device, noted, self.rows)
        self.ranges = NativeRanges(module, self._tap, ring)

    def open(self, _device: torch.device, _on_captured: Callable[[], None]) -> Interception:
        """Start intercepting; `close` of the returned object ends it. There is no graph capture on a CPU."""
        self._tap.open()
        return cast(Interception, self._tap)

    def begin(self, *, continues: bool = False) -> tuple[int, int]:
        """Begin a step; returns how many collectives since the last one belong to none, 0 where it `continues` that,
        and how many rows stand before it.
        """
        if self._tap is None:
            return 0, 0
        self.ranges.compiled.begin()
        dropped, rows = self._tap.begin(continues)
        return dropped, rows

    def underway(self) -> int:
        """Return how many calls of backends have not returned."""
        return 0 if self._tap is None else int(self._tap.underway())

    def count(self) -> int:
        """Return how many collectives were recorded since the last step ended."""
        return 0 if self._tap is None else int(self._tap.count())

    def abandon(self) -> int:
        """Stop recording, and discard what was recorded since the last step ended; returns how many collectives."""
        if self._tap is None:
            return 0
        self.ranges.compiled.begin()
        self.ranges.compiled.end()
        return int(self._tap.abandon())

    def _name(self, operator: int, group: str, seq: int) -> Name:
        kind = self._operators[operator]
        return Name(group, seq, kind.kind if kind.point_to_point else None)

    def close(self) -> None:
        self._tap = None

    @not_compiled
    def _saw(self, process_group: dist.ProcessGroup) -> tuple[bool, bool, bool | None, int, int]:
        """Register a new group; returns `on_device`, `early` and `shared` of `cpu_interceptor.Member`, its index in the
        progress file, and its number in the ring.
        """
        name = process_group.group_name
        self._groups[name] = seen = group_seen(process_group)
        counted = self._counts_point_to_point[name] = counts_point_to_point(process_group, _CPU)
        number = 0 if self._ring is None else self._ring.group(RingGroup(name, seen.lanes, counted))
        return *self._on_streams(process_group), self._progress.group(name, seen.ranks), number

    def _on_streams(self, _process_group: dist.ProcessGroup) -> tuple[bool, bool, bool | None]:
        return False, False, None


class NativeCpuInterceptor(_NativeInterceptor):
    """Compiled counterpart of `python_interceptor.PythonInterceptor`: both append rows to a ring."""

    def __init__(
        self,
        module: Any,
        groups: dict[str, Group],
        ring: RingFile,
        shortest_call_ns: int = STALL_CUTOFF_NS,
        progress: Progress | None = None,
    ) -> None:
        super().__init__(module, groups, None, ring, shortest_call_ns, progress)

    def end(self) -> tuple[int, Sequence[int]]:
        """End a step; returns the index behind its rows, and AORTA's own time in compiled code, by `COMPILED_PARTS`, in
        nanoseconds. What is recorded from now on is part of the next step, where that continues this one.
        """
        if self._tap is None:
            return 0, ()
        noted = self._tap.end()
        self.ranges.compiled.end()
        return noted.ring_rows, noted.own_ns


_OF_THE_GROUP, _UNKNOWN = -1, -2  # step.hpp
_UNTIMED = (None, NO_STREAM, STACKED_IN_A_BATCH)


class NativeDeviceClock(HostClock):
    """Compiled counterpart of `event_clock.DeviceClock`; a mark is an integer, negative where it is an event."""

    def __init__(self, module: Any, device: torch.device) -> None:
        self._device = device
        torch.accelerator.synchronize(device)  # before the first step; with `facts` the only rendezvous of a run
        self.compiled = module.DeviceClock(device)
        self.new_epoch: Callable[[], None] = self.compiled.new_epoch
        self._mark: Callable[[], int] = self.compiled.mark
        self.read_ns: Callable[[int], int | None] = self.compiled.read_ns
        self.sent_ns: Callable[[int], int | None] = self.compiled.sent_ns
        self.release: Callable[[int], None] = self.compiled.release
        self.bound_ns = int(self.compiled.bound_ns())

    def mark(self) -> Mark | None:
        return self._mark() or None

    def forget(self, mark: Mark | None) -> None:
        if mark is not None:
            self.release(mark)

    def drain(self) -> None:
        torch.accelerator.synchronize(self._device)

    def facts(self) -> DeviceClockFacts:
        self.drain()
        return DeviceClockFacts(*self.compiled.facts())


class NativeDeviceInterceptor(_NativeInterceptor):
    """Compiled counterpart of `device_interceptor.DeviceInterceptor`; does not support an emulated fabric.

    Args:
        recorder, dedicated_async: as of `device_interceptor.DeviceInterceptor`.
        on_captured: called for each collective that is being captured into a graph.
        priority: of AORTA's own streams; None: that of the stream a collective was issued on.
    """

    def __init__(
        self,
        module: Any,
        clock: NativeDeviceClock,
        groups: dict[str, Group],
        recorder: StepRecorder,
        device: torch.device,
        *,
        dedicated: bool,
        dedicated_async: bool = False,
        priority: int | None = None,
    ) -> None:
        self._streams, self._device, self._clock = DeviceStreams(device), device, clock
        self._on_stream_wait = recorder.on_stream_wait
        compiled = module.Device(
            clock.compiled, dedicated, dedicated and dedicated_async, priority, self._streams.priority
        )
        super().__init__(module, groups, compiled, progress=recorder.progress)
        self._order = StreamOrder(lambda stream: [self._name(*name) for name in compiled.take_joined(stream)])
        self._on_captured: Callable[[], None] = lambda: None
        self._counted_launch: int | None = None

    def open(self, device: torch.device, on_captured: Callable[[], None]) -> Interception:
        self._on_captured = on_captured
        hook = super().open(device, on_captured)
        coalescing = Coalescing(self._tap.batch_begins, self._tap.batch_ends)
        waits = StreamWaits(device, self._streams, self._clock.mark, self._on_stream_wait, self._order)
        interception = ExitStack()  # removed together, the last one first
        for each in (hook, coalescing, waits):
            interception.callback(each.close)
        return interception

    def begin(self, *, continues: bool = False) -> tuple[int, int]:
        self._streams.compute = self._streams.current()
        return super().begin(continues=continues)

    def end(self) -> NativeEvents | None:
        """End a step; the returned callable adds its events to it. None after `close`. What is recorded from now on is
        part of the next step, where that continues this one.
        """
        if self._tap is None:
            return None
        for _ in range(self._tap.take_captured()):
            self._on_captured()
        return partial(self._add, self._tap.end(), self.ranges.compiled.end())

    def _add(self, noted: Any, passes: Any, step: OpenStep) -> None:
        rows, waits, copies, unwatched, own_ns = noted.rows()
        step.unwatched += unwatched
        if step.own_ns is not None:
            step.own_ns |= zip(COMPILED_PARTS, own_ns, strict=True)
        operators = self._operators
        for number, group, seq, size, dtype, issue_ns, waiters, end_ns, source, by_future in rows:
            operator = operators[number]
            name = None if dtype is None else dtype_name(dtype)
            issued = InFlight(operator.kind, group, seq, size, name, issue_ns, seq, None, end_ns, None, waiters)
            if isinstance(source, tuple):
                self._attach_marks(issued, source)
            elif end_ns is None:
                issued.completion = source
            else:
                issued.end_source = source
            issued.by_future = by_future
            if operator.point_to_point:
                issued.number, issued.counted = None, self._counts_point_to_point[group]
            step.collectives.append(issued)
        step.waits += [Waited(self._name(*wait[:3]), *wait[3:]) for wait in waits]
        step.copies += [
            Copied(DIRECTIONS[way], size, start or None, end or None, computes)
            for way, size, start, end, computes in copies
        ]
        compute, tails = self.ranges.read(passes)
        step.compute += compute
        step.tails += tails

    def _attach_marks(self, issued: InFlight, source: Any) -> None:
        """Attach the marks of a collective on the device."""
        start, issued.end, issued.launch, communicator, untimed = source
        issued.start, issued.end_source = start or None, "event" if issued.end else None
        issued.end = issued.end or None
        if communicator != _UNKNOWN:
            issued.communicator = issued.group if communicator == _OF_THE_GROUP else f"{issued.group} {communicator}"
        issued.untimed = _UNTIMED[untimed]
        if issued.launch is not None and issued.kind not in ("send", "recv"):
            # A backend counts launches, and a batch is launched once.
            issued.counted = issued.launch != self._counted_launch
            self._counted_launch = issued.launch

    def _on_streams(self, process_group: dist.ProcessGroup) -> tuple[bool, bool, bool | None]:
        ordered = on_streams(process_group, self._device)
        if ordered[1]:
            counted = counts_point_to_point(process_group, self._device)
            self._counts_point_to_point[process_group.group_name] = counted
        return ordered
