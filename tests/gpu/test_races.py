"""K7: slow producers, late consumers, memory pressure; and that the checks would notice."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from aorta.gpu_check import races
from aorta.instrument.clock import DeviceClock
from aorta.instrument.device_collectives import DeviceTap
from aorta.instrument.issued import Group
from aorta.instrument.operators import OPERATORS
from aorta.instrument.seam import Seam
from aorta.instrument.streams import DeviceStreams
from tests.gpu.device import default_group, needs_gpu

pytestmark = [
    pytest.mark.gpu,
    needs_gpu,
    # torch 2.13 renamed these functions, and says so; 2.11 knows the old names only.
    pytest.mark.filterwarnings("ignore:.*is deprecated. Please use:FutureWarning"),
]


class Unordered(torch.cuda.Stream):
    """A stream that forgets to wait: what W2 is."""

    def wait_stream(self, stream: torch.cuda.Stream) -> None:
        pass


class UnorderedStreams(DeviceStreams):
    def of_group(self, group: str) -> torch.cuda.Stream:
        return self._of_group.setdefault(group, Unordered(self._device))


def tap_over(streams: DeviceStreams, *, dedicated: bool) -> DeviceTap:
    groups: dict[str, Group] = {}
    return DeviceTap(DeviceClock(), groups, lambda _: None, lambda _begin, _end: None, streams, dedicated=dedicated)


@pytest.fixture(params=["dedicated", "observe"])
def streams(request: pytest.FixtureRequest, device: torch.device) -> Iterator[DeviceStreams]:
    streams = DeviceStreams(device)
    seam = Seam(OPERATORS, device, tap_over(streams, dedicated=request.param == "dedicated"))
    yield streams
    torch.cuda.synchronize()
    seam.close()


@pytest.fixture
def delay(streams: DeviceStreams) -> Callable[[], None]:
    def held_up() -> None:
        with torch.cuda.stream(streams.of_group(default_group())):
            torch.cuda._sleep(races.SLEEP_CYCLES)

    return held_up


@pytest.mark.parametrize("kind", races.KINDS)
def test_a_slow_producer_is_waited_for(streams: DeviceStreams, device: torch.device, kind: str) -> None:
    assert races.slow_producer(races.KINDS[kind], device)


@pytest.mark.parametrize("kind", races.KINDS)
def test_a_consumer_waits_for_the_collective(
    streams: DeviceStreams, device: torch.device, delay: Callable[[], None], kind: str
) -> None:
    assert races.late_consumer(races.KINDS[kind], device, delay)


@pytest.mark.parametrize("kind", races.KINDS)
def test_memory_is_not_given_away_under_a_collective(
    streams: DeviceStreams, device: torch.device, delay: Callable[[], None], kind: str
) -> None:
    assert races.memory_pressure(races.KINDS[kind], device, delay)


def test_the_check_notices_a_stream_that_does_not_wait(device: torch.device) -> None:
    seam = Seam(OPERATORS, device, tap_over(UnorderedStreams(device), dedicated=True))
    try:
        assert not races.slow_producer(races.KINDS["all_gather"], device)
    finally:
        torch.cuda.synchronize()
        seam.close()
