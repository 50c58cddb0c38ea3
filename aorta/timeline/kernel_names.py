"""Which kernels of a device communicate or copy, by their names: one vocabulary for traces and for live runs.

The patterns are unanchored (docs/dev/measuring.md, W12). Must not look at anything but the name.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final, NamedTuple


class DeviceKernel(NamedTuple):
    """One kernel of a device as a profiler saw it, in nanoseconds of CLOCK_MONOTONIC; `stream` is the profiler's number
    of it.
    """

    name: str
    stream: int
    start_ns: int
    end_ns: int


COMM: Final = (
    r"nccl",  # NCCL, RCCL (ncclDevKernel_Generic), symmetric kernels (ncclSymkDevKernel)
    r"rccl",  # rcclGenericKernel
    r"msccl",  # mscclKernel_*, MSCCL++
    r"cross_device_reduce",  # all-reduce of vLLM and aiter
    r"allgather_vec|reduce_scatter_cross_device",  # aiter
    r"quick_?reduce|allreduce_prototype",  # QuickReduce
    r"(one|two)_shot_all_reduce|multimem_all_(reduce|gather)|multimem_one_shot",  # torch symmetric memory
    r"nvshmem|rocshmem",
)
"""Communication kernels of any vendor. `--comm-pattern` adds to them."""

COPY: Final = (
    r"__amd_rocclr_(copy|fill)",  # HIP copies and fills run as kernels (rocprofv3)
    r"^\[?CUDA mem(cpy|set)|^Mem(cpy|set)\b",
)
"""Copies and fills that appear among kernels."""

_COMM: Final = re.compile("|".join(f"(?:{part})" for part in COMM), re.IGNORECASE)
_COPY: Final = re.compile("|".join(f"(?:{part})" for part in COPY), re.IGNORECASE)


@lru_cache(maxsize=4096)
def communicates(name: str) -> bool:
    """Return whether a kernel of this name is communication."""
    return _COMM.search(name) is not None


@lru_cache(maxsize=4096)
def copies(name: str) -> bool:
    """Return whether it is a copy or a fill, of those that do not communicate."""
    return _COPY.search(name) is not None
