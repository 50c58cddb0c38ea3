"""The pictures of a report as PNG files, drawn without a display: `{label}_timeline.png`, computation and communication
over the global steps, and of a comparison `side_by_side.png`, the step that shows the difference best.

Everything else is drawn on the page. Must not load matplotlib before there is something to draw, import pyplot, which
would choose a backend for the whole process, or let a legend cover data. Margins are in inches and fixed: a layout that
measures every text draws each picture twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np

from aorta.analysis.aggregate import LabelledRun
from aorta.documents.formatting import TEXT
from aorta.documents.metrics import UNKNOWN
from aorta.read.frames import Floats, Ints
from aorta.report.page.charts import MARKED_STEPS, over_steps
from aorta.report.page.timelines import BLOCKED, EXPOSED, OTHER_WORK, Span, StepSpans, color_of, lane_order
from aorta.report.palette import BAND, GRID, INK, QUIET, light, text_on

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Draw: TypeAlias = Callable[[Path], str | None]
"""Draws to a path; returns None, or why there is nothing to draw."""

SIDE_BY_SIDE_FILE: Final = "side_by_side.png"
SHOWN_RANKS: Final = 2
DPI: Final = 160
"""Sharp at the width of a column of a paper; 9 inches are 1,440 pixels."""
_PANELS: Final = (
    (("compute_ms", "compute", "compute"), ("comm_ms", "communication", "communication")),
    (("compute_comm_ms", "hidden communication", "hidden"), ("exposed_comm_ms", "exposed communication", "exposed")),
)
"""Of `{label}_timeline.png`, what ran, and what became of communication: metric, title, meaning of its colour."""
_LETTER_INCHES: Final = 0.062
"""Width of a letter at the size of labels; a label that does not fit into its bar is left out."""
_HATCH: Final = "/////"
_SHORT_KINDS: Final = {"allreduce": "AR", "reducescatter": "RS", "allgather": "AG", "alltoall": "A2A"}


def pictures(
    datasets: Sequence[LabelledRun], compared: tuple[LabelledRun, LabelledRun] | None = None
) -> Iterator[tuple[str, Draw]]:
    """Yield every picture of a report: file name, and how to draw it. `compared`: reference and candidate."""
    for dataset in datasets:
        yield f"{dataset.label}_timeline.png", partial(draw_timeline, dataset)
    if compared is not None:
        yield SIDE_BY_SIDE_FILE, partial(draw_side_by_side, *compared)


def draw_timeline(dataset: LabelledRun, path: Path) -> str | None:
    """Draw compute, communication, hidden and exposed milliseconds over the global steps: a line for the median of the
    ranks, a band from the lowest rank to the highest. Warm-up, which the numbers leave out, is shaded.
    """
    names = [name for panel in _PANELS for name, *_ in panel if name in dataset.metrics]
    steps = dataset.table("global_step", "warmup", *names, warmup=True)
    if steps.empty:
        return "no steps in the record"
    if steps["global_step"].nunique() == 1:
        return "one step makes no curve; its numbers are in the tables"
    from matplotlib.ticker import MaxNLocator

    figure, panels = _figure(9, [2.0, 2.0], left=0.75)
    warm = steps.loc[steps["warmup"], "global_step"]
    for axes, lines in zip(panels, _PANELS, strict=True):
        for (name, title, meaning), dash in zip(lines, ("-", "--"), strict=True):
            if name in steps and steps[name].notna().any():
                curve, color = over_steps(steps["global_step"].to_numpy(), steps[name]), light(meaning)
                marker = "o" if len(curve.x) <= MARKED_STEPS else ""
                axes.plot(curve.x, curve.middle, dash, label=title, color=color, marker=marker, markersize=3.5)
                axes.fill_between(curve.x, curve.low, curve.high, color=color, alpha=0.2, linewidth=0)
        if not warm.empty:
            axes.axvspan(warm.min() - 0.5, warm.max() + 0.5, color=BAND, linewidth=0, zorder=0, label="warm-up")
        axes.set_ylim(bottom=0)
        axes.set_ylabel("ms per step")
    if "comm_ms" not in steps or steps["comm_ms"].isna().all():
        panels[1].text(0.5, 0.5, "communication was not measured", ha="center", transform=panels[1].transAxes)
        panels[1].set_yticks([])
    panels[0].tick_params(labelbottom=False)
    panels[1].xaxis.set_major_locator(MaxNLocator(integer=True))
    panels[1].set_xlabel("global step (line: median over ranks, band: lowest to highest rank)", fontsize=9)
    handles = {title: line for each in panels for line, title in zip(*each.get_legend_handles_labels(), strict=True)}
    handles |= {title: handles.pop(title) for title in ("warm-up",) if title in handles}  # what is left out comes last
    source, health = dataset.run.source, dataset.run.health
    facts = f"{source.platform or UNKNOWN}, {source.parallel or UNKNOWN}, {health.ranks}{_emulated(dataset)}"
    _save(figure, path, f"{dataset.label}: time in computation and communication", [facts], panels, handles)
    return None


class TypicalStep(NamedTuple):
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
    says and not the worst outlier: where both sides have steps in common the same global step on both, otherwise each
    side's step nearest to its own mean. Only steps after warm-up count whose exposed communication is known on all
    ranks of the side; None without one, or without a rank on both sides.
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


def draw_side_by_side(reference: LabelledRun, candidate: LabelledRun, path: Path) -> str | None:
    """Draw the step that `typical_step` chooses, of the ranks that differ most: the reference above the candidate, on
    one scale of time, with the lanes of the page's timelines. Stalls are hatched, and spans of a lane that run together
    are stacked.
    """
    shown = typical_step(reference, candidate)
    if shown is None:
        return "no step after warm-up that all ranks have, on both sides, with known exposed communication"
    ranks = sorted(shown.ranks[:SHOWN_RANKS])
    sides, facts, end_ms = list[list[tuple[int, str, list[Span]]]](), list[str](), 0.0
    for role, dataset, number in (
        ("reference", reference, shown.reference_step),
        ("candidate", candidate, shown.candidate_step),
    ):
        look = StepSpans(dataset.run, number, ranks)
        by_rank = {rank: look.spans(rank) for rank in ranks}
        if look.unread:
            return next(iter(look.unread.values()))
        sides.append([(rank, *row) for rank, found in by_rank.items() for row in _rows(found)])
        end_ms = max(end_ms, *(window.start_ms + window.length_ms for window in look.windows.values()))
        lengths = [span.length_ms for found in by_rank.values() for span in found if span.kind == EXPOSED]
        who = role if dataset.label == role else f"{role} {dataset.label}"
        mean = f"{TEXT.quantity(sum(lengths) / len(ranks), 'ms')} exposed (mean of ranks shown){_emulated(dataset)}"
        facts.append(f"{who}: global step {number}, {mean}. {look.clock}")
    kinds = {(span.kind, span.lane): None for rows in sides for _, _, found in rows for span in found}
    if not any(kind == EXPOSED for kind, _ in kinds) and not any(
        span.instance >= 0 for rows in sides for _, _, found in rows for span in found
    ):
        return "these steps hold no collective that could be drawn"
    from matplotlib.patches import Patch

    figure, panels = _figure(12, [0.25 * (len(rows) + len(ranks)) for rows in sides], left=1.7)
    for axes, rows in zip(panels, sides, strict=True):
        ticks = []
        y, before = -1.0, None
        for rank, lane, spans in rows:
            y += 1.0 if rank == before else 2.0
            ticks.append((y, lane if rank == before or not lane else f"rank {rank}   {lane}"))
            before = rank
            _bars(axes, spans, y, inches_a_ms=(12 - 1.7) / end_ms)
        axes.set_yticks([at for at, _ in ticks], [name for _, name in ticks], fontsize=8)
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
        axes.set_ylim(y + 0.7, 0.3)
    panels[0].set_xlim(0, end_ms)
    panels[0].tick_params(labelbottom=False)
    panels[1].set_xlabel("ms since the step began")
    handles: dict[str, Artist] = {
        OTHER_WORK if lane == OTHER_WORK else kind: Patch(facecolor=color_of(kind, lane))
        for kind, lane in kinds
        if kind != BLOCKED
    }
    if any(kind == BLOCKED for kind, _ in kinds):
        handles[BLOCKED] = Patch(facecolor="white", edgecolor=INK, hatch=_HATCH)
    shown_ms, mean_ms = (TEXT.number(each, "ms", signed=True) for each in (shown.difference_ms, shown.mean_ms))
    title = f"The step nearest to the mean difference: {shown_ms} ms exposed; mean over steps and ranks {mean_ms} ms"
    if len(shown.ranks) > len(ranks):
        title += f"; the {len(ranks)} ranks that differ most, of {len(shown.ranks)}"
    _save(figure, path, title, facts, panels, handles)
    return None


def _emulated(dataset: LabelledRun) -> str:
    return ", EMULATED FABRIC" if dataset.run.health.fabric is not None else ""


def _rows(spans: Sequence[Span]) -> list[tuple[str, list[Span]]]:
    """Return the rows of bars of a rank: name and spans; spans of a lane that run together have a row each, the first
    of which has the name. Stalls are in the first row of their lane, over what computes.
    """
    rows: list[tuple[str, list[Span]]] = []
    for lane in sorted({span.lane for span in spans}, key=lane_order):
        mine = sorted((span for span in spans if span.lane == lane), key=lambda span: span.start_ms)
        tracks: list[list[Span]] = []
        for span in (span for span in mine if span.kind != BLOCKED):
            track = next((each for each in tracks if each[-1].end_ms <= span.start_ms), None)
            if track is None:
                tracks.append(track := [])
            track.append(span)
        first, *others = tracks or [[]]
        rows.append((lane, first + [span for span in mine if span.kind == BLOCKED]))
        rows += [("", track) for track in others]
    return rows


def _bars(axes: Axes, spans: Sequence[Span], row: float, inches_a_ms: float) -> None:
    """Draw a row of bars, each with the longest of its names that fits inside."""
    bars = [span for span in spans if span.kind != BLOCKED]
    colors = [color_of(span.kind, span.lane) for span in bars]
    look: dict[str, Any] = {"facecolors": colors, "edgecolors": "white", "linewidth": 0.6}
    axes.broken_barh([(span.start_ms, span.length_ms) for span in bars], (row - 0.4, 0.8), **look)
    # On a ground of its own: the lines do not show on the dark of a backward pass.
    stalls = [(span.start_ms, span.length_ms) for span in spans if span.kind == BLOCKED]
    look = {"facecolors": (1, 1, 1, 0.6), "edgecolors": INK, "hatch": _HATCH, "linewidth": 0.0}
    axes.broken_barh(stalls, (row - 0.4, 0.8), **look)
    for span, color in zip(bars, colors, strict=True):
        names = [] if span.what == span.lane else [span.what.rpartition(", ")[0] or span.what]
        if span.instance >= 0:
            size, short = span.what.split(", ")[1], _SHORT_KINDS.get(span.kind, span.kind)
            names = [f"{span.kind} {size}", f"{short} {size}", short]
        room = span.length_ms * inches_a_ms - 0.05
        middle = span.start_ms + span.length_ms / 2
        for name in [name for name in names if len(name) * _LETTER_INCHES <= room][:1]:
            look = {"ha": "center", "va": "center_baseline", "fontsize": 7, "color": text_on(color), "clip_on": True}
            axes.text(middle, row, name, **look)


def _figure(width: float, heights: Sequence[float], left: float) -> tuple[Figure, list[Axes]]:
    """Return a figure and axes of these heights below each other, sharing their time; all in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    gap, top, bottom, right = 0.4, 0.65, 0.95, 0.15
    height = top + sum(heights) + gap * (len(heights) - 1) + bottom
    figure = Figure(figsize=(width, height))
    made: list[Axes] = []
    FigureCanvasAgg(figure)
    edge = height - top
    for each in heights:
        edge -= each
        box = (left / width, edge / height, (width - left - right) / width, each / height)
        axes = figure.add_axes(box, sharex=made[0] if made else None)
        axes.set_axisbelow(True)
        axes.grid(visible=True, color=GRID, linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=INK, labelsize=9)
        made.append(axes)
        edge -= gap
    return figure, made


def _save(
    figure: Figure, path: Path, title: str, facts: Sequence[str], panels: Sequence[Axes], handles: Mapping[str, Artist]
) -> None:
    """Write a PNG, replacing what is there: `title` in bold, `facts` above each panel, the legend below all."""
    from matplotlib import rc_context
    from matplotlib.text import Text
    from matplotlib.ticker import ScalarFormatter

    place = 0.1 / figure.get_figwidth(), 1 - 0.12 / figure.get_figheight()
    figure.text(*place, title, va="top", fontweight="bold", color=INK)
    for axes, fact in zip(panels, facts, strict=False):
        axes.set_title(fact, loc="left", fontsize=9, color=QUIET)
    for axis in (axis for axes in panels for axis in (axes.xaxis, axes.yaxis)):
        formatter = axis.get_major_formatter()
        if isinstance(formatter, ScalarFormatter):  # neither a power of ten nor an offset
            formatter.set_scientific(False)
            formatter.set_useOffset(False)
    lines = -(-sum(len(name) + 8 for name in handles) // int(12.5 * figure.get_figwidth()))
    columns = -(-len(handles) // max(1, lines))
    figure.legend(handles.values(), handles.keys(), loc="lower center", ncols=columns, frameon=False, fontsize=9)
    with rc_context({"text.parse_math": False}):  # a name with two dollar signs is no formula
        for text in figure.findobj(Text):
            text.set_parse_math(False)
        figure.savefig(path, dpi=DPI, format="png")
