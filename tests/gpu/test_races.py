"""K7: slow producers, late consumers, memory pressure, under both taps; and that the checks would notice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from aorta.gpu_check import check_ranks
from aorta.instrument.device_interceptor import DeviceInterceptor
from aorta.instrument.device_streams import DeviceStreams
from aorta.instrument.instrumentation import Instrumentation
from aorta.instrument.native.native_interceptor import NativeDeviceClock
from aorta.instrument.open_step import StepFacts
from aorta.records.clocks import read_clocks
from aorta.records.schema import InstrumentMode, Step
from tests.gpu.device import compiled_part, needs_gpu, noticed, simulated_only

pytestmark = [
    pytest.mark.gpu,
    needs_gpu,
    # torch 2.13 renamed these functions, and says so; 2.11 knows the old names only.
    pytest.mark.filterwarnings("ignore:.*is deprecated. Please use:FutureWarning"),
]
SYNCHRONOUS = [kind for kind in check_ranks.KINDS if "synchronous" in kind]
FREED_LATER = simulated_only("a card's allocator may still be asking whether the stream has passed")
ASYNCHRONOUS = [kind for kind in check_ranks.KINDS if kind not in SYNCHRONOUS]


@contextmanager
def one_step(device: torch.device, mode: InstrumentMode, *, native: bool) -> Iterator[list[Step]]:
    """A recorded step, and its line behind it."""
    lines: list[Step] = []
    with Instrumentation(device, mode, 0, 1, read_clocks(), lines.append, native=native) as instrument:
        assert isinstance(instrument.clock, NativeDeviceClock) == native
        with instrument.recorder.step(StepFacts(0, 0, 0, 0.0, warmup=False)):
            yield lines
        instrument.recorder.finish()


@pytest.fixture(params=[False, True], ids=["python", "native"])
def native(request: pytest.FixtureRequest) -> bool:
    return compiled_part(wanted=request.param) is not None


@pytest.fixture(params=["dedicated", "observe"])
def busy(request: pytest.FixtureRequest, device: torch.device, native: bool) -> Iterator[torch.Stream]:
    """A stream to be busy on, while a tap looks at every collective."""
    with one_step(device, request.param, native=native) as lines:
        yield torch.Stream(device)
    assert lines[0].collectives, "the tap has not looked"


@pytest.mark.parametrize("kind", check_ranks.KINDS)
def test_a_slow_producer_is_waited_for(busy: torch.Stream, device: torch.device, kind: str) -> None:
    assert check_ranks.slow_producer(check_ranks.KINDS[kind], device)


@pytest.mark.parametrize("kind", check_ranks.KINDS)
def test_a_consumer_waits_for_the_collective(busy: torch.Stream, device: torch.device, kind: str) -> None:
    assert check_ranks.late_consumer(check_ranks.KINDS[kind], device, busy)


@pytest.mark.parametrize("kind", check_ranks.KINDS)
def test_memory_is_not_given_away_under_a_collective(busy: torch.Stream, device: torch.device, kind: str) -> None:
    assert check_ranks.memory_pressure(check_ranks.KINDS[kind], device, busy)


def nothing(*_args: Any, **_keywords: Any) -> None:
    pass


@pytest.mark.parametrize("kind", check_ranks.KINDS)
def test_the_check_notices_a_collective_that_does_not_wait_for_its_caller(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(DeviceStreams, "order", nothing)  # W2
    with one_step(device, "dedicated", native=False):
        assert noticed(lambda: check_ranks.slow_producer(check_ranks.KINDS[kind], device))


@pytest.mark.parametrize("kind", check_ranks.KINDS)
def test_the_check_notices_a_caller_that_does_not_wait(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(DeviceInterceptor, "_join", nothing)
    with one_step(device, "dedicated", native=False):
        assert noticed(lambda: check_ranks.late_consumer(check_ranks.KINDS[kind], device, torch.Stream(device)))


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=FREED_LATER if "own stream" in kind else ()) for kind in SYNCHRONOUS]
)
def test_the_check_notices_a_synchronous_caller_that_goes_on_too_early_with_its_memory(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(DeviceInterceptor, "_join", nothing)
    with one_step(device, "dedicated", native=False):
        assert noticed(lambda: check_ranks.memory_pressure(check_ranks.KINDS[kind], device, torch.Stream(device)))


@pytest.mark.parametrize("kind", ASYNCHRONOUS)
def test_the_check_notices_memory_that_is_not_kept(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(DeviceInterceptor, "_hold", nothing)  # W3
    with one_step(device, "dedicated", native=False):
        assert noticed(lambda: check_ranks.memory_pressure(check_ranks.KINDS[kind], device, torch.Stream(device)))
