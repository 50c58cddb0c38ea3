"""Hand-made interval tables: rows as tuples, for tests of what comes after the readers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aorta.analysis.load.interval_table import (
    KIND_CODE,
    NO_WINDOWS,
    NULL,
    Interner,
    IntervalClass,
    Trace,
    Windows,
    intervals,
    step_of,
    windows,
)

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
    group: str | None = None,
    seq: int = NULL,
    size: int = NULL,
    rank: int = 0,
) -> dict[str, Any]:
    return locals()


def trace(
    rows: Sequence[Mapping[str, Any]],
    *,
    steps: Sequence[tuple[int, int, int]] = (),
    groups: Mapping[str, tuple[int, ...]] | None = None,
    **facts: Any,
) -> Trace:
    """A trace of these rows. `steps`: (number, start, end) on the rank of the first row."""
    names, group_names = Interner(), Interner()
    rank = rows[0]["rank"] if rows else 0
    marks: Windows = NO_WINDOWS
    if steps:
        number, start, end = zip(*steps, strict=True)
        marks = windows(rank, number, start, end)
    table = intervals(
        start_ns=[each["start"] for each in rows],
        end_ns=[each["end"] for each in rows],
        rank=[each["rank"] for each in rows],
        device=[each["device"] for each in rows],
        stream=[each["stream"] for each in rows],
        cls=[each["cls"] for each in rows],
        kind=[KIND_CODE[each["kind"]] if each["kind"] else NULL for each in rows],
        group=[group_names(each["group"]) if each["group"] else NULL for each in rows],
        seq=[each["seq"] for each in rows],
        bytes=[each["size"] for each in rows],
        name=[names(each["name"]) for each in rows],
    )
    from dataclasses import replace

    table = replace(
        table,
        names=names.strings,
        groups=group_names.strings,
        step=step_of(table.rank, table.start_ns, marks) if steps else table.step,
    )
    given = {"path": "hand-made", "format": "kineto", "clock": "REALTIME", "ranks": (rank,), **facts}
    return Trace(intervals=table, windows=marks, group_ranks=groups or {}, **given)
