"""Converts ranks' wall clocks to rank 0's (`clock_sync.json`), and monotonic to wall-clock time.

*Ranks*: by how much the clock of each was ahead of rank 0's, and the error bound (R9). A trace repeats its own rank's
entry under `TRACE_KEY`, as known when the trace was saved.

    clock = read_clock_sync(folder / CLOCK_SYNC_FILE).of(rank)
    clock.to_reference(own_ns), clock.bound_ns(own_ns)      # rank 0's clock at that instant, and the largest error

Offsets are measured at the start and end of a run; the correction of any instant follows in integer nanoseconds.

*Host clocks*, read together (docs/dev/measuring.md, R7):

    anchor = read_clocks()
    to_realtime_ns(time.perf_counter_ns(), anchor)                           # with one reading, while a run lasts
    WallTime([header.clock, footer.clock]).realtime_ns(step.start_mono_ns)   # with all readings, afterwards

`time.perf_counter_ns` is CLOCK_MONOTONIC on Linux; every `_mono_ns` in the record is on that clock.

Must not: measure offsets (`aorta.distributed.clock_measurement` does), state a bound that was not measured, or know
devices: `aorta.instrument` converts their events to this clock.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Iterable
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import msgspec

from aorta.errors import InputError
from aorta.records.files import decode_json, read_small
from aorta.records.schema import ClockReading, Integer, Reading

CLOCK_SYNC_FILE: Final = "clock_sync.json"
CLOCK_SYNC_VERSION: Final = 1
TRACE_KEY: Final = "clock_sync"
"""Top-level key of a trace: a `ClockSync` with one rank."""
PPM: Final = 1_000_000


class OffsetSample(msgspec.Struct, frozen=True):
    """One measurement against the reference rank: the ping-pong of least round trip among `samples`.

    `offset_ns` = ((t2 - t1) + (t3 - t4)) / 2 and `rtt_ns` = (t4 - t1) - (t3 - t2), where the reference sends at t1
    and receives at t4, and the rank receives at t2 and answers at t3 (RFC 5905, section 8). Positive = this rank is
    ahead. The error is at most `bound_ns`, half the round trip. `at_ns` is the middle of it on the rank's own clock.
    """

    at_ns: Integer
    offset_ns: Integer
    rtt_ns: Integer
    bound_ns: Integer
    samples: Integer


class Injected(msgspec.Struct, frozen=True):
    """A skew asked for by `clock.fake_*`: the rank's clock shows t + offset_ns + drift_ppm * (t - since_ns) / 1e6."""

    offset_ns: Integer
    drift_ppm: Reading
    since_ns: Integer

    def shown(self, true_ns: int) -> int:
        """Return what the faked clock shows at the instant that the host's own clock calls `true_ns`."""
        return true_ns + self.offset_ns + round(Fraction(self.drift_ppm) * (true_ns - self.since_ns) / PPM)


class RankClock(msgspec.Struct, frozen=True, dict=True):
    """What is known of one rank's clock. `start` or `end` is None where it could not be measured; `reason` says why."""

    rank: Integer
    host: str
    boot_id: str
    start: OffsetSample | None = None
    end: OffsetSample | None = None
    injected: Injected | None = None
    reason: str | None = None

    @property
    def known(self) -> bool:
        return self.start is not None or self.end is not None

    @property
    def offset_ns(self) -> int | None:
        """Nanoseconds by which this clock was ahead at the first measurement there is."""
        sample = self.start or self.end
        return None if sample is None else sample.offset_ns

    @cached_property
    def _slope(self) -> Fraction:
        """Nanoseconds gained per nanosecond of this clock; 0 unless measured twice, some time apart."""
        if self.start is None or self.end is None or self.end.at_ns <= self.start.at_ns:
            return Fraction(0)
        return Fraction(self.end.offset_ns - self.start.offset_ns, self.end.at_ns - self.start.at_ns)

    @property
    def drift_ppm(self) -> float | None:
        """Microseconds gained in a second; None unless measured twice."""
        return None if self.start is None or self.end is None else float(self._slope * PPM)

    @property
    def drift_bound_ppm(self) -> float | None:
        """Largest error of `drift_ppm`: (bound at the start + bound at the end) / the time between."""
        if self.start is None or self.end is None or self.end.at_ns <= self.start.at_ns:
            return None
        return float(Fraction(self.start.bound_ns + self.end.bound_ns, self.end.at_ns - self.start.at_ns) * PPM)

    def shown_ns(self, host_ns: int) -> int:
        """Return what this clock shows at a time of its host: that time, unless a skew is injected for tests."""
        return host_ns if self.injected is None else self.injected.shown(host_ns)

    def to_reference(self, own_ns: int) -> int:
        """Return the reference rank's clock at the instant this rank's clock shows `own_ns`. Never changes an order.

        Raises:
            ValueError: nothing was measured.
        """
        sample = self.start or self.end
        if sample is None:
            raise ValueError(f"rank {self.rank}: its clock was not measured")
        return own_ns - sample.offset_ns - round(self._slope * (own_ns - sample.at_ns))

    def correction_ns(self, host_ns: int) -> int:
        """Return what to add to a time of this rank's host to have the reference rank's.

        Raises:
            ValueError: nothing was measured.
        """
        return self.to_reference(self.shown_ns(host_ns)) - host_ns

    def bound_ns(self, own_ns: int) -> int | None:
        """Return the largest error of `to_reference(own_ns)` at constant drift; None (unknown) unless measured twice.

        Between the measurements their bounds are weighted by distance; outside, the line through them is prolonged and
        the bound grows with the uncertainty of its slope.
        """
        if self.start is None or self.end is None or self.end.at_ns <= self.start.at_ns:
            return None
        weight = Fraction(own_ns - self.start.at_ns, self.end.at_ns - self.start.at_ns)
        return round(abs(1 - weight) * self.start.bound_ns + abs(weight) * self.end.bound_ns)

    def worst_bound_ns(self) -> int | None:
        """Return the largest bound between the two measurements."""
        return None if self.start is None or self.end is None else max(self.start.bound_ns, self.end.bound_ns)

    def summary(self) -> dict[str, object]:
        """Return what metadata of a trace repeats (JSON types); null is unknown."""
        derived = {
            "offset_ns": self.offset_ns,
            "drift_ppm": self.drift_ppm,
            "drift_bound_ppm": self.drift_bound_ppm,
            "bound_start_ns": None if self.start is None else self.start.bound_ns,
            "bound_end_ns": None if self.end is None else self.end.bound_ns,
            "bound_worst_ns": self.worst_bound_ns(),
        }
        measured = {name: msgspec.to_builtins(getattr(self, name)) for name in ("start", "end", "injected", "reason")}
        return {"rank": self.rank, "host": self.host, **derived, **measured}


class ClockSync(msgspec.Struct, frozen=True):
    """The whole file. `complete` once the measurement at the end was made; `ranks` is in rank order."""

    version: int
    run_id: str
    attempt: int
    reference_rank: int
    clock: str
    transport: str
    complete: bool
    ranks: list[RankClock]

    def of(self, rank: int) -> RankClock | None:
        return next((entry for entry in self.ranks if entry.rank == rank), None)

    def with_ranks(self, ranks: Iterable[RankClock]) -> ClockSync:
        return msgspec.structs.replace(self, ranks=sorted(ranks, key=lambda entry: entry.rank))

    def summary(self) -> dict[str, object]:
        """Return what the manifest and a merged trace repeat (JSON types)."""
        return {
            "reference_rank": self.reference_rank,
            "clock": self.clock,
            "transport": self.transport,
            "complete": self.complete,
            "ranks": [entry.summary() for entry in self.ranks],
        }


def plain(sync: ClockSync) -> dict[str, Any]:
    """Return the file's content (JSON types), with the derived figures beside the measured ones."""
    ranks = [{**entry.summary(), "boot_id": entry.boot_id} for entry in sync.ranks]
    return {**msgspec.to_builtins(sync), "ranks": ranks}


def trace_metadata(sync: ClockSync | None, rank: int) -> dict[str, Any]:
    """Return what a trace of `rank` says of its clock; empty where nothing was measured."""
    own = None if sync is None else sync.of(rank)
    return {} if sync is None or own is None else {TRACE_KEY: plain(sync.with_ranks([own]))}


def encode(sync: ClockSync) -> bytes:
    """Return the file's text, indented for people."""
    return msgspec.json.format(msgspec.json.encode(plain(sync)), indent=2) + b"\n"


def read_clock_sync(path: Path) -> ClockSync:
    """Read it back; the derived figures are derived again.

    Raises:
        InputError: the file cannot be read, or is not of this version.
    """
    try:
        text = read_small(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error
    return decode(text, str(path), f"a {CLOCK_SYNC_FILE}")


def decode(text: bytes | msgspec.Raw, where: str, kind: str) -> ClockSync:
    """Decode the content of a file or of a trace's `TRACE_KEY`.

    Args:
        where, kind: in which `text` stands and what it should be, for errors.

    Raises:
        InputError: it is something else, or not of this version.
    """
    try:
        sync = decode_json(text, msgspec.json.Decoder(ClockSync))
    except ValueError as error:
        raise InputError(f"{where}: not {kind} of an AORTA run ({error})") from error
    if sync.version != CLOCK_SYNC_VERSION:
        raise InputError(f"{where}: version {sync.version}; this AORTA reads version {CLOCK_SYNC_VERSION}")
    return sync


_TRIES = 5
# CLOCK_BOOTTIME exists on Linux only; elsewhere MONOTONIC is the nearest thing, and the boot id stays empty.
_BOOTTIME = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def read_clocks() -> ClockReading:
    """Return REALTIME, BOOTTIME and MONOTONIC of one instant: the tightest of a few tries.

    MONOTONIC is read before and after the others; half that bracket is the stated uncertainty.
    """
    readings = []
    for _ in range(_TRIES):
        before = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        realtime = time.clock_gettime_ns(time.CLOCK_REALTIME)
        boottime = time.clock_gettime_ns(_BOOTTIME)
        after = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        readings.append(ClockReading(realtime, boottime, (before + after) // 2, (after - before + 1) // 2))
    return min(readings, key=lambda reading: reading.uncertainty_ns)


def to_realtime_ns(monotonic_ns: int, anchor: ClockReading) -> int:
    """Return wall-clock nanoseconds (Unix epoch) of a CLOCK_MONOTONIC instant, as of `anchor`."""
    return monotonic_ns - anchor.monotonic_ns + anchor.realtime_ns


def boot_id() -> str:
    """Identify this boot: BOOTTIME and MONOTONIC of two processes compare only if it is equal. "" if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class WallTime:
    """CLOCK_REALTIME along CLOCK_MONOTONIC. Between two readings it is interpolated, outside the nearest one holds."""

    def __init__(self, readings: Iterable[ClockReading]) -> None:
        self._readings = sorted(readings, key=lambda reading: reading.monotonic_ns)
        self._at = [reading.monotonic_ns for reading in self._readings]
        self.uncertainty_ns = max(reading.uncertainty_ns for reading in self._readings)

    def realtime_ns(self, monotonic_ns: int) -> int:
        """Return Unix nanoseconds of a CLOCK_MONOTONIC instant of this process."""
        after = bisect_right(self._at, monotonic_ns)
        before = self._readings[max(after - 1, 0)]
        ahead = before.realtime_ns - before.monotonic_ns
        if 0 < after < len(self._readings):
            later = self._readings[after]
            gained = later.realtime_ns - later.monotonic_ns - ahead
            ahead += round(
                Fraction(gained * (monotonic_ns - before.monotonic_ns), later.monotonic_ns - before.monotonic_ns)
            )
        return monotonic_ns + ahead
