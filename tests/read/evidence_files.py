"""Rows written as a trace, in every format (`write_file`).

In formats of other tools than Kineto a row is like one that `nsys_files` or `rocprof_files` has of its kind, with
times, a name, numbers, a device and a stream of its own.
"""

from __future__ import annotations

import csv
import io
import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from copy import deepcopy
from pathlib import Path
from typing import Final, NamedTuple

from tests.read import nsys_files, rocprof_files
from tests.read.evidence_rows import CALL, COPY, KERNEL, MARK, OPERATOR, OTHER, File, Json


def write_file(file: File, folder: Path) -> None:
    """Write one trace below a folder."""
    path = folder / file.path
    path.parent.mkdir(parents=True, exist_ok=True)
    FORMATS[file.format].write(file, path)


def _write_kineto(file: File, path: Path) -> None:
    events = []
    for row in file.rows:
        if row.what == OTHER:
            events.append(row.raw)
            continue
        times = {"ts": row.start_ns / 1000, "dur": (row.end_ns - row.start_ns) / 1000}
        shown = {"cat": row.category, "name": row.name, "pid": row.device, "tid": row.stream, "args": row.args}
        events.append({"ph": "X", **shown, **times})
    stated = {key: file.facts[key] for key in ("rank", "world_size", "backend") if file.facts.get(key) is not None}
    document = {**file.rest, "distributedInfo": stated}
    document |= {"host_name": file.facts["host"], "baseTimeNanoseconds": file.facts["clock"]}
    document = {key: value for key, value in document.items() if value not in (None, {})}
    path.write_text(json.dumps({**document, "traceEvents": events}))


_ROCPROF: Final = {
    KERNEL: "kernel_dispatch",
    COPY: "memory_copy",
    CALL: "hip_api",
    OPERATOR: "rccl_api",
    MARK: "marker_api",
}


def _write_rocprof_json(file: File, path: Path) -> None:
    document = rocprof_files.as_json(file.rest)
    process = document["rocprofiler-sdk-tool"][0]
    process["metadata"]["node"] = {"hostname": file.facts["host"]} if file.facts["host"] else {}
    records, strings = process["buffer_records"], process["strings"]
    like = {what: records.pop(table)[-1] for what, table in _ROCPROF.items()}
    symbols: dict[str, int] = {}
    texts: dict[int, str] = {}
    for row in file.rows:
        raw = deepcopy(like[row.what])
        raw |= {"start_timestamp": row.start_ns, "end_timestamp": row.end_ns}
        raw["correlation_id"] = {"internal": row.link if row.link is not None else 0, "external": 0}
        if row.what in (KERNEL, COPY):
            raw["stream_id"] = {"handle": row.stream or 0}
        if row.what == COPY:
            raw["dst_agent_id"] = {"handle": row.device or 0}
        if row.what == KERNEL:
            code = symbols.setdefault(row.name, len(symbols) + 1)
            dispatch = row.args.get("dispatch", raw["dispatch_info"]["dispatch_id"])
            launched = {"kernel_id": code, "agent_id": {"handle": row.device or 0}, "dispatch_id": dispatch}
            raw["dispatch_info"] |= launched
        elif row.what == MARK:
            texts[int(row.link)] = row.name
        else:
            operations = strings["buffer_records"][raw["kind"]]["operations"]
            if row.name not in operations:
                operations.append(row.name)
            raw["operation"] = operations.index(row.name)
        records.setdefault(_ROCPROF[row.what], []).append(raw)
    process["kernel_symbols"] = [
        {"kernel_id": code, "formatted_kernel_name": text, "demangled_kernel_name": text}
        for text, code in symbols.items()
    ]
    strings["marker_api"] = [{"key": key, "value": text} for key, text in texts.items()]
    path.write_text(json.dumps(document))


_CSV_NAMES: Final = {KERNEL: "Kernel_Name", COPY: "Direction"}


def _write_csv(file: File, path: Path) -> None:
    whole = rocprof_files.as_csv("direct")
    for what, named in _ROCPROF.items():
        table = named.removesuffix("_dispatch")
        rows = [row for row in file.rows if row.what == what]
        if not rows and what != KERNEL:
            continue
        like = [*csv.DictReader(io.StringIO(whole[f"4242_{table}_trace.csv"].decode()))][-1]
        text = io.StringIO()
        writer = csv.DictWriter(text, [*like], quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            raw: Json = {**like, "Start_Timestamp": row.start_ns, "End_Timestamp": row.end_ns}
            raw |= {_CSV_NAMES.get(what, "Function"): row.name, "Correlation_Id": row.link}
            if what in (KERNEL, COPY):
                raw |= {"Stream_Id": row.stream or 0}
                raw["Agent_Id" if what == KERNEL else "Destination_Agent_Id"] = row.device
            if what == KERNEL:
                raw["Dispatch_Id"] = row.args.get("dispatch", like["Dispatch_Id"])
            writer.writerow(raw)
        path.with_name(path.name.replace("kernel", table)).write_text(text.getvalue())


def _select(db: sqlite3.Connection, sql: str) -> Json:
    cursor = db.execute(sql)
    return dict(zip((column[0] for column in cursor.description), cursor.fetchone(), strict=True))


def _insert(db: sqlite3.Connection, table: str, raw: Json) -> int:
    columns = ", ".join(f'"{name}"' for name in raw)
    cursor = db.execute(f'INSERT INTO "{table}" ({columns}) VALUES ({", ".join("?" * len(raw))})', (*raw.values(),))
    return int(cursor.lastrowid or 0)


_NSYS: Final = {
    KERNEL: "CUPTI_ACTIVITY_KIND_KERNEL",
    COPY: "CUPTI_ACTIVITY_KIND_MEMCPY",
    CALL: "CUPTI_ACTIVITY_KIND_RUNTIME",
    **dict.fromkeys((OPERATOR, MARK), "NVTX_EVENTS"),
}


def _write_nsys(file: File, path: Path) -> None:
    nsys_files.write_nsys(path, pids=(file.rest,))
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("PRAGMA synchronous=OFF")  # no test waits for the disk
        like = {table: _select(db, f"SELECT * FROM {table}") for table in _NSYS.values()}
        strings: dict[str, int] = {}
        for table in ("StringIds", *like):
            db.execute(f"DELETE FROM {table}")
        if file.facts["host"] is None:
            db.execute("DELETE FROM TARGET_INFO_SYSTEM_ENV")
        db.execute("UPDATE TARGET_INFO_SYSTEM_ENV SET value = ?", (file.facts["host"],))
        if file.facts["clock"] is None:
            db.execute("DROP TABLE TARGET_INFO_SESSION_START_TIME")
        else:
            db.execute("UPDATE TARGET_INFO_SESSION_START_TIME SET utcEpochNs = ?", (file.facts["clock"],))
        for row in file.rows:
            raw = {**like[_NSYS[row.what]], "start": row.start_ns, "end": row.end_ns}
            if row.what in (KERNEL, COPY):
                raw |= {"deviceId": row.device, "streamId": row.stream}
            if row.what in (KERNEL, COPY, CALL):
                raw["correlationId"] = row.link
            else:
                raw |= {"text": row.name, "textId": None}
            if row.what in (KERNEL, CALL):
                code = strings.setdefault(row.name, len(strings) + 1)
                raw |= {"demangledName": code, "shortName": code} if row.what == KERNEL else {"nameId": code}
            _insert(db, _NSYS[row.what], raw)
        db.executemany("INSERT INTO StringIds VALUES (?, ?)", [(code, text) for text, code in strings.items()])
        for table in like:  # nsys creates a table only when it has rows
            if not db.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0]:
                db.execute(f"DROP TABLE {table}")


_ROCPD: Final = {
    KERNEL: ("kernel_dispatch", 5),
    COPY: ("memory_copy", 1),
    CALL: ("region", 9),
    OPERATOR: ("region", 3),
    MARK: ("region", 12),
}
"""Kind -> its table, and the number of the row there that all of the kind are like."""


def _write_rocpd(file: File, path: Path) -> None:
    stated = {"RANK": file.facts["rank"], "WORLD_SIZE": file.facts["world_size"]}
    environment = {key: str(value) for key, value in stated.items() if value is not None}
    rocprof_files.write_rocpd(path, environment, pid=file.rest)
    suffix = f"_{file.rest:08}_8903_7903_b269_cd8d3745bb8a"
    names: dict[tuple[str, str], int] = {}

    def code(table: str, column: str, text: str) -> int:
        if (table, text) not in names:
            names[table, text] = _insert(db, f"rocpd_{table}{suffix}", {column: text})
        return names[table, text]

    with closing(sqlite3.connect(path)) as db, db:
        db.execute("PRAGMA synchronous=OFF")  # no test waits for the disk
        like = {}
        for what, (table, number) in _ROCPD.items():
            raw = _select(db, f"SELECT * FROM rocpd_{table} WHERE id = {number}")
            event = _select(db, f"SELECT * FROM rocpd_event WHERE id = {raw['event_id']}") if what != COPY else {}
            like[what] = [{key: value for key, value in part.items() if key != "id"} for part in (raw, event)]
        for table in ("kernel_dispatch", "memory_copy", "region", "event"):
            db.execute(f"DELETE FROM rocpd_{table}{suffix}")
        db.execute(f"UPDATE rocpd_info_node{suffix} SET hostname = ?", (file.facts["host"],))
        for row in file.rows:
            raw, event = map(dict, like[row.what])
            raw |= {"start": row.start_ns, "end": row.end_ns}
            if row.what in (KERNEL, COPY):
                raw |= {"agent_id" if row.what == KERNEL else "dst_agent_id": row.device, "stream_id": row.stream}
            if row.what == KERNEL:
                raw |= {"kernel_id": code("info_kernel_symbol", "display_name", row.name)}
                raw["dispatch_id"] = row.args.get("dispatch", raw["dispatch_id"])
                event["parent_stack_id"] = row.link
            else:
                raw["name_id"] = code("string", "string", row.name)
                event |= {"stack_id": row.link, "extdata": None}
            if row.what != COPY:
                raw["event_id"] = _insert(db, f"rocpd_event{suffix}", event)
            _insert(db, f"rocpd_{_ROCPD[row.what][0]}{suffix}", raw)


class Format(NamedTuple):
    """How a trace is written; its name, with the number of its process; what it calls its device; when it begins, and
    what it says of its process.
    """

    write: Callable[[File, Path], None]
    name: str = ""
    device: int | str = 0
    begins_ns: int = 0
    facts: tuple[str, ...] = ()


FORMATS: Final = {
    "kineto": Format(_write_kineto),
    "rocprofv3-json": Format(_write_rocprof_json, "{}_results.json", 7002, rocprof_files.BASE, ("host",)),
    "rocprofv3-csv": Format(_write_csv, "{}_kernel_trace.csv", "Agent 5", rocprof_files.BASE),
    "rocpd": Format(_write_rocpd, "{}_results.db", 3, rocprof_files.BASE, ("rank", "world_size", "host")),
    "nsys": Format(_write_nsys, "{}.sqlite", 0, 0, ("host", "clock")),
}
