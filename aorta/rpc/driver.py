"""The driver of an RPC run: the functions that it calls, plain torch.distributed.rpc as user code has it, and how the
main threads of the workers coordinate over the store.

Rank 0, the driver, publishes what comes; the others listen as long as it gives signs of life, and confirm. Waits are
short polls, so that a signal is heard while waiting. What is called must not know that it is being traced, nor
`Coordination` what the published values mean.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed.rpc as rpc

from aorta.distributed.peers import Peers
from aorta.errors import PeerFailed

DRIVER = 0
_BEAT_S = 1.0
"""Interval of the driver's heartbeat; small compared with any `training.timeout_s`."""
_POLL_S = 0.1
_CONFIRMED_POLL_S = 0.01


class Coordination:
    def __init__(self, peers: Peers) -> None:
        self._peers, self._store = peers, peers.store

    def say(self, key: str, value: Any, *, only_if_missing: bool = False) -> None:
        if not only_if_missing or not self._store.check([f"rpc/{key}"]):
            self._store.set(f"rpc/{key}", json.dumps(value))

    def confirm(self, key: str) -> None:
        self.say(f"{key}/{self._peers.rank}", True)

    def listen(self, key: str) -> Any:
        """Wait for rank 0's value of `key`, however long a window lasts, as long as rank 0 is alive.

        Raises:
            PeerFailed: it failed, or sent no heartbeat for `training.timeout_s`.
        """
        rank, limit_s = self._peers.rank, self._peers.timeout_s
        beats, since = -1, time.monotonic()
        while not self._store.check([f"rpc/{key}"]):
            time.sleep(_POLL_S)
            # Another worker's failure is no reason to stop: what the others record is kept.
            if (word := self._peers.reported_failure(DRIVER)) is not None:
                raise PeerFailed(f"rank {rank} stops: rank {DRIVER} failed: {word}")
            now_beats, now = self._store.add("rpc/beat", 0), time.monotonic()
            if now_beats != beats:
                beats, since = now_beats, now
            elif now - since > limit_s:
                raise PeerFailed(f"rank {DRIVER}, the driver, has given no sign of life for {limit_s:g} s ({key})")
        return json.loads(self._store.get(f"rpc/{key}"))

    def silent(self, key: str, ranks: Sequence[int], limit_s: float) -> list[int]:
        """Wait until all `ranks` have confirmed `key`, at most `limit_s`; returns those that have not."""
        waiting, deadline = list(ranks), time.monotonic() + limit_s
        with suppress(RuntimeError, OSError):  # the store is gone, and nobody else can be heard
            over = False
            while waiting and not over:
                over = time.monotonic() > deadline  # before the look: the last one is behind the deadline
                waiting = [rank for rank in waiting if not self._store.check([f"rpc/{key}/{rank}"])]
                if waiting:
                    time.sleep(_CONFIRMED_POLL_S)
        return waiting

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Rank 0 sends heartbeats, since a window may hold calls of any number and length."""
        over = threading.Event()

        def beat() -> None:
            with suppress(RuntimeError, OSError):  # the store is gone, and with it every listener
                while not over.wait(_BEAT_S):
                    self._store.add("rpc/beat", 1)

        thread = threading.Thread(target=beat, name="aorta-rpc-beat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(_BEAT_S)


def udf_with_torch_ops(x: torch.Tensor) -> torch.Tensor:
    """Run three operators: [n, n] float32 -> [n, n]."""
    return torch.relu(torch.add(torch.mul(x, x), x))


def relay(to: str, x: torch.Tensor) -> torch.Tensor:
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
