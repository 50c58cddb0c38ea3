"""Aggregates one run into the values that stand for it in `summary.json`, and compares it with its own baselines.

Takes a `Run` and gives its `DatasetEntry`. *Baselines*: where a record has steps of the phases `compute_only` and
`comm_only` behind its training (R10), `overlap_efficiency` (the share of the possible saving) and `compute_slowdown`
(what overlapping cost), or why each is null.

Must not: pool warm-up with steady state (W21), mix phases, form a ratio of anything but the milliseconds of the record,
or hold more than a few columns of the run in memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from aorta.analysis.collective_metrics import CollectiveMetrics, collective_metrics, with_open_starts
from aorta.analysis.dataframes import STEP_MS, metric_names, null_reasons, step_column
from aorta.analysis.devices import DeviceSamples, devices_entry, samples_of
from aorta.analysis.pace import MOST_UNDECIDED, OF_EVERY_STEP, Pace, cutoff_entry
from aorta.documents import ABSENT
from aorta.documents.dataset import DatasetEntry, Ends, PhaseTimes, SamplingFacts, SourceFacts, Statistics, StepCounts
from aorta.documents.metrics import HOST_BOUND, JOB_STEP, RATIO_PARTS, in_order
from aorta.documents.statistics import describe, median_interval, unknown
from aorta.read.exposed import exposed_of
from aorta.read.frames import PHASES, Bools, Exposed, Floats, Ints, Steps
from aorta.read.run import ExposedSums, Run
from aorta.records.schema import Phase
from aorta.timeline.overlap import NS_PER_MS

NOTHING_USED: Final = "no step is left after warm-up"
NOTHING_RECORDED: Final = (
    "0 steps recorded: recording.step() was not called, or, under aorta record, no optimizer step was seen"
)
NO_RANK: Final = "no rank is known: which steps belong to one job step is not known either"
NO_PIPELINE: Final = "the record has no pipeline of stages"
NO_PIPELINE_METRICS: Final = frozenset({"bubble_ms", "bubble_share"})
_MEANS: Final = {
    "mean_loss": "loss",
    "mean_overlap_ms": "compute_comm_ms",
    "mean_compute_ms": "compute_ms",
    "mean_allreduce_overlap_ms": "compute_allreduce_ms",
    "mean_reducescatter_overlap_ms": "compute_reducescatter_ms",
}
"""Keys of the first AORTA, kept for those who read them: means over the rank-steps used."""


@dataclass(frozen=True)
class LabelledRun:
    """A labelled run and its tables."""

    label: str
    run: Run

    def column(self, name: str) -> npt.NDArray[Any]:
        """Return a column of `dataframes.steps_frame` over the rank-steps that aggregates include."""
        return step_column(self.run, name)[self.used]

    @cached_property
    def metrics(self) -> list[str]:
        """Names of the metrics that any step has."""
        return metric_names(self.run)

    @cached_property
    def device_samples(self) -> DeviceSamples:
        """The samples of all ranks' devices."""
        return samples_of(self.run)

    @property
    def used(self) -> Bools:
        """For each rank-step, whether aggregates include it."""
        return self.run.steps.used

    @cached_property
    def global_steps(self) -> Ints:
        """The global steps that aggregates include, in order."""
        return np.unique(self.run.steps.global_step[self.used])

    @cached_property
    def pace(self) -> Pace:
        """Which steps each metric is described over."""
        return Pace(self.run)

    def values(self, name: str) -> npt.NDArray[np.float64]:
        """Return a metric over the rank-steps that aggregates include; all NaN where it is not described over them."""
        values = np.asarray(self.column(name), np.float64)
        basis = self.pace.basis(name)
        own = basis.source is not None and bool(basis.chosen[self.used].all())
        return values if own else np.full_like(values, np.nan)

    def described(self, name: str, column: str | None = None) -> npt.NDArray[Any]:
        """Return a metric, or another `column`, over the rank-steps that the metric is described over; empty where
        neither marks nor kernels give a reliable value.
        """
        basis = self.pace.basis(name)
        rows = np.asarray(step_column(self.run, column or name))
        return rows[basis.chosen] if basis.source is not None else rows[:0]

    @cached_property
    def collectives(self) -> CollectiveMetrics:
        """Metrics that require matching collectives across ranks."""
        measured, basis = collective_metrics(self.run), self.pace.basis("comm_ms")
        return measured if basis.source == "marks" else with_open_starts(measured)

    @cached_property
    def exposed(self) -> list[tuple[Exposed, Mapping[int, ExposedSums]]]:
        """The exposed communication with the sums of its ranks: as it was read with the steps, or rank by rank, made of
        their details.

        Raises:
            InputError: a record cannot be read again.
        """
        run, ranks = self.run, self.run.ranks
        if run.exposed is not None:
            sums = {rank: tables.exposed_sums for rank, tables in ranks.items() if tables.exposed_sums is not None}
            return [(run.exposed, sums)]
        parts = list[tuple[Exposed, Mapping[int, ExposedSums]]]()
        for (rank, tables), first in zip(ranks.items(), run.first_row[:-1].tolist(), strict=True):
            spans = tables.details.spans(np.arange(len(tables.steps)))
            pieces, of_rank = exposed_of(tables.steps, tables.collectives, spans)
            parts.append((replace(pieces, row=pieces.row + np.int32(first)), {rank: of_rank}))
        return parts


def job_steps(dataset: LabelledRun, ranks: Collection[int], *, observed: bool = False) -> tuple[Floats, Ints]:
    """Return job step times in ms and their global steps, ascending: the maximum over `ranks`, for the steps that all
    of them have and whose windows are known. `observed`: without those that were passed over.
    """
    run = dataset.run
    chosen = (dataset.used if observed else run.steps.timed) & np.isin(step_column(run, "rank"), list(ranks))
    steps, index, count = np.unique(run.steps.global_step[chosen], return_inverse=True, return_counts=True)
    times_ms = np.zeros(len(steps))
    with np.errstate(invalid="ignore"):  # NaN, where a window is not known, stays
        np.maximum.at(times_ms, index, step_column(run, STEP_MS)[chosen])
    everywhere = (count == len(ranks)) & ~np.isnan(times_ms)
    return times_ms[everywhere], steps[everywhere]


def aggregate(dataset: LabelledRun, *, matched: bool = True) -> DatasetEntry:
    """Return the entry of one dataset in the summary, but for its gains (`what_if`). Without a usable step it has
    `count` 0, what was read, and why nothing was used.

    Args:
        matched: with what needs collectives matched across ranks.
    """
    run = dataset.run
    shared = ("run_id", "label", "attempt", "platform", "backend", "parallel", "timer", "start_step")
    entry = DatasetEntry(
        count=int(dataset.used.sum()),
        source=SourceFacts(
            path=run.location,
            **{name: getattr(run.source, name) for name in (*shared, "instrument_mode", "manifest_hash")},
            world_size=run.source.world_size or None,
            hosts=sorted({host for tables in run.ranks.values() if (host := tables.source.host) is not None}),
        ),
        health=run.health,
        steps=_counts(dataset),
        devices=devices_entry(run, dataset.device_samples),
        what_if=ABSENT,
    )
    if run.traces is not None:
        entry.traces = run.traces
    if run.steps.sampled:
        entry.sampling = _sampling(dataset)
    if not entry.count:
        entry.reason = NOTHING_USED if len(dataset.used) else NOTHING_RECORDED
        return entry
    if matched:
        entry.collectives = dataset.collectives.collectives
    entry.metrics = metrics_of(dataset)
    entry.stall_cutoff, entry.pace = cutoff_entry(run), dataset.pace.entry()
    if entry.few_steps:
        for described in entry.metrics.values():
            described.value = described.over_all
    entry.null_reasons = {}
    for key, column in _MEANS.items():
        values = np.asarray(dataset.described(column), np.float64)
        values = values[~np.isnan(values)]
        setattr(entry, key, float(values.mean()) if len(values) else None)
        if not len(values):
            entry.null_reasons[key] = dataset.pace.basis(column).reason or f"{column} is unknown in every step"
    ratio = entry.metrics.get("overlap_ratio")
    entry.overlap_ratio = None if ratio is None else ratio.median
    if entry.overlap_ratio is None:
        entry.null_reasons["overlap_ratio"] = "not in the record" if ratio is None else str(ratio.reason)
    return entry


def _sampling(dataset: LabelledRun) -> SamplingFacts:
    run, timed = dataset.run, dataset.run.steps.timed
    drawn = timed & (run.steps.drawn > 0)
    own_ms, step_ms = (np.asarray(step_column(run, name), np.float64)[timed] for name in ("aorta_ms", STEP_MS))
    known, observed = ~(np.isnan(own_ms) | np.isnan(step_ms)), run.steps.drawn[timed] > 0
    # By medians: where the thread that trains has to wait for a core within AORTA's work, that is not what it costs.
    costs_ms = [
        float(np.median(each)) * len(each) for mask in (observed, ~observed) if len(each := own_ms[known & mask])
    ]
    return SamplingFacts(
        asked=str(run.source.every),
        every=int(run.steps.drawn[drawn].max()) if drawn.any() else None,
        steps_drawn=len(np.unique(run.steps.global_step[drawn & dataset.used])),
        steps=len(np.unique(run.steps.global_step[timed])),
        known_share=sum(costs_ms) / (float(np.median(step_ms[known])) * int(known.sum())) if known.any() else None,
    )


def _counts(dataset: LabelledRun) -> StepCounts:
    read, used = len(dataset.used), int(dataset.used.sum())
    warm = int(np.count_nonzero(dataset.run.steps.warmup))
    not_drawn = int(np.count_nonzero(dataset.run.steps.timed & ~dataset.used))
    ranks = dataset.run.ranks.values()
    isolated = Counter(PHASES[code] for tables in ranks for code in tables.isolated.phase.tolist())
    stated = {steps for tables in ranks if (steps := tables.source.warmup_steps) is not None}
    warmups = " or ".join(map(str, sorted(stated)))
    frame = dataset.run.steps
    unclear = Counter[str]()
    for index, count in zip(*np.unique(frame.reason[dataset.used], return_counts=True), strict=True):
        if (why := frame.reasons[index].get("boundary")) is not None:
            unclear[why] += int(count)
    rule = f"the first {warmups} of the run, as its headers say" if stated else "a trace flags none"
    lost = np.array([reasons.get("loss", "").startswith("was ") for reasons in frame.reasons], bool)
    not_finite = frame.global_step[lost[frame.reason]] if lost.any() else ()
    return StepCounts(
        rank_steps_read=read,
        rank_steps_used=used,
        rank_steps_left_out_as_warmup=warm,
        rank_steps_left_out_as_calibration=read - used - warm - not_drawn,
        rank_steps_not_drawn=not_drawn,
        global_steps_used=len(dataset.global_steps),
        ranks_used=int((np.unique(dataset.column("rank")) >= 0).sum()),
        isolated_rank_steps=dict(sorted(isolated.items())),
        unclear_rank_steps=dict(unclear.most_common()),
        first_loss_not_finite=min(map(int, not_finite), default=None),
        warmup_rule=f"steps flagged warmup in the record are left out (W21): {rule}",
    )


def metrics_of(dataset: LabelledRun, *, by_rank: bool = True) -> dict[str, Statistics]:
    """Return every metric of a run over the steps that it is described over.

    Args:
        by_rank: with the medians of the ranks.
    """
    entries = {name: _described(dataset, name, by_rank=by_rank) for name in dataset.metrics}
    for ratio, (part_name, whole_name) in RATIO_PARTS.items():
        if ratio not in entries:
            continue
        # Of the rank-steps where both parts are known; long steps weigh more.
        part, whole = (np.asarray(dataset.described(ratio, name), np.float64) for name in (part_name, whole_name))
        known = ~(np.isnan(part) | np.isnan(whole))
        total = float(whole[known].sum())
        entries[ratio].ratio_of_sums = float(part[known].sum()) / total if total else None
        why = dataset.pace.basis(ratio).reason or f"{whole_name} is 0 or unknown in every step"
        entries[ratio].ratio_of_sums_reason = None if total else why
    entries |= single_values(dataset.run)
    entries |= {name: unknown(NO_PIPELINE) for name in NO_PIPELINE_METRICS - entries.keys()}
    times, _, reason = job_step_times(dataset)
    entries[JOB_STEP] = describe(times) if reason is None else unknown(reason)
    return {name: entries[name] for name in in_order(set(entries))}


def _described(dataset: LabelledRun, name: str, *, by_rank: bool) -> Statistics:
    basis = dataset.pace.basis(name)
    if basis.source is None:
        entry = describe([], [] if by_rank else None, {str(basis.reason): int(basis.chosen.sum())})
        entry.nulls = int(basis.chosen.sum())
    else:
        reasons = null_reasons(dataset.run, name, basis.chosen)
        values = dataset.described(name)
        entry = describe(values, dataset.described(name, "rank") if by_rank else None, reasons)
        if dataset.run.steps.sampled and name not in OF_EVERY_STEP:
            known = ~np.isnan(values)
            ends = median_interval(values[known], dataset.described(name, "global_step")[known])
            entry.interval = None if ends is None else Ends(*ends)
    if basis.source is None or dataset.pace.known:
        entry.source, entry.bounds = basis.source, None if basis.bounds is None else Ends(*basis.bounds)
    return entry


def job_step_times(dataset: LabelledRun) -> tuple[Floats, Ints, str | None]:
    """Return the times of the job steps in ms, the global step of each, and why there are none, or None."""
    ranks = dataset.run.health.ranks_read
    reason = _missing_ranks(dataset.run) or (None if ranks else NO_RANK)
    if reason is not None:
        return np.empty(0), np.empty(0, np.int64), reason
    times, steps = job_steps(dataset, ranks)
    unknown_lengths = null_reasons(dataset.run, "window_ms")
    return times, steps, None if len(times) else next(iter(unknown_lengths), "no global step is on all ranks")


def _missing_ranks(run: Run) -> str | None:
    missing, world_size = len(run.health.ranks_missing), run.health.world_size
    return f"{missing} of {world_size} ranks are missing; the slowest may be among them" if missing else None


LEAST_SHARE: Final = 0.02
"""The shorter of Tc and Tm must be at least this fraction of T; below it the quotient reflects noise rather than
overlap (docs/dev/measuring.md, section 1).
"""
NO_COMPUTE: Final = "computation was not seen"


class _NullError(Exception):
    """A metric is null; the message says why."""


def single_values(run: Run) -> dict[str, Statistics]:
    """Return the run-level metrics."""
    values = {}
    for name, describe_run in _OF_RUNS.items():
        try:
            if not any(len(tables.isolated) for tables in run.ranks.values()):
                raise _NullError("no isolated baseline in this run")
            if (missing := _missing_ranks(run)) is not None:
                raise _NullError(missing)
            values[name] = describe_run(run)
        except _NullError as why:
            values[name] = unknown(str(why))
    return values


def _overlap_efficiency(run: Run) -> Statistics:
    """Return `(Tc + Tm - T) / min(Tc, Tm)`, where T is training, Tc computation alone and Tm communication alone.

    All are wall times of whole steps (`PhaseTimes`).
    """
    if not len(run.collectives):
        raise _NullError("no collective in a step: there is no communication to run alone")
    phases: tuple[Phase, ...] = ("train", "compute_only", "comm_only")
    together, compute, comm = (
        max(float(np.median(_steps_of(run, rank, phase).length_ns)) / NS_PER_MS for rank in run.ranks)
        for phase in phases
    )
    shorter = min(compute, comm)
    if shorter < LEAST_SHARE * together or shorter <= 0:
        efficiency = unknown("the shorter of Tc and Tm is below 2 % of T")
    else:
        efficiency = describe([(compute + comm - together) / shorter])
    efficiency.phase_times = PhaseTimes(together, compute, comm)
    return efficiency


def _compute_slowdown(run: Run) -> Statistics:
    """Return overlapped compute busy time / isolated compute busy time - 1, one value per rank, from medians over its
    steps.
    """
    basis = Pace(run).basis("compute_ms")
    if basis.source != "marks":
        alone = "computation is known of the steps measured by the profiler's kernels alone, and of no baseline"
        raise _NullError(basis.reason or alone)
    values = []
    for rank in run.ranks:
        overlapped, isolated = (_busy_ms(_steps_of(run, rank, phase)) for phase in ("train", "compute_only"))
        if isolated <= 0:
            raise _NullError(f"rank {rank} computed nothing in its compute_only steps")
        values.append(overlapped / isolated - 1)
    return describe(values, list(run.ranks))


_OF_RUNS: Final[Mapping[str, Callable[[Run], Statistics]]] = {
    "overlap_efficiency": _overlap_efficiency,
    "compute_slowdown": _compute_slowdown,
}
"""Run-level metrics. A new one is registered here."""


def _busy_ms(steps: Steps) -> float:
    """Return the median of the known values over steps of one rank. A step in which not all collectives were
    seen does not count: its computation contains stalls on the unseen ones, so it is an upper bound and no busy time.

    Raises:
        _NullError: no step has a value; the message is the reason of the last step.
    """
    left_open = [reasons.get("compute_ms") == HOST_BOUND for reasons in steps.reasons]
    if np.mean(np.array(left_open, bool)[steps.reason]) > MOST_UNDECIDED:
        raise _NullError(HOST_BOUND)
    compute_ms = steps.column("compute_ms")
    complete = np.array([coverage.complete for coverage in steps.coverages] or [False], bool)[steps.coverage]
    known = compute_ms[complete & ~np.isnan(compute_ms)]
    if len(known):
        return float(np.median(known))
    if np.isnan(compute_ms[-1]):
        why = steps.reasons[steps.reason[-1]].get("compute_ms", "the record gives no reason")
        raise _NullError(f"{NO_COMPUTE}: {why}")
    coverage = steps.coverages[steps.coverage[-1]]
    raise _NullError(f"{NO_COMPUTE} apart from stalls: {coverage.reason or 'coverage is incomplete'}")


def _steps_of(run: Run, rank: int, phase: Phase) -> Steps:
    """Return the steps of one rank in one phase, without warm-up (W21).

    Raises:
        _NullError: no step of that phase is left.
    """
    tables = run.ranks[rank]
    steps, used = tables.steps, tables.steps.used
    if phase != "train":
        steps = tables.isolated
        used = ~steps.warmup & (steps.phase == PHASES.index(phase))
    if not used.any():
        raise _NullError(f"rank {rank} has no {phase} step after warm-up")
    return steps.take(used)
