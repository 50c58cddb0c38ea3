"""Determines this process's rank in a process group that the user's program opened, and connects it to the other ranks.

It uses the caller's default process group, or none in a single process; ranks communicate under their own prefix in its
store. Must not issue a collective (it would be counted as the caller's), or close anything.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from itertools import count

import torch
import torch.distributed as dist

from aorta.config.resolve import environment_number
from aorta.distributed.peers import Peers
from aorta.distributed.topology import Topology
from aorta.errors import ConfigError, InstrumentError

_recordings = count()


def meet(timeout_s: float, who: str = "aorta.record") -> tuple[Topology, Peers]:
    """This rank's topology and its peers; every rank of the group must call it. `who` stands in error messages.

    Raises:
        ConfigError: the launcher's variables name other ranks, but no process group is open.
        PeerFailed: another rank did not call it within `timeout_s`.
        InstrumentError: this torch does not expose the store of a process group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        promised = environment_number("WORLD_SIZE", 1)
        if promised > 1:
            raise ConfigError(
                f"{who}: WORLD_SIZE={promised}, but torch.distributed is not initialised; call "
                "torch.distributed.init_process_group first, or unset WORLD_SIZE"
            )
        return _topology(0, [socket.gethostname()]), Peers(dist.HashStore(), 0, 1, timeout_s)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # The count is the same on every rank: a second recording must not read what the first one left.
    store = dist.PrefixStore(f"aorta/recording_{next(_recordings)}", _store())
    peers = Peers(store, rank, world_size, timeout_s)
    return _topology(rank, peers.gather("host", socket.gethostname())), peers


def _store() -> dist.Store:
    group = dist.group.WORLD
    if group is None or not hasattr(group, "get_group_store"):
        raise InstrumentError(
            f"torch {torch.__version__} does not offer ProcessGroup.get_group_store, through which ranks agree on a "
            "folder; use a torch that AORTA supports (>= 2.11)"
        )
    return group.get_group_store()


def _topology(rank: int, hosts: Sequence[str]) -> Topology:
    """Nodes are distinguished by host name, since the launcher's variables may belong to something else."""
    host = hosts[rank]
    return Topology(
        rank=rank,
        world_size=len(hosts),
        local_rank=hosts[:rank].count(host),
        local_world_size=hosts.count(host),
        node_rank=list(dict.fromkeys(hosts)).index(host),
        restart_count=environment_number("TORCHELASTIC_RESTART_COUNT", 0),
        elastic_run_id=os.environ.get("TORCHELASTIC_RUN_ID"),
        host=host,
        pid=os.getpid(),
    )
