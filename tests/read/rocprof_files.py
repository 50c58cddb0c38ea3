"""Files as rocprofv3 writes them, of one hand-made process: JSON, CSV in four variants, rocpd.

The process used GPU 1 (agent handle 7002, node 5), two streams, and took two steps of 1,000 ns:

    step 10: [1000, 2000)   gemm [1100, 1500) on stream 1, RCCL [1400, 1800) on stream 2, copy of 4096 B [1850, 1900)
    step 11: [2000, 3000)   gemm [2100, 2300) on stream 1, RCCL [2200, 2500) on stream 2

HIP calls launched each of them; those of the fill (1905) and of the second gemm (1950) began after all before it on the
stream had ended. The first RCCL kernel is an all-reduce, the second a reduce-scatter: only the API calls tell, as the
kernel is generic. The fill kernel [1910, 1930) is a copy by its name. Overlap: step 10 hides 100 of 400, step 11 100 of
300.

They are data, in `rocprof/`: the variants of CSV are `direct` (ROCm 6.4 and later), `rocm-6.2`, `convert`, `quoted`.
"""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "rocprof"
GENERIC = "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)"
GEMM = "Cijk_Ailk_Bljk<float, (int)4, true>(float*, float const*)"
FILL = "__amd_rocclr_fillBufferAligned"
BASE = 1_550_151_853_000_000
"""Nanoseconds since boot: hand-made times count from here."""


def as_json(pid: int = 4242) -> dict[str, Any]:
    """A `*_results.json`."""
    found: dict[str, Any] = json.loads((FOLDER / "results.json").read_text())
    found["rocprofiler-sdk-tool"][0]["metadata"]["pid"] = pid
    return found


def unlinked(content: dict[str, Any]) -> dict[str, Any]:
    """The same, with correlation ids that join no kernel to a call (an older tracer)."""
    for row in content["rocprofiler-sdk-tool"][0]["buffer_records"]["kernel_dispatch"]:
        row["correlation_id"]["internal"] += 5000
    return content


def as_csv(variant: str) -> dict[str, bytes]:
    """The files of one process."""
    return {path.name: path.read_bytes() for path in sorted((FOLDER / variant).iterdir())}


def write_rocpd(path: Path, environment: dict[str, str] | None = None, pid: int = 4242) -> Path:
    """A database of schema 3, physical tables and views, as far as this process needs them; or one process more."""
    script = (FOLDER / "rocpd.sql").read_text().replace("4242", str(pid))
    with closing(sqlite3.connect(path)) as database:
        script = script.replace("'{}'", f"'{json.dumps(environment or {})}'")
        database.executescript(f"PRAGMA synchronous=OFF;BEGIN;{script}COMMIT;")
    return path
