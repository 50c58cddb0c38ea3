"""Reads rocprofv3's CSV files into one `Trace` per process.

Four variants are read: of ROCm 6.2/6.3 (agents as bare numbers, no `Stream_Id`), of 6.4 and later ("Agent 4"), of
`rocpd convert` (a leading `Guid`, other capitals, several processes in a file), and any of them with every field
quoted. One process writes several files (`<pid>_kernel_trace.csv`, `<pid>_marker_api_trace.csv`, ...), which are passed
together. Columns are found by name, whatever their capitals. Must not: find a column by its position.
"""

from __future__ import annotations

import csv
import math
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import IO, Final

import numpy as np

from aorta.analysis.load.interval_table import NULL, CounterValues, Interner, Trace
from aorta.analysis.load.kernel_classifier import NameClassifier
from aorta.analysis.load.kernel_totals import Agent, with_derived
from aorta.analysis.load.rank_inference import Process, place
from aorta.analysis.load.rocprof import HIP_API, MARKERS, NO_KERNELS, RCCL_API, Calls, Copies, Kernels, trace_of
from aorta.errors import InputError
from aorta.records.files import NOT_UTF8
from aorta.records.schema import Header
from aorta.timeline.arrays import Int64

FORMAT: Final = "rocprofv3-csv"
STEMS: Final = (
    "kernel_trace",
    "memory_copy_trace",
    "rccl_api_trace",
    "marker_api_trace",
    "hip_api_trace",
    "counter_collection",
    "agent_info",
)
"""Ends of the names of the files that one process writes and this reader uses."""
_LONGEST_FIELD: Final = 1 << 20
"""Demangled kernel names reach tens of thousands of characters."""
_LONGEST_LINE: Final = 4 << 20
_KERNEL: Final = ("kernel_name", "agent_id", "start_timestamp", "end_timestamp")
_COUNTER: Final = ("dispatch_id", "kernel_name", "counter_name", "counter_value")
_AGENT_INFO: Final = ("agent_type", "logical_node_id")
_COPY: Final = ("direction", "start_timestamp", "end_timestamp")
_API: Final = ("domain", "function", "start_timestamp", "end_timestamp")
_AGENT: Final = re.compile(r"^(?:[A-Za-z]+ )?(\d{1,9})$")
_PERIOD: Final = ("start_ns", "end_ns")
_PID: Final = re.compile(r"^(\d{1,10})_(?:[a-z]+_)+trace\.csv", re.IGNORECASE)


class _Rows:
    """Integer columns that grow row by row."""

    def __init__(self, *names: str) -> None:
        self.columns = {name: array("q") for name in names}

    def add(self, *values: int) -> None:
        for column, value in zip(self.columns.values(), values, strict=True):
            column.append(value)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def arrays(self) -> dict[str, Int64]:
        return {name: np.array(column, np.int64) for name, column in self.columns.items()}


class _Process:
    """What the files say about one process, by the columns of `rocprof.Kernels`, `Copies` and `Calls`."""

    def __init__(self) -> None:
        self.kernels = _Rows("thread", "device", "queue", "stream", "dispatch", "correlation", *_PERIOD, "name")
        self.copies = _Rows("device", "stream", *_PERIOD, "name")
        self.calls, self.marks = (_Rows("thread", "correlation", *_PERIOD, "name") for _ in range(2))
        self.launches = _Rows("correlation", "start_ns")
        self.counters = _Rows("dispatch", "kernel", "counter")
        self.counter_values = array("d")
        self.gpus: list[Agent] = []
        self.pids: set[int] = set()
        self.names = Interner()

    def host_calls(self, rows: _Rows) -> Calls:
        """Return `calls` or `marks` with their texts."""
        columns, texts = rows.arrays(), self.names.strings
        return Calls(texts=[texts[code] for code in columns.pop("name").tolist()], **columns)


def siblings(name: str) -> tuple[str, ...]:
    """Return names of all files that the process which wrote this file may have written, including it."""
    pure = PurePath(name)
    for stem in STEMS:
        if pure.name.endswith((f"{stem}.csv", f"{stem}.csv.gz")):
            return tuple(str(pure.with_name(pure.name.replace(stem, other))) for other in STEMS)
    return (name,)


def read_csv(files: Mapping[str, IO[bytes]], classifier: NameClassifier, headers: Sequence[Header] = ()) -> list[Trace]:
    """Read the files of one process, or files of `rocpd convert`.

    Args:
        files: path -> content; a kernel trace must be among them.
        headers: of records that may identify the rank of a process.

    Raises:
        InputError: a file has none of the known formats, or a row cannot be read; names file and line.
    """
    processes: dict[str, _Process] = {}
    has_copies = False
    for path, stream in files.items():
        has_copies |= _read_file(path, stream, processes)
    label = next(iter(files))
    if not any(len(process.kernels) for process in processes.values()):
        raise InputError(f"{label}: {NO_KERNELS} and give its kernel_trace.csv")
    from_name = {int(match[1]) for path in files if (match := _PID.match(PurePath(path).name))}
    traces = []
    for guid, process in processes.items():
        if not len(process.kernels):
            continue  # a helper process that ran no kernels
        pids = process.pids or (from_name if len(processes) == 1 else set())
        where = f"{label} ({guid})" if guid and len(processes) > 1 else label
        traces.append(_trace(where, label, process, pids, has_copies, classifier, headers))
    return traces


def _trace(
    where: str,
    path: str,
    process: _Process,
    pids: set[int],
    has_copies: bool,
    classifier: NameClassifier,
    headers: Sequence[Header],
) -> Trace:
    kernels, launches, names = process.kernels.arrays(), process.launches.arrays(), process.names.strings
    notes = [f"{where}: rows of {len(pids)} processes without a Guid to tell them apart"] if len(pids) > 1 else []
    # "Agent 4" counts CPUs too, so it is not the number of a GPU, and says nothing about the rank.
    placed = place(Process(path=path, pid=next(iter(pids)) if len(pids) == 1 else None), headers)
    return trace_of(
        FORMAT,
        where,
        placed,
        Kernels(correlations=(kernels.pop("correlation"),), names=names, **kernels),
        Copies(names=names, **process.copies.arrays()),
        process.host_calls(process.calls),
        (launches["correlation"], launches["start_ns"]),
        process.host_calls(process.marks),
        classifier,
        counters=_joined(process, where, notes),
        copies_observed=has_copies,
        notes=notes,
    )


def _read_file(path: str, stream: IO[bytes], processes: dict[str, _Process]) -> bool:
    """Add the rows of one file; returns whether it is a file of memory copies."""
    lines = _lines(path, stream)
    _, head = next(lines, (1, []))
    columns = {name.strip().lower(): at for at, name in enumerate(head)}
    kinds = (
        (_COUNTER, _add_counter),
        (_KERNEL, _add_kernel),
        (_COPY, _add_copy),
        (_API, _add_call),
        (_AGENT_INFO, _add_agent),
    )
    fitting = [kind for kind in kinds if all(name in columns for name in kind[0])]
    if not fitting:
        raise InputError(
            f"{path}:1: not a rocprofv3 trace: the columns are {', '.join(head[:12])[:300] or 'none'}; a kernel trace "
            f"has {', '.join(_KERNEL)}, a copy trace {', '.join(_COPY)}, an API or marker trace {', '.join(_API)}"
        )
    wanted, add = fitting[0]
    for number, row in lines:
        if len(row) != len(head):
            raise InputError(f"{path}:{number}: {len(row)} fields for {len(head)} columns: cut off, or edited by hand?")
        cells = _Cells(path, number, columns, row)
        add(processes.setdefault(cells.text("guid"), _Process()), cells)
    return wanted is _COPY


class _Cells:
    """One row, by column name."""

    def __init__(self, path: str, line: int, columns: Mapping[str, int], row: list[str]) -> None:
        self._path, self._line, self._columns, self._row = path, line, columns, row

    def text(self, column: str) -> str:
        at = self._columns.get(column)
        return "" if at is None else self._row[at]

    def number(self, column: str, needed: bool = False) -> int:
        """Return an integer; `NULL` where the column or its value is missing."""
        text = self.text(column)
        if text in ("", "null", "None") and not needed:
            return NULL
        # int() accepts "1_000", and refuses a number only after 4,300 digits.
        if len(text) <= 20 and text.removeprefix("-").isdecimal() and text.isascii() and -(2**63) <= int(text) < 2**63:
            return int(text)
        raise self.error(column, "an integer of 64 bits is needed")

    def real(self, column: str) -> float:
        """Return a finite number."""
        try:
            found = float(self.text(column))
        except ValueError:
            found = math.nan
        if not math.isfinite(found):
            raise self.error(column, "a finite number is needed")
        return found

    def agent(self, column: str) -> int:
        """Return the number in "Agent 4", "GPU 0" or "4"."""
        text = self.text(column)
        if not text:
            return NULL
        match = _AGENT.match(text)
        if match is None:
            raise self.error(column, 'an agent is "Agent 4", "GPU 0" or a number')
        return int(match[1])

    def error(self, column: str, needed: str) -> InputError:
        return InputError(f"{self._path}:{self._line}: {column} is {self.text(column)[:60]!r}; {needed}")


def _add_kernel(process: _Process, cells: _Cells) -> None:
    name = cells.text("kernel_name")
    process.kernels.add(
        cells.number("thread_id"),
        cells.agent("agent_id"),
        cells.number("queue_id"),
        cells.number("stream_id"),
        cells.number("dispatch_id"),
        cells.number("correlation_id"),
        cells.number("start_timestamp", needed=True),
        cells.number("end_timestamp", needed=True),
        process.names(name) if name else NULL,
    )


def _add_copy(process: _Process, cells: _Cells) -> None:
    direction = cells.text("direction")
    to_host = direction.upper().endswith("TO_HOST")
    process.copies.add(
        cells.agent("source_agent_id" if to_host else "destination_agent_id"),
        cells.number("stream_id"),
        cells.number("start_timestamp", needed=True),
        cells.number("end_timestamp", needed=True),
        process.names(direction),
    )


def _add_counter(process: _Process, cells: _Cells) -> None:
    value = cells.real("counter_value")
    process.counters.add(
        cells.number("dispatch_id", needed=True),
        process.names(cells.text("kernel_name")),
        process.names(cells.text("counter_name")),
    )
    process.counter_values.append(value)


def _joined(process: _Process, where: str, notes: list[str]) -> CounterValues | None:
    """Return the counters of kernels of this process: a value belongs to the kernel of its dispatch id, if that has its
    name (a file of another run numbers other kernels). Values of one counter and dispatch, one of each of its
    instances, are added up, as rocprofv3 does itself.
    """
    if not len(process.counters):
        return None
    known = {*zip(process.kernels.columns["dispatch"], process.kernels.columns["name"], strict=True)}
    sums: dict[tuple[int, int], float] = {}
    strays = 0
    for dispatch, kernel, counter, value in zip(
        *process.counters.columns.values(), process.counter_values, strict=True
    ):
        if (dispatch, kernel) in known:
            sums[dispatch, counter] = sums.get((dispatch, counter), 0.0) + value
        else:
            strays += 1
    if strays:
        notes.append(f"{where}: {strays} values of hardware counters belong to no kernel of this trace; left out")
    names, columns = process.names.strings, dict[int, int]()
    counters = [columns.setdefault(code, len(columns)) for _, code in sums]
    joined = CounterValues(
        np.array([origin for origin, _ in sums], np.int64),
        np.array(counters, np.int64),
        np.array([*sums.values()], np.float64),
        tuple(names[code] for code in columns),
    )
    return with_derived(joined, process.gpus)


def _add_agent(process: _Process, cells: _Cells) -> None:
    if cells.text("agent_type").upper() != "GPU":
        return
    simds, per_cu, xccs = (cells.number(name) for name in ("simd_count", "simd_per_cu", "num_xcc"))
    process.gpus.append(
        Agent(
            name=cells.text("name"),
            xccs=xccs if xccs > 0 else None,
            cus=simds / per_cu if simds > 0 and per_cu > 0 else None,
        )
    )


def _add_call(process: _Process, cells: _Cells) -> None:
    domain = cells.text("domain")
    pid = cells.number("process_id")
    if pid != NULL:
        process.pids.add(pid)
    start, end = cells.number("start_timestamp", needed=True), cells.number("end_timestamp", needed=True)
    if domain.startswith(HIP_API):
        process.launches.add(cells.number("correlation_id"), start)
    elif domain == RCCL_API or domain in MARKERS:
        name = process.names(cells.text("function"))
        if domain == RCCL_API:
            process.calls.add(cells.number("thread_id"), cells.number("correlation_id"), start, end, name)
        else:
            process.marks.add(NULL, NULL, start, end, name)


def _lines(path: str, stream: IO[bytes]) -> Iterator[tuple[int, list[str]]]:
    """Yield rows, each with the line number of its end.

    Raises:
        InputError: it is not CSV.
    """
    csv.field_size_limit(_LONGEST_FIELD)
    reader = csv.reader(_texts(path, stream), strict=True)
    try:
        for row in reader:
            if row:
                yield reader.line_num, row
    except csv.Error as error:
        raise InputError(f"{path}:{reader.line_num}: not CSV: {error}") from error


def _texts(path: str, stream: IO[bytes]) -> Iterator[str]:
    """Yield lines as text, of limited length: a file that is one endless line must not be read into memory."""
    number = 0
    while line := stream.readline(_LONGEST_LINE):
        number += 1
        if len(line) == _LONGEST_LINE:
            raise InputError(f"{path}:{number}: a line of more than {_LONGEST_LINE} bytes: not a rocprofv3 CSV file")
        yield line.decode("utf-8-sig" if number == 1 else "utf-8", NOT_UTF8)
