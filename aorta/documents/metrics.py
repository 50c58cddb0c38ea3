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
HOST_LEAD: Final = "host_lead_ms"
UNDECIDED: Final = "undecided_share"
OWN_TIME: Final = "aorta_ms"
RestsOn: TypeAlias = Literal["compute", "compute of peers", "nothing"]


@dataclass(frozen=True)
class Metric:
    """One metric, and how it is shown.

    Attributes:
        better: None where neither direction is better.
        definition: after docs/dev/measuring.md, section 1.
        title: what sentences and cards call it; empty: its name.
        first: shown on cards and at the top of the terminal's tables, in the order of this module.
        shown: in tables; otherwise in `summary.json` alone.
        rests_on: "compute": null where marks cannot say when the device computed (W28). "compute of peers": null also
            in a run of one rank, which has nobody to communicate with.
        divides: the milliseconds that a ratio divides, so that it is also computed from sums over steps.
        of_steps: a single step of a single rank can have it.
        parts, formula: of a metric that is not in the record but made of the columns of others, one element per step;
            it is null where a part is, and rests on what its parts rest on.
    """

    name: str
    unit: Unit
    better: Better | None
    definition: str
    title: str = ""
    first: bool = False
    shown: bool = True
    rests_on: RestsOn = "compute"
    divides: tuple[str, str] | None = None
    of_steps: bool = True
    parts: tuple[str, ...] = ()
    formula: Callable[..., npt.NDArray[np.float64]] | None = None

    @property
    def label(self) -> str:
        """The title, or the name without one."""
        return self.title or self.name


_STEP_METRICS: Final = (
    Metric(
        "overlap_ratio",
        "ratio",
        "higher",
        "compute_comm_ms / comm_ms: hidden share of all communication",
        title="overlap ratio",
        first=True,
        rests_on="compute of peers",
        divides=("compute_comm_ms", "comm_ms"),
    ),
    Metric("exposed_comm_ms", "ms", "lower", "comm_ms - compute_comm_ms", title="exposed communication", first=True),
    Metric(
        JOB_STEP,
        "ms",
        "lower",
        "wall time of one global step: max over ranks",
        title="step time",
        first=True,
        of_steps=False,
    ),
    Metric(
        "overlap_over_compute",
        "ratio",
        None,
        "compute_comm_ms / compute_ms: share of compute with communication",
        shown=False,  # as the share of compute with communication it invites to be read as `overlap_ratio`
        rests_on="compute of peers",
        divides=("compute_comm_ms", "compute_ms"),
    ),
    Metric(
        "exposed_share",
        "ratio",
        "lower",
        "exposed_comm_ms / window_ms: share of the step",
        divides=("exposed_comm_ms", "window_ms"),
    ),
    Metric("window_ms", "ms", "lower", "the step on one rank, start to end", rests_on="nothing"),
    Metric("compute_ms", "ms", "lower", "union of compute, stalls taken out (R5)", title="computation"),
    Metric("comm_ms", "ms", None, "union of all collectives, waiting for peers included (W5)", rests_on="nothing"),
    Metric("compute_comm_ms", "ms", None, "hidden communication: intersection of comm and compute"),
    Metric("compute_stall_ms", "ms", "lower", "the compute stream (CPU: the training thread) blocked on a collective"),
    Metric("copy_ms", "ms", None, "union of memory copies (in traces: and fills)", rests_on="nothing"),
    *(
        Metric(f"{direction}_gb_per_s", "GB/s", "higher", f"{copies} / union of the copies{more}", rests_on="nothing")
        for direction, copies, more in (
            ("h2d", "bytes from host to device", ", GB = 1e9 bytes"),
            ("d2h", "bytes from device to host", ""),
            ("d2d", "bytes copied within a device (each once)", ""),
            ("p2p", "bytes from one device to another", ""),
        )
    ),
    Metric(
        "aux_ms",
        "ms",
        None,
        "union of optimizer, clipping, loss read, data",
        title="work outside blocks (optimizer, clipping, data)",
        rests_on="nothing",
    ),
    Metric(
        HOST_LEAD,
        "ms",
        None,
        "device time less host time of a block's end mark: how far the host is ahead",
        rests_on="nothing",
    ),
    Metric(
        UNDECIDED,
        "ratio",
        None,
        "share of the blocks' ranges in which marks cannot say if kernels ran",
        rests_on="nothing",
    ),
    Metric(
        OWN_TIME,
        "ms",
        "lower",
        "AORTA's own work on the thread that trains, in the step and behind it: at least what it costs a step",
        title="AORTA's own time",
        rests_on="nothing",
    ),
    Metric("idle_ms", "ms", "lower", "window minus the union of everything", title="idle time"),
    Metric(
        "idle_share",
        "ratio",
        None,
        "idle_ms / window_ms: share of the step in which nothing ran",
        parts=("idle_ms", "window_ms"),
        formula=lambda idle_ms, window_ms: idle_ms / window_ms,
    ),
    Metric(
        "bubble_share",
        "ratio",
        "lower",
        "bubble_ms / pipeline_ms: share of the time in the pipeline",
        divides=("bubble_ms", "pipeline_ms"),
    ),
    Metric("bubble_ms", "ms", "lower", "in the pipeline: waiting for another stage, without computing"),
    Metric(
        "pipeline_ms",
        "ms",
        "lower",
        "micro-batches in the pipeline, and the exchange of its gradient norm",
        rests_on="nothing",
    ),
    Metric(
        "overlap_efficiency",
        "ratio",
        "higher",
        "(Tc + Tm - T) / min(Tc, Tm), wall times of whole steps: T together, Tc compute only, Tm communication only",
        of_steps=False,
    ),
    Metric(
        "compute_slowdown",
        "ratio",
        "lower",
        "overlapped / isolated compute busy time - 1, from medians over steps",
        of_steps=False,
    ),
)
_KIND_METRICS: Final = tuple(
    metric
    for kind in KINDS
    for metric in (
        Metric(f"{kind}_ms", "ms", None, f"union of {kind}, waiting for peers included (W5)", rests_on="nothing"),
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

_OF_RUNS: Final = (*_STEP_METRICS, *_KIND_METRICS)

STEP_METRIC_NAMES: Final = tuple(metric.name for metric in _OF_RUNS)
"""Order of step metrics in summaries and tables."""
METRICS_OF_STEPS: Final = tuple(metric.name for metric in _OF_RUNS if metric.of_steps)
"""Those that a single step on a single rank can have."""
SHOWN_FIRST: Final = tuple(metric.name for metric in _OF_RUNS if metric.first)
MADE_OF_OTHERS: Final = {metric.name: metric for metric in _OF_RUNS if metric.formula is not None}
RATIO_PARTS: Final = {metric.name: metric.divides for metric in _OF_RUNS if metric.divides is not None}
"""Ratio -> the milliseconds it divides."""
NOT_SHOWN: Final = frozenset(metric.name for metric in _OF_RUNS if not metric.shown)
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
