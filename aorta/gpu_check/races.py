"""Races on tensors and their lifetime (docs/measuring.md, K7): each check answers whether the values were right.

The collectives are an all-gather and a reduce-scatter into another tensor: with one rank they copy, so a copy made too
early, or of memory that was given away, shows in the result. (An all-reduce of one rank moves nothing.) Every rank
of the default group must run the same check.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist

from aorta.launch import cuda

SLEEP_CYCLES = 50_000_000
"""Tens of milliseconds on any card: far longer than it takes the host to issue everything below."""
ELEMENTS = 1 << 22


@dataclass(frozen=True)
class Kind:
    """A collective from one tensor into another, and what it makes of equal values on `n` ranks."""

    issue: Callable[[torch.Tensor, torch.Tensor], dist.Work | None]
    result_elements: Callable[[int], int]
    result_value: Callable[[float, int], float]

    def result(self, device: torch.device) -> torch.Tensor:
        """Where the result will be; holds a value that none of the checks uses."""
        return torch.full((self.result_elements(dist.get_world_size()),), -1.0, device=device)

    def is_right(self, result: torch.Tensor, value: float) -> bool:
        """Whether this is what every rank's `value` comes to."""
        return bool((result == self.result_value(value, dist.get_world_size())).all().item())


KINDS = {
    "all_gather": Kind(
        lambda result, source: dist.all_gather_into_tensor(result, source, async_op=True),
        lambda n: ELEMENTS * n,
        lambda value, _n: value,
    ),
    "reduce_scatter": Kind(
        lambda result, source: dist.reduce_scatter_tensor(
            result, source[: result.numel() * dist.get_world_size()], async_op=True
        ),
        lambda n: ELEMENTS // n,
        lambda value, n: value * n,
    ),
}


def slow_producer(kind: Kind, device: torch.device) -> bool:
    """The input is written behind a long kernel: the collective must wait for it (W2)."""
    source = torch.zeros(ELEMENTS, device=device)
    result = kind.result(device)
    torch.accelerator.synchronize()
    cuda.spin(SLEEP_CYCLES)
    source.fill_(3)
    _wait(kind.issue(result, source))
    return kind.is_right(result, 3)


def late_consumer(
    kind: Kind, device: torch.device, delay: Callable[[], None], issuer: torch.Stream | None = None
) -> bool:
    """The collective is held up: who waits for it must not read the result before.

    Args:
        delay: puts a long kernel in front of the collective: on the stream that will run it, or on `issuer`.
        issuer: the stream that issues the collective, which then waits for it; None = the current one, which reads.
    """
    source, result = torch.full((ELEMENTS,), 5.0, device=device), kind.result(device)
    torch.accelerator.synchronize()
    delay()
    with issuer or nullcontext():
        work = kind.issue(result, source)
    _wait(work)
    return kind.is_right(result.clone(), 5)


def memory_pressure(
    kind: Kind, device: torch.device, delay: Callable[[], None], issuer: torch.Stream | None = None
) -> bool:
    """The caller drops the input while the collective is held up, and the allocator is asked for the same size at once
    and often: the input's memory must not be given away (W3).
    """
    result = kind.result(device)
    source = torch.full((ELEMENTS,), 7.0, device=device)
    torch.accelerator.synchronize()
    delay()
    with issuer or nullcontext():
        work = kind.issue(result, source)
    del source
    garbage = [torch.full((ELEMENTS,), -2.0, device=device) for _ in range(8)]
    _wait(work)
    right = kind.is_right(result, 7)
    return right and len(garbage) == 8


def _wait(work: dist.Work | None) -> None:
    assert work is not None
    work.wait()
