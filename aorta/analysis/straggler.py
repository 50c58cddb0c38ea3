"""Names the rank that the others of its group wait for, where the collectives are sufficient evidence (K3).

Two parts. *Waits*: in a collective that no rank may leave early, the last rank to arrive waits for nobody and its peers
wait for it. So a straggler is the rank that waits least. By chance every rank is the last one now and then; the rule
(docs/dev/metric-rules.md) therefore requires all of these:

- at least `MIN_COLLECTIVES` collectives known on every rank of the group;
- one rank was the last in at least `LAST_SHARE` of them. Equally fast ranks take turns: with two, 13 or more of 16 fall
  to a given one with probability 0.011 (binomial, p = 1/2), and less with more ranks;
- the median wait of every other rank exceeds its own by `margin_ms` and by `MARGIN_SHARE` of the median transfer, so
  that it matters. `margin_ms` is what handing a collective over may take: the stall cut-off of the run's hosts.

Two ranks that are late together hide each other from this rule: none is named then.

*Issue times*: where most collectives were queued behind another on their link, all ranks begin at the same time,
however late one of them issued it, and waits show nothing. The same rule is then applied to issue times on the
reference rank's clock, as far as the ranks' clocks are aligned (R9): each comparison is good to the sum of both clocks'
bounds, and the straggler issues last by more than the margin beyond them. Where clocks are not aligned the reason says
that a late rank cannot be identified.

`Stragglers` takes matched collectives (`add`), then the waits rank by rank (`add_waits`), and gives one entry per
process group (`entries`).

Must not: name a rank on a median alone, or by clocks beyond their bounds, compare waiting of different collectives
(docs/dev/measuring.md, section 1), or times of clocks that were not measured against each other (W11).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from aorta.analysis.collective_matching import CollectiveRows, MatchedCollectives, NumberedNames
from aorta.analysis.documents import known
from aorta.analysis.documents.dataset import DatasetEntry, Straggler
from aorta.analysis.formatting import TEXT, group_title, rough_interval, rough_ms, whole_percent
from aorta.analysis.frames import UNKNOWN, Floats, Ints
from aorta.analysis.groups import Groups
from aorta.analysis.run import HOST_TIMER, Run
from aorta.records.schema import STALL_CUTOFF_NS
from aorta.timeline.overlap import NS_PER_MS


@dataclass(frozen=True)
class IssueTimes:
    """What the issue times of one group show.

    Attributes:
        queued: number of collectives that were queued on every rank; None where collectives run on a device, whose
            starts come after the host's issues whether queued or not.
        steps: in how many steps the last collective that counts on every rank was compared. One of each: behind a queue
            a rank that has fallen behind stays so for the rest of the step, and that must not count many times.
        late_ms: rank -> median of its issue after the first of its group; empty where clocks are not aligned.
        last: rank -> how often it alone was the last to issue.
        bound_ms: largest error of each rank's clock; empty where clocks are not aligned.
    """

    queued: int | None
    steps: int
    late_ms: Mapping[int, float]
    last: Mapping[int, int]
    bound_ms: Mapping[int, float]


class IssueLateness:
    """Collects issue times of matched collectives, piece by piece.

    Attributes:
        why_not: why the ranks' clocks cannot be compared; None where they can.
    """

    def __init__(self, run: Run, names: NumberedNames) -> None:
        self._run, self._names = run, names
        self._queued = np.zeros(len(names.groups), np.int64)
        self._steps = np.zeros(len(names.groups), np.int64)
        self._late_ms: defaultdict[int, defaultdict[int, list[Floats]]] = defaultdict(lambda: defaultdict(list))
        self._last: defaultdict[int, Counter[int]] = defaultdict(Counter)
        self._bound_ms: dict[int, float] = {}
        self._on_host = all(tables.source.timer == HOST_TIMER for tables in run.ranks.values())
        self.why_not = run.clocks_missing
        for rank, tables in run.ranks.items() if self.why_not is None else ():
            clock, steps = run.clocks.get(rank), tables.steps
            bounds = [clock.bound_ns(int(at)) for at in steps.t_start_ns[[0, -1]]] if clock and len(steps) else [None]
            if None in bounds:
                self.why_not = f"the clock of rank {rank} was not measured twice"
                self._bound_ms = {}
                break
            self._bound_ms[rank] = max(bound for bound in bounds if bound is not None) / NS_PER_MS

    def add(self, rows: CollectiveRows, match: MatchedCollectives) -> None:
        """Add matched rows; of those that count on every rank of their group."""
        if not self._on_host:
            return
        by, names, frame = match.by, self._names, rows.frame
        group = names.group[frame.name[by.first]]
        waited = by.reduce(np.minimum, (frame.start_ns > frame.issue_ns).astype(np.int64)) > 0
        np.add.at(self._queued, group[match.whole & waited], 1)
        if self.why_not is not None:
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
        np.add.at(self._steps, group[chosen], 1)
        mine = np.flatnonzero(chosen[by.of_row])
        number, counted = group[by.of_row[mine]], latest[mine] & alone[by.of_row[mine]]
        of_rank = Groups(number, rows.rank[mine])
        sums = of_rank.reduce(np.add, counted.astype(np.int64)).tolist()
        for at, parts, last in zip(of_rank.first.tolist(), of_rank.parts(late_ns[mine]), sums, strict=True):
            self._late_ms[int(number[at])][int(rows.rank[mine[at]])].append(parts / NS_PER_MS)
            self._last[int(number[at])][int(rows.rank[mine[at]])] += last

    def of(self, number: int) -> IssueTimes:
        """Return what was found of the group with this number."""
        late_ms = {rank: float(np.median(np.concatenate(parts))) for rank, parts in self._late_ms[number].items()}
        queued = int(self._queued[number]) if self._on_host else None
        return IssueTimes(queued, int(self._steps[number]), late_ms, self._last[number], self._bound_ms)


MIN_COLLECTIVES: Final = 16
LAST_SHARE: Final = 0.8
MARGIN_MS: Final = STALL_CUTOFF_NS / NS_PER_MS
"""Where the record states no cut-off."""
MARGIN_SHARE: Final = 0.1
QUEUED_SHARE: Final = 0.5
"""Share of queued collectives from which on the issue times are looked at."""


class Stragglers:
    """Collects counts per group and rank; of the waits only medians are kept. Groups are identified by their number in
    `names`.
    """

    def __init__(self, names: NumberedNames, issues: IssueLateness, margin_ms: float = MARGIN_MS) -> None:
        self._names, self._issues, self._margin_ms = names, issues, margin_ms
        self._transfers_ms: defaultdict[int, list[Floats]] = defaultdict(list)
        self._seen = np.zeros(len(names.groups), bool)
        self._collectives = np.zeros(len(names.groups), np.int64)
        self._last: defaultdict[int, Counter[int]] = defaultdict(Counter)
        self._medians: defaultdict[int, dict[int, float | None]] = defaultdict(dict)

    def add(self, rows: CollectiveRows, match: MatchedCollectives) -> None:
        """Add matched rows: which rank was the last, the transfers, and when each was issued."""
        self._issues.add(rows, match)
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

    def add_waits(self, run: Run, wait_ns: Ints) -> None:
        """Add the waits of all collectives of the run, negative where they are unknown."""
        rows, names = run.collectives, self._names
        for rank, (first, last) in zip(run.ranks, pairwise(run.frames.first_row.tolist()), strict=True):
            name, waits = rows.name[first:last], wait_ns[first:last]
            group = np.where(run.steps.used[rows.step[first:last]] & (names.size[name] > 1), names.group[name], UNKNOWN)
            for number in np.unique(group[group != UNKNOWN]).tolist():
                known = waits[(group == number) & (waits >= 0)]
                self._medians[number][rank] = float(np.median(known)) / NS_PER_MS if len(known) else None

    def entries(self) -> list[Straggler]:
        """Return one entry per process group of two ranks or more, by name: who is late, by how many milliseconds, or
        why nobody is named. Warm-up is left out (W21).

        `late_ms` is the median over the peers' median waits, less the rank's own: how much longer they wait for it in
        each collective.
        """
        groups = self._names.groups
        order = sorted(np.flatnonzero(self._seen).tolist(), key=lambda number: groups[number])
        return [self._judge(number) for number in order]

    def _judge(self, number: int) -> Straggler:
        parts = self._transfers_ms[number]
        transfer_ms = float(np.median(np.concatenate(parts))) if parts else 0.0
        count, last = int(self._collectives[number]), self._last[number]
        found = judge(self._names.groups[number], count, self._medians[number], last, transfer_ms, self._margin_ms)
        needed_ms = max(self._margin_ms, MARGIN_SHARE * transfer_ms)
        judge_queued(found, self._issues.of(number), needed_ms, self._issues.why_not)
        return found


def judge(
    group: tuple[str, tuple[int, ...]],
    collectives: int,
    wait_ms: Mapping[int, float | None],
    last: Mapping[int, int],
    transfer_ms: float,
    margin_ms: float = MARGIN_MS,
) -> Straggler:
    """Apply the rule to one group.

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
        found.reason = f"{collectives} collectives known on every rank, {MIN_COLLECTIVES} are needed"
        return found
    (own, rank), *others = sorted((median, rank) for rank, median in wait_ms.items() if median is not None)
    share = last.get(rank, 0) / collectives
    margin, needed = others[0][0] - own, max(margin_ms, MARGIN_SHARE * transfer_ms)
    found.last_share = share
    if share < LAST_SHARE:
        found.reason = f"rank {rank} waits least, but was the last in {whole_percent(share)} of the collectives only"
    elif margin <= needed:
        found.reason = f"rank {rank} is late by {margin:.3g} ms, not by more than {needed:.3g} ms"
    else:
        found.rank, found.late_ms = rank, float(np.median([median for median, _ in others])) - own
    return found


def judge_queued(straggler: Straggler, times: IssueTimes, needed_ms: float, why_not: str | None) -> None:
    """Apply the rule to the issue times of a group in which nobody is named by the waits because most of its
    collectives were queued.

    Args:
        straggler: what `judge` found; gets what issue times say.
        needed_ms: how much later than the others a rank has to issue, beyond the clocks' bound.
        why_not: why issue times cannot be compared; None where they can.
    """
    collectives, named = straggler.collectives, straggler.rank is not None
    queued = times.queued / collectives if collectives and times.queued is not None else None
    late_ms = {str(rank): times.late_ms[rank] for rank in sorted(times.late_ms)}
    straggler.basis = "waits" if named else None
    straggler.queued_share = queued
    straggler.issue_late_ms_median_per_rank = late_ms or None
    if named or collectives < MIN_COLLECTIVES or queued is None or queued < QUEUED_SHARE:
        return
    hidden = f"{whole_percent(queued)} of the collectives were queued behind another, where waits show no late rank"
    if why_not is not None:
        straggler.reason = f"{hidden}, and their issue times cannot be compared: {why_not}"
        return
    if times.steps < MIN_COLLECTIVES:
        straggler.reason = f"{hidden}; issue times are known in {times.steps} steps, {MIN_COLLECTIVES} are needed"
        return
    (own, rank), *others = sorted(((late, rank) for rank, late in times.late_ms.items()), reverse=True)
    bound = times.bound_ms[rank] + max(times.bound_ms[peer] for _, peer in others)
    share, margin = times.last.get(rank, 0) / times.steps, own - others[0][0]
    straggler.clock_bound_ms, straggler.last_share = bound, share
    if share < LAST_SHARE:
        straggler.reason = f"{hidden}; rank {rank} issues last, but in {whole_percent(share)} of the steps only"
    elif margin <= needed_ms:
        straggler.reason = (
            f"{hidden}; rank {rank} issues {margin:.3g} ms later than any other, not more than {needed_ms:.3g} ms"
        )
    elif margin - bound <= needed_ms:
        straggler.reason = (
            f"{hidden}; whether rank {rank} issues {margin:.3g} ms later than any other is not known: the clocks are "
            f"known to {bound:.3g} ms only"
        )
    else:
        straggler.rank, straggler.late_ms = rank, own - float(np.median([median for median, _ in others]))
        straggler.basis, straggler.reason = "issue times", None


NO_SLOWER_RANKS: Final = "without slower ranks"
"""Name of the bound of a replay in which no rank takes more own time than the typical one."""


def lateness(late_ms: float | None, basis: str | None) -> str:
    """Return by how much a straggler is late, and at what: the words of every statement about it."""
    where = {"waits": " in each collective", "issue times": " at the last collective of a step"}.get(basis or "", "")
    return TEXT.unknown if late_ms is None else f"{rough_ms(late_ms)} late{where} (median)"


def sentences(entry: DatasetEntry) -> list[str]:
    """Return one sentence per straggler, with why it is late and what a replay gains without; none where nobody is
    named.
    """
    what_if = known(entry.what_if)
    bounds = [] if what_if is None else known(what_if.bounds) or []
    gains = [rough_interval(b.gain_ms, b.low_ms, b.high_ms) for b in bounds if b.name == NO_SLOWER_RANKS]
    more = f"; {NO_SLOWER_RANKS} a step would gain {gains[0]}" if gains else ""
    return [f"{_sentence(each)}{more}" for each in known(entry.stragglers) or () if each.rank is not None]


def _sentence(entry: Straggler) -> str:
    late, share = lateness(entry.late_ms, entry.basis), whole_percent(entry.last_share)
    why = f", because it {entry.because.removeprefix(f'rank {entry.rank} ')}" if entry.because else ""
    said = f"rank {entry.rank} is a straggler of {group_title(entry.group)}: {late}{why}"
    if entry.basis == "issue times":
        clocks = f"clocks known to {rough_ms(entry.clock_bound_ms or 0.0)}"
        return f"{said}; queueing masks it in wait_ms; last in {share} of the steps, {clocks}"
    return f"{said}; last in {share} of {entry.collectives} collectives"
