"""The steps of one rank, one at a time, as attribution looks at them: from a record, or from a trace.

Enters: a `RankSource`, which can go to another process, or the record of a trace. Leaves: `Look`s in order of global
step, times in absolute nanoseconds. Must not: hold more than one step of a record in memory.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from aorta.analysis.attribution.cells import Place
from aorta.analysis.attribution.charging import Row
from aorta.analysis.readers.scan import NULL, Ints
from aorta.analysis.traces.run import TraceRecord
from aorta.errors import InputError
from aorta.telemetry.reader import LINE_LIMIT
from aorta.telemetry.schema import AuxRange, Collective, ComputeRange, Stall
from aorta.timeline.classes import COMPUTE
from aorta.timeline.intervals import Interval

NOT_KNOWN: Final = -1
"""Of a wait, or of exposed communication."""
_CHANGED: Final = "another line stands there now"


class _Line(msgspec.Struct, gc=False):
    """As much of a step's line as attribution reads."""

    global_step: int
    collectives: list[Collective]
    compute: list[ComputeRange]
    stalls: list[Stall]
    aux: list[AuxRange]


_DECODER: Final = msgspec.json.Decoder(_Line)


@dataclass(frozen=True)
class StepTable:
    """One number a step. `rows_end`: collectives up to and with this step; the `_ns` of communication are -1 where the
    record says null.
    """

    global_step: Ints
    start_ns: Ints
    end_ns: Ints
    rows_end: Ints
    warmup: Ints
    comm_ns: Ints
    exposed_ns: Ints
    compute_ns: Ints


@dataclass(frozen=True)
class RankSource:
    """The record of one rank, and what of it was found out across ranks. It goes where a path goes: to an engine."""

    path: Path
    rank: int
    steps: StepTable
    line_offset: Ints
    waits: Ints
    """A collective's wait in ns, in order of step and issue; below 0 where it is not known."""
    sizes: Mapping[str, int]
    """Group -> how many ranks it has, as this rank means the name."""

    def stat(self) -> os.stat_result:
        """Of the file: an engine asks how much there is to read."""
        return self.path.stat()

    def absolute(self) -> RankSource:
        """The same for workers elsewhere."""
        return replace(self, path=self.path.absolute())


@dataclass(frozen=True)
class Look:
    """One step. The `_ns` of communication are those of the record, -1 where null; `ranges` are compute and work beside
    it. `used`: after warm-up.
    """

    window: Interval
    used: bool
    comm_ns: int
    exposed_ns: int
    compute_ns: int
    rows: list[Row]
    compute: list[Interval]
    stalls: list[Interval]
    ranges: list[tuple[int, int, Place]]


def looks_of_record(source: RankSource) -> Iterator[Look]:
    """Read the record again, step by step: only its columns were kept.

    Raises:
        InputError: the file cannot be read, or changed since.
    """
    steps, begin = source.steps, 0
    try:
        with source.path.open("rb", buffering=1 << 20) as file:
            for at, offset in enumerate(source.line_offset.tolist()):
                file.seek(offset)
                line = _DECODER.decode(file.readline(LINE_LIMIT))
                end = int(steps.rows_end[at])
                if line.global_step != steps.global_step[at] or len(line.collectives) != end - begin:
                    raise ValueError(_CHANGED)
                yield _look(steps, at, line, source.waits[begin:end].tolist())
                begin = end
    except (OSError, ValueError, msgspec.DecodeError) as error:
        raise InputError(
            f"{source.path.name}: cannot be read again to attribute its exposed communication ({error}) (in "
            f"{source.path.parent})"
        ) from error


def _look(steps: StepTable, at: int, line: _Line, waits: list[int]) -> Look:
    zero = int(steps.start_ns[at])
    orders: Counter[tuple[str, str]] = Counter()
    rows: list[Row] = []
    for row, wait in zip(line.collectives, waits, strict=True):
        order = orders[row.kind, row.group]
        orders[row.kind, row.group] += 1
        if row.start_ns is not None and row.end_ns is not None:
            span = zero + row.start_ns, zero + row.end_ns
            rows.append(Row(*span, row.kind, row.group, row.bytes, order, wait))
    blocks = [(zero + part.start_ns, zero + part.end_ns, Place(part.phase, part.block)) for part in line.compute]
    beside = [(zero + part.start_ns, zero + part.end_ns, Place(part.name, None)) for part in line.aux]
    compute = [(start, end) for start, end, _ in blocks]
    stalls = [(zero + part.start_ns, zero + part.end_ns) for part in line.stalls]
    return _seen(steps, at, rows, compute, stalls, [*blocks, *beside])


def looks_of_trace(record: TraceRecord, steps: StepTable, waits: Ints) -> Iterator[Look]:
    """The same of a trace: it tells when computation ran, but not of which block."""
    columns, stored = record.columns, record.stored
    whats, rows = stored.scan.whats, columns.rows(stored)
    segments = columns.store.read(record.segments_offset, 3 * record.segment_count, np.int64).reshape(-1, 3)
    computing = segments[segments[:, 2] & (1 << record.header.streams.index(COMPUTE)) != 0]
    begin = 0
    for at in range(len(steps.global_step)):
        zero, end = int(steps.start_ns[at]), int(steps.rows_end[at])
        orders: Counter[tuple[str, str]] = Counter()
        found: list[Row] = []
        for (what, _, _, low, high), wait in zip(rows[begin:end].tolist(), waits[begin:end].tolist(), strict=True):
            kind, group, size, _, _ = whats[what]
            if NULL not in (low, high):
                found.append(Row(zero + low, zero + high, kind, group, size, orders[kind, group], wait))
            orders[kind, group] += 1
        first, last = np.searchsorted(computing[:, 0], (zero, int(steps.end_ns[at])))
        spans = [(start, stop) for start, stop, _ in computing[first:last].tolist()]
        yield _seen(steps, at, found, spans, [], [])
        begin = end


def _seen(
    steps: StepTable,
    at: int,
    rows: list[Row],
    compute: list[Interval],
    stalls: list[Interval],
    ranges: list[tuple[int, int, Place]],
) -> Look:
    return Look(
        (int(steps.start_ns[at]), int(steps.end_ns[at])),
        not steps.warmup[at],
        int(steps.comm_ns[at]),
        int(steps.exposed_ns[at]),
        int(steps.compute_ns[at]),
        rows,
        compute,
        stalls,
        ranges,
    )
