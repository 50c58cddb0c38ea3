"""Compares when the ranks of a group issued the same collective, on the reference rank's clock: what is left to tell a
late rank where collectives are queued.

Behind another collective on its link all ranks begin at the same time, however late one of them issued it, so that no
wait shows a straggler. Issue times do, as far as the ranks' clocks are aligned (R9): each comparison is good to the sum
of both clocks' bounds. Must not: compare times of clocks that were not measured against each other (W11).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from aorta.analysis.collective_matching import CollectiveRows, MatchedCollectives, NumberedNames
from aorta.analysis.tables import HOST_TIMER, Floats, Run
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
        self._names = names
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

    def add(self, rows: CollectiveRows, found: MatchedCollectives) -> None:
        """Add matched rows; of those that count on every rank of their group."""
        if not self._on_host:
            return
        order, starts = found.matches.order, found.matches.starts
        group = self._names.group[rows.name[order[starts]]]
        waited = np.minimum.reduceat((rows.start_ns > rows.issue_ns)[order].astype(np.int64), starts) > 0
        np.add.at(self._queued, group[found.whole & waited], 1)
        if self.why_not is not None:
            return
        issue_ns, of_row, rank = (rows.origin_ns + rows.issue_ns)[order], found.matches.of_row[order], rows.rank[order]
        step = rows.step[order[starts]]
        late_ns = issue_ns - np.minimum.reduceat(issue_ns, starts)[of_row]
        latest = late_ns == np.maximum.reduceat(late_ns, starts)[of_row]
        alone = np.add.reduceat(latest.astype(np.int64), starts) == 1
        for number in np.unique(group[found.whole]).tolist():
            chosen = np.zeros(len(starts), bool)
            whole = np.flatnonzero(found.whole & (group == number))
            whole = whole[np.lexsort((issue_ns[starts[whole]], step[whole]))]
            chosen[whole[np.append(np.diff(step[whole]) > 0, True)]] = True
            self._steps[number] += chosen.sum()
            mine = chosen[of_row]
            for each in np.unique(rank[mine]).tolist():
                at = mine & (rank == each)
                self._late_ms[number][each].append(late_ns[at] / NS_PER_MS)
                self._last[number][each] += int((at & latest & alone[of_row]).sum())

    def of(self, number: int) -> IssueTimes:
        """What was found of the group with this number."""
        late_ms = {rank: float(np.median(np.concatenate(parts))) for rank, parts in self._late_ms[number].items()}
        queued = int(self._queued[number]) if self._on_host else None
        return IssueTimes(queued, int(self._steps[number]), late_ms, self._last[number], self._bound_ms)
