"""Traces of every format as rows: `read_files(folder)` gives those of a folder, `write_file(file, folder)` writes one.

A row keeps the record that it was read from, so that what is not changed is written as it was.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any, Final

from tests.read.evidence_databases import read_nsys, read_rocpd, tables_of, write_nsys, write_rocpd
from tests.read.evidence_rows import CALL, COPY, KERNEL, MARK, OPERATOR, OTHER, STEP, File, Row


def write_file(file: File, folder: Path) -> None:
    """Write one trace below a folder."""
    path = folder / file.path
    path.parent.mkdir(parents=True, exist_ok=True)
    FORMATS[file.format][1](file, path)


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


def _is_rocprof_json(path: Path) -> bool:
    return path.name.endswith((".json", ".json.gz")) and b'"rocprofiler-sdk-tool"' in _text(path)[:4096]


FORMATS: Final[dict[str, tuple[Any, Any, Any]]] = {
    "rocprofv3-json": (_read_rocprof_json, _write_rocprof_json, _is_rocprof_json),
    "rocprofv3-csv": (_read_csv, _write_csv, lambda path: path.name.endswith("kernel_trace.csv")),
    "rocpd": (read_rocpd, write_rocpd, lambda path: any(each.startswith("rocpd_string_") for each in tables_of(path))),
    "nsys": (read_nsys, write_nsys, lambda path: "StringIds" in tables_of(path)),
    "kineto": (_read_kineto, _write_kineto, _is_kineto),
}
"""Format -> how a file is read, written and recognised."""
