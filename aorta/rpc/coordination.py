"""How the main threads of an RPC run's workers tell each other what they do: words in the store.

Rank 0, the driver, says what comes; the others listen as long as it gives signs of life, and confirm. Waits are short
polls, so that a signal is heard while waiting. Must not know what the words mean.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from aorta.distributed.peers import Peers
from aorta.errors import PeerFailed

DRIVER = 0
_BEAT_S = 1.0
"""Interval of the driver's heartbeat; small compared with any `training.timeout_s`."""
_POLL_S = 0.1
_CONFIRMED_POLL_S = 0.01


class Coordination:
    """Worker endpoint of the RPC run's coordination."""

    def __init__(self, peers: Peers) -> None:
        self._peers, self._store = peers, peers.store

    def say(self, key: str, value: Any, *, only_if_missing: bool = False) -> None:
        """Publish a value (JSON types)."""
        if not only_if_missing or not self._store.check([f"rpc/{key}"]):
            self._store.set(f"rpc/{key}", json.dumps(value))

    def confirm(self, key: str) -> None:
        """Tell the driver that this rank has come to `key`."""
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
