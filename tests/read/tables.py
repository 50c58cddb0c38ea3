"""Traces for tests: rows as tuples, for what comes after the readers; and files read by a reader."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import IO, Any

import numpy as np

from aorta.read.frames import Numbered
from aorta.read.traces.interval_table import (
    KIND_CODE,
    NO_WINDOWS,
    NULL,
    IntervalClass,
    Intervals,
    Trace,
    step_of,
    windows,
)
from aorta.read.traces.open import Database
from aorta.read.traces.reader import Reader, TraceInput
from aorta.records.schema import Header
from aorta.timeline.classes import KINDS

COMPUTE, COMM, COPY, UNKNOWN = (
    IntervalClass.COMPUTE,
    IntervalClass.COMM,
    IntervalClass.COPY,
    IntervalClass.UNKNOWN,
)


def row(
    cls: IntervalClass,
    start: int,
    end: int,
    *,
    name: str = "k",
    kind: str | None = None,
    device: int = 0,
    stream: int = 0,
    rank: int = 0,
) -> dict[str, Any]:
    return locals()


def trace(rows: Sequence[Mapping[str, Any]], *, steps: Sequence[tuple[int, int, int]] = (), **facts: Any) -> Trace:
    """A trace of these rows. `steps`: (number, start, end) on the rank of the first row."""
    names = Numbered()
    marks = windows(*zip(*steps, strict=True)) if steps else NO_WINDOWS
    columns = {
        "start_ns": [each["start"] for each in rows],
        "end_ns": [each["end"] for each in rows],
        **{name: [each[name] for each in rows] for name in ("device", "stream", "cls")},
        "kind": [KIND_CODE[each["kind"]] if each["kind"] else NULL for each in rows],
        "name": [names[each["name"]] for each in rows],
        **{name: [NULL] * len(rows) for name in ("group", "seq", "bytes")},
    }
    arrays = {name: np.array(values, np.int64) for name, values in columns.items()}
    table = Intervals(**arrays, step=step_of(arrays["start_ns"], marks), names=tuple(names), groups=())
    given = {"path": "hand-made", "format": "kineto", "clock": "REALTIME", "rank": rows[0]["rank"] if rows else 0}
    return Trace(intervals=table, windows=marks, group_ranks={}, **given | facts)


def rows(trace: Trace, columns: Sequence[str], base_ns: int = 0) -> list[list[Any]]:
    """Cells of each row; times from the base."""
    table = trace.intervals

    def text(of: Any, code: int) -> str | None:
        return None if code == NULL else of[code]

    cells: dict[str, Callable[[int], Any]] = {
        "name": lambda at: table.names[table.name[at]],
        "class": lambda at: IntervalClass(int(table.cls[at])).name.lower(),
        "kind": lambda at: text(KINDS, table.kind[at]),
        "group": lambda at: text(table.groups, table.group[at]),
        "dtype": lambda at: text(table.dtypes, table.dtype[at]),
        "start": lambda at: int(table.start_ns[at]) - base_ns,
        "end": lambda at: int(table.end_ns[at]) - base_ns,
        **{
            name: lambda at, name=name: None if (value := getattr(table, name)[at]) == NULL else int(value)
            for name in ("stream", "device", "step", "bytes", "seq", "launch_ns")
        },
    }
    return [[cells[column](at) for column in columns] for at in range(len(table))]


def read_with(
    reader: Reader, what: Path | Mapping[str, bytes | IO[bytes]], headers: Sequence[Header] = ()
) -> list[Trace]:
    """What a reader gives for a database, or for the files of a process by name."""
    if isinstance(what, Path):
        with what.open("rb") as stream, closing(Database(what, str(what))) as database:
            return list(reader.read(TraceInput({str(what): stream}, headers=headers, database=database)))
    streams = {name: io.BytesIO(data) if isinstance(data, bytes) else data for name, data in what.items()}
    return list(reader.read(TraceInput(streams, headers=headers)))
