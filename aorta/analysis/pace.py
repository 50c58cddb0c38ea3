"""Decides how far the numbers of a run can be trusted.

A device that waits for its host idles between the marks on its streams, and its marks then bound a metric and do not
give it (docs/dev/metric-rules.md, "Where the host sets the pace"). One rule for every reader of a run:

    Pace(run).basis("overlap_ratio").source  # "marks": steps after warm-up, nearly all of them decided
                                             # "kernels": the steps that a calibration measured
                                             # None: neither; `bounds` has what the marks allow

Decided steps are never mixed with undecided ones, of which they would be a biased choice (docs/dev/measuring.md, W29).

Steps that are not at one level, or a few that are far longer than the others, let a median and a mean say two things:

    level_change(times_ms)                  # LevelChange(first=9, steps=15, before_ms=180.0, after_ms=100.0), or None
    slow_steps(times_ms, global_steps)      # "the mean job step is 131 ms, the median 100 ms: 2 slow steps of 30 ..."

Must not compute or change a metric, leave a step out of it, apply the rule of the cut-off (`aorta.records.ring_steps`
does, when a line is made), or call launches unsettled that changed in different directions, as those of a machine do
that others use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Final, NamedTuple

import numpy as np

from aorta.documents.comparison import SIDES, HostBoundSide
from aorta.documents.dataset import CalibrationFacts, CutoffFacts, MeasuredFrom, PaceFacts
from aorta.documents.formatting import TEXT
from aorta.documents.metrics import HOST_BOUND, HOST_LEAD, MADE_OF_OTHERS, UNDECIDED, metric_named
from aorta.documents.statistics import median_or_none
from aorta.read.frames import LOSSES, Bools, Floats, Ints
from aorta.read.run import HOST_TIMER, Run
from aorta.records.schema import STALL_CUTOFF_NS, Calibration
from aorta.timeline.overlap import AGREEMENT

MOST_UNDECIDED: Final = 0.05
"""At most 5 % undecided steps, or no value: so few hardly move a median."""
CONTRADICTED: Final = "kernels and marks of the same steps disagree: marks alone cannot say when kernels ran"
DRAWN: Final = (
    "host-bound: computation is drawn as the blocks' ranges, in which the device may have waited for launches"
)
ONE_RANK: Final = "one rank: it has no other rank to communicate with, so there is nothing to hide"
OF_EVERY_STEP: Final = frozenset({"window_ms", "aorta_ms", *LOSSES})
"""Known of steps that are not observed, too."""
_DECIDES: Final = ("overlap_ratio", "compute_ms")
"""Where marks leave one of these open, the host sets the pace."""


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
        if name in OF_EVERY_STEP and steps.sampled:
            return Basis("marks", steps.timed)
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
        # Why it has only bounds, without those of a single step (`ledger.balanced`).
        left_open = used & ~np.isnan(steps.bounds[name][0]) if name in steps.bounds else used
        reasons = [steps.reasons[code].get(name) for code in np.unique(steps.reason[left_open]).tolist()]
        why = next((why for why in reasons if why is not None), HOST_BOUND)
        return Basis(None, used, self._bounds(name), why.partition(": it is ")[0])

    def _rests_on_compute(self, name: str) -> bool:
        if name in MADE_OF_OTHERS:
            return any(map(self._rests_on_compute, MADE_OF_OTHERS[name].parts))
        return name in self._run.steps.metrics and metric_named(name).rests_on != "nothing"

    @cached_property
    def _by_kernels(self) -> Bools:
        by_kernels: Bools = self._run.steps.by_kernels & ~self._run.steps.warmup
        return by_kernels

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

    @cached_property
    def _calibrations(self) -> list[Calibration]:
        return [window for tables in self._run.ranks.values() for window in tables.calibrations]

    @cached_property
    def contradicted(self) -> bool:
        """Whether kernels and marks of the steps of a calibration are further apart than `AGREEMENT`."""
        return any(
            abs(window.ratio_by_kernels - window.ratio_by_marks) > AGREEMENT
            for window in self._calibrations
            if window.ratio_by_kernels is not None and window.ratio_by_marks is not None
        )

    @property
    def drawn_as_ranges(self) -> bool:
        """Whether what a picture of a step shows as computation may have been idle: ranges round kernels."""
        return self._run.traces is None and self.basis("compute_ms").source != "marks"

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
        lead_ms, undecided, calibrations = self._median(HOST_LEAD), self._median(UNDECIDED), self._calibrations
        if not calibrations:
            plans = [tables.calibration_plan for tables in self._run.ranks.values()]
            problems = [plan.problem for plan in plans if plan is not None and plan.problem is not None]
            problems += [
                f"the run ended before step {plan.first_step}, the first to measure"
                for plan in plans
                if plan is not None and plan.steps
            ]
            return PaceFacts(self.host_bound, lead_ms, undecided, None, next(iter(problems), None))
        medians = {
            name: median(values)
            if (values := [v for window in calibrations if (v := getattr(window, name)) is not None])
            else None
            for name in ("ratio_by_kernels", "ratio_by_marks", "window_step_ms", "other_step_ms", "setup_ms")
        }
        calibration = CalibrationFacts(
            steps=max(window.steps for window in calibrations),
            rank_steps=int(self._by_kernels.sum()),
            problems=sorted({window.problem for window in calibrations if window.problem is not None}),
            agree=None if medians["ratio_by_kernels"] is None else not self.contradicted,
            **medians,
        )
        return PaceFacts(self.host_bound, lead_ms, undecided, calibration, None)


def difference_in_lead(
    reference: Sequence[PaceFacts | None], candidate: Sequence[PaceFacts | None]
) -> HostBoundSide | None:
    """Return which side is host-bound, by how much each host is ahead, and the sentence that says so; None where both
    are, neither is, or it is not known of one.

    Args:
        reference, candidate: `pace` of each launch of a side. A side is host-bound where most of its launches are.
    """
    sides = reference, candidate
    stated = [[pace.host_bound for pace in paces if pace and pace.host_bound is not None] for paces in sides]
    host_bound = [sum(flags) * 2 > len(flags) for flags in stated]
    if not all(stated) or host_bound[0] == host_bound[1]:
        return None
    leads: dict[str, float] = {
        name: median(pace.host_lead_ms for pace in paces if pace and pace.host_lead_ms is not None)
        for name, paces in zip(SIDES, sides, strict=True)
    }
    side, other = SIDES if host_bound[0] else SIDES[::-1]
    own, against = (TEXT.quantity(leads[name], "ms") for name in (side, other))
    return HostBoundSide(
        side,
        leads,
        f"the {side} is host-bound: its host is {own} ahead of the device (median), the {other}'s {against}. "
        "The sides differ in launch speed of their hosts, and may differ in overlap for that reason.",
    )


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
    cutoffs = cutoffs_ns(run)
    if not cutoffs:
        return None
    stated = [tables.source.stall_cutoff for tables in run.ranks.values() if tables.source.stall_cutoff is not None]
    problems = sorted({cutoff.problem for cutoff in stated if cutoff.problem is not None})
    return CutoffFacts(
        min(cutoffs),
        max(cutoffs),
        sorted({cutoff.source for cutoff in stated}),
        "; ".join(problems) or None if stated else "the record does not state its cut-off",
    )


CHANGE: Final = 0.1
"""Relative to the level before: a smaller change of level is not named."""
_ALPHA: Final = 0.05
"""Highest p of a change. 15 steps reach it where 5 to 10 of them come before the change, 8 where half do, 5 never."""
_FEW_STEPS: Final = 14
_ORDERS: Final = 5_000
"""Drawn, for the p of up to `_FEW_STEPS`, of which the formula for many says too much."""
_MOST_LAUNCHES: Final = 0.75
"""Share of launches. Where steps only wander, they change either way: 4 of 4 the same way are at most one in eight."""
APART: Final = 0.1
"""Of the median: where the mean step differs by more, it is said which steps do that."""
_EXPLAINS: Final = 0.8
"""Share of the difference of mean and median that the steps named for it make up at least."""
_FEW: Final = 5


def doubled_ranks(values: Floats) -> Ints:
    """Return twice the rank of each value, from 1; tied values share their mean rank, and NaN has the mean of all."""
    known = ~np.isnan(values)
    doubled = np.full(len(values), int(known.sum()) + 1)
    _, inverse, counts = np.unique(values[known], return_inverse=True, return_counts=True)
    doubled[known] = (2 * np.cumsum(counts) - counts + 1)[inverse]
    return doubled


class LevelChange(NamedTuple):
    """The median of the `first` steps after the warm-up, and that of all others."""

    first: int
    steps: int
    before_ms: float
    after_ms: float

    def __str__(self) -> str:
        before, after = (TEXT.quantity(level, "ms") for level in (self.before_ms, self.after_ms))
        return f"the first {self.first} of {self.steps} steps after the warm-up take {before}, the others {after}"


def level_change(times_ms: Floats) -> LevelChange | None:
    """Return where the level of a launch's steps changes; None where it does not by `CHANGE`.

    Whether there is a change is for Pettitt's test (Applied Statistics 28, 1979): of the largest Mann-Whitney statistic
    of any cut K, p = 2 exp(-6 K^2 / (n^3 + n^2)), of few steps its share of drawn orders. It is where two levels fit
    best by least squares, times beyond the 10th and 90th percentile taken as these.

    Args:
        times_ms: of the steps after the warm-up, in their order.
    """
    count = len(times_ms)
    if count < 2:
        return None
    before = np.arange(1, count)
    if _chance(doubled_ranks(times_ms)) > _ALPHA:
        return None
    clipped = np.clip(times_ms, *np.percentile(times_ms, [10, 90]))
    apart = (np.cumsum(clipped)[:-1] - before * clipped.mean()) ** 2 / (before * (count - before))
    first = int(np.argmax(apart)) + 1
    before_ms, after_ms = float(np.median(times_ms[:first])), float(np.median(times_ms[first:]))
    if abs(after_ms - before_ms) <= CHANGE * before_ms:
        return None
    return LevelChange(first, count, before_ms, after_ms)


def _chance(doubled: Ints) -> float:
    """Return the p of a change: of the largest Mann-Whitney statistic of any cut, in all orders of so many steps."""
    count = len(doubled)
    before = np.arange(1, count)

    def largest(doubled: Ints) -> Ints:
        return np.asarray(np.abs(np.cumsum(doubled, -1)[..., :-1] - before * (count + 1)).max(-1))

    seen = float(largest(doubled))
    if count > _FEW_STEPS:
        return float(2 * np.exp(-6 * seen**2 / (count**3 + count**2)))
    orders = np.random.default_rng(0).permuted(np.tile(doubled, (_ORDERS, 1)), axis=1)
    return float((largest(orders) >= seen).mean())


def unsettled(changes: Sequence[LevelChange | None]) -> str | None:
    """Return why the launches of a side have not settled: the steps of more than `_MOST_LAUNCHES` of them change their
    level in the same direction; None where they do not.
    """
    for faster in (True, False):
        same = [change for change in changes if change and (change.after_ms < change.before_ms) == faster]
        if len(same) > _MOST_LAUNCHES * len(changes):
            typical = sorted(same, key=lambda change: change.first)[len(same) // 2]
            return f"in {len(same)} of {len(changes)} launches steps get {'faster' if faster else 'slower'}: {typical}"
    return None


def slow_steps(times_ms: Floats, global_steps: Ints) -> tuple[str, Ints, float] | None:
    """Return which steps make the mean step differ from the median: in words, their numbers, and by how much they are
    longer together, in ms; None where it does not by `APART`.

    Args:
        times_ms: of the job steps; `global_steps`: the number of each.
    """
    if not len(times_ms):
        return None
    mean_ms, median_ms = float(times_ms.mean()), float(np.median(times_ms))
    if abs(mean_ms - median_ms) <= APART * median_ms:
        return None
    beyond_ms = (times_ms - median_ms) * np.sign(mean_ms - median_ms)
    order = np.argsort(-beyond_ms, kind="stable")
    enough = int(np.searchsorted(np.cumsum(beyond_ms[order]), _EXPLAINS * beyond_ms.sum()))
    count = int((beyond_ms >= beyond_ms[order[enough]] / 2).sum())  # with those that are like them
    named = [
        f"{global_steps[index]} ({TEXT.quantity(float(times_ms[index]), 'ms')})" for index in order[: min(count, _FEW)]
    ]
    more = f" and {count - _FEW} more" if count > _FEW else ""
    mean, median = (TEXT.quantity(value, "ms") for value in (mean_ms, median_ms))
    kind = "slow" if mean_ms > median_ms else "fast"
    steps = f"{TEXT.count(count, f'{kind} step')} of {len(times_ms)}"
    makes = "makes" if count == 1 else "make"
    sentence = (
        f"the mean job step is {mean}, the median {median}: {steps} {makes} the difference: {', '.join(named)}{more}"
    )
    return sentence, global_steps[order[:count]], float((times_ms[order[:count]] - median_ms).sum())
