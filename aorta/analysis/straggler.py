"""Names the rank that the others of its group wait for, where the collectives are sufficient evidence (K3).

In a collective that no rank may leave early, the last rank to arrive waits for nobody and its peers wait for it. So a
straggler is the rank that waits least. By chance every rank is the last one now and then; the rule (docs/metrics.md)
therefore requires all of these:

- at least `MIN_COLLECTIVES` collectives known on every rank of the group;
- one rank was the last in at least `LAST_SHARE` of them. Equally fast ranks take turns: with two, 13 or more of 16 fall
  to a given one with probability 0.011 (binomial, p = 1/2), and less with more ranks;
- the median wait of every other rank exceeds its own by `margin_ms` and by `MARGIN_SHARE` of the median transfer, so
  that it matters. `margin_ms` is what handing a collective over may take: the stall cut-off of the run's hosts.

Two ranks that are late together hide each other from this rule: none is named then. `Stragglers` takes matched
collectives (`add`), then the waits rank by rank (`add_waits`), and gives one plain dictionary per process group
(`entries`). Must not: name a rank on a median alone, or from ranks' clocks; waiting is compared within one collective
(docs/measuring.md, section 1).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from aorta.analysis.collective_matching import CollectiveRows, MatchedCollectives, NumberedNames
from aorta.analysis.formatting import TEXT, whole_percent
from aorta.analysis.tables import Bools, Floats, Ints
from aorta.records.schema import STALL_CUTOFF_NS
from aorta.timeline.overlap import NS_PER_MS

MIN_COLLECTIVES: Final = 16
LAST_SHARE: Final = 0.8
MARGIN_MS: Final = STALL_CUTOFF_NS / NS_PER_MS
"""Where the record states no cut-off."""
MARGIN_SHARE: Final = 0.1


class Stragglers:
    """Collects counts per group and rank; of the waits only medians are kept. Groups are identified by their number in
    `names`.
    """

    def __init__(self, names: NumberedNames, margin_ms: float = MARGIN_MS) -> None:
        self._names, self._margin_ms = names, margin_ms
        self._transfers_ms: defaultdict[int, list[Floats]] = defaultdict(list)
        self._seen = np.zeros(len(names.groups), bool)
        self._collectives = np.zeros(len(names.groups), np.int64)
        self._last: defaultdict[int, Counter[int]] = defaultdict(Counter)
        self._medians: defaultdict[int, dict[int, float | None]] = defaultdict(dict)

    def add(self, rows: CollectiveRows, found: MatchedCollectives) -> None:
        """Add matched rows: which rank was the last, and the transfers."""
        group = self._names.group[rows.name[found.last]]
        self._seen[group[found.used & (found.size > 1)]] = True
        np.add.at(self._collectives, group[found.whole], 1)
        last = found.whole & found.alone  # in a tie nobody counts as the last
        pairs, counts = np.unique(np.stack([group[last], rows.rank[found.last[last]]]), axis=1, return_counts=True)
        for number, rank, count in zip(*pairs.tolist(), counts.tolist(), strict=True):
            self._last[number][rank] += count
        for number in np.unique(group[found.whole]).tolist():
            transfers = found.transfer_ns[found.whole & (group == number)]
            self._transfers_ms[number].append(transfers / NS_PER_MS)

    def add_waits(self, rank: int, name: Ints, wait_ns: Ints, used: Bools) -> None:
        """Add the waits of one rank.

        Args:
            name: of each collective, as in `CollectiveRows.name`.
            wait_ns: how long the rank waited in it; negative if unknown.
            used: not warm-up.
        """
        group, size = self._names.group[name], self._names.size[name]
        for number in np.unique(group[used & (size > 1)]).tolist():
            known = wait_ns[used & (group == number) & (wait_ns >= 0)]
            self._medians[number][rank] = float(np.median(known)) / NS_PER_MS if len(known) else None

    def entries(self) -> list[dict[str, Any]]:
        """One entry per process group of two ranks or more, by name: who is late, by how many milliseconds, or why
        nobody is named. Warm-up is left out (W21).

        `late_ms` is the median over the peers' median waits, less the rank's own: how much longer they wait for it in
        each collective.
        """
        groups = self._names.groups
        order = sorted(np.flatnonzero(self._seen).tolist(), key=lambda number: groups[number])
        return [
            {"group": groups[number][0], "group_ranks": list(groups[number][1]), **self._judge(number)}
            for number in order
        ]

    def _judge(self, number: int) -> dict[str, Any]:
        parts = self._transfers_ms[number]
        transfer_ms = float(np.median(np.concatenate(parts))) if parts else 0.0
        return judge(
            int(self._collectives[number]), self._medians[number], self._last[number], transfer_ms, self._margin_ms
        )


def judge(
    collectives: int,
    wait_ms: Mapping[int, float | None],
    last: Mapping[int, int],
    transfer_ms: float,
    margin_ms: float = MARGIN_MS,
) -> dict[str, Any]:
    """Apply the rule to one group.

    Args:
        collectives: number of collectives known on every rank.
        wait_ms: rank -> median wait.
        last: rank -> how often it alone was the last.
        transfer_ms: the median transfer.
        margin_ms: by how much longer the others have to wait for it at least.
    """
    found: dict[str, Any] = {
        "collectives": collectives,
        "wait_ms_median_per_rank": {str(rank): median for rank, median in wait_ms.items()},
        "rank": None,
        "late_ms": None,
        "last_share": None,
        "reason": None,
    }
    if collectives < MIN_COLLECTIVES:
        return found | {"reason": f"{collectives} collectives known on every rank, {MIN_COLLECTIVES} are needed"}
    (own, rank), *others = sorted((median, rank) for rank, median in wait_ms.items() if median is not None)
    share = last.get(rank, 0) / collectives
    margin, needed = others[0][0] - own, max(margin_ms, MARGIN_SHARE * transfer_ms)
    found["last_share"] = share
    if share < LAST_SHARE:
        return found | {
            "reason": f"rank {rank} waits least, but was the last in {whole_percent(share)} of the collectives only"
        }
    if margin <= needed:
        return found | {"reason": f"rank {rank} is late by {margin:.3g} ms, not by more than {needed:.3g} ms"}
    return found | {"rank": rank, "late_ms": float(np.median([median for median, _ in others])) - own}


def sentences(entries: Sequence[dict[str, Any]]) -> list[str]:
    """One sentence per straggler; none where nobody is named."""
    return [
        f"rank {entry['rank']} is a straggler: the other ranks of group {entry['group']} wait for it, "
        f"{TEXT.quantity(entry['late_ms'], 'ms')} longer than it does in each collective (median; it was the last in "
        f"{whole_percent(entry['last_share'])} of {entry['collectives']})"
        for entry in entries
        if entry["rank"] is not None
    ]
