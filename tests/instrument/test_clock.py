"""Device events placed on the host's time line, with stand-ins for the events."""

from __future__ import annotations

from typing import Any

import pytest

from aorta.instrument.clock import DeviceClock, HostClock


class Device:
    """Events happen when the test says so; `elapsed_time` answers in milliseconds, as CUDA's does."""

    def __init__(self) -> None:
        self.made: list[Event] = []

    def event(self) -> Event:
        self.made.append(Event())
        return self.made[-1]


class Event:
    def __init__(self) -> None:
        self.at_ms: float | None = None
        self.records = 0

    def record(self) -> None:
        self.at_ms, self.records = None, self.records + 1

    def synchronize(self) -> None:
        self.at_ms = 0.0

    def query(self) -> bool:
        return self.at_ms is not None

    def elapsed_time(self, later: Event) -> float:
        assert self.at_ms is not None
        assert later.at_ms is not None
        return later.at_ms - self.at_ms


@pytest.fixture
def clock() -> tuple[DeviceClock, Device]:
    device = Device()
    return DeviceClock(device.event), device


def test_marks_are_read_once_they_happened(clock: tuple[DeviceClock, Device]) -> None:
    device_clock, device = clock
    begin, end = device_clock.mark(), device_clock.mark()
    assert device_clock.read_ns(begin) is None
    device.made[1].at_ms, device.made[2].at_ms = 1.0, 3.5
    first, second = device_clock.read_ns(begin), device_clock.read_ns(end)
    assert first is not None
    assert second is not None
    assert second - first == 2_500_000


def test_epochs_chain_and_are_read_in_any_order(clock: tuple[DeviceClock, Device]) -> None:
    device_clock, device = clock
    marks: list[Any] = []
    for _ in range(3):
        device_clock.new_epoch()
        marks.append(device_clock.mark())
    for index, event in enumerate(device.made):
        event.at_ms = 100.0 * index
    last, first = device_clock.read_ns(marks[2]), device_clock.read_ns(marks[0])
    assert last is not None
    assert first is not None
    assert last - first == 4 * 100_000_000


def test_a_mark_of_an_epoch_that_has_not_begun_is_unknown(clock: tuple[DeviceClock, Device]) -> None:
    device_clock, device = clock
    device_clock.new_epoch()
    mark = device_clock.mark()
    device.made[-1].at_ms = 5.0
    assert device_clock.read_ns(mark) is None


def test_released_events_are_used_again(clock: tuple[DeviceClock, Device]) -> None:
    device_clock, device = clock
    mark = device_clock.mark()
    device_clock.release(mark)
    made = len(device.made)
    device_clock.mark()
    assert len(device.made) == made
    assert device.made[1].records == 2


def test_host_marks_pass_through(clock: tuple[DeviceClock, Device]) -> None:
    assert clock[0].read_ns(12345) == 12345
    host = HostClock()
    mark = host.mark()
    assert host.read_ns(mark) == mark
    assert host.mark() >= mark
