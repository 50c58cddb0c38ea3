"""A deterministic generator of rocprofv3's `*_results.json`, as large as wished: what its reader is timed on.

The mixture is that of training with `--kernel-trace --memory-copy-trace --rccl-trace --marker-trace --hip-trace`: two
HIP calls for each dispatch, an RCCL call and its kernel after every eighth, and symbols of all kernels that were
loaded, of which few ran.

Must not be read by anything but benchmarks and tests of readers.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
from isal import igzip

BASE_NS: Final = 1_550_151_853_000_000
KINDS: Final = ("NONE", "MARKER_CORE_RANGE_API", "RCCL_API", "MEMORY_COPY", "KERNEL_DISPATCH", "HIP_RUNTIME_API")
OPERATIONS: Final[dict[str, tuple[str, ...]]] = {
    "MARKER_CORE_RANGE_API": ("roctxMarkA", "roctxThreadRangeA"),
    "RCCL_API": ("ncclAllGather", "ncclAllReduce", "ncclReduceScatter"),
    "MEMORY_COPY": ("MEMORY_COPY_NONE", "MEMORY_COPY_HOST_TO_DEVICE"),
    "HIP_RUNTIME_API": ("hipLaunchKernel", "hipSetDevice"),
}
_GPU: Final = 7002
_GENERIC: Final = "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)"
_CALLS_EACH: Final = 2


@dataclass(frozen=True)
class RocprofPlan:
    """What is generated.

    Attributes:
        dispatches: kernels that ran.
        symbols: kernels that were loaded; a process with torch loads thousands.
        used: how many of them ran.
        indented: pretty-printed instead of on one line, as rocprofv3 writes it.
    """

    dispatches: int = 20_000
    symbols: int = 6_000
    used: int = 200
    steps: int = 10
    indented: bool = False
    seed: int = 0


def results(plan: RocprofPlan) -> dict[str, Any]:
    """The content of the file."""
    random_ = random.Random(plan.seed)
    symbols = [
        {
            "size": 120,
            "kernel_id": code + 1,
            "code_object_id": code // 50,
            "kernel_name": f"_ZN2at{code}.kd",
            "kernel_object": 2**46 + code,
            "kernarg_segment_size": 312,
            "group_segment_size": 0,
            "sgpr_count": 48,
            "arch_vgpr_count": 64,
            "formatted_kernel_name": name,
            "demangled_kernel_name": name,
            "truncated_kernel_name": name.partition("<")[0],
        }
        for code, name in enumerate(_names(plan))
    ]
    records: dict[str, list[dict[str, Any]]] = {
        "kernel_dispatch": [],
        "hip_api": [],
        "rccl_api": [],
        "memory_copy": [],
        "marker_api": [],
    }
    texts = []
    now = link = BASE_NS
    a_step = plan.dispatches // plan.steps
    for number in range(plan.dispatches):
        if number % a_step == 0:
            texts.append({"key": 10**6 + number, "value": f"iteration#{number // a_step}"})
            marker = _call("MARKER_CORE_RANGE_API", 1, now, now + a_step * 40_000, 10**6 + number)
            records["marker_api"].append(marker)
        length = random_.randrange(5_000, 39_000)
        kernel_id = random_.randrange(plan.used) + 2
        for call in range(_CALLS_EACH):
            records["hip_api"].append(_call("HIP_RUNTIME_API", call, now, now + 900, number * 4 + call))
        records["kernel_dispatch"].append(_dispatch(number * 2, kernel_id, 1, now, now + length, number * 4))
        if number % 8 == 0:
            link = max(link, now)
            ident, took = number * 4 + 3, random_.randrange(40_000, 200_000)
            records["rccl_api"].append(_call("RCCL_API", number // 8 % 3, now, now + 500, ident))
            records["kernel_dispatch"].append(_dispatch(number * 2 + 1, 1, 2, link, link + took, ident))
            link += took
        if number % 16 == 5:
            records["memory_copy"].append(_copy(now, now + 3_000, number * 4 + 2))
        now += 40_000
    process = {
        "metadata": {"pid": 4242, "node": {"hostname": "node7"}, "init_time": BASE_NS, "fini_time": now},
        "agents": [{"id": {"handle": _GPU}, "type": 2, "node_id": 4, "logical_node_type_id": 0}],
        "strings": {
            "buffer_records": [{"kind": kind, "operations": OPERATIONS.get(kind, ())} for kind in KINDS],
            "marker_api": texts,
        },
        "kernel_symbols": symbols,
        "buffer_records": records,
    }
    return {"rocprofiler-sdk-tool": [process]}


def write_results(plan: RocprofPlan, path: Path) -> Path:
    """The file, compressed."""
    text = msgspec.json.encode(results(plan))
    with igzip.open(path, "wb", compresslevel=2) as file:  # type: ignore[no-untyped-call]
        file.write(msgspec.json.format(text, indent=2) if plan.indented else text)
    return path


def _names(plan: RocprofPlan) -> list[str]:
    return [
        _GENERIC,
        *(
            f"void at::native::(anonymous namespace)::kernel_{code}<{code % 7}, at::native::BinaryFunctor<c10"
            f"::BFloat16, c10::BFloat16, c10::BFloat16, at::native::op_{code}<float> > >(int, std::array<char*, 3ul>)"
            for code in range(1, plan.symbols)
        ),
    ]


def _call(kind: str, operation: int, start: int, end: int, ident: int) -> dict[str, Any]:
    return {
        "size": 48,
        "kind": KINDS.index(kind),
        "operation": operation,
        "correlation_id": {"internal": ident, "external": 0, "ancestor": 0},
        "start_timestamp": start,
        "end_timestamp": end,
        "thread_id": 900,
    }


def _dispatch(number: int, kernel_id: int, stream: int, start: int, end: int, ident: int) -> dict[str, Any]:
    return {
        "size": 128,
        "kind": KINDS.index("KERNEL_DISPATCH"),
        "operation": 2,
        "thread_id": 900,
        "correlation_id": {"internal": ident, "external": 0, "ancestor": 0},
        "start_timestamp": start,
        "end_timestamp": end,
        "dispatch_info": {
            "size": 64,
            "agent_id": {"handle": _GPU},
            "queue_id": {"handle": stream},
            "kernel_id": kernel_id,
            "dispatch_id": number,
            "private_segment_size": 0,
            "group_segment_size": 0,
            "workgroup_size": {"x": 256, "y": 1, "z": 1},
            "grid_size": {"x": 65536, "y": 1, "z": 1},
        },
        "stream_id": {"handle": stream},
    }


def _copy(start: int, end: int, ident: int) -> dict[str, Any]:
    return {
        "size": 64,
        "kind": KINDS.index("MEMORY_COPY"),
        "operation": 1,
        "thread_id": 900,
        "correlation_id": {"internal": ident, "external": 0, "ancestor": 0},
        "start_timestamp": start,
        "end_timestamp": end,
        "dst_agent_id": {"handle": _GPU},
        "src_agent_id": {"handle": 7000},
        "bytes": 65536,
        "stream_id": {"handle": 1},
    }
