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
from typing import Final, Literal, TypeAlias

import msgspec
from isal import igzip

BASE_NS = 1_790_857_026_000_000_000
COMPUTE_STREAM, COMM_STREAM, COPY_STREAM = 7, 20, 27
HOST_PID = 4242
KERNELS = (
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x256_32x3_tn_align8>(cutlass_80::Params)",
    "void at::native::vectorized_elementwise_kernel<4, at::native::BUnaryFunctor<c10::BFloat16, c10::BFloat16, "
    "c10::BFloat16, at::native::binary_internal::MulFunctor<float> >, std::array<char*, 2ul> >(int, float)",
    "flash_fwd_kernel(Flash_fwd_params)",
    "triton_poi_fused_add_native_layer_norm_2",
)
PYTHON = (
    "torch/nn/modules/module.py(1773): _wrapped_call_impl",
    "torch/nn/modules/module.py(1784): _call_impl",
    "transformers/models/llama/modeling_llama.py(231): forward",
    "<built-in method linear of type object at 0x7f3f6a1c2f60>",
)
VIEWS = (
    "aten::as_strided",
    "aten::view",
    "aten::slice",
    "aten::t",
    "aten::empty",
    "aten::detach",
    "detach",
    "aten::add_",
)
COLLECTIVES = (
    ("_allgather_base", "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 1, 8),
    ("_reduce_scatter_base", "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 8, 1),
    ("allreduce", "void ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 8, 8),
)


Era: TypeAlias = Literal["2021", "2022", "2023", "current"]
Form: TypeAlias = Literal["kineto", "spaced line", "indented", "compact line"]
_THREADS: Final = 24
_STACK_DEPTH: Final = 8
"""Python functions beside each layer, where stacks are recorded: most events of such a trace."""
_INDENT: Final[dict[Form, int]] = {"spaced line": 0, "indented": 2, "compact line": -1}
_CAPITALS: Final = {"cpu_op": "Operator", "kernel": "Kernel", "gpu_memcpy": "Memcpy", "cuda_runtime": "Runtime"}


@dataclass(frozen=True)
class Plan:
    """What is generated.

    Attributes:
        megabytes: size of one rank's text (1e6 bytes) in Kineto's form, met to within a step.
        layers: of each step, whatever their size; None: as many as `megabytes` allow.
        era: whose Kineto wrote it. "current": fractions of microseconds beside a base; "2023": from 1970, in which
            float64 loses digits; "2022": whole microseconds from 1970; "2021": those, threads as text ("stream 7") and
            categories with capitals.
        form: "kineto" is its own form; the others are what tools that write JSON again make of it.
        stacks: with Python functions (`with_stack=True`).
        whole_microseconds: integer times in a current trace too.
        operators: further operators beside each kernel, with arguments, on `_THREADS` threads; all of the host's
            operators then come before the device's rows, as Kineto writes them.
        shapes: whether these tell the shapes of their inputs.
        plain: nothing that readers disagree about: no annotations on device rows, kernel names that begin with `nccl`.
    """

    ranks: int = 1
    megabytes: float = 1.0
    steps: int = 8
    layers: int | None = None
    era: Era = "current"
    form: Form = "kineto"
    stacks: bool = False
    whole_microseconds: bool = False
    operators: int = 0
    shapes: bool = True
    plain: bool = False
    seed: int = 0

    @property
    def from_1970(self) -> bool:
        """Whether times count from 1970 instead of from a base."""
        return self.era != "current"

    @property
    def unit_ns(self) -> int:
        """Of its times."""
        return 1000 if self.whole_microseconds or self.era in ("2021", "2022") else 1


class _Writer:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.parts: list[str] = []
        self.size = 0

    def add(self, text: str) -> None:
        self.parts.append(text)
        self.size += len(text) + 2

    def time(self, ns: int) -> str:
        return str(ns // 1000) if self.plan.unit_ns == 1000 else f"{ns // 1000}.{ns % 1000:03d}"

    def instant(self, ns: int) -> str:
        return self.time(ns + BASE_NS if self.plan.from_1970 else ns)

    def complete(self, cat: str, name: str, pid: object, tid: object, start: int, length: int, args: str) -> None:
        if self.plan.era == "2021":
            tid = f'"stream {tid}"' if pid != HOST_PID else f'"{tid}"'
            cat, args = _CAPITALS.get(cat, cat), args.replace("External id", "external id", 1)
        self.add(
            f'  {{\n    "ph": "X", "cat": "{cat}", "name": "{name}", "pid": {pid}, "tid": {tid},\n'
            f'    "ts": {self.instant(start)}, "dur": {self.time(length)},\n'
            f'    "args": {{\n      {args}\n    }}\n  }}'
        )


def rank_text(plan: Plan, rank: int) -> str:
    """The whole trace of one rank."""
    writer, random_ = _Writer(plan), random.Random(f"{plan.seed}-{rank}")
    budget = plan.megabytes * 1e6 / plan.steps
    unit = plan.unit_ns
    now, external = 4_400_000_000_000_000 + rank * 977_000, 1
    for step in range(plan.steps):
        begun, before = now, writer.size
        device, link = now + 50_000, now
        layer = 0
        while writer.size - before < budget if plan.layers is None else layer < plan.layers:
            external += 1
            length = random_.randrange(2_000, 60_000) // unit * unit
            name = KERNELS[layer % len(KERNELS)]
            if plan.stacks:
                _stack(writer, now, layer, external)
            _operators(writer, now, external)
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
            "user_annotation",
            f"ProfilerStep#{step + 3}",
            HOST_PID,
            HOST_PID,
            begun,
            now - begun,
            f'"External id": {step}',
        )
        if not plan.plain:
            on_device = f"ProfilerStep#{step + 3}"
            writer.complete("gpu_user_annotation", on_device, rank, COMPUTE_STREAM, begun, now - begun, '"stream": 7')
    if plan.operators:
        writer.parts.sort(key=lambda part: '"cat": "cpu_op"' not in part)
    return _wrapped(writer, rank, plan)


def _stack(writer: _Writer, now: int, layer: int, external: int) -> None:
    for depth in range(_STACK_DEPTH):
        number = external * _STACK_DEPTH + depth
        name = f"nn.Module: Linear_{layer}" if depth == 5 else PYTHON[depth % len(PYTHON)]
        args = f'"Python parent id": {number - 1}, "Python id": {number}, "Ev Idx": {number}'
        length = 8_900 // 1000 * 1000 - depth * 1_000
        writer.complete("python_function", name, HOST_PID, HOST_PID, now, length, args)


def _operators(writer: _Writer, now: int, external: int) -> None:
    for number in range(writer.plan.operators):
        thread = HOST_PID + number % _THREADS
        args = f'"External id": {external * 100 + number}, "Ev Idx": {external * 100 + number}'
        if writer.plan.shapes:
            args += (
                f', "Record function id": 0, "Sequence number": {external}, "Fwd thread id": {thread % 3}, '
                '"Concrete Inputs": ["", "[8192, 4096]", "[4096, 1]", "0"], '
                '"Input type": ["c10::BFloat16", "ScalarList", "ScalarList", "Scalar"], '
                '"Input Strides": [[4096, 1], [], [], []], "Input Dims": [[8192, 4096], [], [], []]'
            )
        writer.complete("cpu_op", VIEWS[number % len(VIEWS)], HOST_PID, thread, now + number * 40, 30, args)


def _layer(writer: _Writer, now: int, device: int, length: int, name: str, external: int, rank: int) -> None:
    shapes = (
        f'"External id": {external},"Record function id": 0, "Sequence number": {external}, "Fwd thread id": 0, '
        '"Concrete Inputs": ["", "", ""], "Input type": ["c10::BFloat16", "c10::BFloat16", "c10::BFloat16"], '
        '"Input Strides": [[4096, 1], [1, 4096], [1]], "Input Dims": [[8192, 4096], [4096, 4096], [4096]], '
        f'"Ev Idx": {external}'
    )
    writer.complete("cpu_op", "aten::linear", HOST_PID, HOST_PID, now, 8_000, shapes)
    writer.complete("cpu_op", "aten::addmm", HOST_PID, HOST_PID, now + 1_000, 6_000, shapes)
    runtime = f'"External id": {external}, "cbid": 211, "correlation": {external}'
    writer.complete("cuda_runtime", "cudaLaunchKernel", HOST_PID, HOST_PID, now + 3_000, 2_000, runtime)
    _flow(writer, "s", HOST_PID, HOST_PID, now + 3_000, external)
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
    writer.complete("cpu_op", "record_param_comms", HOST_PID, HOST_PID, now + 5_000, 3_000, head + parameters)
    runtime = f'{head}"cbid": 430, "correlation": {external}'
    writer.complete("cuda_runtime", "cudaLaunchKernelExC", HOST_PID, HOST_PID, now + 6_000, 1_000, runtime)
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
        f'  {{\n    "ph": "{phase}", "id": {number}, "pid": {pid}, "tid": {tid}, "ts": {writer.instant(at)},\n'
        f'    "cat": "ac2g", "name": "ac2g"{end}\n  }}'
    )


def _wrapped(writer: _Writer, rank: int, plan: Plan) -> str:
    ranks = list(range(plan.ranks))
    base = "" if plan.from_1970 else f'  "baseTimeNanoseconds": {BASE_NS},\n'
    head = (
        '{\n  "schemaVersion": 1,\n  "deviceProperties": [\n    {"id": 0, "name": "NVIDIA H100 80GB HBM3"}\n  ],\n'
        '  "cupti_version": 26,\n'
        f'  "distributedInfo": {{"backend": "nccl", "rank": {rank}, "world_size": {plan.ranks}, "pg_count": 1, '
        f'"pg_config": [{{"pg_name": "0", "pg_desc": "default_pg", "pg_size": {plan.ranks}, "ranks": {ranks}}}]}},\n'
        f'  "host_name": "node0",\n  "displayTimeUnit": "ms",\n{base}  "traceEvents": [\n'
    )
    tail = f'\n  ],\n  "traceName": "rank{rank}.json"\n}}\n'
    return in_form(head + ",\n".join(writer.parts) + tail, plan.form)


def in_form(text: str, form: Form) -> str:
    """The same JSON as another tool would write it; every digit stays."""
    return text if form == "kineto" else msgspec.json.format(text, indent=_INDENT[form])


def write_traces(plan: Plan, folder: Path) -> Iterator[Path]:
    """One `rank<k>.json.gz` a rank."""
    for rank in range(plan.ranks):
        path = folder / f"rank{rank}.json.gz"
        with igzip.open(path, "wb", compresslevel=2) as file:  # type: ignore[no-untyped-call]
            file.write(rank_text(plan, rank).encode())
        yield path
