"""Collectives of device tensors: on a stream of our own (`dedicated`, R2), or timed beside another (`observe`, R3).

Enters and leaves: as in `collectives`. Must not: change a value, an exception, a dtype or an order; wait on the host
for a device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, cast

from aorta.instrument.clock import Clock, Mark
from aorta.instrument.collectives import HostTap
from aorta.instrument.issued import Group, Issued
from aorta.instrument.links import DelayedOnDevice, DeviceLink, HostLinks
from aorta.instrument.seam import Original, Work, with_work, work_in
from aorta.instrument.streams import Streams
from aorta.instrument.works import TimedWork


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
        if (work := work_in(result)) is not None:
            work.wait()
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
            work = work_in(result)
            if work is None and asynchronous:
                return result  # part of a batch, which is issued later and past the seam: its end is not known
            done = self._ended_on(side, issued, work, args)

        def join(_inner: Callable[[], bool] | None = None) -> bool:
            begin = self.clock.mark()
            self._streams.current().wait_event(done)  # this collective only, not what was issued behind it
            self._on_stall(begin, self.clock.mark())
            return True

        if not asynchronous:
            join()
        if work is None:
            return result
        timed = TimedWork(self._delayed(side, work, done), join, self._kept, issued.waiters, repeatable=True)
        return with_work(result, timed)

    def _watched(self, issued: Issued, args: tuple[Any, ...], original: Original) -> Any:
        """Leave it on the backend's stream and let ours wait beside it, for the marks (R3)."""
        side = self._streams.of_group(issued.group)
        side.wait_stream(self._streams.current())
        with self._streams.use(side):
            issued.start = self.clock.mark()
        result = original()
        work = work_in(result)
        if work is None:
            return result  # part of a batch, as above
        with self._streams.use(side):
            done = self._ended_on(side, issued, work, args)

        def wait(inner: Callable[[], bool]) -> bool:
            begin = self.clock.mark()
            outcome = inner()
            if self._device_link is not None:
                self._streams.current().wait_event(done)  # the backend's stream knows nothing of the emulated time
            self._on_stall(begin, self.clock.mark())
            return outcome

        timed = TimedWork(self._delayed(side, work, done), wait, self._kept, issued.waiters, repeatable=True)
        return with_work(result, timed)

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
        if work is not None:
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
