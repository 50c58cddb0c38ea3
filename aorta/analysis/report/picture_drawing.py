"""Draws the pictures of a report with matplotlib (`aorta.analysis.report.pictures` says which, and what is in them).

Must not import pyplot, which would choose a backend for the whole process, or let a legend cover data. Margins are in
inches and fixed: a layout that measures every text draws each picture twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pandas as pd
from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator, ScalarFormatter

from aorta.analysis.aggregate import LabelledRun
from aorta.analysis.formatting import TEXT
from aorta.analysis.metrics import UNKNOWN
from aorta.analysis.report.figure_data import MARKED_STEPS, over_steps
from aorta.analysis.report.html.timeline_chart import color_of
from aorta.analysis.report.palette import BAND, GRID, INK, QUIET, light, text_on
from aorta.analysis.report.pictures import TIMELINE_METRICS, Side, TypicalStep
from aorta.analysis.report.timeline import BLOCKED, OTHER_WORK, Span, lane_order

DPI: Final = 160
"""Sharp at the width of a column of a paper; 9 inches are 1,440 pixels."""
_WARM_UP: Final = "warm-up"
_LINES: Final = {
    "compute_ms": ("compute", "compute", "-"),
    "comm_ms": ("communication", "communication", "--"),
    "compute_comm_ms": ("hidden communication", "hidden", "-"),
    "exposed_comm_ms": ("exposed communication", "exposed", "--"),
}
"""Of a metric: its title, the meaning that gives its colour, its dash."""
_LETTER_INCHES: Final = 0.062
"""Width of a letter at the size of labels; a label that does not fit into its bar is left out."""
_HATCH: Final = "/////"


def timeline_figure(dataset: LabelledRun, steps: pd.DataFrame, path: Path) -> None:
    """Draw the metrics of `TIMELINE_METRICS` over the global steps: a line for the median of the ranks, a band from the
    lowest rank to the highest. Warm-up, which the numbers leave out, is shaded.
    """
    figure, panels = _figure(9, [2.0, 2.0], left=0.75)
    warm = steps.loc[steps["warmup"], "global_step"]
    for axes, names in zip(panels, TIMELINE_METRICS, strict=True):
        for name in names:
            if name in steps and steps[name].notna().any():
                title, meaning, dash = _LINES[name]
                curve = over_steps(steps["global_step"].to_numpy(), steps[name])
                look: dict[str, Any] = {
                    "color": light(meaning),
                    "marker": "o" if len(curve.x) <= MARKED_STEPS else "",
                    "markersize": 3.5,
                }
                axes.plot(curve.x, curve.middle, linestyle=dash, label=title, **look)
                axes.fill_between(curve.x, curve.low, curve.high, color=light(meaning), alpha=0.2, linewidth=0)
        if not warm.empty:
            axes.axvspan(warm.min() - 0.5, warm.max() + 0.5, color=BAND, linewidth=0, zorder=0, label=_WARM_UP)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("ms per step")
    if "comm_ms" not in steps or steps["comm_ms"].isna().all():
        panels[1].text(0.5, 0.5, "communication was not measured", ha="center", transform=panels[1].transAxes)
        panels[1].set_yticks([])
    panels[0].tick_params(labelbottom=False)
    panels[1].xaxis.set_major_locator(MaxNLocator(integer=True))
    panels[1].set_xlabel("global step (line: median over ranks, band: lowest to highest rank)", fontsize=9)
    handles = {title: line for each in panels for line, title in zip(*each.get_legend_handles_labels(), strict=True)}
    if _WARM_UP in handles:
        handles[_WARM_UP] = handles.pop(_WARM_UP)  # what is left out comes last
    source, health = dataset.run.source, dataset.run.health
    emulated = ", EMULATED FABRIC" if health.fabric is not None else ""
    facts = f"{source.platform or UNKNOWN}, {source.parallel or UNKNOWN}, {health.ranks}{emulated}"
    _save(figure, path, f"{dataset.label}: time in computation and communication", [facts], panels, handles)


def side_by_side_figure(sides: Sequence[Side], shown: TypicalStep, path: Path) -> None:
    """Draw both sides on one scale: for each rank the lanes of its spans; stalls are hatched, and spans of one lane
    that run together are stacked.
    """
    rows = [[(rank, *row) for rank, spans in side.spans.items() for row in _rows(spans)] for side in sides]
    heights = [0.25 * (len(mine) + len(side.spans)) for mine, side in zip(rows, sides, strict=True)]
    figure, panels = _figure(12, heights, left=1.7)
    end_ms = max(side.length_ms for side in sides)
    inches_a_ms = (12 - 1.7) / end_ms
    for axes, mine in zip(panels, rows, strict=True):
        ticks = []
        y, before = -1.0, None
        for rank, lane, spans in mine:
            y += 1.0 if rank == before else 2.0
            ticks.append((y, lane if rank == before or not lane else f"rank {rank}   {lane}"))
            before = rank
            _bars(axes, spans, y)
            for span in spans:
                _label(axes, span, y, inches_a_ms)
        axes.set_yticks([at for at, _ in ticks], [name for _, name in ticks], fontsize=8)
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
        axes.set_ylim(y + 0.7, 0.3)
    panels[0].set_xlim(0, end_ms)
    panels[0].tick_params(labelbottom=False)
    panels[1].set_xlabel("ms since the step began")
    kinds = {(span.kind, span.lane): None for side in sides for found in side.spans.values() for span in found}
    handles: dict[str, Artist] = {
        OTHER_WORK if lane == OTHER_WORK else kind: Patch(facecolor=color_of(kind, lane))
        for kind, lane in kinds
        if kind != BLOCKED
    }
    if any(kind == BLOCKED for kind, _ in kinds):
        handles[BLOCKED] = Patch(facecolor="white", edgecolor=INK, hatch=_HATCH)
    said = []
    for side in sides:
        who = side.role if side.dataset.label == side.role else f"{side.role} {side.dataset.label}"
        emulated = ", EMULATED FABRIC" if side.dataset.run.health.fabric is not None else ""
        exposed = f"{TEXT.number(side.exposed_ms, 'ms')} ms exposed (mean of ranks shown){emulated}"
        said.append(f"{who}: global step {side.step}, {exposed}. {side.clock}")
    shown_ms, mean_ms = (TEXT.number(each, "ms", signed=True) for each in (shown.difference_ms, shown.mean_ms))
    more = len(shown.ranks) - len(sides[0].spans)
    rest = f"; the {len(sides[0].spans)} ranks that differ most, of {len(shown.ranks)}" if more else ""
    title = (
        f"The step nearest to the mean difference: {shown_ms} ms exposed; mean over steps and ranks {mean_ms} ms{rest}"
    )
    _save(figure, path, title, said, panels, handles)


def _figure(width: float, heights: Sequence[float], left: float) -> tuple[Figure, list[Axes]]:
    """Return a figure and axes of these heights below each other, sharing their time; all in inches."""
    gap, top, bottom, right = 0.4, 0.65, 0.95, 0.15
    height = top + sum(heights) + gap * (len(heights) - 1) + bottom
    figure, made = Figure(figsize=(width, height)), list[Axes]()
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
    figure.text(
        0.1 / figure.get_figwidth(), 1 - 0.12 / figure.get_figheight(), title, va="top", fontweight="bold", color=INK
    )
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


def _rows(spans: Sequence[Span]) -> list[tuple[str, list[Span]]]:
    """Return the rows of bars of a rank: name and spans; spans of a lane that run together have a row each, the first
    of which has the name. Stalls are in the first row of their lane, over what computes.
    """
    rows: list[tuple[str, list[Span]]] = []
    for lane in sorted({span.lane for span in spans}, key=lane_order):
        mine = sorted((span for span in spans if span.lane == lane), key=lambda span: span.start_ms)
        tracks: list[list[Span]] = []
        for span in (span for span in mine if span.kind != BLOCKED):
            track = next((each for each in tracks if each[-1].start_ms + each[-1].length_ms <= span.start_ms), None)
            if track is None:
                tracks.append(track := [])
            track.append(span)
        stalls = [span for span in mine if span.kind == BLOCKED]
        rows += [
            (lane if at == 0 else "", track + (stalls if at == 0 else [])) for at, track in enumerate(tracks or [[]])
        ]
    return rows


def _bars(axes: Axes, spans: Sequence[Span], row: float) -> None:
    bars = [span for span in spans if span.kind != BLOCKED]
    colors = [color_of(span.kind, span.lane) for span in bars]
    look: dict[str, Any] = {"facecolors": colors, "edgecolors": "white", "linewidth": 0.6}
    axes.broken_barh([(span.start_ms, span.length_ms) for span in bars], (row - 0.4, 0.8), **look)
    # On a ground of its own: the lines do not show on the dark of a backward pass.
    stalls = [(span.start_ms, span.length_ms) for span in spans if span.kind == BLOCKED]
    look = {"facecolors": (1, 1, 1, 0.6), "edgecolors": INK, "hatch": _HATCH, "linewidth": 0.0}
    axes.broken_barh(stalls, (row - 0.4, 0.8), **look)


_SHORT_KINDS: Final = {"allreduce": "AR", "reducescatter": "RS", "allgather": "AG", "alltoall": "A2A"}


def _label(axes: Axes, span: Span, row: float, inches_a_ms: float) -> None:
    """Write the longest name that fits inside the bar; none where none does."""
    if span.kind == BLOCKED or span.what == span.lane:
        return
    names = [span.what.rpartition(", ")[0] or span.what]
    if span.instance >= 0:
        size, short = span.what.split(", ")[1], _SHORT_KINDS.get(span.kind, span.kind)
        names = [f"{span.kind} {size}", f"{short} {size}", short]
    room = span.length_ms * inches_a_ms - 0.05
    name = next((name for name in names if len(name) * _LETTER_INCHES <= room), None)
    if name is not None:
        color = text_on(color_of(span.kind, span.lane))
        middle = span.start_ms + span.length_ms / 2
        axes.text(middle, row, name, ha="center", va="center_baseline", fontsize=7, color=color, clip_on=True)
