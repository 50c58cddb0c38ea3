"""K7: that the checks for slow producers, late consumers and memory pressure notice what is wrong (`test_check` and
`tests/device_path` run them on what is right).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from aorta.gpu_check import races
from aorta.instrument.dispatcher import DispatcherHook, with_work, work_in
from aorta.instrument.operators import OPERATORS
from tests.gpu.device import needs_gpu, noticed, simulated_only

pytestmark = [
    pytest.mark.gpu,
    needs_gpu,
    # torch 2.13 renamed these functions, and says so; 2.11 knows the old names only.
    pytest.mark.filterwarnings("ignore:.*is deprecated. Please use:FutureWarning"),
]
SYNCHRONOUS = [kind for kind in races.KINDS if "synchronous" in kind]
FREED_LATER = simulated_only("a card's allocator may still be asking whether the stream has passed")
ASYNCHRONOUS = [kind for kind in races.KINDS if kind not in SYNCHRONOUS]


class Unjoined(dist._Work):
    """A handle that nobody waits with."""

    def wait(self, _timeout: Any = None) -> bool:
        """Do not."""
        return True


@contextmanager
def moved(device: torch.device, *, ordered: bool = True, joined: bool = True, held: bool = True) -> Iterator[None]:
    """Collectives run on a stream of their own, as in `dedicated`, which waits for its caller's (`ordered`) and whose
    caller waits for it (`joined`); the backend keeps their tensors (`held`).
    """
    side, kept = torch.cuda.Stream(device), list[Any]()

    def handler(_name: str, _arguments: Any, original: Callable[[], Any]) -> Any:
        caller = torch.cuda.current_stream(device)
        if ordered:
            side.wait_stream(caller)
        with torch.cuda.stream(side):
            result = original()
            work = work_in(result)
            if work is not None and not held:
                work.wait()  # the backend lets go of what it keeps for its caller's wait
        if joined:
            if work is None:
                caller.wait_stream(side)
            return result
        if work is None:
            return result
        handle = Unjoined()
        kept.extend((work, handle))  # C++ may not wait for a handle whose Python half is gone
        return with_work(result, handle)

    hook = DispatcherHook(OPERATORS, device, handler)
    try:
        yield
        torch.accelerator.synchronize()
    finally:
        hook.close()


@pytest.mark.parametrize("kind", races.KINDS)
def test_the_check_finds_nothing_where_nothing_is_wrong(device: torch.device, kind: str) -> None:
    with moved(device):
        assert not noticed(lambda: races.slow_producer(races.KINDS[kind], device))
        assert not noticed(lambda: races.late_consumer(races.KINDS[kind], device, torch.Stream(device)))


@pytest.mark.parametrize("kind", races.KINDS)
def test_the_check_notices_a_collective_that_does_not_wait_for_its_caller(device: torch.device, kind: str) -> None:
    with moved(device, ordered=False):  # W2
        assert noticed(lambda: races.slow_producer(races.KINDS[kind], device))


@pytest.mark.parametrize("kind", races.KINDS)
def test_the_check_notices_a_caller_that_does_not_wait(device: torch.device, kind: str) -> None:
    with moved(device, joined=False):
        assert noticed(lambda: races.late_consumer(races.KINDS[kind], device, torch.Stream(device)))


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=FREED_LATER if "own stream" in kind else ()) for kind in SYNCHRONOUS]
)
def test_the_check_notices_a_synchronous_caller_that_goes_on_too_early_with_its_memory(
    device: torch.device, kind: str
) -> None:
    with moved(device, joined=False):
        assert noticed(lambda: races.memory_pressure(races.KINDS[kind], device, torch.Stream(device)))


@pytest.mark.parametrize("kind", ASYNCHRONOUS)
def test_the_check_notices_memory_that_is_not_kept(device: torch.device, kind: str) -> None:
    with moved(device, held=False):  # W3
        assert noticed(lambda: races.memory_pressure(races.KINDS[kind], device, torch.Stream(device)))
