"""The emulated network of one run, as one rank of it sees it: what each of its collectives costs (`cost_model`), by how
much the rank is late, and which links its groups share.

Must not read a clock.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from aorta.config.groups.fabric import network_cost_ns, spans_nodes
from aorta.config.schema import EmulatedFabric, Sharing
from aorta.instrument.emulation.shared_links import SharedLinks

_NS_PER_MS = 1_000_000


class EmulatedNetwork:
    """The emulated network of one run, as seen from one rank.

    Args:
        settings: of the fabric.
        rank, world_size: of this process.
        folder: where the ranks of one host share their arrival times (`arrivals.meeting_place`); None without.
    """

    def __init__(self, settings: EmulatedFabric, rank: int, world_size: int, folder: Path | None) -> None:
        self.settings, self.rank, self._world_size, self.folder = settings, rank, world_size, folder
        late = settings.straggler_rank == rank
        self.late_ns = round(settings.straggler_ms * _NS_PER_MS) if late else 0
        """By how much this rank is late to every collective."""

    def cost_ns(self, kind: str, size_bytes: int, ranks: Sequence[int], number: int | None) -> int:
        """Cost of collective `number` of the group with these global ranks, in nanoseconds; the same on every rank of
        it.

        Sends and receives have no number that both ends agree on (None), and so no jitter.
        """
        cost = network_cost_ns(kind, size_bytes, ranks, self._world_size, self.settings)
        return round(cost * self._jitter(ranks, number))

    def spans_nodes(self, ranks: Sequence[int]) -> bool:
        """Whether the slowest link of the group with these global ranks is one between nodes."""
        return spans_nodes(ranks, self._world_size, self.settings)

    def shared_links(self) -> SharedLinks | None:
        """The links that the groups of a rank share; None where each group has its own."""
        if self.settings.sharing is Sharing.group:
            return None
        return SharedLinks(self.folder, self.rank, self._world_size)

    def _jitter(self, ranks: Sequence[int], number: int | None) -> float:
        if number is None or not self.settings.jitter:
            return 1.0
        # Not `hash`, which differs between processes, and a separate generator, so that training's random numbers stay.
        chance = random.Random(f"{self.settings.seed}/{list(ranks)}/{number}")
        return 1.0 + self.settings.jitter * chance.uniform(-1.0, 1.0)
