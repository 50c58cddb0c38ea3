"""Defines the metrics of one window of one rank (docs/metrics.md); those of a run are in `aorta.analysis.aggregate`,
of collectives over ranks in `aorta.analysis.collective_metrics`, bandwidths in `aorta.documents.metrics`.

`measure_windows` measures all steps of a rank at once, in integer nanoseconds: an `Overlap` of each, whose `metrics()`
are the names and milliseconds of the record.

    lane = lambda *spans: merge(interval_array(spans))
    (overlap,) = measure_windows(lane((0, 100)), compute=lane((0, 60)), comm={"allreduce": lane((40, 80))})
    overlap.comm_ns, overlap.hidden_ns     # 40, 20: of 40 ns of communication 20 ran during compute
    overlap.metrics()[0]["overlap_ratio"]  # 0.5

Where marks of a device only tell what certainly ran and what possibly did (`CertainLanes`), each metric has a least and
a greatest value, and is a plain number only where these are close. Must not know where intervals came from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import inf
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from aorta.timeline.arrays import (
    Interval,
    IntervalArray,
    covered_ns,
    intersect,
    interval_array,
    measure,
    merge,
    refuse_inverted,
    subtract,
    tile_windows,
    union,
)
from aorta.timeline.classes import ALWAYS_SHOWN, AUX, BUBBLE, COMPUTE, COPY, KINDS, LANES

NS_PER_MS = 1_000_000
_BIT = {lane: bit for bit, lane in enumerate(LANES)}
Tile: TypeAlias = tuple[int, int, int]
"""`(start, end, mask)`: an interval, from the begin of its window, and the lanes that are active throughout it, by the
bits of `classes.LANES`."""
NO_COPIES = "memory copies were not observed"
_NOT_OBSERVED = {
    "copy_ms": NO_COPIES,
    "aux_ms": "optimizer, clipping, loss read and data were not recorded apart from the rest",
    "compute_stall_ms": "when the compute stream stood blocked on a collective was not observed",
}


AGREEMENT = 0.02
"""How far the overlap ratios of the same steps by marks and by kernels may be apart (docs/dev/measuring.md, K2)."""
DECIDED = AGREEMENT
"""Largest width of bounds that is still reported as a number: for a ratio as it is; for a time as a fraction of the
communication (hidden and exposed time), of itself (computation and communication) or of the window (the rest)."""
Bounds: TypeAlias = tuple[float, float]
"""The least and the greatest value of a metric, in its unit."""
HOST_BOUND = "host-bound: {bounds} (marks alone cannot say more)"
OF_UNKNOWN_KIND = "communication of unknown kind in this window: what is known of each kind is a lower bound"


_PARTED = {COMPUTE, "comm", *KINDS}
"""Metrics `<name>_ms` that have parts `compute_<name>_ms` and `exposed_<name>_ms`, and compute itself."""


class KindOverlap(NamedTuple):
    """Union time of one kind of collective, and the part of it that lies inside compute, in ns."""

    total_ns: int
    hidden_ns: int


NOT_SAMPLED: Final = "not observed: one of several steps is, drawn at random (instrument.every)"
"""Of a step that was passed over, as planned."""


@dataclass(frozen=True)
class Unseen:
    """Why communication was not (fully) observed, and whether compute was not observed either; or nothing was, the
    loop's own ranges included.
    """

    reason: str
    compute: bool = False

    @property
    def everything(self) -> bool:
        return self.reason == NOT_SAMPLED


@dataclass(frozen=True)
class Overlap:
    """Measures of one window in integer nanoseconds (docs/dev/measuring.md, section 1); `copy_ns`, `aux_ns` and
    `stall_ns` are None where they were not observed, `pipeline_ns` and `bubble_ns` where there is no pipeline. Where it
    is not certain what ran, they are of all that may have, and `bounds` has the metrics that this leaves open.
    """

    window_ns: int
    compute_ns: int
    comm_ns: int
    copy_ns: int | None
    aux_ns: int | None
    idle_ns: int
    hidden_ns: int
    stall_ns: int | None
    kinds: Mapping[str, KindOverlap] = field(default_factory=dict)
    unknown_kind_ns: int = 0
    pipeline_ns: int | None = None
    bubble_ns: int | None = None
    tiles: Sequence[Tile] = ()
    bounds: Mapping[str, Bounds] = field(default_factory=dict)
    why_bounded: str = HOST_BOUND

    @property
    def undecided(self) -> dict[str, Bounds]:
        """The metrics whose bounds are too far apart for a plain number (`DECIDED`)."""
        return {
            name: (least, most)
            for name, (least, most) in self.bounds.items()
            if most - least > DECIDED * self._scale_of(name) or most == inf
        }

    def _scale_of(self, name: str) -> float:
        """Return what `DECIDED` is a part of, in the unit of a metric."""
        if not name.endswith("_ms"):
            return 1.0
        kind = name.removesuffix("_ms").removeprefix("compute_").removeprefix("exposed_")
        own = self.bounds.get(f"{kind}_ms") if kind in _PARTED else None
        return self.window_ns / NS_PER_MS if own is None else own[own[1] < inf]

    @property
    def exposed_ns(self) -> int:
        """Communication that was not hidden behind compute, in ns."""
        return self.comm_ns - self.hidden_ns

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
        return self.exposed_ns / self.window_ns if self.window_ns else None

    @property
    def bubble_share(self) -> float | None:
        """Bubbles over the time in the pipeline; None without a pipeline."""
        return self.bubble_ns / self.pipeline_ns if self.pipeline_ns and self.bubble_ns is not None else None

    def per_stream_ms(self, unseen: Unseen | None = None) -> dict[str, float | None]:
        """Union milliseconds per lane; `ALWAYS_SHOWN` lanes are present even at 0, others only when they were used."""
        if unseen is not None and unseen.everything:
            return {}
        lengths = {COMPUTE: self.compute_ns, COPY: self.copy_ns or 0, AUX: self.aux_ns or 0}
        lengths |= {BUBBLE: self.bubble_ns or 0} | {kind: part.total_ns for kind, part in self.kinds.items()}
        unknown = {name.removesuffix("_ms") for name in self.undecided}
        if unseen is not None or self.unknown_kind_ns:
            unknown.update(KINDS)
        if unseen is not None:
            unknown.update((BUBBLE, COMPUTE) if unseen.compute else (BUBBLE,))
        return {
            lane: None if lane in unknown else lengths.get(lane, 0) / NS_PER_MS
            for lane in LANES
            if lane in ALWAYS_SHOWN or lengths.get(lane, 0)
        }

    def metrics(self, unseen: Unseen | None = None) -> tuple[dict[str, float | None], dict[str, str]]:
        """Return flat metric names -> values (milliseconds, or ratios), and the reason for each that is None.

        Args:
            unseen: why communication was not (fully) observed; every metric that depends on it is then None (R8).
        """
        if unseen is not None and unseen.everything:
            return {"window_ms": self.window_ns / NS_PER_MS}, {}
        values: dict[str, float | None] = {
            "window_ms": self.window_ns / NS_PER_MS,
            "compute_ms": self.compute_ns / NS_PER_MS,
            "comm_ms": self.comm_ns / NS_PER_MS,
            "copy_ms": _ms(self.copy_ns),
            "aux_ms": _ms(self.aux_ns),
            "idle_ms": self.idle_ns / NS_PER_MS,
            "compute_comm_ms": self.hidden_ns / NS_PER_MS,
            "exposed_comm_ms": self.exposed_ns / NS_PER_MS,
            "compute_stall_ms": _ms(self.stall_ns),
            "overlap_ratio": self.overlap_ratio,
            "overlap_over_compute": self.overlap_over_compute,
            "exposed_share": self.exposed_share,
        }
        if self.pipeline_ns is not None:
            values["pipeline_ms"] = self.pipeline_ns / NS_PER_MS
            values["bubble_ms"] = _ms(self.bubble_ns)
            values["bubble_share"] = self.bubble_share
        of_all_kinds = set(values)
        for kind in KINDS:
            part = self.kinds.get(kind, KindOverlap(0, 0))
            if part.total_ns or kind in ALWAYS_SHOWN:
                values[f"{kind}_ms"] = part.total_ns / NS_PER_MS
                values[f"compute_{kind}_ms"] = part.hidden_ns / NS_PER_MS
                values[f"exposed_{kind}_ms"] = (part.total_ns - part.hidden_ns) / NS_PER_MS
        of_kinds = [name for name in values if name not in of_all_kinds] if self.unknown_kind_ns else []
        values |= dict.fromkeys(of_kinds)
        reasons = {name: reason for name, reason in _NOT_OBSERVED.items() if values[name] is None}
        reasons |= dict.fromkeys(of_kinds, OF_UNKNOWN_KIND)
        if unseen is not None:
            known = {"window_ms", "copy_ms", "aux_ms", "pipeline_ms"} | (set() if unseen.compute else {"compute_ms"})
            unknown = [name for name in values if name not in known]
            return values | dict.fromkeys(unknown), reasons | dict.fromkeys(unknown, unseen.reason)
        if values["overlap_ratio"] is None:
            reasons["overlap_ratio"] = "no communication in this window"
        if values["overlap_over_compute"] is None:
            reasons["overlap_over_compute"] = "no compute in this window"
        if values["exposed_share"] is None:
            reasons["exposed_share"] = "the window is empty"
        undecided = {
            name: bounds
            for name, bounds in self.undecided.items()
            if values.get(name) is not None or name == "overlap_ratio"
        }
        reasons |= {name: self.why_bounded.format(bounds=_between(name, bounds)) for name, bounds in undecided.items()}
        return values | dict.fromkeys(undecided), reasons

    def concurrency(self) -> dict[str, float]:
        """Return mean over time and maximum of the number of lanes active at once; 0 for an empty window."""
        lanes_ns = self.compute_ns + (self.copy_ns or 0) + (self.aux_ns or 0)
        lanes_ns += sum(part.total_ns for part in self.kinds.values())
        return {
            "mean": lanes_ns / self.window_ns if self.window_ns else 0.0,
            "max": float(max((_active(lanes) for lanes in {lanes for _, _, lanes in self.tiles}), default=0)),
        }


def _between(name: str, bounds: Bounds) -> str:
    unit = " ms" if name.endswith("_ms") else ""
    return f"between {bounds[0]:.4g} and {bounds[1]:.4g}{unit}"


def either(first: Overlap, second: Overlap, why: str) -> Overlap:
    """Return the first of two readings of one window, with bounds that hold for both.

    Args:
        why: why there are two; `{bounds}` in it stands for the bounds of a metric.
    """
    values, others = (reading.metrics()[0] for reading in (first, second))
    bounds = {
        name: (min(value, other), max(value, other))
        for name, value in values.items()
        if value is not None and (other := others.get(name)) is not None
    }
    unknown_ms = second.unknown_kind_ns / NS_PER_MS  # it may be of any kind
    for kind in KINDS if unknown_ms and not first.unknown_kind_ns else ():
        for name in (f"{kind}_ms", f"compute_{kind}_ms", f"exposed_{kind}_ms"):
            if (value := values.get(name)) is not None:
                less = unknown_ms if name.startswith("compute_") else 0.0
                bounds[name] = max(value - less, 0.0), value + unknown_ms
    # Of rows in doubt some may be the one and some the other: ratios have the bounds of their parts.
    (hidden, most_hidden), (exposed, most_exposed) = bounds["compute_comm_ms"], bounds["exposed_comm_ms"]
    if most_hidden + most_exposed:
        bounds["overlap_ratio"] = share(hidden, most_exposed), share(most_hidden, exposed)
    if first.overlap_ratio is None and second.overlap_ratio is not None:
        bounds["overlap_ratio"] = 0.0, 1.0
    return replace(first, bounds=bounds, why_bounded=why)


def copy_rates(copies: Iterable[tuple[str, int, Interval]]) -> dict[str, float]:
    """Return `<direction>_gb_per_s` of the copies issued in a step, each with its direction, bytes and times: all bytes
    of a direction over the union of its copies, GB = 1e9 bytes. Copies that end in a later step count in full; a
    direction without any, or too short for the clock, has none.
    """
    by_direction: dict[str, list[tuple[int, Interval]]] = {}
    for direction, size_bytes, span in copies:
        by_direction.setdefault(direction, []).append((size_bytes, span))
    rates = {}
    for direction, own in by_direction.items():
        if length_ns := measure(merge(interval_array(span for _, span in own))):
            rates[f"{direction}_gb_per_s"] = sum(size_bytes for size_bytes, _ in own) / length_ns
    return rates


class CertainLanes(NamedTuple):
    """What certainly ran, inside what may have, in the windows that are `bounded`; in the others what may have run
    certainly did. The stream that a stall blocks computes nothing between the marks round it, whenever it was blocked.
    """

    bounded: Sequence[bool]
    compute: IntervalArray
    comm: Mapping[str, IntervalArray]
    stalls: IntervalArray
    bubbles: IntervalArray


def measure_windows(
    windows: IntervalArray,
    *,
    compute: IntervalArray,
    comm: Mapping[str, IntervalArray],
    of_unknown_kind: IntervalArray | None = None,
    stalls: IntervalArray | None = None,
    aux: IntervalArray | None = None,
    copy: IntervalArray | None = None,
    pipeline: IntervalArray | None = None,
    bubbles: IntervalArray | None = None,
    certain: CertainLanes | None = None,
    tiled: bool = False,
) -> list[Overlap]:
    """Measure windows of one device: the definition. All lanes are merged; what is outside of a window is cut off.

    Args:
        windows: in any order; they may overlap, but for those in which something is not certain.
        compute: ranges in which compute ran; stalls inside them are subtracted (R5).
        comm: kind of collective (`classes.KINDS`) -> its intervals.
        of_unknown_kind: communication whose kind the source does not report: counted in `comm_ns` and in no kind; where
            there is any, the milliseconds of kinds are null.
        stalls: when the compute stream (on a CPU the training thread) was blocked on a collective.
        aux: optimizer, clipping, reading the loss, data; one that waits for a collective (gradient clipping on shards)
            is stalled, not working.
        copy: memory copies; of a trace that has them, fills too. Each of these three is None where it is not observed.
        pipeline: when micro-batches ran through the stages of a pipeline; a window without any of it has none.
        bubbles: when the rank waited there for another stage; what was computed meanwhile is no bubble.
        certain: the parts of these in which they certainly ran; None: all of them.
        tiled: include the tiles of each window, which cost as much as everything else.

    Raises:
        IntervalError: a window ends before it starts.
        ValueError: a kind that is not in `classes.KINDS`.
    """
    if unknown := comm.keys() - set(KINDS):
        raise ValueError(f"unknown kinds of collective {sorted(unknown)}; the kinds are {', '.join(KINDS)}")
    refuse_inverted(*windows)
    nothing = waited = interval_array()
    blocked = nothing if stalls is None else stalls
    working = subtract(compute, blocked)
    lanes = {COMPUTE: working, **comm}
    lanes[COPY] = nothing if copy is None else copy
    lanes[AUX] = nothing if aux is None else subtract(aux, blocked)
    if pipeline is not None and bubbles is not None:
        waited = intersect(bubbles, pipeline)
        lanes[BUBBLE] = subtract(waited, working)
    unnamed = nothing if of_unknown_kind is None else of_unknown_kind
    communication = union([*comm.values(), unnamed])

    def total(merged: IntervalArray | None) -> list[Any]:
        return [None] * len(windows.start) if merged is None else covered_ns(windows, merged).tolist()

    lengths: dict[str, list[Any]] = {
        "window_ns": (windows.end - windows.start).tolist(),
        "compute_ns": total(working),
        "comm_ns": total(communication),
        "copy_ns": total(copy),
        "aux_ns": total(None if aux is None else lanes[AUX]),
        "hidden_ns": total(intersect(communication, working)),
        "stall_ns": total(stalls),
        "unknown_kind_ns": total(unnamed),
    }
    active = total(union([unnamed, *lanes.values()]))
    lengths["idle_ns"] = [whole - busy for whole, busy in zip(lengths["window_ns"], active, strict=True)]
    if BUBBLE in lanes:
        lengths["pipeline_ns"] = [length or None for length in total(pipeline)]
        lengths["bubble_ns"] = [
            None if stages is None else waited
            for stages, waited in zip(lengths["pipeline_ns"], total(lanes[BUBBLE]), strict=True)
        ]
    kinds = {kind: (total(lane), total(intersect(lane, working))) for kind, lane in comm.items()}
    bounds: list[dict[str, Bounds]] = [{} for _ in windows.start]
    if certain is not None and any(certain.bounded):
        pipeline_ns = lengths.get("pipeline_ns")
        sides = _bounds(windows, lanes, comm, communication, unnamed, aux, blocked, waited, certain, pipeline_ns)
        bounds = [of_one if bounded else {} for of_one, bounded in zip(sides, certain.bounded, strict=True)]
    tiles: list[Tile] = []
    cut = [0] * (len(windows.start) + 1)
    if tiled:
        window_of, spans, masks = tile_windows(windows, {_BIT[name]: lanes[name] for name in lanes})
        offsets = (spans.start - windows.start[window_of]).tolist(), (spans.end - windows.start[window_of]).tolist()
        tiles = list(zip(*offsets, masks.tolist(), strict=True))
        cut = np.searchsorted(window_of, np.arange(len(cut))).tolist()
    return [
        Overlap(
            **{name: values[at] for name, values in lengths.items()},
            kinds={kind: KindOverlap(lasted[at], inside[at]) for kind, (lasted, inside) in kinds.items()},
            tiles=tiles[cut[at] : cut[at + 1]],
            bounds=bounds[at],
        )
        for at in range(len(windows.start))
    ]


def _bounds(
    windows: IntervalArray,
    lanes: Mapping[str, IntervalArray],
    comm: Mapping[str, IntervalArray],
    communication: IntervalArray,
    unnamed: IntervalArray,
    aux: IntervalArray | None,
    blocked: IntervalArray,
    waited: IntervalArray,
    certain: CertainLanes,
    pipeline_ns: list[Any] | None,
) -> list[dict[str, Bounds]]:
    """Return of each window what `_bounds_of` gives: the least and the greatest value of each metric, for
    any computation, communication and stalls between what is certain and what is possible.

    Args:
        lanes, comm, communication, blocked: all that is possible; `unnamed` communication certainly ran.
        waited: possible waits for another stage of a pipeline, in it.
    """
    nothing, may_work, less = interval_array(), lanes[COMPUTE], subtract
    works = less(certain.compute, blocked)
    kinds = {kind: certain.comm.get(kind, nothing) for kind in KINDS if kind in comm}
    sends = union([*kinds.values(), unnamed])
    bubbles = less(intersect(certain.bubbles, waited), may_work), less(waited, works)
    other = less(nothing if aux is None else aux, certain.stalls)
    spans = {"compute_ms": (works, may_work), "compute_stall_ms": (certain.stalls, blocked)}
    runs = {"comm": (sends, communication)} | {kind: (ran, comm[kind]) for kind, ran in kinds.items()}
    for name, (runs_surely, may_run) in runs.items():
        spans[f"{name}_ms"] = runs_surely, may_run
        spans[f"compute_{name}_ms"] = intersect(runs_surely, works), intersect(may_run, may_work)
        spans[f"exposed_{name}_ms"] = less(runs_surely, may_work), less(may_run, works)
    spans["bubble_ms"] = bubbles
    if aux is not None:
        spans["aux_ms"] = lanes[AUX], other
    spans["idle_ms"] = (
        union([communication, may_work, lanes[COPY], other, bubbles[1]]),
        union([sends, works, lanes[COPY], lanes[AUX], bubbles[0]]),
    )
    spans["alone"] = less(works, communication), less(may_work, sends)

    lengths = {name: [covered_ns(windows, side).tolist() for side in both] for name, both in spans.items()}
    window_ns = (windows.end - windows.start).tolist()
    lengths["idle_ms"] = [
        [length - index for length, index in zip(window_ns, side, strict=True)] for side in lengths["idle_ms"]
    ]
    return [
        _bounds_of(
            {name: (sides[0][index], sides[1][index]) for name, sides in lengths.items()},
            window_ns[index],
            None if pipeline_ns is None else pipeline_ns[index],
        )
        for index in range(len(windows.start))
    ]


def _bounds_of(measured: Mapping[str, tuple[int, int]], window_ns: int, pipeline_ns: int | None) -> dict[str, Bounds]:
    """Return metric -> its least and greatest value, in its unit.

    Args:
        measured: the same in nanoseconds, of all that is communicated, computed and so on, and of computation `alone`.
        pipeline_ns: length of the pipeline; None where there is none.
    """
    bounds: dict[str, Bounds] = {
        name: (low / NS_PER_MS, high / NS_PER_MS) for name, (low, high) in measured.items() if name != "alone"
    }
    (least, most), (exposed, most_exposed) = measured["compute_comm_ms"], measured["exposed_comm_ms"]
    if measured["comm_ms"][1]:
        bounds["overlap_ratio"] = share(least, most_exposed, 1.0), share(most, exposed, 0.0)
    if measured["compute_ms"][1]:
        alone = measured["alone"]
        bounds["overlap_over_compute"] = share(least, alone[1], 1.0), share(most, alone[0], 0.0)
    if window_ns:
        bounds["exposed_share"] = exposed / window_ns, most_exposed / window_ns
    if pipeline_ns is None:
        del bounds["bubble_ms"]
    elif in_pipeline := pipeline_ns / NS_PER_MS:
        bounds["bubble_share"] = (bounds["bubble_ms"][0] / in_pipeline, bounds["bubble_ms"][1] / in_pipeline)
    return bounds


def share(part: float, rest: float, of_nothing: float = 0.0) -> float:
    """Return the part of both together. Where both are empty, nothing is certain to run, and whatever does is in that
    part (1) or not (0). Either may be infinite.
    """
    if part == inf:
        return float(rest < inf)
    return part / (part + rest) if part + rest else of_nothing


@cache
def _active(lanes: int) -> int:
    """Return how many lanes of a mask do something; in a bubble nothing is done."""
    return (lanes & ~(1 << _BIT[BUBBLE])).bit_count()


def _ms(length_ns: int | None) -> float | None:
    return None if length_ns is None else length_ns / NS_PER_MS
