"""Traces of every format as rows that can be taken away, renamed, moved or added, and a job that is written in all of
them.

`read_files(folder)` gives the trace files of a folder, `File.write(folder)` writes one. A row keeps the record that it
was read from, so that what is not changed is written as it was.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import sqlite3
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

KERNEL, COPY, CALL, OPERATOR, MARK, OTHER = "kernel", "copy", "call", "operator", "mark", "other"
STEP: Final = re.compile(r"(ProfilerStep#|iteration#|aorta\.step=|step[= ])\d+$")
Json = dict[str, Any]


@dataclass
class Row:
    """An event: what it is, and what all formats say of it. Times are in ns of the trace."""

    what: str
    name: str
    start_ns: int
    end_ns: int
    device: Any = None
    stream: Any = None
    link: Any = None
    category: str | None = None
    args: Json = field(default_factory=dict)
    raw: Any = None

    @property
    def communicates(self) -> bool:
        return self.what in (KERNEL, OPERATOR) and COMMUNICATES.match(self.name) is not None


COMMUNICATES: Final = re.compile(
    r".*(nccl(Symk)?(Dev)?Kernel|rcclGenericKernel|msccl|cross_device_reduce|multimem_all|nvshmem)|gloo:", re.IGNORECASE
)
"""What a device, or gloo, ran of a collective."""
ISSUES: Final = re.compile(r"c10d::|_c10d_functional::|record_param_comms|nccl:|nccl[A-Z]")


@dataclass
class File:
    """One trace. `facts`: what it says of its process: `rank`, `world_size`, `host`, `clock`, `process`; None is left
    out.
    """

    path: Path
    format: str
    rows: list[Row]
    facts: Json
    rest: Any = None

    def write(self, folder: Path) -> None:
        path = folder / self.path
        path.parent.mkdir(parents=True, exist_ok=True)
        FORMATS[self.format][1](self, path)

    def changed(self, rows: Iterable[Row] | None = None, **facts: Any) -> File:
        return replace(self, rows=[*self.rows] if rows is None else [*rows], facts={**self.facts, **facts})


def read_files(folder: Path) -> list[File]:
    """The trace files below a folder, or the file itself, that are of a known format."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else [folder]
    base = folder if folder.is_dir() else folder.parent
    return [file for path in paths if (file := read_file(path, path.relative_to(base))) is not None]


def read_file(path: Path, name: Path) -> File | None:
    known = next((each for each, (_, _, ours) in FORMATS.items() if ours(path)), None)
    if known is None:
        return None
    read: Callable[[Path, Path], File] = FORMATS[known][0]
    return read(path, name)


# Kineto ---------------------------------------------------------------------------------------------------------------

_CATEGORIES: Final = {
    **dict.fromkeys(("kernel", "Kernel"), KERNEL),
    **dict.fromkeys(("gpu_memcpy", "gpu_memset", "Memcpy", "Memset"), COPY),
    **dict.fromkeys(("cuda_runtime", "cuda_driver", "hip_runtime", "Runtime"), CALL),
    **dict.fromkeys(("cpu_op", "Operator", "user_annotation"), OPERATOR),
}


def _is_kineto(path: Path) -> bool:
    return path.name.endswith((".json", ".json.gz")) and b'"rocprofiler-sdk-tool"' not in _text(path)[:4096]


def _text(path: Path) -> bytes:
    data = path.read_bytes()
    return gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data


def _read_kineto(path: Path, name: Path) -> File:
    document = json.loads(_text(path))
    events = document.pop("traceEvents") if isinstance(document, dict) else document
    document = document if isinstance(document, dict) else {}
    rows = []
    for event in events:
        what = _CATEGORIES.get(str(event.get("cat")), OTHER) if event.get("ph") == "X" else OTHER
        if what == OTHER or not isinstance(event.get("dur"), int | float):
            rows.append(Row(OTHER, str(event.get("name")), 0, 0, raw=event))
            continue
        start, args = round(float(event["ts"]) * 1000), event.get("args") or {}
        text, link = str(event["name"]), args.get("correlation", args.get("External id"))
        what = MARK if what == OPERATOR and STEP.match(text) else what
        end = start + round(event["dur"] * 1000)
        rows.append(Row(what, text, start, end, event["pid"], event["tid"], link, event["cat"], args, event))
    stated = document.get("distributedInfo") or {}
    facts = {"rank": stated.get("rank"), "world_size": stated.get("world_size"), "host": document.get("host_name")}
    facts |= {"clock": document.get("baseTimeNanoseconds"), "backend": stated.get("backend")}
    return File(name, "kineto", rows, facts, document)


def _write_kineto(file: File, path: Path) -> None:
    events = []
    for row in file.rows:
        if row.what == OTHER:
            events.append(row.raw)
            continue
        times = {"ts": row.start_ns / 1000, "dur": (row.end_ns - row.start_ns) / 1000}
        events.append(
            {**(row.raw or {"ph": "X"}), "cat": row.category, "name": row.name, "pid": row.device, "tid": row.stream}
            | times
            | {"args": row.args}
        )
    stated = {key: file.facts[key] for key in ("rank", "world_size", "backend") if file.facts.get(key) is not None}
    document = {**file.rest, "distributedInfo": {**(file.rest.get("distributedInfo") or {}), **stated}}
    for key in {"rank", "world_size", "backend"} - stated.keys():
        document["distributedInfo"].pop(key, None)
    document |= {"host_name": file.facts["host"], "baseTimeNanoseconds": file.facts["clock"]}
    document = {key: value for key, value in document.items() if value not in (None, {})}
    data = json.dumps({**document, "traceEvents": events}).encode()
    path.write_bytes(gzip.compress(data, 1) if path.suffix == ".gz" else data)


# rocprofv3: JSON and CSV ----------------------------------------------------------------------------------------------


def _read_rocprof_json(path: Path, name: Path) -> File:
    document = json.loads(_text(path))
    process = document["rocprofiler-sdk-tool"][0]
    records, strings = process["buffer_records"], process["strings"]
    symbols = {each["kernel_id"]: each["formatted_kernel_name"] for each in process["kernel_symbols"]}
    texts = {each["key"]: each["value"] for each in strings["marker_api"]}
    rows = []
    for table, what in (
        *(("kernel_dispatch", KERNEL), ("memory_copy", COPY), ("hip_api", CALL)),
        *(("rccl_api", OPERATOR), ("marker_api", MARK)),
    ):
        for raw in records.pop(table, []):
            link = raw.get("correlation_id", {}).get("internal")
            agent = raw.get("dispatch_info", {}).get("agent_id", raw.get("dst_agent_id", {})).get("handle")
            text = symbols[raw["dispatch_info"]["kernel_id"]] if what == KERNEL else texts.get(link, "")
            if what in (COPY, CALL, OPERATOR):
                text = strings["buffer_records"][raw["kind"]]["operations"][raw["operation"]]
            span = raw["start_timestamp"], raw["end_timestamp"]
            rows.append(Row(what, text, *span, agent, raw.get("stream_id", {}).get("handle"), link, table, raw=raw))
    return File(name, "rocprofv3-json", rows, {"host": process["metadata"]["node"]["hostname"]}, document)


def _write_rocprof_json(file: File, path: Path) -> None:
    document = deepcopy(file.rest)
    process = document["rocprofiler-sdk-tool"][0]
    process["metadata"]["node"] = {"hostname": file.facts["host"]} if file.facts["host"] else {}
    records, strings = process["buffer_records"], process["strings"]
    symbols: dict[str, int] = {}
    texts: dict[int, str] = {}
    for row in file.rows:
        raw = deepcopy(row.raw)
        raw |= {"start_timestamp": row.start_ns, "end_timestamp": row.end_ns}
        raw["correlation_id"] = {"internal": row.link if row.link is not None else 0, "external": 0}
        if row.what in (KERNEL, COPY):
            raw["stream_id"] = {"handle": row.stream or 0}
        if row.what == COPY:
            raw["dst_agent_id"] = {"handle": row.device or 0}
        if row.what == KERNEL:
            code = symbols.setdefault(row.name, len(symbols) + 1)
            dispatch = int(row.args.get("dispatch", raw["dispatch_info"]["dispatch_id"]))
            place = {"kernel_id": code, "agent_id": {"handle": row.device or 0}, "dispatch_id": dispatch}
            raw["dispatch_info"] |= place
        elif row.what == MARK:
            texts[int(row.link)] = row.name
        else:
            operations = strings["buffer_records"][raw["kind"]]["operations"]
            if row.name not in operations:
                operations.append(row.name)
            raw["operation"] = operations.index(row.name)
        records.setdefault(str(row.category), []).append(raw)
    process["kernel_symbols"] = [
        {"kernel_id": code, "formatted_kernel_name": text, "demangled_kernel_name": text}
        for text, code in symbols.items()
    ]
    strings["marker_api"] = [{"key": key, "value": text} for key, text in texts.items()]
    path.write_text(json.dumps(document))


_CSV: Final = {
    "kernel_trace": KERNEL,
    "memory_copy_trace": COPY,
    "rccl_api_trace": OPERATOR,
    "hip_api_trace": CALL,
    "marker_api_trace": MARK,
}
_CSV_NAMES: Final = {KERNEL: "Kernel_Name", COPY: "Direction"}


def _read_csv(path: Path, name: Path) -> File:
    rows, heads = [], {}
    stem = path.name.removesuffix("kernel_trace.csv")
    for table, what in _CSV.items():
        other = path.with_name(f"{stem}{table}.csv")
        if not other.exists():
            continue
        reader = csv.DictReader(io.StringIO(other.read_text()))
        heads[table] = list(reader.fieldnames or ())
        for raw in reader:
            device = raw.get("Agent_Id") or raw.get("Destination_Agent_Id")
            span = int(raw["Start_Timestamp"]), int(raw["End_Timestamp"])
            text = raw[_CSV_NAMES.get(what, "Function")]
            link = raw.get("Correlation_Id")
            rows.append(Row(what, text, *span, device, raw.get("Stream_Id"), link, table, raw=raw))
    return File(name, "rocprofv3-csv", rows, {}, heads)


def _write_csv(file: File, path: Path) -> None:
    stem = path.name.removesuffix("kernel_trace.csv")
    for table, head in file.rest.items():
        rows = [row for row in file.rows if row.category == table]
        if not rows and table != "kernel_trace":
            continue
        text = io.StringIO()
        writer = csv.DictWriter(text, head, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            raw = {**row.raw, "Start_Timestamp": row.start_ns, "End_Timestamp": row.end_ns}
            raw |= {_CSV_NAMES.get(row.what, "Function"): row.name, "Correlation_Id": row.link}
            if row.what in (KERNEL, COPY):
                raw |= {"Stream_Id": row.stream or 0}
                raw["Agent_Id" if row.what == KERNEL else "Destination_Agent_Id"] = row.device
            if row.what == KERNEL:
                raw["Dispatch_Id"] = row.args.get("dispatch", raw["Dispatch_Id"])
            writer.writerow({key: raw.get(key, "") for key in head})
        path.with_name(f"{stem}{table}.csv").write_text(text.getvalue())


# SQLite: rocpd and nsys -----------------------------------------------------------------------------------------------


def _tables(path: Path) -> list[str]:
    if path.read_bytes()[:15] != b"SQLite format 3":
        return []
    db = sqlite3.connect(path)
    found = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    db.close()
    return found


def _select(db: sqlite3.Connection, sql: str) -> list[Json]:
    cursor = db.execute(sql)
    names = [column[0] for column in cursor.description]
    return [dict(zip(names, values, strict=True)) for values in cursor]


def _insert(db: sqlite3.Connection, table: str, raw: Json) -> int:
    columns = ", ".join(f'"{name}"' for name in raw)
    cursor = db.execute(f'INSERT INTO "{table}" ({columns}) VALUES ({", ".join("?" * len(raw))})', (*raw.values(),))
    return int(cursor.lastrowid or 0)


_NSYS: Final = {
    "CUPTI_ACTIVITY_KIND_KERNEL": KERNEL,
    "CUPTI_ACTIVITY_KIND_MEMCPY": COPY,
    "CUPTI_ACTIVITY_KIND_RUNTIME": CALL,
    "NVTX_EVENTS": MARK,
}


def _read_nsys(path: Path, name: Path) -> File:
    db = sqlite3.connect(path)
    present = _tables(path)
    strings = {row["id"]: row["value"] for row in _select(db, "SELECT id, value FROM StringIds")}
    rows = []
    for table, what in _NSYS.items():
        for raw in _select(db, f"SELECT * FROM {table}") if table in present else []:
            if raw["end"] is None:
                continue
            text = strings.get(raw.get({KERNEL: "demangledName", CALL: "nameId"}.get(what)), "")
            if what == MARK:
                text = raw["text"] or strings.get(raw["textId"], "")
            kind = OPERATOR if what == MARK and not STEP.match(text) else what
            place = raw.get("deviceId"), raw.get("streamId"), raw.get("correlationId")
            rows.append(Row(kind, text, raw["start"], raw["end"], *place, table, raw=raw))
    host = next((row["value"] for row in _select(db, "SELECT * FROM TARGET_INFO_SYSTEM_ENV")), None)
    clock = next((row["utcEpochNs"] for row in _select(db, "SELECT * FROM TARGET_INFO_SESSION_START_TIME")), None)
    db.close()
    return File(name, "nsys", rows, {"host": host, "clock": clock}, path.read_bytes())


def _write_nsys(file: File, path: Path) -> None:
    path.write_bytes(file.rest)
    db = sqlite3.connect(path)
    present = _tables(path)
    strings: dict[str, int] = {}
    db.execute("DELETE FROM StringIds")
    db.execute("DELETE FROM TARGET_INFO_SYSTEM_ENV" if file.facts["host"] is None else "SELECT 1")
    db.execute("UPDATE TARGET_INFO_SYSTEM_ENV SET value = ?", (file.facts["host"],))
    if file.facts["clock"] is None:
        db.execute("DROP TABLE TARGET_INFO_SESSION_START_TIME")
    else:
        db.execute("UPDATE TARGET_INFO_SESSION_START_TIME SET utcEpochNs = ?", (file.facts["clock"],))
    for table in _NSYS:
        if table in present:
            db.execute(f"DELETE FROM {table}")
    for row in file.rows:
        raw = {**row.raw, "start": row.start_ns, "end": row.end_ns}
        raw |= {key: value for key, value in (("deviceId", row.device), ("streamId", row.stream)) if key in raw}
        if "correlationId" in raw:
            raw["correlationId"] = row.link
        if row.what == KERNEL:
            code = strings.setdefault(row.name, len(strings) + 1)
            raw |= {"demangledName": code, "shortName": code}
        elif row.what == CALL:
            raw["nameId"] = strings.setdefault(row.name, len(strings) + 1)
        elif row.category == "NVTX_EVENTS":
            raw |= {"text": row.name, "textId": None}
        if row.category in present:
            _insert(db, str(row.category), raw)
    db.executemany("INSERT INTO StringIds VALUES (?, ?)", [(code, text) for text, code in strings.items()])
    for table in _NSYS:  # nsys creates a table only when it has rows
        if table in present and not db.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0]:
            db.execute(f"DROP TABLE {table}")
    db.commit()
    db.close()


def _read_rocpd(path: Path, name: Path) -> File:
    db = sqlite3.connect(path)
    suffix = next(table for table in _tables(path) if table.startswith("rocpd_string")).removeprefix("rocpd_string")
    strings = {row["id"]: row["string"] for row in _select(db, f'SELECT * FROM "rocpd_string{suffix}"')}
    symbols = {
        row["id"]: row["display_name"] for row in _select(db, f'SELECT * FROM "rocpd_info_kernel_symbol{suffix}"')
    }
    events = {row["id"]: row for row in _select(db, f'SELECT * FROM "rocpd_event{suffix}"')}
    rows = []
    for table in ("kernel_dispatch", "memory_copy", "region"):
        for raw in _select(db, f'SELECT * FROM "rocpd_{table}{suffix}"'):
            event = events.get(raw.get("event_id"), {})
            category = strings.get(event.get("category_id"), "")
            what = KERNEL if table == "kernel_dispatch" else COPY
            text = symbols.get(raw.get("kernel_id"), strings.get(raw.get("name_id"), ""))
            if table == "region":
                what = CALL if category.startswith("HIP") else OPERATOR if category == "RCCL_API" else MARK
                text = json.loads(event.get("extdata") or "{}").get("message", text)
            device, link = raw.get("agent_id", raw.get("dst_agent_id")), event.get("stack_id")
            link = event.get("parent_stack_id", link) if table == "kernel_dispatch" else link
            span = raw["start"], raw["end"]
            rows.append(Row(what, text, *span, device, raw.get("stream_id"), link, table, raw=(raw, event)))
    about = _select(db, f'SELECT * FROM "rocpd_info_process{suffix}"')[0]
    environment = json.loads(about["environment"] or "{}")
    host = _select(db, f'SELECT * FROM "rocpd_info_node{suffix}"')[0]["hostname"]
    db.close()
    facts = {"rank": environment.get("RANK"), "world_size": environment.get("WORLD_SIZE"), "host": host}
    return File(name, "rocpd", rows, facts, (path.read_bytes(), suffix))


def _write_rocpd(file: File, path: Path) -> None:
    data, suffix = file.rest
    path.write_bytes(data)
    db = sqlite3.connect(path)
    for table in ("kernel_dispatch", "memory_copy", "region", "event"):
        db.execute(f'DELETE FROM "rocpd_{table}{suffix}"')
    environment = {"RANK": file.facts["rank"], "WORLD_SIZE": file.facts["world_size"]}
    stated = json.dumps({key: str(value) for key, value in environment.items() if value is not None})
    db.execute(f'UPDATE "rocpd_info_process{suffix}" SET environment = ?', (stated,))
    db.execute(f'UPDATE "rocpd_info_node{suffix}" SET hostname = ?', (file.facts["host"],))
    names: dict[tuple[str, str], int] = {}

    def code(table: str, column: str, text: str) -> int:
        if (table, text) not in names:
            names[table, text] = _insert(db, f"rocpd_{table}{suffix}", {column: text})
        return names[table, text]

    for row in file.rows:
        raw, event = ({key: value for key, value in part.items() if key != "id"} for part in row.raw)
        raw |= {"start": row.start_ns, "end": row.end_ns}
        if row.what in (KERNEL, COPY):
            raw |= {"agent_id" if row.what == KERNEL else "dst_agent_id": row.device, "stream_id": row.stream}
        if row.what == KERNEL:
            raw |= {"kernel_id": code("info_kernel_symbol", "display_name", row.name)}
            raw["dispatch_id"] = row.args.get("dispatch", raw["dispatch_id"])
            event["parent_stack_id"] = row.link
        else:
            raw["name_id"] = code("string", "string", row.name)
            if row.what != COPY:
                event |= {"stack_id": row.link, "extdata": None}
        if row.what != COPY:
            raw["event_id"] = _insert(db, f"rocpd_event{suffix}", event)
        _insert(db, f"rocpd_{row.category}{suffix}", raw)
    db.commit()
    db.close()


def _is_rocprof_json(path: Path) -> bool:
    return path.name.endswith((".json", ".json.gz")) and b'"rocprofiler-sdk-tool"' in _text(path)[:4096]


FORMATS: Final[dict[str, tuple[Any, Any, Any]]] = {
    "rocprofv3-json": (_read_rocprof_json, _write_rocprof_json, _is_rocprof_json),
    "rocprofv3-csv": (_read_csv, _write_csv, lambda path: path.name.endswith("kernel_trace.csv")),
    "rocpd": (_read_rocpd, _write_rocpd, lambda path: any(each.startswith("rocpd_string_") for each in _tables(path))),
    "nsys": (_read_nsys, _write_nsys, lambda path: "StringIds" in _tables(path)),
    "kineto": (_read_kineto, _write_kineto, _is_kineto),
}
"""Format -> how a file is read, written and recognised."""
