"""Append whole lines to one rank's record.

    with RecordWriter(path, rank) as record:
        record.write(header)
        record.write(step)

Every line of the file is whole, whatever happens to the process or the disk. Must not buffer (a killed run keeps what
it measured) or compute anything but the number of steps.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import msgspec

from aorta.errors import RecordWriteError
from aorta.records.files import OF_THIS_PROCESS
from aorta.records.schema import Footer, Line, Step
from aorta.redaction import redact

_LINES_TO_DROP: Final = 64
"""At most so many lines make room for the last one."""


class RecordWriter:
    """One open record. `write` either appends a whole line or leaves the file as it was and raises.

    Attributes:
        steps_written: how many steps the file holds.

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
        OF_THIS_PROCESS.add(self._file)
        self._size = self.steps_written = 0
        self._last = b""
        self._before: deque[tuple[int, int]] = deque(maxlen=_LINES_TO_DROP)
        """Size and steps of the file before each of its last lines."""

    def write(self, line: Line) -> None:
        """Append `line`, without secrets; a line the disk takes only in part is cut off again."""
        self._append(self._encoded(line), steps=isinstance(line, Step))

    def write_last(self, footer: Callable[[int], Footer]) -> Footer:
        """Write and return the footer for as many steps as the file holds; on a full disk in place of as many of the
        lines before it as make room.
        """
        end = self._size
        while True:
            line = footer(self.steps_written)
            data = self._encoded(line)
            try:
                self._append(data)
                return line
            except RecordWriteError:
                if end - self._size >= len(data) or len(self._before) < 2:  # the header stays
                    raise
                self._drop()

    def _encoded(self, line: Line) -> bytes:
        data = self._encoder.encode(line) + b"\n"
        return data if isinstance(line, Step) else redact(data.decode()).encode()

    def replace_last(self, line: Line) -> None:
        """Write `line` in place of the last one; the last one stays where the disk does not take it."""
        last = self._last
        self._drop()
        try:
            self.write(line)
        except RecordWriteError:
            self._append(last)
            raise

    def _drop(self) -> None:
        self._size, self.steps_written = self._before.pop()
        with suppress(OSError):  # the disk is gone: the line stays, as a whole
            os.ftruncate(self._file, self._size)

    def _append(self, data: bytes, steps: int = 0) -> None:
        try:
            written = 0
            while written < len(data):
                written += os.write(self._file, data[written:])
        except OSError as error:
            with suppress(OSError):  # the disk is gone: the reader skips a line that is cut off
                os.ftruncate(self._file, self._size)
            raise self._failed(error) from error
        self._before.append((self._size, self.steps_written))
        self._size += len(data)
        self.steps_written += steps
        self._last = data

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._file >= 0:
            OF_THIS_PROCESS.discard(self._file)
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
