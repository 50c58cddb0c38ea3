"""Matches the collectives of all ranks: one entry per kind, group, group size and bytes, and per group its straggler.

A straggler is named by waits: in at least `LAST_SHARE` of `MIN_COLLECTIVES` collectives or more it arrived last, and
every other rank's median wait exceeds its own by the margin. Where most collectives were queued, waits show nothing,
and the same rule is applied to issue times on aligned clocks (docs/dev/metric-rules.md; K3, R9).

Must not: round a nanosecond before a difference is formed, pool warm-up with steady state (W21), name a rank on a
median alone or by clocks beyond their bounds, compare waiting of different collectives (docs/dev/measuring.md, section
1), or times of clocks that were not measured against each other (W11).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import msgspec
import numpy as np

from aorta.analysis.cautions import cutoffs_ns
from aorta.documents import known
from aorta.documents.dataset import CollectiveEntry, DatasetEntry, Statistics, Straggler
from aorta.documents.formatting import TEXT, group_title, rough_interval, rough_ms
from aorta.documents.metrics import COLLECTIVE_METRIC_NAMES, TOO_SHORT, algbw_gb_per_s, busbw_factor, no_bandwidth
from aorta.documents.statistics import entry, median_or_none, numbers_of
from aorta.read.frames import NO_TIME, UNKNOWN, Floats, Groups, Ints, difference
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
from aorta.read.run import HOST_TIMER, Run
from aorta.records.schema import STALL_CUTOFF_NS
from aorta.timeline.overlap import NS_PER_MS

_OF_ROWS: Final = ("duration_ms", "queued_ms", "wait_ms")
_UNSEEN: Final = "its start or its end was not seen"
MIN_COLLECTIVES: Final = 16
LAST_SHARE: Final = 0.8
"""Of two equally fast ranks a given one is last in 13 or more of 16 with probability 0.011 (binomial, p = 1/2)."""
MARGIN_MS: Final = STALL_CUTOFF_NS / NS_PER_MS
"""What handing a collective over may take, where the record states no stall cut-off."""
MARGIN_SHARE: Final = 0.1
QUEUED_SHARE: Final = 0.5
"""Share of queued collectives from which on the issue times are looked at."""
NO_SLOWER_RANKS: Final = "every rank as fast as the typical one"
"""Name of the bound of a replay in which no rank takes more own time than the typical one."""


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
    matched, stragglers = [_Matched() for _ in names.keys], _Stragglers(run, names)
    wait_ns = np.empty(len(run.collectives), np.int64)
    for rows, found in matched_pieces(run, names, rows=piece_rows):
        for index in np.unique(found.key[found.used]).tolist():
            mine = found.used & (found.key == index)
            matched[index].add(names.keys[index], found.reason[mine], found.transfer_ns[mine], found.longest_ns[mine])
        stragglers.add(rows, found)
        wait_ns[rows.at] = found.wait_or_reason
    counts = np.bincount(run.collectives.name[run.steps.used[run.collectives.step]], minlength=len(names.key))
    order = sorted(set(names.key[counts > 0].tolist()), key=lambda index: names.keys[index].order)
    entries = [_entry(run, names, index, counts, matched[index], wait_ns) for index in order]
    return CollectiveMetrics(entries, stragglers.entries(wait_ns), wait_ns)


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
    """Describe the entry with this `index` in `names.keys`; `rows`: of each name, how many collectives count."""
    key, mine = names.keys[index], names.key == index
    numbers = {name: numbers_of(parts) for name, parts in matched.values.items()}
    matched.values.clear()
    sources = Counter[str]()
    for what, own in zip(run.collectives.names, np.where(mine, rows, 0).tolist(), strict=True):
        sources[what.end_source or "unknown"] += own
    reasons = {REASONS[code]: seen for code, seen in sorted(matched.reasons.items()) if code}
    described: dict[str, Statistics] = {}
    for name in COLLECTIVE_METRIC_NAMES:
        if name in _OF_ROWS:
            described[name] = _of_rows(run, names, index, name, wait_ns)
        else:
            known_of, found = numbers.get(name, (0, None))
            why = {**reasons, **(matched.no_bandwidth if name.endswith("_gb_per_s") else {})}
            described[name] = entry(known_of, matched.collectives - known_of, found, None, why)
    return CollectiveEntry(
        kind=key.kind,
        group=key.group,
        group_size=key.size,
        bytes=key.bytes if key.bytes >= 0 else None,
        group_ranks=[list(members) for members in sorted(key.members)],
        collectives=matched.collectives,
        rows=int(rows[mine].sum()),
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


@dataclass
class IssueTimes:
    """What the issue times of one group show.

    Attributes:
        queued: number of collectives that were queued on every rank; None where collectives run on a device, whose
            starts come after the host's issues whether queued or not.
        steps: in how many steps the last collective that counts on every rank was compared. One of each: behind a queue
            a rank that has fallen behind stays so for the rest of the step, and that must not count many times.
        late_ms: rank -> its issues after the first of its group, in parts; empty where clocks are not aligned.
        last: rank -> how often it alone was the last to issue.
    """

    queued: int | None = 0
    steps: int = 0
    late_ms: defaultdict[int, list[Floats]] = field(default_factory=lambda: defaultdict(list))
    last: Counter[int] = field(default_factory=Counter)


class _Stragglers:
    """Collects counts per group and rank, piece by piece; of the waits only medians are kept. Groups are identified by
    their number in `names`.
    """

    def __init__(self, run: Run, names: NumberedNames) -> None:
        self._run, self._names = run, names
        self._margin_ms = max(cutoffs_ns(run), default=STALL_CUTOFF_NS) / NS_PER_MS
        self._transfers_ms: defaultdict[int, list[Floats]] = defaultdict(list)
        self._seen = np.zeros(len(names.groups), bool)
        self._collectives = np.zeros(len(names.groups), np.int64)
        self._last: defaultdict[int, Counter[int]] = defaultdict(Counter)
        self._on_host = all(tables.source.timer == HOST_TIMER for tables in run.ranks.values())
        self._issues = [IssueTimes(0 if self._on_host else None) for _ in names.groups]
        self._clocks_missing, self._bound_ms = run.clocks_missing, dict[int, float]()
        for rank, tables in run.ranks.items() if run.clocks_missing is None else ():
            clock, steps = run.clocks.get(rank), tables.steps
            bounds = [clock.bound_ns(int(at)) for at in steps.t_start_ns[[0, -1]]] if clock and len(steps) else [None]
            self._bound_ms[rank] = max(-1 if bound is None else bound for bound in bounds) / NS_PER_MS
            if None in bounds:
                self._clocks_missing = f"the clock of rank {rank} was not measured twice"
                break

    def add(self, rows: CollectiveRows, match: MatchedCollectives) -> None:
        """Add matched rows: which rank was the last, the transfers, and when each was issued."""
        group = self._names.group[rows.frame.name[match.last]]
        self._seen[group[match.used & (match.size > 1)]] = True
        np.add.at(self._collectives, group[match.whole], 1)
        last = match.whole & match.alone  # in a tie nobody counts as the last
        pairs, counts = np.unique(np.stack([group[last], rows.rank[match.last[last]]]), axis=1, return_counts=True)
        for number, rank, count in zip(*pairs.tolist(), counts.tolist(), strict=True):
            self._last[number][rank] += count
        for number in np.unique(group[match.whole]).tolist():
            transfers = match.transfer_ns[match.whole & (group == number)]
            self._transfers_ms[number].append(transfers / NS_PER_MS)
        if self._on_host:
            self._add_issues(rows, match)

    def _add_issues(self, rows: CollectiveRows, match: MatchedCollectives) -> None:
        """Add when rows were issued, of the collectives that count on every rank of their group."""
        by, frame = match.by, rows.frame
        group = self._names.group[frame.name[by.first]]
        waited = by.reduce(np.minimum, (frame.start_ns > frame.issue_ns).astype(np.int64)) > 0
        for number, count in zip(*np.unique(group[match.whole & waited], return_counts=True), strict=True):
            issues = self._issues[number]
            issues.queued = (issues.queued or 0) + int(count)
        if self._clocks_missing is not None:
            return
        issue_ns = self._run.shared_start_ns[frame.step] + frame.issue_ns
        late_ns = issue_ns - by.reduce(np.minimum, issue_ns)[by.of_row]
        latest = late_ns == by.reduce(np.maximum, late_ns)[by.of_row]
        alone = by.reduce(np.add, latest.astype(np.int64)) == 1
        # Of each group and step, the whole collective that was issued last.
        step, whole = rows.global_step[by.first], np.flatnonzero(match.whole)
        whole = whole[np.lexsort((issue_ns[by.first][whole], step[whole], group[whole]))]
        chosen = np.zeros(len(by), bool)
        chosen[whole[np.append((np.diff(step[whole]) != 0) | (np.diff(group[whole]) != 0), True)[: len(whole)]]] = True
        for number, count in zip(*np.unique(group[chosen], return_counts=True), strict=True):
            self._issues[number].steps += int(count)
        mine = np.flatnonzero(chosen[by.of_row])
        number, counted = group[by.of_row[mine]], latest[mine] & alone[by.of_row[mine]]
        of_rank = Groups(number, rows.rank[mine])
        sums = of_rank.reduce(np.add, counted.astype(np.int64)).tolist()
        for at, parts, last in zip(of_rank.first.tolist(), of_rank.parts(late_ns[mine]), sums, strict=True):
            issues, rank = self._issues[number[at]], int(rows.rank[mine[at]])
            issues.late_ms[rank].append(parts / NS_PER_MS)
            issues.last[rank] += last

    def entries(self, wait_ns: Ints) -> list[Straggler]:
        """Return one entry per process group of two ranks or more, by name: who is late, by how many milliseconds, or
        why nobody is named. Warm-up is left out (W21).

        `late_ms` is the median over the peers' median waits, less the rank's own: how much longer they wait for it in
        each collective.

        Args:
            wait_ns: the waits of all collectives of the run, negative where they are unknown.
        """
        run, names, rows = self._run, self._names, self._run.collectives
        medians: defaultdict[int, dict[int, float | None]] = defaultdict(dict)
        for rank, (first, last) in zip(run.ranks, pairwise(run.frames.first_row.tolist()), strict=True):
            name, waits = rows.name[first:last], wait_ns[first:last]
            group = np.where(run.steps.used[rows.step[first:last]] & (names.size[name] > 1), names.group[name], UNKNOWN)
            for number in np.unique(group[group != UNKNOWN]).tolist():
                medians[number][rank] = median_or_none(waits[(group == number) & (waits >= 0)] / NS_PER_MS)
        found = []
        for number in sorted(np.flatnonzero(self._seen).tolist(), key=lambda number: names.groups[number]):
            parts, count = self._transfers_ms[number], int(self._collectives[number])
            transfer_ms = float(np.median(np.concatenate(parts))) if parts else 0.0
            last_in = self._last[number]
            straggler = judge(names.groups[number], count, medians[number], last_in, transfer_ms, self._margin_ms)
            needed_ms = max(self._margin_ms, MARGIN_SHARE * transfer_ms)
            judge_queued(straggler, self._issues[number], needed_ms, self._bound_ms, self._clocks_missing)
            found.append(straggler)
        return found


def judge(
    group: tuple[str, tuple[int, ...]],
    collectives: int,
    wait_ms: Mapping[int, float | None],
    last: Mapping[int, int],
    transfer_ms: float,
    margin_ms: float = MARGIN_MS,
) -> Straggler:
    """Apply the rule to the waits of one group.

    Args:
        group: its name and its ranks.
        collectives: number of collectives known on every rank.
        wait_ms: rank -> median wait.
        last: rank -> how often it alone was the last.
        transfer_ms: the median transfer.
        margin_ms: by how much longer the others have to wait for it at least.
    """
    found = Straggler(
        group=group[0],
        group_ranks=list(group[1]),
        collectives=collectives,
        wait_ms_median_per_rank={str(rank): median for rank, median in wait_ms.items()},
    )
    if collectives < MIN_COLLECTIVES:
        found.reason = f"{collectives} collectives are known on every rank, {MIN_COLLECTIVES} needed"
        return found
    (own, rank), *others = sorted((median, rank) for rank, median in wait_ms.items() if median is not None)
    share = last.get(rank, 0) / collectives
    margin, needed = others[0][0] - own, max(margin_ms, MARGIN_SHARE * transfer_ms)
    found.last_share = share
    if share < LAST_SHARE:
        found.reason = _too_rarely(rank, share, "collectives")
    elif margin <= needed:
        found.reason = f"rank {rank} is late by {margin:.3g} ms, more than {needed:.3g} ms needed"
    else:
        found.rank, found.late_ms = rank, float(np.median([median for median, _ in others])) - own
    return found


def _too_rarely(rank: int, share: float, of: str) -> str:
    needed = TEXT.percent(LAST_SHARE, 0)
    return f"no rank is late often enough: rank {rank} in {TEXT.percent(share, 0)} of the {of}, {needed} needed"


def judge_queued(
    straggler: Straggler, times: IssueTimes, needed_ms: float, bound_ms: Mapping[int, float], why_not: str | None
) -> None:
    """Apply the rule to the issue times of a group in which nobody is named by the waits because most of its
    collectives were queued.

    Args:
        straggler: what `judge` found; gets what issue times say.
        needed_ms: how much later than the others a rank has to issue, beyond the clocks' bound.
        bound_ms: largest error of each rank's clock.
        why_not: why issue times cannot be compared; None where they can.
    """
    collectives, named = straggler.collectives, straggler.rank is not None
    queued = times.queued / collectives if collectives and times.queued is not None else None
    late_ms = {rank: float(np.median(np.concatenate(times.late_ms[rank]))) for rank in sorted(times.late_ms)}
    straggler.basis = "waits" if named else None
    straggler.queued_share = queued
    straggler.issue_late_ms_median_per_rank = {str(rank): late for rank, late in late_ms.items()} or None
    if named or collectives < MIN_COLLECTIVES or queued is None or queued < QUEUED_SHARE:
        return
    hidden = f"{TEXT.percent(queued, 0)} of the collectives were queued, which hides waits"
    if why_not is not None:
        straggler.reason = f"{hidden}, and issue times cannot be compared: {why_not}"
        return
    if not times.steps:
        straggler.reason = f"{hidden}, and issue times are known in no step"
        return
    (own, rank), *others = sorted(((late, rank) for rank, late in late_ms.items()), reverse=True)
    bound = bound_ms[rank] + max(bound_ms[peer] for _, peer in others)
    share, margin = times.last.get(rank, 0) / times.steps, own - others[0][0]
    if times.steps < MIN_COLLECTIVES:
        straggler.reason = f"{hidden}; issue times are known in {times.steps} steps, {MIN_COLLECTIVES} needed"
        if margin - bound > needed_ms:
            straggler.reason += f". In these rank {rank} issues {rough_ms(margin)} later than any other (median)"
        return
    straggler.clock_bound_ms, straggler.last_share = bound, share
    if share < LAST_SHARE:
        straggler.reason = _too_rarely(rank, share, "steps")
    elif margin <= needed_ms:
        straggler.reason = (
            f"rank {rank} issues {margin:.3g} ms later than the others, more than {needed_ms:.3g} ms needed"
        )
    elif margin - bound <= needed_ms:
        straggler.reason = (
            f"rank {rank} issues {margin:.3g} ms later than the others, but clocks are known to {bound:.3g} ms only"
        )
    else:
        straggler.rank, straggler.late_ms = rank, own - float(np.median([median for median, _ in others]))
        straggler.basis, straggler.reason = "issue times", None


def lateness(late_ms: float | None, basis: str | None) -> str:
    """Return by how much a straggler is late, and at what: the words of every statement about it."""
    where = {"waits": " in each collective", "issue times": " at the last collective of a step"}.get(basis or "", "")
    return TEXT.unknown if late_ms is None else f"{rough_ms(late_ms)} late{where} (median)"


def straggler_sentences(dataset: DatasetEntry) -> list[str]:
    """Return one sentence per straggler, with why it is late and what a replay gains without; none where nobody is
    named.
    """
    what_if = known(dataset.what_if)
    bounds = [] if what_if is None else known(what_if.bounds) or []
    gains = [rough_interval(b.gain_ms, b.low_ms, b.high_ms) for b in bounds if b.name == NO_SLOWER_RANKS]
    more = f"; with {NO_SLOWER_RANKS} a step would gain {gains[0]}" if gains else ""
    found = []
    for each in known(dataset.stragglers) or ():
        if each.rank is None:
            continue
        share, why = TEXT.percent(each.last_share, 0), (each.because or "").removeprefix(f"rank {each.rank} ")
        said = f"rank {each.rank} is a straggler of {group_title(each.group)}: {lateness(each.late_ms, each.basis)}"
        said += f", because it {why}" if why else ""
        if each.basis == "issue times":
            clocks = f"clocks known to {rough_ms(each.clock_bound_ms or 0.0)}"
            said += f"; queueing masks it in wait_ms; last in {share} of the steps, {clocks}"
        else:
            said += f"; last in {share} of {each.collectives} collectives"
        found.append(said + more)
    return found
