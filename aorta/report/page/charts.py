"""The charts of the page but for bars, as models of Bokeh in the JSON that its script reads: single launches, curves
over steps, the bandwidth of collectives, and timelines, which a script fills from columns.

    plot = new_chart("steps", 190, "global step", "ms")
    line = draw(plot, "Line", source({"x": steps, "y": times}), x="x", y="y", line_color=INK)
    content, ids = document([plot])       # for Bokeh.embed.embed_items

Models are written down, not built with the package bokeh: loading it and validating some 600 models took longer than
everything else on the page. The tests read each chart with it. Must not: use what Bokeh evaluates in the browser
(CustomJS, WebGL), which the page's content security policy forbids, or Bokeh's own legend, which lies over data; put a
word of a file into a template of Bokeh; use a warm-up step, drop a step (where more than fit, neighbours share a point,
and their lowest and highest stay in its band), draw a value that is not known, or a share on less than its whole range.
"""

from __future__ import annotations

import base64
import gzip
import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from aorta.analysis.aggregate import LabelledRun, job_step_times
from aorta.analysis.dataframes import STEP_MS, step_column
from aorta.analysis.devices import THROTTLED, step_columns
from aorta.documents.comparison import SIDES, Comparison
from aorta.documents.dataset import DatasetEntry
from aorta.documents.formatting import PAGE
from aorta.read.frames import Floats, Ints
from aorta.report.page.timelines import TimelineSpans
from aorta.report.palette import BAND, GRID, INK, PAPER, QUIET, SERIES, light

FONT: Final = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif"
NUMBERS: Final = "0,0.[000000000]"
"""Of an axis: thousands apart as in the tables, never a power of ten."""


class BokehModel:
    """A model of Bokeh: the name of its class, and the attributes that are not as by default; a mapping among them is a
    map of Bokeh.
    """

    def __init__(self, kind: str, **attributes: Any) -> None:
        self.kind, self.attributes = kind, attributes

    def __getitem__(self, name: str) -> Any:
        return self.attributes[name]


def document(roots: Sequence[BokehModel]) -> tuple[dict[str, Any], list[str]]:
    """Return the JSON of a document (`Document.from_json` of the package reads it), and the ids of `roots` in it."""
    ids: dict[int, str] = {}

    def encoded(item: Any) -> Any:
        if isinstance(item, BokehModel):
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

    config = encoded(BokehModel("DocumentConfig", notifications=BokehModel("Notifications")))
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

    title: str
    caption: str
    model: BokehModel
    dataset: int | None = None
    folded: bool = False


def new_chart(
    name: str, height: int, x_label: str, y_label: str, *, log: bool = False, **ranges: BokehModel
) -> BokehModel:
    """Return an empty figure as wide as the page. It zooms with Ctrl and the wheel, so that a page still scrolls.

    Args:
        log: the axis from left to right is of logarithms, with ticks of its own, and both axes zoom.
        ranges: `x_range` and `y_range`, where they are not those of the data.
    """
    zoom = "both" if log else "width"
    pan = BokehModel("PanTool", dimensions=zoom)
    wheel = BokehModel("WheelZoomTool", dimensions=zoom, modifiers={"ctrl": True})
    tools = [pan, BokehModel("BoxZoomTool", dimensions=zoom), wheel, BokehModel("ResetTool")]
    plot = BokehModel(
        "Figure",
        name=name,
        height=height,
        sizing_mode="stretch_width",
        min_width=280,
        toolbar_location=None,
        toolbar=BokehModel("Toolbar", tools=tools, active_drag=pan, active_scroll=wheel),
        outline_line_color=None,
        background_fill_color=None,
        border_fill_color=None,
        min_border_left=72,
        min_border_right=16,
        lod_threshold=None,
        renderers=[],
        center=[],
        **{"x_range": BokehModel("DataRange1d"), "y_range": BokehModel("DataRange1d"), **ranges},
    )
    for dimension_index, (dimension, side, label) in enumerate((("x", "below", x_label), ("y", "left", y_label))):
        kind = "Log" if log and dimension == "x" else "Linear"
        axis = BokehModel(
            f"{kind}Axis",
            axis_label=label or None,
            **dict.fromkeys(("axis_label_text_font", "major_label_text_font"), FONT),
            **dict.fromkeys(("axis_label_text_color", "major_label_text_color", "axis_line_color"), INK),
            major_tick_line_color=INK,
            axis_label_text_font_size="12px",
            axis_label_text_font_style="normal",
            major_label_text_font_size="11px",
            minor_tick_line_color=None,
            ticker=BokehModel("BasicTicker"),
            formatter=BokehModel("NumeralTickFormatter", format=NUMBERS),
        )
        plot.attributes |= {side: [axis], f"{dimension}_scale": BokehModel(f"{kind}Scale")}
        plot["center"].append(BokehModel("Grid", dimension=dimension_index, axis=axis, grid_line_color=GRID))
    return plot


def source(columns: Mapping[str, Any], name: str | None = None) -> BokehModel:
    """Return columns that glyphs draw; a script of the page finds them by their name."""
    return BokehModel("ColumnDataSource", data=dict(columns), name=name)


def draw(
    plot: BokehModel, glyph: str, columns: BokehModel, owner: tuple[int, str] | None = None, /, **properties: Any
) -> BokehModel:
    """Draw a glyph of Bokeh; a property that is the name of a column takes its values.

    Args:
        owner: number and label of the dataset whose it is: the page's switches find it by its tag, a tooltip says its
            name.
    """
    for key, value in properties.items():
        if isinstance(value, str) and value in columns["data"]:
            properties[key] = BokehModel("field", field=value)
    renderer = BokehModel("GlyphRenderer", data_source=columns, glyph=BokehModel(glyph, **properties))
    if owner is not None:
        renderer.attributes |= {"tags": [f"dataset-{owner[0]}"], "name": owner[1]}
    plot["renderers"].append(renderer)
    return renderer


def hover(plot: BokehModel, renderers: Sequence[BokehModel], *lines: tuple[str, str], mode: str = "mouse") -> None:
    """Show `lines` where the pointer is. Names of columns only: Bokeh escapes what a column holds. The page's styles
    hold for the text, as a tooltip is a child of its body.
    """
    text = "".join(
        f'<div><span style="color: var(--quiet)">{label}</span> {value}</div>' if label else f"<div>{value}</div>"
        for label, value in lines
    )
    tool = BokehModel("HoverTool", renderers=[*renderers], tooltips=text, mode=mode, point_policy="follow_mouse")
    plot["toolbar"]["tools"].append(tool)


def launch_charts(comparison: Comparison) -> list[Chart]:
    """Return the job step of every launch, in the order of the plan; empty without launch sets, where each side has
    one launch (the cards say it), and where no job step is known.
    """
    launches = comparison.launches
    if not launches or max(map(len, launches.values())) < 2:
        return []
    plot = new_chart(
        "launches-job_step_ms", 230, "launch of its side", "ms", y_range=BokehModel("DataRange1d", start=0)
    )
    plot["below"][0]["ticker"].attributes["min_interval"] = 1
    drawn = 0
    for number, side in enumerate(SIDES):
        known = [(index, launch) for index, launch in enumerate(launches[side]) if launch.job_step_ms is not None]
        columns = {
            "x": [index for index, _ in known],
            "y": [launch.job_step_ms for _, launch in known],
            "told": [PAGE.quantity(launch.job_step_ms, "ms") for _, launch in known],
            "path": [launch.path for _, launch in known],
        }
        drawn += len(known)
        color, marker = SERIES[number][0], ("circle", "square")[number]
        look = {"marker": marker, "size": 10, "fill_color": color, "line_color": color, "fill_alpha": 0.7}
        dots = draw(plot, "Scatter", source(columns), (number, comparison.label(side)), x="x", y="y", **look)
        hover(plot, [dots], ("run", "$name"), ("", "@told"), ("", "@path"))
    caption = "One point is the median of one launch."
    return [Chart("Job step, launch by launch", caption, plot)] if drawn else []


POINTS: Final = 1_000
"""Of a curve; more than a screen is wide."""
MARKED_STEPS: Final = 60
"""With more, markers run into a thick line."""
_BAND: Final = "Line: median over ranks. Band: lowest to highest rank."
_CURVES: Final = (
    ("overlap_ratio", "Overlap ratio", "hidden / all", _BAND),
    ("job_step", "Job step", "ms", "Line: the slowest rank, which decides. Band: fastest to slowest rank."),
    ("device_sclk_mhz", "Clock of the compute units", "MHz", ""),
    ("device_power_w", "Power", "W", ""),
    ("device_temp_c", "Temperature", "°C", ""),
    ("device_util_pct", "Busy", "%", ""),
)
"""Name, title, unit and caption."""
_WHOLE: Final = {"%": 100.0, "hidden / all": 1.0}
"""Of a unit of shares: the range on which it is drawn."""


class Curve(NamedTuple):
    """`x` is the middle global step of each point; `low` and `high` are over the ranks and steps of the point. NaN is a
    gap.
    """

    x: np.ndarray
    low: np.ndarray
    middle: np.ndarray
    high: np.ndarray


def steps_a_point(global_steps: np.ndarray) -> int:
    """Return how many of these steps share a point of a curve."""
    return max(1, -(-len(global_steps) // POINTS))


def over_steps(global_steps: Ints, values: Floats) -> Curve:
    """Return the median of `values` over the ranks and steps of each point, between the lowest and the highest. Of up
    to `POINTS` steps each is a point; of more, neighbours share one.
    """
    steps, index = np.unique(global_steps, return_inverse=True)
    together = steps_a_point(steps)
    first = np.arange(0, len(steps), together)
    x = np.add.reduceat(steps, first) / np.diff(first, append=len(steps)) if len(steps) else np.zeros(0)
    known = ~np.isnan(values)
    point, value = index[known] // together, values[known]
    value = value[np.lexsort((value, point))]
    count = np.bincount(point, minlength=len(x))
    begin, some = np.cumsum(count) - count, count > 0
    low, middle, high = (np.full(len(x), np.nan) for _ in range(3))
    low[some], high[some] = value[begin[some]], value[(begin + count - 1)[some]]
    middle[some] = (value[(begin + (count - 1) // 2)[some]] + value[(begin + count // 2)[some]]) / 2
    return Curve(x, low, middle, high)


def curves_of(dataset: LabelledRun) -> tuple[dict[str, Curve], np.ndarray]:
    """Return what changes over the steps of a run by its name in `_CURVES`, where it is known, and the global steps in
    which a device was throttled. The job step is the max over ranks: its band reaches from the fastest rank of a point
    to the slowest.
    """
    global_steps, run = dataset.column("global_step"), dataset.run
    times, steps, _ = job_step_times(dataset)
    timed = run.steps.global_step[run.steps.timed]
    every = np.unique(timed)
    job_ms = np.full(len(every), np.nan)
    job_ms[np.searchsorted(every, steps)] = times
    curves = {
        "overlap_ratio": over_steps(global_steps, dataset.values("overlap_ratio")),
        "job_step": over_steps(timed, step_column(run, STEP_MS)[run.steps.timed])._replace(
            middle=over_steps(every, job_ms).middle
        ),
    }
    throttled = np.empty(0)
    if not dataset.device_samples.failed.all():
        sampled = step_columns(dataset.run, dataset.device_samples)
        curves |= {name: over_steps(global_steps, values[dataset.used]) for name, values in sampled.items()}
        throttled = np.unique(global_steps[sampled[THROTTLED][dataset.used] == 1.0])
    known = {name: curve for name, curve in curves.items() if len(curve.x) > 1 and not np.isnan(curve.middle).all()}
    return known, throttled


def step_charts(datasets: Mapping[str, LabelledRun]) -> list[Chart]:
    """Return charts of overlap ratio, job step and devices, all over the same steps; none of what has one step."""
    curves_by_label = {label: curves_of(dataset) for label, dataset in datasets.items()}
    charts: list[Chart] = []
    shared = BokehModel("DataRange1d")
    for name, title, unit, caption in _CURVES:
        if not any(name in curves for curves, _ in curves_by_label.values()):
            continue
        whole = _WHOLE.get(unit)
        heights = BokehModel("DataRange1d", **({"start": 0} if unit == "ms" else {}))
        if whole is not None:
            heights = BokehModel("Range1d", start=-0.03 * whole, end=1.03 * whole)
        plot = new_chart(f"steps-{name}", 190, "", unit, x_range=shared, y_range=heights)
        plot["below"][0].attributes["ticker"] = BokehModel("BasicTicker", min_interval=1)
        for number, (label, (curves, throttled)) in enumerate(curves_by_label.items()):
            if name not in curves:
                continue
            curve, owner = curves[name], (number, label)
            color, dash = SERIES[number % len(SERIES)]
            columns = source(curve._asdict())
            draw(plot, "VArea", columns, owner, x="x", y1="low", y2="high", fill_color=color, fill_alpha=0.18)
            look = {"line_color": color, "line_width": 1.8, "line_dash": dash}
            line = draw(plot, "Line", columns, owner, x="x", y="middle", **look)
            if len(curve.x) <= MARKED_STEPS:
                draw(plot, "Scatter", columns, owner, x="x", y="middle", size=4, fill_color=color, line_color=None)
            values = [("value", "@middle{0,0.[000]}"), ("lowest", "@low{0,0.[000]}"), ("highest", "@high{0,0.[000]}")]
            hover(plot, [line], ("run", "$name"), ("global step", "@x{0,0.[0]}"), *values, mode="vline")
            if name == "device_sclk_mhz" and len(throttled):
                caption = "Marks: throttled."
                count = len(throttled)
                marks = source({"x": throttled, "y": np.full(count, np.nanmin(curve.low)), "marker": ["x"] * count})
                worse = light("worse")
                draw(plot, "Scatter", marks, owner, x="x", y="y", marker="marker", size=8, line_color=worse)
        charts.append(Chart(title, caption, plot, folded=True))
    if charts:
        charts[-1].model["below"][0].attributes["axis_label"] = "global step"
    return charts


_KINDS: Final = {
    "allreduce": ("circle", "●"),
    "reducescatter": ("square", "■"),
    "allgather": ("triangle", "▲"),
    "alltoall": ("diamond", "◆"),
}


def marker_of(kind: str) -> tuple[str, str]:
    """Return the marker of a kind of collective in the chart of bandwidth, and the sign that looks like it."""
    return _KINDS.get(kind, ("inverted_triangle", "▼"))


def comm_charts(entries: Mapping[str, DatasetEntry]) -> list[Chart]:
    """Return the bus bandwidth over the size of collectives, with its 5th to 95th percentile; empty where fewer than
    two sizes are known: the table says more of one.
    """
    heights = BokehModel("DataRange1d", start=0)
    plot = new_chart("bandwidth", 320, "bytes of the collective", "bus bandwidth, GB/s", log=True, y_range=heights)
    sizes: list[int] = []
    for number, (label, entry) in enumerate(entries.items()):
        rows = [row for row in entry.matched if row.bytes and row.busbw_gb_per_s.median is not None]
        if not rows:
            continue
        bandwidths = [row.busbw_gb_per_s for row in rows]
        sizes += (bytes_ := [row.bytes or 0 for row in rows])
        columns = {
            "x": bytes_,
            "y": [row.median for row in bandwidths],
            "low": [row.p5 for row in bandwidths],
            "high": [row.p95 for row in bandwidths],
            "marker": [marker_of(row.kind)[0] for row in rows],
            "what": [
                f"{row.kind}, {PAGE.size(row.bytes)}, group {row.group} of {row.group_size or '?'}" for row in rows
            ],
            "told": [
                f"{PAGE.number(row.median)} GB/s ({PAGE.number(row.p5)} to {PAGE.number(row.p95)})"
                for row in bandwidths
            ],
        }
        color, owner, points = SERIES[number % len(SERIES)][0], (number, label), source(columns)
        look = {"size": 9, "fill_color": color, "fill_alpha": 0.65, "line_color": color}
        dots = draw(plot, "Scatter", points, owner, x="x", y="y", marker="marker", **look)
        draw(plot, "Segment", points, owner, x0="x", x1="x", y0="low", y1="high", line_color=color, line_width=1.5)
        hover(plot, [dots], ("run", "$name"), ("", "@what"), ("", "@told"))
    if len(set(sizes)) < 2:
        return []
    ticks = round_sizes(min(sizes), max(sizes))
    written = {tick: PAGE.size(tick) for tick in ticks}
    plot["below"][0].attributes |= {"ticker": BokehModel("FixedTicker", ticks=ticks), "major_label_overrides": written}
    plot.attributes["x_range"] = BokehModel("Range1d", start=ticks[0], end=ticks[-1])
    caption = "Median of each kind, group and size; the bar reaches from the 5th to the 95th percentile."
    return [Chart("Bandwidth over size", caption, plot)]


def round_sizes(least: int, most: int) -> list[int]:
    """Return round sizes from `least` to `most` bytes and the next ones on either side: powers of ten, or where fewer
    than three of them are in between, halves and fifths too. Bokeh's own ticks of an axis of logarithms are written
    6.000e+5 where it spans less than a decade.
    """
    for mantissas in ((1,), (1, 2, 5)):
        sizes = [mantissa * 10**power for power in range(15) for mantissa in mantissas]
        first, behind = bisect_left(sizes, least) - 1, bisect_right(sizes, most)
        if behind - first > 3:
            break
    return sizes[max(first, 0) : behind + 1]


_BOX: Final = ("top", "bottom", "left", "right")
_TOLD: Final = ("color", "rank", "what", "begin", "took", "more", "instance")


def timeline_charts(spans: Sequence[TimelineSpans], titles: Mapping[str, str]) -> list[Chart]:
    """Return a chart for each dataset that has a step; its sources are empty until the page's script fills them. All
    charts share one range of milliseconds. `titles`: label -> what stands above, with the launch of a set.
    """
    charts: list[Chart] = []
    shared = BokehModel("Range1d", start=0, end=1, name="timeline-x")
    for number, of_label in enumerate(spans):
        if not of_label.steps:
            continue
        plot = new_chart(
            f"timeline-{number}", 240, "", "", x_range=shared, y_range=BokehModel("Range1d", start=1, end=0)
        )
        plot["left"][0].attributes["ticker"] = BokehModel("FixedTicker", ticks=[])
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
        tap = BokehModel("TapTool", renderers=[ran])
        plot["toolbar"]["tools"].append(tap)
        plot["toolbar"].attributes["active_tap"] = tap
        rows = [("rank", "@rank"), ("", "@what"), ("start", "@begin"), ("length", "@took"), ("", "@more")]
        hover(plot, [ran, waited], *rows)
        hover(plot, [bounds], ("", "@told"))
        title = titles.get(of_label.label, of_label.label)
        charts.append(Chart(title, "ms since the step began", plot, number))
    return charts


def _boxes(plot: BokehModel, number: int, name: str, tips: Sequence[str] = (), /, **look: Any) -> BokehModel:
    columns = source({key: [] for key in (*_BOX, *tips)}, f"timeline-{name}-{number}")
    return draw(plot, "Quad", columns, **{key: key for key in _BOX}, **look)
