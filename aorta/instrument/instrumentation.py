"""Switches all instrumentation of one rank on and off together.

An `Instrumentation` installs the interception and the hooks for a device and a mode; its `recorder` collects steps and
passes finished ones to a sink. Must not leave a hook or a kernel installed after `close`.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from aorta.instrument.compute_ranges import BlockRanges
from aorta.instrument.cpu_interceptor import CpuInterceptor
from aorta.instrument.device_interceptor import DeviceInterceptor
from aorta.instrument.device_streams import DeviceStreams
from aorta.instrument.dispatcher import DispatcherHook, Handler, Interception, all_groups, issued_by
from aorta.instrument.emulation.emulated_link import DeviceLink, HostLinks, StreamSleep
from aorta.instrument.emulation.network import EmulatedNetwork
from aorta.instrument.emulation.stand_in import NO_VALUES, SWITCH_INTERVAL_S, counts_of_ranks
from aorta.instrument.event_clock import clock_for
from aorta.instrument.in_flight import Group
from aorta.instrument.native.build import compiled, load
from aorta.instrument.native.native_interceptor import (
    NativeCpuInterceptor,
    NativeDeviceClock,
    NativeDeviceInterceptor,
    NativeRanges,
    compiled_algebra,
)
from aorta.instrument.open_step import FROM_PYTHON, INSTEAD, ON_A_CPU
from aorta.instrument.operators import OPERATORS
from aorta.instrument.step_builder import StepBuilder
from aorta.instrument.step_recorder import StepRecorder
from aorta.records.progress_file import Progress
from aorta.records.schema import STALL_CUTOFF_NS, ClockReading, InstrumentMode, Step
from aorta.timeline.overlap import PAIRS, Unseen

_open: weakref.WeakSet[Instrumentation] = weakref.WeakSet()


def _leave_all() -> None:
    for each in list(_open):
        each._ranges.close()
        each.recorder.leave()


os.register_at_fork(after_in_child=_leave_all)


class Instrumentation:
    """The interception, the block ranges and the recorder of one rank.

    Args:
        device: what the run computes on.
        mode: `dedicated`, `observe` or `off` (docs/dev/measuring.md, R2 and R3).
        anchor: relates CLOCK_MONOTONIC to wall-clock time.
        sink: receives finished steps in order.
        stream_priority: of dedicated streams on an accelerator; None: that of the stream a collective was issued on.
        fabric: delays collectives as another network would; None = the real one.
        native: use the compiled parts where they have been built (`native.build`) to time collectives and blocks and to
            measure steps.
        dedicated_async: in `dedicated` mode, move asynchronous collectives as well (`device_interceptor`).
        stall_cutoff_ns: on a CPU, length up to which a backend's call only hands a collective over.
        together: on a CPU, how many steps are read at once (`step_recorder.TOGETHER`, where only SIGKILL can end a run
            with steps unread).

    Raises:
        InstrumentError: this torch lacks what the interception needs.
    """

    def __init__(
        self,
        device: torch.device,
        mode: InstrumentMode,
        rank: int,
        world_size: int,
        anchor: ClockReading,
        sink: Callable[[Step], None],
        stream_priority: int | None = None,
        fabric: EmulatedNetwork | None = None,
        *,
        native: bool = False,
        dedicated_async: bool = False,
        together: int = 1,
        stall_cutoff_ns: int = STALL_CUTOFF_NS,
        progress: Progress | None = None,
    ) -> None:
        module, _ = compiled(device, wanted=native and mode != "off", emulated=fabric is not None)
        clock = NativeDeviceClock(module, device) if module and device.type != "cpu" else clock_for(device)
        built = load()[0] if native else None
        own = counts_of_ranks()
        counted = own or (issued_by if built is None else built.issued_by)
        self.groups: dict[str, Group] = {}
        self.recorder = StepRecorder(
            clock,
            StepBuilder(
                clock,
                rank,
                world_size,
                self.groups,
                anchor,
                PAIRS if built is None else compiled_algebra(built),
                stall_cutoff_ns if device.type == "cpu" else None,
                no_values=None if own is None else NO_VALUES,
            ),
            lambda: {id(group): counted(group) for group in all_groups()},
            sink,
            # An unread step on a device keeps its events and its collectives' tensors alive (R2).
            together=together if device.type == "cpu" else 1,
            progress=progress,
        )
        self._device, self.clock, self._mode = device, clock, mode
        self._dedicated_async = dedicated_async
        # The interceptor outlives a pause: it counts collectives, and keeps those in flight.
        self._interceptor: CpuInterceptor | NativeCpuInterceptor | None = None
        if mode != "off":
            self._interceptor = self._make_interceptor(device, stream_priority, fabric, module, stall_cutoff_ns)
        self.recorder.own.counted = self._interceptor is None or isinstance(self._interceptor, NativeCpuInterceptor)
        # The program may free a model before the recording ends.
        self._blocks: list[tuple[str, weakref.ref[nn.Module]]] = []
        self._outputs: list[weakref.ref[nn.Module]] = []
        # DDP waits for its collectives after the last node, on futures in C++ that bypass our work handles.
        self._ranges: BlockRanges | NativeRanges = (
            self._interceptor.ranges
            if isinstance(self._interceptor, NativeCpuInterceptor)
            else BlockRanges(clock, self.recorder.on_range, self.recorder.on_backward_tail, self.recorder.add_watched)
        )
        self.recorder.no_copies = ON_A_CPU if device.type == "cpu" else None if module else FROM_PYTHON
        self._interception: Interception | None = None
        self._switch_interval_s = sys.getswitchinterval()
        if self._interceptor is None:
            self.recorder.unseen = Unseen("instrument.mode=off: nothing was looked at", compute=True)
        else:
            self._install()
        _open.add(self)  # until then nothing is to be left in a forked child (a data worker)

    def watch(self, blocks: Iterable[tuple[str, nn.Module]]) -> None:
        """Bracket the computation of named blocks; call after the parallel strategy has registered its own hooks on
        them.
        """
        for name, block in blocks:
            self._blocks.append((name, weakref.ref(block)))
            if self._interception is not None:
                self._ranges.watch(name, block)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Remove, between two steps, the instrumentation, as `mode=off` does, for the length of a `with` block.

        Nothing of the instrumentation stays on the run's path, so that steps inside and outside can be compared (K5);
        the steps inside are recorded as unobserved. Every rank must pause for the same steps: collectives are matched
        across ranks by the count of those seen.
        """
        if self._interception is None:
            yield
            return
        self.recorder.catch_up()  # steps observed so far are written now, unobserved ones after them
        self._uninstall()
        self.recorder.unseen = Unseen("the instrument was paused: nothing was looked at", compute=True)
        try:
            yield
        finally:
            self.recorder.catch_up()
            self.recorder.unseen = None
            self._install()

    @contextmanager
    def replaced(self, handler: Handler) -> Iterator[None]:
        """Send, between two steps, every collective to `handler` instead, for the length of a `with` block.

        Collectives that it passes to a backend are not in the record, and show up as missing in a recorded step's
        coverage.
        """
        assert self._interception is not None  # mode=off intercepts nothing
        self._interception.close()
        self._interception = DispatcherHook(OPERATORS, self._device, handler, self.recorder.on_captured)
        no_copies, self.recorder.no_copies = self.recorder.no_copies, self.recorder.no_copies or INSTEAD
        try:
            yield
        finally:
            self.recorder.no_copies = no_copies
            self._interception.close()
            self._interception = self._opened()

    def watch_backward(self, module: nn.Module) -> None:
        self._outputs.append(weakref.ref(module))
        if self._interception is not None:
            self._ranges.watch_backward(module)

    def close(self) -> None:
        """Remove all instrumentation; a second call does nothing."""
        _open.discard(self)
        if self._interception is not None:
            self._uninstall()
        if self._interceptor is not None:
            self._interceptor.close()
            self._interceptor = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _install(self) -> None:
        self._interception = self._opened()
        for name, reference in self._blocks:
            if (block := reference()) is not None:
                self._ranges.watch(name, block)
        for reference in self._outputs:
            if (module := reference()) is not None:
                self._ranges.watch_backward(module)
        if self._device.type == "cpu" and isinstance(self._interceptor, CpuInterceptor):
            sys.setswitchinterval(SWITCH_INTERVAL_S)

    def _opened(self) -> Interception:
        assert self._interceptor is not None  # mode=off has no interceptor
        return self._interceptor.open(self._device, self.recorder.on_captured)

    def _uninstall(self) -> None:
        assert self._interception is not None
        self._ranges.close()
        self._interception.close()
        self._interception = None
        sys.setswitchinterval(self._switch_interval_s)

    def _make_interceptor(
        self,
        device: torch.device,
        stream_priority: int | None,
        fabric: EmulatedNetwork | None,
        module: Any | None,
        shortest_call_ns: int,
    ) -> CpuInterceptor | NativeCpuInterceptor:
        clock, groups, recorder = self.clock, self.groups, self.recorder
        moved: Any = {"dedicated": self._mode == "dedicated", "dedicated_async": self._dedicated_async}
        if isinstance(clock, NativeDeviceClock):
            recorder.compiled_interceptor = NativeDeviceInterceptor(
                module, clock, groups, recorder, device, **moved, priority=stream_priority
            )
            return recorder.compiled_interceptor
        if module is not None:
            recorder.compiled_interceptor = NativeCpuInterceptor(
                module, groups, shortest_call_ns=shortest_call_ns, progress=recorder.progress
            )
            return recorder.compiled_interceptor
        links = None if fabric is None else HostLinks(fabric)
        if device.type == "cpu":
            return CpuInterceptor(clock, groups, recorder, links, shortest_call_ns)
        from_python = DeviceInterceptor(
            clock,
            groups,
            recorder,
            DeviceStreams(device, stream_priority),
            device,
            **moved,
            links=links,
            device_link=None if fabric is None else DeviceLink(fabric, [device], StreamSleep(device)),
        )
        recorder.on_begin = from_python.begin
        return from_python
