"""K2 (docs/dev/measuring.md): the record and torch.profiler about the same steps of DDP and FSDP2, on a CPU.

Two tools, two clocks, two ways to know what was computed. The bounds are K2's: 200 us or 2 % for a collective, 0.02 for
the ratio. A machine that is busy with other things now and then puts a thread to sleep between the two stamps of one
moment, so the median collective and the median step must lie within. What is deliberately wrong must not.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import pytest

from aorta.gpu_check.check_table import Interval, KernelWindow, pooled_ratio
from aorta.read.traces.kernels import kernel_totals
from aorta.read.traces.kineto.trace import read_kineto
from aorta.read.traces.reader import TraceInput
from aorta.read.traces.tables import device_timelines
from aorta.records.schema import Collective, Step
from tests.known_answers.again import undisturbed
from tests.known_answers.cpu_traces import Rows, host_union, windows
from tests.known_answers.profiled import BACKWARD_S, BLOCKS, COMPUTING, MARK, PROFILED, STRATEGIES
from tests.rank_records import read_rank
from tests.runs import program, succeeded

pytestmark = [pytest.mark.dist, pytest.mark.alone, pytest.mark.thorough]
BOUND_NS, RELATIVE, RATIO = 200_000, 0.02, 0.02
KINDS = {"ddp": {"allreduce": BLOCKS}, "fsdp": {"allgather": 2 * BLOCKS, "reducescatter": BLOCKS}}
CASES = [(strategy, kind) for strategy in STRATEGIES for kind in KINDS[strategy]]


@dataclass
class Seen:
    """One step of one rank, by both."""

    step: Step
    profiler: KernelWindow
    upper: KernelWindow
    issues: list[Interval]

    def pairs(self, kind: str) -> list[tuple[Collective, Interval, Interval]]:
        """Each collective in the record, in the profiler, and its issue; times of both from the step's start."""
        origin = self.step.t_start_ns
        return [
            (row, (start - origin, end - origin), (low - origin, high - origin))
            for row, (start, end), (low, high) in zip(
                self.step.collectives, self.profiler.comm, self.issues, strict=True
            )
            if row.kind == kind
        ]


class Launch(NamedTuple):
    """All strategies in one launch; `seen` has the profiled steps of both ranks."""

    folder: Path
    seen: dict[str, list[Seen]]


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    return undisturbed(tmp_path_factory, "crosscheck", measure, both_agree)


def measure(folder: Path) -> Launch:
    succeeded(program("tests.known_answers.profiled", str(folder)))
    found: dict[str, list[Seen]] = {}
    for strategy in STRATEGIES:
        for rank in (0, 1):
            lines = [s for s in read_rank(folder / strategy / f"rank_{rank}_metrics.jsonl").steps if not s.warmup]
            assert len(lines) == PROFILED
            rows = Rows(_json(folder / f"{strategy}_{rank}.trace.json"), MARK)
            steps = [(line.t_start_ns, line.t_end_ns) for line in lines]
            both = windows(rows, steps, rows.compute), windows(rows, steps, rows.compute_and_issuing)
            for line, step, lower, upper in zip(lines, steps, *both, strict=True):
                found.setdefault(strategy, []).append(Seen(line, lower, upper, rows.issued_in(step)))
    return Launch(folder, found)


def _json(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded


def share_within(steps: Sequence[Seen], kind: str, length_ns: Callable[[Collective, Interval], float]) -> float:
    """Of the collectives, those whose length as `length_ns` has it is the profiler's, within K2's bound. It is given
    the record's row and the profiler's row of the call that issued it.
    """
    near = [
        abs(length_ns(row, issue) - (end - start)) <= max(RELATIVE * (end - start), BOUND_NS)
        for one in steps
        for row, (start, end), issue in one.pairs(kind)
    ]
    return sum(near) / len(near)


def length(row: Collective) -> int:
    return row.end_ns - row.start_ns


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_both_see_the_same_collectives_of_the_same_lengths_and_the_same_ratios(launch: Launch, strategy: str) -> None:
    both_agree(launch)
    for one in launch.seen[strategy]:
        assert one.step.coverage.complete, one.step.coverage.reason
        assert len(one.profiler.comm) == len(one.step.collectives) == sum(KINDS[strategy].values())
        for kind, count in KINDS[strategy].items():
            assert len(one.pairs(kind)) == count


def both_agree(launch: Launch) -> None:
    for strategy, kind in CASES:
        assert share_within(launch.seen[strategy], kind, lambda row, _issue: length(row)) >= 0.5, (strategy, kind)
    for strategy in STRATEGIES:
        steps = launch.seen[strategy]
        assert median(apart(one.step, one.profiler, one.upper) for one in steps) <= RATIO, strategy


@pytest.mark.parametrize(("strategy", "kind"), CASES)
def test_a_duration_that_is_wrong_would_be_noticed(launch: Launch, strategy: str, kind: str) -> None:
    # W1: the end taken when the call returned. Then a start that is late by a twentieth.
    steps = launch.seen[strategy]
    assert share_within(steps, kind, lambda _row, issue: issue[1] - issue[0]) < 0.5
    assert share_within(steps, kind, lambda row, _issue: 0.95 * length(row)) < 0.5


def apart(step: Step, lower: KernelWindow, upper: KernelWindow) -> float:
    """How far the record's ratio lies outside of what the profiler says."""
    own = step.overlap["overlap_ratio"]
    low, high = (pooled_ratio([window], [window.compute]) for window in (lower, upper))
    assert None not in (own, low, high)
    assert 0.02 < low <= high < 0.98  # something is hidden and something is not
    return max(low - own, own - high, 0.0)


def test_a_ratio_that_takes_stalls_for_computation_would_be_noticed(launch: Launch) -> None:
    for one in launch.seen["fsdp"]:  # W6: from the first computation of a step to its last
        window = one.profiler
        whole = [(window.compute[0][0], window.compute[-1][1])]
        wrong = pooled_ratio([KernelWindow(window.comm, whole, 0)], [whole])
        assert (wrong or 0) - (one.step.overlap["overlap_ratio"] or 0) > RATIO


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("case", [strategy + blocks for strategy in STRATEGIES for blocks in ("", COMPUTING)])
def test_the_reader_of_traces_finds_what_plain_loops_find(launch: Launch, case: str, rank: int) -> None:
    path = launch.folder / f"{case}_{rank}.trace.json"
    expected = host_union(_json(path))
    with path.open("rb") as stream:
        (trace,) = read_kineto(TraceInput({str(path): stream}))
    (device,) = device_timelines(trace)
    (found,) = device.measure(device.whole)
    assert (found.compute_ns, found.comm_ns, found.hidden_ns) == expected[:3]
    assert found.overlap_ratio == pytest.approx(expected.hidden_ns / expected.comm_ns, rel=1e-9)
    of_kernels = {row.name: row.total_ms for row in kernel_totals(trace) if row.cls == "compute"}
    assert of_kernels == pytest.approx({name: length / 1e6 for name, length in expected.by_name.items()}, rel=1e-9)
    # What a block did keeps its time, whatever it nests.
    if case.endswith(COMPUTING):
        products = of_kernels["aten::mm"] + of_kernels["aten::addmm"]
        assert products > 0.2 * found.compute_ns / 1e6
    else:
        assert of_kernels["ComputingBackward"] >= PROFILED * BLOCKS * BACKWARD_S * 1e3


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_record_and_trace_agree_on_the_computation_of_blocks_that_compute(launch: Launch, strategy: str) -> None:
    for rank in (0, 1):
        traced = host_union(_json(launch.folder / f"{strategy}{COMPUTING}_{rank}.trace.json")).compute_ns / 1e6
        lines = read_rank(launch.folder / f"{strategy}{COMPUTING}" / f"rank_{rank}_metrics.jsonl").steps
        recorded = sum(line.overlap["compute_ms"] or 0 for line in lines if not line.warmup)
        assert recorded == pytest.approx(traced, rel=0.05)
