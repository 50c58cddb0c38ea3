"""Device marks against kernels of known length, and their place on the host's clock."""

from __future__ import annotations

import time

import pytest
import torch

from aorta.instrument.clock import DeviceClock
from tests.gpu.device import cycles_per_ms, needs_gpu

pytestmark = [pytest.mark.gpu, needs_gpu]
PLACE_NS = 200_000
"""How far a mark may lie outside what the host saw: the host notices the origin's end late by a wake-up."""


def read(clock: DeviceClock, mark: object) -> int:
    value = clock.read_ns(mark)
    assert value is not None
    return value


@pytest.mark.parametrize("length_ms", [2, 20, 100])
def test_a_sleep_has_its_length(device: torch.device, length_ms: int) -> None:
    cycles = int(cycles_per_ms() * length_ms)
    clock = DeviceClock()
    begin = clock.mark()
    torch.cuda._sleep(cycles)
    end = clock.mark()
    clock.drain()
    # A card's clock moves by a few per cent between two kernels; what is looked for is a launch taken for a length.
    assert (read(clock, end) - read(clock, begin)) / 1e6 == pytest.approx(length_ms, rel=0.05, abs=0.05)


def test_marks_are_not_read_before_they_happen(device: torch.device) -> None:
    clock = DeviceClock()
    torch.cuda._sleep(int(cycles_per_ms() * 200))
    mark = clock.mark()
    assert clock.read_ns(mark) is None
    clock.drain()
    assert clock.read_ns(mark) is not None


def test_marks_lie_on_the_hosts_clock_over_many_epochs(device: torch.device) -> None:
    cycles = int(cycles_per_ms() * 2)
    clock = DeviceClock()
    for _ in range(100):
        clock.new_epoch()
        torch.cuda._sleep(cycles)
        clock.release(clock.mark())
    clock.drain()
    before_ns = time.perf_counter_ns()
    clock.new_epoch()
    mark = clock.mark()
    clock.drain()
    after_ns = time.perf_counter_ns()
    assert before_ns - PLACE_NS <= read(clock, mark) <= after_ns + PLACE_NS
