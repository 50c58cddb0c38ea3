"""Which process this is, and which device it computes on.

Enters: the environment torchrun sets (a world of one without it). Must not: initialise torch.distributed.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from aorta.config.resolve import environment_number
from aorta.config.schema import Device
from aorta.errors import ConfigError
from aorta.telemetry.schema import Platform


@dataclass(frozen=True)
class Topology:
    """One rank's place. `local_rank` selects the device, `rank` takes part in collectives."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    restart_count: int
    elastic_run_id: str | None
    host: str
    pid: int


def read_topology(environment: Mapping[str, str] = os.environ) -> Topology:
    """Read torchrun's variables.

    Raises:
        ConfigError: a variable is not a number, or RANK does not lie below WORLD_SIZE.
    """

    def number(name: str, default: int) -> int:
        return environment_number(name, default, environment)

    rank, world_size = number("RANK", 0), number("WORLD_SIZE", 1)
    if not 0 <= rank < world_size:
        raise ConfigError(f"RANK={rank}: must be at least 0 and below WORLD_SIZE={world_size}")
    local_world_size = number("LOCAL_WORLD_SIZE", world_size)
    return Topology(
        rank=rank,
        world_size=world_size,
        local_rank=number("LOCAL_RANK", rank),
        local_world_size=local_world_size,
        node_rank=number("GROUP_RANK", rank // max(local_world_size, 1)),
        restart_count=number("TORCHELASTIC_RESTART_COUNT", 0),
        elastic_run_id=environment.get("TORCHELASTIC_RUN_ID"),
        host=socket.gethostname(),
        pid=os.getpid(),
    )


def select_device(wanted: Device, local_rank: int) -> torch.device:
    """The device of this rank, made current.

    Raises:
        ConfigError: `cuda` was asked for and is not there, or there are fewer devices than local ranks.
    """
    available = torch.cuda.is_available()
    if wanted is Device.cuda and not available:
        raise ConfigError("training.device=cuda: torch sees no CUDA or HIP device; use training.device=auto or cpu")
    if wanted is Device.cpu or not available:
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise ConfigError(
            f"local rank {local_rank} has no device: torch sees {count}; start at most {count} processes a node "
            "(--nproc_per_node), or set training.device=cpu"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def platform_of(device: torch.device) -> Platform:
    """`rocm` for a HIP build, `cuda` for a CUDA build, `cpu` otherwise."""
    if device.type == "cpu":
        return "cpu"
    return "rocm" if torch.version.hip else "cuda"


def device_name(device: torch.device) -> str:
    """The device as its vendor calls it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
