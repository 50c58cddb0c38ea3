"""Traces that are SQLite databases, nsys' and rocpd's, as rows (`tests.read.evidence_rows`), and written again."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Final

from tests.read.evidence_rows import CALL, COPY, KERNEL, MARK, OPERATOR, STEP, File, Json, Row


def tables_of(path: Path) -> list[str]:
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


def read_nsys(path: Path, name: Path) -> File:
    db = sqlite3.connect(path)
    present = tables_of(path)
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


def write_nsys(file: File, path: Path) -> None:
    path.write_bytes(file.rest)
    db = sqlite3.connect(path)
    present = tables_of(path)
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


def read_rocpd(path: Path, name: Path) -> File:
    db = sqlite3.connect(path)
    suffix = next(table for table in tables_of(path) if table.startswith("rocpd_string")).removeprefix("rocpd_string")
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


def write_rocpd(file: File, path: Path) -> None:
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
