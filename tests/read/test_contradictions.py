"""What a trace says of one thing twice has to agree: each of these is null, with the reason, or refused."""

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from aorta.read.ledger import WHOLE
from aorta.read.traces import clocks
from aorta.read.traces.claims import unrecorded
from tests.read.answers import answer, judge
from tests.read.evidence_jobs import job
from tests.read.evidence_rows import KERNEL, OPERATOR, File, Row
from tests.read.mutations import (
    Mutation,
    by_rows,
    changed,
    computes,
    in_part,
    is_call,
    is_comm,
    is_mark,
    is_operator,
    last,
    on_device,
    renamed,
    scaled,
    then,
    without,
)
from tests.read.tables import COMPUTE, row, trace

LARGE = {"In msg nelems": 1 << 42, "Out msg nelems": 1 << 42}
EARLY_NS = 4_000_000
HOUR_NS = 3_600_000_000_000
GEMM = "void cutlass::Kernel2<cutlass_80_tensorop_s16816gemm>"


def later(row: Row, ns: int) -> Row:
    return replace(row, start_ns=row.start_ns + ns, end_ns=row.end_ns + ns)


def queued(rows: list[Row], chance: random.Random) -> list[Row]:
    starts = {row.link: row.start_ns for row in rows if is_call(row)}
    return [replace(row, start_ns=starts[row.link]) if on_device(row) else row for row in rows]


def rounded(row: Row) -> Row:
    start = round(row.start_ns, -6)
    return replace(row, start_ns=start, end_ns=start + row.end_ns - row.start_ns)


def last_lasts(rows: list[Row], chance: random.Random) -> list[Row]:
    end = max((row for row in rows if is_comm(row)), key=lambda row: row.start_ns)
    return [replace(row, end_ns=row.end_ns + 10_000_000_000) if row is end else row for row in rows]


def calls_twice(rows: list[Row], chance: random.Random) -> list[Row]:
    return [*rows, *filter(is_call, rows)]


def merged(files: Sequence[File], chance: random.Random) -> list[File]:
    return [files[0].changed([*files[0].rows, *files[1].rows])]


CASES: dict[str, tuple[str, Mutation, str]] = {
    "launches last 10 ms": ("nsys", scaled(is_call, 1000), "launches 95% last 10 ms"),
    "kernels last nanoseconds": ("rocprofv3-csv", scaled(on_device, 1e-4), "kernels last"),
    "the device runs an hour late": ("kineto-cuda", changed(on_device, lambda row: later(row, HOUR_NS)), "3.6e+06 ms"),
    "starts are those of the launches": ("rocpd", by_rows(queued), "starts are those of the queue"),
    "starts were rounded": ("kineto-rocm", changed(on_device, rounded), "starts were rounded"),
    "the last collective waited": ("kineto-cuda", by_rows(last_lasts), "first or last collective"),
    "kernels have no length": (
        "kineto-cuda",
        changed(computes, lambda row: replace(row, end_ns=row.start_ns)),
        "the length of 24 rows is not known",
    ),
    "steps are of another unit": ("rocprofv3-json", scaled(is_mark, 1000, starts=True), "all rows lie in a small part"),
    "rows of two steps were lost": ("nsys", in_part(lambda row: not is_mark(row), 0.4, 0.6), "so some were lost"),
    "a rank has fewer collectives": (
        "nsys",
        last(then(without(is_call), without(is_operator), without(is_comm, 0.5))),
        "other ranks that ran the same kernels",
    ),
    "collectives last a microsecond": ("rocprofv3-csv", scaled(is_comm, 1e-3), "collectives last"),
    "collectives move more than links can": (
        "kineto-cuda",
        changed(lambda row: "In msg nelems" in row.args, lambda row: replace(row, args={**row.args, **LARGE})),
        "TB/s or more",
    ),
    "lengths were rounded": (
        "kineto-rocm",
        changed(on_device, lambda row: replace(row, end_ns=row.start_ns + round(row.end_ns - row.start_ns, -6))),
        "lengths were rounded",
    ),
    "two ranks are in one file": ("rocprofv3-csv", merged, "steps run at the same time"),
    "calls are there twice": (
        "kineto-cuda",
        by_rows(calls_twice),
        "pairs of calls",
    ),
    "gloo and operators share a thread": (
        "kineto-cpu",
        changed(lambda row: row.what == OPERATOR, lambda row: replace(row, stream=4000)),
        "threads are not known",
    ),
    "gloo ran in two processes": (
        "kineto-cpu",
        changed(lambda row: is_comm(row) and "gather" in row.name, lambda row: replace(row, device=4001)),
        "2 processes of one trace",
    ),
    "gloo ran before it was called": (
        "kineto-cpu",
        changed(is_comm, lambda row: later(row, -EARLY_NS)),
        "rows of gloo",
    ),
    "gloo lacks rows of a kind": (
        "kineto-cpu",
        without(lambda row: is_comm(row) and "gather" in row.name),
        "have no row of gloo",
    ),
    "gloo's rows have no length": (
        "kineto-cpu",
        changed(is_comm, lambda row: replace(row, end_ns=row.start_ns)),
        "the length of 12 rows is not known",
    ),
    "an operator computes under a collective's name": (
        "kineto-cuda",
        renamed(computes, "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 0.33),
        "by one of name, arguments and call",
    ),
    "a collective launched what is known to compute": (
        "rocprofv3-json",
        renamed(lambda row: is_comm(row) and row.what == KERNEL, GEMM, 0.5),
        "communication lacks rows",
    ),
    "arguments of a collective on kernels that compute": (
        "kineto-cuda",
        changed(computes, lambda row: replace(row, name=GEMM, args={**row.args, "Collective name": "allreduce"})),
        "by one of name, arguments and call",
    ),
    "operators cross": (
        "kineto-cpu",
        changed(lambda row: is_operator(row) and row.stream == 4001, lambda row: replace(row, end_ns=row.end_ns * 3)),
        "overlap others of their thread",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_contradicts_itself_is_no_number(name: str) -> None:
    source, mutate, why = CASES[name]
    files: list[File] = job(source)
    seen = answer(mutate(files, random.Random(1)))
    said = [seen.refused or "", *seen.notes, *(own.why for values in seen.values.values() for own in values)]
    assert any(why in text for text in said), said
    lag = "the device lags" if "late" in name else ""
    assert judge(answer(files), seen, lag).wrong == []


@pytest.mark.parametrize(("kernels", "lacking"), [((4, 10, 10, 10), {0}), ((4, 10, 4, 10), set())])
def test_steps_of_two_sorts_lack_nothing(kernels: Sequence[int], lacking: set[int]) -> None:
    """A kernel after another, and nothing from then on: gradients are accumulated in every second step."""
    begun = [12 * step + at for step, count in enumerate(kernels) for at in range(count)]
    steps = [(step, 12 * step, 12 * step + 12) for step in range(len(kernels))]
    seen = unrecorded(trace([row(COMPUTE, start, start + 1) for start in begun], steps=steps))
    assert {gap.step for gap in seen.gaps} - {WHOLE} == lacking


@pytest.mark.parametrize(("grain_ns", "wrong"), [(250, False), (1_000_000, True)])
def test_what_a_tool_rounds_of_times_matters_beside_lengths(grain_ns: int, wrong: bool) -> None:
    """250 ns: microseconds since 1970 in a float of 64 bits."""
    lengths_ns = np.arange(20_001, 20_101, dtype=np.int64)
    starts_ns = np.arange(100) * 2_000_137 // grain_ns * grain_ns
    assert (clocks.rounded(starts_ns, lengths_ns) is not None) is wrong
