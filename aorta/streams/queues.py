"""Finds the streams that share a hardware queue: two of them, each with one kernel that could begin at the same moment,
and the kernels did not run at once.

Sharing a queue is an equivalence, so each stream is tried against one stream of every queue found so far. Must not
assume a rule by which streams come to queues, or a number of queues.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from aorta.streams.concurrency import ran_together
from aorta.streams.issue import Issuer
from aorta.streams.patterns import Kernel

_TRIES = 3
"""Two kernels that ran at once, once, do not share a queue; that they did not can have another reason, once."""


def shared_queues(issuer: Issuer, streams: Sequence[torch.Stream]) -> list[list[int]]:
    """The places of the streams, grouped by hardware queue, queues in the order of their first stream."""
    queues: list[list[int]] = []
    for place, stream in enumerate(streams):
        own = next((queue for queue in queues if _share(issuer, streams[queue[0]], stream)), None)
        if own is None:
            queues.append([place])
        else:
            own.append(place)
    return queues


def _share(issuer: Issuer, one: torch.Stream, other: torch.Stream) -> bool:
    pair = (one, other)
    for _ in range(_TRIES):
        timed = issuer.run([Kernel(0), Kernel(1)], lambda kernel: pair[kernel.stream])
        if ran_together(*timed.kernels):
            return False
    return True
