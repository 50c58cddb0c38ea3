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
from functools import partial
from typing import Final, Self

import torch
import torch.distributed as dist
from torch import nn

from aorta.instrument.backend_calls import DTYPES, dtype_name
from aorta.instrument.device_recorder import DeviceRecorder
from aorta.instrument.dispatcher import DispatcherHook, Handler, Interception, counts_of_groups, issued_by
from aorta.instrument.emulation.emulated_link import HostLinks
from aorta.instrument.emulation.network import EmulatedNetwork
from aorta.instrument.emulation.stand_in import NO_VALUES, SWITCH_INTERVAL_S, counts_of_ranks
from aorta.instrument.event_clock import DeviceClock, HostClock
from aorta.instrument.native.build import compiled, load
from aorta.instrument.native.native_interceptor import (
    NativeDeviceClock,
    NativeDeviceInterceptor,
    NativeInterceptor,
)
from aorta.instrument.operators import OPERATORS, offered
from aorta.instrument.python_interceptor import PythonInterceptor
from aorta.instrument.recorder import Recorder
from aorta.instrument.ring_lines import LentRecord
from aorta.records.ring_file import RingFacts, RingFile, RingGroup, RingOperator
from aorta.records.schema import STALL_CUTOFF_NS, ClockReading, InstrumentMode, Step
from aorta.timeline.overlap import Unseen

NOT_COMPILED: Final = (
    "on a device only compiled code times collectives and blocks, and it is not used ({why}): nothing was looked at"
)
ON_A_CPU: Final = "on a CPU a copy is made by the threads that compute: it is part of computation"
_INSTEAD: Final = "copies are not looked at in an isolated baseline"
_open: weakref.WeakSet[Instrumentation] = weakref.WeakSet()


def _leave_all() -> None:
    for instrument in list(_open):
        instrument._interceptor.ranges.close()
        instrument.recorder.leave()
        if isinstance(instrument._interceptor, PythonInterceptor):
            instrument._interceptor.leave()


os.register_at_fork(after_in_child=_leave_all)


class Instrumentation:
    """The interception, the block ranges and the recorder of one rank.

    Args:
        device: what the run computes on.
        mode: `dedicated`, `observe` or `off` (docs/dev/measuring.md, R2 and R3).
        anchor: relates CLOCK_MONOTONIC to wall-clock time.
        sink: receives finished steps in order.
        stream_priority: of dedicated streams on an accelerator; None: that of the stream a collective was issued on.
        fabric: delays collectives as another network would, on a CPU; None = the real one.
        native: use the compiled parts where they have been built (`native.build`) to time collectives and blocks. On a
            device nothing else does: without them it is off.
        dedicated_async: in `dedicated` mode, move asynchronous collectives as well (`NativeDeviceInterceptor`).
        stall_cutoff_ns: on a CPU, length up to which a backend's call only hands a collective over.
        ring: of the rank, which outlives the instrument; None: one in memory.
        elsewhere: the record, where another process may make the lines of the ring.

    Attributes:
        why_off: why nothing is looked at; None: it is.

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
        stall_cutoff_ns: int = STALL_CUTOFF_NS,
        ring: RingFile | None = None,
        elsewhere: LentRecord | None = None,
    ) -> None:
        module, timed_by = compiled(device, wanted=native, emulated=fabric is not None)
        on_a_device = device.type != "cpu"
        self.why_off: str | None = None
        if mode == "off":
            self.why_off = "instrument.mode=off: nothing was looked at"
        elif module is None and on_a_device:
            self.why_off = NOT_COMPILED.format(why=timed_by.partition(": ")[2])
        clock = HostClock()
        if on_a_device:
            clock = DeviceClock(device) if module is None else NativeDeviceClock(module, device)
            elsewhere = None  # only this process can ask the device
        built = load()[0] if native else None
        own = counts_of_ranks()
        no_values = None if own is None else NO_VALUES
        self.groups: dict[str, RingGroup] = {}
        self._device, self.clock = device, clock

        counts = partial(counts_of_groups, own or issued_by)
        if own is None and built is not None:
            counts = built.counts_function(dist.distributed_c10d)
        facts = ring_facts(
            rank,
            world_size,
            anchor,
            stall_cutoff_ns,
            no_values,
            anchor_interval=None if elsewhere is None else elsewhere.anchor_interval,
            bound_ns=clock.bound_ns if on_a_device else None,
            times_spans=module is not None or not on_a_device,
        )
        ring = RingFile.create(None) if ring is None else ring
        ring.describe(facts)
        if ring.path is None:
            elsewhere = None
        elif elsewhere is not None:
            elsewhere.lend(ring)
        self._ring = ring
        # The interceptor outlives a pause: it counts collectives, and keeps those in flight. It is not opened where
        # nothing is looked at.
        self._interceptor: NativeInterceptor | PythonInterceptor
        if isinstance(clock, NativeDeviceClock):
            moved = {"dedicated": mode == "dedicated", "dedicated_async": dedicated_async}
            self._interceptor = NativeDeviceInterceptor(
                module, clock, self.groups, ring, device, **moved, priority=stream_priority
            )
        elif module is not None:
            self._interceptor = NativeInterceptor(module, self.groups, ring, stall_cutoff_ns)
        else:
            links = None if fabric is None or mode == "off" else HostLinks(fabric)
            self._interceptor = PythonInterceptor(self.groups, ring, links, stall_cutoff_ns, on_device=on_a_device)
        self.recorder: Recorder
        if not on_a_device:
            self.recorder = Recorder(ring, self._interceptor, counts, sink, elsewhere)
        else:
            self.recorder = DeviceRecorder(ring, self._interceptor, clock, counts, sink)
        self.recorder.own_is_counted = module is not None or self.why_off is not None
        # The program may free a model before the recording ends.
        self._blocks: list[tuple[str, weakref.ref[nn.Module]]] = []
        self._outputs: list[weakref.ref[nn.Module]] = []
        self.recorder.no_copies = None if on_a_device else ON_A_CPU
        self._interception: Interception | None = None
        self._switch_interval_s = sys.getswitchinterval()
        if self.why_off is not None:
            self.recorder.unseen = Unseen(self.why_off, compute=True)
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
                self._interceptor.ranges.watch(name, block)

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
        sampler, self.recorder.sampler = self.recorder.sampler, None
        try:
            yield
        finally:
            self.recorder.catch_up()
            self.recorder.unseen, self.recorder.sampler = None, sampler
            self._install()

    @contextmanager
    def replaced(self, handler: Handler) -> Iterator[None]:
        """Send, between two steps, every collective to `handler` instead, for the length of a `with` block.

        Collectives that it passes to a backend are not in the record, and show up as missing in a recorded step's
        coverage.
        """
        assert self._interception is not None  # it looks at something
        self._interception.close()
        self._interception = DispatcherHook(OPERATORS, self._device, handler, self.recorder.on_captured)
        no_copies, self.recorder.no_copies = self.recorder.no_copies, self.recorder.no_copies or _INSTEAD
        try:
            yield
        finally:
            self.recorder.no_copies = no_copies
            self._interception.close()
            self._interception = self._opened()

    def watch_backward(self, module: nn.Module) -> None:
        self._outputs.append(weakref.ref(module))
        if self._interception is not None:
            self._interceptor.ranges.watch_backward(module)

    def close(self) -> None:
        """Remove all instrumentation; a second call does nothing."""
        if self not in _open:
            return
        _open.discard(self)
        if self._interception is not None:
            self._uninstall()
        self._interceptor.close()
        if self.recorder.is_whole:
            self._ring.is_whole = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _install(self) -> None:
        self._interception = self._opened()
        for name, reference in self._blocks:
            if (block := reference()) is not None:
                self._interceptor.ranges.watch(name, block)
        for reference in self._outputs:
            if (module := reference()) is not None:
                self._interceptor.ranges.watch_backward(module)
        if isinstance(self._interceptor, PythonInterceptor):
            sys.setswitchinterval(SWITCH_INTERVAL_S)

    def _opened(self) -> Interception:
        return self._interceptor.open(self._device, self.recorder.on_captured)

    def _uninstall(self) -> None:
        assert self._interception is not None
        self._interceptor.ranges.close()
        self._interception.close()
        self._interception = None
        sys.setswitchinterval(self._switch_interval_s)


def ring_facts(
    rank: int,
    world_size: int,
    anchor: ClockReading,
    stall_cutoff_ns: int,
    no_values: str | None = None,
    *,
    anchor_interval: int | None = None,
    bound_ns: int | None = None,
    times_spans: bool = True,
) -> RingFacts:
    """Return the facts of this process's ring. `bound_ns`: of the clock of its device, if it has one."""
    return RingFacts(
        rank=rank,
        world_size=world_size,
        anchor=anchor,
        stall_cutoff_ns=stall_cutoff_ns,
        no_copies=ON_A_CPU if bound_ns is None else None,
        no_values=no_values,
        operators=tuple(RingOperator(operator.kind, operator.point_to_point) for operator in offered().values()),
        dtypes=tuple(dtype_name(dtype) for dtype in DTYPES),
        anchor_interval=anchor_interval,
        bound_ns=bound_ns,
        times_spans=times_spans,
    )
