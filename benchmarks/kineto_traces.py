"""A deterministic generator of Kineto traces, as large as wished: what the reader is timed on, and checked against.

Enters: a `Plan` and a rank. Leaves: the text of a trace, or a `.json.gz`. The same plan and rank give the same bytes.
The mixture is that of a training step seen with shapes recorded: for each kernel a runtime call, a flow at either end
and a few host operators around it. Kernels follow each other on one stream; every fourth layer issues a collective on
another, which overlaps them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from isal import igzip

BASE_NS = 1_790_857_026_000_000_000
COMPUTE_STREAM, COMM_STREAM, COPY_STREAM = 7, 20, 27
KERNELS = (
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x256_32x3_tn_align8>(cutlass_80::Params)",
    "void at::native::vectorized_elementwise_kernel<4, at::native::BUnaryFunctor<c10::BFloat16, c10::BFloat16, "
    "c10::BFloat16, at::native::binary_internal::MulFunctor<float> >, std::array<char*, 2ul> >(int, float)",
    "flash_fwd_kernel(Flash_fwd_params)",
    "triton_poi_fused_add_native_layer_norm_2",
)
COLLECTIVES = (
    ("_allgather_base", "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 1, 8),
    ("_reduce_scatter_base", "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 8, 1),
    ("allreduce", "void ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 8, 8),
)


@dataclass(frozen=True)
class Plan:
    """What is generated.

    Attributes:
        megabytes: size of one rank's text (1e6 bytes), met to within a step.
        compact: one line without blanks instead of Kineto's layout.
        whole_microseconds: integer times, as older torch wrote them.
        plain: nothing that readers disagree about: no annotations on device rows, kernel names that begin with `nccl`.
    """

    ranks: int = 1
    megabytes: float = 1.0
    steps: int = 8
    compact: bool = False
    whole_microseconds: bool = False
    plain: bool = False
    seed: int = 0


class _Writer:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.parts: list[str] = []
        self.size = 0

    def add(self, text: str) -> None:
        if self.plan.compact:
            text = "".join(line.strip() for line in text.splitlines())
        self.parts.append(text)
        self.size += len(text) + (1 if self.plan.compact else 2)

    def time(self, ns: int) -> str:
        return str(ns // 1000) if self.plan.whole_microseconds else f"{ns // 1000}.{ns % 1000:03d}"

    def complete(self, cat: str, name: str, pid: object, tid: object, start: int, length: int, args: str) -> None:
        self.add(
            f'  {{\n    "ph": "X", "cat": "{cat}", "name": "{name}", "pid": {pid}, "tid": {tid},\n'
            f'    "ts": {self.time(start)}, "dur": {self.time(length)},\n    "args": {{\n      {args}\n    }}\n  }}'
        )


def rank_text(plan: Plan, rank: int) -> str:
    """The whole trace of one rank."""
    writer, random_ = _Writer(plan), random.Random(f"{plan.seed}-{rank}")
    budget = plan.megabytes * 1e6 / plan.steps
    unit = 1000 if plan.whole_microseconds else 1
    now, external = 4_400_000_000_000_000 + rank * 977_000, 1
    for step in range(plan.steps):
        begun, before = now, writer.size
        device, link = now + 50_000, now
        layer = 0
        while writer.size - before < budget:
            external += 1
            length = random_.randrange(2_000, 60_000) // unit * unit
            name = KERNELS[layer % len(KERNELS)]
            _layer(writer, now, device, length, name, external, rank)
            if layer % 4 == 3:
                external += 1
                link = max(device, link) + 3_000
                took = random_.randrange(20_000, 140_000) // unit * unit
                _collective(writer, now, link, took, COLLECTIVES[layer // 4 % 3], external, rank, plan.ranks)
                link += took
            if layer % 16 == 9:
                external += 1
                _copy(writer, device, 4_000, external, rank)
            device += length + random_.choice((0, 1_000, 5_000))
            now += 9_000
            layer += 1
        now = max(now, device, link) + 20_000
        writer.complete(
            "user_annotation", f"ProfilerStep#{step + 3}", 4242, 4242, begun, now - begun, f'"External id": {step}'
        )
        if not plan.plain:
            on_device = f"ProfilerStep#{step + 3}"
            writer.complete("gpu_user_annotation", on_device, rank, COMPUTE_STREAM, begun, now - begun, '"stream": 7')
    return _wrapped(writer, rank, plan)


def _layer(writer: _Writer, now: int, device: int, length: int, name: str, external: int, rank: int) -> None:
    shapes = (
        f'"External id": {external},"Record function id": 0, "Sequence number": {external}, "Fwd thread id": 0, '
        '"Concrete Inputs": ["", "", ""], "Input type": ["c10::BFloat16", "c10::BFloat16", "c10::BFloat16"], '
        '"Input Strides": [[4096, 1], [1, 4096], [1]], "Input Dims": [[8192, 4096], [4096, 4096], [4096]], '
        f'"Ev Idx": {external}'
    )
    writer.complete("cpu_op", "aten::linear", 4242, 4242, now, 8_000, shapes)
    writer.complete("cpu_op", "aten::addmm", 4242, 4242, now + 1_000, 6_000, shapes)
    runtime = f'"External id": {external}, "cbid": 211, "correlation": {external}'
    writer.complete("cuda_runtime", "cudaLaunchKernel", 4242, 4242, now + 3_000, 2_000, runtime)
    _flow(writer, "s", 4242, 4242, now + 3_000, external)
    writer.complete(
        "kernel",
        name,
        rank,
        COMPUTE_STREAM,
        device,
        length,
        f'"External id": {external}, "queued": 0, "device": {rank}, "context": 1, "stream": {COMPUTE_STREAM}, '
        f'"correlation": {external}, "registers per thread": 168, "shared memory": 98304, "blocks per SM": 7.757576, '
        '"warps per SM": 62.060608, "grid": [64, 16, 1], "block": [256, 1, 1], "est. achieved occupancy %": 19',
    )
    _flow(writer, "f", rank, COMPUTE_STREAM, device, external)


def _collective(
    writer: _Writer,
    now: int,
    start: int,
    length: int,
    what: tuple[str, str, int, int],
    external: int,
    rank: int,
    n: int,
) -> None:
    name, kernel, taken, given = what
    if writer.plan.plain:
        kernel = kernel.removeprefix("void ")
    elements = 1_048_576
    parameters = (
        f'"Collective name": "{name}", "In msg nelems": {elements * taken}, "Out msg nelems": {elements * given}, '
        f'"Group size": {n}, "dtype": "BFloat16", "Process Group Name": "0", '
        f'"Process Group Description": "default_pg", "Process Group Ranks": "{list(range(n))}", "Rank": {rank}, '
        f'"Seq": {external}'
    )
    head = f'"External id": {external}, '
    writer.complete("cpu_op", "record_param_comms", 4242, 4242, now + 5_000, 3_000, head + parameters)
    runtime = f'{head}"cbid": 430, "correlation": {external}'
    writer.complete("cuda_runtime", "cudaLaunchKernelExC", 4242, 4242, now + 6_000, 1_000, runtime)
    writer.complete(
        "kernel",
        kernel,
        rank,
        COMM_STREAM,
        start,
        length,
        f'{head}"queued": 0, "device": {rank}, "context": 1, "stream": {COMM_STREAM}, "correlation": {external}, '
        f'"grid": [24, 1, 1], "block": [544, 1, 1], {parameters}',
    )
    if not writer.plan.plain:
        on_device = f'"stream": {COMM_STREAM}'
        writer.complete("gpu_user_annotation", f"nccl:{name}", rank, COMM_STREAM, start, length, on_device)


def _copy(writer: _Writer, start: int, length: int, external: int, rank: int) -> None:
    args = f'"External id": {external}, "device": {rank}, "stream": {COPY_STREAM}, "bytes": 65536'
    writer.complete("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", rank, COPY_STREAM, start, length, args)


def _flow(writer: _Writer, phase: str, pid: int, tid: int, at: int, number: int) -> None:
    end = ', "bp": "e"' if phase == "f" else ""
    writer.add(
        f'  {{\n    "ph": "{phase}", "id": {number}, "pid": {pid}, "tid": {tid}, "ts": {writer.time(at)},\n'
        f'    "cat": "ac2g", "name": "ac2g"{end}\n  }}'
    )


def _wrapped(writer: _Writer, rank: int, plan: Plan) -> str:
    ranks = list(range(plan.ranks))
    head = (
        '{\n  "schemaVersion": 1,\n  "deviceProperties": [\n    {"id": 0, "name": "NVIDIA H100 80GB HBM3"}\n  ],\n'
        '  "cupti_version": 26,\n'
        f'  "distributedInfo": {{"backend": "nccl", "rank": {rank}, "world_size": {plan.ranks}, "pg_count": 1, '
        f'"pg_config": [{{"pg_name": "0", "pg_desc": "default_pg", "pg_size": {plan.ranks}, "ranks": {ranks}}}]}},\n'
        f'  "host_name": "node0",\n  "displayTimeUnit": "ms",\n  "baseTimeNanoseconds": {BASE_NS},\n'
        '  "traceEvents": [\n'
    )
    tail = f'\n  ],\n  "traceName": "rank{rank}.json"\n}}\n'
    if plan.compact:
        return "".join(line.strip() for line in head.splitlines()) + ",".join(writer.parts) + tail.replace("\n", "")
    return head + ",\n".join(writer.parts) + tail


def write_traces(plan: Plan, folder: Path) -> Iterator[Path]:
    """One `rank<k>.json.gz` a rank."""
    for rank in range(plan.ranks):
        path = folder / f"rank{rank}.json.gz"
        with igzip.open(path, "wb", compresslevel=2) as file:
            file.write(rank_text(plan, rank).encode())
        yield path
