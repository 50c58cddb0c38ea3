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
FREED_LATER = simulated_only("a card's allocator may still be asking whether the stream has passed")
MARKS = {kind: FREED_LATER for kind in races.KINDS if "synchronous" in kind and "own stream" in kind}


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


def wrong(check: Callable[..., bool], kind: str, device: torch.device) -> bool:
    """Whether a check of `races` notices anything."""
    words = () if check is races.slow_producer else (torch.Stream(device),)
    return noticed(lambda: check(races.KINDS[kind], device, *words))


@pytest.mark.parametrize("kind", races.KINDS)
def test_the_check_notices_who_does_not_wait(device: torch.device, kind: str) -> None:
    """A collective for its caller (W2), and a caller; and nothing where nothing is wrong."""
    for moves, check, is_wrong in (
        ({}, races.slow_producer, False),
        ({}, races.late_consumer, False),
        ({"ordered": False}, races.slow_producer, True),
        ({"joined": False}, races.late_consumer, True),
    ):
        with moved(device, **moves):
            assert wrong(check, kind, device) == is_wrong, (moves, check)


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=MARKS.get(kind, ())) for kind in races.KINDS])
def test_the_check_notices_memory_that_is_used_again_too_early(device: torch.device, kind: str) -> None:
    """By a synchronous caller that goes on; and of an asynchronous one's tensors, which nobody keeps (W3)."""
    with moved(device, **({"joined": False} if "synchronous" in kind else {"held": False})):
        assert wrong(races.memory_pressure, kind, device)
