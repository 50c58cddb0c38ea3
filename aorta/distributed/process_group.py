"""Opens and closes torch.distributed for one run, and gives `Peers` on a store with their own prefix.

Must not leave a group open, whatever happens inside.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist

from aorta.distributed.accelerator import default_backend
from aorta.distributed.peers import Peers
from aorta.distributed.topology import Topology
from aorta.errors import ConfigError, PeerFailed

_log = logging.getLogger(__name__)
_CONNECT_S = 5.0


def backend_for(device: torch.device, emulated_ranks: int | None = None) -> str:
    """Return `gloo` on a CPU; on an accelerator its own (NCCL, RCCL on ROCm), with gloo beside it for CPU tensors;
    torch's fake one where a process stands for all ranks.
    """
    if emulated_ranks is not None:
        return dist.Backend.FAKE
    return "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:{default_backend(device)}"


@contextmanager
def process_group(
    topology: Topology, device: torch.device, timeout_s: float, emulated_ranks: int | None = None
) -> Iterator[Peers]:
    """Open the default process group, and yield the peers, for the length of a `with` block.

    Args:
        emulated_ranks: how many ranks the group has of which this process is the first, and the only one that there is;
            its peers are none. None: every rank is a process.

    Raises:
        PeerFailed: the other ranks did not join within `timeout_s`.
        ConfigError: WORLD_SIZE is above 1, but the environment does not name the rendezvous.
    """
    timeout = timedelta(seconds=timeout_s)
    try:
        store = _store(topology, timeout)
        if emulated_ranks is not None:
            import torch.testing._internal.distributed.fake_pg  # noqa: F401  registers the backend
        dist.init_process_group(
            backend_for(device, emulated_ranks),
            store=dist.PrefixStore("default_pg", store),
            rank=topology.rank,
            world_size=emulated_ranks or topology.world_size,
            timeout=timeout,
            # Bound to a device, groups of a mesh would be split from it, which the fake backend cannot.
            device_id=None if device.type == "cpu" or emulated_ranks is not None else device,
        )
    except ValueError as error:
        raise ConfigError(
            f"WORLD_SIZE={topology.world_size}: {error}; start the ranks with torchrun, or unset WORLD_SIZE"
        ) from error
    except (RuntimeError, OSError) as error:
        raise PeerFailed(
            f"rank {topology.rank} could not meet the other {topology.world_size - 1} rank(s) "
            f"(training.timeout_s={timeout_s:g}): {str(error).splitlines()[0]}"
        ) from error
    try:
        yield Peers(dist.PrefixStore("aorta", store), topology.rank, topology.world_size, timeout_s)
    except BaseException:
        if device.type == "cpu":
            dist.destroy_process_group()
        else:
            _abort()
        raise
    dist.destroy_process_group()


def _abort() -> None:
    """Abort every group after an error: on an accelerator, closing in order waits for kernels already issued, and
    those may wait for a dead peer. gloo has no such kernels.
    """
    try:
        dist.distributed_c10d._abort_process_group()
    except Exception as error:  # noqa: BLE001  the error that led here is the one to report
        _log.warning("the process group could not be aborted and is left to the end of the process: %s", error)


def _store(topology: Topology, timeout: timedelta) -> dist.Store:
    if topology.world_size == 1:
        # A world of one needs no port, so two such runs cannot connect by accident.
        return dist.HashStore()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # The launcher opened it before it started this rank. Torch would try again until the timeout.
        try:
            socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), _CONNECT_S).close()
        except ConnectionRefusedError as error:
            raise PeerFailed(f"rank {topology.rank} cannot reach its launcher, which has ended: {error}") from error
        except (OSError, LookupError, ValueError):
            pass  # torch says what is wrong
    store, _, _ = next(dist.rendezvous("env://", topology.rank, topology.world_size, timeout=timeout))
    # torchrun's agent may keep one store over all restarts: a new attempt must not read the addresses of dead ranks.
    return dist.PrefixStore(f"attempt_{topology.restart_count}", cast(dist.Store, store))
