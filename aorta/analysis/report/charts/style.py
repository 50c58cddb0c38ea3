"""What all pictures share: size, grid, title, legend, saving.

Must not import pyplot, which would choose a backend for the whole process, or let a legend cover data.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.text import Text
from matplotlib.ticker import ScalarFormatter

from aorta.analysis.aggregate import LabelledRun
from aorta.analysis.metrics import UNKNOWN
from aorta.analysis.report.palette import GRID, INK, QUIET

WARM_UP: Final = "warm-up"
DPI: Final = 160
"""Sharp at the width of a column of a paper; 9 inches are 1,440 pixels."""
_LEGEND_WIDTH: Final = 115
"""Characters of a legend's line, at 9 inches."""
_LEGEND_HANDLE: Final = 8
"""What the line or patch before a title takes, in characters."""


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure, inches, whose parts make room for each other."""
    figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(h_pad=0.08, w_pad=0.08))
    FigureCanvasAgg(figure)
    return figure


def tidy(axes: Axes) -> None:
    """Put the grid behind the data, without a box; write numbers on axes without a power of ten or an offset."""
    for axis in (axes.xaxis, axes.yaxis):
        formatter = axis.get_major_formatter()
        if isinstance(formatter, ScalarFormatter):
            formatter.set_scientific(False)
            formatter.set_useOffset(False)
    axes.set_axisbelow(True)
    axes.grid(visible=True, color=GRID, linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    for spine in axes.spines.values():
        spine.set_color(INK)
    axes.tick_params(colors=INK, labelsize=9)
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)


def titled(figure: Figure, top: Axes, what: str, facts: str) -> None:
    """Write `what` in bold and `facts` below it, both to the left of the highest axes."""
    figure.suptitle(what, x=0.01, ha="left", fontsize=12, fontweight="bold", color=INK)
    top.set_title(facts, loc="left", fontsize=9, color=QUIET)


def heading(figure: Figure, top: Axes, dataset: LabelledRun, what: str, more: str = "") -> None:
    """Write a title with the facts without which a picture misleads: who, where, and an emulated fabric."""
    source, health = dataset.run.source, dataset.run.health
    facts = f"{source.platform or UNKNOWN}, {source.parallel or UNKNOWN}, {health.ranks}"
    emulated = ", EMULATED FABRIC" if health.fabric is not None else ""
    titled(figure, top, f"{dataset.label}: {what}", facts + emulated + (f"; {more}" if more else ""))


def legend(figure: Figure, axes: Iterable[Axes], more: Iterable[Artist] = ()) -> None:
    """Draw one legend for all of `axes` and the patches of `more`, each title once, below the figure."""
    found = {
        title: handle
        for each in axes
        for handle, title in zip(*each.get_legend_handles_labels(), strict=True)
        if not title.startswith("_")
    } | {str(patch.get_label()): patch for patch in more}
    if WARM_UP in found:
        found[WARM_UP] = found.pop(WARM_UP)  # what is left out comes last
    if found:
        lengths = [len(title) + _LEGEND_HANDLE for title in found]
        columns = len(found) if sum(lengths) <= _LEGEND_WIDTH else max(1, _LEGEND_WIDTH // max(lengths))
        figure.legend(
            found.values(), found.keys(), loc="outside lower center", ncols=columns, frameon=False, fontsize=9
        )


def save(figure: Figure, path: Path) -> None:
    """Write a PNG, replacing what is there."""
    with rc_context({"text.parse_math": False}):  # a name with two dollar signs is no formula
        for text in figure.findobj(Text):
            text.set_parse_math(False)
        figure.savefig(path, dpi=DPI, format="png")
