"""Interceptor for collectives of an accelerator's tensors: on AORTA's own stream (`dedicated`, R2), or timed from a
stream beside the backend's (`observe`, R3).

A stall is time in which the *compute* stream was waiting. A strategy's own communication stream also waits for its
collectives (FSDP's does), but nothing computes there, so such a wait is not a stall.

Must not change a value, an exception, a dtype or an order, or make the host wait for a device unless the caller's own
call does.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist

from aorta.distributed.cuda import is_capturing
from aorta.instrument.cpu_interceptor import CpuInterceptor, Member
from aorta.instrument.device_streams import DeviceStreams, StreamOrder, StreamWaits, wait_unseen
from aorta.instrument.dispatcher import (
    Coalescing,
    Interception,
    Original,
    Work,
    ends_on_streams,
    orders_streams,
    shares_communicator,
    wait_for_future,
    with_work,
    work_in,
)
from aorta.instrument.emulation.emulated_link import DelayedOnDevice, DeviceLink, HostLinks
from aorta.instrument.event_clock import EventClock, Mark
from aorta.instrument.in_flight import (
    NO_STREAM,
    STACKED_IN_A_BATCH,
    Group,
    InFlight,
    IssuedWork,
    TimedWork,
    Waited,
    name_of,
)
from aorta.instrument.operators import Operator, tensors_in
from aorta.instrument.step_recorder import StepRecorder


class _Lent:
    """An event that is in use while a caller may still wait for it; then it returns to `pool`."""

    def __init__(self, event: torch.Event, pool: deque[torch.Event]) -> None:
        self.event, self._pool = event, pool

    def __del__(self) -> None:
        self._pool.append(self.event)


@dataclass
class _Batch:
    """The operations that a backend has coalesced so far, and their tensors."""

    rows: list[InFlight] = field(default_factory=list)
    alive: list[Any] = field(default_factory=list)
    stacks: bool = False


def on_streams(group: dist.ProcessGroup, device: torch.device) -> tuple[bool, bool, bool | None]:
    try:
        return orders_streams(group, device), ends_on_streams(group, device), shares_communicator(group, device)
    except RuntimeError:  # the group serves CPU tensors only
        return False, False, None


class DeviceInterceptor(CpuInterceptor):
    """Interceptor for accelerators; collectives of CPU tensors in the same run are timed as on a CPU.

    Args:
        recorder: is also given each wait of the compute stream for another one.
        dedicated: run collectives on AORTA's own stream of their group; otherwise leave them on the backend's, and let
            that stream only wait, for the timing. Sends and receives are never moved: one side stream per group would
            serialise those of opposite directions, and two ranks would wait for each other.
        dedicated_async: run asynchronous collectives there too. The backend has a stream of its own for those, which
            their kernels leave only if it is asked for a synchronous one.
        device_link: of the emulated fabric, for collectives of device tensors; None = the real network.
    """

    def __init__(
        self,
        clock: EventClock,
        groups: dict[str, Group],
        recorder: StepRecorder,
        streams: DeviceStreams,
        device: torch.device,
        *,
        dedicated: bool,
        dedicated_async: bool = False,
        links: HostLinks | None = None,
        device_link: DeviceLink | None = None,
    ) -> None:
        super().__init__(clock, groups, recorder, links)
        self._on_stream_wait, self._device = recorder.on_stream_wait, device
        self._order = StreamOrder()
        self._streams, self._dedicated, self._device_link = streams, dedicated, device_link
        self._dedicated_async = dedicated and dedicated_async
        self._held: deque[InFlight] = deque()
        self._batches: dict[str, _Batch] = {}
        self._launches = itertools.count()
        self._done_events: deque[torch.Event] = deque()

    def open(self, device: torch.device, on_captured: Callable[[], None]) -> Interception:
        hook = super().open(device, on_captured)
        coalescing = Coalescing(self._batch_begins, self._batch_ends)
        waits = StreamWaits(device, self._streams, self.clock.mark, self._on_stream_wait, self._order)
        interception = ExitStack()  # removed together, the last one first
        for each in (hook, coalescing, waits):
            interception.callback(each.close)
        return interception

    def begin(self) -> None:
        self._streams.compute = self._streams.current()
        self._let_go()

    def _on_device(
        self,
        operator: Operator,
        member: Member,
        issued: InFlight,
        args: tuple[Any, ...],
        asynchronous: bool,
        original: Original,
    ) -> Any:
        if (batch := self._batches.get(issued.group)) is not None:
            # A backend counts launches, and a batch is launched once.
            issued.counted = issued.counted and not any(row.counted for row in batch.rows)
            batch.rows.append(issued)
            batch.alive.append(args)
            batch.stacks = batch.stacks or operator.stacks
            return original()  # launched when the batch ends
        issued.communicator = key = issued.group
        if operator.point_to_point:
            peer = "".join(map(str, args[2:-1]))  # the last argument is the tag
            if member.shared is False:  # a communicator for each pair of ranks
                issued.communicator = key = f"{key} {peer}"
            elif member.shared is None:  # unknown: nothing that it may have waited for is taken off its duration
                issued.communicator, key = None, f"{key} {issued.kind} {peer}"
            return self._issue_observed(issued, args, key, original)
        if self._dedicated and (side := self._streams.side(issued.group)) is not None:
            return self._issue_on_side(issued, args, side, asynchronous, original)
        if asynchronous:
            return self._issue_observed(issued, args, issued.group, original, stacks=operator.stacks)
        return self._bracketed(issued, original)

    def _is_moved(self, member: Member, async_at: int | None) -> bool:
        # In a batch `async_op` belongs to the whole of it.
        possible = async_at is not None and member.on_device and member.name not in self._batches
        return self._dedicated_async and possible and self._streams.side(member.name) is not None

    def _issue_on_side(
        self, issued: InFlight, args: tuple[Any, ...], side: torch.Stream, asynchronous: bool, original: Original
    ) -> Any:
        """Issue the collective, between two marks, on AORTA's stream `side` instead of the backend's (R2).

        `side` first waits for the caller's stream. The caller's stream waits for the collective (cudaStreamWaitEvent):
        at once if the call is synchronous, otherwise when the returned handle is waited for.
        """
        self._streams.order(self._streams.current(), side)  # the inputs must be ready (W2)
        with side:
            issued.start = self.clock.mark()
            result = original()
            work = work_in(result)
            self._end(work, [issued])
            done = self._done(side)
            if work is None and asynchronous:  # as `dedicated_async` asks
                work = cast(Work, IssuedWork(done.event, tensors_in(args[0]), self._device))
        if asynchronous:
            self._hold(issued, args)
        else:
            # Later work of the caller's stream then runs after the collective, as if the backend had used that stream.
            self._join(issued, done)
        return result if work is None else with_work(result, self._handle(issued, work, side, done))

    def _issue_observed(
        self, issued: InFlight, args: tuple[Any, ...], key: str, original: Original, *, stacks: bool = False
    ) -> Any:
        """Leave the collective on the backend's stream, and take its marks on a side stream (R3): the start once that
        has waited for the caller's stream, the end once it has waited for the backend's work.
        """
        side = self._streams.side(("beside", key))
        if side is None:
            issued.untimed = NO_STREAM
            return original()
        self._streams.order(self._streams.current(), side)
        with side:
            issued.start = self.clock.mark()
        result = original()
        work = work_in(result)
        if work is None:  # the backend used the caller's stream after all
            self._end(None, [issued])
            return result
        with side:
            released = self._end(work, [issued], stacks=stacks)
        if released:
            self._hold(issued, args)
        return with_work(result, self._handle(issued, work, side))

    def _bracketed(self, issued: InFlight, original: Original) -> Any:
        computes = self._streams.computes()
        begin = self.clock.mark() if computes else None  # every user of a mark releases it once
        issued.start = self.clock.mark()
        result = original()
        self._end(work_in(result), [issued])
        self._note_order(issued, begin, computes=computes)
        return result

    # --- collected into one launch -----------------------------------------------------------------------------------

    def _batch_begins(self, group: dist.ProcessGroup) -> None:
        if self._member(group).on_device:
            self._add_underway(1)
            self._batches[self._member(group).name] = _Batch()

    def _batch_ends(self, group: dist.ProcessGroup, launch: Callable[[], Work | None]) -> Work | None:
        name = self._member(group).name
        batch = self._batches.pop(name, None)
        if batch is None:
            return launch()
        try:
            return self._launch(name, batch, launch)
        finally:
            self._add_underway(-1)

    def _launch(self, name: str, batch: _Batch, launch: Callable[[], Work | None]) -> Work | None:
        if not batch.rows:
            return launch()
        number = next(self._launches)
        computes = self._streams.computes()
        begin = self.clock.mark() if computes else None
        for issued in batch.rows:
            issued.communicator, issued.launch, issued.start = name, number, self.clock.mark()
        work = launch()
        if work is None:  # synchronous: on the caller's stream
            self._end(None, batch.rows)
            self._note_order(batch.rows[-1], begin, computes=computes)
            return None
        if begin is not None:
            self.clock.release(begin)
        side = self._streams.side(("beside", name))
        if side is None or batch.stacks:
            for issued in batch.rows:
                issued.untimed = NO_STREAM if side is None else STACKED_IN_A_BATCH
            return work
        with side:
            self._end(work, batch.rows)
        self._hold(batch.rows[-1], batch.alive)
        return self._handle(batch.rows[-1], work, side)

    # --- ends, and who waits for them --------------------------------------------------------------------------------

    def _end(self, work: Work | None, rows: list[InFlight], *, stacks: bool = False) -> bool:
        """Mark the end on the current stream.

        Args:
            stacks: the backend may be using tensors of its own, which `work.wait()` would release under its kernel.

        Returns:
            Whether the backend has released its tensors.
        """
        kept = work is None or (stacks and wait_for_future(work))
        if work is not None and not kept:
            work.wait()  # blocks the stream, not the host; without it the mark would be at the end of the launch (W1)
        for issued in rows:
            self._delay(issued)
        for issued in rows:
            issued.end, issued.end_source = self.clock.mark(), "event"
        return not kept

    def _done(self, side: torch.Stream) -> _Lent:
        """Return an event after everything on `side`, owned by the caller alone. The end mark's own event returns to
        the clock when the step is read, possibly before the caller waits.
        """
        event = self._done_events.popleft() if self._done_events else torch.Event(device=self._device)
        event.record(side)
        return _Lent(event, self._done_events)

    def _join(self, issued: InFlight, done: _Lent) -> None:
        """Make the caller's stream wait for this collective only, not for those issued after it."""
        self._stalling(issued, lambda: wait_unseen(self._streams.current(), done.event))

    def _stalling(self, issued: InFlight, wait: Callable[[], Any]) -> Any:
        computes = self._streams.computes()
        begin = self.clock.mark() if computes else None
        outcome = wait()
        self._note_order(issued, begin, computes=computes)
        return outcome

    def _note_order(self, issued: InFlight, begin: Mark | None, *, computes: bool) -> None:
        """Note that work submitted to the caller's stream from now on runs after a collective, because that stream ran
        it or waits for its event (cudaStreamWaitEvent). The compute stream may have waited since `begin`; for any other
        one `StreamOrder` keeps the name, for waits of the compute stream for events recorded there.
        """
        if computes:
            self._on_wait(Waited(name_of(issued), begin, self.clock.mark()))
        else:
            self._order.joined(self._streams.current().stream_id, name_of(issued))

    def _handle(self, issued: InFlight, work: Work, side: torch.Stream, done: _Lent | None = None) -> TimedWork:
        """Return the caller's handle, which waits for `done`, or for the backend's work where it was not moved."""
        if self._device_link is not None:  # the backend's stream and future do not include the emulated time
            done = done or self._done(side)
            with side:
                work = cast(Work, DelayedOnDevice(work, done.event, self._device_link.devices))

        def wait(inner: Callable[[], bool], limited: bool) -> bool:
            outcome = True
            if done is None:
                outcome = bool(self._stalling(issued, inner))
            else:
                if limited:
                    outcome = inner()  # with a timeout the host waits, and may get an error
                self._join(issued, done)
            issued.alive = None  # the caller's stream now waits for it, as with the backend's own wait
            return outcome

        return TimedWork(work, wait, self._kept, issued.waiters, repeatable=True, in_place=True, issued=issued)

    def _hold(self, issued: InFlight, alive: Any) -> None:
        """Keep tensors until a caller has waited or the device has passed: our own wait, for the mark, made the
        backend release them (W3). No longer, since a sharded model needs that memory.
        """
        issued.alive = alive
        self._held.append(issued)
        self._let_go()

    def _let_go(self) -> None:
        while self._held and not is_capturing():  # which forbids to ask for an event
            oldest = self._held[0]
            if oldest.alive is not None and oldest.end is not None and self.clock.read_ns(oldest.end) is None:
                return
            self._held.popleft().alive = None

    # --- beside the device's -----------------------------------------------------------------------------------------

    def _on_streams(self, group: dist.ProcessGroup) -> tuple[bool, bool, bool | None]:
        return on_streams(group, self._device)

    def _host_wait(self, wait: Waited) -> None:
        """Time a caller's wait on the host for a collective of CPU tensors; the compute stream does not wait."""

    # --- the emulated fabric -----------------------------------------------------------------------------------------

    def _be_late(self, *, on_host: bool) -> None:
        super()._be_late(on_host=on_host)
        if self._device_link is not None and not on_host:
            self._device_link.be_late()

    def _delay(self, issued: InFlight) -> None:
        if self._device_link is not None:
            self._device_link.delay(issued, self._groups[issued.group].ranks)
