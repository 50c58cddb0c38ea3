"""Opens other people's files with limits: local ones, fsspec URLs, gzip (by its first bytes, inflated on the fly), tar
archives, and SQLite with SQL over stored tables.

    with opened("traces/rank0.json.gz") as stream, reading("traces/rank0.json.gz"):
        first = stream.head()
    with closing(Database(path, "node.sqlite")) as db:
        ranges, strings = db.stored("NVTX_EVENTS", "start_ns=start", "textId"), db.stored("StringIds", "id value")
        db.select("NVTX_EVENTS", f"SELECT start_ns, value FROM {ranges} LEFT JOIN {strings} ON id = textId", {"value"})

A file that is compressed further than any trace is refused as a gzip bomb.

Must not: hold a whole file, write anything but a temporary copy that a library needs, or trust a file's name. Of a
database: name a table but by `Database.stored`, which leaves out views, virtual tables and generated columns (a hostile
file could make them endless), or join to every row a text that the file stores once: the size of the file bounds what a
query may cost.
"""

from __future__ import annotations

import io
import shutil
import sqlite3
import tarfile
import tempfile
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import compress
from pathlib import Path, PurePosixPath
from typing import IO, Any, Final, cast

import numpy as np
from isal import igzip_lib, isal_zlib
from numpy.typing import NDArray

from aorta.errors import InputError
from aorta.read.frames import Numbered
from aorta.read.traces.interval_table import NULL
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
MOST_NAMES, DEEPEST, _LONGEST_NAME = 100_000, 64, 4096
"""Files and folders of a folder or an archive of traces, folders in each other, and bytes of a name, at most."""
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

    def __init__(self, below: IO[bytes], origin: str) -> None:
        self._below, self._origin = below, origin
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
                    f"{self._origin}: {self._taken} compressed bytes gave more than {self._given}: no trace is "
                    "compressed that far, so it is not read on"
                )
            if data:
                return data


@contextmanager
def reading(origin: str) -> Iterator[None]:
    """Turn read errors inside the block into an `InputError` that names `origin`."""
    try:
        yield
    except EOFError as error:
        raise InputError(f"{origin}: its gzip stream is cut off ({error}); copy the file again") from error
    except _DAMAGED as error:
        raise InputError(f"{origin}: its gzip stream is damaged ({error}); copy the file again") from error
    except tarfile.TarError as error:
        raise InputError(f"{origin}: not a tar archive that can be read ({error})") from error
    except OSError as error:
        raise InputError(f"{origin}: cannot be read: {error.strerror or error}") from error


def is_url(location: str) -> bool:
    """Return whether fsspec opens it: it has a scheme before `://`, as a person types it. What is found on a disk never
    has: `Path` makes one slash of two.
    """
    return "://" in location


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
def inflated(raw: IO[bytes], origin: str) -> Iterator[Peekable]:
    """Inflate the stream if it begins with gzip's magic number."""
    outer = Peekable(_Raw(raw), 1 << 18)
    packed = outer.head().startswith(GZIP_MAGIC)
    yield Peekable(_Raw(_Gzip(outer, origin)), 1 << 20) if packed else outer


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


def is_tar(head: bytes) -> bool:
    """Return whether these are the first bytes of a tar archive (POSIX and GNU: `ustar` at byte 257)."""
    return head[257:262] == b"ustar"


def members(stream: IO[bytes], origin: str) -> Iterator[tuple[str, Peekable]]:
    """Yield every regular file of a tar archive, in order and inflated: its name (`archive!member`) and its content,
    which is valid until the next one is requested. Nothing is written to disk.

    Raises:
        InputError: a member is a link, a device, or names a path outside the archive; or they are more, or deeper, than
            those of any run.
    """
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for count, member in enumerate(archive, start=1):
            vars(archive)["members"].clear()  # tarfile keeps every name
            if count > MOST_NAMES or len(member.name) > _LONGEST_NAME or member.name.count("/") > DEEPEST:
                raise InputError(
                    f"{origin}: more than {MOST_NAMES} files and folders, or {DEEPEST} folders in each other; unpack "
                    "it, and give the folder of one run"
                )
            path = PurePosixPath(member.name.replace("\\", "/"))
            if path.is_absolute() or ".." in path.parts:
                raise InputError(f"{origin}!{member.name}: a member outside of its archive, which is not read")
            where = f"{origin}!{path}"
            if member.isdir():
                continue
            content = archive.extractfile(member) if member.isreg() else None
            if content is None:
                raise InputError(f"{where}: a link or a device, not a file; only archives of plain files are read")
            with inflated(content, where) as inner:
                yield where, inner
    while stream.read(_COPIED):
        pass  # gzip's checksum stands at its end, so read on to verify the archive


SQLITE_MAGIC: Final = b"SQLite format 3\x00"
_CHUNK: Final = 256
"""Rows held as Python objects at a time."""
_LONGEST_BYTES: Final = 1 << 18
"""Longest text of a row; the longest names of kernels have some 10,000 characters."""
_WORK_PER_BYTE: Final = 8
"""Most instructions, and bytes of text, of one query by the file's size: a row has five bytes or more, and takes two
instructions for each column and some ten for each row joined to it.
"""


class Database:
    """A SQLite file opened read-only. Every failure inside becomes an `InputError` that names the file and the table.

    Args:
        path: of the file.
        origin: the name used in errors (a URL, where `path` is its local copy).
    """

    def __init__(self, path: Path, origin: str) -> None:
        self.origin = origin
        # A write-ahead log is part of the data. Without one, "immutable" keeps SQLite from writing beside the file.
        mode = "mode=ro" if path.with_name(path.name + "-wal").exists() else "mode=ro&immutable=1"
        try:
            self._connection = sqlite3.connect(f"{path.absolute().as_uri()}?{mode}", uri=True)
        except sqlite3.Error as error:
            raise InputError(f"{origin}: not a SQLite database that can be read: {error}") from error
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
            raise InputError(f"{origin}: not a SQLite database that can be read: {str(error)[:200]}") from error

    def _is_endless(self, work: int = 1000) -> bool:
        self._work += work
        return self._work > self._most

    def _text(self, text: bytes) -> str:
        if self._is_endless(len(text)):
            raise sqlite3.DataError
        return text.decode("utf-8", NOT_UTF8)

    def close(self) -> None:
        self._connection.close()

    def stored(self, table: str, required: str, optional: str = "") -> str:
        """Return SQL to select from: the stored columns of a table. A table that was never created has no rows, an
        optional column that this version of the tool does not write is NULL.

        Args:
            required: names of columns with spaces between them, `start_ns=start` for one that is to be renamed.

        Raises:
            InputError: a required column is missing, or the file is damaged.
        """
        wanted = [name.rpartition("=")[::2] for name in f"{required} {optional}".split()]
        if table not in self.tables:
            return f"(SELECT {', '.join(f'NULL AS {_quoted(name or column)}' for name, column in wanted)} WHERE 0)"
        with self._named(table):
            present = [str(row[1]) for row in self._connection.execute(f"PRAGMA table_info({_quoted(table)})")]
        if missing := [column for _, column in wanted[: len(required.split())] if column not in present]:
            raise InputError(
                f"{self.origin}: table {table}: no column {', '.join(missing)}; it has {', '.join(present) or 'none'}. "
                "Was it written by another version of the tool?"
            )
        columns = (
            f"{_quoted(column) if column in present else 'NULL'} AS {_quoted(name or column)}"
            for name, column in wanted
        )
        return f"(SELECT {', '.join(columns)} FROM {_quoted(table)})"

    def columns(self, table: str, required: str, optional: str = "") -> dict[str, Any]:
        """Return integer columns of a table: arguments as `stored`, the rest as `select`."""
        return self.select(table, f"SELECT * FROM {self.stored(table, required, optional)}")

    def select(self, table: str, sql: str, texts: Collection[str] = ()) -> dict[str, Any]:
        """Run a query over what `stored` returned.

        Args:
            table: the one to name in errors.
            texts: the columns that are texts.

        Returns:
            Column -> its values: int64 with `interval_table.NULL` for SQL's NULL; a list of `str` for a column of
            texts, "" for what is none.

        Raises:
            InputError: a value is not an integer, or the file is damaged.
        """
        self._work, first = 0, 1
        with self._named(table):
            cursor = self._connection.execute(sql)
            names = [name for name, *_ in cursor.description]
            parts: list[list[Any]] = [[] for _ in names]
            while chunk := cursor.fetchmany(_CHUNK):
                for name, part, values in zip(names, parts, zip(*chunk, strict=True), strict=True):
                    if name in texts:
                        part += [value if isinstance(value, str) else "" for value in values]
                        continue
                    if set(map(type, values)) - {int, type(None)}:
                        row, value = next(
                            (index, v) for index, v in enumerate(values, first) if type(v) not in (int, type(None))
                        )
                        raise InputError(
                            f"{self.origin}: table {table}, row {row}: {name.removesuffix('_ns')} is "
                            f"{str(value)[:60]!r}; an integer is needed"
                        )
                    part.append(np.array([NULL if value is None else value for value in values], np.int64))
                first += len(chunk)
        return {
            name: part if name in texts else np.concatenate(part or [np.zeros(0, np.int64)])
            for name, part in zip(names, parts, strict=True)
        }

    def texts(self, table: str, key: str, value: str, other: str | None = None) -> dict[int, str]:
        """Map the column `key` to the text in `value`, or where that is empty in `other`. Empty where the table was
        never created.

        Raises:
            InputError: as `stored` and `select`.
        """
        text = value if other is None else f"COALESCE(NULLIF({value}, ''), {other})"
        stored = self.stored(table, f"{key} {value} {other or ''}")
        sql = f"SELECT {key} AS key, {text} AS text FROM {stored}"
        columns = self.select(table, f"{sql} WHERE typeof({key}) = 'integer'", {"text"})
        return dict(zip(columns["key"].tolist(), columns["text"], strict=True))

    @contextmanager
    def _named(self, table: str) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, UnicodeDecodeError, OverflowError) as error:
            why = "it has more rows than fit into the file" if self._work > self._most else str(error)[:200]
            raise InputError(f"{self.origin}: table {table}: cannot be read: {why}") from error


def rows_of(table: Mapping[str, Any], chosen: NDArray[np.bool_]) -> dict[str, Any]:
    """Return the rows of a table from `Database.select` that a mask selects."""
    if chosen.all():
        return dict(table)
    return {
        name: list(compress(column, chosen.tolist())) if isinstance(column, list) else column[chosen]
        for name, column in table.items()
    }


def joined(parts: Sequence[Mapping[str, Any]], *names: str) -> dict[str, Int64]:
    """Return columns that were collected piece by piece."""
    return {name: np.concatenate([np.zeros(0, np.int64), *(part[name] for part in parts)]) for name in names}


def coded(ids: Int64, texts: Mapping[int, str]) -> tuple[Int64, tuple[str, ...]]:
    """Return the code of the text of each id, `NULL` where it has none, and the texts by code."""
    names = Numbered()  # several ids may stand for one text
    present, where = np.unique(ids, return_inverse=True)
    codes = [names[text] if (text := texts.get(ident)) else NULL for ident in present.tolist()]
    return np.array(codes, np.int64)[where], tuple(names)


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
