"""Who the others waited for: ranks in order of what their lateness cost.

Enters: matched pieces. Leaves: plain JSON values. Must not: use a clock across ranks; the rank with the shortest
duration of a collective came last (durations are differences on one clock). Its excess
is exposed communication of its peers, not something to add to it (W22).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from aorta.analysis.instances import OK, Instances, Piece
from aorta.timeline.overlap import NS_PER_MS

SHOWN: Final = 32
"""Ranks in the ranking: the worst ones."""


class Stragglers:
    """Sums per rank, in whole nanoseconds."""

    def __init__(self, hosts: Mapping[int, str]) -> None:
        self._hosts = hosts
        self._ranks = np.array(sorted(hosts), np.int64)
        self._matched = np.zeros(len(hosts), np.int64)
        self._last = np.zeros(len(hosts), np.int64)
        self._excess_ns = np.zeros(len(hosts), np.int64)
        self._wait_ns = np.zeros(len(hosts), np.int64)

    def add(self, piece: Piece, found: Instances) -> None:
        """Take a piece in: its collectives that were matched, on two ranks or more, after warm-up."""
        counts = (found.reason == OK) & (found.size > 1) & found.used
        rows = counts[found.instance] & piece.used
        rank = np.searchsorted(self._ranks, piece.rank[rows])
        np.add.at(self._matched, rank, 1)
        np.add.at(self._wait_ns, rank, found.wait_or_reason[rows])
        excess = (found.second_ns - found.transfer_ns)[counts]
        late = np.searchsorted(self._ranks, piece.rank[found.last[counts]])[excess > 0]
        np.add.at(self._last, late, 1)
        np.add.at(self._excess_ns, late, excess[excess > 0])

    def ranking(self) -> dict[str, Any]:
        """The worst ranks first: by what their peers would not have waited had they come as second last."""
        if not self._matched.any():
            return {"ranks": [], "reason": "no collective of two or more ranks was matched after warm-up"}
        order = np.lexsort((self._ranks, self._wait_ns, -self._excess_ns))
        ranks = [
            {
                "rank": int(self._ranks[at]),
                "host": self._hosts[int(self._ranks[at])],
                "collectives": int(self._matched[at]),
                "last": int(self._last[at]),
                "excess_ms": float(self._excess_ns[at] / NS_PER_MS),
                "wait_ms": float(self._wait_ns[at] / NS_PER_MS),
            }
            for at in order[self._matched[order] > 0][:SHOWN]
        ]
        return {"ranks": ranks, "reason": None}
