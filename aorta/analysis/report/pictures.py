"""The pictures of a report as PNG files, drawn without a display: `{label}_timeline.png`, computation and communication
over the global steps, and of a comparison `side_by_side.png`, the step that shows the difference best.

    for name, draw in pictures(datasets, (reference, candidate)):
        reason = draw(folder / name)         # None, or why there is no picture

Everything else is drawn on the page. Must not load matplotlib before there is something to draw
(`aorta.analysis.report.picture_drawing` does), or touch pyplot and its global backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np

from aorta.analysis.aggregate import LabelledRun
from aorta.analysis.frames import Floats, Ints
from aorta.analysis.report.timeline import EXPOSED, Span, StepSpans

Draw: TypeAlias = Callable[[Path], str | None]
"""Draws to a path; returns None, or why there is nothing to draw."""

SIDE_BY_SIDE_FILE: Final = "side_by_side.png"
TIMELINE_METRICS: Final = (("compute_ms", "comm_ms"), ("compute_comm_ms", "exposed_comm_ms"))
"""Of the two panels of `{label}_timeline.png`: what ran, and what became of communication."""
SHOWN_RANKS: Final = 2


def pictures(
    datasets: Sequence[LabelledRun], compared: tuple[LabelledRun, LabelledRun] | None = None
) -> Iterator[tuple[str, Draw]]:
    """Yield every picture of a report: file name, and how to draw it. `compared`: reference and candidate."""
    for dataset in datasets:
        yield f"{dataset.label}_timeline.png", partial(draw_timeline, dataset)
    if compared is not None:
        yield SIDE_BY_SIDE_FILE, partial(draw_side_by_side, *compared)


def draw_timeline(dataset: LabelledRun, path: Path) -> str | None:
    """Draw compute, communication, hidden and exposed milliseconds per global step."""
    names = [name for panel in TIMELINE_METRICS for name in panel if name in dataset.metrics]
    steps = dataset.table("global_step", "warmup", *names, warmup=True)
    if steps.empty:
        return "no steps in the record"
    if steps["global_step"].nunique() == 1:
        return "one step makes no curve; its numbers are in the tables"
    from aorta.analysis.report.picture_drawing import timeline_figure

    timeline_figure(dataset, steps, path)
    return None


@dataclass(frozen=True)
class TypicalStep:
    """The steps and ranks to draw. `ranks` exist on both sides, the one whose exposed communication differs most first.
    `difference_ms` is candidate minus reference, averaged over the ranks of these two steps; `mean_ms` is the same for
    the means over all steps.
    """

    reference_step: int
    candidate_step: int
    ranks: tuple[int, ...]
    difference_ms: float
    mean_ms: float


def typical_step(reference: LabelledRun, candidate: LabelledRun) -> TypicalStep | None:
    """Choose the step whose difference is closest to the mean difference, so that the picture shows what the summary
    says and not the worst outlier.

    Where both sides have steps in common it is the same global step on both; otherwise each side's step nearest to its
    own mean. Only steps after warm-up count whose exposed communication is known on all ranks of the side.

    Returns:
        None where a side has no such step, or no rank exists on both sides.
    """
    (before_ranks, before_steps, left), (after_ranks, after_steps, right) = map(_exposed_ms, (reference, candidate))
    ranks = [rank for rank in before_ranks if rank in after_ranks]
    if not left.size or not right.size or not ranks:
        return None
    before, after = left.mean(axis=0), right.mean(axis=0)
    mean = float(after.mean() - before.mean())
    _, first, second = np.intersect1d(before_steps, after_steps, assume_unique=True, return_indices=True)
    if len(first):
        nearest = np.argmin(np.abs(after[second] - before[first] - mean))
        at, to = first[nearest], second[nearest]
    else:
        at, to = np.argmin(np.abs(before - before.mean())), np.argmin(np.abs(after - after.mean()))
    apart = {
        rank: abs(float(right[after_ranks.index(rank), to] - left[before_ranks.index(rank), at])) for rank in ranks
    }
    order = tuple(sorted(ranks, key=lambda rank: (-apart[rank], rank)))
    return TypicalStep(int(before_steps[at]), int(after_steps[to]), order, float(after[to] - before[at]), mean)


def _exposed_ms(dataset: LabelledRun) -> tuple[list[int], Ints, Floats]:
    """Return ranks, the global steps after warm-up whose exposed communication every rank knows, and its values [ranks,
    steps].
    """
    known: dict[int, tuple[Ints, Floats]] = {}
    for rank, tables in dataset.run.ranks.items():
        values = tables.steps.column("exposed_comm_ms")
        used = tables.steps.used & ~np.isnan(values)
        known[rank] = tables.steps.global_step[used], values[used]
    common = reduce(np.intersect1d, (steps for steps, _ in known.values()))
    return [*known], common, np.array([values[np.searchsorted(steps, common)] for steps, values in known.values()])


@dataclass(frozen=True)
class Side:
    """One side of the picture: the spans of its step by rank, its length in ms, and whose clock they are on."""

    role: str
    dataset: LabelledRun
    step: int
    spans: dict[int, list[Span]]
    length_ms: float
    clock: str

    @property
    def exposed_ms(self) -> float:
        """Exposed communication, mean over the ranks drawn."""
        spans = [span for found in self.spans.values() for span in found if span.kind == EXPOSED]
        return sum(span.length_ms for span in spans) / len(self.spans)


def draw_side_by_side(reference: LabelledRun, candidate: LabelledRun, path: Path) -> str | None:
    """Draw the step that `typical_step` chooses, of the ranks that differ most: the reference above the candidate, on
    one scale of time, with the lanes of the page's timelines.
    """
    shown = typical_step(reference, candidate)
    if shown is None:
        return "no step after warm-up that all ranks have, on both sides, with known exposed communication"
    ranks = sorted(shown.ranks[:SHOWN_RANKS])
    sides = []
    for role, dataset, number in (
        ("reference", reference, shown.reference_step),
        ("candidate", candidate, shown.candidate_step),
    ):
        look = StepSpans(dataset.run, number, ranks)
        spans = {rank: look.spans(rank) for rank in ranks}
        if look.unread:
            return next(iter(look.unread.values()))
        length = max(window.start_ms + window.length_ms for window in look.windows.values())
        sides.append(Side(role, dataset, number, spans, length, look.clock))
    if not any(
        span.kind == EXPOSED or span.instance >= 0 for side in sides for found in side.spans.values() for span in found
    ):
        return "these steps hold no collective that could be drawn"
    from aorta.analysis.report.picture_drawing import side_by_side_figure

    side_by_side_figure(sides, shown, path)
    return None
