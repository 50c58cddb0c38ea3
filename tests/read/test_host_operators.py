"""What counts as computation in the trace of a CPU: the self time of operators, without waiting for collectives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aorta.read.traces.interval_table import IntervalClass, Trace
from aorta.read.traces.kernels import kernel_totals, slowdowns
from aorta.timeline.arrays import IntervalArray, self_times
from tests.read.kineto_files import BASE_NS, event, read, whole

MAIN, WORKER = 100, 200
times = st.integers(0, 30)
flat = st.lists(st.tuples(times, times, st.integers(1, 2)).map(lambda row: (*sorted(row[:2]), row[2])), max_size=9)


@st.composite
def nested_rows(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Rows of two threads that nest, as brackets do."""
    rows: list[tuple[int, int, int]] = []
    for thread in (1, 2):
        begun: list[int] = []
        for place, begins in enumerate(draw(st.lists(st.booleans(), max_size=24))):
            if begins:
                begun.append(place // 3)
            elif begun:
                rows.append((begun.pop(), place // 3, thread))
    return rows


def by_moment(rows: list[tuple[int, int, int]]) -> dict[tuple[int, int], list[int]]:
    """For each thread and moment the rows that run then, the innermost last."""
    order = sorted(range(len(rows)), key=lambda at: (rows[at][0], -rows[at][1], at))
    found: dict[tuple[int, int], list[int]] = {}
    for at in order:
        for moment in range(rows[at][0], rows[at][1]):
            found.setdefault((rows[at][2], moment), []).append(at)
    return found


def owners(rows: list[tuple[int, int, int]]) -> dict[tuple[int, int], int]:
    start, end, thread = (np.array([row[place] for row in rows], np.int64) for place in range(3))
    owner, pieces = self_times(IntervalArray(start, end), thread)
    found: dict[tuple[int, int], int] = {}
    for row, low, high in zip(owner.tolist(), pieces.start.tolist(), pieces.end.tolist(), strict=True):
        assert low < high
        for moment in range(low, high):
            assert found.setdefault((rows[row][2], moment), row) == row
    return found


@given(nested_rows())
def test_each_moment_of_a_thread_belongs_to_the_innermost_row(rows: list[tuple[int, int, int]]) -> None:
    assert owners(rows) == {place: running[-1] for place, running in by_moment(rows).items()}


@given(flat)
def test_rows_that_overlap_without_nesting_lose_no_time(rows: list[tuple[int, int, int]]) -> None:
    assert owners(rows).keys() == by_moment(rows).keys()


def op(name: str, ts: int, dur: int, thread: int = MAIN, **args: Any) -> dict[str, Any]:
    return event("cpu_op", name, ts, dur, 1, thread, **args)


def mark(name: str, ts: int, dur: int, thread: int = MAIN) -> dict[str, Any]:
    return event("user_annotation", name, ts, dur, 1, thread)


def computing(trace: Trace) -> list[tuple[str, int, int]]:
    """Rows of computation by time, in the microseconds of the file."""
    table = trace.intervals
    rows = [
        (
            table.names[table.name[at]],
            int(table.start_ns[at] - BASE_NS) // 1000,
            int(table.end_ns[at] - BASE_NS) // 1000,
        )
        for at in np.flatnonzero(table.cls == IntervalClass.COMPUTE)
    ]
    return sorted(rows, key=lambda row: row[1])


def test_a_matrix_product_keeps_its_time_beside_what_it_nests() -> None:
    products = [
        [op("aten::linear", at, 20), op("aten::mm", at + 2, 16), op("aten::resolve_conj", at + 3, 1)] for at in (0, 40)
    ]
    trace = read([row for rows in products for row in rows])
    assert computing(trace)[:5] == [
        ("aten::linear", 0, 2),
        ("aten::mm", 2, 3),
        ("aten::resolve_conj", 3, 4),
        ("aten::mm", 4, 18),
        ("aten::linear", 18, 20),
    ]
    assert whole(trace).compute_ns == 40_000
    totals = {row.name: (row.count, row.total_ms, row.max_ms) for row in kernel_totals(trace)}
    assert totals == {
        "aten::mm": (2, 0.030, 0.015),
        "aten::linear": (2, 0.008, 0.004),
        "aten::resolve_conj": (2, 0.002, 0.001),
    }


def test_a_product_is_alone_or_overlapped_as_a_whole() -> None:
    rows = [row for at in range(0, 1200, 100) for row in (op("aten::mm", at, 50), op("aten::resolve_conj", at + 1, 1))]
    rows += [mark("gloo:all_reduce", 600, 600, WORKER)]
    found = {row.name: row for row in slowdowns(read(rows))}
    assert (found["aten::mm"].alone_count, found["aten::mm"].overlapped_count) == (6, 6)
    assert found["aten::mm"].alone_median_ms == pytest.approx(0.049)


def test_an_autograd_function_that_waits_for_its_collective_does_not_compute() -> None:
    rows = [
        op("Reduce", 0, 100),
        op("aten::clone", 5, 10),
        op("c10d::allreduce_", 20, 5),
        op("aten::copy_", 21, 2),  # gloo's, inside of the call
        mark("gloo:all_reduce", 22, 60, WORKER),
        op("aten::mul", 85, 10),
    ]
    found = computing(read(rows))
    assert found == [
        ("Reduce", 0, 5),
        ("aten::clone", 5, 15),
        ("Reduce", 15, 20),
        ("Reduce", 82, 85),
        ("aten::mul", 85, 95),
        ("Reduce", 95, 100),
    ]


def test_operators_behind_the_issue_of_a_collective_compute_beside_it() -> None:
    # As DDP issues its buckets: inside of a node that ends then, and of nodes that others nest in.
    rows = [
        op("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 0, 20),
        op("c10d::allreduce_", 5, 5),
        mark("gloo:all_reduce", 6, 64, WORKER),
        op("autograd::engine::evaluate_function: AddmmBackward0", 30, 60),
        op("aten::mm", 32, 56),
    ]
    measured = whole(read(rows))
    assert (measured.compute_ns, measured.hidden_ns) == (65_000, 40_000)


@pytest.mark.parametrize("hook", ["FSDP::all_gather (3)", "FullyShardedDataParallel._pre_backward_hook"])
def test_what_a_hook_of_fsdp_waits_is_not_its_nodes(hook: str) -> None:
    rows = [
        op("autograd::engine::evaluate_function: AddmmBackward0", 0, 100),
        mark(hook, 10, 50),
        op("aten::cat", 12, 8),
        mark("gloo:all_gather", 5, 50, WORKER),
        mark("my own range", 70, 20),
    ]
    assert computing(read(rows)) == [
        ("autograd::engine::evaluate_function: AddmmBackward0", 0, 10),
        ("aten::cat", 12, 20),
        ("autograd::engine::evaluate_function: AddmmBackward0", 60, 100),
    ]


def test_a_functional_collective_leaves_compiled_code_its_time_until_it_is_waited_for() -> None:
    rows = [
        op("CompiledFunction", 0, 100),
        op("_c10d_functional::all_reduce", 10, 10),
        op("c10d::allreduce_", 12, 6),
        mark("gloo:all_reduce", 15, 65, WORKER),
        op("_c10d_functional::wait_tensor", 60, 22),
    ]
    trace = read(rows)
    assert computing(trace) == [
        ("CompiledFunction", 0, 10),
        ("CompiledFunction", 20, 60),
        ("CompiledFunction", 82, 100),
    ]
    assert not [note for note in trace.notes if "own time" in note]


def test_doubtful_time_of_functions_is_said() -> None:
    """The wait for a collective that was issued elsewhere cannot be told from Python at work."""
    rows = [
        op("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 0, 10),
        op("c10d::allreduce_", 2, 6),
        mark("gloo:all_reduce", 10, 100, WORKER),
        op("aten::mm", 10, 40),
        op("MyBackward", 50, 50),
    ]
    trace = read(rows)
    assert whole(trace).hidden_ns == 90_000
    (said,) = [note for note in trace.notes if "cannot be classified" in note]
    assert said == (
        "0.1 ms of communication cannot be classified: it overlaps autograd functions or nodes, mostly 'MyBackward', "
        "which may compute or wait; the overlap ratio of the whole trace is between 0.400 and 0.900"
    )
