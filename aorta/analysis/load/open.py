"""Opens local files, fsspec URLs, gzip files (recognised by their first bytes) and tar archives, inflated on the fly.

    with opened("traces/rank0.json.gz") as stream, reading("traces/rank0.json.gz"):
        first = stream.head()

A file that is compressed further than any trace is refused as a gzip bomb.

Must not: hold a whole file, write anything but a temporary copy that a library needs, or trust a file's name.
"""

from __future__ import annotations

import csv
import io
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Any, Final, cast

from isal import igzip_lib, isal_zlib

from aorta.errors import InputError
from aorta.records.files import NOT_UTF8, open_regular, remote_files

_DAMAGED: Final = (zlib.error, cast("type[Exception]", igzip_lib.IsalError))
_TAKEN: Final = 1 << 16
_GZIP: Final = 31
"""`wbits` of zlib for gzip."""
GZIP_MAGIC: Final = b"\x1f\x8b"
SNIFF_BYTES: Final = 1 << 16
_COPIED: Final = 1 << 20
LONGEST_LINE: Final = 4 << 20
_LONGEST_FIELD: Final = 1 << 20
"""Of CSV: demangled kernel names reach tens of thousands of characters."""
INFLATED_LIMIT: Final = 256 << 20
RATIO_LIMIT: Final = 200
"""Traces shrink by a factor of 10 to 40; deflate can reach 1,032. Beyond both limits a file is taken
for a gzip bomb.
"""


class Peekable(io.BufferedReader):
    """A buffered stream whose first `SNIFF_BYTES` can be inspected without consuming them."""

    def head(self) -> bytes:
        """Return the first bytes, `SNIFF_BYTES` if the stream is not shorter. Call it before reading anything."""
        return self.peek(SNIFF_BYTES)[:SNIFF_BYTES]


class _Raw(io.RawIOBase):
    """Any binary file as a raw stream that fills its reader's buffer, however short the underlying reads are."""

    def __init__(self, below: Any) -> None:
        self._below = below

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view, filled = memoryview(buffer).cast("B"), 0
        while filled < len(view):
            try:
                data = self._below.read(len(view) - filled)
            except EOFError:
                if not filled:  # what came before the end is given first
                    raise
                break
            if not data:
                break
            view[filled : filled + len(data)] = data
            filled += len(data)
        return filled


class _Gzip:
    """The content of gzip members, one behind the other; zeros may follow. What precedes a cut is given first."""

    def __init__(self, below: IO[bytes], place: str) -> None:
        self._below, self._place = below, place
        self._member, self._rest = isal_zlib.decompressobj(_GZIP), b""
        self._taken = self._given = 0

    def _take(self) -> bytes:
        taken = self._below.read(_TAKEN)
        self._taken += len(taken)
        return taken

    def read(self, size: int) -> bytes:
        """Return up to `size` bytes; none at the end.

        Raises:
            EOFError: a member is cut off, or something else stands behind it.
            InputError: it is a gzip bomb.
        """
        while True:
            if self._member.eof:
                rest = self._member.unused_data.lstrip(b"\0")
                while not rest and (more := self._take()):
                    rest = more.lstrip(b"\0")
                if not rest:
                    return b""
                if not rest.startswith(GZIP_MAGIC[: len(rest)]):
                    raise EOFError("bytes that are no gzip stand behind it")
                self._member, self._rest = isal_zlib.decompressobj(_GZIP), rest
            elif not self._rest:
                self._rest = self._take()
                if not self._rest:
                    raise EOFError("it ends inside of a member")
            data: bytes = self._member.decompress(self._rest, size)
            self._rest = self._member.unconsumed_tail
            self._given += len(data)
            if self._given > INFLATED_LIMIT and self._given > RATIO_LIMIT * self._taken:
                raise InputError(
                    f"{self._place}: {self._taken} compressed bytes gave more than {self._given}: no trace is "
                    "compressed that far, so it is not read on"
                )
            if data:
                return data


@contextmanager
def reading(place: str) -> Iterator[None]:
    """Turn read errors inside the block into an `InputError` that names `place`."""
    try:
        yield
    except EOFError as error:
        raise InputError(f"{place}: its gzip stream is cut off ({error}); copy the file again") from error
    except _DAMAGED as error:
        raise InputError(f"{place}: its gzip stream is damaged ({error}); copy the file again") from error
    except tarfile.TarError as error:
        raise InputError(f"{place}: not a tar archive that can be read ({error})") from error
    except OSError as error:
        raise InputError(f"{place}: cannot be read: {error.strerror or error}") from error


def is_url(location: str) -> bool:
    """Return whether fsspec opens it: it has a scheme before `://`, or a chain of them."""
    return "://" in location or "::" in location


@contextmanager
def opened(location: str) -> Iterator[Peekable]:
    """Open a file or URL, inflated if it is gzip.

    Raises:
        InputError: it cannot be opened or read, also while the stream is in use.
    """
    with reading(location):
        try:
            file = remote_files(location).open(location, "rb") if is_url(location) else open_regular(Path(location))
        except (ImportError, ValueError) as error:
            raise InputError(f"{location}: no file system for this URL: {error}") from error
        with file as raw, inflated(raw, location) as stream:
            yield stream


@contextmanager
def inflated(raw: IO[bytes], place: str) -> Iterator[Peekable]:
    """Inflate the stream if it begins with gzip's magic number."""
    outer = Peekable(_Raw(raw), 1 << 18)
    packed = outer.head().startswith(GZIP_MAGIC)
    yield Peekable(_Raw(_Gzip(outer, place)), 1 << 20) if packed else outer


@contextmanager
def local_copy(location: str) -> Iterator[Path]:
    """Yield a path that a library can open: the file, or a temporary copy of a URL or of the inflated content."""
    if not is_url(location):
        with reading(location), open_regular(Path(location)) as file:
            packed = file.read(len(GZIP_MAGIC)) == GZIP_MAGIC
        if not packed:
            yield Path(location)
            return
    with opened(location) as stream, tempfile.TemporaryDirectory(prefix="aorta-") as folder:
        path = Path(folder, PurePosixPath(location).name or "trace")
        with path.open("wb") as copy:
            shutil.copyfileobj(stream, copy, _COPIED)
        yield path


def csv_rows(stream: IO[bytes], place: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows of a CSV file that are not empty, each with the number of the line on which it ends.

    Raises:
        InputError: it is not CSV, or a line is too long: one that never ends must not be read into memory.
    """

    def lines() -> Iterator[str]:
        number = 0
        while line := stream.readline(LONGEST_LINE):
            number += 1
            if len(line) == LONGEST_LINE:
                raise InputError(f"{place}:{number}: a line of more than {LONGEST_LINE} bytes: not a CSV trace")
            yield line.decode("utf-8-sig" if number == 1 else "utf-8", NOT_UTF8)

    csv.field_size_limit(_LONGEST_FIELD)
    reader = csv.reader(lines(), strict=True)
    try:
        for row in reader:
            if row:
                yield reader.line_num, row
    except csv.Error as error:
        raise InputError(f"{place}:{reader.line_num}: not CSV: {error}") from error


def is_tar(head: bytes) -> bool:
    """Return whether these are the first bytes of a tar archive (POSIX and GNU: `ustar` at byte 257)."""
    return head[257:262] == b"ustar"


def members(stream: IO[bytes], place: str) -> Iterator[tuple[str, Peekable]]:
    """Yield every regular file of a tar archive, in order and inflated: its name (`archive!member`) and its content,
    which is valid until the next one is requested. Nothing is written to disk.

    Raises:
        InputError: a member is a link, a device, or names a path outside the archive.
    """
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            where = f"{place}!{member_path(place, member.name)}"
            if member.isdir():
                continue
            content = archive.extractfile(member) if member.isreg() else None
            if content is None:
                raise InputError(f"{where}: a link or a device, not a file; only archives of plain files are read")
            with inflated(content, where) as inner:
                yield where, inner
    while stream.read(_COPIED):
        pass  # gzip's checksum stands at its end, so read on to verify the archive


def member_path(place: str, name: str) -> PurePosixPath:
    """Return where a member lies inside its archive.

    Raises:
        InputError: it lies outside.
    """
    path = PurePosixPath(name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts:
        raise InputError(f"{place}!{name}: a member outside of its archive, which is not read")
    return path
