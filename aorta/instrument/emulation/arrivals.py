"""Shares the time at which each rank of a group reached a collective, through memory common to the ranks of one host.

A collective begins on a link when its last rank has arrived. A rank cannot tell that moment from its own backend, whose
completion comes later, so ranks publish their arrivals in a memory-mapped file. CLOCK_MONOTONIC is common to the
processes of a host, and a backend cannot complete an all-reduce before all ranks have written their arrival, so readers
never wait. The file is unlinked once every rank of the group has opened it.

Must not be used across hosts, whose clocks differ.
"""

from __future__ import annotations

import hashlib
import mmap
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from aorta.distributed.peers import Peers

SLOTS = 4096
"""How many collectives of one group a rank may be ahead of another."""
_LAP_BITS = 6
_WORD = 8


_MEMORY = Path("/dev/shm")


@contextmanager
def meeting_place(peers: Peers) -> Iterator[Path | None]:
    """A folder for the shared files of one run, removed at the end; None where not all ranks are on one host."""
    own = None
    if peers.rank == 0:
        own = tempfile.mkdtemp(prefix="aorta-fabric-", dir=_MEMORY if _MEMORY.is_dir() else None)
    try:
        folder = Path(peers.from_rank_zero("fabric", own))
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
        self._path = folder / key
        with self._path.open("a+b") as file:
            file.truncate(self.ranks * SLOTS * _WORD)  # grows with zeros, and keeps what a peer wrote
            self._map = mmap.mmap(file.fileno(), 0)
        self._words = memoryview(self._map).cast("Q")
        self._named = True

    def arrive(self, number: int, at_ns: int) -> None:
        """Publish that this rank reached collective `number` (0, 1, ...) of the group."""
        self._words[self._own * SLOTS + number % SLOTS] = at_ns << _LAP_BITS | self._lap(number)

    def known(self, number: int) -> list[int]:
        """Arrivals at collective `number` published so far, in nanoseconds of CLOCK_MONOTONIC."""
        lap, words = self._lap(number), self._words[number % SLOTS :: SLOTS]
        found = [word >> _LAP_BITS for word in words if word & ((1 << _LAP_BITS) - 1) == lap]
        if self._named and len(found) == self.ranks:
            self._named = False
            with suppress(OSError):
                self._path.unlink()  # every rank has it open: nothing is left behind, however the run ends
        return found

    @staticmethod
    def _lap(number: int) -> int:
        """The lap of a slot; never 0, which marks an empty slot."""
        return number // SLOTS % ((1 << _LAP_BITS) - 1) + 1
