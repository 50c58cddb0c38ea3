"""Tells which file this process takes NCCL's functions from, so that two builds of one version are told apart.

    loaded_library()    {"path": "/opt/rocm/lib/librccl.so.1.0", "version": "2.22.3", "bytes": ..., "sha256": "1f2e..."}

RCCL has NCCL's functions under the same names. Must not load a library, or say of a file what was not read from it.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch

from aorta.redaction import redact

_MAPS: Final = Path("/proc/self/maps")
_OF_TORCH: Final = ("libtorch_cuda.so", "libtorch_hip.so")
"""Libraries of torch that hold its NCCL process group, linked with NCCL or RCCL, or with it inside."""
_DELETED: Final = " (deleted)"


def loaded_library() -> dict[str, Any] | None:
    """Return the file that provides `ncclGetVersion`, the version it states, its size and its SHA-256; None where
    nothing provides it, and on other systems than Linux. Size and SHA-256 are None where the file is no longer the one
    that was loaded or cannot be read. Reads the whole file.
    """
    function = next(_functions(), None) if sys.platform == "linux" else None
    if function is None:
        return None
    path = _file_of(ctypes.cast(function, ctypes.c_void_p).value or 0)
    size, digest = None, None
    if path is not None and not path.endswith(_DELETED):
        try:
            with Path(path).open("rb") as file:
                size, digest = os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()
        except OSError:
            pass
    return {"path": path and redact(path), "version": _version(function), "bytes": size, "sha256": digest}


def _functions() -> Iterator[Any]:
    """Yield `ncclGetVersion` in the order of the dynamic linker's search: preloaded and global libraries come before
    what torch was linked with (ld.so(8), dlsym(3)).
    """
    torch_lib = Path(torch.__file__).with_name("lib")
    for name in (None, *(str(torch_lib / each) for each in _OF_TORCH)):
        try:
            library = ctypes.CDLL(name, mode=os.RTLD_LAZY | os.RTLD_NOLOAD)
            yield library.ncclGetVersion
        except (OSError, AttributeError):  # not loaded; does not have it
            continue


def _version(function: Any) -> str | None:
    """Return e.g. `2.27.3`. NCCL_VERSION_CODE is 1000 x major + 100 x minor + patch up to 2.8, then 10000 x major + ...
    (nccl.h).
    """
    code = ctypes.c_int()
    if function(ctypes.byref(code)) != 0:
        return None
    major, rest = divmod(code.value, 10000 if code.value >= 10000 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"


def _file_of(address: int) -> str | None:
    """Return the file mapped at an address, with symbolic links resolved; followed by ` (deleted)` where it has been
    replaced since (proc_pid_maps(5)).
    """
    for line in _MAPS.read_text(errors="replace").splitlines():
        extent, _, _, _, _, *path = line.split(maxsplit=5)
        first, _, end = extent.partition("-")
        if int(first, 16) <= address < int(end, 16):
            return path[0] if path else None
    return None
