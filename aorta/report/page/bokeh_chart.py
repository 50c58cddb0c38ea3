"""What all charts of the page share: models of Bokeh as the JSON that its script reads, and the look of a figure.

    plot = new_chart("steps", 190, "global step", "ms")
    line = draw(plot, "Line", source({"x": steps, "y": times}), x="x", y="y", line_color=INK)
    content, ids = document([plot])       # for Bokeh.embed.embed_items

Models are written down, not built with the package bokeh: loading it and validating some 600 models took longer than
everything else on the page. The tests read each chart with it. Must not use what Bokeh evaluates in the browser
(CustomJS, WebGL), which the page's content security policy forbids, or Bokeh's own legend, which lies over data.
"""

from __future__ import annotations

import base64
import gzip
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np

from aorta.report.palette import GRID, INK

FONT: Final = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif"
NUMBERS: Final = "0,0.[000000000]"
"""Of an axis: thousands apart as in the tables, never a power of ten."""


class Model:
    """A model of Bokeh: the name of its class, and the attributes that are not as by default; a mapping among them is a
    map of Bokeh.
    """

    def __init__(self, kind: str, **attributes: Any) -> None:
        self.kind, self.attributes = kind, attributes

    def __getitem__(self, name: str) -> Any:
        return self.attributes[name]


def document(roots: Sequence[Model]) -> tuple[dict[str, Any], list[str]]:
    """Return the JSON of a document (`Document.from_json` of the package reads it), and the ids of `roots` in it."""
    ids: dict[int, str] = {}

    def encoded(item: Any) -> Any:
        if isinstance(item, Model):
            if item.kind == "field":
                return {"type": "field", **item.attributes}
            if id(item) in ids:
                return {"id": ids[id(item)]}
            ids[id(item)] = key = f"p{len(ids)}"
            attributes = {name: encoded(value) for name, value in item.attributes.items()}
            return {"type": "object", "name": item.kind, "id": key, "attributes": attributes}
        if isinstance(item, np.ndarray):
            item = item.astype(np.float64) if item.dtype == np.int64 else item  # a script has no such integers
            packed = gzip.compress(item.astype(item.dtype.newbyteorder("<")).tobytes(), mtime=0)
            array = {"type": "bytes", "data": base64.b64encode(packed).decode("ascii")}
            kind = {"dtype": item.dtype.name, "order": "little", "shape": list(item.shape)}
            return {"type": "ndarray", "array": array, **kind}
        if isinstance(item, Mapping):
            return {"type": "map", "entries": [[name, encoded(value)] for name, value in item.items()]}
        if isinstance(item, list | tuple):
            return [encoded(value) for value in item]
        return {"type": "number", "value": str(item)} if isinstance(item, float) and math.isnan(item) else item

    config = encoded(Model("DocumentConfig", notifications=Model("Notifications")))
    content = {"version": version("bokeh"), "title": "AORTA", "config": config, "roots": [*map(encoded, roots)]}
    return content, [ids[id(root)] for root in roots]


def script() -> str:
    """Return Bokeh's own script: without widgets, tables, MathJax and WebGL."""
    spec = find_spec("bokeh")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("No module named 'bokeh'", name="bokeh")
    return Path(spec.origin).with_name("server").joinpath("static/js/bokeh.min.js").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Chart:
    """`model` is a root of the page's document; `title` and `caption` stand round it as text. `dataset`: whose it is
    alone, by number; `folded`: whether it waits behind a heading until somebody asks for it.
    """

    name: str
    title: str
    caption: str
    model: Model
    dataset: int | None = None
    folded: bool = False


def new_chart(name: str, height: int, x_label: str, y_label: str, *, log: bool = False, **ranges: Model) -> Model:
    """Return an empty figure as wide as the page. It zooms with Ctrl and the wheel, so that a page still scrolls.

    Args:
        log: the axis from left to right is of logarithms, with ticks of its own, and both axes zoom.
        ranges: `x_range` and `y_range`, where they are not those of the data.
    """
    zoom = "both" if log else "width"
    pan = Model("PanTool", dimensions=zoom)
    wheel = Model("WheelZoomTool", dimensions=zoom, modifiers={"ctrl": True})
    tools = [pan, Model("BoxZoomTool", dimensions=zoom), wheel, Model("ResetTool")]
    plot = Model(
        "Figure",
        name=name,
        height=height,
        sizing_mode="stretch_width",
        min_width=280,
        toolbar_location=None,
        toolbar=Model("Toolbar", tools=tools, active_drag=pan, active_scroll=wheel),
        outline_line_color=None,
        background_fill_color=None,
        border_fill_color=None,
        min_border_left=72,
        min_border_right=16,
        lod_threshold=None,
        renderers=[],
        center=[],
        **{"x_range": Model("DataRange1d"), "y_range": Model("DataRange1d"), **ranges},
    )
    for dimension_index, (dimension, side, label) in enumerate((("x", "below", x_label), ("y", "left", y_label))):
        kind = "Log" if log and dimension == "x" else "Linear"
        axis = Model(
            f"{kind}Axis",
            axis_label=label or None,
            **dict.fromkeys(("axis_label_text_font", "major_label_text_font"), FONT),
            **dict.fromkeys(("axis_label_text_color", "major_label_text_color", "axis_line_color"), INK),
            major_tick_line_color=INK,
            axis_label_text_font_size="12px",
            axis_label_text_font_style="normal",
            major_label_text_font_size="11px",
            minor_tick_line_color=None,
            ticker=Model("BasicTicker"),
            formatter=Model("NumeralTickFormatter", format=NUMBERS),
        )
        plot.attributes |= {side: [axis], f"{dimension}_scale": Model(f"{kind}Scale")}
        plot["center"].append(Model("Grid", dimension=dimension_index, axis=axis, grid_line_color=GRID))
    return plot


def source(columns: Mapping[str, Any], name: str | None = None) -> Model:
    """Return columns that glyphs draw; a script of the page finds them by their name."""
    return Model("ColumnDataSource", data=dict(columns), name=name)


def draw(plot: Model, glyph: str, columns: Model, owner: tuple[int, str] | None = None, /, **properties: Any) -> Model:
    """Draw a glyph of Bokeh; a property that is the name of a column takes its values.

    Args:
        owner: number and label of the dataset whose it is: the page's switches find it by its tag, a tooltip says its
            name.
    """
    for key, value in properties.items():
        if isinstance(value, str) and value in columns["data"]:
            properties[key] = Model("field", field=value)
    renderer = Model("GlyphRenderer", data_source=columns, glyph=Model(glyph, **properties))
    if owner is not None:
        renderer.attributes |= {"tags": [f"dataset-{owner[0]}"], "name": owner[1]}
    plot["renderers"].append(renderer)
    return renderer


def hover(plot: Model, renderers: Sequence[Model], *lines: tuple[str, str], mode: str = "mouse") -> None:
    """Show `lines` where the pointer is. Names of columns only: Bokeh escapes what a column holds. The page's styles
    hold for the text, as a tooltip is a child of its body.
    """
    text = "".join(
        f'<div><span style="color: var(--quiet)">{label}</span> {value}</div>' if label else f"<div>{value}</div>"
        for label, value in lines
    )
    tool = Model("HoverTool", renderers=[*renderers], tooltips=text, mode=mode, point_policy="follow_mouse")
    plot["toolbar"]["tools"].append(tool)
