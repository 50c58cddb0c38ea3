"""Computes what a report says of collectives across all ranks: one entry per kind, group, group size and bytes.

`collective_metrics(run)` matches the collectives of all ranks (`read.matching`) and gives `collectives` of
`summary.json`, the waits of every row, and how late every rank is in every step.

Must not: round a nanosecond before a difference is formed, pool warm-up with steady state (W21), compare waiting of
different collectives (docs/dev/measuring.md, section 1), or take ends that only the caller saw for the collective's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import msgspec
import numpy as np

from aorta.analysis.pace import cutoffs_ns
from aorta.documents.dataset import CollectiveEntry, Statistics
from aorta.documents.metrics import TOO_SHORT, algbw_gb_per_s, busbw_factor, no_bandwidth
from aorta.documents.statistics import entry, median_or_none
from aorta.read.frames import NO_TIME, Bools, Floats, Ints
from aorta.read.matching import (
    OK,
    PIECE_ROWS,
    REASONS,
    CollectiveKey,
    CollectiveRows,
    MatchedCollectives,
    NumberedNames,
    matched_pieces,
)
from aorta.read.run import Run
from aorta.records.schema import STALL_CUTOFF_NS
from aorta.timeline.overlap import NS_PER_MS

_OF_ROWS: Final = ("duration_ms", "queued_ms", "wait_ms")
_UNSEEN: Final = "its start or its end was not seen"


@dataclass(frozen=True)
class CollectiveMetrics:
    """Entries of `summary.json` without warm-up; and the waits, of every step.

    Attributes:
        wait_ns: of each row of `Run.collectives`; negative where it is unknown.
        last: of each row, the rank that arrived last; -1 where it is unknown, or several did.
        first_waits: how late each rank was in each step.
    """

    collectives: list[CollectiveEntry]
    wait_ns: Ints
    last: Ints
    first_waits: FirstWaits


class FirstWaits:
    """Collects the lateness of every rank in every step, piece by piece."""

    def __init__(self, run: Run, cutoffs_ns: Iterable[int]) -> None:
        self.steps = np.unique(run.steps.global_step)
        self._columns = {rank: column for column, rank in enumerate(run.ranks)}
        self.margin_ns = max(cutoffs_ns, default=STALL_CUTOFF_NS)
        self.late_ms = np.full((len(self.steps), len(self._columns)), np.nan)
        self._counted = ends_on_their_own(run)

    def add(self, rows: CollectiveRows, match: MatchedCollectives) -> None:
        """Add the first collective of each step that anybody waited for longer than the margin."""
        by, frame = match.by, rows.frame
        own_end = by.reduce(np.logical_and, self._counted[frame.name])
        waited = np.flatnonzero(match.whole & own_end & (match.longest_ns - match.transfer_ns > self.margin_ns))
        step, start_ns = rows.global_step[by.first][waited], by.reduce(np.minimum, frame.start_ns)[waited]
        waited = waited[np.lexsort((start_ns, step))]
        chosen, first = np.unique(rows.global_step[by.first][waited], return_index=True)
        for number, index in zip(chosen.tolist(), waited[first].tolist(), strict=True):
            members = by.order[by.starts[index] : by.starts[index] + by.sizes[index]]
            waits_ms = match.wait_or_reason[members][None, :] / NS_PER_MS
            columns = [self._columns[rank] for rank in rows.rank[members].tolist()]
            self.late_ms[np.searchsorted(self.steps, number), columns] = behind_others(waits_ms)[0]


def behind_others(values: Floats) -> Floats:
    """Return the median of the other columns minus each value; shape (rows, at least 2 columns)."""
    order = np.argsort(values, axis=1, kind="stable")
    ranked = np.take_along_axis(values, order, axis=1)
    count, position = values.shape[1], np.empty_like(order)
    np.put_along_axis(position, order, np.broadcast_to(np.arange(count), order.shape), axis=1)
    middle = [(count - 2) // 2, (count - 1) // 2]  # of the count - 1 others
    medians = (
        sum(np.take_along_axis(ranked, np.minimum(index + (index >= position), count - 1), axis=1) for index in middle)
        / 2
    )
    result: Floats = medians - values
    return result


def ends_on_their_own(run: Run) -> Bools:
    """Return of each name of the run's collectives whether its end is the collective's, not when the caller looked."""
    return np.array([name.end_source != "wait" for name in run.collectives.names] or [False])


def collective_metrics(run: Run, piece_rows: int = PIECE_ROWS) -> CollectiveMetrics:
    """Match, count and describe the collectives of a run, about `piece_rows` of them at a time."""
    names = NumberedNames(run)
    matched, first_waits = list[Ints](), FirstWaits(run, cutoffs_ns(run))
    wait_ns, last = (np.empty(len(run.collectives), np.int64) for _ in range(2))
    for rows, pieces in matched_pieces(run, names, rows=piece_rows):
        columns = np.stack((pieces.key, pieces.reason, pieces.transfer_ns, pieces.longest_ns))
        matched.append(columns[:, pieces.used])
        first_waits.add(rows, pieces)
        wait_ns[rows.at] = pieces.wait_or_reason
        last[rows.at] = np.where((pieces.reason == OK) & pieces.alone, rows.rank[pieces.last], -1)[pieces.by.of_row]
    counts = np.bincount(run.collectives.name[run.steps.used[run.collectives.step]], minlength=len(names.key))
    order = sorted(set(names.key[counts > 0].tolist()), key=lambda index: names.keys[index].order)
    key, *numbers = np.concatenate([np.empty((4, 0), np.int64), *matched], axis=1)
    matched.clear()
    of_key = {index: [column[key == index] for column in numbers] for index in order}
    entries = [_entry(run, names, index, counts, of_key.pop(index), wait_ns) for index in order]
    return CollectiveMetrics(entries, wait_ns, last, first_waits)


def with_open_starts(metrics: CollectiveMetrics) -> CollectiveMetrics:
    """Return the same where marks leave open when kernels of collectives began: a duration may hold the time to the
    launch. A transfer is then an upper bound, and nobody is known to have waited.
    """
    rows = [msgspec.structs.replace(row, transfer_is_upper_bound=True) for row in metrics.collectives]
    metrics.first_waits.late_ms[:] = np.nan
    return replace(metrics, collectives=rows, wait_ns=np.full_like(metrics.wait_ns, -1))


def _entry(
    run: Run, names: NumberedNames, index: int, rows: Ints, matched: Sequence[Ints], wait_ns: Ints
) -> CollectiveEntry:
    """Describe the entry with this `index` in `names.keys`.

    Args:
        rows: of each name, how many collectives count.
        matched: of each collective the reason why its transfer is null, its transfer, and its longest duration.
    """
    key, chosen = names.keys[index], names.key == index
    sources = Counter[str]()
    for what, own in zip(run.collectives.names, np.where(chosen, rows, 0).tolist(), strict=True):
        sources[what.end_source or "unknown"] += own
    described = {name: _of_rows(run, names, index, name, wait_ns) for name in _OF_ROWS}
    return CollectiveEntry(
        kind=key.kind,
        group=key.group,
        group_title=run.group_titles[key.group],
        group_size=key.size,
        bytes=key.bytes if key.bytes >= 0 else None,
        group_ranks=[list(members) for members in sorted(key.members)],
        collectives=len(matched[0]),
        rows=int(rows[chosen].sum()),
        end_sources={source: sources[source] for source in sorted(+sources)},
        transfer_is_upper_bound="wait" in +sources,  # such an end is when the caller checked (R6)
        **described,
        **_of_collectives(key, *matched),
    )


def _of_collectives(key: CollectiveKey, reason: Ints, transfer_ns: Ints, longest_ns: Ints) -> dict[str, Statistics]:
    """Describe the metrics that each collective of an entry has, and why they are null."""
    clear = reason == OK
    codes, counts = np.unique(reason[~clear], return_counts=True)
    reasons = {REASONS[code]: count for code, count in zip(codes.tolist(), counts.tolist(), strict=True)}
    transfer_ns, longest_ns = transfer_ns[clear], longest_ns[clear]
    why, factor = no_bandwidth(key.bytes if key.bytes >= 0 else None, key.size), busbw_factor(key.kind, key.size)
    algbw = np.empty(0) if why else algbw_gb_per_s(key.bytes, transfer_ns)
    lacking = len(transfer_ns) - len(algbw)
    no_rate = reasons | ({why or TOO_SHORT: lacking} if lacking else {})
    columns = {
        "transfer_ms": (transfer_ns / NS_PER_MS, reasons),
        "arrival_skew_ms": ((longest_ns - transfer_ns) / NS_PER_MS, reasons),
        "arrival_skew_bound_ms": (longest_ns / NS_PER_MS, reasons),
        "algbw_gb_per_s": (algbw, no_rate),
        "busbw_gb_per_s": (algbw[:0] if factor is None else algbw * factor, no_rate),
    }
    return {
        name: entry(values, len(reason) - len(values), None, null_reasons)
        for name, (values, null_reasons) in columns.items()
    }


def _of_rows(run: Run, names: NumberedNames, index: int, name: str, wait_ns: Ints) -> Statistics:
    """Describe one metric that each row of an entry has, rank by rank: its values are the largest allocation here."""
    frame, used = run.collectives, run.steps.used
    parts, medians, reasons = [], dict[int, float | None](), Counter[str]()
    for rank, (first, last) in zip(run.ranks, pairwise(run.first_row.tolist()), strict=True):
        rows = first + np.flatnonzero((names.key[frame.name[first:last]] == index) & used[frame.step[first:last]])
        if not len(rows):
            continue
        if name == "wait_ms":
            length_ns = wait_ns[rows]
            null = length_ns < 0
            reasons.update(REASONS[code] for code in (-length_ns[null]).tolist())
        else:
            begun, ended = (frame.start_ns, frame.end_ns) if name == "duration_ms" else (frame.issue_ns, frame.start_ns)
            length_ns = ended[rows] - begun[rows]
            null = (begun[rows] == NO_TIME) | (ended[rows] == NO_TIME)
            reasons[_UNSEEN] += int(null.sum())
        parts.append(length_ns[~null] / NS_PER_MS)
        medians[rank] = median_or_none(parts[-1])
    in_order = sorted(+reasons, key=[*REASONS, _UNSEEN].index)
    values = np.concatenate([np.empty(0), *parts])
    return entry(values, reasons.total(), medians, {why: reasons[why] for why in in_order})
