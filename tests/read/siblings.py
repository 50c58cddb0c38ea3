"""Siblings of what public cases showed: for every kind some inputs, of other formats, names, numbers of ranks, streams
and steps, with the fault in one step, on one rank, or twice. What a device did is known, as in `tests.read.mutants`.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from tests.read.answers import Answer, Value, answer
from tests.read.evidence_jobs import Shape, drawn_shape, job, sums_ms
from tests.read.evidence_rows import COPY, KERNEL, MARK, OTHER, File, Row
from tests.read.mutated_communication import bare, devices, labelled, to_gloo, to_graphs, to_symmetric
from tests.read.mutations import (
    Mutation,
    changed,
    facts,
    is_call,
    is_comm,
    is_copy,
    is_kernel,
    is_mark,
    is_operator,
    issues,
    on_device,
    renamed,
    shifted,
    then,
    waits,
    without,
)

LAGS: Final = "the device lags"


ALL: Final = ("kineto-cuda", "nsys", "rocprofv3-json", "kineto-rocm", "rocpd", "rocprofv3-csv")


KINETO: Final = ("kineto-cuda", "kineto-rocm")


class Sibling(NamedTuple):
    """One input: what is right, and the traces; `name`: which windows it moves (`mutants.MOVED`)."""

    right: Answer
    files: list[File]
    name: str


def on(mutate: Mutation, *ranks: int) -> Mutation:
    """Only in the files of some ranks, counted round."""

    def apply(files: Sequence[File], chance: random.Random) -> list[File]:
        chosen = {rank % len(files) for rank in ranks}
        return [mutate([file], chance)[0] if at in chosen else file for at, file in enumerate(files)]

    return apply


def in_steps(mutate: Mutation, *steps: int) -> Mutation:
    """Only to what begins in some steps, counted round."""

    def change(file: File, chance: random.Random) -> File:
        marks = sorted((row for row in file.rows if row.what == MARK), key=lambda row: row.start_ns)
        chosen = [marks[step % len(marks)] for step in steps]
        inside = [r.what != OTHER and any(m.start_ns <= r.start_ns < m.end_ns for m in chosen) for r in file.rows]
        kept, mine = ([r for r, own in zip(file.rows, inside, strict=True) if own is which] for which in (False, True))
        return file.changed([*kept, *mutate([file.changed(mine)], chance)[0].rows])

    return lambda files, chance: [change(file, chance) for file in files]


def ahead(row: Row) -> bool:
    """A stream that does not lag: that of copies and the shortest kernels."""
    return row.what == KERNEL and not row.communicates and ("triton" in row.name or "elementwise" in row.name)


def lag(by: float) -> Mutation:
    return shifted(is_kernel, by)


def lag_but(by: float) -> Mutation:
    return shifted(lambda row: is_kernel(row) and not ahead(row), by)


unmarked: Final = without(is_mark)


KINDS: Final[dict[str, tuple[tuple[str, ...], str, tuple[Mutation, ...]]]] = {
    "gloo beside device rows": (
        KINETO,
        "",
        (
            to_gloo(0.5),
            to_gloo(backend="gloo"),
            in_steps(to_gloo(), 1),
            on(to_gloo(0.5, "cpu_op", 7), 1),
            in_steps(on(to_gloo(backend="cpu:gloo,cuda:nccl"), 1), 0, 2),
            then(to_gloo(0.3), unmarked),
            then(to_gloo(0.4), without(issues)),
            then(to_gloo(0.5), without(is_call)),
            on(to_gloo(1.0, "user_annotation", 41, "gloo"), 0, 1),
            in_steps(to_gloo(0.5, "cpu_op", 3), -1),
            then(to_gloo(0.6), facts(world_size=None)),
            then(to_gloo(), without(lambda row: is_kernel(row) and not row.communicates, 0.0), facts(backend=None)),
        ),
    ),
    "a profiler starts late": (
        ALL,
        "",
        (
            on(waits(15_700_000_000), 0),
            on(waits(400_000_000), 1),
            on(then(waits(2_000_000_000), unmarked), 0),
            then(on(waits(900_000_000), 0), unmarked),
            on(waits(5_000_000_000, 2), 1),
            then(on(waits(30_000_000_000), 0), without(is_call)),
            then(on(waits(700_000_000), -1), without(is_operator)),
            on(waits(1_500_000_000), 0, 1),
            then(on(waits(3_000_000_000, 3), 0), unmarked),
            then(on(waits(250_000_000), 0), facts(world_size=None)),
            then(on(waits(60_000_000_000), 1), facts(clock=None)),
            then(on(waits(120_000_000_000), 0), without(is_copy)),
        ),
    ),
    "graphs without kernels": (
        ALL,
        "",
        (
            to_graphs(1.0, whole=True),
            to_graphs(0.5, whole=True),
            to_graphs(0.5),
            in_steps(to_graphs(0.5), 1, 2),
            on(to_graphs(1.0, "cuGraphLaunch", whole=True), 1),
            to_graphs(0.6, "hipGraphLaunch", whole=True),
            on(to_graphs(0.7, "hipGraphLaunch"), 0),
            then(to_graphs(0.5, whole=True), facts(world_size=None)),
            then(to_graphs(0.8, "cudaGraphLaunch_v10000", whole=True), unmarked),
            to_graphs(0.0),
            on(to_graphs(0.3, "cudaGraphLaunch_ptsz", whole=True), 1),
            then(to_graphs(1.0, whole=True), without(issues)),
        ),
    ),
    "devices lag, a stream runs ahead": (
        ALL,
        LAGS,
        (
            lag(0.6),
            lag_but(0.6),
            lag_but(0.3),
            on(lag_but(0.9), 0),
            lag_but(1.7),
            then(lag_but(0.5), without(is_call)),
            then(lag(0.4), without(is_call, 0.5)),
            on(then(lag(0.15), lag_but(0.3)), 1),
            then(lag_but(0.25), without(is_copy)),
            then(shifted(is_comm, 0.4)),
            shifted(is_copy, 0.5),
            then(lag_but(0.7), without(is_operator)),
        ),
    ),
    "host labels of device collectives": (
        KINETO,
        "",
        (
            without(on_device),
            then(without(on_device), without(is_call)),
            then(without(on_device), without(is_call), labelled("xccl")),
            then(without(on_device), without(is_call), labelled("hccl"), bare("deviceProperties", "cupti_version")),
            then(without(on_device), without(is_call), facts(backend=None, world_size=None), bare("deviceProperties")),
            on(then(without(on_device), without(is_call), labelled("rccl")), 1),
            then(without(is_kernel), without(is_call), labelled("mccl"), without(is_copy)),
            then(in_steps(without(on_device), 1), in_steps(without(is_call), 1), labelled("xccl")),
            then(to_gloo(0.3), without(on_device), without(is_call), labelled("nccl")),
            then(without(on_device), renamed(lambda row: row.name == "record_param_comms", "c10d::allreduce_")),
            then(
                without(lambda row: on_device(row) or is_call(row) or row.name == "record_param_comms"),
                labelled("eccl"),
                facts(backend=None),
                bare("deviceProperties", "cupti_version"),
            ),
            then(without(is_comm), labelled("flagcx")),
        ),
    ),
    "devices that are not CUDA's": (
        KINETO,
        "",
        (
            devices("mtia_ccp_events", "mtia_runtime"),
            devices("hpu_op", "hpu_runtime"),
            devices("xpu_op", "xpu_runtime"),
            devices("privateuse1_op", "privateuse1_runtime"),
            devices("mtia_workloadd", "mtia_insight", is_kernel),
            devices("npu_kernel", "cuda_runtime", is_comm, platform_too=False),
            on(devices("privateuse1_kernel", "privateuse1_driver"), 1),
            in_steps(devices("xpu_kernel", "xpu_driver", platform_too=False), 1, 2),
            devices("glow_runtime", "cuda_runtime", lambda row: is_kernel(row) and not row.communicates),
            devices("hpu_memcpy", "cuda_runtime", is_copy, platform_too=False),
            then(devices("tpu", "tpu_runtime"), without(is_operator)),
            then(devices("musa_kernel", "musa_runtime"), unmarked, facts(world_size=None)),
        ),
    ),
    "whole traces beside steps": (
        ("kineto-cuda", "nsys", "rocprofv3-json", "kineto-cpu", "rocpd", "rocprofv3-csv"),
        "",
        (
            on(unmarked, 1),
            on(unmarked, 0),
            on(unmarked, 1, 2, 3, 4),
            on(unmarked, -1),
            on(in_steps(unmarked, 0, 1), 1),
            then(on(unmarked, 1), facts(world_size=None)),
            then(on(unmarked, 0), facts(rank=None)),
            on(then(unmarked, without(is_copy)), 1),
            on(renamed(is_mark, "Optimizer.step"), 0),
            then(on(unmarked, 1), without(is_call)),
            on(changed(is_mark, lambda row: replace(row, end_ns=row.start_ns)), 1),
            then(on(unmarked, 0), on(in_steps(unmarked, 1), 1)),
        ),
    ),
    "symmetric memory": (
        KINETO,
        "",
        (
            to_symmetric(),
            to_symmetric(0.5),
            in_steps(to_symmetric(), 1),
            on(to_symmetric(), 1),
            to_symmetric(1.0, "Memcpy DtoD (Device -> Device)", "symm_mem::two_shot_all_reduce_"),
            to_symmetric(0.3, "Memcpy PtoP (Device -> Device)", "symm_mem::low_contention_all_gather"),
            then(to_symmetric(), unmarked),
            then(to_symmetric(0.5), without(is_call)),
            then(to_symmetric(), facts(world_size=None)),
            then(to_symmetric(), without(issues)),
            then(to_symmetric(0.4), without(is_operator)),
            renamed(is_comm, "symmetric_memory::put_signal_kernel"),
        ),
    ),
}


def moved_answer(files: Sequence[File], shape: Shape) -> Answer:
    """What is right where streams moved: a step is what it launched, or what ran between its marks."""
    values: dict[tuple[str, str], list[Value]] = defaultdict(list)
    for file in files:
        ran = [row for row in file.rows if row.what in (KERNEL, COPY)]
        marks = sorted((row for row in file.rows if row.what == MARK), key=lambda row: row.start_ns)
        windows = [("whole", ran)]
        for number, mark in enumerate(marks):
            windows.append(("step", [row for row in ran if (row.link - 101) // len(shape.step) == number]))
            inside = [(max(row.start_ns, mark.start_ns), min(row.end_ns, mark.end_ns), row) for row in ran]
            windows.append(("step", [replace(r, start_ns=a, end_ns=b) for a, b, r in inside if a < b]))
        for window, rows in windows:
            found = sums_ms(rows)
            found["exposed_comm_ms"] = found["comm_ms"] - found["compute_comm_ms"]
            for metric, value in found.items():
                values[window, metric].append(Value(value))
    return Answer(values, bool(marks))


def siblings(kind: str) -> Iterator[tuple[str, Sibling]]:
    """Yield the inputs of one kind."""
    formats, moves, mutations = KINDS[kind]
    for number, mutate in enumerate(mutations):
        name, shape = formats[number % len(formats)], drawn_shape(100 + 7 * number + len(kind))
        healthy = job(name, shape)
        files = mutate(healthy, random.Random(number))
        right = moved_answer(files, shape) if moves == LAGS else answer(healthy)
        yield f"{number}: {name}", Sibling(right, files, moves)
