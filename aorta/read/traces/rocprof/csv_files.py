"""Reads rocprofv3's CSV files into one `Trace` per process.

Four variants are read: of ROCm 6.2/6.3 (agents as bare numbers, no `Stream_Id`), of 6.4 and later ("Agent 4"), of
`rocpd convert` (a leading `Guid`, other capitals, several processes in a file), and any of them with every field
quoted. One process writes several files (`<pid>_kernel_trace.csv`, `<pid>_marker_api_trace.csv`, ...), which are read
together. Columns are found by name, whatever their capitals.

Hardware counters are not read; that they were collected is noted. Must not: find a column by its position, or guess
what a device is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path, PurePath
from typing import IO, Any, Final

import msgspec
import numpy as np

from aorta.errors import InputError
from aorta.read.frames import Numbered
from aorta.read.traces.interval_table import NULL, Trace
from aorta.read.traces.open import csv_rows, is_url, rows_of
from aorta.read.traces.reader import FileHead, Process, Ranges, Reader, TraceInput, copies
from aorta.read.traces.rocprof import trace as rocprof

_TRACES: Final = ("kernel_trace", "memory_copy_trace", "rccl_api_trace", "marker_api_trace", "hip_api_trace")
_COUNTERS: Final = "counter_collection"
STEMS: Final = (*_TRACES, _COUNTERS)
"""Ends of the names of the files that one process writes and this reader uses."""
_ROWS: Final = 4096
"""Rows held as Python objects at a time."""
_SPAN: Final = "start_ns=start_timestamp end_ns=end_timestamp"
_TABLES: Final = {
    "kernel": (
        f"name=kernel_name device=agent_id {_SPAN}",
        "thread=thread_id queue=queue_id stream=stream_id dispatch=dispatch_id correlation=correlation_id",
    ),
    "copy": (f"name=direction {_SPAN}", "from=source_agent_id to=destination_agent_id stream=stream_id"),
    "call": (f"domain=domain name=function {_SPAN}", "process=process_id thread=thread_id correlation=correlation_id"),
}
"""What the rows of a file are -> name here=column there: those by which it is known, then others."""
_TEXTS: Final = ("guid", "kernel_name", "direction", "domain", "function")
_NO_TEXT: Final = 0
"""Code of the empty text, which is the first."""
_NEEDED: Final = ("start_timestamp", "end_timestamp")
"""Columns without which a row says nothing."""
_NUMBERS: Final = msgspec.json.Decoder(list[int])
_NUMBER: Final = re.compile(r"(-?[0-9]{1,19})")
_AGENT: Final = re.compile(r"(?:[A-Za-z]+ )?([0-9]{1,9})")
_PID: Final = re.compile(r"^(\d{1,10})_(?:[a-z]+_)+trace\.csv", re.IGNORECASE)


def _matches(head: FileHead) -> bool:
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


def _read(source: TraceInput) -> Iterator[Trace]:
    texts = Numbered({"": 0})
    parts: dict[str, list[dict[str, Any]]] = {kind: [] for kind in _TABLES}
    counted = {path for path in source.streams if _COUNTERS in PurePath(path).name}
    for path, stream in source.streams.items():
        if path not in counted:
            kind, columns = _table(path, stream, texts)
            parts[kind].append(columns)
    tables = {
        kind: {
            name: np.concatenate([part.pop(name) for part in found] or [np.zeros(0, np.int64)])
            for name in _columns(kind)
        }
        for kind, found in parts.items()
    }
    if not len(tables["kernel"]["guid"]):
        raise InputError(f"{source.place}: {rocprof.NO_KERNELS} and give its kernel_trace.csv")
    guids = set(np.concatenate([table["guid"] for table in tables.values()]).tolist())
    from_name = {int(match[1]) for path in source.streams if (match := _PID.match(PurePath(path).name))}
    words = tuple(texts)

    def coded(wanted: Callable[[str], bool]) -> list[int]:
        return [code for code, text in enumerate(words) if wanted(text)]

    computed = np.unique(tables["kernel"]["guid"]).tolist()
    for guid in computed:  # a helper process may have run no kernels
        own = {kind: rows_of(table, table["guid"] == guid) for kind, table in tables.items()}
        ran, copied, called = own["kernel"], own["copy"], own["call"]
        ids = called["process"]
        pids = set(ids[ids != NULL].tolist()) or (from_name if len(guids) == 1 else set())
        where = f"{source.place} ({words[guid]})" if words[guid] and len(guids) > 1 else source.place
        notes = [f"{where}: rows of {len(pids)} processes without a Guid to tell them apart"] if len(pids) > 1 else []
        hip, rccl, marks = (
            rows_of(called, np.isin(called["domain"], coded(wanted)))
            for wanted in (
                lambda text: text.startswith(rocprof.HIP_API),
                rocprof.RCCL_API.__eq__,
                rocprof.MARKERS.__contains__,
            )
        )
        to_host = np.isin(copied["name"], coded(lambda text: text.upper().endswith("TO_HOST")))
        notes += [rocprof.SERIALISED] if counted else []
        yield rocprof.trace_of_rocprof(
            source,
            ROCPROF_CSV.name,
            # "Agent 4" counts CPUs too, so it is not the number of a GPU, and says nothing about the rank.
            Process(
                where,
                pid=next(iter(pids)) if len(pids) == 1 else None,
                shared=len(computed) > 1 or len(pids) > 1,
            ),
            {**ran, "name": np.where(ran["name"] == _NO_TEXT, NULL, ran["name"])},
            words,
            copies(
                where,
                device=np.where(to_host, copied["from"], copied["to"]),
                names=words,
                **{name: copied[name] for name in ("start_ns", "end_ns", "stream", "name")},
            ),
            Ranges(marks["start_ns"], marks["end_ns"], [words[code] for code in marks["name"].tolist()]),
            {**hip, "text": [words[code] for code in hip["name"].tolist()]},
            {**rccl, "text": [words[code] for code in rccl["name"].tolist()]},
            notes=notes,
            copies_observed=bool(parts["copy"]),
        )


def _columns(kind: str) -> dict[str, str]:
    known, others = _TABLES[kind]
    return {"guid": "guid", **dict(each.split("=") for each in f"{known} {others}".split())}


def _table(path: str, stream: IO[bytes], texts: Numbered) -> tuple[str, dict[str, Any]]:
    """Read one file: what its rows are, and their columns. Texts become codes of `texts`, and what is missing `NULL`.

    Raises:
        InputError: it has none of the known columns, or a row cannot be read; names file and line.
    """
    lines = csv_rows(stream, path)
    _, head = next(lines, (1, []))
    at = {name.strip().lower(): column for column, name in enumerate(head)}
    known = {kind: [each.partition("=")[2] for each in needed.split()] for kind, (needed, _) in _TABLES.items()}
    kind = next((kind for kind, names in known.items() if at.keys() >= set(names)), None)
    if kind is None:
        raise InputError(
            f"{path}:1: not a rocprofv3 trace: the columns are {', '.join(head[:12])[:300] or 'none'}; a kernel trace "
            f"has {', '.join(known['kernel'])}, a copy trace {', '.join(known['copy'])}, an API or marker trace "
            f"{', '.join(known['call'])}"
        )
    parts: dict[str, list[Any]] = {name: [] for name in _columns(kind)}
    while rows := list(islice(lines, _ROWS)):
        for number, row in rows:
            if len(row) != len(head):
                fields = f"{len(row)} fields for {len(head)} columns"
                raise InputError(f"{path}:{number}: {fields}: cut off, or edited by hand?")
        cells = list(zip(*(row for _, row in rows), strict=True))
        for name, column in _columns(kind).items():
            values = cells[at[column]] if column in at else ("",) * len(rows)
            needed = column in _NEEDED
            if column in _TEXTS:
                parts[name].append(np.array([texts[cell] for cell in values], np.int64))
                continue
            if not needed and not any(values):
                parts[name].append(np.full(len(rows), NULL, np.int64))
                continue
            parse, wanted = _PARSERS.get(column, (_integer, "an integer of 64 bits is needed"))
            if parse is _integer:
                with suppress(msgspec.DecodeError, OverflowError, UnicodeError):  # quick, where every cell is a number
                    numbers = _NUMBERS.decode(f"[{','.join(values)}]")
                    if len(numbers) == len(rows):
                        parts[name].append(np.array(numbers, np.int64))
                        continue
            empty = {} if needed else dict.fromkeys(("", "null", "None"), NULL)
            parsed = {cell: empty[cell] if cell in empty else parse(cell) for cell in set(values)}
            for (number, _), cell in zip(rows, values, strict=True):
                if parsed[cell] is None:
                    raise InputError(f"{path}:{number}: {column} is {cell[:60]!r}; {wanted}")
            parts[name].append(np.array([parsed[cell] for cell in values], np.int64))
    return kind, {name: np.concatenate(parts.pop(name) or [np.zeros(0, np.int64)]) for name in list(parts)}


def _integer(cell: str, pattern: re.Pattern[str] = _NUMBER) -> int | None:
    match = pattern.fullmatch(cell)  # int() accepts "1_000", and refuses a number only after 4,300 digits
    return int(match[1]) if match and -(2**63) <= int(match[1]) < 2**63 else None


def _agent(cell: str) -> int | None:
    return _integer(cell, _AGENT)


_PARSERS: Final[dict[str, tuple[Callable[[str], int | None], str]]] = dict.fromkeys(
    ("agent_id", "source_agent_id", "destination_agent_id"), (_agent, 'an agent is "Agent 4", "GPU 0" or a number')
)
"""How a column is read that holds neither texts nor plain integers, and what its cells have to be."""


ROCPROF_CSV: Final = Reader(
    "rocprofv3-csv",
    "rocprofv3 *_kernel_trace.csv and the files beside it",
    _matches,
    _read,
    together,
    rocprof.process_of,
)
