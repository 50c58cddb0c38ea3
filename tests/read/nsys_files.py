"""nsys exports, as SQLite: two ranks of one node in one file, each on a device of its own.

Both processes do the same, the second 10,000 ns later. Nanoseconds of the session:

    step=3: [1000, 2000)   gemm [1100, 1500) stream 7, NCCL all-reduce [1400, 1800) stream 20, memcpy [1850, 1900)
    step=4: [2000, 3000)   gemm [2100, 2300) stream 7, launched at 1950, while the host was still in step 3
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Final

EPOCH_NS: Final = 1_790_000_000_000_000_000
LATER_NS: Final = 10_000
PIDS: Final = (5001, 5002)
GEMM: Final = "void cutlass::Kernel2<gemm>(Params)"
NCCL: Final = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"

TABLES: Final = {
    "StringIds": "id INTEGER PRIMARY KEY, value TEXT NOT NULL",
    "CUPTI_ACTIVITY_KIND_KERNEL": "start INT, end INT, deviceId INT, contextId INT, streamId INT, correlationId INT, "
    "globalPid INT, demangledName INT, shortName INT, mangledName INT, gridX INT",
    "CUPTI_ACTIVITY_KIND_MEMCPY": "start INT, end INT, deviceId INT, streamId INT, bytes INT, copyKind INT, "
    "globalPid INT, correlationId INT",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start INT, end INT, eventClass INT, globalTid INT, correlationId INT, nameId INT",
    "NVTX_EVENTS": "start INT, end INT, eventType INT, text TEXT, textId INT, globalTid INT",
    "TARGET_INFO_SESSION_START_TIME": "utcEpochNs INT, utcTime TEXT",
    "TARGET_INFO_SYSTEM_ENV": "name TEXT, value TEXT",
    "ENUM_CUDA_MEMCPY_OPER": "id INTEGER PRIMARY KEY, name TEXT, label TEXT",
}


def global_pid(pid: int) -> int:
    return (1 << 48) + (pid << 24)


def global_tid(pid: int, thread: int) -> int:
    return global_pid(pid) + thread


def write_nsys(
    path: Path, *, without: tuple[str, ...] = (), columns_without: tuple[str, ...] = (), pids: tuple[int, ...] = PIDS
) -> Path:
    """An export; tables and columns named in `without` and `columns_without` do not exist in it."""
    db = sqlite3.connect(path)
    present = {}
    for table, columns in TABLES.items():
        if table not in without:
            kept = [column for column in columns.split(", ") if column.split(" ")[0] not in columns_without]
            present[table] = {column.split(" ")[0] for column in kept}
            db.execute(f"CREATE TABLE {table} ({', '.join(kept)})")
    db.execute("CREATE VIEW endless AS WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x+1 FROM n) SELECT x FROM n")

    def put(table: str, columns: str, *values: object) -> None:
        row = {
            name: value for name, value in zip(columns.split(), values, strict=True) if name in present.get(table, ())
        }
        if row:
            db.execute(
                f"INSERT INTO {table} ({', '.join(row)}) VALUES ({', '.join('?' * len(row))})", tuple(row.values())
            )

    for ident, text in ((1, GEMM), (2, NCCL), (3, "Kernel2"), (4, "ncclDevKernel_AllReduce"), (9, "step=4")):
        put("StringIds", "id value", ident, text)
    put("TARGET_INFO_SESSION_START_TIME", "utcEpochNs", EPOCH_NS)
    put("TARGET_INFO_SYSTEM_ENV", "name value", "Hostname", "dgx1")
    put("ENUM_CUDA_MEMCPY_OPER", "id name label", 1, "HTOD", "Host-to-Device")
    for device, pid in enumerate(pids):
        shift, process, place = LATER_NS * device, global_pid(pid), "start end deviceId streamId globalPid"
        kernels = ((1, 3, 7, 1100, 1500, 11, 1050), (2, 4, 20, 1400, 1800, 12, 1300), (1, 3, 7, 2100, 2300, 13, 1950))
        for name, short, stream, start, end, ident, launch in kernels:
            put(
                "CUPTI_ACTIVITY_KIND_KERNEL",
                f"{place} contextId correlationId demangledName shortName gridX",
                *(start + shift, end + shift, device, stream, process, 1, ident, name, short, 1),
            )
            call = (launch + shift, launch + shift + 5, global_tid(pid, 77), ident)
            put("CUPTI_ACTIVITY_KIND_RUNTIME", "start end globalTid correlationId", *call)
        copy = (1850 + shift, 1900 + shift, device, 7, process, 4096, 1)
        put("CUPTI_ACTIVITY_KIND_MEMCPY", f"{place} bytes copyKind", *copy)
        marks = ((59, "step=3", None, 1000, 2000), (59, None, 9, 2000, 3000), (34, "step=99", None, 1500, None))
        open_end = ((59, "forward", None, 1000, 1500), (59, "step=5", None, 3000, None))
        for kind, text, text_id, start, end in (*marks, *open_end):
            times = (start + shift, None if end is None else end + shift)
            range_ = (*times, kind, text, text_id, global_tid(pid, 70))
            put("NVTX_EVENTS", "start end eventType text textId globalTid", *range_)
    db.commit()
    db.close()
    return path
