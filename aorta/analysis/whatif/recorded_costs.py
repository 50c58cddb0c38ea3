"""What each recorded collective cost, once all its ranks had arrived and its link was free.

On an emulated network on one host the record shows it exactly: an end that the emulation set is that moment plus the
network's charge; one that the backend set says how long the backend took. Everywhere else the recorded time is the
cost, and the network's charge a part of it. Must not ask what another network would charge.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from aorta.analysis.tables import Bools, Ints
from aorta.analysis.whatif.program import Column, compact
from aorta.analysis.whatif.schedule import CollectiveBatch, ReplayOrder

LONG_AGO: Final = -(2**60)
"""Until then a link was busy that nothing was queued on."""


@dataclass(frozen=True)
class Recorded:
    """The collectives of one step, shape (places, ranks), on the common clock.

    Attributes:
        by_backend: its end is that of the backend, not one that an emulated network set.
        backend_known: `backend_end_ns` is known besides.
    """

    issue_ns: Ints
    start_ns: Ints
    end_ns: Ints
    backend_end_ns: Ints
    by_backend: Bools
    backend_known: Bools


class Costs:
    """Works the costs out, step by step: links stay busy from one to the next.

    Args:
        law: ends follow the law of an emulated network on one host.
        shared: groups of a rank share its links.

    Attributes:
        collectives, backend_was_limit: how many there were on all ranks, and for how many the backend set the end.
        arrival_unknown: as in `program.Facts`; counted by who reads the record.
    """

    def __init__(self, law: bool, shared: bool) -> None:
        self._law, self._shared = law, shared
        self._free: dict[tuple[int, int], int] = {}
        self._first: dict[tuple[int, int], int] = {}
        self.collectives = self.backend_was_limit = self.arrival_unknown = 0

    def of(
        self, plan: ReplayOrder, recorded: Recorded, charged: Ints | None
    ) -> tuple[Column, Column | None, Column | None]:
        """`cost_ns`, `network_ns` and `backend_ns` of a step (`program.StepProgram`)."""
        cost, backend = np.zeros_like(recorded.end_ns), np.zeros_like(recorded.end_ns)
        for row in plan.rows:
            if isinstance(row, CollectiveBatch):
                self._meet(row, recorded, charged, cost, backend)
        if cost.size and (cost == cost[:, :1]).all():
            cost = cost[:, :1]
        limits = backend.any()
        return compact(cost), None if charged is None else compact(charged), compact(backend) if limits else None

    def busy_before(self, links: int, ranks: int) -> Ints:
        """Until when each link was busy before the first step, shape (links, ranks)."""
        busy = np.full((links, ranks), LONG_AGO, np.int64)
        for (link, column), until_ns in self._first.items():
            busy[link, column] = until_ns
        return busy

    def _meet(self, row: CollectiveBatch, recorded: Recorded, charged: Ints | None, cost: Ints, backend: Ints) -> None:
        places, columns = row.places, row.columns
        issue, start, end = (
            column[places, columns] for column in (recorded.issue_ns, recorded.start_ns, recorded.end_ns)
        )
        last = np.maximum.reduceat(issue, row.starts)[row.which]
        free = self._free_before(row, issue, start)
        if self._shared:
            free = np.maximum.reduceat(free, row.starts)[row.which]
        took = end - np.maximum(last, free)
        self.collectives += len(columns)
        if not self._law:
            cost[places, columns] = took
        else:
            by_backend = recorded.by_backend[places, columns]
            self.backend_was_limit += int(by_backend.sum())
            assert charged is not None  # a law charges
            by_law = charged[places, np.minimum(columns, charged.shape[1] - 1)]
            # The same on every rank, jitter included: where the backend set the end here, another rank may know it.
            shown = np.maximum.reduceat(np.where(by_backend, LONG_AGO, took), row.starts)[row.which]
            cost[places, columns] = np.where(by_backend, np.where(shown > LONG_AGO, shown, by_law), took)
            known = recorded.backend_known[places, columns]
            until = np.where(known, recorded.backend_end_ns[places, columns], end)
            backend[places, columns] = np.where(by_backend | known, np.maximum(until - last, 0), 0)
        for link, column, until_ns in zip(row.links.tolist(), columns.tolist(), end.tolist(), strict=True):
            if link >= 0:
                self._free[link, column] = until_ns

    def _free_before(self, row: CollectiveBatch, issue: Ints, start: Ints) -> Ints:
        """When each rank's link was free. Before its first collective only that collective can tell."""
        free = []
        for link, column, came_ns, begun_ns in zip(
            row.links.tolist(), row.columns.tolist(), issue.tolist(), start.tolist(), strict=True
        ):
            if link >= 0 and (link, column) not in self._free:
                self._free[link, column] = self._first[link, column] = begun_ns if begun_ns > came_ns else LONG_AGO
            free.append(self._free[link, column] if link >= 0 else LONG_AGO)
        return np.array(free, np.int64)
