"""The timelines of the page: an empty chart for each dataset, and the columns that a script fills it from.

All charts share one range of milliseconds; `payload` is plain JSON values. Must not put a word of a file into a
template of Bokeh.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from bokeh.core.properties import value
from bokeh.models import ColumnDataSource, FixedTicker, Range1d, TapTool

from aorta.analysis.report.html.bokeh_chart import FONT, Chart, hover, new_chart
from aorta.analysis.report.html.timeline import (
    BLOCKED,
    BUBBLES,
    COPIES,
    EXPOSED,
    NAMED,
    OTHER_WORK,
    TimelineSpans,
    lane_order,
)
from aorta.analysis.report.palette import INK, PAPER, lane_color, light, phase_color
from aorta.timeline.classes import BUBBLE, COMPUTE

_DRAWN: Final = ("top", "bottom", "left", "right", "color")
_TOLD: Final = ("rank", "what", "begin", "took", "more", "instance")

_LABEL: Final = ("x", "y", "text", "ink", "ground")


def color_of(kind: str, lane: str) -> str:
    """Return the colour of a span on a light background."""
    if kind == BLOCKED:
        return INK
    if kind in (EXPOSED, NAMED):
        return light("exposed" if kind == EXPOSED else "named")
    if lane == BUBBLES:
        return lane_color(BUBBLE)
    if lane in (OTHER_WORK, COPIES):
        return light("other-work")
    return phase_color(kind) if lane == COMPUTE else lane_color(kind)


def timeline_charts(spans: Sequence[TimelineSpans]) -> list[Chart]:
    """Return a chart for each dataset that has a step; its sources are empty until the page's script fills them."""
    charts: list[Chart] = []
    shared: dict[str, Any] = {"x_range": Range1d(0, 1, name="timeline-x")}
    for number, each in enumerate(spans):
        if not each.steps:
            continue
        plot = new_chart(f"timeline-{number}", 240, "", "", **shared)
        plot.y_range = Range1d(1, 0)
        plot.yaxis.ticker = FixedTicker(ticks=[])
        plot.ygrid.grid_line_color = None
        plot.min_border_left = 150
        box = {name: name for name in ("top", "bottom", "left", "right")}
        empty: dict[str, list[Any]] = {name: [] for name in (*_DRAWN, *_TOLD)}
        drawn = ColumnDataSource(dict(empty), name=f"timeline-spans-{number}")
        ran = plot.quad(**box, fill_color="color", line_color=INK, line_width=0.3, line_alpha=0.6, source=drawn)
        waits = ColumnDataSource(dict(empty), name=f"timeline-waits-{number}")
        hatch = {"hatch_pattern": "right_diagonal_line", "hatch_color": INK, "hatch_scale": 6, "hatch_weight": 1}
        # On a ground of its own: the lines do not show on the dark of a backward pass.
        waited = plot.quad(
            **box, fill_color=PAPER, fill_alpha=0.6, line_color=INK, line_width=0.8, source=waits, **hatch
        )
        chosen = ColumnDataSource({name: [] for name in box}, name=f"timeline-chosen-{number}")
        plot.quad(**box, fill_color=None, line_color=INK, line_width=2.5, source=chosen)
        names = ColumnDataSource({name: [] for name in _LABEL}, name=f"timeline-labels-{number}")
        plot.text(
            x="x",
            y="y",
            text="text",
            text_color="ink",
            background_fill_color="ground",  # over hatching
            text_align="center",
            text_baseline="middle",
            text_font=value(FONT),
            text_font_size="11px",
            source=names,
        )
        for bars in (ran, waited):  # a tap chooses a collective, and must not fade the others
            bars.selection_glyph = bars.nonselection_glyph = None
        tap = TapTool(renderers=[ran])
        plot.add_tools(tap)
        plot.toolbar.active_tap = tap
        hover(
            plot,
            [ran, waited],
            ("rank", "@rank"),
            ("", "@what"),
            ("start", "@begin"),
            ("length", "@took"),
            ("", "@more"),
        )
        charts.append(Chart(plot.name, each.label, "ms since the start of the step on each rank", plot, number))
    return charts


def payload(spans: Sequence[TimelineSpans]) -> list[dict[str, Any]]:
    """Return what the page's script reads: lists of names, and columns as base64 of little-endian numbers."""
    return [
        {
            "label": each.label,
            "steps": [{"why": step.why, "step": step.global_step, "ms": step.job_step_ms} for step in each.steps],
            "ranks": each.ranks,
            "ranksInRun": each.ranks_in_run,
            "shownFirst": each.shown_first,
            "lanes": each.lanes,
            "kinds": each.kinds,
            "whats": each.whats,
            "columns": {name: _packed(column) for name, column in each.columns.items()},
        }
        for each in spans
    ]


@dataclass(frozen=True)
class SpanKind:
    """A kind of spans: its colour on a light background, and whether it is drawn hatched."""

    name: str
    color: str
    hatched: bool


@dataclass(frozen=True)
class Switches:
    """The streams and kinds that can be switched off."""

    lanes: list[str]
    kinds: list[SpanKind]


def switches(spans: Sequence[TimelineSpans]) -> Switches:
    """Return the streams in the order in which they are read, and the kinds, of all timelines."""
    lanes: dict[str, None] = {}
    kinds: dict[str, str] = {}
    for each in spans:
        lanes |= dict.fromkeys(each.lanes)
        pairs = np.unique(np.stack([each.columns["kind"], each.columns["lane"]]), axis=1).T.tolist()
        for kind, lane in pairs:
            kinds.setdefault(each.kinds[kind], color_of(each.kinds[kind], each.lanes[lane]))
    return Switches(
        sorted(lanes, key=lane_order), [SpanKind(name, color, name == BLOCKED) for name, color in kinds.items()]
    )


def _packed(column: np.ndarray) -> dict[str, str]:
    little = column.astype(column.dtype.newbyteorder("<"))
    return {"type": column.dtype.name, "data": base64.b64encode(little.tobytes()).decode("ascii")}
