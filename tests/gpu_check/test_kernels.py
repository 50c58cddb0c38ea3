"""What a profiler's trace says of steps, with a stand-in trace."""

from __future__ import annotations

from typing import Any

import pytest

from aorta.gpu_check.check_table import KernelWindow, busy_share, matched, pooled_ratio, windows

BASE = 1_800_000_000_000_000_000


def kernel(name: str, ts_us: float, dur_us: float, *, cat: str = "kernel", device: int = 0) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts_us, "dur": dur_us, "args": {"device": device}}


TRACE = {
    "baseTimeNanoseconds": BASE,
    "traceEvents": [
        kernel("void ncclDevKernel_AllReduce_Sum_f32(...)", 10, 20),
        kernel("ampere_sgemm", 0, 20),
        kernel("ampere_sgemm", 12, 4),  # inside the one before: counted once
        kernel("ampere_sgemm", 5, 50, device=1),
        kernel("ncclDevKernel_Generic", 5, 50, cat="gpu_user_annotation"),  # carries a stream, and is no kernel
        kernel("rcclGenericKernel", 110, 10),
        kernel("cudaStreamSynchronize", 120, 1, cat="cuda_runtime"),
        kernel("cudaLaunchKernel", 121, 1, cat="cuda_runtime"),
        {"ph": "i", "name": "marker", "ts": 1},
    ],
}
STEPS = [(BASE, BASE + 100_000), (BASE + 100_000, BASE + 200_000)]


def test_kernels_are_told_apart_by_category_name_and_device():
    first, second = windows(TRACE, STEPS, device=0)
    assert first.comm == [(BASE + 10_000, BASE + 30_000)]
    assert len(first.compute) == 2
    assert (first.lengths_ns(), second.lengths_ns()) == ((20_000, 10_000), (10_000, 0))
    assert pooled_ratio([first, second]) == pytest.approx(1 / 3)
    assert (first.host_waits, second.host_waits) == (0, 1)


def test_no_communication_is_no_ratio():
    assert pooled_ratio([KernelWindow([], [(0, 1)], 0)]) is None


def test_the_busy_share_is_of_all_steps_and_counts_every_moment_once():
    assert busy_share(windows(TRACE, STEPS, device=0), STEPS) == pytest.approx(40 / 200)
    assert busy_share([KernelWindow([(0, 60)], [(40, 150)], 0)], [(0, 100)]) == 1.0  # the tail belongs to the next step
    assert busy_share([KernelWindow([], [], 0)], [(0, 100)]) is None


def test_collectives_are_matched_in_order_or_not_at_all():
    seen = windows(TRACE, STEPS, device=0)
    own = [[(BASE + 9_000, BASE + 30_500)], [(BASE + 110_000, BASE + 119_000)]]
    assert matched(own, seen) == [(own[0][0], seen[0].comm[0]), (own[1][0], seen[1].comm[0])]
    assert matched([own[0], []], seen) is None
