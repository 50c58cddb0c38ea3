"""Numbers the collectives of a trace, and sums up what they cost, per kind, group and size, whatever the source.

`parts_of` reduces a trace in the process that reads it; `costs` joins the parts of all ranks: how many collectives, how
long, how much of it hidden, and bandwidths as docs/metrics.md defines them.

A source without sequence numbers has its collectives numbered by their order, where order identifies them. On a device
it identifies nothing: steps are cut where the host marked them and the device runs behind its host, so a step may hold
different collectives on different ranks even if their count agrees.

Must not: take one rank's duration for a transfer (W5), the world size for a group's (W19), sum durations that overlap
(W10), or match collectives of different ranks by their time (W11).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from aorta.documents.metrics import TOO_SHORT, algbw_gb_per_s, busbw_factor, no_bandwidth
from aorta.read.frames import NO_TIME, UNNUMBERED, CollectiveName, Collectives, Groups
from aorta.read.matching import KIND_UNKNOWN, LEAVES_EARLY, NOT_NUMBERED
from aorta.read.traces.interval_table import NULL, IntervalClass, Intervals, Trace, by_device, collectives_of
from aorta.timeline import arrays
from aorta.timeline.arrays import Int64
from aorta.timeline.classes import KINDS, LOCKSTEP, UNKNOWN_KIND

MOST_COUNTED: Final = 1 << 20
UNKNOWN_GROUP: Final = "unknown"
"""Group name of collectives whose process group the trace does not state."""
END_SOURCE: Final = "trace"
"""Ends of collectives are as the trace has them."""


def _order_identifies(trace: Trace) -> bool:
    """Return whether steps are marked on the clock and threads that the collectives ran on, as with gloo on a CPU."""
    return trace.platform == "cpu" and bool(len(trace.windows))


def ordinals(place: Int64, code: Int64) -> Int64:
    """Return one number from how many collectives of its code its step (`place`) has, and which of them this one is;
    rows in order of time. Because the count is part of it, ranks that disagree on it match nothing rather than the
    wrong collective.
    """
    groups = Groups(place, code)
    counts = np.diff(groups.starts, append=len(place))
    numbers = np.empty(len(place), np.int64)
    numbers[groups.order] = np.arange(len(place)) + np.repeat(counts * MOST_COUNTED - groups.starts, counts)
    return numbers


def collectives_in(trace: Trace, rows: Intervals, steps: Int64 | None, start_ns: Int64) -> Collectives:
    """Return the collectives that start inside a step of one device, by step, then start.

    Args:
        rows: of the device.
        steps: numbers of the steps, ascending; None: the whole trace is one.
        start_ns: of each step.
    """
    table = collectives_of(rows.take(rows.cls == IntervalClass.COMM))
    if steps is not None:
        table = table.take(np.isin(table.step, steps))
    step = np.zeros(len(table), np.int64) if steps is None else np.searchsorted(steps, table.step)
    order = np.lexsort((table.start_ns, step))
    table, step = table.take(order), step[order]
    distinct = Groups(table.kind, table.group, table.bytes, table.dtype)
    names = tuple(
        CollectiveName(
            KINDS[kind] if kind != NULL else UNKNOWN_KIND,
            table.groups[group] if group != NULL else UNKNOWN_GROUP,
            size,
            table.dtypes[dtype] if dtype != NULL else None,
            END_SOURCE,
        )
        for kind, group, size, dtype in zip(
            *(column[distinct.first].tolist() for column in (table.kind, table.group, table.bytes, table.dtype)),
            strict=True,
        )
    )
    numbers = ordinals(step, distinct.of_row)
    by_order = numbers if _order_identifies(trace) else UNNUMBERED - numbers % MOST_COUNTED
    return Collectives(
        step=step,
        name=distinct.of_row,
        seq=np.where(table.seq != NULL, table.seq, by_order),
        issue_ns=np.full(len(table), NO_TIME),  # the trace does not record when it was issued
        start_ns=table.start_ns - start_ns[step],
        end_ns=table.end_ns - start_ns[step],
        names=names,
    )


class CostKey(NamedTuple):
    """The collectives that are counted together. `members` are the global ranks of the group, None where unknown (two
    groups may share a name); `size` is the number of its ranks.
    """

    kind: str
    group: str | None
    members: tuple[int, ...] | None
    size: int | None
    bytes: int | None


@dataclass(frozen=True)
class CostPart:
    """The collectives of one key on one rank and device: lengths of unions, and step, sequence number and duration of
    each. `step`: of those numbered by their order in a step; `NULL` of those that the source numbers itself.
    """

    key: CostKey
    rank: int
    count: int
    time_ns: int
    hidden_ns: int
    step: Int64
    seq: Int64
    duration_ns: Int64


def parts_of(trace: Trace) -> list[CostPart]:
    """Reduce one trace to its collectives by rank, device and key."""
    parts = []
    for _, here in by_device(trace.intervals):
        compute = arrays.merge(here.take(here.cls == IntervalClass.COMPUTE).spans)
        comm = here.take(here.cls == IntervalClass.COMM)
        for mine in Groups(comm.kind, comm.group, comm.bytes).rows:
            own = comm.take(mine)
            kind, group, size = int(own.kind[0]), int(own.group[0]), int(own.bytes[0])
            name = comm.groups[group] if group != NULL else None
            lane = arrays.merge(own.spans)
            own = collectives_of(own)
            own = own.take(np.argsort(own.start_ns, kind="stable"))
            by_order = (own.seq == NULL) & (own.step != NULL) & _order_identifies(trace)
            seq = own.seq.copy()
            seq[by_order] = ordinals(own.step[by_order], np.zeros(by_order.sum(), np.int64))
            members = trace.group_ranks.get(name) if name is not None else None
            ranks = len(members) if members else trace.group_sizes.get(name) if name is not None else None
            key = CostKey(
                KINDS[kind] if kind != NULL else UNKNOWN_KIND,
                name,
                tuple(sorted(members)) if members else None,
                ranks,
                size if size != NULL else None,
            )
            parts.append(
                CostPart(
                    key=key,
                    rank=trace.rank,
                    count=len(own),
                    time_ns=arrays.measure(lane),
                    hidden_ns=arrays.measure(arrays.intersect(lane, compute)),
                    step=np.where(by_order, own.step, NULL),
                    seq=seq,
                    duration_ns=own.end_ns - own.start_ns,
                )
            )
    return parts


def costs(parts: Sequence[CostPart]) -> list[dict[str, Any]]:
    """Join the parts of all ranks, one row per key, the longest time first.

    Times are sums over ranks of the length of each rank's union. `matched` collectives were found on every rank of the
    group; the medians of `transfer_ms` and the bandwidths are over those. Where a value is None, `reasons` says why.
    """
    of_key: defaultdict[CostKey, list[CostPart]] = defaultdict(list)
    for part in parts:
        of_key[part.key].append(part)
    rows = []
    for key, same in of_key.items():
        time_ns, hidden_ns = sum(part.time_ns for part in same), sum(part.hidden_ns for part in same)
        transfers, reason = _transfers(key, same)
        algbw = busbw = None
        reasons: dict[str, str] = {}
        if reason is not None:
            reasons = dict.fromkeys(("transfer_ms", "algbw_gb_per_s", "busbw_gb_per_s"), reason)
        elif (why := no_bandwidth(key.bytes, key.size)) is not None:
            reasons = dict.fromkeys(("algbw_gb_per_s", "busbw_gb_per_s"), why)
        elif not len(each := algbw_gb_per_s(key.bytes or 0, transfers)):
            reasons = dict.fromkeys(("algbw_gb_per_s", "busbw_gb_per_s"), TOO_SHORT)
        else:
            algbw = float(np.median(each))
            factor = busbw_factor(key.kind, key.size)
            busbw = None if factor is None else algbw * factor
            if factor is None:
                reasons["busbw_gb_per_s"] = "no bus bandwidth is defined for this kind"
        if not time_ns:
            reasons["overlap_ratio"] = "no time in it"
        rows.append(
            {
                "key": [*key],
                "ranks": len({part.rank for part in same}),
                "count": sum(part.count for part in same),
                "time_ms": time_ns / 1e6,
                "hidden_ms": hidden_ns / 1e6,
                "exposed_ms": (time_ns - hidden_ns) / 1e6,
                "overlap_ratio": hidden_ns / time_ns if time_ns else None,
                "matched": len(transfers),
                "transfer_ms": float(np.median(transfers)) / 1e6 if reason is None else None,
                "algbw_gb_per_s": algbw,
                "busbw_gb_per_s": busbw,
                "reasons": reasons,
            }
        )
    return sorted(rows, key=lambda row: (-row["time_ms"], str(CostKey(*row["key"]))))


def _transfers(key: CostKey, parts: list[CostPart]) -> tuple[Int64, str | None]:
    """Return for each collective found on all ranks of the group the shortest duration over those ranks; or why there
    is none.
    """
    none, reason = np.zeros(0, np.int64), None
    if key.kind == UNKNOWN_KIND:
        reason = KIND_UNKNOWN
    elif key.kind not in LOCKSTEP:
        reason = LEAVES_EARLY
    elif key.members is None:
        reason = f"{'its group is' if key.group is None else 'the ranks of its group are'} not in the trace"
    elif all((part.seq == NULL).all() for part in parts):
        reason = NOT_NUMBERED
    if reason is not None or key.members is None:
        return none, reason
    rank = np.concatenate([np.full(len(part.seq), part.rank) for part in parts])
    numbered = np.concatenate([part.seq for part in parts]) != NULL
    of_group = np.isin(rank, key.members) & numbered
    order = np.flatnonzero(of_group)[np.argsort(rank[of_group], kind="stable")]
    step, seq, duration = (
        np.concatenate([getattr(part, name) for part in parts])[order] for name in ("step", "seq", "duration_ns")
    )
    by = Groups(step, seq)
    # A number that occurs twice on one rank identifies no collective.
    everywhere = (by.distinct(rank[order]) == len(key.members)) & (by.sizes == len(key.members))
    if everywhere.any():
        return by.reduce(np.minimum, duration)[everywhere], None
    missing = sorted(set(key.members) - set(rank[order].tolist()))
    absent = f"not in the traces of rank {', '.join(map(str, missing[:8]))}"
    return none, absent if missing else "no sequence number is on every rank exactly once"
