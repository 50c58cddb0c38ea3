"""A gathering for which every rank is waited as long as it is at work: nobody times out because a peer is busy.

Must not: use a collective.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from aorta.errors import PeerFailed
from aorta.launch.peers import Peers

_BEAT_S = 0.2


def gather_when_done(
    peers: Peers, key: str, busy: Callable[[], bool], value: Callable[[], Any], beat_s: float = _BEAT_S
) -> list[Any]:
    """Every rank's `value()` (JSON types), in rank order, once none is `busy()` any more.

    A rank that is busy says so every `beat_s` seconds; only one that falls silent for the peers' `timeout_s` is given
    up.

    Raises:
        PeerFailed: a rank fell silent; names it.
    """
    mine, names = f"busy/{key}/{peers.rank}", [f"done/{key}/{rank}" for rank in range(peers.world_size)]
    waited_for = {rank: (-1, time.monotonic()) for rank in range(peers.world_size) if rank != peers.rank}
    told = False
    try:
        while True:
            if not told and not busy():
                peers.store.set(names[peers.rank], json.dumps(value()))
                told = True
            elif not told:
                peers.store.add(mine, 1)
            for rank in list(waited_for):
                if peers.store.check([names[rank]]):
                    del waited_for[rank]
                    continue
                beats, since = waited_for[rank]
                now_beats, now = peers.store.add(f"busy/{key}/{rank}", 0), time.monotonic()
                if now_beats != beats:
                    waited_for[rank] = (now_beats, now)
                elif now - since > peers.timeout_s:
                    raise PeerFailed(f"rank {rank} has said nothing for {peers.timeout_s:g} s ({key})")
            if told and not waited_for:
                return [json.loads(text) for text in peers.store.multi_get(names)]
            time.sleep(beat_s)
    except (RuntimeError, OSError) as error:
        raise PeerFailed(f"the rendezvous store stopped answering ({error}) ({key})") from error
