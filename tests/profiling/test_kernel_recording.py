"""Where a profiler's kernels are placed on the clock of the record."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from aorta.profiling.kernel_recording import KernelRecording
from tests.simulated.kineto import DeviceEvent

UNIX_NS, ASLEEP_NS = 1_800_000_000_000_000_000, 50_000_000


def test_a_thread_put_to_sleep_between_two_clocks_moves_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns, calls = 0, 0

    def clock(which: int) -> int:
        nonlocal now_ns, calls
        calls += 1
        now_ns += ASLEEP_NS if calls == 2 else 10
        return now_ns + (UNIX_NS if which == time.CLOCK_REALTIME else 0)

    monkeypatch.setattr(time, "clock_gettime_ns", clock)
    gemm = {"name": "gemm", "cat": "kernel", "pid": 0, "tid": 7}
    rows: list[Any] = [DeviceEvent(gemm, UNIX_NS + 1_000_000, UNIX_NS + 3_000_000)]  # on the clock of the record: 1 ms
    (found,) = KernelRecording(torch.device("cuda", 0))._kernels(rows)
    assert (found.name, found.stream, found.end_ns - found.start_ns) == ("gemm", 7, 2_000_000)
    assert found.start_ns == pytest.approx(1_000_000, abs=100)
