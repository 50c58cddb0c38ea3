"""As many distinct streams as asked for. Must not hand out a stream twice."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from aorta.errors import ConfigError


def distinct_streams(device: torch.device, number: int, priority: int) -> list[torch.Stream]:
    """Streams of one priority on the current device.

    Torch has a pool of 32 streams for each priority and hands them out in turn (c10/cuda/CUDAStream.cpp,
    kStreamsPerPool); what is missing is made by the runtime itself and lives until the process ends.

    Raises:
        ConfigError: the pool is exhausted, and streams of this priority cannot be had from the runtime.
    """
    module = torch.get_device_module(device.type)
    found: list[torch.Stream] = []
    while len(found) < number:
        fresh = module.Stream(device, priority=priority)
        if fresh in found:
            break
        found.append(fresh)
    return found + [_own(module, device, priority, len(found)) for _ in range(number - len(found))]


def _own(module: Any, device: torch.device, priority: int, pooled: int) -> torch.Stream:
    runtime = module.cudart()
    if priority != 0 or not hasattr(runtime, "cudaStreamCreate"):
        raise ConfigError(
            f"workload.streams: torch has {pooled} streams of priority {priority} on {device}, no more can be made; "
            f"ask for at most {pooled}, or leave the pattern `priorities` out (workload.patterns=[independent,...])"
        )
    handle = ctypes.c_void_p()
    code = int(runtime.cudaStreamCreate(ctypes.addressof(handle)))
    if code != 0:
        raise ConfigError(f"workload.streams: the runtime makes no stream beyond torch's {pooled} (error {code})")
    stream: torch.Stream = module.ExternalStream(handle.value, device=device)
    return stream
