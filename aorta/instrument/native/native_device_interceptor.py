"""Compiled interceptor for collectives of an accelerator's tensors: issued, marked, waited for and ended without
Python.

The rules are those of `device_interceptor` and are explained there; the same tests run against both. Must not be on the
path of a collective (except once for each process group, each stream, and each batch that a backend coalesces).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from aorta.instrument.compute_ranges import Range
from aorta.instrument.device_interceptor import on_streams
from aorta.instrument.device_streams import DeviceStreams, StreamOrder, StreamWaits
from aorta.instrument.dispatcher import Coalescing, Interception, counts_point_to_point
from aorta.instrument.event_clock import Mark
from aorta.instrument.in_flight import NO_STREAM, STACKED_IN_A_BATCH, Group, InFlight
from aorta.instrument.native.native_interceptor import NativeCpuInterceptor
from aorta.instrument.open_step import NativeEvents
from aorta.instrument.waits import Name
from aorta.records.schema import DeviceClockFacts

_OF_THE_GROUP, _UNKNOWN = -1, -2  # step.hpp
_UNTIMED = (None, NO_STREAM, STACKED_IN_A_BATCH)


class NativeDeviceClock:
    """Compiled counterpart of `event_clock.DeviceClock`; a mark is an integer, negative where it is an event.

    Args:
        module: of `build.load`.
        device: whose streams are marked.
    """

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


class NativeDeviceInterceptor(NativeCpuInterceptor):
    """Compiled counterpart of `device_interceptor.DeviceInterceptor`; does not support an emulated fabric.

    Args:
        on_stream_wait: as of `device_interceptor.DeviceInterceptor`.
        dedicated_async: as of `device_interceptor.DeviceInterceptor`.
        on_captured: called for each collective that is being captured into a graph.
        priority: of AORTA's own streams; None: that of the stream a collective was issued on.
    """

    def __init__(
        self,
        module: Any,
        clock: NativeDeviceClock,
        groups: dict[str, Group],
        on_stream_wait: Callable[[Mark, Mark, tuple[Name, ...]], None],
        device: torch.device,
        *,
        dedicated: bool,
        dedicated_async: bool = False,
        priority: int | None = None,
    ) -> None:
        self._streams, self._device, self._clock = DeviceStreams(device), device, clock
        self._on_stream_wait = on_stream_wait
        compiled = module.Device(
            clock.compiled, dedicated, dedicated and dedicated_async, priority, self._streams.priority
        )
        super().__init__(module, groups, compiled)
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

    def begin(self) -> None:
        self._streams.compute = self._streams.current()
        super().begin()

    def end(self) -> Callable[[], NativeEvents]:
        if self._tap is not None:
            for _ in range(self._tap.take_captured()):
                self._on_captured()
        return super().end()

    def abandon(self) -> None:
        if self._tap is not None:
            self._tap.let_go(self._tap.end())
            self.ranges.forget()

    def _with_passes(self, events: NativeEvents, noted: Any) -> NativeEvents:
        passes, tails = self.ranges.read(noted)
        ranges = [Range(block, phase, start or None, end or None) for block, phase, start, end in passes]
        return replace(events, tails=tails, ranges=ranges)

    def _attach_end(self, issued: InFlight, source: Any) -> None:
        if not isinstance(source, tuple):
            super()._attach_end(issued, source)
            return
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

    def _saw(self, process_group: dist.ProcessGroup) -> tuple[bool, bool, bool | None]:
        super()._saw(process_group)
        ordered = on_streams(process_group, self._device)
        if ordered[1]:
            counted = counts_point_to_point(process_group, self._device)
            self._counts_point_to_point[process_group.group_name] = counted
        return ordered
