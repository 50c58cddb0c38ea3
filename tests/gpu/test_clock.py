"""Both device clocks: marks against kernels of known length, their place on the host's clock, and their events."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from aorta.distributed import cuda
from aorta.instrument.event_clock import DeviceClock, HostClock
from aorta.instrument.native.native_interceptor import NativeDeviceClock
from tests.gpu.device import compiled_part, cycles_per_ms, needs_gpu, simulated_only, standing_still
from tests.simulated import device as simulated

pytestmark = [pytest.mark.gpu, needs_gpu]
PLACE_NS = 200_000
"""How far a mark may lie outside what the host saw: the host notices the origin's end late by a wake-up."""
EVENT_NS = 1_000
"""What a reading of an event may be wrong by, twice."""


@pytest.fixture(params=[False, True], ids=["python", "native"])
def clock(request: pytest.FixtureRequest, device: torch.device) -> HostClock:
    module = compiled_part(wanted=request.param)
    return DeviceClock(device) if module is None else NativeDeviceClock(module, device)


def read(clock: HostClock, mark: object) -> int:
    value = clock.read_ns(mark)
    assert value is not None
    return value


def test_kernels_last_as_long_as_they_do_and_epochs_chain_in_whatever_order_they_are_read(clock: HostClock) -> None:
    per_ms, marks = cycles_per_ms(), []
    for length_ms in (2, 20, 100):
        clock.new_epoch()
        begin = clock.mark()
        cuda.spin(int(per_ms * length_ms))
        marks.append((length_ms, begin, clock.mark()))
    clock.drain()
    moments = {}
    for length_ms, begin, end in (marks[2], marks[0], marks[1]):
        moments[length_ms] = read(clock, begin), read(clock, end)
        assert lasted((moments[length_ms][1] - moments[length_ms][0]) / 1e6, length_ms)
    assert lasted((moments[100][1] - moments[2][0]) / 1e6, 122)


def lasted(found_ms: float, length_ms: float) -> bool:
    """Whether a kernel's length was found. A card's clock moves by a few per cent between two kernels; what is looked
    for is a launch taken for a length.
    """
    return abs(found_ms - length_ms) <= 0.05 * length_ms + 0.05


def test_marks_are_read_once_they_happened(clock: HostClock, device: torch.device) -> None:
    before = clock.mark()
    torch.cuda.synchronize()
    with standing_still(device):
        mark = clock.mark()
        assert clock.read_ns(before) is not None
        assert clock.read_ns(mark) is None
    clock.drain()
    assert clock.read_ns(mark) is not None


def test_a_mark_of_an_epoch_that_has_not_begun_is_unknown(clock: HostClock, device: torch.device) -> None:
    other = torch.Stream(device)
    with standing_still(device):
        clock.new_epoch()
        with other:
            mark = clock.mark()
        other.synchronize()
        assert clock.read_ns(mark) is None
        behind = clock.mark()
    clock.drain()
    assert read(clock, mark) <= read(clock, behind)


def test_a_mark_that_is_held_keeps_its_reading_while_others_are_used_again(clock: HostClock) -> None:
    held = clock.mark()
    clock.drain()
    first = read(clock, held)
    for _ in range(5):
        clock.new_epoch()
        clock.release(clock.mark())
        clock.drain()
    assert read(clock, held) == first
    clock.release(12345)  # of the host: it passes through
    assert clock.read_ns(12345) == 12345


@simulated_only("a card's clock is some ppm away from the host's, and it takes minutes until that is seen")
@pytest.mark.parametrize("ppm", [50, -50])
def test_marks_stay_on_the_hosts_clock_where_the_devices_passes_at_another_rate(device: torch.device, ppm: int) -> None:
    clock = NativeDeviceClock(compiled_part(wanted=True), device)
    simulated.clock_rate(ppm)
    second, seen = int(cycles_per_ms() * 1000), []
    for _ in range(40):  # seconds, in which the host is two steps ahead of the device
        clock.new_epoch()
        begin = clock.mark()
        cuda.spin(second)
        event = torch.Event(device=device, enable_timing=True)
        event.record()
        seen.append((begin, clock.mark(), event))
        if len(seen) > 2:
            seen[-3][2].synchronize()
    clock.drain()
    found = [(read(clock, begin), read(clock, end)) for begin, end, _ in seen]
    sleeps = [(row.start_ns, row.end_ns) for row in simulated.timeline() if row.name == "sleep"][-len(found) :]
    apart = [
        abs(own - true) for pair, row in zip(found, sleeps, strict=True) for own, true in zip(pair, row, strict=True)
    ]
    assert max(apart) < 250_000, "before the second comparison, with the host ahead"
    assert max(apart[20:]) < 10_000
    assert all(end <= begin for (_, end), (begin, _) in pairwise(found))
    facts = clock.facts()
    assert facts.drift_ns is not None
    assert abs(facts.drift_ns) <= facts.bound_at_start_ns + facts.bound_at_end_ns + 10_000


def test_the_facts_say_how_well_the_device_is_placed(clock: HostClock) -> None:
    facts = clock.facts()
    assert 0 <= facts.bound_at_start_ns < PLACE_NS
    assert facts.drift_ns is not None
    assert abs(facts.drift_ns) <= facts.bound_at_start_ns + facts.bound_at_end_ns + EVENT_NS
