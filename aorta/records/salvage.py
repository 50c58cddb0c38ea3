"""Appends to a record the steps that its rank had finished when it was killed, and not written: they are in its ring.

    salvage(folder)     # how many steps were appended, of all ranks

A rank holds a lock on its ring for as long as it lives, and removes it when its record is whole. Must not touch the
record of a rank that may live, or raise.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from aorta.records.clocks import boot_id
from aorta.records.files import open_own
from aorta.records.progress_file import PROGRESS_DIR, RING_FILE_GLOB
from aorta.records.record_file import stream
from aorta.records.run_files import RANK_FILE
from aorta.records.schema import Footer, Header, Step

if TYPE_CHECKING:  # loads numpy, which the watchdog needs where a rank was killed alone
    from aorta.records.ring_file import RingFile

_log = logging.getLogger(__name__)
_SURELY_DEAD_S: Final = 600.0
"""Since the last line of another host's record: its locks may not be seen from here."""


def salvage(folder: Path) -> int:
    """Complete the records of a run folder whose ranks were killed; returns how many steps were appended."""
    return sum(_salvaged(folder, path) for path in sorted((folder / PROGRESS_DIR).glob(RING_FILE_GLOB)))


def _salvaged(folder: Path, path: Path) -> int:
    from aorta.records.ring_file import RingFile

    try:
        with open_own(path) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ring = RingFile.open(path)
            record = folder / RANK_FILE.format(rank=ring.facts.rank)
            if ring.facts.boot_id != boot_id() and time.time() - record.stat().st_mtime < _SURELY_DEAD_S:
                return 0
            count = _append(record, ring)
            path.unlink()
    except BlockingIOError:  # the rank lives
        return 0
    except Exception as error:  # noqa: BLE001  a ring comes from elsewhere; what the record has is read all the same
        _log.info("%s: nothing is taken from it: %s: %s", path, type(error).__name__, error)
        return 0
    if count:
        _log.info("%s: appended %d steps that the killed rank had not written", record, count)
    return count


def _append(record: Path, ring: RingFile) -> int:
    """Append what the record lacks, in place of a line that was cut off; nothing to a record that has ended.

    Raises:
        OSError, InputError: the record cannot be read or written.
        UnreadableRing: the ring is that of another record.
    """
    from aorta.records.ring_file import UnreadableRing
    from aorta.records.ring_steps import RingSteps

    last_ns = -1
    for line in stream(record, []):
        if isinstance(line, Header) and line.clock != ring.facts.anchor:
            raise UnreadableRing(f"{ring.path}: not the ring of {record}")
        if isinstance(line, Footer):
            return 0
        if isinstance(line, Step):
            last_ns = max(last_ns, line.start_mono_ns)
    missing = [line for line in RingSteps(ring).take(late=True) if line.start_mono_ns > last_ns]
    encode = msgspec.json.Encoder().encode
    with open_own(record) as file:
        size = file.seek(0, os.SEEK_END)
        kept = size
        while kept > 0:  # behind the last line that is whole
            begin = max(kept - 65_536, 0)
            file.seek(begin)
            if (at := file.read(kept - begin).rfind(b"\n")) >= 0:
                kept = begin + at + 1
                break
            kept = begin
        file.truncate(kept)
        file.seek(kept)
        file.write(b"".join(encode(line) + b"\n" for line in missing))
    return len(missing)
