"""Decides over which steps of a run each metric is described, and says where the host sets the pace of the device.

A device that waits for its host idles between the marks on its streams, and its marks then bound a metric and do not
give it (docs/dev/metric-rules.md, "Where the host sets the pace"). One rule for every reader of a run:

    Pace(run).basis("overlap_ratio").source  # "marks": steps after warm-up, nearly all of them decided
                                             # "kernels": the steps that a calibration measured
                                             # None: neither; `bounds` has what the marks allow

Decided steps are never mixed with undecided ones, of which they would be a biased choice (docs/dev/measuring.md, W29).
Must not compute a metric.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Final

import numpy as np

from aorta.analysis.documents import known
from aorta.analysis.documents.dataset import CalibrationFacts, DatasetEntry, Described, Ends, MeasuredFrom, PaceFacts
from aorta.analysis.formatting import TEXT, rough_percent
from aorta.analysis.frames import Bools, Floats
from aorta.analysis.metrics import MADE_OF_OTHERS
from aorta.analysis.run import Run
from aorta.records.schema import Calibration
from aorta.timeline.classes import KINDS
from aorta.timeline.overlap import AGREEMENT, AT_CUTOFFS

MOST_UNDECIDED: Final = 0.05
"""Share of the steps in which marks may leave a metric open, for the others to stand for all: a median moves by less
than the twentieth of the steps can."""
PROFILER_COST: Final = 0.05
"""From this on, steps that a profiler made longer are said not to be like the others."""
HOST_BOUND: Final = "host-bound: the device waits for launches, and marks alone cannot say when its kernels ran"
CONTRADICTED: Final = "kernels and marks of the same steps disagree: marks alone cannot say when kernels ran"
DRAWN: Final = (
    "host-bound: computation is drawn as the blocks' ranges, in which the device may have waited for launches"
)
LEAD: Final = "host_lead_ms"
UNDECIDED: Final = "undecided_share"
_WITHOUT_COMPUTE: Final = frozenset(
    ["window_ms", "comm_ms", "copy_ms", "aux_ms", "pipeline_ms", LEAD, UNDECIDED, *(f"{kind}_ms" for kind in KINDS)]
)
"""Metrics that do not rest on when the device computed; nor do rates of copies."""
ONE_RANK: Final = "one rank: it has no other rank to communicate with, so there is nothing to hide"
_OF_PEERS: Final = frozenset(["overlap_ratio", *AT_CUTOFFS, "overlap_over_compute"])
"""Shares of communication or computation that is hidden or hides. In a recorded run of one rank collectives communicate
with nobody; a trace by itself may be one rank of many that it does not name."""
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
        if name in _OF_PEERS and self._run.health.is_alone:
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
        return Basis(None, used, self._bounds(name), HOST_BOUND)

    def _rests_on_compute(self, name: str) -> bool:
        if name in MADE_OF_OTHERS:
            return any(map(self._rests_on_compute, MADE_OF_OTHERS[name].parts))
        known = name in self._run.steps.metrics
        return known and name not in _WITHOUT_COMPUTE and not name.endswith("_gb_per_s")

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
        return float(np.median(low[known])), float(np.median(high[known]))

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
        if self._column(LEAD) is None:
            return None
        return any(self.undecided(name) > MOST_UNDECIDED for name in _DECIDES)

    def _column(self, name: str) -> Floats | None:
        """Return the known values of the steps used; None without any."""
        values = self._run.steps.column(name)[self._run.steps.used]
        values = values[~np.isnan(values)]
        return values if len(values) else None

    def entry(self) -> PaceFacts | None:
        """Return `pace` of a dataset in `summary.json`; None where the record does not tell."""
        if not self.known:
            return None
        lead, undecided = (
            None if (values := self._column(name)) is None else float(np.median(values)) for name in (LEAD, UNDECIDED)
        )
        return PaceFacts(self.host_bound, lead, undecided, self._calibration(), self._no_calibration())

    def _no_calibration(self) -> str | None:
        """Return why no steps were measured by kernels; None where some were, or nobody asked for it."""
        plans = [tables.calibration_plan for tables in self._run.ranks.values() if tables.calibration_plan is not None]
        if self._calibrations:
            return None
        never = (f"the run ended before step {plan.first_step}, the first to measure" for plan in plans if plan.steps)
        return next((plan.problem for plan in plans if plan.problem is not None), next(never, None))

    def _calibration(self) -> CalibrationFacts | None:
        """Return what the calibrations of all ranks found: medians over them; None without one."""
        each = self._calibrations
        if not each:
            return None

        def middle(name: str) -> float | None:
            known = [value for one in each if (value := getattr(one, name)) is not None]
            return median(known) if known else None

        return CalibrationFacts(
            steps=max(one.steps for one in each),
            rank_steps=int(self._by_kernels.sum()),
            problems=sorted({one.problem for one in each if one.problem is not None}),
            agree=None if middle("ratio_by_kernels") is None else not self.contradicted,
            ratio_by_kernels=middle("ratio_by_kernels"),
            ratio_by_marks=middle("ratio_by_marks"),
            window_step_ms=middle("window_step_ms"),
            other_step_ms=middle("other_step_ms"),
            setup_ms=middle("setup_ms"),
        )


def with_basis(described: Described, basis: Basis) -> Described:
    """Return the statistics of a metric with what they were measured from."""
    described.source, described.bounds = basis.source, None if basis.bounds is None else Ends(*basis.bounds)
    return described


def pace_notes(entry: DatasetEntry) -> Iterator[str]:
    """Yield sentences about a dataset from its entry in `summary.json`: where its host sets the pace, and effects."""
    pace = known(entry.pace)
    if pace is None:
        return
    found, ratio = pace.calibration, entry.metrics.get("overlap_ratio")
    if pace.host_bound:
        yield (
            f"host-bound: the host is {TEXT.quantity(pace.host_lead_ms, 'ms')} ahead of the device (median), and in "
            f"{rough_percent(pace.undecided_share or 0)} of the blocks' time marks "
            f"cannot say whether kernels ran; {_shown(ratio, pace)}"
        )
    elif found is not None and found.agree is False:
        yield (
            "kernels and marks of the same steps disagree: an overlap ratio of "
            f"{TEXT.number(found.ratio_by_kernels, 'ratio')} by kernels, "
            f"{TEXT.number(found.ratio_by_marks, 'ratio')} by marks; "
            f"{_shown(ratio, pace)}"
        )
    if found is not None:
        before, within = found.other_step_ms, found.window_step_ms
        by_kernels = ratio is not None and ratio.source == "kernels"
        if before and within and within / before - 1 > PROFILER_COST and by_kernels:
            yield (
                f"the steps measured by kernels took {TEXT.percent(within / before - 1)} longer than the others, which "
                "the profiler did: a host-bound step of ordinary length hides more or less than they do"
            )
        for problem in found.problems:
            yield f"calibration: {problem}"


def _shown(ratio: Described | None, pace: PaceFacts) -> str:
    """Return what the metrics with computation in them are, in words."""
    calibration = pace.calibration
    if ratio is not None and ratio.source == "kernels":
        steps = 0 if calibration is None else calibration.steps
        return f"metrics with computation in them are of {TEXT.count(steps, 'step')} measured by the profiler's kernels"
    if ratio is not None and ratio.bounds:
        said = f"overlap_ratio is {TEXT.bounds(ratio.bounds, 'ratio')}"
    elif pace.host_bound:
        said = "metrics with computation in them are bounds"
    else:
        said = "metrics with computation in them have no value, as not every rank has steps measured by kernels"
    if pace.no_calibration is not None:
        return f"{said}; no steps were measured by kernels: {pace.no_calibration}"
    return f"{said}; record with instrument.calibration=3 for a number" if calibration is None else said
