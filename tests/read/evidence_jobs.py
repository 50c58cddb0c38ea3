"""Jobs that are written in every format: what their devices did is known (`device_rows`), so what a report has to say.

`job(format)` writes two ranks of one job; `job(format, drawn_shape(seed))` one whose ranks, steps, streams, times and
names are drawn. `sums_ms` measures a device by a sweep that shares nothing with AORTA.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

from tests.read.evidence_files import FORMATS, Format
from tests.read.evidence_rows import CALL, COPY, KERNEL, MARK, OPERATOR, File, Json, Row
from tests.read.nsys_files import EPOCH_NS
from tests.read.rocprof_files import GENERIC

GEMM: Final = "Cijk_Ailk_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x256x64"
NORM: Final = "void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor<float>>(int)"
ALLREDUCE: Final = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
ALLGATHER: Final = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
STEP_NS: Final = 10_000_000
_H2D: Final = "Memcpy HtoD (Pinned -> Device)"


class Calls(NamedTuple):
    """What the host calls a collective: Kineto's argument, its labels, operator and NCCL's call."""

    collective: str
    label: str
    operator: str
    call: str


_CALLS: Final = {
    "allreduce": Calls("allreduce", "all_reduce", "c10d::allreduce_", "ncclAllReduce"),
    "allgather": Calls("_allgather_base", "_all_gather_base", "c10d::_allgather_base_", "ncclAllGather"),
}


def kind(name: str) -> str:
    """Which collective a kernel is."""
    return "allgather" if re.search("all_?gather", name, re.IGNORECASE) else "allreduce"


@dataclass(frozen=True)
class Shape:
    """A job. `step`: what a device does in one: what, name, start and length in us, and the stream."""

    ranks: int = 2
    steps: tuple[int, ...] = (7, 8, 9, 10)
    step: tuple[tuple[str, str, int, int, int], ...] = (
        *((COPY, _H2D, 300, 120, 7), (KERNEL, GEMM, 500, 1400, 7), (KERNEL, NORM, 1950, 400, 7)),
        *((KERNEL, ALLREDUCE, 1200, 1500, 20), (KERNEL, GEMM, 2400, 1300, 7), (KERNEL, NORM, 3750, 500, 7)),
        *((KERNEL, ALLGATHER, 4000, 900, 20), (KERNEL, GEMM, 5200, 1500, 7), (KERNEL, NORM, 6750, 300, 7)),
        (KERNEL, ALLREDUCE, 6500, 1800, 20),
    )
    step_ns: int = STEP_NS
    generic: str | None = GENERIC
    """The one kernel that RCCL's collectives run as, in formats of AMD; None: kernels keep their names."""


_NAMES: Final = (
    (ALLREDUCE, ALLGATHER),
    ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", "ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclWorkElem)"),
    ("ncclDevKernel_AllReduce_Sum_bf16_NVLS_SIMPLE(ncclDevKernelArgsStorage<4096ul>)", ALLGATHER),
    ("ncclSymkDevKernel_AllReduce_RSxLD_AGxST_f32(ncclSymkDevWorkArgs)", "ncclSymkDevKernel_AllGather_ST_f32"),
    ("void vllm::cross_device_reduce_2stage<__nv_bfloat16, 8>(vllm::RankData*)", ALLGATHER),
    ("mscclKernel_Sum_half_LL_allreduce", "void mscclpp::collective::allgather_fullmesh<true>(void*)"),
    ("multimem_all_reduce_kernel<at::BFloat16, 16>", "void nvshmemi_allgather_on_stream_kernel<int>"),
)
_COMPUTES: Final = (
    (GEMM, NORM),
    ("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "triton_poi_fused_add_mul_3"),
    ("void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64>>", "void cutlass::Kernel2<cutlass_80_s16816gemm>"),
)


def drawn_shape(seed: int) -> Shape:
    """A job of 2 to 5 ranks and 4 to 9 steps, of 2 to 5 layers, with one or two streams of communication."""
    chance = random.Random(seed)
    sends, computes = _NAMES[seed % len(_NAMES)], chance.choice(_COMPUTES)
    main, others = chance.choice((0, 3, 7)), chance.choice(((20,), (13, 17), (24, 31)))
    rows, at = [(COPY, _H2D, 300, chance.randrange(60, 300), main)], 700
    for layer in range(chance.randrange(2, 6)):
        longest, more = chance.randrange(500, 1900), chance.randrange(100, 500)
        rows += [(KERNEL, computes[0], at, longest, main), (KERNEL, computes[1], at + longest + 10, more, main)]
        begin = at + int(longest * chance.uniform(0.2, 0.9))
        sent = chance.randrange(300, 1800)
        rows.append((KERNEL, sends[layer % 2], begin, sent, others[layer % len(others)]))
        at = max(at + longest + more + 10, begin + sent) + chance.randrange(60, 400)
    first, count = chance.choice((0, 1, 3, 500)), chance.randrange(4, 10)
    steps = tuple(range(first, first + count))
    generic = chance.choice((GENERIC, "rcclGenericKernel<1, false>(ncclDevKernelArgsStorage<4096ul>)", None))
    return Shape(2 + seed % 4, steps, tuple(rows), (at + 600) * 1000, generic)


def device_rows(rank: int, shape: Shape = Shape()) -> Iterator[Row]:
    """What the device of a rank did, in ns from the start of the job: steps differ a little, and so do ranks."""
    longer = {name for _, name, *_ in shape.step[1::3]}
    for number, _ in enumerate(shape.steps):
        for what, name, start, length, stream in shape.step:
            begin = number * shape.step_ns + (start + 7 * number + 11 * rank) * 1000
            more = 13 * number + 5 * rank if what == KERNEL and name in longer else 0
            yield Row(what, name, begin, begin + (length + more) * 1000, 0, stream)


def sums_ms(rows: list[Row]) -> dict[str, float]:
    """How long a device computed, communicated, both, and copied."""
    edges = sorted({edge for row in rows for edge in (row.start_ns, row.end_ns)})
    found = dict.fromkeys(("compute_ms", "comm_ms", "compute_comm_ms", "copy_ms"), 0.0)
    for low, high in itertools.pairwise(edges):
        active = {(row.what, row.communicates) for row in rows if row.start_ns <= low and high <= row.end_ns}
        for metric, needed in (
            ("compute_ms", {(KERNEL, False)}),
            ("comm_ms", {(KERNEL, True)}),
            ("compute_comm_ms", {(KERNEL, False), (KERNEL, True)}),
            ("copy_ms", {(COPY, False)}),
        ):
            found[metric] += (high - low) / 1e6 if needed <= active else 0
    return found


def kineto_job(rank: int, *, platform: str = "cuda", shape: Shape = Shape()) -> File:
    """A rank of the job as Kineto writes it: of a device, or of a CPU (`platform="cpu"`)."""
    rows: list[Row] = []
    for number, step in enumerate(shape.steps):
        at = number * shape.step_ns
        end = at + shape.step_ns - 50_000
        rows.append(Row(MARK, f"ProfilerStep#{step}", at, end, 4000, 4000, None, "user_annotation"))
    sent = 0
    for number, row in enumerate(device_rows(rank, shape), 1):
        calls = _CALLS[kind(row.name)] if row.communicates else None
        sent += calls is not None
        ids = {"External id": 1000 + number, "correlation": 100 + number}
        said: Json = {}
        if calls is not None:
            said = {"Collective name": calls.collective, "In msg nelems": 4096, "Out msg nelems": 4096, "Seq": sent}
            said |= {"Group size": shape.ranks, "dtype": "BFloat16", "Process Group Name": "0"}
            said |= {"Process Group Ranks": str([*range(shape.ranks)])}
        host = Row(OPERATOR, "", row.start_ns - 120_000, row.start_ns - 90_000, 4000, 4000, None, "cpu_op")
        if platform == "cpu":
            rows += _on_cpu(row, host, calls, number)
            continue
        if calls is not None:
            for name, category in (("record_param_comms", "cpu_op"), (f"nccl:{calls.label}", "user_annotation")):
                args = {"External id": 1000 + number, **(said if category == "cpu_op" else {})}
                rows.append(replace(host, name=name, category=category, args=args))
        else:
            rows.append(replace(host, name="aten::mm", args={"External id": 1000 + number}))
        name = {"cuda": "cuda", "rocm": "hip"}[platform] + ("MemcpyAsync" if row.what == COPY else "LaunchKernel")
        category = {"cuda": "cuda_runtime", "rocm": "hip_runtime"}[platform]
        call = Row(CALL, name, row.start_ns - 110_000, row.start_ns - 100_000, 4000, 4000, 100 + number, category, ids)
        category = "gpu_memcpy" if row.what == COPY else "kernel"
        args = {"device": 0, "stream": row.stream, **ids, **said}
        rows += [call, replace(row, link=100 + number, category=category, args=args)]
    facts = {"rank": rank, "world_size": shape.ranks, "host": "node1", "clock": 1_790_857_026_000_000_000}
    facts["backend"] = "gloo" if platform == "cpu" else "nccl"
    device = {"cuda": ("NVIDIA H100", "cupti_version"), "rocm": ("AMD MI300X", "roctracer_version")}.get(platform)
    rest: Json = {"schemaVersion": 1}
    if device is not None:
        rest |= {"deviceProperties": [{"id": 0, "name": device[0]}], device[1]: 26}
    return File(Path(f"rank{rank}.json"), "kineto", rows, facts, rest)


def _on_cpu(row: Row, host: Row, calls: Calls | None, number: int) -> Iterator[Row]:
    args = {"External id": 1000 + number, "Input Dims": [[64, 64], [64, 64]], "Input type": ["float", "float"]}
    if calls is not None:
        call = {"start_ns": row.start_ns - 30_000, "end_ns": row.start_ns - 20_000, "args": args}
        yield replace(host, name=calls.operator, **call)
        args = {"Input Dims": [[4096]], "Input type": ["float"]}
        label = f"gloo:{calls.label.removeprefix('_').removesuffix('_base')}"
        yield Row(OPERATOR, label, row.start_ns, row.end_ns, 4000, 4100, None, "user_annotation", args)
    elif row.what == KERNEL:
        yield Row(OPERATOR, "aten::mm", row.start_ns, row.end_ns, 4000, 4001, None, "cpu_op", args)


def _other_rows(form: Format, rank: int, shape: Shape) -> list[Row]:
    """The rows of the job as other tools than Kineto have them."""
    amd = form.begins_ns > 0

    def made(what: str, name: str, start: int, end: int, **more: object) -> Row:
        return Row(what, name, form.begins_ns + start, form.begins_ns + end, **more)  # type: ignore[arg-type]

    rows = []
    for number, step in enumerate(shape.steps):
        at = number * shape.step_ns
        text = f"iteration#{step}" if amd else f"step={step}"
        rows.append(made(MARK, text, at + 1000, at + shape.step_ns - 50_000, link=10_000 + number))
    dispatched = 0
    for number, row in enumerate(device_rows(rank, shape), 1):
        link = 100 + number
        dispatched += row.what == KERNEL
        name = shape.generic if amd and row.communicates and shape.generic else row.name
        name = "MEMORY_COPY_HOST_TO_DEVICE" if amd and row.what == COPY else name
        more: Json = {"device": form.device, "stream": row.stream, "link": link, "args": {"dispatch": dispatched}}
        rows.append(made(row.what, name, row.start_ns, row.end_ns, **more))
        call = ("hip" if amd else "cuda") + ("LaunchKernel" if row.what == KERNEL else "MemcpyAsync")
        rows.append(made(CALL, call, row.start_ns - 110_000, row.start_ns - 100_000, link=link))
        if row.communicates:  # RCCL's calls, or the ranges that NCCL marks round its own
            call = _CALLS[kind(row.name)].call
            rows.append(made(OPERATOR, call, row.start_ns - 120_000, row.start_ns - 90_000, link=link))
    return rows


def job(format: str, shape: Shape = Shape()) -> list[File]:  # noqa: A002 - the reader's name
    """All ranks of a job. Formats are those of `FORMATS`, Kineto's with a platform: "kineto-cuda"."""
    if format.startswith("kineto-"):
        platform = format.removeprefix("kineto-")
        return [kineto_job(rank, platform=platform, shape=shape) for rank in range(shape.ranks)]
    form, files = FORMATS[format], []
    for rank in range(shape.ranks):
        pid, known = 4242 + rank, {"rank": rank, "world_size": shape.ranks, "host": "node7", "clock": EPOCH_NS}
        facts = {name: known[name] for name in form.facts}
        path = Path(f"rank{rank}", form.name.format(pid))
        files.append(File(path, format, _other_rows(form, rank, shape), facts, pid))
    return files


JOBS: Final = ("kineto-cuda", "kineto-rocm", "kineto-cpu", "rocprofv3-json", "rocprofv3-csv", "rocpd", "nsys")
