"""Reads rocprofv3's `*_results.json`, and its CSV files, into one `Trace` per process.

In the JSON the numbers of record kinds change between versions, so they are always looked up in the file's own
`strings`; a kernel's name is found by `kernel_id`, not by position.

Four variants of CSV are read: of ROCm 6.2/6.3 (agents as bare numbers, no `Stream_Id`), of 6.4 and later ("Agent 4"),
of `rocpd convert` (a leading `Guid`, other capitals, several processes in a file), and any of them with every field
quoted. One process writes several files (`<pid>_kernel_trace.csv`, `<pid>_marker_api_trace.csv`, ...), which are read
together. Columns are found by name, whatever their capitals.

Hardware counters are not read; that they were collected is noted. Must not: find a column by its position, guess what a
device is, or put a timestamp through a float (W14).
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path, PurePath
from typing import IO, TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import msgspec
import numpy as np

from aorta.errors import InputError
from aorta.read.frames import Numbered
from aorta.read.traces.interval_table import NULL, Trace
from aorta.read.traces.open import coded, is_url, joined, rows_of
from aorta.read.traces.reader import SERIALISED, FileHead, Process, Ranges, Reader, TraceInput, copies
from aorta.read.traces.rocprof import HIP_API, MARKERS, NO_KERNELS, RCCL_API, process_of, trace_of_rocprof
from aorta.records.files import NOT_UTF8
from aorta.timeline.arrays import Int64

if TYPE_CHECKING:
    import pandas as pd

_SPAN: Final = "start_ns=start_timestamp end_ns=end_timestamp"
Int: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_HOST: Final = "thread=thread_id correlation=correlation_id.internal"
_KERNELS: Final = (
    f"{_SPAN} {_HOST} ancestor=correlation_id.ancestor dispatch=dispatch_info.dispatch_id "
    "queue=dispatch_info.queue_id.handle stream=stream_id.handle"
)
_GPU: Final = 2
"""`rocprofiler_agent_type_t`: 1 is a CPU, 2 a GPU."""


class _Handle(msgspec.Struct, frozen=True, gc=False):
    handle: int = 0


class _Correlation(msgspec.Struct, frozen=True, gc=False):
    internal: Int = NULL
    ancestor: Int = NULL


class _Dispatch(msgspec.Struct, frozen=True, gc=False):
    agent_id: _Handle
    kernel_id: Int
    queue_id: _Handle = _Handle()
    dispatch_id: Int = NULL


class _Span(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    start_timestamp: Int
    end_timestamp: Int
    thread_id: Int = NULL
    correlation_id: _Correlation = _Correlation()
    stream_id: _Handle = _Handle()


class _Kernel(_Span, frozen=True, gc=False, kw_only=True):
    dispatch_info: _Dispatch


class _Call(_Span, frozen=True, gc=False, kw_only=True):
    kind: Int
    operation: Int


class _Copy(_Call, frozen=True, gc=False, kw_only=True):
    dst_agent_id: _Handle = _Handle()
    src_agent_id: _Handle = _Handle()
    bytes: Int = NULL


class _Records(msgspec.Struct):
    kernel_dispatch: list[_Kernel] = []
    memory_copy: list[_Copy] = []
    rccl_api: list[_Call] = []
    hip_api: list[_Call] = []
    marker_api: list[_Call] = []


class _Operations(msgspec.Struct):
    kind: str
    operations: list[str] = []


class _Text(msgspec.Struct):
    key: Int
    value: str


class _Strings(msgspec.Struct):
    buffer_records: list[_Operations] = []
    marker_api: list[_Text] = []


class _Symbol(msgspec.Struct):
    kernel_id: Int
    formatted_kernel_name: str = ""
    demangled_kernel_name: str = ""
    kernel_name: str = ""


LARGEST_BYTES: Final = 1 << 30
"""Most JSON that is read, inflated: its rows become objects of several times that size."""
_BLOCK: Final = 1 << 20


class _Agent(msgspec.Struct):
    id: _Handle
    type: int = 0
    node_id: Int = NULL
    logical_node_type_id: Int = NULL
    runtime_visibility: dict[str, Any] | None = None


class _Node(msgspec.Struct):
    hostname: str | None = None


class _Metadata(msgspec.Struct):
    pid: int | None = None
    node: _Node | None = None


class _Counted(msgspec.Struct):
    counter_collection: list[msgspec.Raw] = []


class _Process(msgspec.Struct):
    buffer_records: _Records
    callback_records: _Counted = msgspec.field(default_factory=_Counted)
    strings: _Strings = msgspec.field(default_factory=_Strings)
    metadata: _Metadata = msgspec.field(default_factory=_Metadata)
    agents: list[_Agent] = []
    kernel_symbols: list[_Symbol] = []


class _File(msgspec.Struct):
    processes: list[_Process] = msgspec.field(name="rocprofiler-sdk-tool")


_DECODER: Final = msgspec.json.Decoder(_File)


def _read_json(source: TraceInput) -> Iterator[Trace]:
    path, text = source.origin, bytearray()
    while block := source.streams[path].read(_BLOCK):  # in blocks: a single read would allocate the largest size first
        text += block
        if len(text) > LARGEST_BYTES:
            raise InputError(
                f"{path}: more than {LARGEST_BYTES >> 20} MiB of JSON, which has to be in memory at once; record with "
                "rocprofv3 --output-format rocpd instead"
            )
    try:
        content = _DECODER.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{path}: not a rocprofv3 JSON file: {error}") from error
    del text
    computed = [process for process in content.processes if process.buffer_records.kernel_dispatch]
    if not computed:
        raise InputError(f"{path}: {len(content.processes)} process(es), {NO_KERNELS}")
    for process in computed:
        yield _trace(source, process, shared=len(computed) > 1)


def _trace(source: TraceInput, process: _Process, *, shared: bool) -> Trace:
    gpus = {agent.id.handle: agent for agent in process.agents if agent.type == _GPU}
    numbers = {
        handle: agent.node_id if agent.logical_node_type_id == NULL else agent.logical_node_type_id
        for handle, agent in gpus.items()
    }
    devices = {handle: number if NULL <= number < 2**31 else NULL for handle, number in numbers.items()}
    records = process.buffer_records
    ran, copied, node = records.kernel_dispatch, records.memory_copy, process.metadata.node
    device = _int64([devices.get(row.dispatch_info.agent_id.handle, NULL) for row in ran])
    visible = [
        agent.runtime_visibility.get("hip", 1) for agent in gpus.values() if agent.runtime_visibility is not None
    ]

    def name(row: Any) -> tuple[str, str]:
        """Return the names of the kind and operation of a record, "" where the file does not name them."""
        tables = process.strings.buffer_records
        if not 0 <= row.kind < len(tables):
            return "", ""
        table = tables[row.kind]
        return table.kind, table.operations[row.operation] if 0 <= row.operation < len(table.operations) else ""

    ranged = {text.key: text.value for text in process.strings.marker_api}
    marks = [row for row in records.marker_api if name(row)[0] in MARKERS]
    calls = [row for row in records.rccl_api if name(row)[0] == RCCL_API]
    hip = [row for row in records.hip_api if name(row)[0].startswith(HIP_API)]
    kernel, names = coded(
        _columns_of(ran, "kernel=dispatch_info.kernel_id")["kernel"],
        {
            symbol.kernel_id: symbol.formatted_kernel_name or symbol.demangled_kernel_name or symbol.kernel_name
            for symbol in process.kernel_symbols
        },
    )
    return trace_of_rocprof(
        source,
        ROCPROF_JSON.name,
        Process(
            f"{source.origin} (process {process.metadata.pid})" if shared else source.origin,
            pid=process.metadata.pid,
            host=node.hostname if node else None,
            gpus=tuple(np.unique(device[device != NULL]).tolist()),
            all_gpus_visible=all(visible) if visible else None,
            shared=shared,
        ),
        {**_columns_of(ran, _KERNELS), "device": device, "name": kernel},
        names,
        copies(
            source.origin,
            [name(row)[1] for row in copied],
            (),
            # The GPU at either end; between two GPUs, the one that receives.
            device=_int64(
                [devices.get(row.dst_agent_id.handle, devices.get(row.src_agent_id.handle, NULL)) for row in copied]
            ),
            **_columns_of(copied, f"{_SPAN} stream=stream_id.handle bytes=bytes"),
        ),
        Ranges(**_columns_of(marks, _SPAN), texts=[ranged.get(row.correlation_id.internal, "") for row in marks]),
        {"text": [name(row)[1] for row in hip], **_columns_of(hip, f"{_SPAN} {_HOST}")},
        {"text": [name(row)[1] for row in calls], **_columns_of(calls, f"{_SPAN} {_HOST}")},
        copied_by=_columns_of(copied, "correlation=correlation_id.internal")["correlation"],
        gaps=SERIALISED if process.callback_records.counter_collection else (),
        copies_observed=bool(copied),
    )


def _columns_of(rows: Sequence[msgspec.Struct], fields: str) -> dict[str, Int64]:
    """Return integer columns of rows, by `name here=path there`."""
    return {
        name: _int64(list(map(attrgetter(path), rows)))
        for name, _, path in (field.partition("=") for field in fields.split())
    }


def _int64(values: list[int]) -> Int64:
    """Return values as int64. Handles are unsigned 64-bit numbers; beyond 63 bits they only have to stay distinct."""
    try:
        return np.array(values, np.int64)
    except OverflowError:
        return np.array([value & (2**64 - 1) for value in values], np.uint64).astype(np.int64)


ROCPROF_JSON: Final = Reader(
    "rocprofv3-json",
    "rocprofv3 *_results.json",
    lambda head: head.text[:1] in (b"{", b"[") and b'"rocprofiler-sdk-tool"' in head.text[:4096],
    _read_json,
    process=process_of,
)


_TRACES: Final = ("kernel_trace", "memory_copy_trace", "rccl_api_trace", "marker_api_trace", "hip_api_trace")
_COUNTERS: Final = "counter_collection"
STEMS: Final = (*_TRACES, _COUNTERS)
"""Ends of the names of the files that one process writes and this reader uses."""
_ROWS: Final = 1 << 16
"""Rows held as Python objects at a time."""
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


def _read_csv(source: TraceInput) -> Iterator[Trace]:
    texts = Numbered({"": 0})
    parts: dict[str, list[dict[str, Any]]] = {kind: [] for kind in _TABLES}
    counted = {path for path in source.streams if _COUNTERS in PurePath(path).name}
    for path, stream in source.streams.items():
        if path not in counted:
            kind, columns = _table(path, stream, texts)
            parts[kind].append(columns)
    tables = {kind: joined(parts_of, *_columns(kind)) for kind, parts_of in parts.items()}
    if not len(tables["kernel"]["guid"]):
        raise InputError(f"{source.origin}: {NO_KERNELS} and give its kernel_trace.csv")
    guids = set(np.concatenate([table["guid"] for table in tables.values()]).tolist())
    from_name = {int(match[1]) for path in source.streams if (match := _PID.match(PurePath(path).name))}
    words = tuple(texts)

    def codes_where(wanted: Callable[[str], bool]) -> list[int]:
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
            rows_of(called, np.isin(called["domain"], codes_where(wanted)))
            for wanted in (
                lambda text: text.startswith(HIP_API),
                RCCL_API.__eq__,
                MARKERS.__contains__,
            )
        )
        to_host = np.isin(copied["name"], codes_where(lambda text: text.upper().endswith("TO_HOST")))
        yield trace_of_rocprof(
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
    _read_csv,
    together,
    process_of,
)
