"""The timelines of the page: an empty chart for each dataset, and the columns that a script fills it from.

All charts share one range of milliseconds; `payload` is plain JSON values. Must not put a word of a file into a
template of Bokeh.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from aorta.analysis.report.html.bokeh_chart import FONT, Chart, Model, draw, hover, model, new_chart, source
from aorta.analysis.report.palette import BAND, INK, PAPER, QUIET, lane_color, light, phase_color
from aorta.analysis.report.timeline import (
    BLOCKED,
    BUBBLES,
    COPIES,
    EXPOSED,
    NAMED,
    OTHER_WORK,
    TimelineSpans,
    lane_order,
)
from aorta.timeline.classes import BUBBLE, COMPUTE

_BOX: Final = ("top", "bottom", "left", "right")
_TOLD: Final = ("color", "rank", "what", "begin", "took", "more", "instance")


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
    shared = model("Range1d", start=0, end=1, name="timeline-x")
    for number, each in enumerate(spans):
        if not each.steps:
            continue
        plot = new_chart(f"timeline-{number}", 240, "", "", x_range=shared, y_range=model("Range1d", start=1, end=0))
        plot["left"][0].attributes["ticker"] = model("FixedTicker", ticks=[])
        plot["center"][1].attributes["grid_line_color"] = None
        plot.attributes["min_border_left"] = 150

        _boxes(plot, number, "steps", fill_color=BAND, fill_alpha=0.5, line_color=QUIET, line_alpha=0.5)
        bounds = _boxes(plot, number, "bounds", ("told",), fill_color=QUIET, fill_alpha=0.4, line_color=None)
        ran = _boxes(plot, number, "spans", _TOLD, fill_color="color", line_color=INK, line_width=0.3, line_alpha=0.6)
        hatch = {"hatch_pattern": "right_diagonal_line", "hatch_color": INK, "hatch_scale": 6, "hatch_weight": 1}
        # On a ground of its own: the lines do not show on the dark of a backward pass.
        waited = _boxes(
            plot, number, "waits", _TOLD, fill_color=PAPER, fill_alpha=0.6, line_color=INK, line_width=0.8, **hatch
        )
        _boxes(plot, number, "chosen", fill_color=None, line_color=INK, line_width=2.5)
        names = source({key: [] for key in ("x", "y", "text", "ink", "ground")}, f"timeline-labels-{number}")
        text = {"text_align": "center", "text_baseline": "middle", "text_font": FONT, "text_font_size": "11px"}
        text |= {"text_color": "ink", "background_fill_color": "ground"}  # over hatching
        draw(plot, "Text", names, x="x", y="y", text="text", **text)
        for bars in (ran, waited):  # a tap chooses a collective, and must not fade the others
            bars.attributes |= {"selection_glyph": None, "nonselection_glyph": None}
        tap = model("TapTool", renderers=[ran])
        plot["toolbar"]["tools"].append(tap)
        plot["toolbar"].attributes["active_tap"] = tap
        rows = [("rank", "@rank"), ("", "@what"), ("start", "@begin"), ("length", "@took"), ("", "@more")]
        hover(plot, [ran, waited], *rows)
        hover(plot, [bounds], ("", "@told"))
        charts.append(Chart(plot["name"], each.label, "ms since the step began", plot, number))
    return charts


def _boxes(plot: Model, number: int, name: str, told: Sequence[str] = (), /, **look: Any) -> Model:
    """Draw boxes from a source that is empty yet; `told`: its other columns."""
    columns = source({key: [] for key in (*_BOX, *told)}, f"timeline-{name}-{number}")
    return draw(plot, "Quad", columns, **{key: key for key in _BOX}, **look)


def payload(spans: Sequence[TimelineSpans]) -> list[dict[str, Any]]:
    """Return what the page's script reads: lists of names, and columns as base64 of little-endian numbers."""
    return [
        {
            "label": each.label,
            "steps": [{"why": step.why, "step": step.global_step, "ms": step.job_step_ms} for step in each.steps],
            "ranks": each.ranks,
            "ranksInRun": each.ranks_in_run,
            "shownFirst": each.shown_first,
            "clock": each.clock,
            "lanes": each.lanes,
            "kinds": each.kinds,
            "whats": each.whats,
            "columns": _packed(each.columns),
            "windows": _packed(each.windows),
        }
        for each in spans
    ]


def switches(spans: Sequence[TimelineSpans]) -> dict[str, Any]:
    """Return what can be switched off: `lanes` in the order in which they are read, and `kinds` with the colour of each
    on a light background and whether it is `hatched`.
    """
    kinds: dict[str, dict[str, Any]] = {}
    for each in spans:
        for kind, lane in np.unique(np.stack([each.columns["kind"], each.columns["lane"]]), axis=1).T.tolist():
            name = each.kinds[kind]
            kinds.setdefault(
                name, {"name": name, "color": color_of(name, each.lanes[lane]), "hatched": name == BLOCKED}
            )
    return {
        "lanes": sorted({lane for each in spans for lane in each.lanes}, key=lane_order),
        "kinds": [*kinds.values()],
    }


def _packed(columns: Mapping[str, np.ndarray]) -> dict[str, dict[str, str]]:
    return {
        name: {
            "type": column.dtype.name,
            "data": base64.b64encode(column.astype(column.dtype.newbyteorder("<")).tobytes()).decode("ascii"),
        }
        for name, column in columns.items()
    }
