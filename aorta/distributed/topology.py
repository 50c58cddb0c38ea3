"""Where a rank runs: its numbers from torchrun's environment variables, its device, and torch.distributed for one run,
with `Peers` on a store of their own prefix. Without the variables the world has one rank.

What devices can do is asked by `torch.accelerator`, `torch.Stream`, `torch.Event` and the module of the device's type;
`cuda` has what only CUDA and HIP have. Must not decide by the kind of device what it can do: features are tried. Must
not leave a process group open, whatever happens inside.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, supported_activities

from aorta.config.resolve import environment_number
from aorta.distributed import cuda
from aorta.distributed.peers import Peers
from aorta.errors import ConfigError, PeerFailed
from aorta.records.schema import Platform

_log = logging.getLogger(__name__)
_CONNECT_S = 5.0
_ON_HOST = "gloo"
"""The backend that copies an accelerator's tensors to the host: its collectives do not run on the device."""


@dataclass(frozen=True)
class Topology:
    """This process's ranks: `local_rank` selects the device, `rank` takes part in collectives."""

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


def select_device(wanted: str, local_rank: int, ranks_per_device: int = 1) -> torch.device:
    """Select the device of this rank, and make it current; ranks that share one follow one another.

    Args:
        wanted: `training.device`: `auto`, `cpu`, or the type of an accelerator as torch names it.
        ranks_per_device: ranks that share a device; `share_device` makes NCCL accept that.

    Raises:
        ConfigError: that accelerator does not exist or lacks what the measurement needs, or there are fewer devices
            than local ranks.
    """
    available = None if wanted == "cpu" else torch.accelerator.current_accelerator(check_available=True)
    if wanted not in ("auto", "cpu") and (available is None or available.type != wanted):
        here = f"torch {torch.__version__}"
        if wanted == cuda.TYPE:
            raise ConfigError("training.device=cuda: torch sees no CUDA or HIP device; use training.device=auto or cpu")
        try:
            torch.device(wanted)
        except RuntimeError as error:
            raise ConfigError(
                f"training.device={wanted}: {here} knows no device of that type; allowed are auto, cpu, cuda (CUDA and "
                "HIP) and any other accelerator this torch is built for, as xpu"
            ) from error
        seen = "no accelerator" if available is None else f"{available.type} only"
        raise ConfigError(
            f"training.device={wanted}: {here} sees {seen} on this machine; use training.device=auto or cpu, or "
            "install the torch that is built for it"
        )
    if available is None:
        return torch.device("cpu")
    count, index = torch.accelerator.device_count(), local_rank // ranks_per_device
    if index >= count:
        raise ConfigError(
            f"local rank {local_rank} has no device: torch sees {count}; start at most {count * ranks_per_device} "
            "processes a node (--nproc_per_node), or set training.device=cpu"
        )
    device = torch.device(available.type, index)
    torch.accelerator.set_device_index(index)
    missing, backend = list(lacks_streams(device)), default_backend(device)
    if backend is None:
        missing.append("torch.distributed has no backend for it")
    elif backend == _ON_HOST:
        missing.append(f"torch.distributed exchanges its tensors through the host ({backend})")
    elif not dist.is_backend_available(backend):
        missing.append(f"this torch is built without {backend}, its backend of torch.distributed")
    if missing:
        why = f"AORTA cannot measure on {device.type}: {', '.join(missing)}"
        if wanted == "auto":
            _log.warning("training.device=auto: %s; this run computes on the CPU", why)
            return torch.device("cpu")
        raise ConfigError(
            f"training.device={wanted}: {why}; it needs streams, events that tell the time and a backend of "
            "torch.distributed on the device, as cuda (CUDA and HIP) and xpu have them; use training.device=cpu"
        )
    return device


def share_device(rank: int, nccl_version: str | None) -> dict[str, str]:
    """Let NCCL run several ranks on one device, which it refuses otherwise ("Duplicate GPU detected"), by environment
    variables; returns those in force (what is set already stays). Call it before the process group is opened.

    NCCL 2.30 has a variable for it. Before, each rank names a host of its own, and NCCL talks over sockets, here on the
    loopback device. Few thread blocks leave room for computation.
    """
    wanted = {"NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "2"}
    if tuple(int(part) for part in (nccl_version or "0").split(".")[:2]) >= (2, 30):
        wanted["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    else:
        wanted |= {"NCCL_HOSTID": f"{socket.gethostname()}-{rank}", "NCCL_SOCKET_IFNAME": "lo"}
        wanted |= dict.fromkeys(("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"), "1")
    return {name: os.environ.setdefault(name, value) for name, value in wanted.items()}


def platform_of(device: torch.device) -> Platform:
    """Return `rocm` for a HIP build, `cuda` for a CUDA build, `cpu`, and `other` for every other accelerator."""
    if device.type == "cpu":
        return "cpu"
    if device.type != cuda.TYPE:
        return "other"
    return "rocm" if torch.version.hip else "cuda"


def default_label(device: torch.device) -> str:
    """Label of a run without one: its platform, or the device type of an accelerator of platform `other`."""
    platform = platform_of(device)
    return device.type if platform == "other" else platform


def default_backend(device: torch.device) -> str | None:
    """Return torch.distributed's default backend for tensors of this device; None if there is none."""
    return dist.Backend.default_device_backend_map.get(device.type) if dist.is_available() else None


def lacks_streams(device: torch.device) -> Iterator[str]:
    """Yield what the measurement needs and this accelerator, the current one, lacks, in clauses. CUDA and HIP have all;
    on others features are tried, which waits for the device once.
    """
    if device.type == cuda.TYPE:
        return
    try:
        if torch.Stream(device) == torch.accelerator.current_stream(device):
            yield "it has one stream only"
    except RuntimeError:  # raised by torch where a device's guard does not implement it
        yield "it has no streams"
    try:
        begin, end = (torch.Event(device, enable_timing=True) for _ in range(2))
        begin.record()
        end.record()
        end.synchronize()
        begin.elapsed_time(end)
    except RuntimeError:
        yield "its events do not tell the time"


def device_name(device: torch.device) -> str:
    """Return the vendor's name of the device; `cpu`, or the device's type where the vendor's module gives no name."""
    if device.type == "cpu":
        return "cpu"
    named = getattr(torch.get_device_module(device), "get_device_name", None)
    return device.type if named is None else str(named(device))


def random_states(device: torch.device) -> dict[str, torch.Tensor]:
    """Return torch's random states on the host and on an accelerator, by `cpu` and `device`."""
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states["device"] = torch.get_device_module(device).get_rng_state(device)
    return states


def set_random_states(states: dict[str, torch.Tensor], device: torch.device) -> None:
    """Restore what `random_states` gave; an accelerator's only where both sides have one."""
    torch.set_rng_state(states["cpu"])
    if device.type != "cpu" and "device" in states:
        torch.get_device_module(device).set_rng_state(states["device"], device)


def profiled() -> list[ProfilerActivity]:
    """Return the activities that torch's profiler can record here: the host, then the accelerator if any."""
    activities = supported_activities()  # type: ignore[no-untyped-call]
    return sorted(activities, key=lambda activity: activity is not ProfilerActivity.CPU)


def backend_for(device: torch.device, emulated_ranks: int | None = None) -> str:
    """Return `gloo` on a CPU; on an accelerator its own (NCCL, RCCL) and gloo for CPU tensors; torch's fake one where a
    process stands for all ranks.
    """
    if emulated_ranks is not None:
        return dist.Backend.FAKE
    return "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:{default_backend(device)}"


@contextmanager
def process_group(
    topology: Topology, device: torch.device, timeout_s: float, emulated_ranks: int | None = None
) -> Iterator[Peers]:
    """Open the default process group for the length of a `with` block, and yield the peers.

    Args:
        emulated_ranks: size of a group of which this process is the first rank, and the only one that exists.

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
            raise
        # Closing in order would wait for kernels already issued, and those may wait for a dead peer.
        try:
            dist.distributed_c10d._abort_process_group()
        except Exception as error:  # noqa: BLE001  the error that led here is the one to report
            _log.warning("the process group could not be aborted and is left to the end of the process: %s", error)
        raise
    dist.destroy_process_group()


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
