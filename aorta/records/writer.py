"""Append whole lines to one rank's record.

    with RecordWriter(path, rank) as record:
        record.write(header)
        record.write(step)

Every line of the file is whole, whatever happens to the process or the disk. Must not buffer (a killed run keeps what
it measured) or compute anything.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from aorta.errors import RecordWriteError
from aorta.records.schema import Line


class RecordWriter:
    """One open record. `write` either appends a whole line or leaves the file as it was and raises.

    Raises:
        RecordWriteError: the file cannot be created or extended; names rank, path and the system's reason.
    """

    def __init__(self, path: Path, rank: int) -> None:
        self.path, self.rank = path, rank
        self._encoder = msgspec.json.Encoder()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise self._failed(error) from error
        self._size = 0
        self._last = b""

    def write(self, line: Line) -> None:
        """Append `line`; a line the disk takes only in part is cut off again."""
        self._append(self._encoder.encode(line) + b"\n")

    def replace_last(self, line: Line) -> None:
        """Write `line` in place of the last one; the last one stays where the disk does not take it."""
        last = self._last
        os.ftruncate(self._file, self._size - len(last))
        self._size -= len(last)
        try:
            self.write(line)
        except RecordWriteError:
            self._append(last)
            raise

    def _append(self, data: bytes) -> None:
        try:
            written = 0
            while written < len(data):
                written += os.write(self._file, data[written:])
        except OSError as error:
            with suppress(OSError):  # the disk is gone: the reader skips a line that is cut off
                os.ftruncate(self._file, self._size)
            raise self._failed(error) from error
        self._size += len(data)
        self._last = data

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _failed(self, error: OSError) -> RecordWriteError:
        return RecordWriteError(
            f"rank {self.rank} cannot write its record {self.path}: {error.strerror or error}; what was written stays "
            "readable. Free some space or choose another folder with aorta.record(DIR) or training.output_dir=DIR"
        )
