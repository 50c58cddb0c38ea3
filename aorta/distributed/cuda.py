"""What only CUDA and HIP have: functions of `torch.cuda` that torch does not offer for accelerators in general, and the
file that NCCL's functions come from. On ROCm builds `torch.cuda` is HIP, and RCCL has NCCL's names.

Must not be called on a device of another type, except where a function says what it returns there, load a library, or
say of a file what was not read from it.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch

from aorta.redaction import redact

TYPE = "cuda"
"""torch's device type for both CUDA and HIP."""
_MAPS: Final = Path("/proc/self/maps")
_OF_TORCH: Final = ("libtorch_cuda.so", "libtorch_hip.so")
"""Libraries of torch that hold its NCCL process group, linked with NCCL or RCCL, or with it inside."""


def device_count() -> int:
    """Return devices that torch sees; 0 in a build without CUDA and HIP."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def spin(cycles: int) -> None:
    """Keep the current stream busy for so many cycles of the device's clock, whose frequency varies."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def is_capturing() -> bool:
    """Return whether the current stream is being captured into a graph; False without a device, where torch raises."""
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
    """Return whether NVIDIA's Multi-Process Service runs (its daemon keeps its process id in the folder of its pipes).
    Without it, kernels of two processes on one device take turns.
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
    """Return whether the allocator records its history; False without a device or such a build."""
    return torch.cuda.is_available() and hasattr(torch._C, "_cuda_memorySnapshot")


def begin_memory_history(max_entries: int) -> None:
    """Record allocations and frees; beyond `max_entries` the oldest are dropped."""
    torch.cuda.memory._record_memory_history(max_entries=max_entries)


def write_memory_history(path: Path) -> None:
    """Write the recorded history as a pickle for `python -m torch.cuda._memory_viz`."""
    torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]


def end_memory_history() -> None:
    torch.cuda.memory._record_memory_history(enabled=None)


def loaded_library() -> dict[str, Any] | None:
    """Return the file that provides `ncclGetVersion`, and what tells two builds of one version apart:

        {"path": "/opt/rocm/lib/librccl.so.1.0", "version": "2.22.3", "bytes": ..., "sha256": "1f2e..."}

    None where nothing provides it, and on other systems than Linux. Size and SHA-256 are None where the file is no
    longer the one that was loaded or cannot be read. Reads the whole file.
    """
    function = next(_nccl_functions(), None) if sys.platform == "linux" else None
    if function is None:
        return None
    # NCCL_VERSION_CODE is 1000 x major + 100 x minor + patch up to 2.8, then 10000 x major + ... (nccl.h).
    version, code = None, ctypes.c_int()
    if function(ctypes.byref(code)) == 0:
        major, rest = divmod(code.value, 10000 if code.value >= 10000 else 1000)
        version = f"{major}.{rest // 100}.{rest % 100}"
    # The file mapped there, symbolic links resolved; followed by ` (deleted)` where it was replaced
    # (proc_pid_maps(5)).
    address, path = ctypes.cast(function, ctypes.c_void_p).value or 0, None
    for line in _MAPS.read_text(errors="replace").splitlines():
        extent, _, _, _, _, *mapped = line.split(maxsplit=5)
        first, _, end = extent.partition("-")
        if int(first, 16) <= address < int(end, 16):
            path = mapped[0] if mapped else None
            break
    size, digest = None, None
    if path is not None and not path.endswith(" (deleted)"):
        try:
            with Path(path).open("rb") as file:
                size, digest = os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()
        except OSError:
            pass
    return {"path": path and redact(path), "version": version, "bytes": size, "sha256": digest}


def _nccl_functions() -> Iterator[Any]:
    """Yield `ncclGetVersion` in the order of the dynamic linker's search: preloaded and global libraries come before
    what torch was linked with (ld.so(8), dlsym(3)).
    """
    torch_lib = Path(torch.__file__).with_name("lib")
    for name in (None, *(str(torch_lib / library) for library in _OF_TORCH)):
        try:
            yield ctypes.CDLL(name, mode=os.RTLD_LAZY | os.RTLD_NOLOAD).ncclGetVersion
        except (OSError, AttributeError):  # not loaded; does not have it
            continue
