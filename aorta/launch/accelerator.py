"""What AORTA needs of an accelerator, asked of any that torch knows: streams, events with times, random states, and a
backend of torch.distributed.

`torch.accelerator`, `torch.Stream`, `torch.Event` and the module of the device's type answer; what only CUDA and HIP
have is in `cuda`. Must not: name a kind of device to decide what it can do, or guess: it is tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, supported_activities

from aorta.launch import cuda

_ON_HOST = "gloo"
"""The backend that copies an accelerator's tensors to the host: nothing of it runs on the device."""


def default_backend(device: torch.device) -> str | None:
    """What torch.distributed takes for tensors of this device where nobody says otherwise; None: there is nothing."""
    return dist.Backend.default_device_backend_map.get(device.type) if dist.is_available() else None


def lacks_backend(device: torch.device) -> Iterator[str]:
    """Why a run cannot exchange this accelerator's tensors on the device, in one clause; none where it can."""
    backend = default_backend(device)
    if backend is None:
        yield "torch.distributed has no backend for it"
    elif backend == _ON_HOST:
        yield f"torch.distributed exchanges its tensors through the host ({backend})"
    elif not dist.is_backend_available(backend):
        yield f"this torch is built without {backend}, its backend of torch.distributed"


def lacks_streams(device: torch.device) -> Iterator[str]:
    """What this accelerator, the current one, does not have that the measurement needs, one clause each.

    CUDA and HIP have it; others are tried, which waits for the device once.
    """
    if device.type == cuda.TYPE:
        return
    try:
        if torch.Stream(device) == torch.accelerator.current_stream(device):
            yield "it has one stream only"
    except RuntimeError:  # what torch raises where a device's guard does not implement it
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
    """The device as its vendor calls it; `cpu`, and the device's type where the vendor's module has no name for it."""
    if device.type == "cpu":
        return "cpu"
    named = getattr(_module(device), "get_device_name", None)
    return device.type if named is None else str(named(device))


def random_states(device: torch.device) -> dict[str, torch.Tensor]:
    """Torch's random states on the host and on an accelerator, by `cpu` and `device`."""
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states["device"] = _module(device).get_rng_state(device)
    return states


def set_random_states(states: dict[str, torch.Tensor], device: torch.device) -> None:
    """Put back what `random_states` gave; an accelerator's only where there is one in both."""
    torch.set_rng_state(states["cpu"])
    if device.type != "cpu" and "device" in states:
        _module(device).set_rng_state(states["device"], device)


def profiled() -> list[ProfilerActivity]:
    """What torch's profiler can see here: the host first, and the accelerator where there is one."""
    found = supported_activities()  # type: ignore[no-untyped-call]
    return sorted(found, key=lambda activity: activity is not ProfilerActivity.CPU)


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device)
