"""Opens files, inflated on the fly, and reads SQLite files of other tools.

Two parts. *Streams*: local files, fsspec URLs, gzip files (recognised by their first bytes) and tar archives.

    with opened("traces/rank0.json.gz") as stream, reading("traces/rank0.json.gz"):
        first = stream.head()

A file that is compressed further than any trace is refused as a gzip bomb. *SQLite*: rows of stored tables in bounded
chunks, as integer columns and texts, executing nothing stored in the file. Columns that this version of the tool does
not write are `NULL`.

Must not: hold a whole file, write anything but a temporary copy that a library needs, trust a file's name, query a
view, a virtual table or a generated column (a hostile file could make them endless), or join in SQL: every query is one
pass over one stored table, so the file's size bounds its cost.
"""

from __future__ import annotations

import io
import shutil
import sqlite3
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, Final, cast

import numpy as np
from isal import igzip_lib, isal_zlib
from numpy.typing import NDArray

from aorta.analysis.load.interval_table import NULL
from aorta.errors import InputError
from aorta.records.files import NOT_UTF8, open_regular, remote_files
from aorta.timeline.arrays import Int64

_DAMAGED: Final = (zlib.error, cast("type[Exception]", igzip_lib.IsalError))
_TAKEN: Final = 1 << 16
_GZIP: Final = 31
"""`wbits` of zlib for gzip."""
GZIP_MAGIC: Final = b"\x1f\x8b"
SNIFF_BYTES: Final = 1 << 16
_COPIED: Final = 1 << 20
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

    def __init__(self, below: Any, count: Callable[[int], None]) -> None:
        self._below, self._count = below, count

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
        self._count(filled)
        return filled


class _Gzip:
    """The content of gzip members, one behind the other; zeros may follow. What precedes a cut is given first."""

    def __init__(self, below: IO[bytes]) -> None:
        self._below, self._member, self._rest = below, isal_zlib.decompressobj(_GZIP), b""

    def read(self, size: int) -> bytes:
        """Return up to `size` bytes; none at the end.

        Raises:
            EOFError: a member is cut off, or something else stands behind it.
        """
        while True:
            if self._member.eof:
                rest = self._member.unused_data.lstrip(b"\0")
                while not rest and (more := self._below.read(_TAKEN)):
                    rest = more.lstrip(b"\0")
                if not rest:
                    return b""
                if not rest.startswith(GZIP_MAGIC[: len(rest)]):
                    raise EOFError("bytes that are no gzip stand behind it")
                self._member, self._rest = isal_zlib.decompressobj(_GZIP), rest
            elif not self._rest:
                self._rest = self._below.read(_TAKEN)
                if not self._rest:
                    raise EOFError("it ends inside of a member")
            data: bytes = self._member.decompress(self._rest, size)
            self._rest = self._member.unconsumed_tail
            if data:
                return data


@dataclass
class _Ratio:
    """Counts compressed bytes read and inflated bytes produced, to detect a gzip bomb."""

    place: str
    taken: int = 0
    given: int = 0

    def take(self, count: int) -> None:
        """Count compressed bytes."""
        self.taken += count

    def give(self, count: int) -> None:
        """Count inflated bytes.

        Raises:
            InputError: it is a gzip bomb.
        """
        self.given += count
        if self.given > INFLATED_LIMIT and self.given > RATIO_LIMIT * self.taken:
            raise InputError(
                f"{self.place}: {self.taken} compressed bytes gave more than {self.given}: no trace is compressed that "
                "far, so it is not read on"
            )


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
        if is_url(location):
            with _fsspec_open(location) as raw, inflated(raw, location) as stream:
                yield stream
        else:
            with open_regular(Path(location)) as raw, inflated(raw, location) as stream:
                yield stream


@contextmanager
def inflated(raw: IO[bytes], place: str) -> Iterator[Peekable]:
    """Inflate the stream if it begins with gzip's magic number."""
    ratio = _Ratio(place)
    outer = Peekable(_Raw(raw, ratio.take), 1 << 18)
    if not outer.head().startswith(GZIP_MAGIC):
        yield outer
        return
    yield Peekable(_Raw(_Gzip(outer), ratio.give), 1 << 20)


@contextmanager
def local_copy(location: str) -> Iterator[Path]:
    """Yield a path that a library can open: the file, or a temporary copy of a URL or of the inflated content."""
    with opened(location) as stream:
        compressed = not is_url(location) and _starts_with_gzip(Path(location))
        if not is_url(location) and not compressed:
            yield Path(location)
            return
        with tempfile.TemporaryDirectory(prefix="aorta-") as folder:
            path = Path(folder, PurePosixPath(location).name or "trace")
            with path.open("wb") as file:
                shutil.copyfileobj(stream, file, _COPIED)
            yield path


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


def _starts_with_gzip(path: Path) -> bool:
    with open_regular(path) as file:
        return file.read(2) == GZIP_MAGIC


def _fsspec_open(location: str) -> Any:
    try:
        return remote_files(location).open(location, "rb")
    except (ImportError, ValueError) as error:
        raise InputError(f"{location}: no file system for this URL: {error}") from error


CHUNK: Final = 256
"""Rows held as Python objects at a time."""
_LONGEST_BYTES: Final = 1 << 18
"""Longest text of a row; the longest names of kernels have some 10,000 characters."""
_WORK_PER_BYTE: Final = 4
"""Instructions and bytes of text of one pass over a table: a row has five bytes or more, and two for each column."""


class Database:
    """A SQLite file opened read-only. Every failure inside becomes an `InputError` that names the file and the table.

    Args:
        path: of the file.
        place: the name used in errors (a URL, where `path` is its local copy).
    """

    def __init__(self, path: Path, place: str) -> None:
        self.place = place
        # A write-ahead log is part of the data. Without one, "immutable" keeps SQLite from writing beside the file.
        mode = "mode=ro" if path.with_name(path.name + "-wal").exists() else "mode=ro&immutable=1"
        try:
            self._connection = sqlite3.connect(f"{path.absolute().as_uri()}?{mode}", uri=True)
        except sqlite3.Error as error:
            raise InputError(f"{place}: not a SQLite database that can be read: {error}") from error
        try:
            self._work, self._most = 0, 1_000_000 + _WORK_PER_BYTE * path.stat().st_size
            self._connection.text_factory = self._text
            self._connection.set_progress_handler(self._is_endless, 1000)
            self._connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_BYTES)
            self._connection.execute("PRAGMA trusted_schema=OFF")
            self.tables = {
                name
                for name, sql in self._connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'")
                if isinstance(name, str) and not str(sql).lstrip().upper().startswith("CREATE VIRTUAL")
            }
        except (sqlite3.Error, UnicodeDecodeError) as error:
            self._connection.close()
            raise InputError(f"{place}: not a SQLite database that can be read: {str(error)[:200]}") from error

    def _is_endless(self, work: int = 1000) -> bool:
        self._work += work
        return self._work > self._most

    def _text(self, text: bytes) -> str:
        if self._is_endless(len(text)):
            raise sqlite3.DataError
        return text.decode("utf-8", NOT_UTF8)

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def columns(self, table: str) -> list[str]:
        """Return the names of a table's stored columns; empty where the table does not exist."""
        if table not in self.tables:
            return []
        with self._named(table):
            return [str(row[1]) for row in self._connection.execute(f"PRAGMA table_info({_quoted(table)})")]

    def rows(
        self, table: str, required: Sequence[str], optional: Sequence[str] = ()
    ) -> Iterator[list[tuple[object, ...]]]:
        """Yield chunks of rows: the `required` columns, then the `optional` ones. An optional column that does not
        exist is None.

        Raises:
            InputError: the table or a required column is missing, or the file is damaged.
        """
        present = self.columns(table)
        if missing := [name for name in required if name not in present]:
            raise InputError(
                f"{self.place}: table {table}: no column {', '.join(missing)}; it has {', '.join(present) or 'none'}. "
                "Was it written by another version of the tool?"
            )
        wanted = [*required, *(name if name in present else None for name in optional)]
        words = ", ".join("NULL" if name is None else _quoted(name) for name in wanted)
        self._work = 0
        with self._named(table):
            cursor = self._connection.execute(f"SELECT {words} FROM {_quoted(table)}")
            while chunk := cursor.fetchmany(CHUNK):
                yield chunk

    def integers(self, table: str, required: Sequence[str], optional: Sequence[str] = ()) -> dict[str, Int64]:
        """Read whole integer columns. SQL's NULL becomes `interval_table.NULL`, also in required columns.

        Raises:
            InputError: as `rows`, or a value is not an integer.
        """
        names = [*required, *optional]
        parts: list[list[Int64]] = [[] for _ in names]
        first = 1
        for chunk in self.rows(table, required, optional):
            for name, part, values in zip(names, parts, zip(*chunk, strict=True), strict=True):
                part.append(self._integers(table, name, first, values))
            first += len(chunk)
        return {
            name: np.concatenate(part) if part else np.zeros(0, np.int64)
            for name, part in zip(names, parts, strict=True)
        }

    def _integers(self, table: str, column: str, first: int, values: tuple[object, ...]) -> Int64:
        if set(map(type, values)) - {int, type(None)}:
            row, value = next((row, v) for row, v in enumerate(values, first) if type(v) not in (int, type(None)))
            raise InputError(
                f"{self.place}: table {table}, row {row}: {column} is {str(value)[:60]!r}; an integer is needed"
            )
        return np.array([NULL if value is None else value for value in values], dtype=np.int64)

    def integers_if_stored(self, table: str, required: Sequence[str], optional: Sequence[str] = ()) -> dict[str, Int64]:
        """Return what `integers` returns, without rows where the table was never created."""
        if table not in self.tables:
            return {column: np.zeros(0, np.int64) for column in (*required, *optional)}
        return self.integers(table, required, optional)

    def texts(self, table: str, key: str, value: str) -> dict[int, str]:
        """Map the column `key` to the text in `value`; rows that lack either are left out. Empty where the table was
        never created.

        Raises:
            InputError: as `rows`.
        """
        if table not in self.tables:
            return {}
        texts: dict[int, str] = {}
        for chunk in self.rows(table, (key, value)):
            texts.update((code, text) for code, text in chunk if isinstance(code, int) and isinstance(text, str))
        return texts

    @contextmanager
    def _named(self, table: str) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, UnicodeDecodeError, OverflowError) as error:
            why = "it has more rows than fit into the file" if self._work > self._most else str(error)[:200]
            raise InputError(f"{self.place}: table {table}: cannot be read: {why}") from error


def look_up(keys: Int64, ids: Int64, values: Int64) -> Int64:
    """Return `values` of the rows whose `ids` equal `keys`, `NULL` where there is none (a left outer join)."""
    if not len(ids):
        return np.full(len(keys), NULL, np.int64)
    order = np.argsort(ids, kind="stable")
    at = np.minimum(np.searchsorted(ids[order], keys), len(ids) - 1)
    return np.where(ids[order][at] == keys, values[order][at], NULL)


def rows_of(table: Mapping[str, Int64], rows: NDArray[Any]) -> dict[str, Int64]:
    """Return the rows of a table that a mask or indices select."""
    return {name: column[rows] for name, column in table.items()}


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
