"""Reads SQLite files of other tools with SQL over stored tables, into integer columns and texts.

    with closing(Database(path, "node.sqlite")) as db:
        ranges, strings = db.stored("NVTX_EVENTS", "start_ns=start", "textId"), db.stored("StringIds", "id value")
        db.select("NVTX_EVENTS", f"SELECT start_ns, value FROM {ranges} LEFT JOIN {strings} ON id = textId", {"value"})

Must not: name a table but by `Database.stored`, which leaves out views, virtual tables and generated columns (a hostile
file could make them endless), or join to every row a text that the file stores once: the size of the file bounds what a
query may cost.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import compress
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from aorta.analysis.load.interval_table import NULL, Interner
from aorta.errors import InputError
from aorta.records.files import NOT_UTF8
from aorta.timeline.arrays import Int64

MAGIC: Final = b"SQLite format 3\x00"
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
                f"{self.place}: table {table}: no column {', '.join(missing)}; it has {', '.join(present) or 'none'}. "
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
                    else:
                        part.append(self._integers(table, name.removesuffix("_ns"), first, values))
                first += len(chunk)
        return {
            name: part if name in texts else np.concatenate(part or [np.zeros(0, np.int64)])
            for name, part in zip(names, parts, strict=True)
        }

    def _integers(self, table: str, column: str, first: int, values: tuple[object, ...]) -> Int64:
        if set(map(type, values)) - {int, type(None)}:
            row, value = next((row, v) for row, v in enumerate(values, first) if type(v) not in (int, type(None)))
            raise InputError(
                f"{self.place}: table {table}, row {row}: {column} is {str(value)[:60]!r}; an integer is needed"
            )
        return np.array([NULL if value is None else value for value in values], dtype=np.int64)

    def texts(self, table: str, key: str, value: str, other: str | None = None) -> dict[int, str]:
        """Map the column `key` to the text in `value`, or where that is empty in `other`. Empty where the table was
        never created.

        Raises:
            InputError: as `stored` and `select`.
        """
        text = value if other is None else f"COALESCE(NULLIF({value}, ''), {other})"
        stored = self.stored(table, f"{key} {value} {other or ''}")
        sql = f"SELECT {key} AS key, {text} AS text FROM {stored}"
        found = self.select(table, f"{sql} WHERE typeof({key}) = 'integer'", {"text"})
        return dict(zip(found["key"].tolist(), found["text"], strict=True))

    @contextmanager
    def _named(self, table: str) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, UnicodeDecodeError, OverflowError) as error:
            why = "it has more rows than fit into the file" if self._work > self._most else str(error)[:200]
            raise InputError(f"{self.place}: table {table}: cannot be read: {why}") from error


def rows_of(table: Mapping[str, Any], chosen: NDArray[np.bool_]) -> dict[str, Any]:
    """Return the rows of a table from `Database.select` that a mask selects."""
    if chosen.all():
        return dict(table)
    return {
        name: list(compress(column, chosen.tolist())) if isinstance(column, list) else column[chosen]
        for name, column in table.items()
    }


def coded(ids: Int64, texts: Mapping[int, str]) -> tuple[Int64, tuple[str, ...]]:
    """Return the code of the text of each id, `NULL` where it has none, and the texts by code."""
    names = Interner()  # several ids may stand for one text
    present, where = np.unique(ids, return_inverse=True)
    codes = [names(text) if (text := texts.get(ident)) else NULL for ident in present.tolist()]
    return np.array(codes, np.int64)[where], names.strings


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
