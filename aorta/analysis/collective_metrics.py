"""Computes what a report says of collectives across all ranks: one entry per kind, group, group size and bytes.

`collective_metrics(run)` matches the collectives of all ranks (`read.matching`) and gives `collectives` of
`summary.json`, the waits of every row, and how late every rank is in every step (`stragglers`).

Must not: round a nanosecond before a difference is formed, pool warm-up with steady state (W21), or compare waiting of
different collectives (docs/dev/measuring.md, section 1).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Final

import msgspec
import numpy as np

from aorta.analysis.pace import cutoffs_ns
from aorta.analysis.stragglers import FirstWaits
from aorta.documents.dataset import CollectiveEntry, Statistics
from aorta.documents.metrics import COLLECTIVE_METRIC_NAMES, TOO_SHORT, algbw_gb_per_s, busbw_factor, no_bandwidth
from aorta.documents.statistics import entry, median_or_none, numbers_of
from aorta.read.frames import NO_TIME, Floats, Ints, difference
from aorta.read.matching import (
    OK,
    PIECE_ROWS,
    REASONS,
    CollectiveKey,
    NumberedNames,
    matched_pieces,
)
from aorta.read.run import Run
from aorta.timeline.overlap import NS_PER_MS

_OF_ROWS: Final = ("duration_ms", "queued_ms", "wait_ms")
_UNSEEN: Final = "its start or its end was not seen"
NO_SLOWER_RANKS: Final = "every rank as fast as the typical one"
"""Name of the bound of a replay in which no rank takes more own time than the typical one."""


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


@dataclass
class _Matched:
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
    matched, first_waits = [_Matched() for _ in names.keys], FirstWaits(run, cutoffs_ns(run))
    wait_ns, last = (np.empty(len(run.collectives), np.int64) for _ in range(2))
    for rows, pieces in matched_pieces(run, names, rows=piece_rows):
        for index in np.unique(pieces.key[pieces.used]).tolist():
            chosen = pieces.used & (pieces.key == index)
            matched[index].add(
                names.keys[index], pieces.reason[chosen], pieces.transfer_ns[chosen], pieces.longest_ns[chosen]
            )
        first_waits.add(rows, pieces)
        wait_ns[rows.at] = pieces.wait_or_reason
        last[rows.at] = np.where((pieces.reason == OK) & pieces.alone, rows.rank[pieces.last], -1)[pieces.by.of_row]
    counts = np.bincount(run.collectives.name[run.steps.used[run.collectives.step]], minlength=len(names.key))
    order = sorted(set(names.key[counts > 0].tolist()), key=lambda index: names.keys[index].order)
    entries = [_entry(run, names, index, counts, matched[index], wait_ns) for index in order]
    return CollectiveMetrics(entries, wait_ns, last, first_waits)


def with_open_starts(metrics: CollectiveMetrics) -> CollectiveMetrics:
    """Return the same where marks leave open when kernels of collectives began: a duration may hold the time to the
    launch. A transfer is then an upper bound, and nobody is known to have waited.
    """
    rows = [msgspec.structs.replace(row, transfer_is_upper_bound=True) for row in metrics.collectives]
    metrics.first_waits.late_ms[:] = np.nan
    return replace(metrics, collectives=rows, wait_ns=np.full_like(metrics.wait_ns, -1))


def _entry(run: Run, names: NumberedNames, index: int, rows: Ints, matched: _Matched, wait_ns: Ints) -> CollectiveEntry:
    """Describe the entry with this `index` in `names.keys`; `rows`: of each name, how many collectives count."""
    key, chosen = names.keys[index], names.key == index
    numbers = {name: numbers_of(parts) for name, parts in matched.values.items()}
    matched.values.clear()
    sources = Counter[str]()
    for what, own in zip(run.collectives.names, np.where(chosen, rows, 0).tolist(), strict=True):
        sources[what.end_source or "unknown"] += own
    reasons = {REASONS[code]: seen for code, seen in sorted(matched.reasons.items()) if code}
    described: dict[str, Statistics] = {}
    for name in COLLECTIVE_METRIC_NAMES:
        if name in _OF_ROWS:
            described[name] = _of_rows(run, names, index, name, wait_ns)
        else:
            known_of, numbers_of_name = numbers.get(name, (0, None))
            why = {**reasons, **(matched.no_bandwidth if name.endswith("_gb_per_s") else {})}
            described[name] = entry(known_of, matched.collectives - known_of, numbers_of_name, None, why)
    return CollectiveEntry(
        kind=key.kind,
        group=key.group,
        group_title=run.group_titles[key.group],
        group_size=key.size,
        bytes=key.bytes if key.bytes >= 0 else None,
        group_ranks=[list(members) for members in sorted(key.members)],
        collectives=matched.collectives,
        rows=int(rows[chosen].sum()),
        end_sources={source: sources[source] for source in sorted(+sources)},
        transfer_is_upper_bound="wait" in +sources,  # such an end is when the caller checked (R6)
        **described,
    )


def _of_rows(run: Run, names: NumberedNames, index: int, name: str, wait_ns: Ints) -> Statistics:
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
        parts.append(length_ns[~null] / NS_PER_MS)
        medians[rank] = median_or_none(parts[-1])
    in_order = sorted(+reasons, key=[*REASONS, _UNSEEN].index)
    count, described = numbers_of(parts)
    return entry(count, reasons.total(), described, medians, {why: reasons[why] for why in in_order})
