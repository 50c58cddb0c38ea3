"""Reads rocprofv3's CSV files into one `Trace` per process.

Four variants are read: of ROCm 6.2/6.3 (agents as bare numbers, no `Stream_Id`), of 6.4 and later ("Agent 4"), of
`rocpd convert` (a leading `Guid`, other capitals, several processes in a file), and any of them with every field
quoted. One process writes several files (`<pid>_kernel_trace.csv`, `<pid>_marker_api_trace.csv`, ...), which are read
together. Columns are found by name, whatever their capitals. Must not: find a column by its position.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path, PurePath
from typing import IO, Any, Final

import msgspec
import numpy as np

from aorta.analysis.load.interval_table import NULL, CounterValues, Interner, Trace
from aorta.analysis.load.kernels import Agent, with_derived
from aorta.analysis.load.open import is_url
from aorta.analysis.load.rank_inference import Process
from aorta.analysis.load.rocprof import (
    HIP_API,
    MARKERS,
    NO_KERNELS,
    RCCL_API,
    Calls,
    Launches,
    process_of,
    rocprof_trace,
)
from aorta.analysis.load.sqlite import rows_of
from aorta.analysis.load.trace_source import Head, Ranges, Reader, Source, copies
from aorta.errors import InputError
from aorta.records.files import NOT_UTF8

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
_ROWS: Final = 4096
"""Rows held as Python objects at a time."""
_PERIOD: Final = ("start_timestamp", "end_timestamp")
_KERNEL: Final = ("kernel_name", "agent_id", *_PERIOD)
_TABLES: Final[dict[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "counter": (("dispatch_id", "kernel_name", "counter_name", "counter_value"), ()),
    "kernel": (_KERNEL, ("thread_id", "queue_id", "stream_id", "dispatch_id", "correlation_id")),
    "copy": (("direction", *_PERIOD), ("source_agent_id", "destination_agent_id", "stream_id")),
    "call": (("domain", "function", *_PERIOD), ("process_id", "thread_id", "correlation_id")),
    "agent": (("agent_type", "logical_node_id"), ("name", "simd_count", "simd_per_cu", "num_xcc")),
}
"""What the rows of a file are -> the columns by which it is known, the first that fits, and others that are used."""
_TEXTS: Final = frozenset(
    {"guid", "kernel_name", "counter_name", "direction", "domain", "function", "agent_type", "name"}
)
_NEEDED: Final = frozenset({*_PERIOD, "counter.dispatch_id", "counter_value"})
"""Columns without which a row says nothing."""
_NO_TEXT: Final = 0
"""Code of the empty text, which is the first."""
_NUMBERS: Final = msgspec.json.Decoder(list[int])
_NUMBER: Final = re.compile(r"-?[0-9]{1,19}")
_AGENT: Final = re.compile(r"(?:[A-Za-z]+ )?([0-9]{1,9})")
_PID: Final = re.compile(r"^(\d{1,10})_(?:[a-z]+_)+trace\.csv", re.IGNORECASE)


def _matches(head: Head) -> bool:
    first = head.text.split(b"\n", 1)[0].lower()
    # Counter collection serialises kernels (W17): its times say nothing about overlap.
    return all(name in first for name in (b"start_timestamp", b"end_timestamp", b"kernel_name")) and (
        b"counter_name" not in first
    )


def together(file: str) -> tuple[str, ...]:
    """Return the file and those beside it that the same process wrote, each of which may be compressed."""
    own = PurePath(file.removesuffix(".gz"))
    stem = next((stem for stem in STEMS if own.name.endswith(f"{stem}.csv")), None)
    if is_url(file) or stem is None:
        return (file,)
    beside = [str(own.with_name(own.name.replace(stem, other))) for other in STEMS if other != stem]
    # `gzip -k` leaves both files; their rows are the same and must be read once.
    pairs = ((name, f"{name}.gz") for name in beside)
    return (file, *(there for pair in pairs if (there := next((n for n in pair if Path(n).is_file()), None))))


def _read(source: Source) -> Iterator[Trace]:
    texts = Interner()
    texts("")
    parts: dict[str, list[dict[str, Any]]] = {kind: [] for kind in _TABLES}
    for path, stream in source.streams.items():
        kind, columns = _table(path, stream, texts)
        parts[kind].append(columns)
    tables = {
        kind: {
            name: np.concatenate([part[name] for part in found] or [np.zeros(0, np.int64)])
            for name in ("guid", *_TABLES[kind][0], *_TABLES[kind][1])
        }
        for kind, found in parts.items()
    }
    if not len(tables["kernel"]["guid"]):
        raise InputError(f"{source.place}: {NO_KERNELS} and give its kernel_trace.csv")
    guids = dict.fromkeys(np.concatenate([table["guid"] for table in tables.values()]).tolist())
    from_name = {int(match[1]) for path in source.streams if (match := _PID.match(PurePath(path).name))}
    computed = np.unique(tables["kernel"]["guid"]).tolist()  # a helper process may have run no kernels
    for guid in computed:
        of_process = {kind: rows_of(table, table["guid"] == guid) for kind, table in tables.items()}
        ids = of_process["call"]["process_id"]
        pids = set(ids[ids != NULL].tolist()) or (from_name if len(guids) == 1 else set())
        name = texts.strings[guid]
        where = f"{source.place} ({name})" if name and len(guids) > 1 else source.place
        # "Agent 4" counts CPUs too, so it is not the number of a GPU, and says nothing about the rank.
        process = Process(where, pid=next(iter(pids)) if len(pids) == 1 else None)
        notes = [f"{where}: rows of {len(pids)} processes without a Guid to tell them apart"] if len(pids) > 1 else []
        yield _trace(source, process, of_process, texts.strings, notes, copies_observed=bool(parts["copy"]))


def _trace(
    source: Source,
    process: Process,
    tables: dict[str, dict[str, Any]],
    texts: Sequence[str],
    notes: list[str],
    *,
    copies_observed: bool,
) -> Trace:
    ran, copied, called = tables["kernel"], tables["copy"], tables["call"]
    domains = {code: texts[code] for code in np.unique(called["domain"]).tolist()}

    def calls(chosen: set[int]) -> Calls:
        rows = rows_of(called, np.isin(called["domain"], list(chosen)))
        columns = (rows[name] for name in ("thread_id", "correlation_id", *_PERIOD))
        return Calls([texts[code] for code in rows["function"].tolist()], *columns)

    hip = calls({code for code, domain in domains.items() if domain.startswith(HIP_API)})
    marks = calls({code for code, domain in domains.items() if domain in MARKERS})
    to_host = np.isin(
        copied["direction"], [code for code, text in enumerate(texts) if text.upper().endswith("TO_HOST")]
    )
    return rocprof_trace(
        source,
        ROCPROF_CSV.name,
        process,
        {
            "thread": ran["thread_id"],
            "device": ran["agent_id"],
            "queue": ran["queue_id"],
            "stream": ran["stream_id"],
            "dispatch": ran["dispatch_id"],
            "correlation": ran["correlation_id"],
            "start_ns": ran["start_timestamp"],
            "end_ns": ran["end_timestamp"],
            "name": np.where(ran["kernel_name"] == _NO_TEXT, NULL, ran["kernel_name"]),
        },
        texts,
        copies(
            process.path,
            device=np.where(to_host, copied["source_agent_id"], copied["destination_agent_id"]),
            stream=copied["stream_id"],
            start_ns=copied["start_timestamp"],
            end_ns=copied["end_timestamp"],
            name=copied["direction"],
            names=texts,
        ),
        Ranges(marks.start_ns, marks.end_ns, marks.texts),
        Launches(hip.correlation, hip.start_ns),
        calls({code for code, domain in domains.items() if domain == RCCL_API}),
        counters=_counters(tables, texts, process.path, notes),
        copies_observed=copies_observed,
        notes=notes,
    )


def _counters(
    tables: dict[str, dict[str, Any]], texts: Sequence[str], where: str, notes: list[str]
) -> CounterValues | None:
    """Return the counters of kernels of this process: a value belongs to the kernel of its dispatch id, if that has its
    name (a file of another run numbers other kernels). Values of one counter and dispatch, one of each of its
    instances, are added up, as rocprofv3 does itself.
    """
    ran, values, agents = tables["kernel"], tables["counter"], tables["agent"]
    if not len(values["dispatch_id"]):
        return None
    known = {*zip(ran["dispatch_id"].tolist(), ran["kernel_name"].tolist(), strict=True)}
    sums: dict[tuple[int, int], float] = {}
    strays = 0
    columns = ("dispatch_id", "kernel_name", "counter_name", "counter_value")
    for dispatch, kernel, counter, value in zip(*(values[name].tolist() for name in columns), strict=True):
        if (dispatch, kernel) in known:
            sums[dispatch, counter] = sums.get((dispatch, counter), 0.0) + value
        else:
            strays += 1
    if strays:
        notes.append(f"{where}: {strays} values of hardware counters belong to no kernel of this trace; left out")
    codes = {code: at for at, code in enumerate(dict.fromkeys(code for _, code in sums))}
    joined = CounterValues(
        np.array([origin for origin, _ in sums], np.int64),
        np.array([codes[code] for _, code in sums], np.int64),
        np.array([*sums.values()], np.float64),
        tuple(texts[code] for code in codes),
    )
    about = (agents[name].tolist() for name in ("agent_type", "name", "simd_count", "simd_per_cu", "num_xcc"))
    gpus = [
        Agent(texts[name], xccs if xccs > 0 else None, simds / per_cu if simds > 0 and per_cu > 0 else None)
        for kind, name, simds, per_cu, xccs in zip(*about, strict=True)
        if texts[kind].upper() == "GPU"
    ]
    return with_derived(joined, gpus)


def _table(path: str, stream: IO[bytes], texts: Interner) -> tuple[str, dict[str, Any]]:
    """Read one file: what its rows are, and their columns. Texts become codes of `texts`, and what is missing `NULL`.

    Raises:
        InputError: it has none of the known columns, or a row cannot be read; names file and line.
    """
    lines = _lines(path, stream)
    _, head = next(lines, (1, []))
    at = {name.strip().lower(): column for column, name in enumerate(head)}
    kind = next((kind for kind, (known, _) in _TABLES.items() if all(name in at for name in known)), None)
    if kind is None:
        raise InputError(
            f"{path}:1: not a rocprofv3 trace: the columns are {', '.join(head[:12])[:300] or 'none'}; a kernel trace "
            f"has {', '.join(_KERNEL)}, a copy trace {', '.join(_TABLES['copy'][0])}, an API or marker trace "
            f"{', '.join(_TABLES['call'][0])}"
        )
    columns: dict[str, list[Any]] = {name: [] for name in ("guid", *_TABLES[kind][0], *_TABLES[kind][1])}
    while rows := list(islice(lines, _ROWS)):
        for number, row in rows:
            if len(row) != len(head):
                fields = f"{len(row)} fields for {len(head)} columns"
                raise InputError(f"{path}:{number}: {fields}: cut off, or edited by hand?")
        cells = list(zip(*(row for _, row in rows), strict=True))
        for name, parts in columns.items():
            column = cells[at[name]] if name in at else ("",) * len(rows)
            try:
                parts.append(_values(name, column, texts, needed=bool({name, f"{kind}.{name}"} & _NEEDED)))
            except _Refused as refused:
                (row, needed) = refused.args
                raise InputError(f"{path}:{rows[row][0]}: {name} is {column[row][:60]!r}; {needed}") from None
    return kind, {name: np.concatenate(parts or [np.zeros(0, np.int64)]) for name, parts in columns.items()}


class _Refused(ValueError):
    """A cell is not what its column has: its row, and what is needed."""


def _values(name: str, cells: Sequence[str], texts: Interner, *, needed: bool) -> Any:
    """Convert a part of a column."""
    if name in _TEXTS:
        return np.array([texts(cell) for cell in cells], np.int64)
    if not needed and not any(cells):
        return np.full(len(cells), NULL, np.int64)
    parse: Callable[[str], float | None] = _integer if needed else _number
    what = "an integer of 64 bits is needed"
    if name == "counter_value":
        parse, what = _real, "a finite number is needed"
    elif name.endswith("agent_id"):
        parse, what = _agent, 'an agent is "Agent 4", "GPU 0" or a number'
    else:
        with suppress(msgspec.DecodeError, OverflowError, UnicodeError):  # quick, where every cell is a number
            found = _NUMBERS.decode(f"[{','.join(cells)}]")
            if len(found) == len(cells):
                return np.array(found, np.int64)
    parsed = {cell: parse(cell) for cell in set(cells)}
    for row, cell in enumerate(cells):
        if parsed[cell] is None:
            raise _Refused(row, what)
    return np.array([parsed[cell] for cell in cells], np.float64 if parse is _real else np.int64)


def _integer(cell: str) -> int | None:
    # int() accepts "1_000", and refuses a number only after 4,300 digits.
    return int(cell) if _NUMBER.fullmatch(cell) and -(2**63) <= int(cell) < 2**63 else None


def _number(cell: str) -> int | None:
    return NULL if cell in ("", "null", "None") else _integer(cell)


def _agent(cell: str) -> int | None:
    match = _AGENT.fullmatch(cell)
    return int(match[1]) if match else None if cell else NULL


def _real(cell: str) -> float | None:
    try:
        found = float(cell)
    except ValueError:
        return None
    return found if math.isfinite(found) else None


def _lines(path: str, stream: IO[bytes]) -> Iterator[tuple[int, list[str]]]:
    """Yield rows, each with the line number of its end.

    Raises:
        InputError: it is not CSV, or a line is too long: one that never ends must not be read into memory.
    """

    def decoded() -> Iterator[str]:
        number = 0
        while line := stream.readline(_LONGEST_LINE):
            number += 1
            if len(line) == _LONGEST_LINE:
                raise InputError(
                    f"{path}:{number}: a line of more than {_LONGEST_LINE} bytes: not a rocprofv3 CSV file"
                )
            yield line.decode("utf-8-sig" if number == 1 else "utf-8", NOT_UTF8)

    csv.field_size_limit(_LONGEST_FIELD)
    reader = csv.reader(decoded(), strict=True)
    try:
        for row in reader:
            if row:
                yield reader.line_num, row
    except csv.Error as error:
        raise InputError(f"{path}:{reader.line_num}: not CSV: {error}") from error


ROCPROF_CSV: Final = Reader(
    "rocprofv3-csv",
    "rocprofv3 *_kernel_trace.csv and the files beside it",
    _matches,
    _read,
    together,
    process_of,
)
