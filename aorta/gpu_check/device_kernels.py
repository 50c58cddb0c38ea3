"""Extracts communication and compute of each step from the kernels in a profiler's trace.

A Chrome trace of torch.profiler and windows in wall-clock nanoseconds give intervals and durations, which `case`
compares with the record's. Pure. Must not use anything that the telemetry uses to decide what is communication; it
reads names of kernels, unanchored (docs/measuring.md, W12), by category (W13).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Interval = tuple[int, int]
Pair = tuple[Interval, Interval]
"""A collective in the record, and its kernel; both in nanoseconds of the Unix epoch."""
COMMUNICATION = re.compile(r"nccl|rccl|msccl|cross_device_reduce", re.IGNORECASE)
WAITS = {"cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize"} | {
    "hipDeviceSynchronize",
    "hipStreamSynchronize",
    "hipEventSynchronize",
}


@dataclass(frozen=True)
class KernelWindow:
    """One step as the profiler saw it."""

    comm: list[Interval]
    compute: list[Interval]
    host_waits: int

    def lengths_ns(self) -> tuple[int, int]:
        """Communication, and the part of it that lies inside compute, in ns."""
        comm, compute = union(self.comm), union(self.compute)
        hidden = sum(max(0, min(a[1], b[1]) - max(a[0], b[0])) for a in comm for b in compute)
        return sum(end - start for start, end in comm), hidden


def pooled_ratio(steps: Sequence[KernelWindow]) -> float | None:
    """Hidden communication of all steps over all their communication; None without communication."""
    comm, hidden = (sum(lengths) for lengths in zip(*(step.lengths_ns() for step in steps), strict=True))
    return hidden / comm if comm else None


def windows(trace: dict[str, Any], steps: Sequence[Interval], device: int) -> list[KernelWindow]:
    """The kernels of one device that start in each step, and the waits of the host in it.

    Args:
        trace: as `json.load` reads it.
        steps: `[start, end)` in nanoseconds of the Unix epoch.
        device: index of the device whose kernels count.
    """
    base_ns = int(trace.get("baseTimeNanoseconds", 0))
    rows = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    found = []
    for low, high in steps:
        inside = [event for event in rows if low <= start_ns(event, base_ns) < high]
        kernels = [e for e in inside if e.get("cat") == "kernel" and int(e["args"].get("device", device)) == device]
        comm = [span(event, base_ns) for event in kernels if COMMUNICATION.search(event["name"])]
        compute = [span(event, base_ns) for event in kernels if not COMMUNICATION.search(event["name"])]
        waits = sum(e.get("cat") in {"cuda_runtime", "hip_runtime"} and e["name"] in WAITS for e in inside)
        found.append(KernelWindow(sorted(comm), compute, waits))
    return found


def busy_share(seen: Sequence[KernelWindow], steps: Sequence[Interval]) -> float | None:
    """Of the time of all steps, the share in which a kernel ran; None where no kernel was seen."""
    lengths = [
        sum(max(0, min(end, high) - max(start, low)) for start, end in union([*window.comm, *window.compute]))
        for window, (low, high) in zip(seen, steps, strict=True)
    ]
    return sum(lengths) / sum(high - low for low, high in steps) if any(lengths) else None


def matched(telemetry: Sequence[Sequence[Interval]], kernels: Sequence[KernelWindow]) -> list[Pair] | None:
    """Each collective of the record with its kernel, in order of start; None where the counts of a step differ."""
    pairs: list[Pair] = []
    for own, window in zip(telemetry, kernels, strict=True):
        if len(own) != len(window.comm):
            return None
        pairs += zip(sorted(own), window.comm, strict=True)
    return pairs


def start_ns(event: dict[str, Any], base_ns: int) -> int:
    """Start of a row of a trace, in nanoseconds of the Unix epoch; `base_ns` is the trace's base time."""
    # Microseconds since the base, in a float: small enough that nothing is lost before the base is added (W14).
    return base_ns + round(float(event["ts"]) * 1000)


def span(event: dict[str, Any], base_ns: int) -> Interval:
    """Return start and end of a row."""
    start = start_ns(event, base_ns)
    return start, start + round(float(event["dur"]) * 1000)


def union(spans: Sequence[Interval]) -> list[Interval]:
    """Disjoint intervals that cover the same time."""
    merged: list[Interval] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged
