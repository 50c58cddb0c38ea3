"""What the GPU tests share: which device there is, and kernels that take a known time.

The suite runs on a real card, and as it is on the simulated device in virtual time (`tests.simulated`), which proves
AORTA's own order of streams, events and lifetimes. What only the simulated one can say bears `simulated_only`; what a
real card alone can say is in the branches of tests that ask `load.loaded()`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from aorta.distributed import cuda
from aorta.instrument.native.build import compiled
from tests.simulated import device as simulated
from tests.simulated import load

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA or HIP device")


def simulated_only(what: str) -> pytest.MarkDecorator:
    """`what`: why a real card cannot be asked this."""
    return pytest.mark.skipif(not load.loaded(), reason=f"only the simulated device can say this: {what}")


def compiled_part(*, wanted: bool) -> Any | None:
    """The compiled part, None where it is not wanted; skips the test where it is not built or serves no device."""
    module, why_not = compiled(torch.device("cuda", 0), wanted=wanted, emulated=False)
    if wanted and module is None:
        pytest.skip(f"no compiled part: {why_not}")
    return module


def cycles_per_ms() -> float:
    """How many cycles of `torch.cuda._sleep` last a millisecond, by the host's clock round a long sleep."""
    cycles = 200_000_000
    cuda.spin(cycles)  # the clock of the device comes up
    torch.cuda.synchronize()
    begin = time.perf_counter_ns()
    cuda.spin(cycles)
    torch.cuda.synchronize()
    return cycles / ((time.perf_counter_ns() - begin) / 1e6)


@contextmanager
def standing_still(device: torch.device) -> Iterator[None]:
    """The current stream gets nowhere, on a card for 200 ms, on the simulated device for the length of the block."""
    if not load.loaded():
        cycles = int(200 * cycles_per_ms())
        cuda.spin(cycles)
        yield
        return
    group = dist.new_group([0])
    simulated.dead_peer(group)
    dist.all_reduce(torch.ones(1, device=device), group=group)
    try:
        yield
    finally:
        group._get_backend(device).abort()


def noticed(check: Callable[[], bool]) -> bool:
    """Whether a check of `races` notices something that is deliberately wrong: by wrong values on a card. On the
    simulated device values may be right by luck, and its own checker of races has to find it.
    """
    right = check()
    torch.accelerator.synchronize()
    if not load.loaded():
        return not right
    found = simulated.races()
    simulated.reset()
    return bool(found)
