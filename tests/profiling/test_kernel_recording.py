"""Where a profiler's kernels are placed on the clock of the record."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType

from aorta.profiling.kernel_recording import KernelRecording

UNIX_NS, ASLEEP_NS = 1_800_000_000_000_000_000, 50_000_000


class Kernel:
    """A row of `kineto_results.events()`, from 1 to 3 ms of the record's clock."""

    def name(self) -> str:
        return "gemm"

    def activity_type(self) -> str:
        return "kernel"

    def device_type(self) -> DeviceType:
        return DeviceType.CUDA

    def device_index(self) -> int:
        return 0

    def device_resource_id(self) -> int:
        return 7

    def start_ns(self) -> int:
        return UNIX_NS + 1_000_000

    def duration_ns(self) -> int:
        return 2_000_000


def test_a_thread_put_to_sleep_between_two_clocks_moves_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns, calls = 0, 0

    def clock(which: int) -> int:
        nonlocal now_ns, calls
        calls += 1
        now_ns += ASLEEP_NS if calls == 2 else 10
        return now_ns + (UNIX_NS if which == time.CLOCK_REALTIME else 0)

    monkeypatch.setattr(time, "clock_gettime_ns", clock)
    rows: list[Any] = [Kernel()]
    (found,) = KernelRecording(torch.device("cuda", 0))._kernels(rows)
    assert (found.name, found.stream, found.end_ns - found.start_ns) == ("gemm", 7, 2_000_000)
    assert found.start_ns == pytest.approx(1_000_000, abs=100)
