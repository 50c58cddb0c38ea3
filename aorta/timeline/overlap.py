"""One window of one rank -> its overlap metrics. The only definition of every metric (docs/metrics.md).

Enters: a window and the raw intervals of each lane, unmerged and unclipped. Leaves: an `Overlap` in integer
nanoseconds, whose `metrics()` are the names and milliseconds of the record. Must not: know where intervals came from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from aorta.timeline.classes import ALWAYS_SHOWN, AUX, COMPUTE, COPY, KINDS, STREAMS
from aorta.timeline.intervals import Interval, clip, intersect, measure, merge, subtract

NS_PER_MS = 1_000_000


@dataclass(frozen=True)
class KindOverlap:
    """Union time of one kind of collective, and the part of it that lies inside compute, in ns."""

    total_ns: int
    hidden_ns: int


@dataclass(frozen=True)
class Segment:
    """A stretch of the window in which the set of active lanes does not change. Bits follow `classes.STREAMS`."""

    start_ns: int
    end_ns: int
    streams: int


@dataclass(frozen=True)
class Unseen:
    """Communication that was not (fully) seen, and whether compute was not looked at either."""

    reason: str
    compute: bool = False


@dataclass(frozen=True)
class Overlap:
    """Integer-nanosecond measures of one window (docs/measuring.md, section 1); `copy_ns` is None if not observed."""

    window_ns: int
    compute_ns: int
    comm_ns: int
    copy_ns: int | None
    aux_ns: int
    idle_ns: int
    hidden_ns: int
    stall_ns: int
    kinds: Mapping[str, KindOverlap] = field(default_factory=dict)
    segments: tuple[Segment, ...] = ()

    @property
    def overlap_ratio(self) -> float | None:
        """Hidden communication over all communication; None without communication."""
        return self.hidden_ns / self.comm_ns if self.comm_ns else None

    @property
    def overlap_over_compute(self) -> float | None:
        """Hidden communication over compute; None without compute."""
        return self.hidden_ns / self.compute_ns if self.compute_ns else None

    @property
    def exposed_share(self) -> float | None:
        """Exposed communication over the window; None for an empty window."""
        return (self.comm_ns - self.hidden_ns) / self.window_ns if self.window_ns else None

    def per_stream_ms(self, unseen: Unseen | None = None) -> dict[str, float | None]:
        """Union milliseconds per lane; `ALWAYS_SHOWN` lanes stand even at 0, others only when they were used."""
        lengths = {COMPUTE: self.compute_ns, COPY: self.copy_ns or 0, AUX: self.aux_ns}
        lengths |= {kind: part.total_ns for kind, part in self.kinds.items()}
        unknown = set[str]() if unseen is None else {*KINDS, COMPUTE} if unseen.compute else set(KINDS)
        return {
            lane: None if lane in unknown else lengths.get(lane, 0) / NS_PER_MS
            for lane in STREAMS
            if lane in ALWAYS_SHOWN or lengths.get(lane, 0)
        }

    def metrics(self, unseen: Unseen | None = None) -> tuple[dict[str, float | None], dict[str, str]]:
        """Flat metric names -> values (milliseconds, or ratios), and the reason for each that is None.

        Args:
            unseen: why communication was not (fully) seen; every metric that rests on it is then None (R8).
        """
        values: dict[str, float | None] = {
            "window_ms": self.window_ns / NS_PER_MS,
            "compute_ms": self.compute_ns / NS_PER_MS,
            "comm_ms": self.comm_ns / NS_PER_MS,
            "copy_ms": None if self.copy_ns is None else self.copy_ns / NS_PER_MS,
            "aux_ms": self.aux_ns / NS_PER_MS,
            "idle_ms": self.idle_ns / NS_PER_MS,
            "compute_comm_ms": self.hidden_ns / NS_PER_MS,
            "exposed_comm_ms": (self.comm_ns - self.hidden_ns) / NS_PER_MS,
            "compute_stall_ms": self.stall_ns / NS_PER_MS,
            "overlap_ratio": self.overlap_ratio,
            "overlap_over_compute": self.overlap_over_compute,
            "exposed_share": self.exposed_share,
        }
        for kind in KINDS:
            part = self.kinds.get(kind, KindOverlap(0, 0))
            if part.total_ns or kind in ALWAYS_SHOWN:
                values[f"{kind}_ms"] = part.total_ns / NS_PER_MS
                values[f"compute_{kind}_ms"] = part.hidden_ns / NS_PER_MS
                values[f"exposed_{kind}_ms"] = (part.total_ns - part.hidden_ns) / NS_PER_MS
        reasons: dict[str, str] = {}
        if self.copy_ns is None:
            reasons["copy_ms"] = "memory copies were not observed"
        if unseen is not None:
            known = {"window_ms", "copy_ms", "aux_ms"} | (set() if unseen.compute else {"compute_ms"})
            unknown = [name for name in values if name not in known]
            return values | dict.fromkeys(unknown), reasons | dict.fromkeys(unknown, unseen.reason)
        if values["overlap_ratio"] is None:
            reasons["overlap_ratio"] = "no communication in this window"
        if values["overlap_over_compute"] is None:
            reasons["overlap_over_compute"] = "no compute in this window"
        if values["exposed_share"] is None:
            reasons["exposed_share"] = "the window is empty"
        return values, reasons

    def concurrency(self) -> dict[str, float]:
        """Time-weighted mean and the maximum of the number of lanes active at once; 0 for an empty window."""
        weighted = sum((part.end_ns - part.start_ns) * part.streams.bit_count() for part in self.segments)
        return {
            "mean": weighted / self.window_ns if self.window_ns else 0.0,
            "max": float(max((part.streams.bit_count() for part in self.segments), default=0)),
        }


def measure_window(
    window: Interval,
    *,
    compute: Iterable[Interval],
    comm: Mapping[str, Iterable[Interval]],
    stalls: Iterable[Interval] = (),
    aux: Iterable[Interval] = (),
    copy: Iterable[Interval] | None = None,
) -> Overlap:
    """Measure one window.

    Args:
        window: `[start_ns, end_ns)`; everything outside it is cut off.
        compute: ranges in which compute ran; stalls inside them are taken out (R5).
        comm: kind of collective (`classes.KINDS`) -> its intervals.
        stalls: when the compute stream (on a CPU the training thread) stood blocked on a collective.
        aux: optimizer, clipping, loss read, data. copy: memory copies and fills; None where nobody looks for them.

    Raises:
        IntervalError: the window or an interval ends before it starts.
        ValueError: a kind that is not in `classes.KINDS`.
    """
    if unknown := comm.keys() - set(KINDS):
        raise ValueError(f"unknown kinds of collective {sorted(unknown)}; the kinds are {', '.join(KINDS)}")
    (whole,) = merge([window]) or [window]
    stalled = merge(clip(stalls, window))
    lanes: dict[str, list[Interval]] = {COMPUTE: subtract(merge(clip(compute, window)), stalled)}
    lanes |= {kind: merge(clip(comm[kind], window)) for kind in sorted(comm, key=KINDS.index)}
    lanes[COPY] = merge(clip(copy or (), window))
    # An optimizer that waits for a collective (gradient clipping on shards) is stalled, not working.
    lanes[AUX] = subtract(merge(clip(aux, window)), stalled)

    everything = merge([*(span for spans in lanes.values() for span in spans)])
    communication = merge([span for kind in comm for span in lanes[kind]])
    return Overlap(
        window_ns=whole[1] - whole[0],
        compute_ns=measure(lanes[COMPUTE]),
        comm_ns=measure(communication),
        copy_ns=None if copy is None else measure(lanes[COPY]),
        aux_ns=measure(lanes[AUX]),
        idle_ns=whole[1] - whole[0] - measure(everything),
        hidden_ns=measure(intersect(communication, lanes[COMPUTE])),
        stall_ns=measure(stalled),
        kinds={
            kind: KindOverlap(measure(lanes[kind]), measure(intersect(lanes[kind], lanes[COMPUTE]))) for kind in comm
        },
        segments=tuple(_segments(whole, lanes)),
    )


def _segments(window: Interval, lanes: Mapping[str, list[Interval]]) -> list[Segment]:
    """Tile the window: sorted, contiguous, first to last nanosecond, idle stretches included."""
    edges: dict[int, int] = {window[0]: 0, window[1]: 0}
    for bit, lane in enumerate(STREAMS):
        for start, end in lanes.get(lane, ()):
            edges[start] = edges.get(start, 0) ^ (1 << bit)
            edges[end] = edges.get(end, 0) ^ (1 << bit)
    tiles: list[Segment] = []
    active, before = 0, window[0]
    for now in sorted(edges):
        if now > before and (not tiles or tiles[-1].streams != active):
            tiles.append(Segment(before, now, active))
        elif now > before:
            tiles[-1] = Segment(tiles[-1].start_ns, now, active)
        active ^= edges[now]
        before = now
    return tiles
