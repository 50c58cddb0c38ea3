"""A rank's record, as another process than the rank continues it: with lines of the steps in the rank's ring, also of
those that the rank had finished when it was killed.

    record = RingRecord(folder, ring_path)
    while record.claim():               # False once the rank makes its lines itself
        record.append()

    salvage(folder, problems)           # of all ranks that were killed; how many steps were appended

One process at a time writes to a record: it is locked for as long as lines are appended, and the ring says whose turn
it is (`RingFile.owner`). Whoever takes over begins behind the last line in the file, so that no step is there twice. A
rank holds a lock on its ring for as long as it lives, and notes there when its record is whole. Must not import torch,
load numpy before a ring is read, or write to a record that has ended; `salvage` must not touch that of a rank that may
live, or raise.
"""

from __future__ import annotations

import fcntl
import gc
import logging
import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import BinaryIO, Final

from aorta.errors import RecordWriteError
from aorta.records.clocks import boot_id, read_clocks
from aorta.records.files import open_own
from aorta.records.process import is_ending
from aorta.records.progress import (
    GIVEN_UP,
    NOBODY,
    ProgressWatch,
    UnreadableProgress,
    may_have_unread_rows,
    progress_files,
)
from aorta.records.record_file import RecordWriter, header_of
from aorta.records.run_files import RANK_FILE
from aorta.records.schema import Anchor, Step

_log = logging.getLogger(__name__)
_SURELY_DEAD_S: Final = 600.0
"""Since the last line of another host's record: its locks may not be seen from here."""
_ENDING_S: Final = 5.0
"""A process that was killed holds its locks for so long at most: its memory is freed first."""
_LOOK_EVERY_S: Final = 0.01


class RingRecord:
    """The record of the rank whose ring is at `path`.

    Raises:
        OSError, InputError: ring or record cannot be read, or is no file of its own.
        UnreadableProgress: it is no ring, or that of another record.
    """

    def __init__(self, folder: Path, path: Path) -> None:
        from aorta.records.ring_file import RingFile  # which loads numpy
        from aorta.records.ring_steps import RingSteps

        self.ring = RingFile.open(path)
        self.path = folder / RANK_FILE.format(rank=self.ring.facts.rank)
        if header_of(self.path).clock != self.ring.facts.anchor:
            raise UnreadableProgress(f"{path}: not the ring of {self.path}")
        self._ring_path = path
        self._writer = RecordWriter.reopened(self.path, self.ring.facts.rank)
        self._reader = RingSteps
        self._steps: RingSteps | None = None

    @property
    def is_there(self) -> bool:
        """Whether the ring is still to be read: its record is not whole, and nobody has removed its folder."""
        return self._ring_path.exists() and not self.ring.is_whole

    @property
    def steps_lost(self) -> int:
        """How many steps have ended that a record without an end lacks once all that can be read is appended. On a
        device steps end that it has not reached.
        """
        if self._writer.has_ended or self.ring.facts.bound_ns is not None:
            return 0
        return max(self.ring.steps_ended - self._writer.steps_written, 0)

    def claim(self, *, of_dead: bool = False) -> bool:
        """Lock the record, and return whether its lines are this process's to make; the first time reads where it ends.
        A rank that makes its lines itself goes on doing so.

        Args:
            of_dead: the rank and whoever made its lines have died: it is this process's turn in any case.

        Raises:
            BlockingIOError: another process has it locked. OSError: it cannot be locked or read.
        """
        if not self._writer.lock():
            raise BlockingIOError(f"{self.path} is being written by another process")
        ring, own = self.ring, os.getpid()
        if of_dead or (ring.owner == NOBODY and ring.facts.anchor_interval is not None):
            ring.owner = own
        if ring.owner != own:
            self.close()
            return False
        if self._steps is None:
            self._writer.resume(*ring.written)
            self._steps = self._reader(ring, behind_ns=self._writer.last_start_ns)
        return True

    def append(self, *, late: bool = False) -> int:
        """Append the lines of complete steps to a record that is claimed, unless it has ended, and unlock it; returns
        how many. `late`: as in `RingSteps.take`.

        Raises:
            RecordWriteError: the disk did not take a line; the rank goes on itself.
        """
        assert self._steps is not None  # it is claimed
        ring, writer, count = self.ring, self._writer, 0
        interval = ring.facts.anchor_interval
        try:
            lines: list[Step] = []
            if not writer.has_ended:
                with uncollected():
                    lines = self._steps.take(late=late)
            for line in lines:
                writer.write(line)
                count, writer.last_start_ns = count + 1, line.start_mono_ns
                if interval is not None and line.phase == "train" and (line.global_step + 1) % interval == 0:
                    writer.write(Anchor(line.global_step, read_clocks()))
        except RecordWriteError:
            self.give_up()
            raise
        finally:
            ring.note_written(self._steps.next_row, writer.steps_written, writer.last_start_ns)
            writer.unlock()
        return count

    def give_up(self) -> None:
        """Leave what is to be written to the rank."""
        self.ring.owner = GIVEN_UP

    def close(self) -> None:
        """Close the record."""
        self._writer.close()


@contextmanager
def uncollected() -> Iterator[None]:
    """A `with` block without garbage collections: lines are not cyclic, and traversing them takes a tenth of making
    them. Not in the rank, whose program has a say in this.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def salvage(folder: Path, problems: list[str] | None = None) -> int:
    """Complete the records of a run folder whose ranks were killed; returns how many steps were appended. Waits some
    seconds at most for processes that are ending. Sentences about rings that cannot be used are added to `problems`.
    """
    messages, until_s = [] if problems is None else problems, time.monotonic() + _ENDING_S
    paths = [path for path in progress_files(folder) if may_have_unread_rows(path)]
    return sum(_salvaged(folder, path, messages, until_s) for path in paths)


def _salvaged(folder: Path, path: Path, problems: list[str], until_s: float) -> int:
    try:
        with open_own(path, existing=True) as file:
            return _completed(folder, path) if _has_died(path, file, until_s) else 0
    except BlockingIOError:  # another process is at it
        return 0
    except Exception as error:  # noqa: BLE001  a ring comes from elsewhere; what the record has is read all the same
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        problems.append(f"{path.name}: steps that its rank had finished may be missing: it cannot be used: {why}")
        _log.info("%s: nothing is taken from it: %s: %s", path, type(error).__name__, error)
        return 0


def _has_died(path: Path, file: BinaryIO, until_s: float) -> bool:
    """Return whether the rank of a ring has died, and lock it, after a wait for one that is ending. A child that it
    forked, and that lives on, keeps the lock as it has mapped the ring too, but stores nothing there.
    """
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not is_ending(ProgressWatch(path).facts):
                return False
            if time.monotonic() < until_s:
                time.sleep(_LOOK_EVERY_S)
                continue
        return True


def _completed(folder: Path, path: Path) -> int:
    """Append what a dead rank has not written; returns how many steps. Raises BlockingIOError where another process has
    the record locked.
    """
    if not may_have_unread_rows(path):  # another process was at it meanwhile
        return 0
    with closing(RingRecord(folder, path)) as record:
        process = record.ring.process
        elsewhere = process is None or process.boot_id != boot_id()
        if elsewhere and time.time() - record.path.stat().st_mtime < _SURELY_DEAD_S:
            return 0
        record.claim(of_dead=True)
        count = record.append(late=True)
        if lost := record.steps_lost:
            raise UnreadableProgress(f"rows of {lost} steps are lost")
        record.ring.is_whole = True
        record.ring.keep_progress()
    if count:
        _log.info("%s: appended %d steps that the killed rank had not written", record.path, count)
    return count
