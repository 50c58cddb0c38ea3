"""Collectives matched across all ranks, without ever holding those of all steps: the numbers of `summary.json`.

Enters: a `Run`. Leaves: an entry per (kind, group, group size, bytes), and one a group on its straggler. Must not: say
anything that `matching.matched`, which does the same for a table in memory, would not say (a test holds them together),
or round a nanosecond before a difference is formed.

Two passes. The first takes a range of steps of all ranks at a time, matches it, and writes each rank's waiting beside
its collectives. The second takes a rank at a time, so that the median of each is exact.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import numpy as np

from aorta.analysis.bandwidth import TOO_SHORT, algbw_gb_per_s, busbw_factor, no_bandwidth
from aorta.analysis.instances import Instances, Piece, find_instances
from aorta.analysis.matching import REASONS
from aorta.analysis.metrics import COLLECTIVE_METRIC_NAMES
from aorta.analysis.naming import Entry, Names, name_all
from aorta.analysis.pools import Pools
from aorta.analysis.readers.run_folder import Run
from aorta.analysis.readers.scan import NULL, ROW, Floats, Ints
from aorta.analysis.stats import entry, median_or_none
from aorta.analysis.straggler import Stragglers
from aorta.timeline.overlap import NS_PER_MS

PIECE_ROWS: Final = 1 << 18
"""Collectives matched at a time: 100 MiB with everything that matching needs beside them."""
_OF_ROWS: Final = ("duration_ms", "queued_ms", "wait_ms")
_UNSEEN: Final = "its start or its end was not seen"


@dataclass(frozen=True)
class Across:
    """What matching leaves: plain JSON values, warm-up left out; and the waits, of every step."""

    collectives: list[dict[str, Any]]
    stragglers: list[dict[str, Any]]
    waits: dict[int, int]
    """Rank -> where in the run's store the waits of its collectives stand, in ns, below 0 where not known."""


@dataclass
class _Counts:
    """What is counted of one entry."""

    rows: int = 0
    instances: int = 0
    sources: Counter[str] = field(default_factory=Counter)
    row_reasons: Counter[int] = field(default_factory=Counter)
    reasons: Counter[int] = field(default_factory=Counter)
    no_bandwidth: Counter[str] = field(default_factory=Counter)
    unseen: dict[str, int] = field(default_factory=lambda: {"duration_ms": 0, "queued_ms": 0})
    medians: dict[str, dict[int, float | None]] = field(default_factory=lambda: {name: {} for name in _OF_ROWS})


def across_ranks(run: Run) -> Across:
    """Match, count, describe."""
    names = name_all(run)
    counts = [_Counts() for _ in names.entries]
    pools = Pools(run.columns.store)
    stragglers = Stragglers(names, pools)
    waits = {rank: run.columns.store.reserve(stored.scan.row_count) for rank, stored in run.columns.ranks.items()}
    for first, last in run.columns.step_ranges(PIECE_ROWS):
        piece = piece_of(run, names, first, last)
        if len(piece.rank):
            found = find_instances(piece, names)
            _count_instances(found, names, counts, pools)
            stragglers.add(piece, found)
            for rank, at, start in zip(piece.ranks, piece.starts, piece.first_rows, strict=True):
                run.columns.store.write(waits[rank] + 8 * start, found.wait_or_reason[at])
    for rank in run.columns.ranks:
        _count_rows(run, rank, names, waits[rank], counts, pools, stragglers)
    order = sorted(range(len(counts)), key=lambda index: names.entries[index].order)
    return Across(
        [_entry(names.entries[index], index, counts[index], pools) for index in order if counts[index].rows],
        stragglers.entries(),
        waits,
    )


def piece_of(run: Run, names: Names, first: int, last: int) -> Piece:
    """The collectives of global steps `first` to `last` (exclusive) of all ranks, by rank, then order of issue."""
    columns = run.columns
    ranks, rows, steps, warm, safe, first_rows = [], [], [], [], [], []
    for rank, stored in columns.ranks.items():
        number = columns.integers_of(stored, "global_step")
        low, high = np.searchsorted(number, (first, last))
        ends = columns.integers_of(stored, "rows_end")
        begin, end = int(ends[low - 1]) if low else 0, int(ends[high - 1]) if high else 0
        if end > begin:
            counts = np.diff(ends[low:high], prepend=begin)
            ranks.append(rank)
            first_rows.append(begin)
            rows.append(columns.rows(stored, begin, end))
            steps.append(np.repeat(number[low:high], counts))
            warm.append(np.repeat(columns.integers_of(stored, "warmup")[low:high] != 0, counts))
            missed = stored.scan.first_missed
            safe.append(np.ones(end - begin, bool) if missed is None else steps[-1] < missed)
    lengths = [len(part) for part in rows]
    edges = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    table = np.concatenate([np.empty((0, len(ROW)), np.int64), *rows])
    return Piece(
        ranks=ranks,
        starts=[slice(int(left), int(right)) for left, right in pairwise(edges)],
        first_rows=first_rows,
        rank=np.repeat(np.array(ranks, np.int64), lengths),
        what=table[:, 0] + np.repeat(np.array([names.first_what[rank] for rank in ranks], np.int64), lengths),
        seq=table[:, 1].copy(),
        start_ns=table[:, 3].copy(),
        end_ns=table[:, 4].copy(),
        step=np.concatenate([np.empty(0, np.int64), *steps]),
        used=~np.concatenate([np.empty(0, bool), *warm]),
        safe=np.concatenate([np.empty(0, bool), *safe]),
    )


def _count_instances(found: Instances, names: Names, counts: list[_Counts], pools: Pools) -> None:
    """Add what there is once per collective: transfer, arrival skew, bandwidth, and why they are null."""
    for index in np.unique(found.entry[found.used]):
        mine = found.used & (found.entry == index)
        count, key = counts[index], names.entries[index]
        count.instances += int(mine.sum())
        for reason, seen in zip(*np.unique(found.reason[mine], return_counts=True), strict=True):
            count.reasons[int(reason)] += int(seen)
        clear = mine & (found.reason == 0)
        transfer = found.transfer_ns[clear] / NS_PER_MS
        pools.add(("transfer_ms", index), transfer)
        pools.add(("arrival_skew_ms", index), (found.longest_ns - found.transfer_ns)[clear] / NS_PER_MS)
        pools.add(("arrival_skew_bound_ms", index), found.longest_ns[clear] / NS_PER_MS)
        why = no_bandwidth(key.bytes if key.bytes >= 0 else None, key.size)
        algbw = transfer[:0] if why else algbw_gb_per_s(key.bytes, found.transfer_ns[clear])
        if len(algbw) < len(transfer):
            count.no_bandwidth[why or TOO_SHORT] += len(transfer) - len(algbw)
        pools.add(("algbw_gb_per_s", index), algbw)
        factor = busbw_factor(key.kind, key.size)
        if factor is not None:
            pools.add(("busbw_gb_per_s", index), algbw * factor)


def _count_rows(
    run: Run, rank: int, names: Names, waits: int, counts: list[_Counts], pools: Pools, stragglers: Stragglers
) -> None:
    """Add what there is on each rank: duration, queueing, waiting, and their medians."""
    stored = run.columns.ranks[rank]
    if not stored.scan.row_count:
        return
    rows = run.columns.rows(stored)
    wait = run.columns.store.read(waits, len(rows), np.int64)
    warm = run.columns.integers_of(stored, "warmup") != 0
    used = ~np.repeat(warm, np.diff(run.columns.integers_of(stored, "rows_end"), prepend=0))
    what = rows[:, 0]
    _, _, issue, start, end = rows.T
    values = {
        "duration_ms": _milliseconds(end - start, (start == NULL) | (end == NULL)),
        "queued_ms": _milliseconds(start - issue, (start == NULL) | (issue == NULL)),
        "wait_ms": _milliseconds(wait, wait < 0),
    }
    first = names.first_what[rank]
    stragglers.add_waits(rank, what + first, wait, used)
    entries = names.entry[first : first + len(stored.scan.whats)]
    for index in np.unique(entries):
        mine = used & (entries[what] == index)
        if not mine.any():
            continue
        count = counts[index]
        count.rows += int(mine.sum())
        for code, seen in zip(*np.unique(what[mine], return_counts=True), strict=True):
            count.sources[stored.scan.whats[code][4] or "unknown"] += int(seen)
        for reason, seen in zip(*np.unique(wait[mine & (wait < 0)], return_counts=True), strict=True):
            count.row_reasons[-int(reason)] += int(seen)
        for name, column in values.items():
            part = column[mine]
            count.medians[name][rank] = median_or_none(part)
            pools.add((name, index), part)
            if name in count.unseen:
                count.unseen[name] += int(np.isnan(part).sum())


def _milliseconds(lengths_ns: Ints, null: np.ndarray) -> Floats:
    return np.where(null, np.nan, lengths_ns / NS_PER_MS)


def _entry(key: Entry, index: int, count: _Counts, pools: Pools) -> dict[str, Any]:
    """The entry of `summary.json`."""
    reasons = {REASONS[code]: seen for code, seen in sorted(count.reasons.items()) if code}
    row_reasons = {REASONS[code]: seen for code, seen in sorted(count.row_reasons.items()) if code}
    found: dict[str, Any] = {
        "kind": key.kind,
        "group": key.group,
        "group_size": key.size,
        "bytes": key.bytes if key.bytes >= 0 else None,
        "group_ranks": [list(members) for members in sorted(key.members)],
        "collectives": count.instances,
        "rows": count.rows,
        "end_sources": {source: count.sources[source] for source in sorted(count.sources)},
        "transfer_is_upper_bound": "wait" in count.sources,  # such an end is when the caller looked (R6)
    }
    for name in COLLECTIVE_METRIC_NAMES:
        known, numbers = pools.numbers((name, index))
        if name in _OF_ROWS:
            unseen = count.unseen.get(name)
            why = row_reasons if name == "wait_ms" else {_UNSEEN: unseen} if unseen else {}
            found[name] = entry(known, count.rows - known, numbers, count.medians[name], why)
        else:
            why = {**reasons, **(count.no_bandwidth if name.endswith("_gb_per_s") else {})}
            found[name] = entry(known, count.instances - known, numbers, None, why)
    return found
