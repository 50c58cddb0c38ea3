"""Computes what a report says of collectives across all ranks, and of overlap against a run's isolated baselines.

Two parts. *Collectives*: `collective_metrics(run)` matches the collectives of all ranks (`collective_matching`) into
`collectives` and `stragglers` of `summary.json`: one entry per kind, group, group size and bytes, and one per group
about its straggler. *Baselines*: where a record has steps of the phases `compute_only` and `comm_only` behind its
training (R10), `overlap_efficiency` (the share of the possible saving) and `compute_slowdown` (what overlapping cost),
or why each is null.

Must not: round a nanosecond before a difference is formed, pool warm-up with steady state (W21), mix phases, or use a
warm-up step of any phase.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Final

import msgspec
import numpy as np

from aorta.analysis.cautions import cutoffs_ns
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
from aorta.analysis.host_bound import HOST_BOUND, MOST_UNDECIDED, Pace
from aorta.analysis.metrics import COLLECTIVE_METRIC_NAMES, TOO_SHORT, algbw_gb_per_s, busbw_factor, no_bandwidth
from aorta.analysis.stats import describe, entry, median_or_none, numbers_of
from aorta.analysis.straggler import IssueLateness, Stragglers
from aorta.analysis.tables import NO_TIME, PHASES, Bools, Floats, Ints, RankTables, Run
from aorta.records.schema import STALL_CUTOFF_NS, Phase
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

    def add(self, **values: Floats) -> None:
        """Add values of metrics, by name."""
        for name, each in values.items():
            self.values[name].append(each)

    def describe(self) -> dict[str, tuple[int, Floats | None]]:
        """Return metric -> number of values, and their statistics. Frees the values."""
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


def with_open_starts(metrics: CollectiveMetrics, reason: str) -> CollectiveMetrics:
    """Return the same where marks leave open when kernels of collectives began: a duration may hold the time to the
    launch. A transfer is then an upper bound, and waits name no straggler.
    """
    replace = msgspec.structs.replace
    stragglers = [
        replace(each, rank=None, late_ms=None, reason=reason) if each.basis == "waits" else each
        for each in metrics.stragglers
    ]
    rows = [replace(row, transfer_is_upper_bound=True) for row in metrics.collectives]
    return CollectiveMetrics(rows, stragglers, metrics.waits)


def _count_collectives(matched: MatchedCollectives, names: NumberedNames, entries: list[_Entry]) -> None:
    """Add what exists once per collective: transfer, arrival skew, bandwidth, and why they are null."""
    for index in np.unique(matched.key[matched.used]):
        mine = matched.used & (matched.key == index)
        counted, key = entries[index], names.keys[index]
        counted.collectives += int(mine.sum())
        for reason, seen in zip(*np.unique(matched.reason[mine], return_counts=True), strict=True):
            counted.reasons[int(reason)] += int(seen)
        clear = mine & (matched.reason == OK)
        transfer_ns, longest_ns = matched.transfer_ns[clear], matched.longest_ns[clear]
        counted.add(
            transfer_ms=transfer_ns / NS_PER_MS,
            arrival_skew_ms=(longest_ns - transfer_ns) / NS_PER_MS,
            arrival_skew_bound_ms=longest_ns / NS_PER_MS,
        )
        why = no_bandwidth(key.bytes if key.bytes >= 0 else None, key.size)
        algbw = np.empty(0) if why else algbw_gb_per_s(key.bytes, transfer_ns)
        if len(algbw) < len(transfer_ns):
            counted.no_bandwidth[why or TOO_SHORT] += len(transfer_ns) - len(algbw)
        counted.add(algbw_gb_per_s=algbw)
        factor = busbw_factor(key.kind, key.size)
        if factor is not None:
            counted.add(busbw_gb_per_s=algbw * factor)


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
        entries[index].add(**{name: known})
        if name != "wait_ms":
            entries[index].unseen[name] += len(part) - len(known)


def _by_entry(rank: int, tables: RankTables, names: NumberedNames, used: Bools) -> list[tuple[int, Bools]]:
    """Return each entry that a rank has, with a mask of its rows that count."""
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


LEAST_SHARE: Final = 0.02
"""The shorter of Tc and Tm must be at least this fraction of T; below it the quotient reflects noise rather than
overlap (docs/dev/measuring.md, section 1).
"""

NO_BASELINE: Final = "no isolated baseline in this run"
NO_COMMUNICATION: Final = "no collective in a step: there is no communication to run alone"
ONE_TOO_SHORT: Final = "the shorter of Tc and Tm is below 2 % of T"
NO_COMPUTE: Final = "computation was not seen"
KERNELS_ALONE: Final = "computation is known of the steps measured by the profiler's kernels alone, and of no baseline"


class _NullError(Exception):
    """A metric is null; the message says why."""


def overlap_efficiency(run: Run) -> Described:
    """Return `(Tc + Tm - T) / min(Tc, Tm)`, where T is training, Tc computation alone and Tm communication alone.

    The entry also has the three times, in milliseconds: wall times of whole steps, each the maximum over the ranks of
    the median over a rank's steps.
    """
    try:
        _refuse_incomplete(run)
        if not run.row_count:
            raise _NullError(NO_COMMUNICATION)
        together, compute, comm = (_wall_ms(run, phase) for phase in ("train", "compute_only", "comm_only"))
    except _NullError as why:
        return describe([], None, {str(why): 1})
    shorter = min(compute, comm)
    if shorter < LEAST_SHARE * together or shorter <= 0:
        found = describe([], None, {ONE_TOO_SHORT: 1})
    else:
        found = describe([(compute + comm - together) / shorter])
    found.t_ms, found.tc_ms, found.tm_ms = together, compute, comm
    return found


def compute_slowdown(run: Run) -> Described:
    """Return overlapped compute busy time / isolated compute busy time - 1, one value per rank, from medians over its
    steps.
    """
    try:
        _refuse_incomplete(run)
        basis = Pace(run).basis("compute_ms")
        if basis.source != "marks":
            raise _NullError(basis.reason or KERNELS_ALONE)
        values = {rank: _slowdown(run, rank) for rank in run.ranks}
    except _NullError as why:
        return describe([], None, {str(why): 1})
    return describe(list(values.values()), list(values))


def _refuse_incomplete(run: Run) -> None:
    """Check that the run can be compared with its baselines.

    Raises:
        _NullError: there is no baseline, or ranks are missing, one of which may be the slowest.
    """
    if not any(tables.isolated is not None for tables in run.ranks.values()):
        raise _NullError(NO_BASELINE)
    if run.health.ranks_missing:
        missing = f"{len(run.health.ranks_missing)} of {run.health.world_size} ranks are missing"
        raise _NullError(f"{missing}; the slowest may be among them")


@dataclass(frozen=True)
class _Steps:
    """The steps of one rank in one phase, without warm-up (W21). `compute_ms` is NaN where it is null."""

    wall_ns: Ints
    compute_ms: Floats
    coverage: Ints
    reasons: Ints


def _wall_ms(run: Run, phase: Phase) -> float:
    return max(float(np.median(_steps_of(run, rank, phase).wall_ns)) / NS_PER_MS for rank in run.ranks)


def _slowdown(run: Run, rank: int) -> float:
    overlapped, isolated = (_busy_ms(run, rank, phase) for phase in ("train", "compute_only"))
    if isolated <= 0:
        raise _NullError(f"rank {rank} computed nothing in its compute_only steps")
    return overlapped / isolated - 1


def _busy_ms(run: Run, rank: int, phase: Phase) -> float:
    """Return the median of the known values over one rank's steps of a phase. A step in which not all collectives were
    seen does not count: its computation contains stalls on the unseen ones, so it is an upper bound and no busy time.

    Raises:
        _NullError: no step has a value; the message is the reason of the last step.
    """
    steps, of_rank = _steps_of(run, rank, phase), run.ranks[rank].steps
    complete = np.array([coverage.complete for coverage in of_rank.coverages], bool)[steps.coverage]
    open_reasons = [each.get("compute_ms") == HOST_BOUND for each in of_rank.reasons]
    if np.mean(np.array(open_reasons, bool)[steps.reasons]) > MOST_UNDECIDED:
        raise _NullError(HOST_BOUND)
    known = steps.compute_ms[complete & ~np.isnan(steps.compute_ms)]
    if len(known):
        return float(np.median(known))
    if np.isnan(steps.compute_ms[-1]):
        reasons = of_rank.reasons[steps.reasons[-1]]
        raise _NullError(f"{NO_COMPUTE}: {reasons.get('compute_ms', 'the record gives no reason')}")
    coverage = of_rank.coverages[steps.coverage[-1]]
    raise _NullError(f"{NO_COMPUTE} apart from stalls: {coverage.reason or 'coverage is incomplete'}")


def _steps_of(run: Run, rank: int, phase: Phase) -> _Steps:
    """Return the steps of one rank in one phase.

    Raises:
        _NullError: no step of that phase is left.
    """
    tables = run.ranks[rank]
    if phase == "train":
        steps = tables.steps
        coverage = np.zeros(len(steps), np.int64) if steps.coverage is None else steps.coverage
        found = _Steps(steps.length_ns, steps.column("compute_ms"), coverage, steps.reason)
        used = steps.used
    else:
        isolated = tables.isolated
        if isolated is None:
            raise _NullError(f"rank {rank} has no {phase} step after warm-up")
        found = _Steps(isolated.wall_ns, isolated.compute_ms, isolated.coverage, isolated.reason)
        used = ~isolated.warmup & (isolated.phase == PHASES.index(phase))
    if not used.any():
        raise _NullError(f"rank {rank} has no {phase} step after warm-up")
    return _Steps(found.wall_ns[used], found.compute_ms[used], found.coverage[used], found.reasons[used])
