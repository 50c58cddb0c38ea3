"""nsys exports, as SQLite (`nsys.sql`): two ranks of one node in one file, each on a device of its own.

Both processes do the same, the second 10,000 ns later. Nanoseconds of the session:

    step=3: [1000, 2000)   gemm [1100, 1500) stream 7, NCCL all-reduce [1400, 1800) stream 20, memcpy [1850, 1900)
    step=4: [2000, 3000)   gemm [2100, 2300) stream 7, launched at 1950, while the host was still in step 3
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from string import Template
from typing import Final

EPOCH_NS: Final = 1_790_000_000_000_000_000
LATER_NS: Final = 10_000
PIDS: Final = (5001, 5002)
GEMM: Final = "void cutlass::Kernel2<gemm>(Params)"
NCCL: Final = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def global_pid(pid: int) -> int:
    return (1 << 48) + (pid << 24)


def write_nsys(
    path: Path, *, without: tuple[str, ...] = (), columns_without: tuple[str, ...] = (), pids: tuple[int, ...] = PIDS
) -> Path:
    """An export; tables and columns named in `without` and `columns_without` do not exist in it."""
    tables, _, of_process = Path(__file__).with_name("nsys.sql").read_text().partition("-- Of each process:")
    with closing(sqlite3.connect(path)) as db:
        db.executescript(f"PRAGMA synchronous=OFF;BEGIN;{tables}COMMIT;")
        for device, pid in enumerate(pids):
            facts = {"later": LATER_NS * device, "device": device, "process": global_pid(pid)}
            db.executescript(f"BEGIN;{Template(of_process).substitute(facts)}COMMIT;")
        for table in without:
            db.execute(f"DROP TABLE {table}")
        for (table,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            for _, column, *_ in db.execute(f"PRAGMA table_info({table})").fetchall():
                if column in columns_without:
                    db.execute(f"ALTER TABLE {table} DROP COLUMN {column}")
        db.commit()
    return path
