"""The page's charts of timelines, which a script fills from columns.

Must not put a word of a file into a template of Bokeh.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from aorta.report.page.bokeh_chart import FONT, BokehModel, Chart, draw, hover, model, new_chart, source
from aorta.report.page.timelines import TimelineSpans
from aorta.report.palette import BAND, INK, PAPER, QUIET

_BOX: Final = ("top", "bottom", "left", "right")
_TOLD: Final = ("color", "rank", "what", "begin", "took", "more", "instance")
_PAYLOAD: Final = ("label", "ranks", "ranks_in_run", "shown_first", "clock", "lanes", "whats")


def timeline_charts(spans: Sequence[TimelineSpans], titles: Mapping[str, str]) -> list[Chart]:
    """Return a chart for each dataset that has a step; its sources are empty until the page's script fills them. All
    charts share one range of milliseconds. `titles`: label -> what stands above, with the launch of a set.
    """
    charts: list[Chart] = []
    shared = model("Range1d", start=0, end=1, name="timeline-x")
    for number, of_label in enumerate(spans):
        if not of_label.steps:
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
        ground = {"fill_color": PAPER, "fill_alpha": 0.6, "line_color": INK, "line_width": 0.8}
        waited = _boxes(plot, number, "waits", _TOLD, **ground, **hatch)
        _boxes(plot, number, "chosen", fill_color=None, line_color=INK, line_width=2.5)
        names = source({key: [] for key in ("x", "y", "text", "align", "ink", "ground")}, f"timeline-labels-{number}")
        text = {"text_align": "align", "text_baseline": "middle", "text_font": FONT, "text_font_size": "11px"}
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
        charts.append(
            Chart(plot["name"], titles.get(of_label.label, of_label.label), "ms since the step began", plot, number)
        )
    return charts


def _boxes(plot: BokehModel, number: int, name: str, tips: Sequence[str] = (), /, **look: Any) -> BokehModel:
    columns = source({key: [] for key in (*_BOX, *tips)}, f"timeline-{name}-{number}")
    return draw(plot, "Quad", columns, **{key: key for key in _BOX}, **look)


def payload(spans: Sequence[TimelineSpans]) -> list[dict[str, Any]]:
    """Return what the page's script reads, as plain JSON values; columns as base64 of little-endian numbers."""

    def packed(columns: dict[str, np.ndarray]) -> dict[str, dict[str, str]]:
        little = {name: column.astype(column.dtype.newbyteorder("<")) for name, column in columns.items()}
        return {
            name: {"type": column.dtype.name, "data": base64.b64encode(column.tobytes()).decode("ascii")}
            for name, column in little.items()
        }

    return [
        {
            **{name: getattr(of_label, name) for name in _PAYLOAD},
            "steps": [step._asdict() for step in of_label.steps],
            "kinds": [*of_label.kinds],
            "columns": packed(of_label.columns),
            "windows": packed(of_label.windows),
        }
        for of_label in spans
    ]
