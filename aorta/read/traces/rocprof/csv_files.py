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
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath
from typing import IO, TYPE_CHECKING, Any, Final

import numpy as np

from aorta.errors import InputError
from aorta.read.frames import Numbered
from aorta.read.traces.interval_table import NULL, Trace
from aorta.read.traces.open import is_url, joined, rows_of
from aorta.read.traces.reader import SERIALISED, FileHead, Process, Ranges, Reader, TraceInput, copies
from aorta.read.traces.rocprof import trace as rocprof
from aorta.records.files import NOT_UTF8
from aorta.timeline.arrays import Int64

if TYPE_CHECKING:
    import pandas as pd

_TRACES: Final = ("kernel_trace", "memory_copy_trace", "rccl_api_trace", "marker_api_trace", "hip_api_trace")
_COUNTERS: Final = "counter_collection"
STEMS: Final = (*_TRACES, _COUNTERS)
"""Ends of the names of the files that one process writes and this reader uses."""
_ROWS: Final = 1 << 16
"""Rows held as Python objects at a time."""
_SPAN: Final = "start_ns=start_timestamp end_ns=end_timestamp"
_TABLES: Final = {
    "kernel": (
        f"name=kernel_name device=agent_id {_SPAN}",
        "thread=thread_id queue=queue_id stream=stream_id dispatch=dispatch_id correlation=correlation_id",
    ),
    "copy": (
        f"name=direction {_SPAN}",
        "from=source_agent_id to=destination_agent_id stream=stream_id correlation=correlation_id",
    ),
    "call": (f"domain=domain name=function {_SPAN}", "process=process_id thread=thread_id correlation=correlation_id"),
}
"""What the rows of a file are -> name here=column there: those by which it is known, then others."""
_TEXTS: Final = ("guid", "kernel_name", "direction", "domain", "function")
_NO_TEXT: Final = 0
"""Code of the empty text, which is the first."""
_NEEDED: Final = ("start_timestamp", "end_timestamp")
"""Columns without which a row says nothing."""
_NUMBER: Final = re.compile(r"(-?[0-9]{1,19})")
_AGENTS: Final = ("agent_id", "source_agent_id", "destination_agent_id")
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
    tables = {kind: joined(parts_of, *_columns(kind)) for kind, parts_of in parts.items()}
    if not len(tables["kernel"]["guid"]):
        raise InputError(f"{source.origin}: {rocprof.NO_KERNELS} and give its kernel_trace.csv")
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
        where = f"{source.origin} ({words[guid]})" if words[guid] and len(guids) > 1 else source.origin
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
            copied_by=copied["correlation"],
            notes=notes,
            gaps=SERIALISED if counted else (),
            copies_observed=bool(parts["copy"]),
        )


def _columns(kind: str) -> dict[str, str]:
    known, others = _TABLES[kind]
    return {"guid": "guid", **dict(pair.split("=") for pair in f"{known} {others}".split())}


def _table(path: str, stream: IO[bytes], texts: Numbered) -> tuple[str, dict[str, Any]]:
    """Read one file: what its rows are, and their columns. Texts become codes of `texts`, and what is missing `NULL`.

    Raises:
        InputError: it has none of the known columns, or a row cannot be read; names file and row (1: below the header).
    """
    import pandas as pd

    kind, first, parts = "", 1, dict[str, list[Int64]]()
    with warnings.catch_warnings():
        warnings.simplefilter("error", pd.errors.ParserWarning)  # a first row with more fields than the header
        try:
            for rows in pd.read_csv(
                stream,
                chunksize=_ROWS,
                index_col=False,
                dtype_backend="numpy_nullable",  # else an empty cell makes floats of a column, which lose nanoseconds
                keep_default_na=False,
                na_values=["", "null", "None"],
                encoding="utf-8-sig",
                encoding_errors=NOT_UTF8,
            ):
                rows.columns = [name.strip().lower() for name in rows.columns]
                kind = kind or _kind(path, list(rows.columns))
                # pandas fills up a row of too few fields with empty cells.
                ends_early = rows.iloc[:, -1].isna().to_numpy()
                if ends_early.any() and not ends_early.all():
                    raise ValueError(f"row {first + int(ends_early.argmax())} has fewer fields than there are columns")
                for name, column in _columns(kind).items():
                    cells = rows[column] if column in rows else pd.Series(pd.NA, rows.index, "Int64")
                    parts.setdefault(name, []).append(_integers(path, first, column, cells, texts))
                first += len(rows)
        except (ValueError, pd.errors.ParserWarning) as error:
            why = str(error).strip()[:200]
            raise InputError(f"{path}: not CSV: {why}: cut off, or edited by hand?") from error
    return kind, {name: np.concatenate(part) for name, part in parts.items()}


def _kind(path: str, head: list[str]) -> str:
    known = {kind: [pair.partition("=")[2] for pair in needed.split()] for kind, (needed, _) in _TABLES.items()}
    kind = next((kind for kind, names in known.items() if {*head} >= {*names}), None)
    if kind is None or len({*head}) < len(head):
        raise InputError(
            f"{path}: not a rocprofv3 trace: the columns are {', '.join(head[:12])[:300]}; a kernel trace has "
            f"{', '.join(known['kernel'])}, a copy trace {', '.join(known['copy'])}, an API or marker trace "
            f"{', '.join(known['call'])}, each once"
        )
    return kind


def _integers(path: str, first: int, column: str, cells: pd.Series[Any], texts: Numbered) -> Int64:
    """Return the cells of a column from row `first` on as integers: codes of texts, numbers of agents."""
    import pandas as pd

    needed = column in _NEEDED
    if column not in _TEXTS and cells.dtype == "Int64" and not (needed and cells.hasnans):
        return cells.to_numpy(np.int64, na_value=NULL)
    wanted = 'an agent is "Agent 4", "GPU 0" or a number' if column in _AGENTS else "an integer of 64 bits is needed"
    if column not in _TEXTS and cells.dtype == "Float64":
        raise InputError(f"{path}: {column} has numbers with a decimal point or an exponent; {wanted}")
    code, words = pd.factorize(cells.astype("string").fillna(""))
    numbers: list[int | None]
    if column in _TEXTS:
        numbers = [texts[word] for word in words]
    else:
        pattern = _AGENT if column in _AGENTS else _NUMBER
        numbers = [_integer(word, pattern) if word or needed else NULL for word in words]
    if None in numbers:
        wrong = numbers.index(None)
        row = first + int(np.flatnonzero(code == wrong)[0])
        raise InputError(f"{path}: row {row}: {column} is {words[wrong][:60]!r}; {wanted}")
    return np.array(numbers, np.int64)[code]


def _integer(word: str, pattern: re.Pattern[str]) -> int | None:
    match = pattern.fullmatch(word)  # int() accepts "1_000", and refuses a number only after 4,300 digits
    return int(match[1]) if match and -(2**63) <= int(match[1]) < 2**63 else None


ROCPROF_CSV: Final = Reader(
    "rocprofv3-csv",
    "rocprofv3 *_kernel_trace.csv and the files beside it",
    _matches,
    _read,
    together,
    rocprof.process_of,
)
