"""Steps by a profiler's kernels: the profiler's clock is set by the collectives, however short the others are."""

from __future__ import annotations

import pytest

from aorta.records.device_rows import Communication
from aorta.records.window_kernels import WindowKernels
from aorta.timeline.classes import DeviceKernel

US = 1_000
WINDOW = (0, 10_000 * US)
GATHER, NORM = (1_000 * US, 3_000 * US), (3_100 * US, 3_115 * US)


def window(*, later_ns: int, without: int = 0) -> WindowKernels:
    """A long all-gather, a short all-reduce and a block's kernel, by a clock that is `later_ns` ahead of the marks'."""
    kernels = [
        DeviceKernel("ncclDevKernel_AllGather_RING_LL", 29, *GATHER),
        DeviceKernel("gemm", 7, 2_000 * US, 3_050 * US),
        DeviceKernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 29, *NORM),
    ]
    found = WindowKernels()
    found.arrived(
        one._replace(start_ns=one.start_ns + later_ns, end_ns=one.end_ns + later_ns)
        for one in kernels[: len(kernels) - without]
    )
    return found


def communication() -> list[Communication]:
    return [
        Communication("allgather", GATHER, [GATHER], on_device=True),
        Communication("allreduce", NORM, [NORM], on_device=True),
    ]


@pytest.mark.parametrize("later_ns", [0, 83 * US, -83 * US, 900 * US])
def test_clocks_that_are_apart_lose_no_short_collective(later_ns: int) -> None:
    """83 us were seen between marks and CUPTI on an H200, where an all-reduce takes 15."""
    kernels = window(later_ns=later_ns)
    running = kernels.within([("block", "forward", 1_500 * US, 3_060 * US)], communication(), WINDOW)
    assert running is not None, kernels.problem
    assert running.comm == {"allgather": [GATHER], "allreduce": [NORM]}
    assert (running.compute, running.of_unknown_kind) == ([(2_000 * US, 3_050 * US)], [])


@pytest.mark.parametrize("later_ns", [0, 83 * US])
def test_a_kernel_that_is_missing_is_missed(later_ns: int) -> None:
    kernels = window(later_ns=later_ns, without=1)
    assert kernels.within([("block", "forward", 1_500 * US, 3_060 * US)], communication(), WINDOW) is None
    assert kernels.problem == "the profiler saw no kernel of 1 of 2 collectives of a step"
