"""What only CUDA and HIP have: names of `torch.cuda` that torch offers in no form for every accelerator.

Everything else asks `torch.accelerator`, `torch.Stream`, `torch.Event` and `torch.get_device_module`, which serve any
accelerator torch knows. On ROCm builds `torch.cuda` is HIP, so one call serves both. Must not: be asked on a device of
another type, except where a function says what it answers there.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

TYPE = "cuda"
"""The type of CUDA's and HIP's devices, as torch names both."""


def device_count() -> int:
    """Devices that torch sees; 0 in a build without CUDA and HIP."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def spin(cycles: int) -> None:
    """Keep the current stream busy for so many cycles of the device's clock, which its power management moves."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def is_capturing() -> bool:
    """Whether the current stream is being captured into a graph; False in a build without CUDA and HIP."""
    built = torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]
    return built and torch.cuda.is_current_stream_capturing()


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """For a `with` block: an operator of torch that waits for the device raises RuntimeError instead."""
    with warnings.catch_warnings():
        # torch says once a process that this is a prototype, which is no news to who asks for it.
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype", category=UserWarning)
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def nccl_version() -> str | None:
    """NCCL's, on ROCm RCCL's, as `2.27.3`; None without it or without a device."""
    if not (torch.cuda.is_available() and torch.distributed.is_nccl_available()):
        return None
    return ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]


def has_ranges() -> bool:
    """Whether this build has NVTX or ROCTx; leaves a mark of that name behind where it has."""
    try:
        torch.cuda.nvtx.mark("aorta")  # type: ignore[no-untyped-call]
    except RuntimeError:  # what torch's stub raises in a build without it
        return False
    return True


def begin_range(name: str) -> None:
    """Open a range that nsys and rocprofv3 show."""
    torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]


def end_range() -> None:
    """End the range that was opened last."""
    torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]


def has_memory_history() -> bool:
    """Whether the allocator can record what it does; False without a device."""
    return torch.cuda.is_available() and hasattr(torch.cuda.memory, "_record_memory_history")


def begin_memory_history(max_entries: int) -> None:
    """Record allocations and frees; of more than `max_entries` the oldest are forgotten."""
    torch.cuda.memory._record_memory_history(max_entries=max_entries)


def write_memory_history(path: Path) -> None:
    """What has been recorded, as a pickle for `python -m torch.cuda._memory_viz`."""
    torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]


def end_memory_history() -> None:
    """Record no longer."""
    torch.cuda.memory._record_memory_history(enabled=None)
