"""Traces of the kinds that people report in public, each with the right answer: docs/dev/cases.md lists them.

    python -m tests.read.public_cases   # which are answered rightly

The right times come from a sweep over the boundaries of the rows as they were written, each with its class. The sweep
shares nothing with AORTA.
"""

from __future__ import annotations

import gzip
import itertools
import json
import math
import sqlite3
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from aorta.errors import InputError
from aorta.read.run import Run
from aorta.read.traces.load import load_traces
from tests.read.kineto_files import ALLREDUCE, document, event
from tests.read.nsys_files import TABLES, global_pid, global_tid

GEMM = "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x128_32x5_nn_align8>(Params)"
GENERIC = "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)"
SENDRECV = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
COMPUTE, COMM, COPY = "compute", "comm", "copy"
Json = dict[str, Any]


class Row(NamedTuple):
    """A kernel in microseconds: what it is, its name, and when it ran."""

    what: str
    name: str
    start: float
    lasted: float
    stream: Any = 7
    device: Any = 0
    launched: float | None = None
    args: Json = {}
    lost: bool = False
    process: Any = 4000


def gemm(start: float, lasted: float, **more: Any) -> Row:
    return Row(COMPUTE, GEMM, start, lasted, **more)


def comm(start: float, lasted: float, name: str = ALLREDUCE, **more: Any) -> Row:
    return Row(COMM, name, start, lasted, more.pop("stream", 24), **more)


def sweep(rows: Sequence[Row], window: tuple[float, float]) -> dict[str, float]:
    """Milliseconds of each class in a window, and of communication while something computed."""
    low, high = window
    spans = [(max(r.start, low), min(r.start + r.lasted, high), r.what) for r in rows if not r.lost]
    edges = sorted({low, high, *(edge for a, b, _ in spans if a < b for edge in (a, b))})
    found = dict.fromkeys(("compute_ms", "comm_ms", "compute_comm_ms", "copy_ms"), 0.0)
    for a, b in itertools.pairwise(edges):
        active = {what for start, end, what in spans if start <= a and b <= end}
        for what in active:
            found[f"{what}_ms"] += (b - a) / 1000
        if {COMPUTE, COMM} <= active:
            found["compute_comm_ms"] += (b - a) / 1000
    return found


def events_of(
    rows: Sequence[Row], steps: Sequence[tuple[int, float, float]] = (), host: Sequence[Json] = ()
) -> list[Json]:
    """Kineto's events: marks of steps, kernels, and the calls that launched them."""
    made = [event("user_annotation", f"ProfilerStep#{n}", low, high - low, 4000, 4000) for n, low, high in steps]
    for number, row in enumerate(rows, 1):
        ids = {"External id": 1000 + number, "correlation": 100 + number}
        if not row.lost:
            cat = "gpu_memcpy" if row.what == COPY else "kernel"
            one = event(cat, row.name, row.start, row.lasted, row.device, row.stream)
            made.append({**one, "args": {"device": row.device, "stream": row.stream, **ids, **row.args}})
        if row.launched is None or row.launched >= 0:
            at = row.start - 8 if row.launched is None else row.launched
            call = event("cuda_runtime", "cudaLaunchKernel", at, 4, row.process, row.process)
            made.append({**call, "args": ids})
    return [*made, *host]


def operator(number: int, name: str, start: float, lasted: float = 6, cat: str = "cpu_op") -> Json:
    """The host's operator that launched the kernel of this number (from 1)."""
    return {**event(cat, name, start, lasted, 4000, 4000), "args": {"External id": 1000 + number}}


def trace(
    rows: Sequence[Row], steps: Sequence[tuple[int, float, float]] = (), host: Sequence[Json] = (), **facts: Any
) -> Json:
    return document(events_of(rows, steps, host), **{"cupti_version": 26, **facts})


def of_rank(rank: int | None, world: int = 2) -> Json:
    if rank is None:
        return {"distributedInfo": None}
    return {"distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world}}


Write = Callable[[Path], None]
Check = Callable[[Run], "str | None"]


@dataclass
class Case:
    """An input, and what has to hold of its answer. `refusal`: words of the error that is right."""

    name: str
    write: Write
    checks: Sequence[Check] = ()
    refusal: str | None = None
    patterns: Sequence[str] = field(default_factory=list)

    def wrong(self) -> str | None:
        """Return what is wrong with AORTA's answer; None where it is right."""
        with tempfile.TemporaryDirectory() as folder:
            self.write(Path(folder))
            try:
                run = load_traces(folder, comm_patterns=self.patterns)
            except InputError as error:
                return None if self.refusal is not None and self.refusal in str(error) else f"refused: {error}"
            if self.refusal is not None:
                return f"not refused ({self.refusal})"
            return next((found for check in self.checks if (found := check(run)) is not None), None)


def files(**named: Any) -> Write:
    """Write traces: name -> document, text or bytes. `__` in a name is a point."""

    def write(folder: Path) -> None:
        for name, content in named.items():
            data = (
                content
                if isinstance(content, bytes)
                else (content if isinstance(content, str) else json.dumps(content)).encode()
            )
            path = folder / name.replace("__", ".")
            path.write_bytes(gzip.compress(data) if path.suffix == ".gz" and data[:2] != b"\x1f\x8b" else data)

    return write


def near(seen: Any, right: float | None) -> bool:
    if right is None:
        return seen is None or math.isnan(seen)
    return seen is not None and math.isclose(seen, right, abs_tol=1e-6)


def step(number: int, rank: int = 0, **right: float | None) -> Check:
    """Metrics of a step; None: it is null with a reason."""

    def check(run: Run) -> str | None:
        tables = run.ranks.get(rank)
        if tables is None:
            return f"no rank {rank}"
        at = [index for index, each in enumerate(tables.steps.global_step.tolist()) if each == number]
        if len(at) != 1:
            return f"rank {rank}: step {number} is there {len(at)} times"
        reasons = tables.steps.reasons[int(tables.steps.reason[at[0]])]
        for name, value in right.items():
            seen = float(tables.steps.metrics[name][at[0]])
            if not near(seen, value) or (value is None and name not in reasons):
                return f"rank {rank} step {number}: {name} is {seen}, not {value}"
        return None

    return check


def bounded(number: int, **right: str) -> Check:
    """Metrics of a step that are null, with what their reasons say of them."""

    def check(run: Run) -> str | None:
        steps = run.ranks[0].steps
        at = steps.global_step.tolist().index(number)
        said = steps.reasons[int(steps.reason[at])]
        return next((f"{name}: {said.get(name)}" for name, end in right.items() if end not in said.get(name, "")), None)

    return check


def swept(rows: Sequence[Row], number: int, window: tuple[float, float], rank: int = 0) -> Check:
    return step(number, rank, **sweep(rows, window))


def whole(number: int = 0, **right: float | None) -> Check:
    """Metrics of a device's whole trace."""

    def check(run: Run) -> str | None:
        assert run.traces is not None
        entry = run.traces.whole.get(str(number))
        if entry is None:
            return f"no whole trace {number}: {list(run.traces.whole)}"
        wrong = [name for name, value in right.items() if not near(entry["metrics"][name], value)]
        return f"whole {number}: {[(name, entry['metrics'][name]) for name in wrong]}" if wrong else None

    return check


def whole_of(rows: Sequence[Row], number: int = 0) -> Check:
    low, high = min(row.start for row in rows), max(row.start + row.lasted for row in rows)
    right = sweep(rows, (low, high))
    if number < 0:  # a CSV file, in which copies are not observed
        del right["copy_ms"]
    return whole(number, window_ms=(high - low) / 1000, **right)


def says(*words: str) -> Check:
    def check(run: Run) -> str | None:
        said = "\n".join(run.health.notes())
        return next((f"does not say {word!r}" for word in words if word not in said), None)

    return check


def ranks(*numbers: int) -> Check:
    return lambda run: None if sorted(run.ranks) == sorted(numbers) else f"ranks {sorted(run.ranks)}"


def shares(run: Run) -> str | None:
    """No share is over 100 %, and all together are 100 %."""
    assert run.traces is not None
    found = [entry.share for entry in run.traces.kernels.by_name]
    if any(share > 1 + 1e-9 for share in found) or not math.isclose(sum(found), 1):
        return f"shares {[round(share, 3) for share in found]}"
    return None


def kernels(**counts: int) -> Check:
    """How many kernels of each class there are."""

    def check(run: Run) -> str | None:
        assert run.traces is not None
        seen: dict[str, int] = {}
        for entry in run.traces.kernels.by_name:
            seen[entry.cls] = seen.get(entry.cls, 0) + entry.count
        return None if seen == counts else f"kernels {seen}"

    return check


def no_kernels(run: Run) -> str | None:
    assert run.traces is not None
    kept = run.traces.kernels
    return f"{len(kept.by_name)} kernels" if kept.by_name else None


def collectives(count: int, rank: int = 0) -> Check:
    def check(run: Run) -> str | None:
        seen = len(run.ranks[rank].collectives)
        return None if seen == count else f"{seen} collectives"

    return check


def _nsys(path: Path, rows: Sequence[Row], ranges: Sequence[tuple[str, float, float]] = ()) -> None:
    db = sqlite3.connect(path)
    for table, columns in TABLES.items():
        db.execute(f"CREATE TABLE {table} ({columns})")
    names = {name: code for code, name in enumerate(dict.fromkeys(row.name for row in rows))}
    db.executemany("INSERT INTO StringIds VALUES (?, ?)", [(code, name) for name, code in names.items()])
    pid, thread = global_pid(7), global_tid(7, 1)
    for number, row in enumerate(rows):
        start, end = int(row.start * 1000), int((row.start + row.lasted) * 1000)
        db.execute(
            "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, 0, 1, ?, ?, ?, ?, NULL, NULL, 1)",
            (start, end, row.stream, number, pid, names[row.name]),
        )
        call = int((row.start - 8 if row.launched is None else row.launched) * 1000)
        if call >= 0:
            db.execute(
                "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, 0, ?, ?, 0)", (call, call + 4000, thread, number)
            )
    for text, low, high in ranges:
        values = (int(low * 1000), int(high * 1000), 59, text, None, thread)
        db.execute("INSERT INTO NVTX_EVENTS VALUES (?, ?, ?, ?, ?, ?)", values)
    db.commit()
    db.close()


def nsys(rows: Sequence[Row], ranges: Sequence[tuple[str, float, float]] = ()) -> Write:
    return lambda folder: _nsys(folder / "rank0.sqlite", rows, ranges)


def csv(rows: Sequence[Row]) -> Write:
    """rocprofv3's kernel trace."""
    head = "Kind,Agent_Id,Queue_Id,Stream_Id,Thread_Id,Dispatch_Id,Kernel_Id,Kernel_Name,Correlation_Id,"
    head += "Start_Timestamp,End_Timestamp"
    lines = [
        f'KERNEL_DISPATCH,"Agent 4",1,{row.stream},77,{n},{n},"{row.name}",{n},{int(row.start * 1000)},'
        f"{int((row.start + row.lasted) * 1000)}"
        for n, row in enumerate(rows, 1)
    ]
    return lambda folder: (folder / "577_kernel_trace.csv").write_text("\n".join([head, *lines]) + "\n") and None


# Kind 1: communication known by its name, by the operator that launched it, or doubted.


def _beside(name: str, what: str = COMM, args: Json | None = None) -> list[Row]:
    return [gemm(100, 400), Row(what, name, 300, 500, 20, args=args or {}), comm(900, 300), gemm(1190, 300)]


def _named(label: str, name: str, host: Sequence[Json] = (), args: Json | None = None, what: str = COMM) -> Case:
    rows = _beside(name, what, args)
    return Case(
        label, files(rank0__json=trace(rows, [(1, 0, 1900)], host)), [swept(rows, 1, (0, 1900)), whole_of(rows)]
    )


_RANGE = _beside("my_kernel(float*)")
_DOUBT = _beside("void acme::fast_all_reduce_v9<4>(float*)")
_SMALL = [gemm(0, 40_000), Row(COMPUTE, "void acme::moe_dispatch_tail(int*)", 50_000, 10), comm(51_000, 300)]
NAMED = [
    _named("MoRI dispatch", "void mori::moe::EpDispatchIntraNodeKernel<__hip_bfloat16>(EpDispatchCombineArgs)"),
    _named("TensorRT-LLM one-shot", "void tensorrt_llm::kernels::oneShotAllReduceKernel<__nv_bfloat16, 8>(Params)"),
    _named(
        "flashinfer fusion", "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<8>()"
    ),
    _named("oneCCL", "oneapi_ccl_allreduce_entry_sycl_kernel"),
    _named("MSCCL++", "void mscclpp::allreduce7<__half>(__half*, mscclpp::DeviceHandle<mscclpp::MemoryChannel>*)"),
    _named(
        "operator of symmetric memory",
        "void (anonymous namespace)::k7<8>(int**)",
        [operator(2, "symm_mem::put_signal", 290)],
    ),
    _named("Collective name", "void custom_kernel(float*)", args={"Collective name": "allreduce", "Seq": 3}),
    Case(
        "an NVTX range of NCCL's call",
        nsys(_RANGE, [("step=1", 0, 1900), ("c10d::allreduce_", 285, 298)]),
        [swept(_RANGE, 1, (0, 1900))],
    ),
    Case(
        "a doubt that matters",
        files(rank0__json=trace(_DOUBT, [(1, 0, 1900)])),
        [step(1, overlap_ratio=None, compute_ms=None, comm_ms=None, window_ms=1.9), says("fast_all_reduce_v9")],
    ),
    Case(
        "a doubt too small to matter",
        files(rank0__json=trace(_SMALL, [(1, 0, 60_000)])),
        [step(1, compute_ms=40.01, window_ms=60.0), says("moe_dispatch_tail")],
    ),
]


# Kind 2: the device was not recorded, or lost kernels.


def _host_only(
    *,
    backend: str | None = "nccl",
    launches: int = 0,
    properties: bool = True,
    call: str = "cudaLaunchKernel",
    gloo: bool = False,
) -> Json:
    made = [event("user_annotation", f"ProfilerStep#{n}", n * 5000, 4900, 4000, 4000) for n in (1, 2)]
    for n in (1, 2):
        for at in range(4):
            start = n * 5000 + 100 + at * 200
            dims = {"Input Dims": [[64, 64], [64, 64]], "Input type": ["float", "float"], "External id": n * 100 + at}
            made.append({**event("cpu_op", "aten::mm", start, 60, 4000, 4000), "args": dims})
            if at < launches:
                made.append(
                    {**event("cuda_runtime", call, start + 20, 5, 4000, 4000), "args": {"correlation": n * 100 + at}}
                )
        made.append(event("cpu_op", "aten::item", n * 5000 + 2000, 2000, 4000, 4000))
        if gloo:
            made.append(event("cpu_op", "c10d::allreduce_", n * 5000 + 1500, 10, 4000, 4000))
            made.append(event("user_annotation", "gloo:all_reduce", n * 5000 + 1510, 300, 4000, 4100))
    facts: Json = {"deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}] if properties else []}
    facts["distributedInfo"] = {"backend": backend, "rank": 0, "world_size": 1} if backend else None
    return document(made, **facts)


def _unseen(label: str, **how: Any) -> Case:
    nulls = step(1, compute_ms=None, comm_ms=None, overlap_ratio=None, idle_ms=None, window_ms=4.9)
    return Case(label, files(rank0__json=_host_only(**how)), [nulls, no_kernels, says("no device activity")])


def _lost(label: str, lost: int, of: int, null: bool) -> Case:
    rows = [gemm(100 + at * 50, 40, lost=at < lost) for at in range(of)] + [comm(60_000, 900), gemm(60_100, 500)]
    rows += [row._replace(start=row.start + 100_000, lost=False) for row in rows]
    seen = sweep(rows, (0, 99_900))
    hidden = seen["compute_comm_ms"]
    ends = {
        "compute_ms": f"at least {seen['compute_ms']:.4g} ms",
        "overlap_ratio": f"at least {hidden / seen['comm_ms']:.4g}",
        "exposed_comm_ms": f"at most {seen['comm_ms'] - hidden:.4g} ms",
    }
    first = [step(1, window_ms=99.9, compute_ms=None), bounded(1, **ends)] if null else [swept(rows, 1, (0, 99_900))]
    checks = [*first, swept(rows, 2, (100_000, 199_900))]
    checks += [says("launches without a kernel in the trace")] if lost else []
    return Case(label, files(rank0__json=trace(rows, [(1, 0, 99_900), (2, 100_000, 199_900)])), checks)


UNSEEN = [
    _unseen("backend is NCCL"),
    _unseen("backend is RCCL by its list", backend="cpu:gloo,cuda:nccl"),
    _unseen("launches alone", backend=None, properties=False, launches=4),
    _unseen("launches on AMD", backend=None, properties=False, launches=4, call="hipLaunchKernel"),
    _unseen("driver launches", backend="gloo", properties=False, launches=1, call="cuLaunchKernel"),
    _unseen("device properties alone", backend=None),
    Case(
        "gloo on a machine with a GPU", files(rank0__json=_host_only(backend="gloo", gloo=True)), [step(1, comm_ms=0.3)]
    ),
    _lost("half of a step lost", 8, 16, null=True),
    _lost("one of two hundred lost", 1, 200, null=False),
    _lost("none lost", 0, 16, null=False),
]


# Kind 3 and 4: (rank, device) is not unique; one rank is not one file.


def _window(steps: Sequence[int], lasted: float = 500, at: float = 0) -> list[Row]:
    return [
        row for n in range(len(steps)) for row in (gemm(at + n * 3000 + 100, 700), comm(at + n * 3000 + 400, lasted))
    ]


def _cycle(steps: Sequence[int], rank: int | None, lasted: float = 500, at: float = 0, **facts: Any) -> Json:
    marks = [(n, at + i * 3000, at + i * 3000 + 2900) for i, n in enumerate(steps)]
    return trace(_window(steps, lasted, at), marks, **of_rank(rank), **facts)


def _many(count: int, rank: int | None, **facts: Any) -> dict[str, Json]:
    return {f"w{n}_pt_trace__json": _cycle([n], rank, 100 + 100 * n, 10_000 * n, **facts) for n in range(count)}


SHARES = [
    Case("four processes of unknown rank", files(**_many(4, None)), [shares, kernels(compute=4, comm=4)]),
    Case("eight processes of unknown rank", files(**_many(8, None)), [shares, kernels(compute=8, comm=8)]),
    Case("two windows of one rank", files(**_many(2, 0)), [shares, kernels(compute=2, comm=2)]),
    Case("three windows of one rank", files(**_many(3, 0)), [shares, kernels(compute=3, comm=3)]),
    Case(
        "a rank that is known beside one that is not",
        files(a__json=_cycle([1], 0), b__json=_cycle([1], None)),
        [shares],
    ),
    Case(
        "a window with other kernels",
        files(
            a__json=_cycle([1], 0),
            b__json=trace([Row(COMPUTE, "other", 90_000, 50)], [(9, 90_000, 90_100)], **of_rank(0)),
        ),
        [shares],
    ),
    Case(
        "copies too",
        files(
            **{
                k: trace([gemm(0, 10), Row(COPY, "Memcpy HtoD (Pinned -> Device)", 20, 5, 8)], **of_rank(None))
                for k in ("a__json", "b__json")
            },
            c__json=trace([gemm(0, 77)], **of_rank(None)),
        ),
        [shares],
    ),
    Case(
        "two devices of one rank",
        files(a__json=trace([gemm(0, 10), gemm(0, 30, device=1), comm(50, 9, device=1)], **of_rank(0))),
        [shares],
    ),
    Case(
        "CSV files of several processes",
        lambda folder: (
            [csv([gemm(0, 100 + n), comm(50, 80)])((folder / f"p{n}").mkdir() or folder / f"p{n}") for n in range(3)]
            and None
        ),
        [shares],
    ),
    Case(
        "more names than are kept",
        files(
            **{k: trace([Row(COMPUTE, f"k{n}", n * 20, 10) for n in range(700)], **of_rank(None)) for k in ("a__json",)}
        ),
        [
            lambda run: (
                None
                if run.traces is not None and sum(e.share for e in run.traces.kernels.by_name) <= 1 + 1e-9
                else "over 100 %"
            )
        ],
    ),
]

_TWO = {
    "r0a__json": _cycle([4, 5], 0, 500),
    "r0b__json": _cycle([14, 15], 0, 650, 50_000),
    "r1a__json": _cycle([4, 5], 1, 600),
    "r1b__json": _cycle([14, 15], 1, 500, 50_000),
}
_ROWS_A, _ROWS_B = _window([4, 5]), _window([14, 15], 650, 50_000)
_JOINED = [swept(_ROWS_A, 4, (0, 2900)), swept(_ROWS_B, 15, (53_000, 55_900))]
_COPY_DOC = _cycle([4, 5], 0)
WINDOWS = [
    Case(
        "two ranks, two windows each",
        files(**_TWO),
        [ranks(0, 1), *_JOINED, swept(_window([14, 15], 500, 50_000), 14, (50_000, 52_900), 1)],
    ),
    Case("three windows of a rank", files(**_many(3, 0)), [ranks(0), step(0, comm_ms=0.1), step(2, comm_ms=0.3)]),
    Case(
        "windows by rank in the path",
        lambda folder: (
            [
                files(**{f"{n}__json": _cycle([n], None, at=10_000 * n)})(
                    (folder / f"rank{r}").mkdir(exist_ok=True) or folder / f"rank{r}"
                )
                for r in (0, 1)
                for n in (1, 7)
            ]
            and None
        ),
        [ranks(0, 1), step(7, 1, comm_ms=0.5)],
    ),
    Case(
        "the later window is read first",
        files(a__json=_cycle([14, 15], 0, 650, 50_000), b__json=_cycle([4, 5], 0)),
        [ranks(0), *_JOINED],
    ),
    Case(
        "gzip -k left both",
        files(r0__json=_COPY_DOC, r0__json__gz=_COPY_DOC),
        [ranks(0), swept(_ROWS_A, 4, (0, 2900)), kernels(compute=2, comm=2), says("the same steps")],
    ),
    Case(
        "a copy under another name",
        files(r0__json=_COPY_DOC, saved__json=_COPY_DOC),
        [ranks(0), kernels(compute=2, comm=2), says("the same steps")],
    ),
    Case(
        "a copy and a second window",
        files(a__json=_COPY_DOC, b__json=_COPY_DOC, c__json=_cycle([14, 15], 0, 650, 50_000)),
        [ranks(0), *_JOINED, kernels(compute=4, comm=4)],
    ),
    Case(
        "windows without marks",
        files(a__json=trace(_ROWS_A, **of_rank(0)), b__json=trace(_ROWS_B, **of_rank(0))),
        [ranks(0), kernels(compute=4, comm=4), whole(0, compute_ms=2.8, comm_ms=2.3)],
    ),
    Case(
        "the same steps of another run",
        files(a__json=_cycle([4, 5], 0), b__json=_cycle([4, 5], 0, 650, 900_000)),
        [step(4, comm_ms=0.5), says("several traces claim to be rank 0")],
    ),
    Case("whole trace of joined windows", files(**_many(2, 0)), [whole(0, compute_ms=1.4, comm_ms=0.3)]),
]


# Kind 5: identifiers are opaque.


def _two_devices(first: Any, second: Any, streams: tuple[Any, Any] = (7, 24)) -> Case:
    mine = [gemm(100, 1000, device=first, stream=streams[0]), gemm(2100, 1000, device=first, stream=streams[0])]
    other = [
        comm(200, 800, SENDRECV, device=second, stream=streams[1]),
        gemm(1000, 500, device=second, stream=streams[0]),
        comm(2200, 800, SENDRECV, device=second, stream=streams[1]),
        gemm(3000, 500, device=second, stream=streams[0]),
    ]

    def check(run: Run) -> str | None:
        assert run.traces is not None
        seen = sorted((e["metrics"]["compute_ms"], e["metrics"]["comm_ms"]) for e in run.traces.whole.values())
        return None if seen == [(1.0, 1.6), (2.0, 0.0)] else f"devices {seen}"

    rows = [row._replace(args={"device": None, "stream": None}) for row in (*mine, *other)]
    return Case(f"devices {first!r} and {second!r}", files(rank0__json=trace(rows)), [check])


OPAQUE = [
    _two_devices("[TP00-PP00] 0", "[TP00-PP01] 1"),
    _two_devices("[TP00-PP00] 0", "[TP01-PP00] 0"),
    _two_devices("node-1 gpu 0", "node-2 gpu 0"),
    _two_devices("a", "b"),
    _two_devices(22_000_000_000, 23_000_000_000),
    _two_devices(2**31 - 1, 2**31),
    _two_devices(2**63 + 1, 2**63 + 2),
    _two_devices("[DP0] 0", 0),
    _two_devices("0", "[TP00] 0", ("stream 7", "stream 24")),
    _two_devices(0.5, 1.5),
]


# Kind 6: a row outside of everything else.


def _usual(start: float = 5e9, count: int = 10) -> list[Row]:
    return [
        row for n in range(count) for row in (gemm(start + n * 1000, 600), comm(start + n * 1000 + 400, 500, GENERIC))
    ]


def _stray(label: str, stray: Row | list[Row], start: float = 5e9, *, kineto: bool = False) -> Case:
    rows = _usual(start)
    extra = stray if isinstance(stray, list) else [stray]
    steps = [(1, start, start + 10_000)] if kineto else []
    write = files(rank0__json=trace([*extra, *rows], steps)) if kineto else csv([*extra, *rows])
    return Case(
        label, write, [whole_of(rows, 0 if kineto else -1), says("outside of everything else", extra[0].name[:20])]
    )


_FILL = "__amd_rocclr_fillBufferAligned.kd"
_MARKED = [Row(COPY, "Memset (Device)", 1_000, 5, launched=-1), *_usual()]
STRAY = [
    _stray("an hour before", Row(COPY, _FILL, 1.4e9, 5, 1)),
    _stray("at 0", Row(COPY, _FILL, 0, 5, 1)),
    _stray("an hour behind", gemm(8.6e9, 5)),
    _stray("two minutes before", Row(COPY, _FILL, 4.88e9, 5, 1)),
    _stray("one at each end", [gemm(1, 5), gemm(9e9, 5)]),
    _stray("two before", [gemm(1e9, 5), gemm(1.00000002e9, 5)]),
    _stray("before the marked steps", gemm(1e9, 5, launched=-1), kineto=True),
    _stray("behind the marked steps", gemm(9e9, 5, launched=-1), kineto=True),
    Case("no stray: a long pause", csv([*_usual(), *_usual(5.03e9)]), [whole_of([*_usual(), *_usual(5.03e9)], -1)]),
    Case(
        "no stray: a load before training",
        csv([gemm(4_999_500_000, 90), *_usual()]),
        [whole_of([gemm(4_999_500_000, 90), *_usual()], -1)],
    ),
]


# Kind 7: the device lags behind the marks.


def _lagging(
    lag: float, linked: bool = True, steps: int = 4, period: float = 3500
) -> tuple[list[Row], list[tuple[int, float, float]]]:
    rows = []
    for n in range(steps):
        at = lag + n * period
        launch = n * 1000 + 100
        rows += [
            gemm(at, 1500, launched=launch if linked else -1),
            comm(at + 1000, 1200, launched=launch + 50 if linked else -1),
        ]
    return rows, [(n + 1, n * 1000, n * 1000 + 990) for n in range(steps)]


def _lag(label: str, lag: float, period: float = 3500, steps: int = 4) -> Case:
    rows, marks = _lagging(lag, steps=steps, period=period)
    own = {"compute_ms": 1.5, "comm_ms": 1.2, "compute_comm_ms": 0.5, "overlap_ratio": 0.5 / 1.2}
    return Case(
        label,
        files(rank0__json=trace(rows, marks)),
        [*(step(n, **own) for n in range(1, steps + 1)), says("launched"), whole_of(rows)],
    )


def _unlinked(label: str, lag: float, write: Callable[..., Write]) -> Case:
    rows, marks = _lagging(lag, linked=False)
    given = (
        write(rows, [(f"step={n}", low, high) for n, low, high in marks])
        if write is nsys
        else files(rank0__json=trace(rows, marks))
    )
    return Case(
        label, given, [step(0, overlap_ratio=0.5 / 1.2, compute_ms=6.0, comm_ms=4.8), says("outside of the steps")]
    )


_RAN_BY_NSYS, _MARKS = _lagging(2500)
LAG = [
    _lag("a burst behind the marks", 2500),
    _lag("behind every mark", 9000),
    _lag("a lag of three steps", 3000),
    _lag("two steps", 5000, steps=2),
    _lag("eight steps", 9500, steps=8),
    _lag("bursts that touch", 6000, 2200),
    _unlinked("unlinked", 2500, trace),
    _unlinked("unlinked, behind every mark", 9000, trace),
    Case(
        "nsys, linked",
        nsys(_RAN_BY_NSYS, [(f"step={n}", low, high) for n, low, high in _MARKS]),
        [step(n, compute_ms=1.5, comm_ms=1.2) for n in (1, 4)],
    ),
    Case(
        "no lag", files(rank0__json=_cycle([4, 5], 0)), [step(4, window_ms=2.9, compute_ms=0.7), step(5, window_ms=2.9)]
    ),
]


# Kind 10: counts.


def _alltoall(kernels_each: int, seq: int | None = 0, collective: str = "all_to_allv", group: str = "0") -> list[Row]:
    named = {"Collective name": collective, "Process Group Name": group} | ({} if seq is None else {"Seq": seq})
    return [comm(200 + n * 50, 50, SENDRECV, args={**named, "External id": 77}) for n in range(kernels_each)]


def _counted(label: str, rows: list[Row], count: int, **of: int) -> Case:
    return Case(
        label,
        files(rank0__json=trace([gemm(100, 50), *rows], [(1, 0, 1900)])),
        [collectives(count), kernels(compute=1, **of)],
    )


_TWICE = trace([gemm(100, 400), comm(300, 500)], [(1, 0, 1900)])
_TWICE["traceEvents"] += [one for one in _TWICE["traceEvents"] if one["cat"] == "kernel"]
_ONCE = trace([gemm(100, 400), comm(300, 500)], [(1, 0, 1900)])
_ONCE["traceEvents"] += [one for one in _ONCE["traceEvents"] if one["name"] == GEMM]


def gaps(count: int, stream: int = 7) -> Check:
    def check(run: Run) -> str | None:
        assert run.traces is not None
        (own,) = [entry for entry in run.traces.kernels.gaps if entry.stream == stream]
        return None if own.gaps == count else f"{own.gaps} gaps"

    return check


COUNTS = [
    _counted("eight send-receives of an all-to-all", _alltoall(8), 1, comm=8),
    _counted("without a sequence number", _alltoall(8, None), 1, comm=8),
    _counted(
        "two all-to-alls",
        [
            *_alltoall(4),
            *[
                row._replace(start=row.start + 800, args={**row.args, "Seq": 1, "External id": 78})
                for row in _alltoall(4)
            ],
        ],
        2,
        comm=8,
    ),
    _counted(
        "groups of one number",
        [
            *_alltoall(2),
            *[
                row._replace(start=row.start + 800, args={**row.args, "Process Group Name": "1", "External id": 78})
                for row in _alltoall(2)
            ],
        ],
        2,
        comm=4,
    ),
    _counted(
        "sends stay as many",
        [
            comm(200 + 60 * n, 50, SENDRECV, args={"Collective name": "send", "Process Group Name": "0", "Seq": 3})
            for n in range(3)
        ],
        3,
        comm=3,
    ),
    _counted(
        "an all-reduce each",
        [
            comm(200 + 60 * n, 50, args={"Collective name": "allreduce", "Process Group Name": "0", "Seq": n})
            for n in range(3)
        ],
        3,
        comm=3,
    ),
    Case("rows twice", files(rank0__json=_TWICE), [kernels(compute=1, comm=1), collectives(1), says("twice")]),
    Case("one row twice", files(rank0__json=_ONCE), [kernels(compute=1, comm=1), says("twice")]),
    Case(
        "zero-length rows in no gap",
        files(rank0__json=trace([gemm(100, 50), gemm(160, 0), gemm(170, 0), gemm(200, 50)])),
        [gaps(1)],
    ),
    Case(
        "a zero-length row first",
        files(rank0__json=trace([gemm(50, 0), gemm(100, 50), gemm(200, 50), gemm(300, 0)])),
        [gaps(1)],
    ),
]


# Kind 11: text that is nearly JSON.

_PLAIN = [gemm(100, 700), comm(500, 600), Row(COPY, "Memcpy HtoD (Pageable -> Device)", 1200, 10)]
_FUNCTION = event("python_function", "MARK", 50, 1000, 4000, 4000)
_TEXT = json.dumps(trace(_PLAIN, [(1, 0, 1900)], [_FUNCTION, event("python_function", "last", 60, 900, 4000, 4000)]))


def _damaged(label: str, data: bytes, *words: str, name: str = "rank0__json") -> Case:
    return Case(
        label,
        files(**{name: data}),
        [swept(_PLAIN, 1, (0, 1900)), says(*words)] if words else [swept(_PLAIN, 1, (0, 1900))],
    )


def _with(name: bytes) -> bytes:
    return _TEXT.encode().replace(b"MARK", name)


_BROKEN = _TEXT.replace('"dur": 600', '"dur": 6x0')
NEARLY = [
    _damaged("bare N/A", _TEXT.encode().replace(b'"External id": 1003', b'"x": N/A, "External id": 1003'), "not JSON"),
    _damaged("backslash", _with(rb"C:\work\new\u12.py"), "not JSON"),
    _damaged("quotes", _with(b'say "hi", "x": {'), "not JSON"),
    _damaged("a control character", _with(b"a\x01b"), "not JSON"),
    _damaged(
        "inf and nan",
        _TEXT.encode().replace(b'"External id": 1003', b'"x": inf, "y": -nan, "External id": 1003'),
        "not JSON",
    ),
    _damaged("a byte order mark", b"\xef\xbb\xbf" + _TEXT.encode()),
    _damaged("Latin-1", _with(b"caf\xe9")),
    _damaged(
        "cut behind an event",
        _TEXT[: _TEXT.index('{"ph": "X", "cat": "python_function", "name": "last"')].encode(),
        "cut off",
    ),
    _damaged("gzip with zeros behind", gzip.compress(_TEXT.encode()) + b"\0" * 512 + b"junk", name="rank0__json__gz"),
    Case(
        "a broken row that is read",
        files(rank0__json=_BROKEN),
        [step(1, comm_ms=0.0, compute_ms=None), says("not JSON", "launches have no kernel")],
    ),
]

# Kind 12: files of other tools.


def _rpd(
    folder: Path,
    processes: Sequence[Sequence[Row]],
    steps: Sequence[tuple[int, float, float]] = (),
    described: bool = True,
) -> None:
    """A database of rocmProfileData: what ran, and the calls that launched it."""
    db = sqlite3.connect(folder / ("rank0.rpd" if len(processes) == 1 else "node.rpd"))
    db.execute("CREATE TABLE rocpd_string (id INTEGER PRIMARY KEY, string TEXT)")
    db.execute(
        "CREATE TABLE rocpd_op (id INT, gpuId INT, queueId INT, start INT, end INT, description_id INT, opType_id INT)"
    )
    db.execute("CREATE TABLE rocpd_api (id INT, pid INT, tid INT, start INT, end INT, apiName_id INT, args_id INT)")
    db.execute("CREATE TABLE rocpd_api_ops (api_id INT, op_id INT)")
    db.execute("CREATE TABLE rocpd_kernelapi (api_ptr_id INT, kernelName_id INT)")
    codes: dict[str, int] = {}

    def code(text: str) -> int:
        return codes.setdefault(text, len(codes) + 1)

    ident = 0
    for pid, rows in enumerate(processes, 7):
        for row in rows:
            ident += 1
            kind = code("CopyHostToDevice" if row.what == COPY else "KernelExecution")
            name, ns = code(row.name), [int(edge * 1000) for edge in (row.start, row.start + row.lasted)]
            values = (ident, row.device, row.stream, *ns, name if described else code(""), kind)
            db.execute("INSERT INTO rocpd_op VALUES (?, ?, ?, ?, ?, ?, ?)", values)
            call = (ident, pid, 1, ns[0] - 8000, ns[0] - 4000, code("hipLaunchKernel"), code(""))
            db.execute("INSERT INTO rocpd_api VALUES (?, ?, ?, ?, ?, ?, ?)", call)
            db.execute("INSERT INTO rocpd_api_ops VALUES (?, ?)", (ident, ident))
            db.execute("INSERT INTO rocpd_kernelapi VALUES (?, ?)", (ident, name))
        for n, low, high in steps:
            ident += 1
            mark = (ident, pid, 1, int(low * 1000), int(high * 1000), code("UserMarker"), code(f"step={n}"))
            db.execute("INSERT INTO rocpd_api VALUES (?, ?, ?, ?, ?, ?, ?)", mark)
    db.executemany("INSERT INTO rocpd_string VALUES (?, ?)", [(number, text) for text, number in codes.items()])
    db.commit()
    db.close()


def whole_of_each(*processes: Sequence[Row]) -> Check:
    def check(run: Run) -> str | None:
        assert run.traces is not None
        seen = sorted(entry["metrics"]["compute_ms"] for entry in run.traces.whole.values())
        right = sorted(sum(row.lasted for row in rows if row.what == COMPUTE) / 1000 for rows in processes)
        return None if seen == right else f"{seen}"

    return check


_RAN = [gemm(100, 400), comm(300, 500, GENERIC), Row(COPY, "Copy", 900, 10)]
_OTHER_RAN = [gemm(100, 700, device=1), comm(300, 500, GENERIC, device=1)]
_PLUGIN = (
    '[{"name": "AllReduce", "cat": "COLL", "ph": "b", "ts": 20.5, "args": {"SeqNum": 0, "CommHash": 1, "Rank": 0}}, {}]'
)
_JAX = '{"traceEvents": [{"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "/device:GPU:0"}}, {}]}'
_ASCEND = (
    '[{"ph": "M", "pid": 31, "name": "process_name", "args": {"name": "Ascend Hardware"}}, {"ph": "X", "ts": "17.125"}]'
)
_ROCPROF = (
    '{"traceEvents": [{"ph": "X", "name": "k", "ts": "6", "dur": "5", "args": {"BeginNs": "6000", "EndNs": "9"}}]}'
)
OTHERS = [
    Case("RPD", lambda folder: _rpd(folder, [_RAN]), [whole_of(_RAN), kernels(compute=1, comm=1, copy=1)]),
    Case("RPD with marks", lambda folder: _rpd(folder, [_RAN], [(3, 0, 1000)]), [swept(_RAN, 3, (0, 1000))]),
    Case("RPD, names at the calls", lambda folder: _rpd(folder, [_RAN], described=False), [whole_of(_RAN)]),
    Case("RPD of two processes", lambda folder: _rpd(folder, [_RAN, _OTHER_RAN]), [whole_of_each(_RAN, _OTHER_RAN)]),
    Case("RPD without kernels", lambda folder: _rpd(folder, [[Row(COPY, "Copy", 9, 10)]]), refusal="librpd_tracer"),
    Case("NCCL's profiler plugin", files(a__json=_PLUGIN), refusal="NCCL's profiler plugin"),
    Case("JAX", files(a__json=_JAX), refusal="a JAX/XLA trace"),
    Case("Ascend", files(a__json=_ASCEND), refusal="an Ascend trace"),
    Case("rocprof v1", files(a__json=_ROCPROF), refusal="rocprof (v1)"),
    Case("Perfetto", files(a__pb=b"\n\x10\x08\x00\x12\x04abcd" * 20), refusal="Perfetto"),
]

KINDS: dict[str, list[Case]] = {
    "1 names": NAMED,
    "2 device unseen": UNSEEN,
    "3 shares": SHARES,
    "4 windows": WINDOWS,
    "5 identifiers": OPAQUE,
    "6 strays": STRAY,
    "7 lag": LAG,
    "10 counts": COUNTS,
    "11 nearly JSON": NEARLY,
    "12 other tools": OTHERS,
}

if __name__ == "__main__":
    # Not above: these load torch, and the tests of traces do without it.
    from tests.autopsy.test_public_dumps import DUMPS
    from tests.recording.test_public_threads import THREADS

    for kind, cases in {**KINDS, "8 threads": THREADS, "9 dumps": DUMPS}.items():
        for case in cases:
            try:
                answer = case.wrong()
            except Exception as error:  # noqa: BLE001 - what a user would see as a traceback
                answer = f"{type(error).__name__}: {error}"
            sys.stdout.write(f"{kind} | {case.name} | {'right' if answer is None else f'wrong: {answer}'[:180]}\n")
