"""Decides how far the numbers of a run can be trusted, and warns where they cannot.

A device that waits for its host idles between the marks on its streams, and its marks then bound a metric and do not
give it (docs/dev/metric-rules.md, "Where the host sets the pace"). One rule for every reader of a run:

    Pace(run).basis("overlap_ratio").source  # "marks": steps after warm-up, nearly all of them decided
                                             # "kernels": the steps that a calibration measured
                                             # None: neither; `bounds` has what the marks allow

Decided steps are never mixed with undecided ones, of which they would be a biased choice (docs/dev/measuring.md, W29).

What is wrong with the runs of a report themselves comes first, in short (`alerts`): every report says it at its top.

Must not compute or change a metric, or apply the rule of the cut-off (`aorta.records.ring_steps` does, when a line
is made).
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Final

import numpy as np

from aorta.documents import known
from aorta.documents.comparison import Comparison
from aorta.documents.dataset import CalibrationFacts, CutoffFacts, DatasetEntry, MeasuredFrom, PaceFacts
from aorta.documents.formatting import TEXT, first_upper, rough_percent
from aorta.documents.metrics import HOST_BOUND, HOST_LEAD, MADE_OF_OTHERS, RATIO_PARTS, UNDECIDED, metric_named
from aorta.documents.statistics import median_or_none
from aorta.read.frames import Bools
from aorta.read.health import listed
from aorta.read.run import HOST_TIMER, Run
from aorta.records.schema import STALL_CUTOFF_NS, Calibration
from aorta.timeline.overlap import AGREEMENT, NS_PER_MS

MOST_UNDECIDED: Final = 0.05
"""At most 5 % undecided steps, or no value: so few hardly move a median."""
PROFILER_COST: Final = 0.05
"""From this on, steps that a profiler made longer are said not to be like the others."""
CONTRADICTED: Final = "kernels and marks of the same steps disagree: marks alone cannot say when kernels ran"
DRAWN: Final = (
    "host-bound: computation is drawn as the blocks' ranges, in which the device may have waited for launches"
)
ONE_RANK: Final = "one rank: it has no other rank to communicate with, so there is nothing to hide"
_DECIDES: Final = ("overlap_ratio", "compute_ms")
"""Where marks leave one of these open, the host sets the pace."""


FEW_STEPS: Final = 20
"""Up to this, the 5th and the 95th percentile are the smallest and the largest value, or lie between these and the next
(numpy's linear interpolation: position 0.05 (n - 1) is below 1 up to n = 20)."""
_SHARES: Final = ("overlap_ratio", "exposed_share", "overlap_efficiency")
"""Metrics that are shares of a whole, and so lie between 0 and 1 where their parts fit together."""


_HAPPENED: Final = {
    "dead": "{} died",
    "stopped": "{} stopped by a signal or debugger",
    "slow": "{} slow, others wait",
    "signature_mismatch": "Hung: ranks called different collectives",
    "order_swapped": "Hung: collectives in different orders",
    "stuck_outside": "{} hung outside collectives",
    "rank_did_not_join": "Hung: {} did not join a collective",
    "stuck_inside": "Hung inside a collective",
    "cannot_decide": "Hung, cause unknown",
}
"""What happened, by the kind of an autopsy's verdict; `{}`: the accused."""


@dataclass(frozen=True)
class Basis:
    """What a metric of a run is described over.

    Attributes:
        source: what the values were measured from; None where neither marks nor kernels give a reliable one.
        chosen: the rank-steps, rows of `Run.steps`; those after warm-up where `source` is None.
        bounds: at least and at most, medians over these steps, where `source` is None and marks say as much.
        reason: why `source` is None.
    """

    source: MeasuredFrom | None
    chosen: Bools
    bounds: tuple[float, float] | None = None
    reason: str | None = None


class Pace:
    """How far the timing marks of one run can be trusted."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._bases: dict[str, Basis] = {}

    def basis(self, name: str) -> Basis:
        """Return the steps over which a metric is described: the rule."""
        if name not in self._bases:
            self._bases[name] = self._basis(name)
        return self._bases[name]

    def _basis(self, name: str) -> Basis:
        steps, used = self._run.steps, self._run.steps.used
        # A trace by itself may be one rank of many that it does not name: only a record says that it is alone.
        if self._run.health.is_alone and metric_named(name).rests_on == "compute of peers":
            return Basis(None, used, None, ONE_RANK)
        if used.any() and steps.by_kernels[used].all():
            return Basis("kernels", used)
        decided = self.undecided(name) <= MOST_UNDECIDED
        if decided and not (self.contradicted and self._rests_on_compute(name)):
            return Basis("marks", used)
        by_kernels = self._by_kernels
        known = by_kernels & ~np.isnan(steps.column(name))
        if np.isin(list(self._run.ranks), self._run.rank_of_step[known]).all():
            return Basis("kernels", by_kernels)
        if decided:
            return Basis(None, used, None, CONTRADICTED)
        return Basis(None, used, self._bounds(name), self._why_open(name))

    def _rests_on_compute(self, name: str) -> bool:
        if name in MADE_OF_OTHERS:
            return any(map(self._rests_on_compute, MADE_OF_OTHERS[name].parts))
        return name in self._run.steps.metrics and metric_named(name).rests_on != "nothing"

    @cached_property
    def _by_kernels(self) -> Bools:
        """The steps of calibrations."""
        found: Bools = self._run.steps.by_kernels & ~self._run.steps.warmup
        return found

    def undecided(self, name: str) -> float:
        """Return the share of steps used with only bounds among those with a value or bounds; 0 without any."""
        steps = self._run.steps
        if name in MADE_OF_OTHERS:
            return max(map(self.undecided, MADE_OF_OTHERS[name].parts))
        if name not in steps.bounds:
            return 0.0
        left_open = ~np.isnan(steps.bounds[name][0][steps.used])
        known = left_open | ~np.isnan(steps.column(name)[steps.used])
        return float(left_open[known].mean()) if known.any() else 0.0

    def _bounds(self, name: str) -> tuple[float, float] | None:
        """Return medians of at least and of at most over the steps used; a decided step is both. The median of the true
        values lies between them, since each of those does. None of a metric that is made of others.
        """
        steps = self._run.steps
        if name in MADE_OF_OTHERS:
            return None
        low, high = (np.where(np.isnan(end), steps.column(name), end)[steps.used] for end in steps.bounds[name])
        known = ~np.isnan(low)
        least, most = float(np.median(low[known])), float(np.median(high[known]))
        return (least, most) if most < np.inf else None

    def _why_open(self, name: str) -> str:
        """Return why a metric has only bounds, without those of a single step (`ledger.balanced`)."""
        steps = self._run.steps
        left_open = steps.used & ~np.isnan(steps.bounds[name][0]) if name in steps.bounds else steps.used
        codes = np.unique(steps.reason[left_open]).tolist()
        said = [why for code in codes if (why := steps.reasons[code].get(name)) is not None]
        return said[0].partition(": it is ")[0] if said else HOST_BOUND

    @cached_property
    def _calibrations(self) -> list[Calibration]:
        return [each for tables in self._run.ranks.values() for each in tables.calibrations]

    @cached_property
    def contradicted(self) -> bool:
        """Whether kernels and marks of the steps of a calibration are further apart than `AGREEMENT`."""
        return any(
            abs(each.ratio_by_kernels - each.ratio_by_marks) > AGREEMENT
            for each in self._calibrations
            if each.ratio_by_kernels is not None and each.ratio_by_marks is not None
        )

    @property
    def drawn_as_ranges(self) -> bool:
        """Whether what a picture of a step shows as computation may have been idle."""
        return self.basis("compute_ms").source != "marks"

    @property
    def known(self) -> bool:
        """Whether the record tells how far its marks can be believed."""
        return self.host_bound is not None or bool(self._calibrations)

    @cached_property
    def host_bound(self) -> bool | None:
        """Whether the host sets the pace; None where the record does not tell, or there is no device to wait for it."""
        if self._median(HOST_LEAD) is None:
            return None
        return any(self.undecided(name) > MOST_UNDECIDED for name in _DECIDES)

    def _median(self, name: str) -> float | None:
        return median_or_none(self._run.steps.column(name)[self._run.steps.used])

    def entry(self) -> PaceFacts | None:
        """Return `pace` of a dataset in `summary.json`; None where the record does not tell. Of calibrations it has the
        medians over those of all ranks; without one, why no steps were measured by kernels.
        """
        if not self.known:
            return None
        lead_ms, undecided, each = self._median(HOST_LEAD), self._median(UNDECIDED), self._calibrations
        if not each:
            plans = [tables.calibration_plan for tables in self._run.ranks.values()]
            problems = [plan.problem for plan in plans if plan is not None and plan.problem is not None]
            problems += [
                f"the run ended before step {plan.first_step}, the first to measure"
                for plan in plans
                if plan is not None and plan.steps
            ]
            return PaceFacts(self.host_bound, lead_ms, undecided, None, next(iter(problems), None))
        medians = {
            name: median(values) if (values := [v for one in each if (v := getattr(one, name)) is not None]) else None
            for name in ("ratio_by_kernels", "ratio_by_marks", "window_step_ms", "other_step_ms", "setup_ms")
        }
        calibration = CalibrationFacts(
            steps=max(one.steps for one in each),
            rank_steps=int(self._by_kernels.sum()),
            problems=sorted({one.problem for one in each if one.problem is not None}),
            agree=None if medians["ratio_by_kernels"] is None else not self.contradicted,
            **medians,
        )
        return PaceFacts(self.host_bound, lead_ms, undecided, calibration, None)


def pace_notes(entry: DatasetEntry) -> Iterator[str]:
    """Yield sentences about a dataset from its entry in `summary.json`: where its host sets the pace, and effects."""
    pace = known(entry.pace)
    if pace is None:
        return
    found, ratio = pace.calibration, entry.metrics.get("overlap_ratio")
    by_kernels = ratio is not None and ratio.source == "kernels"
    if by_kernels:
        steps = TEXT.count(0 if found is None else found.steps, "step")
        shown = f"metrics with computation in them are of {steps} measured by the profiler's kernels"
    else:
        shown = "metrics with computation in them have no value, as not every rank has steps measured by kernels"
        if ratio is not None and ratio.bounds:
            shown = f"overlap_ratio is {TEXT.bounds(ratio.bounds, 'ratio')}"
        elif pace.host_bound:
            shown = "metrics with computation in them are bounds"
        if pace.no_calibration is not None:
            shown += f"; no steps were measured by kernels: {pace.no_calibration}"
        elif found is None:
            shown += "; record with instrument.calibration=3 for a number"
    if pace.host_bound:
        yield (
            f"host-bound: the host is {TEXT.quantity(pace.host_lead_ms, 'ms')} ahead of the device (median), and in "
            f"{rough_percent(pace.undecided_share or 0)} of the blocks' time marks cannot say whether kernels ran; "
            f"{shown}"
        )
    elif found is not None and found.agree is False:
        yield (
            "kernels and marks of the same steps disagree: an overlap ratio of "
            f"{TEXT.number(found.ratio_by_kernels, 'ratio')} by kernels, "
            f"{TEXT.number(found.ratio_by_marks, 'ratio')} by marks; {shown}"
        )
    if found is None:
        return
    before, within = found.other_step_ms, found.window_step_ms
    if before and within and within / before - 1 > PROFILER_COST and by_kernels:
        yield (
            f"the steps measured by kernels took {TEXT.percent(within / before - 1)} longer than the others, which "
            "the profiler did: a host-bound step of ordinary length hides more or less than they do"
        )
    for problem in found.problems:
        yield f"calibration: {problem}"


def alerts(entries: Mapping[str, DatasetEntry], comparison: Comparison | None = None) -> list[str]:
    """Return what is wrong with a report, the most serious first: ranks that hung, damage, what is missing, what makes
    the sides unlike, emulation, one rank alone, other modes. Empty where nothing is. What heads the report, that its
    only run hung or that the sides did other work, is left out.
    """
    named: dict[tuple[int, str], list[str]] = {}
    for label, entry in entries.items():
        if len(entries) > 1 and (title := autopsy_title(entry)) is not None:
            named.setdefault((_DAMAGED, title), []).append(label)
        for alert in _alerts(entry):
            named.setdefault(alert, []).append(label)
    if comparison is not None:
        for warning in comparison.warnings:
            if not any(f" {key} is " in warning for key in comparison.unlike):
                named[_UNLIKE, warning] = []
    said = []
    for (_, sentence), labels in sorted(named.items(), key=lambda each: each[0][0]):
        of_all = not labels or len(labels) == len(entries)
        said.append(sentence if of_all else f"{', '.join(labels)}: {sentence}")
    return said


_DAMAGED, _MISSING, _UNLIKE, _EMULATED, _ALONE, _MODES = range(6)


def _alerts(entry: DatasetEntry) -> Iterator[tuple[int, str]]:
    """Yield what is wrong with one run, behind how serious it is."""
    health, steps = entry.health, entry.steps
    if problems := [each for each in health.problems if "no footer" not in each]:  # the ending says it
        yield _DAMAGED, f"{TEXT.count(len(problems), 'problem')} in the records, the first: {problems[0]}"
    for ending in sorted({ending for ending in health.endings.values() if ending != "completed"}):
        ranks = [int(rank) for rank, other in health.endings.items() if other == ending]
        yield _DAMAGED, f"rank {listed(ranks)}: {ending}"
    if health.files_left_out:
        count = TEXT.count(len(health.files_left_out), "file")
        yield _DAMAGED, f"{count} left out, the first: {health.files_left_out[0].partition(';')[0]}"
    if left_out := entry.left_out:
        launches = f"{len(left_out)} of {TEXT.count(len(left_out) + entry.launches, 'launch')} left out, the first: "
        yield _DAMAGED, f"{launches}{left_out[0].path}: {left_out[0].reason}"
    if health.ranks_missing:
        missing = health.ranks_missing
        yield _MISSING, f"{len(missing)} of {health.ranks_expected} ranks missing: {listed(missing)}"
    records = steps.global_steps_used * steps.ranks_used
    if (absent := records - steps.rank_steps_used) > 0:
        are = "are" if absent > 1 else "is"
        yield _MISSING, f"{TEXT.steps_used(entry)}; {absent} of {TEXT.count(records, 'record')} {are} missing"
    for why in dict.fromkeys(gap.why for gap in health.gaps if gap.lanes):
        ranks = sorted({gap.rank for gap in health.gaps if gap.why == why and gap.rank is not None})
        yield _MISSING, f"rank {listed(ranks)}: {why}" if ranks else why
    emulated = health.emulated_fabric or {}
    if (emulated_ranks := emulated.get("ranks")) is not None:
        yield _EMULATED, f"ONE RANK OF {emulated_ranks}, EMULATED: the others are assumed to be as fast, and never late"
    if emulated:
        yield _EMULATED, "EMULATED FABRIC: communication times are those of the emulation"
    elif health.manifest_problem:
        yield _EMULATED, f"whether the network was emulated is not known: {health.manifest_problem}"
    ratio = entry.described.get("overlap_ratio")
    if ratio is not None and ratio.reason == ONE_RANK:
        yield _ALONE, "one rank: start one process per device (torchrun --standalone --nproc_per_node N ...)"
    if len(health.instrument_modes) > 1:
        yield _MODES, f"ranks used different instrument modes: {', '.join(health.instrument_modes)}"
    if health.timed_from_python:
        yield _MODES, f"collectives were timed from Python: {health.timed_from_python}"
    for note in pace_notes(entry) if entry.count else ():
        yield _MODES, note


def autopsy_notes(entry: DatasetEntry) -> list[str]:
    """Return what the autopsy of a run found, and the command that says more; empty where nothing was stuck."""
    title, found = autopsy_title(entry), known(entry.autopsy)
    if title is None or found is None:
        return []
    return [f"{title}: {found.summary}. More: aorta autopsy {shlex.quote(entry.source.path)}"]


def autopsy_title(entry: DatasetEntry) -> str | None:
    """Return what happened to a run, in a few words; None where it has no autopsy, or nothing was stuck."""
    found = known(entry.autopsy)
    if found is None or found.kind == "not_stuck":
        return None
    ranks = sorted({each.rank for each in found.culprits})
    accused = f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks) or 'some'} ranks"
    return first_upper(_HAPPENED[found.kind].format(accused))


def cautions(entry: DatasetEntry) -> list[str]:
    """Return warnings: a host that sets the pace, few steps, denominators of 0, impossible shares. A dataset without a
    usable step has none.
    """
    if not entry.count:
        return []
    found = [*pace_notes(entry)]
    steps, values = entry.steps.global_steps_used, entry.steps.rank_steps_used
    if steps <= FEW_STEPS:
        extremes = "p5 and p95 are the minimum and maximum, and " if values <= FEW_STEPS else ""
        found.append(
            f"only {TEXT.count(steps, 'step')} after warm-up: {extremes}one slow step moves a mean; record more than "
            f"{FEW_STEPS}"
        )
    if unclear := entry.steps.unclear_rank_steps:
        more = " (and other reasons)" if len(unclear) > 1 else ""
        found.append(
            f"{sum(unclear.values())} of {TEXT.count(values, 'step')} of ranks may be longer or shorter than shown, as "
            f"it is not clear where they begin or end: {next(iter(unclear))}{more}"
        )
    for name in RATIO_PARTS:
        described = entry.metrics.get(name)
        others = [] if described is None else [why for why in described.null_reasons if why != HOST_BOUND]
        if described is not None and others and described.median is not None:
            count = described.count + sum(described.null_reasons[why] for why in others)
            more = " (and other reasons)" if len(others) > 1 else ""
            found.append(
                f"{name} is known in {described.count} of {count} steps of ranks; in the others: {others[0]}{more}"
            )
    for name in _SHARES:
        described = entry.metrics.get(name)
        ends = () if described is None else (described.min, described.max)
        seen = [value for value in ends if value is not None and not 0 <= value <= 1]
        if seen:
            shown = " and ".join(TEXT.number(value, "ratio") for value in dict.fromkeys(seen))
            found.append(
                f"{name} is {shown}, outside 0 to 100 %: its parts were measured in different steps and do not add up; "
                "record more steps"
            )
    return found


def cutoffs_ns(run: Run) -> list[int]:
    """Return the cut-off of each rank that has one, or had the one of its time; empty for accelerators and traces."""
    sources = [tables.source for tables in run.ranks.values()]
    return [
        STALL_CUTOFF_NS if source.stall_cutoff is None else source.stall_cutoff.cutoff_ns
        for source in sources
        if source.stall_cutoff is not None or (source.timer == HOST_TIMER and source.instrument_mode != "off")
    ]


def cutoff_entry(run: Run) -> CutoffFacts | None:
    """Return the stall cut-offs of a run's ranks, and where they come from; None where none applies."""
    found = cutoffs_ns(run)
    if not found:
        return None
    stated = [tables.source.stall_cutoff for tables in run.ranks.values() if tables.source.stall_cutoff is not None]
    problems = sorted({cutoff.problem for cutoff in stated if cutoff.problem is not None})
    return CutoffFacts(
        min(found),
        max(found),
        sorted({cutoff.source for cutoff in stated}),
        "; ".join(problems) or None if stated else "the record does not state its cut-off",
    )


def cutoff_line(entry: DatasetEntry) -> str | None:
    """Return the stall cut-off as a line of a report; None where none applies."""
    found = known(entry.stall_cutoff)
    if found is None:
        return None
    ends = [f"{end_ns / NS_PER_MS:.2g}" for end_ns in (found.lowest_ns, found.highest_ns)]
    line = f"stall cut-off {' to '.join(dict.fromkeys(ends))} ms"
    line += f" ({' and '.join(found.sources)})" if found.sources else ""
    return line if found.reason is None else f"{line}; {found.reason}"
