"""Reads rocprofv3's `*_results.db` (rocpd, SQLite, schema 3), and rocmProfileData's older databases (RPD), into one
`Trace` per process.

The views of a rocpd file (`kernels`, `regions`) are inner joins, in which a dispatch without event, thread or string
vanishes. So the stored tables `rocpd_<what>_<guid>` are joined here, where nothing is lost (W16). An event's `stack_id`
is the correlation id of the call, its `correlation_id` the external one. Must not: use anything in the environment of a
process but what tells its rank (it may hold secrets).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec
import numpy as np

from aorta.errors import InputError
from aorta.read.traces import rocprof
from aorta.read.traces.interval_table import NULL, Intervals, Trace, look_up
from aorta.read.traces.open import Database, coded, rows_of
from aorta.read.traces.reader import SERIALISED, Process, Ranges, Reader, TraceInput, copies

_DISPATCH: Final = "rocpd_kernel_dispatch"
_VISIBLE: Final = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
_SCHEMA: Final = "3"
_SPAN: Final = "start_ns=start end_ns=end"
_REGION_TEXTS: Final = {"text": "s.string", "extra": "CAST(extdata AS TEXT)"}


def _read(source: TraceInput) -> Iterator[Trace]:
    db = source.database
    assert db is not None
    guids = sorted(table.removeprefix(_DISPATCH) for table in db.tables if table.startswith(_DISPATCH))
    if not guids:
        raise InputError(
            f"{db.origin}: no table {_DISPATCH}_<guid>; it holds {', '.join(sorted(db.tables)[:8]) or 'no tables'}. "
            "Was it recorded with --kernel-trace, by rocprofv3 of ROCm 7?"
        )
    owners = ((table, db.stored(table, "", "pid")) for table in (f"{_DISPATCH}{guid}" for guid in guids))
    shared = sum(len(db.select(table, f"SELECT DISTINCT pid FROM {sql}")["pid"]) for table, sql in owners) > 1
    traces = [trace for guid in guids for trace in _session(source, db, guid, shared=shared)]
    if not traces:
        raise InputError(f"{db.origin}: {rocprof.NO_KERNELS}")
    yield from traces


def _session(source: TraceInput, db: Database, guid: str, *, shared: bool) -> Iterator[Trace]:
    """Yield the traces of one guid of a database, which is usually one process: those that dispatched kernels."""

    def stored(table: str, required: str, optional: str = "") -> str:
        return db.stored(f"rocpd_{table}{guid}", required, optional)

    def select(table: str, sql: str, *texts: str) -> dict[str, Any]:
        return db.select(f"rocpd_{table}{guid}", sql, texts)

    sql = f"SELECT CAST(value AS TEXT) AS version FROM {stored('metadata', 'tag value')} WHERE tag = 'schema_version'"
    versions = select("metadata", sql, "version")["version"]
    if {version.split(".")[0] for version in versions} - {_SCHEMA} or f"rocpd_metadata{guid}" not in db.tables:
        raise InputError(
            f"{db.origin}: rocpd schema version {', '.join(versions) or 'unknown'}; this AORTA reads version {_SCHEMA}"
        )
    event = stored("event", "id", "category_id correlation=stack_id ancestor=parent_stack_id extdata")
    string = stored("string", "id string")
    agent = stored("info_agent", "id type", "type_index absolute_index")
    gpu = f"(SELECT id, COALESCE(type_index, absolute_index) AS number FROM {agent} WHERE type = 'GPU')"
    dispatch = stored(
        "kernel_dispatch",
        f"{_SPAN} name=kernel_id agent_id",
        "pid thread=tid dispatch=dispatch_id queue=queue_id stream=stream_id event_id",
    )
    ran = select(
        "kernel_dispatch",
        "SELECT start_ns, end_ns, pid, thread, dispatch, queue, stream, name, number AS device, correlation, ancestor "
        f"FROM {dispatch} LEFT JOIN {gpu} g ON g.id = agent_id LEFT JOIN {event} e ON e.id = event_id",
    )
    counted = select(  # rocprof-sys has samples there as well, which are of no dispatch
        "pmc_event",
        f"SELECT COUNT(*) AS many FROM {stored('pmc_event', 'event_id')} JOIN {dispatch} d USING (event_id)",
    )
    copy = stored(
        "memory_copy", f"{_SPAN} name=name_id", "pid dst_agent_id src_agent_id bytes=size stream=stream_id event_id"
    )
    copied = select(
        "memory_copy",
        "SELECT start_ns, end_ns, pid, bytes, stream, name, correlation, COALESCE(t.number, f.number) AS device "
        f"FROM {copy} LEFT JOIN {gpu} t ON t.id = dst_agent_id LEFT JOIN {gpu} f ON f.id = src_agent_id "
        f"LEFT JOIN {event} e ON e.id = event_id",
    )
    region = stored("region", f"{_SPAN} name_id", "pid thread=tid event_id")

    def regions(category: str, *texts: str) -> dict[str, Any]:
        """Return what shares a table: calls of RCCL and HIP, and markers, whose text is in the event or its name."""
        words = "".join(f", {_REGION_TEXTS[text]} AS {text}" for text in texts)
        return select(
            "region",
            f"SELECT start_ns, end_ns, pid, thread, correlation{words} FROM {region} r "
            f"CROSS JOIN {event} e ON e.id = event_id CROSS JOIN {string} c ON c.id = category_id "
            f"LEFT JOIN {string} s ON s.id = name_id WHERE c.string {category}",
            *texts,
        )

    launches = regions(f"GLOB '{rocprof.HIP_API}*'", "text")
    calls = regions(f"= '{rocprof.RCCL_API}'", "text")
    marks = regions(f"IN {(*rocprof.MARKERS, 'MARKER_API')}", "text", "extra")
    strings = db.texts(f"rocpd_string{guid}", "id", "string")
    symbols = db.texts(f"rocpd_info_kernel_symbol{guid}", "id", "display_name", "kernel_name")
    hosts = {*db.texts(f"rocpd_info_node{guid}", "id", "hostname").values()}
    for ident in np.unique(ran["pid"]).tolist():
        own_kernels, own_copies, own_launches, own_calls, own_marks = (
            rows_of(rows, rows["pid"] == ident) for rows in (ran, copied, launches, calls, marks)
        )
        table = stored("info_process", "id pid", "environment")
        sql = f"SELECT pid, CAST(environment AS TEXT) AS environment FROM {table} WHERE id = {ident}"
        about = select("info_process", sql, "environment")
        pid = next((number for number in about["pid"].tolist() if number != NULL), None)
        environment = _object(next(iter(about["environment"]), ""))
        used = np.unique(own_kernels["device"])
        process = Process(
            f"{db.origin} (process {pid})" if shared else db.origin,
            pid=pid,
            host=next(iter(hosts)) if len(hosts) == 1 else None,
            environment_rank=_number(environment.get("RANK")),
            environment_world=_number(environment.get("WORLD_SIZE")),
            gpus=tuple(used[used != NULL].tolist()),
            all_gpus_visible=not any(environment.get(name) for name in _VISIBLE) if environment else None,
            shared=shared,
        )
        own_kernels["name"], names = coded(own_kernels["name"], symbols)
        # The text of a ROCTx range: its event has it in a JSON object, or it is the name.
        messages = [_object(extra).get("message") for extra in own_marks["extra"]]
        texts = [
            text if text and isinstance(text, str) else name
            for text, name in zip(messages, own_marks["text"], strict=True)
        ]
        yield rocprof.trace_of_rocprof(
            source,
            ROCPD.name,
            process,
            own_kernels,
            names,
            _copies(db.origin, own_copies, strings),
            Ranges(own_marks["start_ns"], own_marks["end_ns"], texts),
            own_launches,
            own_calls,
            copied_by=own_copies["correlation"],
            gaps=SERIALISED if counted["many"].any() else (),
            copies_observed=bool(len(own_copies["name"])),
        )


def _copies(origin: str, rows: dict[str, Any], strings: Mapping[int, str]) -> Intervals:
    columns = {column: rows[column] for column in ("start_ns", "end_ns", "device", "stream", "bytes") if column in rows}
    return copies(origin, *coded(rows["name"], strings), **columns)


def _object(text: str) -> dict[str, object]:
    """Decode a JSON object; empty where the text is none, so that its facts are unknown."""
    try:
        return msgspec.json.decode(text, type=dict[str, object])
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return {}


def _number(text: object) -> int | None:
    digits = str(text)
    return int(digits) if digits.isascii() and digits.isdecimal() and len(digits) < 10 else None


def _read_rpd(source: TraceInput) -> Iterator[Trace]:
    """Read RPD: `rocpd_op` has what ran on devices, `rocpd_api` the calls that launched it, and ranges of ROCTx as
    calls named `UserMarker`.
    """
    db = source.database
    assert db is not None
    strings = db.texts("rocpd_string", "id", "string")
    work = db.columns(
        "rocpd_op", f"dispatch=id {_SPAN} kind=opType_id", "described=description_id device=gpuId queue=queueId"
    )
    calls = db.columns("rocpd_api", f"id {_SPAN}", "pid tid function=apiName_id args=args_id")
    links = db.columns("rocpd_api_ops", "api_id op_id")
    named = db.columns("rocpd_kernelapi", "api_ptr_id kernelName_id")
    work["correlation"] = call = look_up(work["dispatch"], links["op_id"], links["api_id"])
    work["thread"], work["pid"] = (look_up(call, calls["id"], calls[name]) for name in ("tid", "pid"))
    work["stream"] = np.full(len(call), NULL)
    without = coded(work["described"], strings)[0] == NULL
    of_call = look_up(call, named["api_ptr_id"], named["kernelName_id"])
    work["name"] = np.where(without, of_call, work["described"])
    runs = np.array([strings.get(kind, "").startswith("Kernel") for kind in work["kind"].tolist()], bool)
    if not runs.any():
        raise InputError(f"{db.origin}: no KernelExecution in rocpd_op: record kernels with RPD's librpd_tracer")
    is_mark = np.array([strings.get(code) == "UserMarker" for code in calls["function"].tolist()], bool)
    processes = np.unique(work["pid"][runs]).tolist()
    for pid in processes:
        ran, copied = (rows_of(work, (work["pid"] == pid) & chosen) for chosen in (runs, ~runs))
        own, marks = (rows_of(calls, (calls["pid"] == pid) & chosen) for chosen in (True, is_mark))
        ran["name"], names = coded(ran["name"], strings)
        ran["dispatch"] = np.full(len(ran["name"]), NULL)  # it numbers the work of all processes, copies too
        shared = len(processes) > 1
        where = f"{db.origin} (process {pid})" if shared else db.origin
        yield rocprof.trace_of_rocprof(
            source,
            RPD.name,
            Process(where, pid=pid if pid != NULL else None, shared=shared),
            ran,
            names,
            _copies(db.origin, copied | {"name": copied["kind"]}, strings),
            Ranges(marks["start_ns"], marks["end_ns"], [strings.get(code, "") for code in marks["args"].tolist()]),
            {
                "correlation": own["id"],
                "start_ns": own["start_ns"],
                "end_ns": own["end_ns"],
                "text": [strings.get(code, "") for code in own["function"].tolist()],
            },
            copied_by=copied["correlation"],
            clock="unknown",
            copies_observed=bool(len(copied["dispatch"])),
        )


ROCPD: Final = Reader(
    "rocpd",
    "rocprofv3 *_results.db",
    lambda head: "rocpd_op" not in head.tables and any(name.startswith("rocpd_") for name in head.tables),
    _read,
    process=rocprof.process_of,
)
RPD: Final = Reader("rpd", "rocmProfileData .rpd", lambda head: "rocpd_op" in head.tables, _read_rpd)
