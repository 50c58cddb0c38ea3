"""Explains where the difference in exposed communication between two sides of a comparison lies
(docs/dev/attribution.md).

Each side is one dataset or several launches, which are read one at a time. The result is every
breakdown of the difference, and of each side the achieved TFLOP/s, from the model FLOPs of its manifest.

Must not: judge whether there is a difference (`compare` does) or what its cause is (`account` does), hold two launches,
or count recomputation or work that is no matrix product, so that two stacks are measured against the same
work.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, TypeAlias

from aorta.analysis.aggregate import LabelledRun
from aorta.analysis.attribution.breakdown import (
    UNEXPLAINED,
    Means,
    Totals,
    computing,
    dimensions,
    totals_of,
)
from aorta.analysis.cautions import ONE_RANK
from aorta.documents.comparison import AttributedSide, Attribution
from aorta.documents.dataset import ExposedBreakdown, ExposedRow
from aorta.read.run import ExposedSums

Launches: TypeAlias = LabelledRun | Iterable[LabelledRun]
DEFINITION: Final = (
    "mean exposed_comm_ms over the steps of all ranks after warm-up, candidate minus reference; every exposed "
    "nanosecond belongs to one collective, one place and one part, so the rows of each dimension add up to the "
    "difference (docs/dev/attribution.md)"
)
_NOTHING: Final = "no step after warm-up whose exposed communication is known"


def attribute(reference: Launches, candidate: Launches) -> Attribution:
    """Compute `attribution` of a comparison. Its rows are in milliseconds per rank-step.

    Args:
        reference, candidate: a dataset, or an iterable of launches. Launches are consumed one at a time, so they may be
            loaded lazily.

    Raises:
        InputError: a record cannot be read again.
    """
    sides = {
        side: totals_of([launches] if isinstance(launches, LabelledRun) else launches)
        for side, launches in (("reference", reference), ("candidate", candidate))
    }
    unknown = [f"{side}: {totals.host_bound}" for side, totals in sides.items() if totals.host_bound is not None]
    if unknown:
        return Attribution(definition=DEFINITION, reason="; ".join(unknown))
    empty = [side for side, totals in sides.items() if not totals.sums.rank_steps]
    if empty:
        return Attribution(definition=DEFINITION, reason=f"{' and '.join(empty)}: {_NOTHING}")
    means = Means(**sides)
    parallel = means.reference.parallel if means.reference.parallel == means.candidate.parallel else ""
    return Attribution(
        definition=DEFINITION,
        unit="ms per step and rank",
        reason=None,
        difference_ms=means.difference_ms,
        **{side: _side(totals) for side, totals in sides.items()},
        dimensions=dimensions(means, parallel),
        computing=computing(means),
    )


def exposed_breakdown(dataset: LabelledRun) -> ExposedBreakdown:
    """Break the exposed communication of one run down by group, collective, region of the step, part and rank: the
    difference from a run that has none.

    Raises:
        InputError: a record cannot be read again.
    """
    if dataset.pace.basis("overlap_ratio").reason == ONE_RANK:
        return ExposedBreakdown(reason=ONE_RANK)
    totals = totals_of([dataset])
    if totals.host_bound is not None or not totals.sums.rank_steps:
        return ExposedBreakdown(reason=totals.host_bound or _NOTHING)
    means = Means(Totals(sums=ExposedSums(rank_steps=1)), totals)
    found = dimensions(means, totals.parallel)
    rows = {
        name: [ExposedRow(row.what, row.candidate_ms, row.share) for row in found[name]]
        for name in ("group", "collective", "region", "part", "rank")
    }
    steps = totals.sums.rank_steps
    return ExposedBreakdown(reason=None, rank_steps=steps, exposed_ms=means.difference_ms, **rows)


def _side(totals: Totals) -> AttributedSide:
    sums = totals.sums
    return AttributedSide(
        launches=totals.launches,
        rank_steps=sums.rank_steps,
        rank_steps_left_out=sums.left_out,
        window_ms=totals.ms(sums.window_ns),
        comm_ms=totals.ms(sums.comm_ns),
        compute_comm_ms=totals.ms(sums.hidden_ns),
        exposed_comm_ms=totals.ms(sums.exposed_ns),
        exposed_comm_ns=sums.exposed_ns,
        compute_ms=totals.ms(sums.compute_ns),
        untold_ns=sum(length_ns for key, length_ns in totals.exposed.items() if key.kind == UNEXPLAINED),
    )
