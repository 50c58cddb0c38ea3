"""Files as rocprofv3 writes them, of one hand-made process: JSON, CSV in four variants, rocpd.

The process used GPU 1 (agent handle 7002, node 5), two streams, and took two steps of 1,000 ns:

    step 10: [1000, 2000)   gemm [1100, 1500) on stream 1, RCCL [1400, 1800) on stream 2, copy of 4096 B [1850, 1900)
    step 11: [2000, 3000)   gemm [2100, 2300) on stream 1, RCCL [2200, 2500) on stream 2

HIP calls launched each of them; those of the fill (1905) and of the second gemm (1950) began after all before it on the
stream had ended. The first RCCL kernel is an all-reduce, the second a reduce-scatter: only the API calls tell, as the
kernel is generic. The fill kernel [1910, 1930) is a copy by its name. Overlap: step 10 hides 100 of 400, step 11 100 of
300.
"""

from __future__ import annotations

import csv
import io
import json
import sqlite3
from pathlib import Path
from typing import Any

GENERIC = "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)"
GEMM = "Cijk_Ailk_Bljk<float, (int)4, true>(float*, float const*)"
FILL = "__amd_rocclr_fillBufferAligned"
BASE = 1_550_151_853_000_000
"""Nanoseconds since boot: hand-made times count from here."""
GUID = "0000ddb5-8903-7903-b269-cd8d3745bb8a"

# name, stream, start, end, dispatch, correlation, thread
KERNELS = (
    (GENERIC, 2, 2200, 2500, 5, 105, 900),  # buffer order is not time order
    (GEMM, 1, 1100, 1500, 1, 101, 900),
    (GENERIC, 2, 1400, 1800, 2, 102, 900),
    (FILL, 1, 1910, 1930, 3, 103, 900),
    (GEMM, 1, 2100, 2300, 4, 104, 900),
)
CALLS = (
    ("ncclAllReduce", 1300, 1320, 102),
    ("ncclGetVersion", 1330, 1331, 190),
    ("ncclReduceScatter", 2150, 2160, 105),
)
HIP_CALLS = (
    ("hipLaunchKernel", 1000, 1010, 101),
    ("hipExtLaunchKernel", 1310, 1318, 102),
    ("hipLaunchKernel", 1905, 1908, 103),
    ("hipLaunchKernel", 1950, 1960, 104),
    ("hipExtLaunchKernel", 2152, 2158, 105),
    ("hipStreamSynchronize", 2400, 2600, 191),
)
MARKS = (("iteration#10", 1000, 2000, 200), ("iteration#11", 2000, 3000, 201), ("forward", 1000, 1200, 202))
COPIES = (("MEMORY_COPY_HOST_TO_DEVICE", 1850, 1900, 4096),)

HIP = "HIP_RUNTIME_API_EXT"
KINDS = ["NONE", "MARKER_CORE_RANGE_API", "RCCL_API", "MEMORY_COPY", "KERNEL_DISPATCH", HIP]
OPERATIONS = {
    "MARKER_CORE_RANGE_API": ["roctxMarkA", "roctxThreadRangeA"],
    "RCCL_API": ["ncclAllGather", "ncclAllReduce", "ncclReduceScatter", "ncclGetVersion"],
    HIP: ["hipLaunchKernel", "hipExtLaunchKernel", "hipStreamSynchronize"],
    "MEMORY_COPY": ["MEMORY_COPY_NONE", "MEMORY_COPY_HOST_TO_DEVICE"],
}


def as_json(pid: int = 4242) -> dict[str, Any]:
    """A `*_results.json`."""
    names = list(dict.fromkeys(name for name, *_ in KERNELS))

    def api(kind: str, operation: str, start: int, end: int, ident: int) -> dict[str, Any]:
        return {
            "size": 48,
            "kind": KINDS.index(kind),
            "operation": OPERATIONS[kind].index(operation),
            "correlation_id": {"internal": ident, "external": 0},
            "start_timestamp": BASE + start,
            "end_timestamp": BASE + end,
            "thread_id": 900,
        }

    process = {
        "metadata": {"node": {"hostname": "node7"}, "pid": pid, "init_time": BASE, "fini_time": BASE + 4000},
        "agents": [
            {"id": {"handle": 7000}, "type": 1, "node_id": 0, "logical_node_type_id": 0},
            {"id": {"handle": 7001}, "type": 2, "node_id": 4, "logical_node_type_id": 0},
            {"id": {"handle": 7002}, "type": 2, "node_id": 5, "logical_node_type_id": 1},
        ],
        "strings": {
            "buffer_records": [{"kind": kind, "operations": OPERATIONS.get(kind, [])} for kind in KINDS],
            "marker_api": [{"key": ident, "value": text} for text, _, _, ident in MARKS],
        },
        # The list index is not the id.
        "kernel_symbols": [
            {"kernel_id": 30 + code, "formatted_kernel_name": name, "demangled_kernel_name": f"{name}.kd"}
            for code, name in reversed(list(enumerate(names)))
        ],
        "buffer_records": {
            "kernel_dispatch": [
                {
                    "kind": 4,
                    "operation": 2,
                    "thread_id": thread,
                    "correlation_id": {"internal": ident, "external": 0},
                    "start_timestamp": BASE + start,
                    "end_timestamp": BASE + end,
                    "dispatch_info": {
                        "agent_id": {"handle": 7002},
                        "queue_id": {"handle": stream + 10},
                        "kernel_id": 30 + names.index(name),
                        "dispatch_id": dispatch,
                        "grid_size": {"x": 1, "y": 1, "z": 1},
                    },
                    "stream_id": {"handle": stream},
                }
                for name, stream, start, end, dispatch, ident, thread in KERNELS
            ],
            "memory_copy": [
                {
                    "kind": 3,
                    "operation": 1,
                    "start_timestamp": BASE + start,
                    "end_timestamp": BASE + end,
                    "dst_agent_id": {"handle": 7002},
                    "src_agent_id": {"handle": 7000},
                    "bytes": size,
                    "stream_id": {"handle": 1},
                }
                for _, start, end, size in COPIES
            ],
            "hip_api": [api(HIP, name, start, end, ident) for name, start, end, ident in HIP_CALLS],
            "rccl_api": [api("RCCL_API", name, start, end, ident) for name, start, end, ident in CALLS],
            "marker_api": [
                api("MARKER_CORE_RANGE_API", "roctxThreadRangeA", start, end, ident) for _, start, end, ident in MARKS
            ],
        },
    }
    return {"rocprofiler-sdk-tool": [process]}


def unlinked(content: dict[str, Any]) -> dict[str, Any]:
    """The same, with correlation ids that join no kernel to a call (an older tracer)."""
    for row in content["rocprofiler-sdk-tool"][0]["buffer_records"]["kernel_dispatch"]:
        row["correlation_id"]["internal"] += 5000
    return content


def as_csv(variant: str) -> dict[str, bytes]:
    """The files of one process. Variants: `direct` (ROCm 6.4 and later), `rocm-6.2`, `convert`, `quoted`."""
    quoting = csv.QUOTE_ALL if variant == "quoted" else csv.QUOTE_NONNUMERIC
    agent: object = 5 if variant == "rocm-6.2" else "Agent 5"
    cpu: object = 0 if variant == "rocm-6.2" else "Agent 0"
    guid = [GUID] if variant == "convert" else []
    with_stream = variant != "rocm-6.2"
    domain = "MARKER_CORE_API" if variant == "rocm-6.2" else "MARKER_CORE_RANGE_API"

    def table(header: str, rows: list[list[object]]) -> bytes:
        columns = ["Guid", *header.split(",")] if guid else header.split(",")
        text = io.StringIO()
        writer = csv.writer(text, quoting=quoting, lineterminator="\n")
        writer.writerow(columns)
        for row in rows:
            assert len(guid) + len(row) == len(columns), (header, row)
            writer.writerow([*guid, *row])
        return text.getvalue().encode()

    stream_column = ",Stream_Id" if with_stream else ""
    sizes = {
        "direct": ",LDS_Block_Size,Scratch_Size,VGPR_Count",
        "quoted": ",LDS_Block_Size,Scratch_Size,VGPR_Count",
        "rocm-6.2": ",Private_Segment_Size,Group_Segment_Size,Workgroup_Size_X",
        "convert": ",Duration,Lds_Block_Size,Vgpr_Count",
    }[variant]
    kernels = table(
        f"Kind,Agent_Id,Queue_Id{stream_column},Thread_Id,Dispatch_Id,Kernel_Id,Kernel_Name,Correlation_Id,"
        f"Start_Timestamp,End_Timestamp{sizes}",
        [
            [
                *("KERNEL_DISPATCH", agent, stream + 10, *([stream] if with_stream else [])),
                *(thread, dispatch, 30, name, ident, BASE + start, BASE + end, 0, 0, 64),
            ]
            for name, stream, start, end, dispatch, ident, thread in KERNELS
        ],
    )
    copies = table(
        f"Kind,Direction{stream_column},Source_Agent_Id,Destination_Agent_Id,Correlation_Id,Start_Timestamp,End_Timestamp",
        [
            ["MEMORY_COPY", direction, *([1] if with_stream else []), cpu, agent, 7, BASE + start, BASE + end]
            for direction, start, end, _ in COPIES
        ],
    )
    header = "Domain,Function,Process_Id,Thread_Id,Correlation_Id,Start_Timestamp,End_Timestamp"
    calls = table(header, [["RCCL_API", name, 4242, 900, i, BASE + a, BASE + b] for name, a, b, i in CALLS])
    hip = table(header, [[HIP, name, 4242, 900, i, BASE + a, BASE + b] for name, a, b, i in HIP_CALLS])
    marks = table(header, [[domain, text, 4242, 900, i, BASE + a, BASE + b] for text, a, b, i in MARKS])
    return {
        "4242_kernel_trace.csv": kernels,
        "4242_memory_copy_trace.csv": copies,
        "4242_rccl_api_trace.csv": calls,
        "4242_hip_api_trace.csv": hip,
        "4242_marker_api_trace.csv": marks,
    }


def write_rocpd(path: Path, environment: dict[str, str] | None = None, version: str = "3.0.1", pid: int = 4242) -> Path:
    """A database of schema 3, physical tables and views, as far as this process needs them; or one process more."""
    suffix = f"_0000{pid}_8903_7903_b269_cd8d3745bb8a"
    db = sqlite3.connect(path)
    tables = {
        "rocpd_metadata": "id INTEGER PRIMARY KEY, tag TEXT, value TEXT",
        "rocpd_string": "id INTEGER PRIMARY KEY, guid TEXT, string TEXT",
        "rocpd_info_node": "id INTEGER PRIMARY KEY, guid TEXT, hostname TEXT",
        "rocpd_info_process": "id INTEGER PRIMARY KEY, guid TEXT, nid INTEGER, pid INTEGER, environment JSONB",
        "rocpd_info_agent": "id INTEGER PRIMARY KEY, guid TEXT, type TEXT, absolute_index INTEGER, type_index INTEGER",
        "rocpd_info_kernel_symbol": "id INTEGER PRIMARY KEY, guid TEXT, kernel_name TEXT, display_name TEXT",
        "rocpd_event": "id INTEGER PRIMARY KEY, guid TEXT, category_id INTEGER, stack_id INTEGER, "
        "parent_stack_id INTEGER, correlation_id INTEGER, extdata JSONB",
        "rocpd_kernel_dispatch": "id INTEGER PRIMARY KEY, guid TEXT, nid INTEGER, pid INTEGER, tid INTEGER, "
        "agent_id INTEGER, kernel_id INTEGER, dispatch_id INTEGER, queue_id INTEGER, stream_id INTEGER, "
        "start BIGINT, end BIGINT, event_id INTEGER",
        "rocpd_memory_copy": "id INTEGER PRIMARY KEY, guid TEXT, pid INTEGER, start BIGINT, end BIGINT, "
        "name_id INTEGER, dst_agent_id INTEGER, src_agent_id INTEGER, size INTEGER, stream_id INTEGER",
        "rocpd_region": "id INTEGER PRIMARY KEY, guid TEXT, pid INTEGER, tid INTEGER, start BIGINT, end BIGINT, "
        "name_id INTEGER, event_id INTEGER",
    }
    for name, columns in tables.items():
        db.execute(f'CREATE TABLE "{name}{suffix}" ({columns})')
        db.execute(f'CREATE VIEW IF NOT EXISTS "{name}" AS SELECT * FROM "{name}{suffix}"')
    strings: dict[str, int] = {}

    def put(table: str, columns: str, *values: object) -> int:
        sql = f'INSERT INTO "{table}{suffix}" ({", ".join(columns.split())}) VALUES ({", ".join("?" * len(values))})'
        cursor = db.execute(sql, values)
        assert cursor.lastrowid is not None
        return cursor.lastrowid

    def string(text: str) -> int:
        if text not in strings:
            strings[text] = put("rocpd_string", "string", text)
        return strings[text]

    put("rocpd_metadata", "tag value", "schema_version", version)
    put("rocpd_info_node", "hostname", "node7")
    process = put("rocpd_info_process", "pid environment", pid, json.dumps(environment or {}))
    agent = "type absolute_index type_index"
    gpu = [put("rocpd_info_agent", agent, *each) for each in (("CPU", 0, 0), ("GPU", 4, 0), ("GPU", 5, 1))][-1]
    symbols = {
        name: put("rocpd_info_kernel_symbol", "kernel_name display_name", f"_Z{code}.kd", name)
        for code, name in enumerate(dict.fromkeys(name for name, *_ in KERNELS))
    }
    for row, (name, stream, start, end, dispatch, ident, thread) in enumerate(KERNELS):
        ids = (string("KERNEL_DISPATCH"), ident + 5000, ident)
        event = put("rocpd_event", "category_id stack_id parent_stack_id", *ids)
        put(
            "rocpd_kernel_dispatch",
            "pid tid agent_id kernel_id dispatch_id queue_id stream_id start end event_id",
            *(process, thread, gpu, symbols[name], dispatch, stream + 10, stream, BASE + start, BASE + end),
            event if row else None,  # the views would lose this one
        )
    for name, start, end, size in COPIES:
        put(
            "rocpd_memory_copy",
            "pid start end name_id dst_agent_id src_agent_id size stream_id",
            *(process, BASE + start, BASE + end, string(name), gpu, 1, size, 1),
        )
    regions = [("RCCL_API", name, None, *times) for name, *times in CALLS]
    regions += [(HIP, name, None, *times) for name, *times in HIP_CALLS]
    regions += [
        ("MARKER_CORE_RANGE_API", "roctxThreadRangeA", json.dumps({"message": text}), *times) for text, *times in MARKS
    ]
    for category, name, extra, start, end, ident in regions:
        event = put("rocpd_event", "category_id stack_id extdata", string(category), ident, extra)
        row_of = (process, 900, BASE + start, BASE + end, string(name), event)
        put("rocpd_region", "pid tid start end name_id event_id", *row_of)
    db.commit()
    db.close()
    return path
