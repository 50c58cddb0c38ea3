"""Compiled interceptors: collectives of CPU tensors timed without the interpreter, those of an accelerator's tensors
issued, marked, waited for and ended without Python; block ranges, marked without Python.

What happens becomes rows of a ring, in the order in which it does. On a device collectives run on AORTA's own stream
(`dedicated`, R2), or are timed from a stream beside the backend's (`observe`, R3). Must not be on the path of a
collective (except once for each process group, each stream, and each batch that a backend coalesces), or run Python
code in a backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from aorta.instrument.backend_calls import DTYPES, group_seen
from aorta.instrument.device_streams import DeviceStreams, StreamOrder, StreamWaits
from aorta.instrument.dispatcher import (
    Coalescing,
    Interception,
    check_torch,
    ends_on_streams,
    orders_streams,
    shares_communicator,
)
from aorta.instrument.event_clock import HostClock, Mark
from aorta.instrument.module_hooks import observe
from aorta.instrument.operators import offered, position_of, position_of_group
from aorta.instrument.recorder import Counts, StepFunctions
from aorta.instrument.transparent import not_compiled
from aorta.records.progress import COUNT_WORD, LAYOUT, PHASES, ROWS_AT, WORD
from aorta.records.ring_file import PASSED_OVER, RingFile, RingGroup
from aorta.records.schema import STALL_CUTOFF_NS, DeviceClockFacts


class NativeRanges:
    """Compiled counterpart of `row_ranges.RowRanges`; rows are those of the compiled `step`."""

    def __init__(self, module: Any, step: Any, ring: RingFile) -> None:
        self.compiled: Any = module.Ranges(step)
        self._ring = ring
        self._ends: list[Callable[[], None]] = []

    def watch(self, name: str, block: nn.Module) -> None:
        before, after, _ = self.compiled.hooks_of(self.compiled.add_block(self._ring.text(name)))
        self._ends.append(observe(block, before=before, after=after))
        self.compiled.look(True)

    def watch_backward(self, module: nn.Module) -> None:
        """Mark the ends of backward passes, as `RowRanges.watch_backward` does."""
        *_, after = self.compiled.hooks_of(0)  # it is of no block
        self._ends.append(observe(module, after=after))
        self.compiled.look(True)

    def close(self) -> None:
        self.compiled.look(False)
        while self._ends:
            self._ends.pop()()


_CPU = torch.device("cpu")


class NativeInterceptor:
    """Compiled counterpart of `python_interceptor.PythonInterceptor`, without an emulated fabric: both append rows.

    Args:
        module: of `build.load`.
        groups: filled with every process group when first seen, by name.
        ring: gets the rows, and step and phase by compiled functions.
        shortest_call_ns: a backend's call that takes longer is noted, as it may have been a stall.
        device: the compiled module's device object, for a run on an accelerator.
    """

    _device = _CPU

    def __init__(
        self,
        module: Any,
        groups: dict[str, RingGroup],
        ring: RingFile,
        shortest_call_ns: int = STALL_CUTOFF_NS,
        device: Any | None = None,
    ) -> None:
        self._groups, self._ring = groups, ring
        operators = [
            module.Operator(
                name,
                operator.kind,
                position_of_group(name),
                operator.argument,
                operator.one_part,
                operator.point_to_point,
                operator.stacks,
                position_of(name, "async_op"),
                position_of(name, "dst", "src"),
            )
            for name, operator in offered().items()
        ]
        layout = COUNT_WORD * WORD, ROWS_AT, ring.slots, list(DTYPES), LAYOUT
        self.rows: Any = module.Ring(ring.file, ring.address, *layout)
        ring.progress.enter = self.rows.enter_function(list(PHASES))
        self._tap: Any = module.Tap(operators, shortest_call_ns, self._saw, device, self.rows)
        self._step: Any = self._tap.step()
        self.marks: Any = self._step.marks()
        self.ranges = NativeRanges(module, self._step, ring)

    def functions(self, counts: Counts) -> StepFunctions:
        """Return C functions that are called at every step, and in it."""
        return StepFunctions(*self.ranges.compiled.loop(self.rows, list(PHASES), counts))

    def open(self, _device: torch.device, _on_captured: Callable[[], None]) -> Interception:
        """Start intercepting; `close` of the returned object ends it. There is no graph capture on a CPU.

        Raises:
            InstrumentError: see `dispatcher.check_torch`.
        """
        check_torch()
        self._tap.open()
        return cast(Interception, self._tap)

    def abandon(self) -> int:
        """Stop recording, and discard what was recorded since the last step ended; returns how many collectives."""
        if self._tap is None:
            return 0
        self.ranges.compiled.record(False)
        return int(self._step.abandon())

    def close(self) -> None:
        self._tap = None

    @not_compiled
    def _saw(self, process_group: dist.ProcessGroup) -> tuple[bool, bool, bool | None, int]:
        """Register a new group; returns `on_device`, `early` and `shared` of `dispatcher`, and its number in rows."""
        on_streams = self._on_streams(process_group)
        # What completes on streams is counted by the device's backend.
        seen = group_seen(process_group, self._device if on_streams[1] else _CPU)
        self._groups[seen.name] = seen
        return *on_streams, self._ring.group(seen)

    def _on_streams(self, _process_group: dist.ProcessGroup) -> tuple[bool, bool, bool | None]:
        return False, False, None


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


class NativeDeviceInterceptor(NativeInterceptor):
    """The interceptor of a run on an accelerator; collectives of CPU tensors in it are timed as on a CPU.

    A stall is time in which the *compute* stream was waiting. A strategy's own communication stream also waits for its
    collectives (FSDP's does), but nothing computes there, so such a wait is not a stall.

    Args:
        dedicated: run collectives on AORTA's own stream of their group; otherwise leave them on the backend's, and let
            that stream only wait, for the timing. Sends and receives are never moved: one side stream per group would
            serialise those of opposite directions, and two ranks would wait for each other.
        dedicated_async: run asynchronous collectives there too. The backend has a stream of its own for those, which
            their kernels leave only if it is asked for a synchronous one.
        priority: of AORTA's own streams; None: that of the stream a collective was issued on.
    """

    def __init__(
        self,
        module: Any,
        clock: NativeDeviceClock,
        groups: dict[str, RingGroup],
        ring: RingFile,
        device: torch.device,
        *,
        dedicated: bool,
        dedicated_async: bool = False,
        priority: int | None = None,
    ) -> None:
        self._streams, self._device, self._clock = DeviceStreams(device), device, clock
        priority_of_current = self._streams.priority if priority is None else lambda: priority
        self._compiled: Any = module.Device(
            clock.compiled, dedicated, dedicated and dedicated_async, priority_of_current
        )
        super().__init__(module, groups, ring, device=self._compiled)
        self._observes = True
        self._order = StreamOrder(self._compiled.take_joined)
        self._on_captured: Callable[[], None] = lambda: None

    def open(self, device: torch.device, on_captured: Callable[[], None]) -> Interception:
        """Start intercepting; `on_captured` is called for each collective that is being captured into a graph."""
        self._on_captured = on_captured
        hook = super().open(device, on_captured)
        coalescing = Coalescing(self._tap.batch_begins, self._tap.batch_ends)
        waits = StreamWaits(device, self._streams, self._mark, self._on_stream_wait, self._order)
        interception = ExitStack()  # removed together, the last one first
        for hook_closed in (hook, coalescing, waits):
            interception.callback(hook_closed.close)
        return interception

    def functions(self, counts: Counts) -> StepFunctions:
        functions = super().functions(counts)

        def begin(*how: Any) -> tuple[int, int]:
            self._streams.compute = self._streams.current()
            if self._tap is not None:
                self._compiled.begin()
            begun = functions.begin(*how)
            self._observes = not how[1] & PASSED_OVER
            return begun

        def end(*how: Any) -> tuple[int, int, int]:
            if self._tap is not None:
                for _ in range(self._tap.take_captured()):
                    self._on_captured()
            return functions.end(*how)

        return functions._replace(begin=begin, end=end)

    def _mark(self) -> Mark | None:
        return self._clock.mark() if self._observes else None

    def _on_stream_wait(self, begin: Mark | None, end: Mark | None, joined: Sequence[Any]) -> None:
        """Note that between these marks the compute stream may have waited for a stream of the strategy, and so for the
        collectives that this one had `joined`; the part that coincides with communication is a stall.
        """
        if self._tap is not None:
            self._step.wait_for_stream(begin or 0, end or 0, joined)

    def _on_streams(self, process_group: dist.ProcessGroup) -> tuple[bool, bool, bool | None]:
        group, device = process_group, self._device
        try:
            return orders_streams(group, device), ends_on_streams(group, device), shares_communicator(group, device)
        except RuntimeError:  # the group serves CPU tensors only
            return False, False, None
