"""Computes the metrics of collectives across all ranks: `collectives` and `stragglers` of `summary.json`.

`collective_metrics(run)` matches the collectives of all ranks (`collective_matching`) and describes them: one entry per
kind, group, group size and bytes, and one per group about its straggler. Must not: round a nanosecond before a
difference is formed, or pool warm-up with steady state (W21).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Final

import msgspec
import numpy as np

from aorta.analysis.bandwidth import TOO_SHORT, algbw_gb_per_s, busbw_factor, no_bandwidth
from aorta.analysis.collective_matching import (
    OK,
    PIECE_ROWS,
    REASONS,
    CollectiveKey,
    MatchedCollectives,
    NumberedNames,
    matched_pieces,
    name_collectives,
)
from aorta.analysis.documents.dataset import CollectiveEntry, Described, Straggler
from aorta.analysis.issue_lateness import IssueLateness
from aorta.analysis.metrics import COLLECTIVE_METRIC_NAMES
from aorta.analysis.stall_cutoffs import cutoffs_ns
from aorta.analysis.stats import entry, median_or_none, numbers_of
from aorta.analysis.straggler import Stragglers
from aorta.analysis.tables import NO_TIME, Bools, Floats, Ints, RankTables, Run
from aorta.records.schema import STALL_CUTOFF_NS
from aorta.timeline.overlap import NS_PER_MS

_OF_ROWS: Final = ("duration_ms", "queued_ms", "wait_ms")
_UNSEEN: Final = "its start or its end was not seen"


@dataclass(frozen=True)
class CollectiveMetrics:
    """Entries of `summary.json` without warm-up; and the waits, of every step."""

    collectives: list[CollectiveEntry]
    stragglers: list[Straggler]
    waits: dict[int, Ints]
    """Rank -> its wait in each of its collectives, in ns, negative where that is unknown."""


@dataclass
class _Entry:
    """Counts of one entry, and the values to be described once all are collected."""

    rows: int = 0
    collectives: int = 0
    sources: Counter[str] = field(default_factory=Counter)
    row_reasons: Counter[int] = field(default_factory=Counter)
    reasons: Counter[int] = field(default_factory=Counter)
    no_bandwidth: Counter[str] = field(default_factory=Counter)
    unseen: Counter[str] = field(default_factory=Counter)
    values: defaultdict[str, list[Floats]] = field(default_factory=lambda: defaultdict(list))
    medians: defaultdict[str, dict[int, float | None]] = field(default_factory=lambda: defaultdict(dict))

    def describe(self) -> dict[str, tuple[int, Floats | None]]:
        """Metric -> number of values, and their statistics. Frees the values."""
        numbers = {name: numbers_of(parts) for name, parts in self.values.items()}
        self.values.clear()
        return numbers


def collective_metrics(run: Run, piece_rows: int = PIECE_ROWS) -> CollectiveMetrics:
    """Match, count and describe the collectives of a run, about `piece_rows` of them at a time."""
    names = name_collectives(run)
    entries = [_Entry() for _ in names.keys]
    stragglers = Stragglers(names, IssueLateness(run, names), max(cutoffs_ns(run), default=STALL_CUTOFF_NS) / NS_PER_MS)
    waits = {rank: np.empty(len(tables.collectives), np.int64) for rank, tables in run.ranks.items()}
    for rows, found in matched_pieces(run, names, rows=piece_rows):
        _count_collectives(found, names, entries)
        stragglers.add(rows, found)
        for rank, at, start in zip(rows.ranks, rows.slices, rows.first_rows, strict=True):
            waits[rank][start : start + at.stop - at.start] = found.wait_or_reason[at]
    used = {rank: np.repeat(tables.steps.used, tables.steps.row_counts) for rank, tables in run.ranks.items()}
    numbers = [each.describe() for each in entries]
    for rank, tables in run.ranks.items():
        _count_rows(rank, tables, names, waits[rank], used[rank], entries)
        stragglers.add_waits(
            rank, names.first[rank] + tables.collectives.name.astype(np.int64), waits[rank], used[rank]
        )
    for name in _OF_ROWS:  # one metric at a time: its values of all ranks are the largest allocation here
        for rank, tables in run.ranks.items():
            _add_values(name, rank, tables, names, waits[rank], used[rank], entries)
        for index, each in enumerate(entries):
            numbers[index] |= each.describe()
    order = sorted(range(len(entries)), key=lambda index: names.keys[index].order)
    return CollectiveMetrics(
        [
            _collective_entry(names.keys[index], entries[index], numbers[index])
            for index in order
            if entries[index].rows
        ],
        stragglers.entries(),
        waits,
    )


def with_open_starts(found: CollectiveMetrics, reason: str) -> CollectiveMetrics:
    """The same where marks leave open when kernels of collectives began: a duration may hold the time to the launch. A
    transfer is then an upper bound, and waits name no straggler.
    """
    replace = msgspec.structs.replace
    stragglers = [
        replace(each, rank=None, late_ms=None, reason=reason) if each.basis == "waits" else each
        for each in found.stragglers
    ]
    rows = [replace(row, transfer_is_upper_bound=True) for row in found.collectives]
    return CollectiveMetrics(rows, stragglers, found.waits)


def _count_collectives(found: MatchedCollectives, names: NumberedNames, entries: list[_Entry]) -> None:
    """Add what exists once per collective: transfer, arrival skew, bandwidth, and why they are null."""
    for index in np.unique(found.key[found.used]):
        mine = found.used & (found.key == index)
        counted, key = entries[index], names.keys[index]
        counted.collectives += int(mine.sum())
        for reason, seen in zip(*np.unique(found.reason[mine], return_counts=True), strict=True):
            counted.reasons[int(reason)] += int(seen)
        clear = mine & (found.reason == OK)
        transfer_ns, longest_ns = found.transfer_ns[clear], found.longest_ns[clear]
        counted.values["transfer_ms"].append(transfer_ns / NS_PER_MS)
        counted.values["arrival_skew_ms"].append((longest_ns - transfer_ns) / NS_PER_MS)
        counted.values["arrival_skew_bound_ms"].append(longest_ns / NS_PER_MS)
        why = no_bandwidth(key.bytes if key.bytes >= 0 else None, key.size)
        algbw = np.empty(0) if why else algbw_gb_per_s(key.bytes, transfer_ns)
        if len(algbw) < len(transfer_ns):
            counted.no_bandwidth[why or TOO_SHORT] += len(transfer_ns) - len(algbw)
        counted.values["algbw_gb_per_s"].append(algbw)
        factor = busbw_factor(key.kind, key.size)
        if factor is not None:
            counted.values["busbw_gb_per_s"].append(algbw * factor)


def _count_rows(
    rank: int, tables: RankTables, names: NumberedNames, waits: Ints, used: Bools, entries: list[_Entry]
) -> None:
    """Add what exists on each rank: number of rows, how their ends were observed, and why a wait is unknown."""
    rows = tables.collectives
    for index, mine in _by_entry(rank, tables, names, used):
        counted = entries[index]
        counted.rows += int(mine.sum())
        for code, seen in zip(*np.unique(rows.name[mine], return_counts=True), strict=True):
            counted.sources[rows.names[code].end_source or "unknown"] += int(seen)
        for reason, seen in zip(*np.unique(waits[mine & (waits < 0)], return_counts=True), strict=True):
            counted.row_reasons[-int(reason)] += int(seen)


def _add_values(
    name: str, rank: int, tables: RankTables, names: NumberedNames, waits: Ints, used: Bools, entries: list[_Entry]
) -> None:
    """Add one metric of the rows of one rank, and its median."""
    rows = tables.collectives
    lengths = {"duration_ms": rows.duration_ns, "queued_ms": rows.queued_ns}.get(name, waits)
    unknown = waits < 0 if name == "wait_ms" else lengths == NO_TIME
    values = np.where(unknown, np.nan, lengths / NS_PER_MS)
    for index, mine in _by_entry(rank, tables, names, used):
        part = values[mine]
        entries[index].medians[name][rank] = median_or_none(part)
        known = part[~np.isnan(part)]
        entries[index].values[name].append(known)
        if name != "wait_ms":
            entries[index].unseen[name] += len(part) - len(known)


def _by_entry(rank: int, tables: RankTables, names: NumberedNames, used: Bools) -> list[tuple[int, Bools]]:
    """Each entry that a rank has, with a mask of its rows that count."""
    first = names.first[rank]
    entry_of = names.key[first : first + len(tables.collectives.names)]
    of_row = entry_of[tables.collectives.name] if len(entry_of) else np.empty(0, np.int64)
    each = ((int(index), used & (of_row == index)) for index in np.unique(entry_of))
    return [(index, mine) for index, mine in each if mine.any()]


def _collective_entry(
    key: CollectiveKey, counted: _Entry, numbers: dict[str, tuple[int, Floats | None]]
) -> CollectiveEntry:
    reasons = {REASONS[code]: seen for code, seen in sorted(counted.reasons.items()) if code}
    row_reasons = {REASONS[code]: seen for code, seen in sorted(counted.row_reasons.items()) if code}
    found: dict[str, Described] = {}
    for name in COLLECTIVE_METRIC_NAMES:
        known, described = numbers.get(name, (0, None))
        if name in _OF_ROWS:
            unseen = counted.unseen[name]
            why = row_reasons if name == "wait_ms" else {_UNSEEN: unseen} if unseen else {}
            found[name] = entry(known, counted.rows - known, described, counted.medians[name], why)
        else:
            why = {**reasons, **(counted.no_bandwidth if name.endswith("_gb_per_s") else {})}
            found[name] = entry(known, counted.collectives - known, described, None, why)
    return CollectiveEntry(
        kind=key.kind,
        group=key.group,
        group_size=key.size,
        bytes=key.bytes if key.bytes >= 0 else None,
        group_ranks=[list(members) for members in sorted(key.members)],
        collectives=counted.collectives,
        rows=counted.rows,
        end_sources={source: counted.sources[source] for source in sorted(counted.sources)},
        transfer_is_upper_bound="wait" in counted.sources,  # such an end is when the caller checked (R6)
        **found,
    )
