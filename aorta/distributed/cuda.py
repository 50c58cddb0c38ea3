"""Functions of `torch.cuda` that torch does not offer for accelerators in general.

Everything else uses `torch.accelerator`, `torch.Stream`, `torch.Event` and `torch.get_device_module`, which serve any
accelerator torch knows. On ROCm builds `torch.cuda` is HIP, so one call serves both. Must not be called on a device of
another type, except where a function says what it returns there.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

TYPE = "cuda"
"""torch's device type for both CUDA and HIP."""

_observers: list[bool] = []
_called: list[Callable[[], None]] = []


def device_count() -> int:
    """Return devices that torch sees; 0 in a build without CUDA and HIP."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def spin(cycles: int) -> None:
    """Keep the current stream busy for a number of cycles of the device's clock, whose frequency power management
    varies.
    """
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def is_capturing() -> bool:
    """Return whether the current stream is being captured into a graph; False without a device, of which torch built
    for CUDA raises an error instead.
    """
    return _has_device() and torch.cuda.is_current_stream_capturing()


@cache
def _has_device() -> bool:
    return torch.cuda.is_available()


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Make torch operators that wait for the device raise RuntimeError, for a `with` block."""
    with warnings.catch_warnings():
        # torch warns once per process that this is a prototype, which is known here.
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype", category=UserWarning)
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def nccl_version() -> str | None:
    """Return the version of NCCL, or of RCCL on ROCm, e.g. `2.27.3`; None without it or without a device."""
    if not (torch.cuda.is_available() and torch.distributed.is_nccl_available()):
        return None
    return ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]


def mps_runs() -> bool:
    """Return whether NVIDIA's Multi-Process Service runs for this process, without which the kernels of two processes
    on one device take turns (its control daemon keeps its process number in the folder of its pipes).
    """
    folder = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))
    try:
        daemon = (folder / "nvidia-cuda-mps-control.pid").read_text().strip()
    except (OSError, ValueError):
        return False
    return daemon.isdecimal() and Path("/proc", daemon).exists()


def has_ranges() -> bool:
    """Return whether this build has NVTX or ROCTx; emits a mark of that name where it has."""
    try:
        torch.cuda.nvtx.mark("aorta")  # type: ignore[no-untyped-call]
    except RuntimeError:  # raised by torch's stub in a build without it
        return False
    return True


def begin_range(name: str) -> None:
    """Open a range that nsys and rocprofv3 show."""
    torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]


def end_range() -> None:
    torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]


def has_memory_history() -> bool:
    """Return whether the allocator records its history and reports failures; False without a device or such a build."""
    return torch.cuda.is_available() and hasattr(torch._C, "_cuda_attachOutOfMemoryObserver")


def begin_memory_history(max_entries: int) -> None:
    """Record allocations and frees; beyond `max_entries` the oldest are dropped."""
    torch.cuda.memory._record_memory_history(max_entries=max_entries)


def write_memory_history(path: Path) -> None:
    """Write the recorded history as a pickle for `python -m torch.cuda._memory_viz`."""
    torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]


def on_out_of_memory(call: Callable[[], None]) -> Callable[[], None]:
    """Have `call` called whenever an allocation fails, on its thread, before torch raises; returns what ends that.

    torch can attach an observer, and detach none: one stays for the rest of the process.
    """
    if not _observers:
        torch._C._cuda_attachOutOfMemoryObserver(lambda *_: [one() for one in list(_called)])  # type: ignore[attr-defined]
        _observers.append(True)
    _called.append(call)

    def end() -> None:
        if call in _called:
            _called.remove(call)

    return end


def end_memory_history() -> None:
    torch.cuda.memory._record_memory_history(enabled=None)
