"""Checks for races on tensors and their lifetime (docs/dev/measuring.md, K7), through whatever interceptor is open.

Each returns whether the values were right. Its collectives are an all-gather and a reduce-scatter into another tensor:
with one rank they copy, so a copy made too early, or of memory that was freed, shows in the result. (An all-reduce of
one rank moves nothing.) Every rank of the default group must run the same check. Must not judge, or train.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
import torch.distributed as dist

from aorta.distributed import cuda

SLEEP_CYCLES = 50_000_000
"""Tens of milliseconds on any card: far longer than the host needs to issue everything below."""
ELEMENTS = 1 << 22


class Handle(Protocol):
    """Something that a caller waits for: the caller's stream then waits, not the host."""

    def wait(self) -> object: ...


Call = Callable[[torch.Tensor, torch.Tensor, bool], dist.Work | None]
"""Result, source, whether asynchronous."""


@dataclass(frozen=True)
class Kind:
    """A collective from one tensor into another, and its result for equal values on `n` ranks.

    Attributes:
        issue: its return value has to be waited for; None: a synchronous call, with nothing to wait for.
    """

    issue: Callable[[torch.Tensor, torch.Tensor], Handle | None]
    result_elements: Callable[[int], int]
    result_value: Callable[[float, int], float]

    def result(self, device: torch.device) -> torch.Tensor:
        return torch.full((self.result_elements(dist.get_world_size()),), -1.0, device=device)

    def is_right(self, result: torch.Tensor, value: float) -> bool:
        return bool((result == self.result_value(value, dist.get_world_size())).all().item())


@cache
def _own_stream(device: torch.device) -> torch.Stream:
    return torch.Stream(device)


def _on_its_own_stream(call: Call) -> Callable[[torch.Tensor, torch.Tensor], Handle | None]:
    """Wait for a collective on another stream as FSDP does: through an event of that stream."""

    def issue(result: torch.Tensor, source: torch.Tensor) -> Handle:
        own = _own_stream(result.device)
        own.wait_stream(torch.accelerator.current_stream(result.device))
        with own:
            call(result, source, False)
        for tensor in (result, source):
            tensor.record_stream(own)
        return own.record_event()

    return issue


_CALLS: dict[str, tuple[Call, Callable[[int], int], Callable[[float, int], float]]] = {
    "all_gather": (
        lambda result, source, asynchronous: dist.all_gather_into_tensor(result, source, async_op=asynchronous),
        lambda n: ELEMENTS * n,
        lambda value, _n: value,
    ),
    "reduce_scatter": (
        lambda result, source, asynchronous: dist.reduce_scatter_tensor(
            result, source[: result.numel() * dist.get_world_size()], async_op=asynchronous
        ),
        lambda n: ELEMENTS // n,
        lambda value, n: value * n,
    ),
}
_WAYS: dict[str, Callable[[Call], Callable[[torch.Tensor, torch.Tensor], Handle | None]]] = {
    "": lambda call: lambda result, source: call(result, source, True),
    ", synchronous": lambda call: lambda result, source: call(result, source, False),
    ", synchronous on its own stream": _on_its_own_stream,
}
KINDS = {
    f"{name}{way}": Kind(issued(call), elements, value)
    for name, (call, elements, value) in _CALLS.items()
    for way, issued in _WAYS.items()
}


def slow_producer(kind: Kind, device: torch.device) -> bool:
    """Check that a collective waits for its input, which is written after a long kernel (W2)."""
    source = torch.zeros(ELEMENTS, device=device)
    result = kind.result(device)
    torch.accelerator.synchronize()
    cuda.spin(SLEEP_CYCLES)
    source.fill_(3)
    _wait(kind.issue(result, source))
    return kind.is_right(result, 3)


def late_consumer(kind: Kind, device: torch.device, busy: torch.Stream) -> bool:
    """Check that the next operation does not read the result of a delayed collective before its end.

    Args:
        busy: another stream than the current one, of the same priority.
    """
    source, result = torch.full((ELEMENTS,), 5.0, device=device), kind.result(device)
    torch.accelerator.synchronize()
    hold_up(busy)
    _wait(kind.issue(result, source))
    return kind.is_right(result.clone(), 5)


def memory_pressure(kind: Kind, device: torch.device, busy: torch.Stream) -> bool:
    """Check that the input's memory is not reused (W3): the caller drops the input while the collective is delayed, and
    then allocates the same size many times at once.

    Args:
        busy: another stream than the current one, of the same priority.
    """
    result = kind.result(device)
    source = torch.full((ELEMENTS,), 7.0, device=device)
    torch.accelerator.synchronize()
    hold_up(busy)
    handle = kind.issue(result, source)
    del source
    garbage = [torch.full((ELEMENTS,), -2.0, device=device) for _ in range(8)]
    _wait(handle)
    return kind.is_right(result, 7) and len(garbage) == 8


def hold_up(busy: torch.Stream) -> None:
    """Delay the default group's next operation, whoever issues it, behind a collective whose stream is busy. (A
    synchronous one that runs on its caller's own stream may be on time, and nothing can read too early there.)
    """
    with busy:
        source = torch.zeros(1, device=busy.device)
        result = torch.zeros(dist.get_world_size(), device=busy.device)
        cuda.spin(SLEEP_CYCLES)
        _wait(dist.all_gather_into_tensor(result, source, async_op=True))


def _wait(handle: Handle | None) -> None:
    if handle is not None:
        handle.wait()
