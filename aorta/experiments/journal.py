"""A journal: a file of JSON lines that one process appends to, so that whatever was killed can be taken up again.

Plans and sweeps each have one (`plan_journal`, `sweep_journal`). A line is on the disk when `append` returns; one that
a kill cut short stays alone, and is left out when the journal is read.

    with closing(Journal(folder / "journal.jsonl", in_use="another process runs this plan")) as journal:
        journal.append(b'{"event": "open"}')

Must not know what the lines say, change a line that is there, or be written by two processes at once.
"""

from __future__ import annotations

import fcntl
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from aorta.errors import ConfigError, RecordWriteError
from aorta.records.untrusted_files import SMALL_BYTES, open_regular

T = TypeVar("T")


class Journal:
    """A journal open for appending, made where there is none, and locked against other processes.

    The lock is gone with `close`, with this object or with the process, however it ends. On a disk that has no locks
    there is none.

    Args:
        path: of the file. Its folder must be there.
        in_use: what to tell a person while another process holds the lock.

    Raises:
        ConfigError: another process holds it, or it cannot be opened.
    """

    def __init__(self, path: Path, in_use: str) -> None:
        self.path = path
        try:
            self._file = path.open("a+b", buffering=0)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from error
        self.close = weakref.finalize(self, self._file.close)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise ConfigError(f"{path.parent}: {in_use}") from None
        except OSError:  # a disk without locks
            pass

    def append(self, *lines: bytes) -> None:
        """Append lines, each without its line break; they are on the disk when this returns.

        Raises:
            RecordWriteError: the file cannot be written.
        """
        data = b"".join(line + b"\n" for line in lines)
        try:
            if self._torn():
                data = b"\n" + data
            while data:
                data = data[self._file.write(data) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            raise RecordWriteError(f"{self.path}: cannot be written: {error.strerror or error}") from error

    def _torn(self) -> bool:
        """Whether the last line has no end."""
        if not self._file.seek(0, os.SEEK_END):
            return False
        self._file.seek(-1, os.SEEK_END)
        return self._file.read(1) != b"\n"


def read_journal(path: Path, decode: Callable[[bytes], T]) -> tuple[list[T], list[str]]:
    """Read every line of a journal, also while another process writes it.

    Args:
        decode: one line to what it says; raises ValueError where it says nothing.

    Returns:
        What the lines say, and of each line that says nothing its number and why, as `journal.jsonl:7: ...`.

    Raises:
        OSError: the file cannot be read.
    """
    found, problems = [], []
    with open_regular(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(SMALL_BYTES), b""), start=1):
            try:
                found.append(decode(line.removesuffix(b"\n")))
            except (ValueError, RecursionError) as error:
                problems.append(f"{path.name}:{number}: {error}")
    return found, problems
