"""Writes a trace file event by event; it appears under its name only when it is complete.

The file is JSON, compressed where its name ends in .gz. Must not: replace a file unless asked to, or leave an
incomplete one.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec

from aorta.errors import InputError
from aorta.records.whole_files import whole_file

_GZIP_LEVEL = 4
_BUFFER = 1 << 20


class TraceWriter:
    """Appends events; the file is well-formed once `finish` was called."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._encoder = msgspec.json.Encoder()
        self._buffer = bytearray(b'{"traceEvents":[\n')
        self._first = True
        self.count = 0

    def write(self, event: dict[str, Any]) -> None:
        """Write one event; undecoded values are written unchanged."""
        if not self._first:
            self._buffer += b",\n"
        self._first = False
        self.count += 1
        self._buffer += self._encoder.encode(event)
        if len(self._buffer) >= _BUFFER:
            self._file.write(self._buffer)
            self._buffer.clear()

    def finish(self, metadata: dict[str, Any]) -> None:
        """Write what stands behind the events."""
        self._buffer += b"\n]"
        for key, value in metadata.items():
            self._buffer += b",\n" + self._encoder.encode(key) + b":" + self._encoded(value)
        self._file.write(self._buffer + b"}\n")
        self._buffer.clear()

    def _encoded(self, value: Any) -> bytes:
        try:
            return self._encoder.encode(value)
        except UnicodeEncodeError:  # a path that is not UTF-8
            return json.dumps(value, default=_plain).encode()


def _plain(raw: object) -> Any:
    return json.loads(bytes(raw)) if isinstance(raw, msgspec.Raw) else str(raw)


@contextmanager
def trace_file(path: Path, *, overwrite: bool) -> Iterator[TraceWriter]:
    """A writer whose file appears under `path` when the block ends without an error.

    Raises:
        InputError: it exists and may not be replaced, or cannot be written.
    """
    if path.exists() and not overwrite:
        raise InputError(f"{path}: exists; --overwrite replaces it")
    if not path.name.endswith((".json", ".json.gz")):
        raise InputError(f"{path}: its name has to end in .json or .json.gz")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as part, part.open("wb") as raw:
            if path.name.endswith(".gz"):
                with gzip.GzipFile(filename="", mode="wb", fileobj=raw, compresslevel=_GZIP_LEVEL, mtime=0) as packed:
                    yield TraceWriter(cast(BinaryIO, packed))
            else:
                yield TraceWriter(raw)
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror or error}") from error
