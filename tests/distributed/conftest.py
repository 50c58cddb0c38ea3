"""Ranks of this room: threads on one in-memory store, each seeing what a process would see."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from aorta.distributed.peers import Peers
from aorta.distributed.topology import Topology
from tests.runs import HANGS_S


def place(rank: int = 0, world_size: int = 1, *, per_node: int | None = None, **facts: Any) -> Topology:
    """The topology of one rank, `per_node` ranks a node."""
    local = per_node or world_size
    known = {"restart_count": 0, "elastic_run_id": None, "host": "node", "pid": 4242} | facts
    return Topology(rank, world_size, rank % local, local, rank // local, **known)


class DeadStore:
    """A store whose server is gone: every operation fails as c10d's does."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def fail(*_: Any) -> Any:
            raise dist.DistNetworkError("Connection reset by peer\nException raised from sendBytes")

        return fail


class World:
    """`world(3, work)` calls `work(peers)` as three ranks; gives what each returned or raised, in rank order."""

    def __init__(self) -> None:
        self.timeout_s = 20.0

    def __call__(self, size: int, work: Callable[[Peers], Any]) -> list[Any]:
        store, outcomes = dist.HashStore(), [None] * size

        def live(rank: int) -> None:
            try:
                outcomes[rank] = work(Peers(store, rank, size, self.timeout_s))
            except Exception as error:  # noqa: BLE001  an outcome like any other, for the test to look at
                outcomes[rank] = error

        ranks = [threading.Thread(target=live, args=(rank,), daemon=True) for rank in range(size)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(timeout=HANGS_S)
            assert not rank.is_alive(), f"{rank.name} hangs"
        return outcomes


@pytest.fixture
def world() -> World:
    return World()
