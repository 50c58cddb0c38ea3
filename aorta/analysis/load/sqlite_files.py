"""Reads SQLite files of other tools as integer columns and texts, without executing anything stored in the file.

Yields the rows of stored tables in bounded chunks; columns that this version of the tool does not write are `NULL`.
Must not: query a view, a virtual table or a generated column (a hostile file could make them endless), or join in SQL:
every query is one pass over one stored table, so its cost is bounded by the size of the file.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np

from aorta.analysis.load.interval_table import NULL
from aorta.errors import InputError
from aorta.timeline.arrays import Int64

CHUNK: Final = 16_384
"""Rows held as Python objects at a time."""
_LONGEST_BYTES: Final = 1 << 20
"""Longest text of a row; the longest names of kernels have some 10,000 characters."""


class Database:
    """A SQLite file opened read-only. Every failure inside becomes an `InputError` that names the file
    and the table.
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

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def columns(self, table: str) -> list[str]:
        """Names of a table's stored columns; empty where the table does not exist."""
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
        with self._named(table):
            cursor = self._connection.execute(f"SELECT {words} FROM {_quoted(table)}")
            while chunk := cursor.fetchmany(CHUNK):
                yield chunk

    def integers(self, table: str, required: Sequence[str], optional: Sequence[str] = ()) -> dict[str, Int64]:
        """Whole integer columns. SQL's NULL becomes `interval_table.NULL`, also in required columns.

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

    def texts(self, table: str, key: str, value: str) -> dict[int, str]:
        """Map the column `key` to the text in `value`; rows that lack either are left out.

        Raises:
            InputError: as `rows`.
        """
        found: dict[int, str] = {}
        for chunk in self.rows(table, (key, value)):
            found.update((code, text) for code, text in chunk if isinstance(code, int) and isinstance(text, str))
        return found

    @contextmanager
    def _named(self, table: str) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, UnicodeDecodeError, OverflowError) as error:
            raise InputError(f"{self.place}: table {table}: cannot be read: {str(error)[:200]}") from error


@contextmanager
def database(path: Path, place: str) -> Iterator[Database]:
    """Open a `Database` and close it at the end. `place` is the name used in errors (a URL, where `path` is its local
    copy).
    """
    opened = Database(path, place)
    try:
        yield opened
    finally:
        opened.close()


def look_up(keys: Int64, ids: Int64, values: Int64) -> Int64:
    """`values` of the rows whose `ids` equal `keys`, `NULL` where there is none (a left outer join)."""
    if not len(ids):
        return np.full(len(keys), NULL, np.int64)
    order = np.argsort(ids, kind="stable")
    at = np.minimum(np.searchsorted(ids[order], keys), len(ids) - 1)
    return np.where(ids[order][at] == keys, values[order][at], NULL)


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
