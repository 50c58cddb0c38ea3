"""Steps measured by a profiler's kernels beside their marks, and steps whose marks leave something open (W28)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from aorta.records import ring_file as rf
from aorta.records.device_steps import Communication
from aorta.records.ring_steps import RingSteps
from aorta.records.window_kernels import CLOCK_NOISE_NS, Pass, WindowKernels
from aorta.timeline.arrays import IntervalArray, interval_array
from aorta.timeline.classes import DeviceKernel
from tests.instrument.device_rows_by_hand import DeviceByHand
from tests.instrument.taps import MS

BEGIN_NS = 1_000 * MS
COMPUTE, SIDE, OF_NCCL = 7, 13, 20
"""A profiler's numbers of streams."""


def marked(at_ms: float, sent_ms: float) -> tuple[int, int]:
    """A mark of a step that begins at 0, which the ring has at 1 s."""
    return round(at_ms * MS) + BEGIN_NS, round(sent_ms * MS) + BEGIN_NS


def kernel(name: str, stream: int, start_ms: float, end_ms: float) -> DeviceKernel:
    return DeviceKernel(name, stream, BEGIN_NS + round(start_ms * MS), BEGIN_NS + round(end_ms * MS))


def gemms(*spans: tuple[float, float]) -> list[DeviceKernel]:
    return [kernel("void cutlass::gemm()", COMPUTE, *span) for span in spans]


REDUCED = kernel("ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)", OF_NCCL, 20, 60)


@pytest.fixture
def hand() -> DeviceByHand:
    return DeviceByHand(bound_ns=0)


def one_step(hand: DeviceByHand, kernels: WindowKernels | None = None) -> RingSteps:
    """A block marked from 10 to 90, launched until 70; a collective marked from 15 to 60, launched until 18."""
    steps = RingSteps(hand.ring)
    step = hand.begin((BEGIN_NS, BEGIN_NS + 100 * MS))
    if kernels is not None:
        steps.kernels[step] = kernels
    for name, begin, end in (("block", (10, 5), (90, 70)), ("next", (90, 70), (90, 70))):
        hand.between(rf.PASS, marked(*begin), marked(*end), name=hand.ring.text(name), flags=rf.BACKWARD)
    hand.collective(0, 1, None, marked(15, 6), marked(60, 18))
    hand.end(step, 1)
    return steps


def test_marks_alone_give_bounds_where_the_host_sets_the_pace(hand):
    (line,) = one_step(hand).take()
    assert line.overlap["comm_ms"] is None
    assert line.bounds["compute_ms"] == (20, 80)
    assert line.bounds["comm_ms"] == (42, 45)
    assert line.bounds["overlap_ratio"] == (0, 1)
    assert line.reasons["compute_ms"] == "host-bound: between 20 and 80 ms (marks alone cannot say more)"
    assert line.overlap["host_lead_ms"] == 20
    assert line.overlap["undecided_share"] == 0.75
    assert line.concurrency == {"mean": None, "max": None}
    assert line.measured_by is msgspec.UNSET


def test_kernels_tell_what_marks_leave_open(hand):
    kernels = WindowKernels()
    steps = one_step(hand, kernels)
    assert steps.take() == []  # not read before the profiler has stopped
    kernels.arrived([*gemms((10, 30), (50, 70), (95, 99)), REDUCED, kernel("copy_in()", SIDE, 30, 50)])
    (line,) = steps.take()
    assert line.measured_by == "kernels"
    # Not the other stream's, and not behind the block; of the kind that its collective has, as its name does not say.
    assert (line.overlap["compute_ms"], line.overlap["allreduce_ms"], line.overlap["compute_comm_ms"]) == (40, 40, 20)
    assert line.overlap["overlap_ratio"] == 0.5
    assert line.bounds is msgspec.UNSET
    # How far the marks can be believed is said all the same.
    assert line.overlap["undecided_share"] == 0.75
    seen = kernels.compared
    assert (seen.steps, seen.hidden_ns, seen.comm_ns) == (1, 20 * MS, 40 * MS)
    assert (seen.marked_hidden_ns, seen.marked_exposed_ns) == (45 * MS, 0)
    assert seen.blocks == {("block", "backward"): (80 * MS, 40 * MS), ("next", "backward"): (0, 0)}


@pytest.mark.parametrize(
    ("seen", "problem"),
    [
        (gemms((10, 30)), "the profiler saw no kernel of 1 of 1 collectives of a step"),
        ([REDUCED], "the profiler saw no kernel inside the blocks of a step"),
        ([REDUCED, *gemms((95, 99))], "the profiler saw no kernel inside the blocks of a step"),
    ],
)
def test_where_kernels_are_missing_the_marks_stand(hand, seen, problem):
    kernels = WindowKernels()
    steps = one_step(hand, kernels)
    kernels.arrived(seen)
    (line,) = steps.take()
    assert line.measured_by is msgspec.UNSET
    assert line.bounds["compute_ms"] == (20, 80)
    assert (kernels.problem, kernels.compared.steps) == (problem, 0)


def test_steps_behind_a_window_wait_for_it(hand):
    kernels = WindowKernels()
    steps = one_step(hand, kernels)
    for number in range(1, 12):
        begin_ns = BEGIN_NS + 100 * MS * number
        hand.end(hand.begin((begin_ns, begin_ns + 100 * MS)), 0)
    assert steps.take() == []
    kernels.failed("no CUPTI")
    lines = steps.take()
    assert len(lines) == 12
    assert lines[0].measured_by is msgspec.UNSET


# One step at a time, in nanoseconds


def marks(
    *passes: tuple[int, int], comm: tuple[Communication, ...] = ()
) -> tuple[list[Pass], tuple[Communication, ...]]:
    """Of a step: passes of a block, and collectives."""
    return [("block", "forward", low, high) for low, high in passes], comm


def reduced(low: int, high: int, kind: str = "allreduce", *, on_device: bool = True) -> Communication:
    return Communication(kind, (low, high), [], on_device)


def seen(*kernels: tuple[str, int, int, int]) -> WindowKernels:
    window = WindowKernels()
    window.arrived(DeviceKernel(*one) for one in kernels)
    return window


NCCL, GEMM = "ncclDevKernel_Generic()", "gemm()"
Pairs = list[tuple[int, int]]


def pairs(columns: IntervalArray) -> Pairs:
    return list(zip(columns.start.tolist(), columns.end.tolist(), strict=True))


def within(kernels: WindowKernels, *of_step: Any) -> tuple[Pairs, dict[str, Pairs], Pairs] | None:
    """What they say of a step: when it computed, when it communicated, by kind, and when of unknown kind."""
    if (running := kernels.within(*of_step)) is None:
        return None
    compute, comm, of_unknown_kind = running
    return pairs(compute), {kind: pairs(columns) for kind, columns in comm.items()}, pairs(of_unknown_kind)


def test_a_step_has_the_kernels_between_its_ends():
    kernels = seen(
        (GEMM, COMPUTE, 90, 105), (GEMM, COMPUTE, 195, 230), (GEMM, COMPUTE, 170, 175),
        (NCCL, OF_NCCL, 10, 50), (NCCL, OF_NCCL, 120, 150), (NCCL, OF_NCCL, 210, 300),
    )  # fmt: skip
    found = within(kernels, *marks((80, 160), (190, 250), comm=(reduced(110, 160),)), (100, 200))
    assert found == ([(100, 105), (195, 200)], {"allreduce": [(120, 150)]}, [])


def test_a_kernel_is_of_the_collective_that_it_shares_most_time_with():
    kernels = seen((GEMM, COMPUTE, 0, 10), (NCCL, OF_NCCL, 100, 140), (NCCL, OF_NCCL, 200, 210))
    found = within(kernels, *marks((0, 10), comm=(reduced(95, 110, "broadcast"), reduced(110, 150))), (0, 300))
    assert found[1:] == ({"broadcast": [], "allreduce": [(100, 140)]}, [(200, 210)])


def test_collectives_without_a_kernel_that_none_is_missed_of_and_a_step_without_blocks():
    """One of the host, which runs in its range, and one that may have taken no time."""
    kernels = seen((GEMM, COMPUTE, 0, 10), (NCCL, OF_NCCL, 120, 130))
    found = within(kernels, *marks((0, 10), comm=(reduced(20, 30, on_device=False), reduced(40, 40))), (0, 100))
    assert found == ([(0, 10)], {"allreduce": [(20, 30)]}, [])
    behind = within(kernels, *marks(comm=(reduced(110, 140),)), (100, 200))
    assert behind == ([], {"allreduce": [(120, 130)]}, [])


def test_the_stream_that_computes_is_the_one_inside_of_blocks_and_stays_it():
    kernels = seen((GEMM, COMPUTE, 0, 10), (GEMM, SIDE, 20, 90), (GEMM, COMPUTE, 100, 102), (GEMM, SIDE, 102, 110))
    first, second = (within(kernels, *marks((low, low + 10)), (low, low + 100)) for low in (0, 100))
    assert (first[0], second[0]) == ([(0, 10)], [(100, 102)])


def test_a_step_whose_kernels_are_missing_leaves_the_others_theirs():
    kernels = seen((GEMM, COMPUTE, 100, 110))
    assert within(kernels, *marks((0, 10)), (0, 100)) is None
    assert kernels.problem is not None
    assert within(kernels, *marks((100, 110)), (100, 200)) is not None


def test_steps_measured_both_ways_add_up_and_stalls_are_no_part_of_a_block():
    kernels = WindowKernels()
    by_marks: Any = SimpleNamespace(hidden_ns=60, exposed_ns=40, bounds={"exposed_comm_ms": (20e-6, 40e-6)})
    by_kernels: Any = SimpleNamespace(comm_ns=100, hidden_ns=30)
    stalls, compute = interval_array([(50, 60)]), interval_array([(0, 55), (200, 230)])
    for _ in range(2):
        kernels.compare(by_marks, by_kernels, marks((0, 100), (200, 300))[0], stalls, compute)
    found = kernels.compared
    assert (found.steps, found.comm_ns, found.hidden_ns) == (2, 200, 60)
    assert (found.marked_hidden_ns, found.marked_exposed_ns) == (120, 40)
    assert found.blocks == {("block", "forward"): (380, 160)}


GATHER, NORM = (1_000.0, 3.0), (1_003.1, 0.015)
"""A long all-gather and a short all-reduce behind it: begin and length, ms."""


def beside(later_ms: float, *, norm: bool = True) -> WindowKernels:
    """The kernels of these two and of a block, by a clock that is ahead of the marks' by so much."""
    found = WindowKernels()
    spans = [("ncclDevKernel_AllGather_RING_LL", OF_NCCL, *GATHER), ("gemm", COMPUTE, 1_001.0, 2.05)]
    spans += [("ncclDevKernel_AllReduce_Sum_f32_RING_LL", OF_NCCL, *NORM)] if norm else []
    found.arrived(kernel(name, stream, begin + later_ms, begin + later_ms + ms) for name, stream, begin, ms in spans)
    return found


def taken(kernels: WindowKernels) -> tuple[Pairs, dict[str, Pairs], Pairs] | None:
    """What they say of a step whose marks are the kernels' own times."""
    own = [(BEGIN_NS + round(begin * MS), BEGIN_NS + round((begin + ms) * MS)) for begin, ms in (GATHER, NORM)]
    communication = [
        Communication(kind, span, [span], on_device=True)
        for kind, span in zip(("allgather", "allreduce"), own, strict=True)
    ]
    passes: list[Pass] = [("block", "forward", BEGIN_NS + 1_001 * MS, BEGIN_NS + 1_004 * MS)]
    return within(kernels, passes, communication, (BEGIN_NS, BEGIN_NS + 2_000 * MS))


@pytest.mark.parametrize("later_ms", [0, 0.083, -0.083, 0.9])
def test_clocks_that_are_apart_lose_no_short_collective(later_ms):
    """83 us were seen between marks and CUPTI on an H200, where an all-reduce takes 15."""
    kernels = beside(later_ms)
    running = taken(kernels)
    assert running is not None, kernels.problem
    ((begin, end),), comm, of_unknown_kind = running
    lengths = {kind: [end - begin for begin, end in spans] for kind, spans in comm.items()}
    assert lengths == {"allgather": [3 * MS], "allreduce": [round(0.015 * MS)]}
    assert of_unknown_kind == []
    assert abs(begin - (BEGIN_NS + 1_001 * MS)) <= CLOCK_NOISE_NS
    assert abs(end - begin - 2.05 * MS) <= CLOCK_NOISE_NS


@pytest.mark.parametrize("later_ms", [0, 0.083])
def test_a_kernel_that_is_missing_is_missed_by_any_clock(later_ms):
    kernels = beside(later_ms, norm=False)
    assert taken(kernels) is None
    assert kernels.problem == "the profiler saw no kernel of 1 of 2 collectives of a step"


def test_marks_that_end_late_are_no_clock_that_is_off():
    """Where the host sets the pace an end mark follows its kernel by any time: kernels stay where they are."""
    kernels = seen((GEMM, COMPUTE, 0, 90_000), (NCCL, OF_NCCL, 100_000, 400_000))
    found = within(kernels, *marks((0, 100_000), comm=(reduced(95_000, 600_000),)), (0, 1_000_000))
    assert found == ([(0, 90_000)], {"allreduce": [(100_000, 400_000)]}, [])
