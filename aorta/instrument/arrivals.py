"""When each rank of a group arrived at a collective, shared by the ranks of one host through memory.

A collective begins on a link when its last rank has arrived. A rank cannot tell that moment from its own backend,
whose completion comes a backend's time later, so ranks tell each other. CLOCK_MONOTONIC is common to the processes of
a host, and a backend cannot complete an all-reduce before all ranks have written their arrival: nobody waits to read.

Enters: a folder that all ranks of a run see. Leaves: nothing in it once every rank has opened a group's file.
Must not: be used across hosts, whose clocks differ.
"""

from __future__ import annotations

import hashlib
import mmap
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from aorta.launch.peers import Peers

SLOTS = 4096
"""Collectives of one group that a rank may be ahead of another."""
_LAP_BITS = 6
_WORD = 8


_MEMORY = Path("/dev/shm")


@contextmanager
def meeting_place(peers: Peers) -> Iterator[Path | None]:
    """A folder for the tables of one run, gone at the end; None where not all ranks are on one host."""
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
    """One group's table: a row of slots a rank. One word holds arrival and lap, so that no reader sees half of it.

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
            file.truncate(self.ranks * SLOTS * _WORD)  # grows with zeros, and keeps what a peer has written
            self._map = mmap.mmap(file.fileno(), 0)
        self._words = memoryview(self._map).cast("Q")
        self._named = True

    def arrive(self, number: int, at_ns: int) -> None:
        """This rank arrived at collective `number` (0, 1, ...) of the group."""
        self._words[self._own * SLOTS + number % SLOTS] = at_ns << _LAP_BITS | self._lap(number)

    def known(self, number: int) -> list[int]:
        """Arrivals at collective `number` that have been written so far, in nanoseconds of CLOCK_MONOTONIC."""
        lap, words = self._lap(number), self._words[number % SLOTS :: SLOTS]
        found = [word >> _LAP_BITS for word in words if word & ((1 << _LAP_BITS) - 1) == lap]
        if self._named and len(found) == self.ranks:
            self._named = False
            with suppress(OSError):
                self._path.unlink()  # every rank has it open: nothing is left behind, however the run ends
        return found

    @staticmethod
    def _lap(number: int) -> int:
        """Never 0, which is what an empty slot holds."""
        return number // SLOTS % ((1 << _LAP_BITS) - 1) + 1
