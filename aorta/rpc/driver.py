"""The functions that the RPC workload calls, and its driver: plain torch.distributed.rpc, as user code has it.

Must not know that it is being traced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed.rpc as rpc


def udf_with_torch_ops(x: torch.Tensor) -> torch.Tensor:
    """Three operators: [n, n] float32 -> [n, n]."""
    return torch.relu(torch.add(torch.mul(x, x), x))


def relay(to: str, x: torch.Tensor) -> torch.Tensor:
    """Have the next worker compute it: a nested call."""
    answer: torch.Tensor = rpc.rpc_sync(to, udf_with_torch_ops, args=(x,))
    return answer


class Driver:
    """The calls of rank 0: alternates between the three kinds, between a builtin and Python functions, and between
    callees.

    Args:
        callees: names of the other workers.
        size: side of the square tensors sent.
        nested: with two callees or more, some calls make another. Each blocks a server thread of its callee, and torch
            needs a second one there for the answer: with one thread a nested call never ends.
    """

    def __init__(self, callees: Sequence[str], size: int, *, nested: bool) -> None:
        self.callees, self._nested = list(callees), nested
        self._x = torch.ones(size, size)
        self._issued = 0

    def call(self, count: int) -> None:
        """Issue `count` calls, and wait for all of them."""
        waiting: list[Any] = []
        for _ in range(count):
            number, self._issued = self._issued, self._issued + 1
            to = self.callees[number % len(self.callees)]
            function, args = self._work(number, to)
            match number % 3:
                case 0:
                    rpc.rpc_sync(to, function, args=args)
                case 1:
                    waiting.append(rpc.rpc_async(to, function, args=args).wait)
                case 2:
                    waiting.append(rpc.remote(to, function, args=args).to_here)
        for wait in waiting:
            wait()

    def _work(self, number: int, to: str) -> tuple[Any, tuple[Any, ...]]:
        others = [name for name in self.callees if name != to]
        forms: list[tuple[Any, tuple[Any, ...]]] = [
            (torch.add, (self._x, self._x)),
            (udf_with_torch_ops, (self._x,)),
        ]
        if self._nested and others and number % 3 == 0:  # one at a time, so that two threads suffice
            forms.append((relay, (others[0], self._x)))
        return forms[(number + number // 3) % len(forms)]
