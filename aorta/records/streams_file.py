"""What a run of `workload=streams` writes: `streams.json`.

Must not know how streams are driven (`aorta.streams`).
"""

from __future__ import annotations

from typing import Final

import msgspec

STREAMS_FILE: Final = "streams.json"
STREAMS_VERSION: Final = 1
QUEUE_VARIABLES: Final = ("GPU_MAX_HW_QUEUES", "CUDA_DEVICE_MAX_CONNECTIONS")
"""They bound the hardware queues, of HIP and of CUDA."""


class StreamsPoint(msgspec.Struct, frozen=True):
    """One pattern on one number of streams.

    `concurrency` is the mean number of kernels that ran at once while any ran (the sum of the kernels' lengths over the
    length of their union), `most_at_once` the maximum. `serial_ns` and `elapsed_ns` are the times of the same kernels
    on one stream and on `streams`, from the first begin to the last end; `gain` is their quotient, the throughput
    against one stream. `issued_in_time`: everything was issued before the first kernel could begin; else the host was
    too slow, and less than the device can do was seen. `shared_queues`: places of this point's streams,
    grouped by the hardware queue, where a queue has more than one.
    """

    streams: int
    kernels: int
    concurrency: float
    most_at_once: int
    serial_ns: int
    elapsed_ns: int
    gain: float
    issued_in_time: bool
    shared_queues: list[list[int]]


class StreamsPattern(msgspec.Struct, frozen=True):
    """One pattern: its points by number of streams, and its knee, null where it was `skipped` (with the reason)."""

    name: str
    says: str
    points: list[StreamsPoint]
    knee_streams: int | None = None
    skipped: str | None = None


class StreamsRank(msgspec.Struct, frozen=True):
    """All results of a rank. `queues` groups its streams of normal priority by the hardware queue they were seen to
    use. `environment` holds the variables that bound hardware queues, as the process started with them.
    """

    rank: int
    device: str
    environment: dict[str, str]
    queues: list[list[int]]
    patterns: list[StreamsPattern]


class StreamsFile(msgspec.Struct, frozen=True):
    """`streams.json`: what was asked for, and the results of all ranks in their order."""

    version: int
    kernel_ns: int
    knee_tolerance: float
    ranks: list[StreamsRank]
