"""K7: that the checks for slow producers, late consumers and memory pressure notice what is wrong (`test_check` and
`tests/device_path` run them on what is right).
"""

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
from aorta.records.clocks import read_clocks
from aorta.records.step_line import StepFacts
from tests.gpu.device import needs_gpu, noticed, simulated_only

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
def one_step(device: torch.device) -> Iterator[None]:
    """A recorded step, under the interceptor in Python."""
    with Instrumentation(device, "dedicated", 0, 1, read_clocks(), lambda _: None, native=False) as instrument:
        with instrument.recorder.step(StepFacts(0, 0, 0, 0.0, warmup=False)):
            yield
        instrument.recorder.finish()


def nothing(*_args: Any, **_keywords: Any) -> None:
    pass


@pytest.mark.parametrize("kind", check_ranks.KINDS)
def test_the_check_notices_a_collective_that_does_not_wait_for_its_caller(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(DeviceStreams, "order", nothing)  # W2
    with one_step(device):
        assert noticed(lambda: check_ranks.slow_producer(check_ranks.KINDS[kind], device))


@pytest.mark.parametrize("kind", check_ranks.KINDS)
def test_the_check_notices_a_caller_that_does_not_wait(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(DeviceInterceptor, "_join", nothing)
    with one_step(device):
        assert noticed(lambda: check_ranks.late_consumer(check_ranks.KINDS[kind], device, torch.Stream(device)))


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=FREED_LATER if "own stream" in kind else ()) for kind in SYNCHRONOUS]
)
def test_the_check_notices_a_synchronous_caller_that_goes_on_too_early_with_its_memory(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(DeviceInterceptor, "_join", nothing)
    with one_step(device):
        assert noticed(lambda: check_ranks.memory_pressure(check_ranks.KINDS[kind], device, torch.Stream(device)))


@pytest.mark.parametrize("kind", ASYNCHRONOUS)
def test_the_check_notices_memory_that_is_not_kept(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(DeviceInterceptor, "_hold", nothing)  # W3
    with one_step(device):
        assert noticed(lambda: check_ranks.memory_pressure(check_ranks.KINDS[kind], device, torch.Stream(device)))
