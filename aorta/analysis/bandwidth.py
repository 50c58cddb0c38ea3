"""Defines algorithm and bus bandwidth, for records and traces alike.

Takes bytes and transfer times of collectives of one kind, size and group size; gives GB/s (GB = 1e9 bytes), or why
there is none. Must not: take the world size for a group's (W19), or load pandas (processes that read traces load this).
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

BUSBW_FACTOR: Final = {"allreduce": 2.0, "reducescatter": 1.0, "allgather": 1.0, "alltoall": 1.0}
"""busbw = algbw x factor x (n - 1) / n (docs/dev/measuring.md, section 1; nccl-tests, doc/PERFORMANCE.md)."""

NO_BYTES: Final = "it carries no bytes"
NO_SIZE: Final = "its size is not known"
"""Traces of other tools may not state the size; it is then -1 in a frame, and null in a summary."""
GROUP_OF_ONE: Final = "a group of one rank moves nothing"
TOO_SHORT: Final = "its transfer is too short for the clock"


def no_bandwidth(size_bytes: int | None, ranks: int | None) -> str | None:
    """Why collectives of this size, in a group of this many ranks, have no bandwidth; None where they have one."""
    if size_bytes is None:
        return NO_SIZE
    if size_bytes == 0:
        return NO_BYTES
    return GROUP_OF_ONE if ranks == 1 else None


def algbw_gb_per_s(size_bytes: int, transfer_ns: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Bytes over transfer time, for transfers longer than 0 (`TOO_SHORT`). Bytes per nanosecond are GB per second."""
    return np.asarray(size_bytes / transfer_ns[transfer_ns > 0], np.float64)


def busbw_factor(kind: str, ranks: int | None) -> float | None:
    """Bus bandwidth over algorithm bandwidth; None for a kind without bus bandwidth, or a group of unknown size."""
    factor = BUSBW_FACTOR.get(kind)
    return None if factor is None or not ranks else factor * (ranks - 1) / ranks
