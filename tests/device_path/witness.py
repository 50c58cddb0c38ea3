"""What the simulated device's own timeline says of a step, in a few lines that share nothing with the instrument.

Enters: the rows of one device and the step's window, in nanoseconds. Leaves: the lengths a record must agree with. Must
not: use anything of `aorta`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Interval = tuple[int, int]


@dataclass(frozen=True)
class Truth:
    """Lengths in nanoseconds. `stall_ns`: the computing stream stood still, or ran a collective itself."""

    compute_ns: int
    comm_ns: int
    hidden_ns: int
    stall_ns: int
    copy_ns: int

    def lengths_ns(self) -> dict[str, int]:
        """By the metric that a record has for each."""
        return {
            "compute_ms": self.compute_ns,
            "comm_ms": self.comm_ns,
            "compute_comm_ms": self.hidden_ns,
            "exposed_comm_ms": self.comm_ns - self.hidden_ns,
            "compute_stall_ms": self.stall_ns,
            "copy_ms": self.copy_ns,
        }

    @property
    def ratio(self) -> float | None:
        return self.hidden_ns / self.comm_ns if self.comm_ns else None


def truth_of(window: Interval, rows: Sequence[Any], waits: Sequence[Any], compute_stream: int, device: int) -> Truth:
    """Of one step.

    Args:
        rows, waits: `timeline()` and `waits()` of `tests.simulated.device`.
    """
    here = [row for row in rows if row.device == device]
    comm = clipped(((row.start_ns, row.end_ns) for row in here if row.kind == "collective"), window)
    kernels = [row for row in here if row.stream == compute_stream and row.kind == "op"]
    compute = clipped(((row.start_ns, row.end_ns) for row in kernels), window)
    still = [(one.begin_ns, one.end_ns) for one in waits if (one.device, one.stream) == (device, compute_stream)]
    own = [(row.start_ns, row.end_ns) for row in here if row.kind == "collective" and row.stream == compute_stream]
    return Truth(
        compute_ns=length(compute),
        comm_ns=length(comm),
        hidden_ns=length(common(comm, compute)),
        stall_ns=length(common(clipped([*still, *own], window), comm)),
        copy_ns=length(clipped(((row.start_ns, row.end_ns) for row in here if row.kind == "copy"), window)),
    )


def clipped(spans: Iterable[Interval], window: Interval) -> list[Interval]:
    """The union of `spans` inside `window`, as disjoint intervals in order."""
    merged: list[Interval] = []
    for low, high in sorted((max(low, window[0]), min(high, window[1])) for low, high in spans):
        if low >= high:
            continue
        if merged and low <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return merged


def common(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """Where both are."""
    pairs = ((max(a, c), min(b, d)) for a, b in first for c, d in second)
    return clipped((span for span in pairs if span[0] < span[1]), (-(2**62), 2**62))


def length(spans: Iterable[Interval]) -> int:
    """Of disjoint intervals."""
    return sum(high - low for low, high in spans)
