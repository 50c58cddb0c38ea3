"""Gathers a value from every rank once all are idle, without timing out on a peer that is still busy.

At the end of a run ranks write files and upload traces, for as long as that takes. Must not use a collective.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from aorta.distributed.peers import Peers
from aorta.errors import PeerFailed

_BEAT_S = 0.2
_LOOK_S = 5.0
"""Interval between checks of each rank's heartbeat."""


def gather_when_idle(
    peers: Peers, key: str, busy: Callable[[], bool], value: Callable[[], Any], beat_s: float = _BEAT_S
) -> list[Any]:
    """Every rank's `value()`, in rank order, once no rank is `busy()` any more.

    Each rank sends a heartbeat every `beat_s` seconds; a rank is given up only after a silence of the peers'
    `timeout_s`.

    Args:
        key: identifies this call; the same on all ranks, and used once.
        busy: whether this rank is still at work.
        value: what this rank contributes, in JSON types; called when it is no longer busy.

    Raises:
        PeerFailed: a rank fell silent; names it.
    """
    mine, names = f"busy/{key}/{peers.rank}", [_done(key, rank) for rank in range(peers.world_size)]
    others = _Others(peers, key, names)
    told, next_look = False, time.monotonic()
    try:
        while True:
            if not told and not busy():
                peers.store.set(names[peers.rank], json.dumps(value()))
                told = True
            elif not told:
                peers.store.add(mine, 1)
            # One query for all ranks: a query per pair of ranks would overload the store.
            if told and peers.store.check(names):
                return [json.loads(text) for text in peers.store.multi_get(names)]
            if time.monotonic() >= next_look:
                others.look()
                next_look = time.monotonic() + min(_LOOK_S, peers.timeout_s / 4)
            time.sleep(beat_s)
    except (RuntimeError, OSError) as error:
        raise PeerFailed(f"the rendezvous store stopped answering ({error}) ({key})") from error


def leave_value(peers: Peers, key: str, value: Any) -> None:
    """What `gather_when_idle` gives the others of this rank, which failed and does not wait for theirs."""
    with suppress(RuntimeError, OSError):  # a dead store has no readers
        peers.store.set(_done(key, peers.rank), json.dumps(value))


def _done(key: str, rank: int) -> str:
    return f"done/{key}/{rank}"


class _Others:
    """Heartbeats of the other ranks."""

    def __init__(self, peers: Peers, key: str, names: list[str]) -> None:
        self._peers, self._key, self._names = peers, key, names
        self._waited_for = {rank: (-1, time.monotonic()) for rank in range(peers.world_size) if rank != peers.rank}

    def look(self) -> None:
        """Check the heartbeats.

        Raises:
            PeerFailed: a rank has fallen silent.
        """
        store, limit_s = self._peers.store, self._peers.timeout_s
        for rank, (beats, since) in list(self._waited_for.items()):
            if store.check([self._names[rank]]):
                del self._waited_for[rank]
                continue
            now_beats, now = store.add(f"busy/{self._key}/{rank}", 0), time.monotonic()
            if now_beats != beats:
                self._waited_for[rank] = (now_beats, now)
            elif now - since > limit_s:
                raise PeerFailed(f"rank {rank} has said nothing for {limit_s:g} s ({self._key})")
