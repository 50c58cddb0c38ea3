"""Lists the metrics of a report: unit, which direction is better, and the definition with its denominator.

Also defines algorithm and bus bandwidth, for records and traces alike: bytes and transfer times of collectives of one
kind, size and group size give GB/s (GB = 1e9 bytes), or why there is none. Must not compute any other metric
(`aorta.timeline` measures windows), take the world size for a group's (W19), or load numpy or pandas: help loads this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from aorta.timeline.classes import KINDS

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import numpy.typing as npt

Better: TypeAlias = Literal["lower", "higher"]
Unit: TypeAlias = Literal["ms", "ratio", "GB/s"]

UNKNOWN: Final = "unknown"
"""Stands for a fact that the source does not state."""
HOST_BOUND: Final = "host-bound: the device waits for launches, and marks alone cannot say when its kernels ran"
"""Why a metric that rests on when the device computed is null (W28)."""
JOB_STEP: Final = "job_step_ms"
RATIO_PARTS: Final[dict[str, tuple[str, str]]] = {
    "overlap_ratio": ("compute_comm_ms", "comm_ms"),
    "overlap_over_compute": ("compute_comm_ms", "compute_ms"),
    "exposed_share": ("exposed_comm_ms", "window_ms"),
    "bubble_share": ("bubble_ms", "pipeline_ms"),
}
"""Ratio -> the milliseconds it divides, so that it can also be computed from sums over steps."""


@dataclass(frozen=True)
class Metric:
    """One metric. `better` is None where neither direction is better; `definition` follows docs/dev/measuring.md,
    section 1. A metric with a `formula` is not in the record: it is made of the columns of its `parts`, an element a
    step, and null where one of them is.
    """

    name: str
    unit: Unit
    better: Better | None
    definition: str
    parts: tuple[str, ...] = ()
    formula: Callable[..., npt.NDArray[np.float64]] | None = None


_STEP_METRICS: Final = (
    Metric(JOB_STEP, "ms", "lower", "wall time of one global step: max over ranks"),
    Metric("overlap_ratio", "ratio", "higher", "compute_comm_ms / comm_ms: hidden share of all communication"),
    Metric("overlap_over_compute", "ratio", None, "compute_comm_ms / compute_ms: share of compute with communication"),
    Metric("exposed_share", "ratio", "lower", "exposed_comm_ms / window_ms: share of the step"),
    Metric("window_ms", "ms", "lower", "the step on one rank, start to end"),
    Metric("compute_ms", "ms", "lower", "union of compute, stalls taken out (R5)"),
    Metric("comm_ms", "ms", None, "union of all collectives, waiting for peers included (W5)"),
    Metric("compute_comm_ms", "ms", None, "hidden communication: intersection of comm and compute"),
    Metric("exposed_comm_ms", "ms", "lower", "comm_ms - compute_comm_ms"),
    Metric("compute_stall_ms", "ms", "lower", "the compute stream (CPU: the training thread) blocked on a collective"),
    Metric("copy_ms", "ms", None, "union of memory copies (in traces: and fills)"),
    Metric("h2d_gb_per_s", "GB/s", "higher", "bytes from host to device / union of the copies, GB = 1e9 bytes"),
    Metric("d2h_gb_per_s", "GB/s", "higher", "bytes from device to host / union of the copies"),
    Metric("d2d_gb_per_s", "GB/s", "higher", "bytes copied within a device (each once) / union of the copies"),
    Metric("p2p_gb_per_s", "GB/s", "higher", "bytes from one device to another / union of the copies"),
    Metric("aux_ms", "ms", None, "union of optimizer, clipping, loss read, data"),
    Metric("host_lead_ms", "ms", None, "device time less host time of a block's end mark: how far the host is ahead"),
    Metric("undecided_share", "ratio", None, "share of the blocks' ranges in which marks cannot say if kernels ran"),
    Metric("idle_ms", "ms", "lower", "window minus the union of everything"),
    Metric(
        "idle_share",
        "ratio",
        None,
        "idle_ms / window_ms: share of the step in which nothing ran",
        parts=("idle_ms", "window_ms"),
        formula=lambda idle_ms, window_ms: idle_ms / window_ms,
    ),
    Metric("bubble_share", "ratio", "lower", "bubble_ms / pipeline_ms: share of the time in the pipeline"),
    Metric("bubble_ms", "ms", "lower", "in the pipeline: waiting for another stage, without computing"),
    Metric("pipeline_ms", "ms", "lower", "micro-batches in the pipeline, and the exchange of its gradient norm"),
    Metric(
        "overlap_efficiency",
        "ratio",
        "higher",
        "(Tc + Tm - T) / min(Tc, Tm), wall times of whole steps: T together, Tc compute only, Tm communication only",
    ),
    Metric(
        "compute_slowdown", "ratio", "lower", "overlapped / isolated compute busy time - 1, from medians over steps"
    ),
)
_KIND_METRICS: Final = tuple(
    metric
    for kind in KINDS
    for metric in (
        Metric(f"{kind}_ms", "ms", None, f"union of {kind}, waiting for peers included (W5)"),
        Metric(f"compute_{kind}_ms", "ms", None, f"hidden part of {kind}: its intersection with compute"),
        Metric(f"exposed_{kind}_ms", "ms", "lower", f"{kind}_ms - compute_{kind}_ms"),
    )
)
_COLLECTIVE_METRICS: Final = (
    Metric("duration_ms", "ms", None, "start to end on one rank, waiting for peers included (W5)"),
    Metric("queued_ms", "ms", "lower", "issue to start: queued behind the collective before it"),
    Metric("transfer_ms", "ms", "lower", "min over the ranks of the group of the collective's duration"),
    Metric("wait_ms", "ms", "lower", "duration_ms - transfer_ms on one rank: waiting for peers"),
    Metric(
        "arrival_skew_ms", "ms", "lower", "largest minus smallest duration over the ranks: last to arrive minus first"
    ),
    Metric("arrival_skew_bound_ms", "ms", None, "largest duration over the ranks: the arrival skew is at most this"),
    Metric("algbw_gb_per_s", "GB/s", "higher", "bytes / transfer_ms, GB = 1e9 bytes"),
    Metric("busbw_gb_per_s", "GB/s", "higher", "algbw x 2(n-1)/n all-reduce, (n-1)/n others; n = group size (W19)"),
)
_METRICS: Final = {metric.name: metric for metric in (*_STEP_METRICS, *_KIND_METRICS, *_COLLECTIVE_METRICS)}

STEP_METRIC_NAMES: Final = tuple(metric.name for metric in (*_STEP_METRICS, *_KIND_METRICS))
"""Order of step metrics in summaries and tables."""
NOT_OF_STEPS: Final = (JOB_STEP, "overlap_efficiency", "compute_slowdown")
METRICS_OF_STEPS: Final = tuple(name for name in STEP_METRIC_NAMES if name not in NOT_OF_STEPS)
"""Those that a single step on a single rank can have."""
MADE_OF_OTHERS: Final = {metric.name: metric for metric in _STEP_METRICS if metric.formula is not None}
NOT_SHOWN: Final = frozenset({"overlap_over_compute"})
"""In `summary.json` alone: as the share of compute with communication it invites to be read as `overlap_ratio`."""
COLLECTIVE_METRIC_NAMES: Final = tuple(metric.name for metric in _COLLECTIVE_METRICS)


def metric_named(name: str) -> Metric:
    """Return the metric of that name. One that a newer record added has no better direction, and its unit follows from
    its suffix.
    """
    known = _METRICS.get(name)
    return known or Metric(name, "ms" if name.endswith("_ms") else "ratio", None, "not described by this AORTA")


def in_order(names: set[str]) -> list[str]:
    """Return known step metrics first, in the order of this module, then the rest by name."""
    known = [name for name in STEP_METRIC_NAMES if name in names]
    return known + sorted(names.difference(known))


BUSBW_FACTOR: Final = {"allreduce": 2.0, "reducescatter": 1.0, "allgather": 1.0, "alltoall": 1.0}
"""busbw = algbw x factor x (n - 1) / n (docs/dev/measuring.md, section 1; nccl-tests, doc/PERFORMANCE.md)."""

NO_BYTES: Final = "it carries no bytes"
NO_SIZE: Final = "its size is not known"
"""Traces of other tools may not state the size; it is then -1 in a frame, and null in a summary."""
GROUP_OF_ONE: Final = "a group of one rank moves nothing"
TOO_SHORT: Final = "its transfer is too short for the clock"


def no_bandwidth(size_bytes: int | None, ranks: int | None) -> str | None:
    """Return why collectives of this size in a group of this size have no bandwidth; None where they have one."""
    if size_bytes is None:
        return NO_SIZE
    if size_bytes == 0:
        return NO_BYTES
    return GROUP_OF_ONE if ranks == 1 else None


def algbw_gb_per_s(size_bytes: int, transfer_ns: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Divide bytes by transfer time, where that is above 0 (`TOO_SHORT`). Bytes per ns are GB per second."""
    return size_bytes / transfer_ns[transfer_ns > 0]


def busbw_factor(kind: str, ranks: int | None) -> float | None:
    """Return bus bandwidth over algorithm bandwidth; None for a kind without it, or a group of unknown size."""
    factor = BUSBW_FACTOR.get(kind)
    return None if factor is None or not ranks else factor * (ranks - 1) / ranks
