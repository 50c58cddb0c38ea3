"""Reads SQLite files of other tools: rows of stored tables in bounded chunks, as integer columns and texts, executing
nothing stored in the file. Columns that this version of the tool does not write are `NULL`.

Must not: query a view, a virtual table or a generated column (a hostile file could make them endless), or join in SQL:
every query is one pass over one stored table, so the file's size bounds its cost.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from aorta.analysis.load.interval_table import NULL
from aorta.errors import InputError
from aorta.records.files import NOT_UTF8
from aorta.timeline.arrays import Int64

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


def rows_of(table: Mapping[str, Int64], rows: NDArray[Any]) -> dict[str, Int64]:
    """Return the rows of a table that a mask or indices select."""
    return {name: column[rows] for name, column in table.items()}


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
