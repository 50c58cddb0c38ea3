"""Reads rocprofv3's `*_results.json` into one `Trace` per process.

The numbers of record kinds change between versions, so they are always looked up in the file's own `strings`; a
kernel's name is found by `kernel_id`, not by position. Must not: put a timestamp through a float (W14).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Annotated, Any, Final, TypeAlias

import msgspec
import numpy as np

from aorta.analysis.load import rocprof
from aorta.analysis.load.interval_table import NULL, Trace
from aorta.analysis.load.open import coded
from aorta.analysis.load.trace_source import Process, Ranges, Reader, TraceInput, copies
from aorta.errors import InputError
from aorta.timeline.arrays import Int64

Int: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_SPAN: Final = "start_ns=start_timestamp end_ns=end_timestamp"
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


class _Process(msgspec.Struct):
    buffer_records: _Records
    strings: _Strings = msgspec.field(default_factory=_Strings)
    metadata: _Metadata = msgspec.field(default_factory=_Metadata)
    agents: list[_Agent] = []
    kernel_symbols: list[_Symbol] = []


class _File(msgspec.Struct):
    processes: list[_Process] = msgspec.field(name="rocprofiler-sdk-tool")


_DECODER: Final = msgspec.json.Decoder(_File)


def _read(source: TraceInput) -> Iterator[Trace]:
    path, text = source.place, bytearray()
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
        raise InputError(f"{path}: {len(content.processes)} process(es), {rocprof.NO_KERNELS}")
    for process in computed:
        yield _trace(source, process)


def _trace(source: TraceInput, process: _Process) -> Trace:
    gpus = {agent.id.handle: agent for agent in process.agents if agent.type == _GPU}
    numbers = {
        handle: agent.node_id if agent.logical_node_type_id == NULL else agent.logical_node_type_id
        for handle, agent in gpus.items()
    }
    devices = {handle: number if NULL <= number < 2**31 else NULL for handle, number in numbers.items()}
    records = process.buffer_records
    ran, copied, node = records.kernel_dispatch, records.memory_copy, process.metadata.node
    device = _integers([devices.get(row.dispatch_info.agent_id.handle, NULL) for row in ran])
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
    marks = [row for row in records.marker_api if name(row)[0] in rocprof.MARKERS]
    calls = [row for row in records.rccl_api if name(row)[0] == rocprof.RCCL_API]
    hip = [row for row in records.hip_api if name(row)[0].startswith(rocprof.HIP_API)]
    kernel, names = coded(
        _columns(ran, "kernel=dispatch_info.kernel_id")["kernel"],
        {
            symbol.kernel_id: symbol.formatted_kernel_name or symbol.demangled_kernel_name or symbol.kernel_name
            for symbol in process.kernel_symbols
        },
    )
    return rocprof.trace_of_rocprof(
        source,
        ROCPROF_JSON.name,
        Process(
            source.place,
            pid=process.metadata.pid,
            host=node.hostname if node else None,
            gpus=tuple(np.unique(device[device != NULL]).tolist()),
            all_gpus_visible=all(visible) if visible else None,
        ),
        {**_columns(ran, _KERNELS), "device": device, "name": kernel},
        names,
        copies(
            source.place,
            [name(row)[1] for row in copied],
            (),
            # The GPU at either end; between two GPUs, the one that receives.
            device=_integers(
                [devices.get(row.dst_agent_id.handle, devices.get(row.src_agent_id.handle, NULL)) for row in copied]
            ),
            **_columns(copied, f"{_SPAN} stream=stream_id.handle bytes=bytes"),
        ),
        Ranges(**_columns(marks, _SPAN), texts=[ranged.get(row.correlation_id.internal, "") for row in marks]),
        _columns(hip, "start_ns=start_timestamp correlation=correlation_id.internal"),
        {"text": [name(row)[1] for row in calls], **_columns(calls, f"{_SPAN} {_HOST}")},
        copies_observed=bool(copied),
    )


def _columns(rows: Sequence[msgspec.Struct], fields: str) -> dict[str, Int64]:
    """Return integer columns of rows, by `name here=path there`."""
    return {
        name: _integers(list(map(attrgetter(path), rows)))
        for name, _, path in (field.partition("=") for field in fields.split())
    }


def _integers(values: list[int]) -> Int64:
    """Return values as int64. Handles are unsigned 64-bit numbers; beyond 63 bits they only have to stay distinct."""
    try:
        return np.array(values, np.int64)
    except OverflowError:
        return np.array([value & (2**64 - 1) for value in values], np.uint64).astype(np.int64)


ROCPROF_JSON: Final = Reader(
    "rocprofv3-json",
    "rocprofv3 *_results.json",
    lambda head: head.text[:1] in (b"{", b"[") and b'"rocprofiler-sdk-tool"' in head.text[:4096],
    _read,
    process=rocprof.process_of,
)
