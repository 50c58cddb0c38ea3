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
from itertools import pairwise
from typing import Final

import msgspec
import numpy as np

from aorta.analysis.cautions import cutoffs_ns
from aorta.analysis.collective_matching import (
    OK,
    PIECE_ROWS,
    REASONS,
    CollectiveKey,
    NumberedNames,
    matched_pieces,
)
from aorta.analysis.documents.dataset import CollectiveEntry, Described, Straggler
from aorta.analysis.frames import NO_TIME, PHASES, Floats, Ints, Steps, difference
from aorta.analysis.host_bound import HOST_BOUND, MOST_UNDECIDED, Pace
from aorta.analysis.metrics import COLLECTIVE_METRIC_NAMES, TOO_SHORT, algbw_gb_per_s, busbw_factor, no_bandwidth
from aorta.analysis.run import Run
from aorta.analysis.stats import describe, entry, median_or_none, numbers_of
from aorta.analysis.straggler import IssueLateness, Stragglers
from aorta.records.schema import STALL_CUTOFF_NS, Phase
from aorta.timeline.overlap import NS_PER_MS

_OF_ROWS: Final = ("duration_ms", "queued_ms", "wait_ms")
_UNSEEN: Final = "its start or its end was not seen"


@dataclass(frozen=True)
class CollectiveMetrics:
    """Entries of `summary.json` without warm-up; and the waits, of every step.

    Attributes:
        wait_ns: of each row of `Run.collectives`; negative where it is unknown.
    """

    collectives: list[CollectiveEntry]
    stragglers: list[Straggler]
    wait_ns: Ints


@dataclass
class _Matched:
    """What exists once per collective of one entry, collected piece by piece."""

    collectives: int = 0
    reasons: Counter[int] = field(default_factory=Counter)
    no_bandwidth: Counter[str] = field(default_factory=Counter)
    values: defaultdict[str, list[Floats]] = field(default_factory=lambda: defaultdict(list))

    def add(self, key: CollectiveKey, reason: Ints, transfer_ns: Ints, longest_ns: Ints) -> None:
        """Add collectives: transfer, arrival skew, bandwidth, and why they are null."""
        self.collectives += len(reason)
        self.reasons.update(reason.tolist())
        clear = reason == OK
        transfer_ns, longest_ns, values = transfer_ns[clear], longest_ns[clear], self.values
        values["transfer_ms"].append(transfer_ns / NS_PER_MS)
        values["arrival_skew_ms"].append((longest_ns - transfer_ns) / NS_PER_MS)
        values["arrival_skew_bound_ms"].append(longest_ns / NS_PER_MS)
        why = no_bandwidth(key.bytes if key.bytes >= 0 else None, key.size)
        algbw = np.empty(0) if why else algbw_gb_per_s(key.bytes, transfer_ns)
        if len(algbw) < len(transfer_ns):
            self.no_bandwidth[why or TOO_SHORT] += len(transfer_ns) - len(algbw)
        values["algbw_gb_per_s"].append(algbw)
        factor = busbw_factor(key.kind, key.size)
        if factor is not None:
            values["busbw_gb_per_s"].append(algbw * factor)


def collective_metrics(run: Run, piece_rows: int = PIECE_ROWS) -> CollectiveMetrics:
    """Match, count and describe the collectives of a run, about `piece_rows` of them at a time."""
    names = NumberedNames(run)
    matched = [_Matched() for _ in names.keys]
    stragglers = Stragglers(names, IssueLateness(run, names), max(cutoffs_ns(run), default=STALL_CUTOFF_NS) / NS_PER_MS)
    wait_ns = np.empty(len(run.collectives), np.int64)
    for rows, found in matched_pieces(run, names, rows=piece_rows):
        for index in np.unique(found.key[found.used]).tolist():
            mine = found.used & (found.key == index)
            matched[index].add(names.keys[index], found.reason[mine], found.transfer_ns[mine], found.longest_ns[mine])
        stragglers.add(rows, found)
        wait_ns[rows.at] = found.wait_or_reason
    stragglers.add_waits(run, wait_ns)
    counts = np.bincount(run.collectives.name[run.steps.used[run.collectives.step]], minlength=len(names.key))
    order = sorted(set(names.key[counts > 0].tolist()), key=lambda index: names.keys[index].order)
    entries = [_entry(run, names, index, counts, matched[index], wait_ns) for index in order]
    return CollectiveMetrics(entries, stragglers.entries(), wait_ns)


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
    return CollectiveMetrics(rows, stragglers, metrics.wait_ns)


def _entry(run: Run, names: NumberedNames, index: int, rows: Ints, matched: _Matched, wait_ns: Ints) -> CollectiveEntry:
    """Describe one entry.

    Args:
        index: of the entry in `names.keys`.
        rows: of each name, how many collectives count.
    """
    key, mine = names.keys[index], names.key == index
    count = int(rows[mine].sum())
    numbers = {name: numbers_of(parts) for name, parts in matched.values.items()}
    matched.values.clear()
    sources = Counter[str]()
    for what, own in zip(run.collectives.names, np.where(mine, rows, 0).tolist(), strict=True):
        sources[what.end_source or "unknown"] += own
    reasons = {REASONS[code]: seen for code, seen in sorted(matched.reasons.items()) if code}
    described: dict[str, Described] = {}
    for name in COLLECTIVE_METRIC_NAMES:
        if name in _OF_ROWS:
            described[name] = _of_rows(run, names, index, name, wait_ns)
        else:
            known, found = numbers.get(name, (0, None))
            why = {**reasons, **(matched.no_bandwidth if name.endswith("_gb_per_s") else {})}
            described[name] = entry(known, matched.collectives - known, found, None, why)
    return CollectiveEntry(
        kind=key.kind,
        group=key.group,
        group_size=key.size,
        bytes=key.bytes if key.bytes >= 0 else None,
        group_ranks=[list(members) for members in sorted(key.members)],
        collectives=matched.collectives,
        rows=count,
        end_sources={source: sources[source] for source in sorted(+sources)},
        transfer_is_upper_bound="wait" in +sources,  # such an end is when the caller checked (R6)
        **described,
    )


def _of_rows(run: Run, names: NumberedNames, index: int, name: str, wait_ns: Ints) -> Described:
    """Describe one metric that each row of an entry has, rank by rank: its values are the largest allocation here."""
    frame, used = run.collectives, run.steps.used
    parts, medians, reasons = [], dict[int, float | None](), Counter[str]()
    for rank, (first, last) in zip(run.ranks, pairwise(run.frames.first_row.tolist()), strict=True):
        rows = first + np.flatnonzero((names.key[frame.name[first:last]] == index) & used[frame.step[first:last]])
        if not len(rows):
            continue
        if name == "wait_ms":
            length_ns = wait_ns[rows]
            null = length_ns < 0
            reasons.update(REASONS[code] for code in (-length_ns[null]).tolist())
        else:
            begun, ended = (frame.start_ns, frame.end_ns) if name == "duration_ms" else (frame.issue_ns, frame.start_ns)
            length_ns = difference(begun[rows], ended[rows])
            null = length_ns == NO_TIME
            reasons[_UNSEEN] += int(null.sum())
        known = length_ns[~null] / NS_PER_MS
        parts.append(known)
        medians[rank] = median_or_none(known)
    in_order = sorted(+reasons, key=[*REASONS, _UNSEEN].index)
    count, described = numbers_of(parts)
    return entry(count, reasons.total(), described, medians, {why: reasons[why] for why in in_order})


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
        if not len(run.collectives):
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
    if not any(len(tables.isolated) for tables in run.ranks.values()):
        raise _NullError(NO_BASELINE)
    if run.health.ranks_missing:
        missing = f"{len(run.health.ranks_missing)} of {run.health.world_size} ranks are missing"
        raise _NullError(f"{missing}; the slowest may be among them")


def _wall_ms(run: Run, phase: Phase) -> float:
    return max(float(np.median(_steps_of(run, rank, phase).length_ns)) / NS_PER_MS for rank in run.ranks)


def _slowdown(run: Run, rank: int) -> float:
    overlapped, isolated = (_busy_ms(_steps_of(run, rank, phase)) for phase in ("train", "compute_only"))
    if isolated <= 0:
        raise _NullError(f"rank {rank} computed nothing in its compute_only steps")
    return overlapped / isolated - 1


def _busy_ms(steps: Steps) -> float:
    """Return the median of the known values over steps of one rank. A step in which not all collectives were
    seen does not count: its computation contains stalls on the unseen ones, so it is an upper bound and no busy time.

    Raises:
        _NullError: no step has a value; the message is the reason of the last step.
    """
    left_open = [each.get("compute_ms") == HOST_BOUND for each in steps.reasons]
    if np.mean(np.array(left_open, bool)[steps.reason]) > MOST_UNDECIDED:
        raise _NullError(HOST_BOUND)
    compute_ms = steps.column("compute_ms")
    complete = np.array([coverage.complete for coverage in steps.coverages] or [False], bool)[steps.coverage]
    known = compute_ms[complete & ~np.isnan(compute_ms)]
    if len(known):
        return float(np.median(known))
    if np.isnan(compute_ms[-1]):
        why = steps.reasons[steps.reason[-1]].get("compute_ms", "the record gives no reason")
        raise _NullError(f"{NO_COMPUTE}: {why}")
    coverage = steps.coverages[steps.coverage[-1]]
    raise _NullError(f"{NO_COMPUTE} apart from stalls: {coverage.reason or 'coverage is incomplete'}")


def _steps_of(run: Run, rank: int, phase: Phase) -> Steps:
    """Return the steps of one rank in one phase, without warm-up (W21).

    Raises:
        _NullError: no step of that phase is left.
    """
    tables = run.ranks[rank]
    steps, used = tables.steps, tables.steps.used
    if phase != "train":
        steps = tables.isolated
        used = ~steps.warmup & (steps.phase == PHASES.index(phase))
    if not used.any():
        raise _NullError(f"rank {rank} has no {phase} step after warm-up")
    return steps.take(used)
