"""Defines the interval table: what every trace reader returns, whatever tool recorded the trace.

A `Trace` is of one process: one row per interval (`Intervals`), the windows of its steps (`Windows`) and facts about
its source. All columns are integers, times in int64 ns; `NULL` (-1) means "unknown" in every column that allows it.
Strings are stored once, in tables indexed by codes.

Must not: hold a Python object per row, merge devices with each other (W15), or sum lengths of intervals that may
overlap (W10).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from aorta.analysis.frames import UNKNOWN
from aorta.analysis.groups import Groups
from aorta.redaction import redact
from aorta.timeline.arrays import Int64, Spans
from aorta.timeline.classes import KINDS

Clock: TypeAlias = Literal["REALTIME", "BOOTTIME", "unknown"]
"""The clock of the nanoseconds. `unknown`: only differences within one trace are meaningful."""

NULL: Final = UNKNOWN


class IntervalClass(IntEnum):
    """What an interval is. Rows of class `UNKNOWN` are counted in the health of a result and among the kernels, and
    in no metric.
    """

    COMPUTE = 0
    COMM = 1
    COPY = 2
    UNKNOWN = 3


KIND_CODE: Final[Mapping[str, int]] = {kind: code for code, kind in enumerate(KINDS)}
"""Kind of collective -> its code in the column `kind`."""
_OF_PAIRS: Final = (KIND_CODE["send"], KIND_CODE["recv"])

_TYPES: Final[dict[str, type[np.signedinteger[Any]]]] = {
    "device": np.int32,
    "stream": np.int64,
    "cls": np.int8,
    "kind": np.int8,
    "group": np.int32,
    "seq": np.int64,
    "bytes": np.int64,
    "dtype": np.int16,
    "start_ns": np.int64,
    "end_ns": np.int64,
    "step": np.int64,
    "name": np.int32,
    "launch_ns": np.int64,
    "origin": np.int64,
    "operator": np.int64,
}
COLUMNS: Final = tuple(_TYPES)


class Interner:
    """Assigns strings codes in order of first appearance."""

    def __init__(self) -> None:
        self.codes: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        return self.codes.setdefault(text, len(self.codes))

    @property
    def strings(self) -> tuple[str, ...]:
        """The string table, indexed by code."""
        return tuple(self.codes)


@dataclass(frozen=True)
class Intervals:
    """One row per interval `[start_ns, end_ns)`; all columns have the same length.

    Attributes:
        device: index as the source gives it (not the local rank), or `NULL`.
        stream: stream, queue or thread number as the source gives it, or `NULL`.
        cls: an `IntervalClass`.
        kind: `KIND_CODE`, or `NULL` where it is no collective or its kind is unknown.
        group: code into `groups`.
        seq: sequence number of the collective in its group.
        bytes: size of the full array of a collective (for all-to-all, one rank's send buffer), or the bytes moved by a
            copy.
        dtype: code into `dtypes`.
        step: the window in which the interval starts, or `NULL` outside all windows.
        name: code into `names`.
        launch_ns: when the host began the call that launched it, on the clock of the rows, or `NULL`.
        origin: what the source knows it by elsewhere, or `NULL`: Kineto's `External id` of the host operator,
            rocprofv3's dispatch id. `Trace.gemms` and `Trace.hardware_counters` refer to it.
        operator: number of the operator whose self time the row is a part of, where others nested in it cut that into
            several rows (the host's rows of a CPU trace); `NULL` where a row is whole.
    """

    device: NDArray[np.int32]
    stream: Int64
    cls: NDArray[np.int8]
    kind: NDArray[np.int8]
    group: NDArray[np.int32]
    seq: Int64
    bytes: Int64
    dtype: NDArray[np.int16]
    start_ns: Int64
    end_ns: Int64
    step: Int64
    name: NDArray[np.int32]
    launch_ns: Int64
    origin: Int64
    operator: Int64
    names: tuple[str, ...]
    groups: tuple[str, ...]
    dtypes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.start_ns)

    @property
    def spans(self) -> Spans:
        """Return start and end of every row."""
        return Spans(self.start_ns, self.end_ns)

    def take(self, rows: NDArray[Any] | slice) -> Intervals:
        """Select rows by mask, index or slice; the string tables stay."""
        return replace(self, **{name: getattr(self, name)[rows] for name in COLUMNS})


def intervals(
    *,
    start_ns: ArrayLike,
    end_ns: ArrayLike,
    names: Sequence[str] = (),
    groups: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    **columns: ArrayLike,
) -> Intervals:
    """Build a table from columns. A scalar fills its column; a column left out is `NULL` throughout (`cls`:
    `IntervalClass.UNKNOWN`).

    Raises:
        ValueError: a column does not exist, has another length, or holds values that its type cannot represent.
    """
    given: dict[str, ArrayLike] = {"start_ns": start_ns, "end_ns": end_ns, **columns}
    if unknown := given.keys() - _TYPES.keys():
        raise ValueError(f"no such columns: {sorted(unknown)}; the columns are {', '.join(COLUMNS)}")
    length = len(np.asarray(start_ns))
    made = {}
    for name, wanted in _TYPES.items():
        values = np.asarray(given.get(name, int(IntervalClass.UNKNOWN) if name == "cls" else NULL))
        if values.dtype.kind not in "iub" and values.size:
            raise ValueError(f"column {name}: integers wanted, not {values.dtype}")
        allowed = np.iinfo(wanted)
        if values.size and not allowed.min <= int(values.min()) <= int(values.max()) <= allowed.max:
            raise ValueError(f"column {name}: values beyond {values.dtype.name} -> {np.dtype(wanted).name}")
        column = np.broadcast_to(values.astype(wanted, copy=False), (length,)) if values.ndim == 0 else values
        if column.shape != (length,):
            raise ValueError(f"column {name}: {column.shape} values for {length} intervals")
        made[name] = column.astype(wanted, copy=False)
    return Intervals(**made, names=tuple(map(redact, names)), groups=tuple(groups), dtypes=tuple(dtypes))


def concatenate(parts: Sequence[Intervals]) -> Intervals:
    """Concatenate tables and join their string tables."""
    if len(parts) == 1:
        return parts[0]
    made: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in parts]) if parts else np.zeros(0, _TYPES[name])
        for name in COLUMNS
    }
    for codes, table in (("name", "names"), ("group", "groups"), ("dtype", "dtypes")):
        interner = Interner()
        moved = []
        for part in parts:
            new = np.array([*map(interner, getattr(part, table)), NULL], dtype=_TYPES[codes])
            moved.append(new[getattr(part, codes)])  # NULL (-1) indexes the last entry
        made |= {table: interner.strings} | ({codes: np.concatenate(moved)} if moved else {})
    return Intervals(**made)


def operations(table: Intervals) -> Groups:
    """Group the rows of one trace into operations: rows of one `operator`, and every row without by itself."""
    number = np.arange(len(table))
    return Groups(np.where(table.operator == NULL, number, len(table) + table.operator))


def collectives_of(table: Intervals) -> Intervals:
    """Return one row for each collective among rows of communication: an all-to-all may be a kernel for each peer, a
    collective of copy engines several copies. Rows belong together that have one kind, group, device and step, and one
    sequence number and operator; of an all-to-all either suffices. Sends and receives stay as they are.
    """
    exchange, numbered, launched = table.kind == KIND_CODE["alltoall"], table.seq != NULL, table.origin != NULL
    joins = (exchange & (numbered | launched)) | (numbered & launched & ~np.isin(table.kind, _OF_PAIRS))
    operator = np.where(exchange & numbered, NULL, table.origin)
    alone = np.where(joins, NULL, np.arange(len(table)))
    found = Groups(table.device, table.step, table.kind, table.group, table.seq, operator, alone)
    if len(found.starts) == len(table):
        return table
    start, end = found.reduce(np.minimum, table.start_ns), found.reduce(np.maximum, table.end_ns)
    return replace(table.take(found.first), start_ns=start, end_ns=end)


@dataclass(frozen=True)
class Windows:
    """Steps as the source marks them, sorted by their start. `step` is the source's own number."""

    step: Int64
    start_ns: Int64
    end_ns: Int64

    def __len__(self) -> int:
        return len(self.step)


def windows(step: ArrayLike, start_ns: ArrayLike, end_ns: ArrayLike) -> Windows:
    """Build sorted windows."""
    order = np.argsort(np.asarray(start_ns, np.int64), kind="stable")
    return Windows(*(np.asarray(column, np.int64)[order] for column in (step, start_ns, end_ns)))


NO_WINDOWS: Final = windows([], [], [])


def step_of(start_ns: Int64, marks: Windows) -> Int64:
    """Return the step in whose window each instant lies, `NULL` outside all. Of overlapping windows the one that began
    last counts.
    """
    if not len(marks):
        return np.full(len(start_ns), NULL, np.int64)
    at = np.searchsorted(marks.start_ns, start_ns, side="right") - 1
    return np.where((at >= 0) & (start_ns < marks.end_ns[at]), marks.step[at], NULL)


class Gemm(NamedTuple):
    """One shape of a product: `batch` times [m, k] by [k, n]. `dtype` is that of the first factor."""

    operator: str
    batch: int
    m: int
    n: int
    k: int
    dtype: str | None

    @property
    def flops(self) -> int:
        """Floating point operations of one product."""
        return 2 * self.batch * self.m * self.n * self.k


@dataclass(frozen=True)
class Gemms:
    """The products of a trace. `origin` (ascending, each once) is the `Intervals.origin` of the rows that a product
    ran as, `shape` an index into `shapes`. `unknown` products have no shape in the trace. `lasted_ns`: how long each
    ran, where a CPU ran it: its operator, whose parts are rows of other names. None: its rows tell.
    """

    origin: Int64
    shape: Int64
    shapes: tuple[Gemm, ...]
    unknown: int
    lasted_ns: Int64 | None = None


@dataclass(frozen=True)
class CounterValues:
    """Hardware counters of kernels, one element per value: `origin` as in `Intervals`, `counter` an index into
    `names`. `derived_from`: counter that AORTA derived -> the raw ones. `missing`: what could not be derived, and why.
    """

    origin: Int64
    counter: Int64
    value: NDArray[np.float64]
    names: tuple[str, ...]
    derived_from: Mapping[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class Trace:
    """One source after it was read.

    Attributes:
        path: where it was read from. format: the reader's name ("kineto", "rocprofv3-json", "rocprofv3-csv", "rocpd",
        "nsys"). rank: global rank; `NULL` where the source does not say.
        world_size: None where the source does not say. platform: "cuda", "rocm", "cpu", or None where it is unknown.
        group_ranks: group name -> its global ranks, for the groups whose ranks are known. group_sizes: group name ->
        number of ranks, also where the ranks themselves are unknown. host: name of the machine, or None.
        counters: health counter -> rows, by the names of `aorta.analysis.load.trace_health.COUNTERS`. A reader adds
            what only it can know (rows it could not use, unlinked kernels); the rest is counted from the table.
        notes: sentences that every reader of the results must see.
        copies_observed: whether the source would show copies if there were any.
        unseen: why communication was not (fully) observed; metrics that rest on it are null with this reason (R8).
            None: it was observed.
        compute_unseen: whether the same holds for computation.
        gemms: matrix products of the host's operators; None where the format never has them.
        hardware_counters: of kernels; None where the source has none.
        lost: the step of each launch that has no kernel in the trace.
    """

    path: str
    format: str
    clock: Clock
    intervals: Intervals
    windows: Windows = NO_WINDOWS
    rank: int = NULL
    world_size: int | None = None
    platform: str | None = None
    backend: str | None = None
    host: str | None = None
    group_ranks: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    group_sizes: Mapping[str, int] = field(default_factory=dict)
    counters: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    copies_observed: bool = True
    unseen: str | None = None
    compute_unseen: bool = False
    gemms: Gemms | None = None
    hardware_counters: CounterValues | None = None
    lost: Int64 = field(default_factory=lambda: np.zeros(0, np.int64))


def by_device(table: Intervals) -> Iterator[tuple[int, Intervals]]:
    """Yield each device of a table, `NULL` for rows of none, with its rows."""
    for rows in Groups(table.device).rows:
        yield int(table.device[rows[0]]), table.take(rows)


def look_up(keys: Int64, ids: Int64, values: Int64) -> Int64:
    """Return `values` of the rows whose `ids` equal `keys`, `NULL` where there is none (a left outer join)."""
    if not len(ids):
        return np.full(len(keys), NULL, np.int64)
    order = np.argsort(ids, kind="stable")
    at = np.minimum(np.searchsorted(ids[order], keys), len(ids) - 1)
    return np.where(ids[order][at] == keys, values[order][at], NULL)
