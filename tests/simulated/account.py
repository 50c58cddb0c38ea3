"""What the simulated device tells of: rows of its timeline, waits of streams, races, and counts.

Times are nanoseconds of the host's clock. Must not: ask the device, which `device.py` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

Kind = Literal["op", "collective", "copy", "sleep", "memset"]


class Row(NamedTuple):
    """One kernel, copy or collective as the device ran it. `stream` is the stream's `stream_id`; 0 is the default."""

    id: int
    """In the order of issue."""
    device: int
    stream: int
    kind: Kind
    name: str
    start_ns: int
    end_ns: int
    bytes: int
    group: str
    """Of a collective: its group's name."""
    seq: int
    """Of a collective: ProcessGroupNCCL's number; point-to-point has a count of its own. Otherwise -1."""


class Wait(NamedTuple):
    """A stretch [begin, end) in which a stream stood still for something on another one."""

    device: int
    stream: int
    begin_ns: int
    end_ns: int
    on_device: int
    on_stream: int
    on_row: int
    """`Row.id` of the last row of that stream before the event; -1: none."""
    why: Literal["event", "communicator", "queue"]
    """queue: another stream's work was before it in the hardware queue that both share."""


class Side(NamedTuple):
    """One of two accesses to the same bytes."""

    name: str
    device: int
    stream: int
    write: bool
    begin: int
    end: int


class Race(NamedTuple):
    """Two accesses without an order between them, one of them a write. `first` was issued first."""

    first: Side
    second: Side
    begin: int
    end: int
    times: int
    """How often the same pair was seen."""


class Counters(NamedTuple):
    """Since the last `reset` (memory: `live_bytes` is what is allocated now)."""

    host_synchronisations: Mapping[str, int]
    """By what waited: device, stream, event, work, barrier, an operator's name, ..."""
    events_created: int
    events_recorded: int
    streams_created: int
    kernels: Mapping[tuple[int, int], int]
    """By device and stream."""
    live_bytes: int
    peak_bytes: int
