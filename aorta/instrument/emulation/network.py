"""The emulated network of one run, as one rank of it sees it: what each of its collectives costs (`cost_ns`), by how
much the rank is late, when all ranks of a group have arrived, and which links groups share.

A collective begins on a link when its last rank has arrived. A rank cannot tell that moment from its own backend, whose
completion comes later, so ranks publish their arrivals in a memory-mapped file. CLOCK_MONOTONIC is common to the
processes of a host, and a backend cannot complete an all-reduce before all ranks have written their arrival, so readers
never wait. The file is unlinked once every rank of the group has opened it.

A rank has one link within its node and one between nodes. Where groups share links (`fabric.sharing=link`), a
collective takes the links of all ranks of its group for its whole cost; it begins when its last rank has arrived and
all of these are free. So groups that share a link take turns on it and its bandwidth is never used twice, while groups
on different links, or of different ranks, do not meet.

    links = SharedLinks(folder, rank, world_size)
    held = links.hold(group, number, ranks, arrived_ns, cost_ns, between_nodes=True)   # the same end on every rank

Which of two collectives comes first must be the same on all ranks, so the first rank that asks decides, under a lock,
in memory that all share; the others read what it decided. That is the order in which backends complete them, not that
of issue, and a link that waits for another rank's is not given to others meanwhile. Must not read a clock, or be used
across hosts, whose clocks differ; there, and for sends and receives, which have no number that both ends agree on, only
the caller's own link is held.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import random
import shutil
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from aorta.config.fabric import network_cost_ns
from aorta.config.schema import EmulatedFabric
from aorta.distributed.peers import Peers
from aorta.errors import RunIncomplete
from aorta.records.files import open_own

SLOTS = 4096
"""How many collectives of one group a rank may be ahead of another."""
_LAP_BITS = 6
_WORD = 8
_LINKS = 2
"""Of a rank: within its node, between nodes."""
_NS_PER_MS = 1_000_000
_MEMORY = Path("/dev/shm")


@contextmanager
def shared_folder(peers: Peers) -> Iterator[Path | None]:
    """Yield a folder for the shared files of one run, removed at the end; None where not all ranks are on one host."""
    own = None
    if peers.rank == 0:
        own = tempfile.mkdtemp(prefix="aorta-fabric-", dir=_MEMORY if _MEMORY.is_dir() else None)
    try:
        folder = Path(peers.from_first_rank("fabric", own))
        yield folder if all(peers.gather("fabric", folder.is_dir())) else None
    finally:
        if own is not None:
            shutil.rmtree(own, ignore_errors=True)


class Arrivals:
    """The arrival table of one group: a row of slots per rank. Each slot is a single word with arrival and lap, so that
    no reader sees half an update.

    Args:
        folder: agreed on by the run's ranks.
        name, ranks: of the group.
        rank: global rank of this process, one of `ranks`.
    """

    def __init__(self, folder: Path, name: str, ranks: Sequence[int], rank: int) -> None:
        self.ranks, self._own = len(ranks), list(ranks).index(rank)
        key = hashlib.sha256(f"{name}/{list(ranks)}".encode()).hexdigest()[:16]
        self._path, self._named = folder / key, True
        self._arrivals = _shared_numbers(folder, key, self.ranks * SLOTS)

    def arrive(self, number: int, at_ns: int) -> None:
        """Publish that this rank reached collective `number` (0, 1, ...) of the group."""
        self._arrivals[self._own * SLOTS + number % SLOTS] = at_ns << _LAP_BITS | _lap(number)

    def known(self, number: int) -> list[int]:
        """Return the arrivals at collective `number` published so far, in nanoseconds of CLOCK_MONOTONIC."""
        lap, words = _lap(number), self._arrivals[number % SLOTS :: SLOTS]
        arrivals = [word >> _LAP_BITS for word in words if word & ((1 << _LAP_BITS) - 1) == lap]
        if self._named and len(arrivals) == self.ranks:
            self._named = False
            with suppress(OSError):
                self._path.unlink()  # every rank has it open: nothing is left behind, however the run ends
        return arrivals


def _lap(number: int) -> int:
    return number // SLOTS % ((1 << _LAP_BITS) - 1) + 1  # never 0, which marks an empty slot


class LinkHold(NamedTuple):
    """When this rank's link was free for a collective, and when the collective ends on it."""

    free_ns: int
    end_ns: int


class SharedLinks:
    """The links of all ranks of a host, as seen from one of them.

    Args:
        folder: agreed on by the run's ranks; None where they are on several hosts.
        rank, world_size: of this process.
    """

    def __init__(self, folder: Path | None, rank: int, world_size: int) -> None:
        self._folder, self._rank = folder, rank
        self._thread = threading.Lock()
        self._lock = None if folder is None else open_own(folder / "links.lock")
        self._free_at = _shared_numbers(folder, "links", world_size * _LINKS)
        self._decided: dict[tuple[str, tuple[int, ...]], memoryview] = {}

    def hold(
        self,
        group: str,
        number: int | None,
        ranks: Sequence[int],
        arrived_ns: int,
        cost_ns: int,
        *,
        between_nodes: bool,
    ) -> LinkHold:
        """Hold the links of a group's ranks for one collective, after everything decided before.

        Args:
            number: of the collective in its group; None: only this rank's link is held.
            arrived_ns: when its last rank arrived.
            between_nodes: which of their links.
        """
        with self._exclusively():
            if number is None or self._folder is None:
                return self._take((self._rank,), arrived_ns, cost_ns, between_nodes)[0]
            width = 1 + 2 * len(ranks)
            words = self._decided.get((group, tuple(ranks)))
            if words is None:
                key = hashlib.sha256(f"links/{group}/{list(ranks)}".encode()).hexdigest()[:16]
                words = self._decided[group, tuple(ranks)] = _shared_numbers(self._folder, key, SLOTS * width)
            row = words[number % SLOTS * width : (number % SLOTS + 1) * width]
            if row[0] != number + 1:  # 0 in a slot that was never used
                held = self._take(ranks, arrived_ns, cost_ns, between_nodes)
                row[0] = number + 1
                for index, hold in enumerate(held):
                    row[1 + 2 * index], row[2 + 2 * index] = hold
            index = list(ranks).index(self._rank)
            return LinkHold(row[1 + 2 * index], row[2 + 2 * index])

    def prolong(self, end_ns: int, *, between_nodes: bool) -> None:
        """Keep this rank's link busy until `end_ns`: the backend was slower."""
        with self._exclusively():
            index = self._rank * _LINKS + between_nodes
            self._free_at[index] = max(self._free_at[index], end_ns)

    def close(self) -> None:
        with self._thread:
            if self._lock is not None:
                self._lock.close()
                self._lock = None

    def _take(self, ranks: Sequence[int], arrived_ns: int, cost_ns: int, between_nodes: bool) -> list[LinkHold]:
        indices = [rank * _LINKS + between_nodes for rank in ranks]
        free_ns = [self._free_at[index] for index in indices]
        end_ns = max(arrived_ns, *free_ns) + cost_ns
        for index in indices:
            self._free_at[index] = end_ns
        return [LinkHold(begin_ns, end_ns) for begin_ns in free_ns]

    @contextmanager
    def _exclusively(self) -> Iterator[None]:
        """Exclude other threads of this process and other processes of the host from holding links."""
        with self._thread:
            if self._lock is None:
                yield
                return
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._lock, fcntl.LOCK_UN)


def _shared_numbers(folder: Path | None, name: str, count: int) -> memoryview:
    """Return 64-bit numbers, 0 at first, shared by all processes that name them; without a folder, by none.

    Raises:
        RunIncomplete: there is no room for them, which without this would end the process at a later store.
    """
    if folder is None:
        return memoryview(bytearray(count * _WORD)).cast("Q")
    try:
        with open_own(folder / name) as file:
            os.posix_fallocate(file.fileno(), 0, count * _WORD)  # grows with zeros, and keeps what a peer wrote
            return memoryview(mmap.mmap(file.fileno(), 0)).cast("Q")
    except OSError as error:
        raise RunIncomplete(
            f"fabric: {count * _WORD} bytes of {folder} cannot be had: {error.strerror or error}; make room there"
        ) from error


class EmulatedNetwork:
    """The emulated network of one run, as seen from one rank.

    Args:
        settings: of the fabric.
        rank, world_size: of this process.
        folder: where the ranks of one host share their arrival times (`shared_folder`); None without.
    """

    def __init__(self, settings: EmulatedFabric, rank: int, world_size: int, folder: Path | None) -> None:
        self.settings, self.rank, self.world_size, self.folder = settings, rank, world_size, folder
        late = settings.straggler_rank == rank
        self.late_ns = round(settings.straggler_ms * _NS_PER_MS) if late else 0
        """By how much this rank is late to every collective."""

    def cost_ns(self, kind: str, size_bytes: int, ranks: Sequence[int], number: int | None) -> int:
        """Return the cost of collective `number` of the group with these global ranks, in nanoseconds; the same on
        every rank of it.

        Sends and receives have no number that both ends agree on (None), and so no jitter.
        """
        cost: float = network_cost_ns(kind, size_bytes, ranks, self.world_size, self.settings)
        if number is not None and self.settings.jitter:
            # Not `hash`, which differs between processes; and a separate generator: training's random numbers stay.
            chance = random.Random(f"{self.settings.seed}/{list(ranks)}/{number}")
            cost *= 1.0 + self.settings.jitter * chance.uniform(-1.0, 1.0)
        return round(cost)
