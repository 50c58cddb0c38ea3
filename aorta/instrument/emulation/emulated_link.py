"""Emulates a network: delays the completion of collectives, on the host's clock or on a device's stream.

It wraps the backend's work handles in handles that complete when the emulated network would have completed them, and
stores the emulated start and end in the `InFlight` row.

When does a collective end? On a real link it begins when its last rank has arrived and the link is free, and takes
`cost`:

    end = max(last arrival, end of the previous one) + cost

Each process group has a link, or the groups of a rank share its links (`shared_links`): then the collective takes those
of all its ranks, and the previous one is the last on any of them.

The last arrival is what makes the answer right: measured from this rank's own issue, a straggler would be hidden behind
the cost; measured from the backend's completion, the backend's own time would be added to every collective. With it
`transfer_ms`, the shortest duration over ranks, is the straggler's own and stays `cost`, and a peer that arrived s
earlier waits s (K3). All ranks compute the same end from the same arrivals, so they stay in step. The data must be
there as well: where the backend takes longer than all that, its completion is the end, the row keeps the backend's
`end_source`, and the run reports how often that happened.

Ranks on several hosts share no clock, and neither does a device: there the collective takes `cost` from the moment the
backend has completed, which every rank sees at about the same time, and the backend's own time is added. On several
hosts a work without a future (gloo's reduce-scatter) reports its completion only to its caller: there the collective is
taken to begin with this rank's own issue, and a straggler shorter than `cost` is not seen.

Must not touch data, wait for a backend's work that has no future (its caller must, once: R6), or hold the interpreter
lock while it waits.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

from aorta.config.fabric import spans_nodes
from aorta.config.schema import Sharing
from aorta.distributed.cuda import spin
from aorta.instrument.dispatcher import Work
from aorta.instrument.emulation.network import Arrivals, EmulatedNetwork, SharedLinks
from aorta.instrument.timed_work import InFlight
from aorta.timeline.classes import LOCKSTEP

_log = logging.getLogger(__name__)

SPIN_NS = 300_000
"""The last part of a wait polls the clock: a sleep on Linux ends 50 us late or more (its timer slack)."""
_POLL_S = 1e-4
_CLOSE_S = 2.0
_CALIBRATION_CYCLES = 20_000_000
"""About 10 ms at 2 GHz: long compared with the event resolution of 0.5 us."""
_CALIBRATIONS = 5
_LONG_ENOUGH_NS = 100_000
"""Shortest spin that is used for recalibration: the event resolution of 0.5 us is then 0.5 %."""


@dataclass
class Transfer:
    """One collective on an emulated link. `backend_ns` is when the backend completed it, valid once `backend` is
    set; `copy` writes its outputs where no backend issues it (`emulated_ranks`).
    """

    issued: InFlight
    cost_ns: int
    ranks: tuple[int, ...] = ()
    has_future: bool = False
    copy: Callable[[], None] | None = None
    backend: threading.Event = field(default_factory=threading.Event)
    backend_ns: int = 0
    gate: torch.futures.Future[None] = field(default_factory=torch.futures.Future)

    def backend_done(self, _future: Any) -> None:
        self.backend_ns = time.perf_counter_ns()
        self.backend.set()


class Tally:
    """Counts the collectives that were emulated, and those for which the backend was slower. Thread-safe."""

    def __init__(self) -> None:
        self.carried, self.slow = 0, 0
        self._lock = threading.Lock()

    def count(self, *, carried: int = 0, slow: int = 0) -> None:
        with self._lock:
            self.carried += carried
            self.slow += slow


class Link:
    """The emulated link of one process group: first in, first out, served by its own thread.

    Args:
        arrivals: of the group's ranks; None where they are on several hosts.
        shared: the links that this group shares with others; None where it has its own.
        spans_nodes: whether it uses the shared links between nodes.
    """

    def __init__(
        self,
        arrivals: Arrivals | None,
        tally: Tally,
        shared: SharedLinks | None = None,
        *,
        spans_nodes: bool = False,
    ) -> None:
        self.arrivals, self._tally = arrivals, tally
        self._shared, self._spans_nodes = shared, spans_nodes
        self._queue: queue.SimpleQueue[Transfer | None] = queue.SimpleQueue()
        self.put: Callable[[Transfer], None] = self._queue.put  # behind the earlier ones
        self._free_at_ns = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="emulated link", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._queue.put(None)
        self._thread.join(_CLOSE_S)

    def _serve(self) -> None:
        while (transfer := self._queue.get()) is not None:
            try:
                self._carry(transfer)
            except Exception as error:  # noqa: BLE001  a caller waits on this gate and must get the error, whatever it is
                transfer.gate.set_exception(error)  # type: ignore[arg-type]  # torch's annotation is wrong

    def _carry(self, transfer: Transfer) -> None:
        """Emulate one collective; returns when its emulated time has passed."""
        issued = transfer.issued
        if transfer.copy is not None:
            transfer.copy()
            transfer.backend_ns = time.perf_counter_ns()
        arrived_ns = self._last_arrival_ns(transfer)
        free_ns, end_ns = self._held(transfer, max(arrived_ns, self._free_at_ns))
        start_ns = max(issued.issue_ns, free_ns)
        slow = transfer.backend_ns > end_ns
        end_ns = max(end_ns, transfer.backend_ns)
        if slow and self._shared is not None:
            self._shared.prolong(end_ns, between_nodes=self._spans_nodes)
        self._tally.count(carried=1, slow=slow)
        while (left_ns := end_ns - time.perf_counter_ns()) > 0:  # never holds the interpreter lock for long
            time.sleep(max(left_ns - SPIN_NS, 0) / 1e9)
        self._free_at_ns = end_ns
        issued.start, issued.end_source = start_ns, "future" if slow else "emulated"
        if transfer.has_future and not slow:
            issued.backend_end_ns = transfer.backend_ns
        issued.end = end_ns  # set last: a row with an end is complete
        transfer.gate.set_result(None)

    def _held(self, transfer: Transfer, begin_ns: int) -> tuple[int, int]:
        """Return when the link was free for a transfer that could begin at `begin_ns`, and the transfer's end."""
        if self._shared is None:
            return self._free_at_ns, begin_ns + transfer.cost_ns
        issued = transfer.issued
        number = None if self.arrivals is None else issued.number
        held = self._shared.hold(
            issued.group, number, transfer.ranks, begin_ns, transfer.cost_ns, between_nodes=self._spans_nodes
        )
        end_ns = held.end_ns
        if begin_ns + transfer.cost_ns > end_ns:  # decided by a rank that did not know how slow the backend is here
            end_ns = begin_ns + transfer.cost_ns
            self._shared.prolong(end_ns, between_nodes=self._spans_nodes)
        return max(held.free_ns, self._free_at_ns), end_ns

    def _last_arrival_ns(self, transfer: Transfer) -> int:
        """Return when the last rank arrived, as far as this rank can know; waits for the backend where possible."""
        own_ns = transfer.issued.issue_ns
        if transfer.copy is not None:  # the other ranks do the same at the same time
            return own_ns
        if transfer.has_future:
            transfer.backend.wait()
        if transfer.issued.number is None or self.arrivals is None:
            return max(own_ns, transfer.backend_ns)
        known = self.arrivals.known(transfer.issued.number)
        if not transfer.has_future and transfer.issued.kind in LOCKSTEP:
            while len(known) < self.arrivals.ranks and not self._closed.wait(_POLL_S):
                known = self.arrivals.known(transfer.issued.number)
        return max([own_ns, *known])


class DelayedWork:
    """A backend's handle that completes when the emulated link says so; wrapped by a `TimedWork`, which calls `wait`
    once.
    """

    def __init__(self, work: Work, transfer: Transfer, tally: Tally) -> None:
        self._work, self._transfer, self._tally = work, transfer, tally
        self._future: Any = None

    def wait(self, *timeout: timedelta) -> bool:
        """Wait for the backend first, which puts the data in place and raises its errors, then for the emulated end."""
        begin_ns = time.perf_counter_ns()
        outcome = bool(self._work.wait(*timeout))
        backend_ns = time.perf_counter_ns()
        transfer = self._transfer
        transfer.gate.wait()
        end_ns = int(transfer.issued.end or 0)  # set before the gate opened
        if not transfer.has_future and begin_ns <= end_ns < backend_ns:
            # Known only now, when the link already serves the next collective.
            transfer.issued.end_source, transfer.issued.end = "wait", backend_ns
            self._tally.count(slow=1)
        elif not transfer.has_future and backend_ns <= end_ns:
            transfer.issued.backend_end_ns = backend_ns  # at the latest
        return outcome

    def is_completed(self) -> bool:
        return self._transfer.gate.done()

    def get_future(self) -> Any:
        inner = self._work.get_future()
        if self._future is None:
            # Uses the backend's future, so that its error propagates to C++ callers.
            self._future = self._transfer.gate.then(lambda _: inner.value())
        return self._future

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


class HostLinks:
    """The emulated links of all groups of a rank, on the host's clock."""

    def __init__(self, fabric: EmulatedNetwork) -> None:
        self._fabric = fabric
        self._links: dict[str, Link] = {}
        self._shared: SharedLinks | None = None
        if fabric.settings.sharing is Sharing.link:
            self._shared = SharedLinks(fabric.folder, fabric.rank, fabric.world_size)
        self._tally = Tally()

    def be_late(self) -> None:
        if self._fabric.late_ns:
            time.sleep(self._fabric.late_ns / 1e9)

    def arrive(self, issued: InFlight, ranks: tuple[int, ...]) -> Transfer:
        """Publish this rank's arrival at a collective that is about to be issued."""
        link = self._links.get(issued.group)
        if link is None:
            folder = self._fabric.folder
            arrivals = None if folder is None else Arrivals(folder, issued.group, ranks, self._fabric.rank)
            between = spans_nodes(ranks, self._fabric.world_size, self._fabric.settings)
            link = self._links[issued.group] = Link(arrivals, self._tally, self._shared, spans_nodes=between)
        if issued.number is not None and link.arrivals is not None:
            link.arrivals.arrive(issued.number, issued.issue_ns)
        return Transfer(issued, self._fabric.cost_ns(issued.kind, issued.bytes, ranks, issued.number), ranks)

    def carry(self, transfer: Transfer, work: Work) -> DelayedWork:
        """Delay the completion of a collective that has been issued."""
        with contextlib.suppress(RuntimeError):  # without a future, its caller waits for the backend
            work.get_future().add_done_callback(transfer.backend_done)
            transfer.has_future = True
        self._links[transfer.issued.group].put(transfer)
        return DelayedWork(work, transfer, self._tally)

    def carry_copy(self, transfer: Transfer, copy: Callable[[], None]) -> torch.futures.Future[None]:
        """Carry a collective that no backend issues: `copy` writes its outputs. Returns what completes at its end."""
        transfer.copy = copy
        self._links[transfer.issued.group].put(transfer)
        return transfer.gate

    def close(self) -> None:
        for link in self._links.values():
            link.close()
        if self._shared is not None:
            self._shared.close()
        if self._tally.slow:
            _log.warning(
                "emulated fabric: the backend was slower than the emulated link in %d of %d collectives, and its time "
                "counts; emulate slower links, or leave the cores idle",
                self._tally.slow,
                self._tally.carried,
            )


class StreamSleep:
    """Keeps the current stream of `device` busy for a number of nanoseconds, using one thread of the device.

    A spin is counted in cycles of the device's clock, whose frequency varies with power and temperature. It is
    calibrated once, with the device warm, as the shortest of several spins, since disturbances only make one longer.
    After that one spin at a time is measured asynchronously, and later spins follow the clock.
    """

    def __init__(self, device: torch.device) -> None:
        self._begin, self._end = (torch.Event(device=device, enable_timing=True) for _ in range(2))
        self._measured_cycles = 0
        spin(_CALIBRATION_CYCLES)
        lengths_ms = []
        for _ in range(_CALIBRATIONS):
            self._timed(_CALIBRATION_CYCLES)
            self._end.synchronize()  # before the first step
            lengths_ms.append(self._begin.elapsed_time(self._end))
        self._measured_cycles = 0
        self._cycles_per_ns = _CALIBRATION_CYCLES / (min(lengths_ms) * 1e6)

    def __call__(self, duration_ns: int) -> None:
        if self._measured_cycles and self._end.query():
            length_ns = self._begin.elapsed_time(self._end) * 1e6
            self._cycles_per_ns = self._measured_cycles / length_ns
            self._measured_cycles = 0
        cycles = round(duration_ns * self._cycles_per_ns)
        if not self._measured_cycles and duration_ns >= _LONG_ENOUGH_NS:
            self._timed(cycles)
        else:
            spin(cycles)

    def _timed(self, cycles: int) -> None:
        self._measured_cycles = cycles
        self._begin.record()
        spin(cycles)
        self._end.record()
