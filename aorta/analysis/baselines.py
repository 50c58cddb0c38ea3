"""What the isolated baselines say: how much of the time that could be saved was saved, and what overlapping cost.

Enters: a run whose record holds steps of the phases `compute_only` and `comm_only` behind its training (R10). Leaves:
`overlap_efficiency` and `compute_slowdown`, or why each is null. Must not: mix phases, or use a warm-up step of any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from statistics import median
from typing import Any, Final

import pandas as pd

from aorta.analysis.readers.run_folder import Run
from aorta.analysis.stats import describe
from aorta.telemetry.schema import Phase, Step
from aorta.timeline.overlap import NS_PER_MS

LEAST_SHARE: Final = 0.02
"""Of T, that the shorter of Tc and Tm must have; below it the quotient says more of noise than of overlap
(docs/measuring.md, section 1)."""

NO_BASELINE: Final = "no isolated baseline in this run"
NO_COMMUNICATION: Final = "no collective in a step: there is no communication to run alone"
TOO_SHORT: Final = "the shorter of Tc and Tm is below 2 % of T"
NO_COMPUTE: Final = "computation was not seen"


class _NullError(Exception):
    """A metric is null; the message says why."""


def overlap_efficiency(run: Run) -> dict[str, Any]:
    """`(Tc + Tm - T) / min(Tc, Tm)` as one value, with the three it was made of, in milliseconds: wall times of whole
    steps, each the largest over the ranks of the median over a rank's steps.
    """
    try:
        _refuse_incomplete(run)
        if not any(step.collectives for record in run.records.values() for step in record.steps):
            raise _NullError(NO_COMMUNICATION)
        together, compute, comm = (_wall_ms(run, phase) for phase in ("train", "compute_only", "comm_only"))
    except _NullError as why:
        return describe(pd.Series(dtype="float64"), None, {str(why): 1})
    parts = {"t_ms": together, "tc_ms": compute, "tm_ms": comm}
    shorter = min(compute, comm)
    if shorter < LEAST_SHARE * together or shorter <= 0:
        return describe(pd.Series(dtype="float64"), None, {TOO_SHORT: 1}) | parts
    return describe(pd.Series([(compute + comm - together) / shorter])) | parts


def compute_slowdown(run: Run) -> dict[str, Any]:
    """Overlapped compute busy time / isolated compute busy time - 1, a value a rank, from medians over its steps."""
    try:
        _refuse_incomplete(run)
        values = {rank: _slowdown(run, rank) for rank in run.records}
    except _NullError as why:
        return describe(pd.Series(dtype="float64"), None, {str(why): 1})
    frame = pd.DataFrame({"rank": list(values), "value": list(values.values())})
    return describe(frame["value"], frame["rank"])


def _refuse_incomplete(run: Run) -> None:
    """Raises:
    _NullError: there is nothing to compare with, or the slowest rank may be among those that are missing.
    """
    if not any(record.isolated for record in run.records.values()):
        raise _NullError(NO_BASELINE)
    if run.health.ranks_missing:
        missing = f"{len(run.health.ranks_missing)} of {run.health.world_size} ranks are missing"
        raise _NullError(f"{missing}; the slowest may be among them")


def _wall_ms(run: Run, phase: Phase) -> float:
    return max(_median_of(run, rank, phase, _wall_of) for rank in run.records)


def _wall_of(step: Step) -> float:
    return (step.end_mono_ns - step.start_mono_ns) / NS_PER_MS


def _slowdown(run: Run, rank: int) -> float:
    overlapped = _median_of(run, rank, "train", _busy_of)
    isolated = _median_of(run, rank, "compute_only", _busy_of)
    if isolated <= 0:
        raise _NullError(f"rank {rank} computed nothing in its compute_only steps")
    return overlapped / isolated - 1


def _busy_of(step: Step) -> float:
    """Without all collectives seen, computation holds the stalls of the others: an upper bound, no busy time."""
    busy = step.overlap.get("compute_ms")
    if busy is None:
        raise _NullError(f"{NO_COMPUTE}: {step.reasons.get('compute_ms', 'the record gives no reason')}")
    if not step.coverage.complete:
        raise _NullError(f"{NO_COMPUTE} apart from stalls: {step.coverage.reason or 'coverage is incomplete'}")
    return busy


def _median_of(run: Run, rank: int, phase: Phase, value: Callable[[Step], float]) -> float:
    """The median of what is known over one rank's steps of a phase, warm-up left out (W21).

    Raises:
        _NullError: no step of that phase is left, or the value is unknown in all of them.
    """
    record = run.records[rank]
    steps: Iterable[Step] = record.steps if phase == "train" else record.isolated
    used = [step for step in steps if step.phase == phase and not step.warmup]
    if not used:
        raise _NullError(f"rank {rank} has no {phase} step after warm-up")
    known, why = [], None
    for step in used:
        try:
            known.append(value(step))
        except _NullError as error:
            why = error
    if not known:
        assert why is not None  # there are steps, and none has a value
        raise why
    return median(known)
