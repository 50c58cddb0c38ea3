"""What all charts of the page share: size, tools, ranges, and the look of a light background.

A script of the page finds a figure by its name. Must not use what Bokeh evaluates in the browser (CustomJS, WebGL),
which the page's content security policy forbids, or Bokeh's own legend, which lies over data: legends of the page are
its switches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from bokeh.models import (
    BasicTickFormatter,
    BoxZoomTool,
    HoverTool,
    NumeralTickFormatter,
    PanTool,
    ResetTool,
    WheelZoomTool,
)
from bokeh.plotting import figure

from aorta.analysis.report.palette import GRID, INK

FONT: Final = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif"
NUMBERS: Final = "0,0.[000000000]"
"""Of an axis: thousands apart as in the tables, never a power of ten."""
DASHES: Final = {"-": "solid", "--": "dashed", "-.": "dashdot", ":": "dotted"}


@dataclass(frozen=True)
class Chart:
    """`model` is a root of the page's document; `title` and `caption` stand round it as text."""

    name: str
    title: str
    caption: str
    model: Any
    dataset: int | None = None
    """Whose it is alone, by number."""
    folded: bool = False
    """Whether it waits behind a heading until somebody asks for it."""

    @property
    def label(self) -> str:
        """What the chart is, for those who do not see it."""
        return f"Chart: {self.title}. {self.caption}".strip()


def plain(text: str) -> str:
    """Return text for a canvas: what stands between delimiters of TeX would be typeset, so they are taken apart."""
    for mark in ("$$", "\\[", "\\(", "\\]", "\\)"):
        text = text.replace(mark, mark[0] + "\u200b" + mark[1])
    return text


def new_chart(
    name: str,
    height: int,
    x_label: str,
    y_label: str,
    *,
    zoom: str = "width",
    under: Sequence[Chart] = (),
    **ranges: Any,
) -> Any:
    """Return an empty figure as wide as the page. It zooms with Ctrl and the wheel, so that a page still scrolls.

    Args:
        under: charts above it, whose range from left to right it shares.
    """
    if under:
        ranges = {"x_range": under[-1].model.x_range, **ranges}
    pan, wheel = PanTool(dimensions=zoom), WheelZoomTool(dimensions=zoom, modifiers={"ctrl": True})
    box = BoxZoomTool(dimensions=zoom)
    plot = figure(
        name=name,
        height=height,
        sizing_mode="stretch_width",
        min_width=280,
        toolbar_location=None,
        tools=[pan, box, wheel, ResetTool()],
        active_drag=pan,
        active_scroll=wheel,
        outline_line_color=None,
        background_fill_color=None,
        border_fill_color=None,
        min_border_left=72,
        min_border_right=16,
        lod_threshold=None,
        x_axis_label=plain(x_label) or None,
        y_axis_label=plain(y_label) or None,
        **ranges,
    )
    for axis in plot.axis:
        axis.axis_label_text_font = axis.major_label_text_font = FONT
        axis.axis_label_text_font_size, axis.major_label_text_font_size = "12px", "11px"
        axis.axis_label_text_font_style = "normal"
        axis.axis_label_text_color = axis.major_label_text_color = INK
        axis.axis_line_color = axis.major_tick_line_color = INK
        axis.minor_tick_line_color = None
        if isinstance(axis.formatter, BasicTickFormatter):
            axis.formatter = NumeralTickFormatter(format=NUMBERS)
    for grid in plot.grid:
        grid.grid_line_color = GRID
    return plot


def hover(plot: Any, renderers: list[Any], *lines: tuple[str, str], mode: str = "mouse") -> None:
    """Show `lines` where the pointer is. Names of columns only: Bokeh escapes what a column holds. The page's styles
    hold for the text, as a tooltip is a child of its body.
    """
    text = "".join(
        f'<div><span style="color: var(--quiet)">{label}</span> {value}</div>' if label else f"<div>{value}</div>"
        for label, value in lines
    )
    plot.add_tools(HoverTool(renderers=renderers, tooltips=text, mode=mode, point_policy="follow_mouse"))


def belongs(renderer: Any, number: int, label: str) -> None:
    """Mark what is drawn as a dataset's: the page's switches find it by its tag, a tooltip says its name."""
    renderer.tags, renderer.name = [f"dataset-{number}"], label
