"""Appends to a record the steps that its rank had finished when it was killed, and not written: they are in its ring.

    salvage(folder, problems)   # how many steps were appended, of all ranks

A rank holds a lock on its ring for as long as it lives, and notes there when its record is whole. Must not touch the
record of a rank that may live, or raise.
"""

from __future__ import annotations

import fcntl
import logging
import time
from pathlib import Path
from typing import Final

from aorta.records.clocks import boot_id
from aorta.records.files import open_own
from aorta.records.progress import may_have_unread_rows, progress_files

_log = logging.getLogger(__name__)
_SURELY_DEAD_S: Final = 600.0
"""Since the last line of another host's record: its locks may not be seen from here."""


def salvage(folder: Path, problems: list[str] | None = None) -> int:
    """Complete the records of a run folder whose ranks were killed; returns how many steps were appended. Sentences
    about rings that cannot be used are added to `problems`.
    """
    messages = [] if problems is None else problems
    return sum(_salvaged(folder, path, messages) for path in progress_files(folder) if may_have_unread_rows(path))


def _salvaged(folder: Path, path: Path, problems: list[str]) -> int:
    from aorta.records.ring_record import RingRecord  # loads numpy, which not every run folder needs

    try:
        with open_own(path, existing=True) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            record = RingRecord(folder, path)
            try:
                process = record.ring.process
                elsewhere = process is None or process.boot_id != boot_id()
                if elsewhere and time.time() - record.path.stat().st_mtime < _SURELY_DEAD_S:
                    return 0
                record.claim(of_dead=True)
                count = record.append(late=True)
                record.ring.note_whole()
                record.ring.keep_progress()
            finally:
                record.close()
    except BlockingIOError:  # the rank lives, or another process is at it
        return 0
    except Exception as error:  # noqa: BLE001  a ring comes from elsewhere; what the record has is read all the same
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        problems.append(f"{path.name}: steps that its rank had finished may be missing: it cannot be used: {why}")
        _log.info("%s: nothing is taken from it: %s: %s", path, type(error).__name__, error)
        return 0
    if count:
        _log.info("%s: appended %d steps that the killed rank had not written", record.path, count)
    return count
