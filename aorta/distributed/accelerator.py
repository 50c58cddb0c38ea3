"""What AORTA needs of an accelerator of any kind: streams, timing events, random states, and a torch.distributed
backend.

It uses `torch.accelerator`, `torch.Stream`, `torch.Event` and the module of the device's type; what only CUDA and HIP
have is in `cuda`. Must not decide by the kind of device what it can do, or guess: features are tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, supported_activities

from aorta.distributed import cuda

_ON_HOST = "gloo"
"""The backend that copies an accelerator's tensors to the host: its collectives do not run on the device."""


def default_backend(device: torch.device) -> str | None:
    """Return the backend torch.distributed uses for tensors of this device by default; None if there is none."""
    return dist.Backend.default_device_backend_map.get(device.type) if dist.is_available() else None


def lacks_backend(device: torch.device) -> Iterator[str]:
    """Yield why a run cannot communicate on this accelerator itself, as one clause; empty where it can."""
    backend = default_backend(device)
    if backend is None:
        yield "torch.distributed has no backend for it"
    elif backend == _ON_HOST:
        yield f"torch.distributed exchanges its tensors through the host ({backend})"
    elif not dist.is_backend_available(backend):
        yield f"this torch is built without {backend}, its backend of torch.distributed"


def lacks_streams(device: torch.device) -> Iterator[str]:
    """Yield what the measurement needs and this accelerator, the current one, lacks; one clause each.

    CUDA and HIP have everything; on others features are tried, which waits for the device once.
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
    named = getattr(_module(device), "get_device_name", None)
    return device.type if named is None else str(named(device))


def random_states(device: torch.device) -> dict[str, torch.Tensor]:
    """Return torch's random states on the host and on an accelerator, by `cpu` and `device`."""
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states["device"] = _module(device).get_rng_state(device)
    return states


def set_random_states(states: dict[str, torch.Tensor], device: torch.device) -> None:
    """Restore what `random_states` gave; an accelerator's only where both sides have one."""
    torch.set_rng_state(states["cpu"])
    if device.type != "cpu" and "device" in states:
        _module(device).set_rng_state(states["device"], device)


def profiled() -> list[ProfilerActivity]:
    """Return the activities that torch's profiler can record here: the host, then the accelerator if any."""
    found = supported_activities()  # type: ignore[no-untyped-call]
    return sorted(found, key=lambda activity: activity is not ProfilerActivity.CPU)


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device)
