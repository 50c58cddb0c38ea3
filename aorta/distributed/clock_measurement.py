"""Measures every rank's wall clock against rank 0's, before the first and after the last step (R9).

Rank 0 asks one rank after another, through the peers' store: it sends a ping at t1, the rank receives it at t2 and
answers at t3, rank 0 gets the answer at t4. All four are read from CLOCK_REALTIME, which Kineto uses. Every rank gets
the `ClockSync`, which rank 0 also writes to `clock_sync.json`.

Must not run while steps are timed, use a collective, or fail a run whose other ranks are gone: what could not be
measured is null with a reason.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from datetime import timedelta

import msgspec

from aorta.config.schema import Clock
from aorta.distributed.output_folder import RunFolder
from aorta.distributed.peers import Peers
from aorta.distributed.topology import Topology
from aorta.records.clocks import (
    CLOCK_SYNC_FILE,
    CLOCK_SYNC_VERSION,
    ClockSync,
    Injected,
    OffsetSample,
    RankClock,
    boot_id,
    encode,
)
from aorta.records.files import write_whole

_log = logging.getLogger(__name__)
REFERENCE_RANK = 0
_COMES_S = 20.0
"""How long the reference waits for all others to begin: ranks end their last step together, but may still be writing
their last rows and the footer."""
_ANSWERS_S = 5.0
"""How long to wait for one answer, once both take part. It takes about 0.1 ms on one host, 0.1 s around the world."""


class ClockSynchronisation:
    """The two measurements of one run; every rank makes both calls. `result`: as far as this rank knows it."""

    def __init__(self, settings: Clock, peers: Peers, topology: Topology, folder: RunFolder) -> None:
        self._settings, self._peers, self._folder = settings, peers, folder
        self._facts = {"host": topology.host, "boot_id": boot_id()}
        self._injected: Injected | None = None
        """The skew that a test may set on every rank but the reference."""
        self.result: ClockSync | None = None

    def at_start(self) -> None:
        """Measure before the first step (not where `clock.sync` is off); rank 0 writes the file now, so that a killed
        run keeps it. Raises PeerFailed where a rank does not take part.
        """
        settings, peers = self._settings, self._peers
        if not settings.sync:
            return
        since_ns = peers.from_first_rank("clock/since", time.time_ns())
        if peers.rank != REFERENCE_RANK and (settings.fake_offset_ns or settings.fake_drift_ppm):
            self._injected = Injected(settings.fake_offset_ns, settings.fake_drift_ppm, since_ns)
        facts = peers.gather("clock/facts", {**self._facts, "injected": msgspec.to_builtins(self._injected)})
        samples = self._pass("start")
        ranks = [
            msgspec.convert({"rank": rank, **answer}, RankClock)
            for rank, answer in zip(peers.ranks, facts, strict=True)
        ]
        sync = ClockSync(
            version=CLOCK_SYNC_VERSION,
            run_id=self._folder.run_id,
            attempt=self._folder.attempt,
            reference_rank=peers.ranks[0],
            clock="CLOCK_REALTIME",
            transport="c10d store",
            complete=False,
            ranks=[_with(entry, "start", sample) for entry, sample in zip(ranks, samples, strict=True)],
        )
        self._publish(sync)
        if any(entry.injected for entry in sync.ranks) and peers.is_first:
            _log.warning(
                "clock.fake_*: every rank but 0 measures with a clock %d ns ahead that gains %g ppm; times in "
                "the record are unchanged, merging traces corrects for it",
                settings.fake_offset_ns,
                settings.fake_drift_ppm,
            )

    def at_end(self, *, write: bool = True) -> ClockSync | None:
        """Measure after the last step, and `write` the file again. A rank that does not answer keeps its first value,
        with an unknown bound.
        """
        if self.result is None:
            return None  # clock.sync is off
        samples = self._pass("end")
        ranks = [_with(entry, "end", sample) for entry, sample in zip(self.result.ranks, samples, strict=True)]
        self._publish(msgspec.structs.replace(self.result, complete=True, ranks=ranks), write=write)
        return self.result

    def _pass(self, when: str) -> list[OffsetSample | str]:
        """Return every rank's sample, or why there is none; the same on all reachable ranks."""
        peers = self._peers
        store, prefix = peers.store, f"clock/{when}/{peers.rank}"
        patience: timedelta = store.timeout  # type: ignore[attr-defined]  # torch has it, its stubs do not
        store.set_timeout(timedelta(seconds=_ANSWERS_S))  # of `store.get`, which has no argument for it
        try:
            if peers.is_first:
                until = time.monotonic() + _COMES_S
                results = [self._ask(rank, f"clock/{when}/{rank}", until) for rank in peers.ranks]
                with suppress(RuntimeError, OSError):  # the store may be gone; keep what is known
                    store.set(f"clock/{when}/done", msgspec.json.encode(results).decode())
                return results
            try:
                store.set(f"{prefix}/here", "1")
                # Ranks take turns: this one's comes when all before it are done, or given up.
                takes = timedelta(seconds=2 * _COMES_S)
                store.wait([f"{prefix}/turn"], takes)
                for number in range(self._settings.sync_samples):
                    store.get(f"{prefix}/ask/{number}")
                    t2 = self._now_ns()
                    t3 = self._now_ns()
                    store.set(f"{prefix}/answer/{number}", f"{t2},{t3}")
                store.wait([f"clock/{when}/done"], takes)
                results = msgspec.json.decode(store.get(f"clock/{when}/done"))
                return [result if isinstance(result, str) else OffsetSample(**result) for result in results]
            except (RuntimeError, OSError) as error:
                return [f"rank {peers.ranks[0]} did not ask ({str(error).splitlines()[0]})"] * len(peers.ranks)
        finally:
            store.set_timeout(patience)

    def _ask(self, rank: int, prefix: str, until: float) -> OffsetSample | str:
        """Return, as the reference, the best of the ping-pongs with the rank that answers under `prefix`."""
        store, samples = self._peers.store, self._settings.sync_samples
        if rank == self._peers.rank:
            return OffsetSample(self._now_ns(), 0, 0, 0, samples)
        best: tuple[int, int, int] | None = None
        try:
            store.wait([f"{prefix}/here"], timedelta(seconds=max(until - time.monotonic(), 0.001)))
            store.set(f"{prefix}/turn", "1")
            for number in range(samples):
                asked, answered = f"{prefix}/ask/{number}", f"{prefix}/answer/{number}"
                t1 = self._now_ns()
                store.set(asked, "?")
                text = store.get(answered)
                t4 = self._now_ns()
                t2, t3 = (int(part) for part in text.split(b","))
                rtt, twice = (t4 - t1) - (t3 - t2), (t2 - t1) + (t3 - t4)
                if best is None or rtt < best[0]:
                    best = (rtt, twice, (t2 + t3) // 2)
                store.delete_key(asked)
                store.delete_key(answered)
        except (RuntimeError, OSError) as error:
            return f"rank {rank} did not answer ({str(error).splitlines()[0]})"
        assert best is not None  # samples is at least 1, by validation of the configuration
        rtt, twice, at_ns = best
        # A clock stepped back meanwhile could make it negative; then it is only known to be short.
        rtt = max(rtt, 0)
        return OffsetSample(at_ns, twice // 2, rtt, (rtt + 1) // 2 + 1, samples)

    def _now_ns(self) -> int:
        """Return CLOCK_REALTIME of this rank, with its skew."""
        now = time.time_ns()
        return now if self._injected is None else self._injected.shown(now)

    def _publish(self, sync: ClockSync, *, write: bool = True) -> None:
        self.result = sync
        if not (write and self._peers.is_first):
            return
        path = self._folder.path / CLOCK_SYNC_FILE
        try:
            write_whole(path, encode(sync).decode())
        except OSError as error:
            _log.error("cannot write %s: %s; traces cannot be merged on one clock", path, error)


def _with(entry: RankClock, when: str, sample: OffsetSample | str) -> RankClock:
    if isinstance(sample, OffsetSample):
        return msgspec.structs.replace(entry, **{when: sample})
    return msgspec.structs.replace(entry, reason=f"at the {when}: {sample}")
