"""Compares training with its isolated baselines: how much of the possible saving was achieved, and what overlapping
cost.

Takes a run whose record has steps of the phases `compute_only` and `comm_only` behind its training (R10), and gives
`overlap_efficiency` and `compute_slowdown`, or why each is null. Must not: mix phases, or use a warm-up step of any.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from aorta.analysis.documents.dataset import Described
from aorta.analysis.host_bound import HOST_BOUND, MOST_UNDECIDED, Pace
from aorta.analysis.stats import describe
from aorta.analysis.tables import PHASES, Floats, Ints, Run
from aorta.records.schema import Phase
from aorta.timeline.overlap import NS_PER_MS

LEAST_SHARE: Final = 0.02
"""The shorter of Tc and Tm must be at least this fraction of T; below it the quotient reflects noise rather than
overlap (docs/dev/measuring.md, section 1).
"""

NO_BASELINE: Final = "no isolated baseline in this run"
NO_COMMUNICATION: Final = "no collective in a step: there is no communication to run alone"
TOO_SHORT: Final = "the shorter of Tc and Tm is below 2 % of T"
NO_COMPUTE: Final = "computation was not seen"
KERNELS_ALONE: Final = "computation is known of the steps measured by the profiler's kernels alone, and of no baseline"


class _NullError(Exception):
    """A metric is null; the message says why."""


def overlap_efficiency(run: Run) -> Described:
    """`(Tc + Tm - T) / min(Tc, Tm)`, where T is training, Tc computation alone and Tm communication alone.

    The entry also has the three times, in milliseconds: wall times of whole steps, each the maximum over the ranks of
    the median over a rank's steps.
    """
    try:
        _refuse_incomplete(run)
        if not run.row_count:
            raise _NullError(NO_COMMUNICATION)
        together, compute, comm = (_wall_ms(run, phase) for phase in ("train", "compute_only", "comm_only"))
    except _NullError as why:
        return describe([], None, {str(why): 1})
    shorter = min(compute, comm)
    if shorter < LEAST_SHARE * together or shorter <= 0:
        found = describe([], None, {TOO_SHORT: 1})
    else:
        found = describe([(compute + comm - together) / shorter])
    found.t_ms, found.tc_ms, found.tm_ms = together, compute, comm
    return found


def compute_slowdown(run: Run) -> Described:
    """Overlapped compute busy time / isolated compute busy time - 1, one value per rank, from medians
    over its steps.
    """
    try:
        _refuse_incomplete(run)
        basis = Pace(run).basis("compute_ms")
        if basis.source != "marks":
            raise _NullError(basis.reason or KERNELS_ALONE)
        values = {rank: _slowdown(run, rank) for rank in run.ranks}
    except _NullError as why:
        return describe([], None, {str(why): 1})
    return describe(list(values.values()), list(values))


def _refuse_incomplete(run: Run) -> None:
    """Check that the run can be compared with its baselines.

    Raises:
        _NullError: there is no baseline, or ranks are missing, one of which may be the slowest.
    """
    if not any(tables.isolated is not None for tables in run.ranks.values()):
        raise _NullError(NO_BASELINE)
    if run.health.ranks_missing:
        missing = f"{len(run.health.ranks_missing)} of {run.health.world_size} ranks are missing"
        raise _NullError(f"{missing}; the slowest may be among them")


@dataclass(frozen=True)
class _Steps:
    """The steps of one rank in one phase, without warm-up (W21). `compute_ms` is NaN where it is null."""

    wall_ns: Ints
    compute_ms: Floats
    coverage: Ints
    reasons: Ints


def _wall_ms(run: Run, phase: Phase) -> float:
    return max(float(np.median(_steps_of(run, rank, phase).wall_ns)) / NS_PER_MS for rank in run.ranks)


def _slowdown(run: Run, rank: int) -> float:
    overlapped, isolated = (_busy_ms(run, rank, phase) for phase in ("train", "compute_only"))
    if isolated <= 0:
        raise _NullError(f"rank {rank} computed nothing in its compute_only steps")
    return overlapped / isolated - 1


def _busy_ms(run: Run, rank: int, phase: Phase) -> float:
    """The median of the known values over one rank's steps of a phase. A step in which not all collectives were seen
    does not count: its computation contains stalls on the unseen ones, so it is an upper bound and no busy time.

    Raises:
        _NullError: no step has a value; the message is the reason of the last step.
    """
    steps, of_rank = _steps_of(run, rank, phase), run.ranks[rank].steps
    complete = np.array([coverage.complete for coverage in of_rank.coverages], bool)[steps.coverage]
    open_reasons = [said.get("compute_ms") == HOST_BOUND for said in of_rank.reasons]
    if np.mean(np.array(open_reasons, bool)[steps.reasons]) > MOST_UNDECIDED:
        raise _NullError(HOST_BOUND)
    known = steps.compute_ms[complete & ~np.isnan(steps.compute_ms)]
    if len(known):
        return float(np.median(known))
    if np.isnan(steps.compute_ms[-1]):
        reasons = of_rank.reasons[steps.reasons[-1]]
        raise _NullError(f"{NO_COMPUTE}: {reasons.get('compute_ms', 'the record gives no reason')}")
    coverage = of_rank.coverages[steps.coverage[-1]]
    raise _NullError(f"{NO_COMPUTE} apart from stalls: {coverage.reason or 'coverage is incomplete'}")


def _steps_of(run: Run, rank: int, phase: Phase) -> _Steps:
    """The steps of one rank in one phase.

    Raises:
        _NullError: no step of that phase is left.
    """
    tables = run.ranks[rank]
    if phase == "train":
        steps = tables.steps
        coverage = np.zeros(len(steps), np.int64) if steps.coverage is None else steps.coverage
        found = _Steps(steps.length_ns, steps.column("compute_ms"), coverage, steps.reason)
        used = steps.used
    else:
        isolated = tables.isolated
        if isolated is None:
            raise _NullError(f"rank {rank} has no {phase} step after warm-up")
        found = _Steps(isolated.wall_ns, isolated.compute_ms, isolated.coverage, isolated.reason)
        used = ~isolated.warmup & (isolated.phase == PHASES.index(phase))
    if not used.any():
        raise _NullError(f"rank {rank} has no {phase} step after warm-up")
    return _Steps(found.wall_ns[used], found.compute_ms[used], found.coverage[used], found.reasons[used])
