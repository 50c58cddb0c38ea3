"""Defines the interval table: what every trace reader returns, whatever tool recorded the trace; and what the names of
kernels and operators in it stand for.

A `Trace` is of one process: one row per interval (`Intervals`), the windows of its steps (`Windows`) and facts about
its source. All columns are integers, times in int64 ns; `NULL` (-1) means "unknown" in every column that allows it.
Strings are stored once, in tables indexed by codes.

Must not: hold a Python object per row, merge devices with each other (W15), sum lengths of intervals that may overlap
(W10), or classify by anything but the name (W13: readers select by a format's categories first).
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from aorta.errors import InputError
from aorta.read.frames import (
    NO_TIME,
    UNKNOWN,
    UNNUMBERED,
    CollectiveName,
    Collectives,
    Frame,
    Groups,
    Numbered,
    column,
    declared,
)
from aorta.read.ledger import LANES, Gap
from aorta.timeline import classes
from aorta.timeline.arrays import Int64, IntervalArray, containing
from aorta.timeline.classes import KINDS, UNKNOWN_KIND

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


LANE_CLASSES: Final = dict(zip(LANES, IntervalClass, strict=False))
"""Lane of the ledger -> the class of its rows."""
KIND_CODE: Final[Mapping[str, int]] = {kind: code for code, kind in enumerate(KINDS)}
"""Kind of collective -> its code in the column `kind`."""


@dataclass(frozen=True, kw_only=True)
class Intervals(Frame):
    """One row per interval `[start_ns, end_ns)`. Of the other columns a number fills a whole one, and one that is left
    out is `NULL` throughout (`cls`: `IntervalClass.UNKNOWN`).

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
        second: the other class that it may be, or `NULL`: its metrics are measured both ways.
        name: code into `names`.
        launch_ns: when the host began the call that launched it, on the clock of the rows, or `NULL`.
        origin: what the source knows it by elsewhere, or `NULL`: Kineto's `External id` of the host operator,
            rocprofv3's dispatch id.
        operator: number of the operator whose self time the row is a part of, where others nested in it cut that into
            several rows (the host's rows of a CPU trace); `NULL` where a row is whole.
    """

    start_ns: Int64 = column(np.int64, "ns")
    end_ns: Int64 = column(np.int64, "ns")
    device: NDArray[np.int32] = column(np.int32, default=NULL)
    stream: Int64 = column(np.int64, default=NULL)
    cls: NDArray[np.int8] = column(np.int8, default=int(IntervalClass.UNKNOWN))
    second: NDArray[np.int8] = column(np.int8, default=NULL)
    kind: NDArray[np.int8] = column(np.int8, default=NULL)
    group: NDArray[np.int32] = column(np.int32, default=NULL)
    seq: Int64 = column(np.int64, default=NULL)
    bytes: Int64 = column(np.int64, default=NULL)
    dtype: NDArray[np.int16] = column(np.int16, default=NULL)
    step: Int64 = column(np.int64, default=NULL)
    name: NDArray[np.int32] = column(np.int32, default=NULL)
    launch_ns: Int64 = column(np.int64, "ns", default=NULL)
    origin: Int64 = column(np.int64, default=NULL)
    operator: Int64 = column(np.int64, default=NULL)
    names: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, dtype in declared(Intervals).items():
            if np.ndim(values := getattr(self, name)) == 0:
                object.__setattr__(self, name, np.full(len(self.start_ns), values, dtype))
        super().__post_init__()

    def named(self, test: Callable[[str], bool]) -> NDArray[np.bool_]:
        """Return which rows have a name of which the test holds."""
        return np.array([*map(test, self.names), False], bool)[self.name]  # the last for rows without a name

    @property
    def spans(self) -> IntervalArray:
        return IntervalArray(self.start_ns, self.end_ns)


def concatenate(parts: Sequence[Intervals]) -> Intervals:
    """Concatenate tables and join their string tables."""
    if len(parts) == 1:
        return parts[0]
    joined: dict[str, Any] = {
        name: np.concatenate([np.zeros(0, dtype), *(getattr(part, name) for part in parts)])
        for name, dtype in declared(Intervals).items()
    }
    for codes, table in (("name", "names"), ("group", "groups"), ("dtype", "dtypes")):
        numbered = Numbered()
        moved = [
            np.array([*map(numbered.__getitem__, getattr(part, table)), NULL])[getattr(part, codes)] for part in parts
        ]
        joined |= {codes: np.concatenate([joined[codes][:0], *moved]), table: tuple(numbered)}
    return Intervals(**joined)


def operations(table: Intervals) -> Groups:
    """Group the rows of one trace into operations: rows of one `operator`, and every row without by itself."""
    number = np.arange(len(table))
    return Groups(np.where(table.operator == NULL, number, len(table) + table.operator))


def _collectives_of(table: Intervals) -> Intervals:
    """Return one row for each collective among rows of communication: an all-to-all may be a kernel for each peer, a
    collective of copy engines several copies. Rows belong together that have one kind, group, device and step, and one
    sequence number and operator; of an all-to-all either suffices. Sends and receives stay as they are.
    """
    exchange, numbered, launched = table.kind == KIND_CODE["alltoall"], table.seq != NULL, table.origin != NULL
    paired = np.isin(table.kind, (KIND_CODE["send"], KIND_CODE["recv"]))
    joins = (exchange & (numbered | launched)) | (numbered & launched & ~paired)
    operator = np.where(exchange & numbered, NULL, table.origin)
    alone = np.where(joins, NULL, np.arange(len(table)))
    together = Groups(table.device, table.step, table.kind, table.group, table.seq, operator, alone)
    if len(together.starts) == len(table):
        return table
    start, end = together.reduce(np.minimum, table.start_ns), together.reduce(np.maximum, table.end_ns)
    return replace(table.take(together.first), start_ns=start, end_ns=end)


def by_device(table: Intervals) -> Iterator[tuple[int, Intervals]]:
    """Yield each device of a table, `NULL` for rows of none, with its rows."""
    for rows in Groups(table.device).rows:
        yield int(table.device[rows[0]]), table.take(rows)


def overlapping_ns(rows: Intervals, *keys: NDArray[Any]) -> Int64:
    """Return for how long each row, in order of their starts, ran while an earlier one of equal keys still did."""
    shared = np.zeros(len(rows), np.int64)
    for own in Groups(*keys).rows:
        start, end = rows.start_ns[own], rows.end_ns[own]
        shared[own[1:]] = np.maximum(np.minimum(np.maximum.accumulate(end)[:-1], end[1:]) - start[1:], 0)
    return shared


def look_up(keys: Int64, ids: Int64, values: Int64) -> Int64:
    """Return `values` of the rows whose `ids` equal `keys`, `NULL` where there is none (a left outer join)."""
    if not len(ids):
        return np.full(len(keys), NULL, np.int64)
    order = np.argsort(ids, kind="stable")
    index = np.minimum(np.searchsorted(ids[order], keys), len(ids) - 1)
    return np.where(ids[order][index] == keys, values[order][index], NULL)


@dataclass(frozen=True)
class Windows:
    """Steps as the source marks them, sorted by their start. `step` is the source's own number."""

    step: Int64
    start_ns: Int64
    end_ns: Int64

    def __len__(self) -> int:
        return len(self.step)


def windows(step: ArrayLike, start_ns: ArrayLike, end_ns: ArrayLike) -> Windows:
    order = np.argsort(np.asarray(start_ns, np.int64), kind="stable")
    return Windows(*(np.asarray(values, np.int64)[order] for values in (step, start_ns, end_ns)))


NO_WINDOWS: Final = windows([], [], [])


def step_of(start_ns: Int64, marks: Windows) -> Int64:
    """Return the step in whose window each instant lies, `NULL` outside all. Of overlapping windows the one that began
    last counts.
    """
    index = containing(start_ns, IntervalArray(marks.start_ns, marks.end_ns))
    return np.where(index >= 0, np.append(marks.step, NULL)[index], NULL)


@dataclass(frozen=True)
class Trace:
    """One source after it was read. A fact that the source does not state is None, a rank `NULL`.

    Attributes:
        path: where it was read from.
        format: the reader's name ("kineto", "rocprofv3-json", "rocprofv3-csv", "rocpd", "nsys").
        platform: "cuda", "rocm" or "cpu".
        group_ranks: group name -> its global ranks, for the groups whose ranks are known.
        counters: health counter -> rows, by the names of `aorta.read.traces.health.COUNTERS`. A reader adds
            what only it can know (rows it could not use, unlinked kernels); the rest is counted from the table.
        notes: sentences that every reader of the results must see.
        copies_observed: whether the source would show copies if there were any.
        gaps: what the lanes of its windows may lack (`aorta.read.ledger`); none: everything was observed.
        unknown: what names rows that no account knows -> when they ran.
        of_launch: each step is what it launched: its rows are those of its number, wherever they ran.
        host_waits: calls in which the host waited for the device, in any order; None where they are not read.
        device_waits: those of them that waited for all that was launched on a device before.
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
    counters: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    copies_observed: bool = True
    gaps: tuple[Gap, ...] = ()
    unknown: Mapping[str, IntervalArray] = field(default_factory=dict)
    of_launch: bool = False
    host_waits: IntervalArray | None = None
    device_waits: IntervalArray | None = None


def collectives_in(trace: Trace, rows: Intervals, steps: Int64 | None, start_ns: Int64) -> Collectives:
    """Return the collectives that start inside a step of one device, by step, then start, numbered so that
    `aorta.read.matching` finds them on other ranks; never by their time (W11). Those without a sequence number have
    their order, where order identifies them. On a device it identifies nothing: steps are cut where the host marked
    them and the device runs behind its host, so a step may hold different collectives on different ranks even if their
    count agrees.

    Args:
        rows: of the device.
        steps: numbers of the steps, ascending; None: the whole trace is one.
        start_ns: of each step.
    """
    table = _collectives_of(rows.take(rows.cls == IntervalClass.COMM))
    if steps is not None:
        table = table.take(np.isin(table.step, steps))
    step = np.zeros(len(table), np.int64) if steps is None else np.searchsorted(steps, table.step)
    order = np.lexsort((table.start_ns, step))
    table, step = table.take(order), step[order]
    distinct = Groups(table.kind, table.group, table.bytes, table.dtype)
    first = table.take(distinct.first)
    # The last of each is of `NULL`.
    kinds, groups, dtypes = (*KINDS, UNKNOWN_KIND), (*table.groups, "unknown"), (*table.dtypes, None)
    names = tuple(
        CollectiveName(kinds[kind], groups[group], size, dtypes[dtype], end_source="trace")
        for kind, group, size, dtype in zip(first.kind, first.group, first.bytes.tolist(), first.dtype, strict=True)
    )
    alike = Groups(step, distinct.of_row)
    # Order identifies where steps are marked on the clock and threads that collectives ran on, as with gloo on a CPU.
    # The count is part of the number: ranks that disagree on it match nothing rather than the wrong collective.
    identified = trace.platform == "cpu" and len(trace.windows)
    counted = (alike.sizes[alike.of_row] << 20) + alike.position
    by_order = counted if identified else UNNUMBERED - alike.position
    return Collectives(
        step=step,
        name=distinct.of_row,
        seq=np.where(table.seq != NULL, table.seq, by_order),
        issue_ns=np.full(len(table), NO_TIME),  # the trace does not record when it was issued
        start_ns=table.start_ns - start_ns[step],
        end_ns=table.end_ns - start_ns[step],
        names=names,
    )


class NameClassifier:
    """Classifies names by the built-in patterns and additional ones, each distinct name once. Patterns are unanchored
    (docs/dev/measuring.md, W12): `void ncclDevKernel...` is communication too.

    Raises:
        InputError: an additional pattern is not a regular expression.
    """

    def __init__(self, comm_patterns: Sequence[str] = ()) -> None:
        self._added: list[re.Pattern[str]] = []
        for pattern in comm_patterns:
            try:
                compiled = re.compile(pattern, re.IGNORECASE)
            except re.error as error:
                raise InputError(f"--comm-pattern {pattern!r}: not a regular expression: {error}") from None
            if compiled.search(""):
                raise InputError(
                    f"--comm-pattern {pattern!r}: it matches the empty text, so every kernel would be communication"
                )
            self._added.append(compiled)
        self._known: dict[str, IntervalClass] = {}

    def class_of(self, name: str) -> IntervalClass:
        """Classify one kernel. An empty name is `UNKNOWN`; what is neither communication nor a copy is compute."""
        if name not in self._known:
            if not name.strip():
                self._known[name] = IntervalClass.UNKNOWN
            elif classes.communicates(name) or any(pattern.search(name) for pattern in self._added):
                self._known[name] = IntervalClass.COMM
            else:
                self._known[name] = IntervalClass.COPY if classes.copies(name) else IntervalClass.COMPUTE
        return self._known[name]


def add_comm_pattern(parser: argparse.ArgumentParser) -> None:
    """Add the option `--comm-pattern`, which collects additional patterns for `NameClassifier`."""
    parser.add_argument(
        "--comm-pattern",
        action="append",
        default=[],
        metavar="REGEX",
        help="kernels of traces whose names match are communication too; repeatable, unanchored, case ignored",
    )


_KINDS: Final = tuple(
    (KIND_CODE[kind], re.compile(pattern, re.IGNORECASE))
    for kind, pattern in (
        ("reducescatter", r"(?<![a-z])reduce_?scatter|userbuffers\w{0,40}_rs(?![a-z])"),
        ("allgather", r"(?<![a-z])all_?gather|userbuffers\w{0,40}_ag(?![a-z])"),
        ("allreduce", r"(?<![a-z])all_?reduce|cross_device_reduce|quick_?reduce|multimem_one_shot"),
        ("alltoall", r"(?<![a-z])all_?to_?all|(?<![a-z])a2a(?![a-z])|(deep_ep|dpsk|mori|_ep).{0,60}(dispatch|combine)"),
        ("broadcast", r"(?<![a-z])(broadcast|bcast)"),
        ("barrier", r"(?<![a-z])barrier"),
        ("gather", r"(?<![a-z])gather"),
        ("scatter", r"(?<![a-z])scatter"),
        ("reduce", r"(nccl\w{0,40}kernel_|(?<![a-z]))reduce(?![a-z])"),
        # `ncclDevKernel_SendRecv` alone does not say whether it is a send, a receive or an all-to-all.
        ("send", r"(?<![a-z])(i?send(?!_?recv)|push_?send|put_signal)"),
        ("recv", r"(?<!send_)(?<!send)(?<![a-z])(i?recv|push_?recv|wait_signal)"),
    )
)


def kind_of(name: str) -> int:
    """Return the code of the kind that a communication kernel, API call or operator is named after: `ncclAllReduce`,
    `c10d::_allgather_base_`, `ncclDevKernel_AllReduce_Sum_bf16`, `all_to_allv`. `NULL` where the name does not say.
    """
    words = classes.in_words(name)
    return next((code for code, pattern in _KINDS if pattern.search(words)), NULL)


def countable(name: str) -> bool:
    """Return whether a collective of that name has a kernel of its own; sends and what is coalesced may not."""
    kind = kind_of(name)
    return kind != NULL and KINDS[kind] not in ("send", "recv", "barrier") and "coalesced" not in name


_TORCH_TYPES: Final[dict[str, tuple[int, tuple[str, ...]]]] = {
    "uint8": (1, ("byte", "unsigned char", "uint8_t")),
    "int8": (1, ("char", "signed char", "int8_t")),
    "int16": (2, ("short", "short int")),
    "int32": (4, ("int", "uint32")),
    "int64": (8, ("long", "long int", "uint64", "long long")),
    "float16": (2, ("half", "c10::half", "f16")),
    "bfloat16": (2, ("c10::bfloat16", "bf16")),
    "float32": (4, ("float", "f32")),
    "float64": (8, ("double", "f64")),
    "bool": (1, ()),
    "complex64": (8, ("complexfloat", "c10::complex<float>")),
    "complex128": (16, ("complexdouble", "c10::complex<double>")),
    "float8_e4m3fn": (1, ("f8e4m3", "c10::float8_e4m3fn")),
    "float8_e5m2": (1, ("f8e5m2", "c10::float8_e5m2")),
    "float8_e4m3fnuz": (1, ("c10::float8_e4m3fnuz",)),
    "float8_e5m2fnuz": (1, ("c10::float8_e5m2fnuz",)),
}
"""Torch's name -> bytes per element (c10/core/ScalarType.h), and the names in torch's C++ and in NCCL."""
_BY_NAME: Final = {
    name: (torch_name, size) for torch_name, (size, others) in _TORCH_TYPES.items() for name in (torch_name, *others)
}


def known_dtype(name: str | None) -> tuple[str | None, int | None]:
    """Return torch's name of a data type and its bytes per element; an unknown name unchanged, with None."""
    return _BY_NAME.get(name.lower(), (name, None)) if name else (None, None)
