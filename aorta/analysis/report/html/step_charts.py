"""Charts of curves over global steps, and of maps of rank by step; they share one range of steps.

Must not draw a value that no sample gave, or scale a share to less than its whole range.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from aorta.analysis.formatting import PAGE
from aorta.analysis.report.figure_data import MARKED_STEPS, Curve, Map, Series
from aorta.analysis.report.html.bokeh_chart import (
    FONT,
    NUMBERS,
    Chart,
    Model,
    draw,
    hover,
    model,
    new_chart,
    plain,
    source,
)
from aorta.analysis.report.palette import INK, RAMP, SERIES, light

_DEVICES: Final = (
    ("device_sclk_mhz", "Clock of the compute units", "MHz"),
    ("device_power_w", "Power", "W"),
    ("device_temp_c", "Temperature", "°C"),
    ("device_util_pct", "Busy", "%"),
)
MAPPED: Final = {
    "overlap_ratio": ("overlap ratio", "1"),
    "exposed_comm_ms": ("exposed communication", "ms"),
    "compute_ms": ("computation", "ms"),
    "step_ms": ("step", "ms"),
}
"""Metrics that a map can show: title and unit."""
MAPPED_RANKS: Final = 8
"""With fewer, a map of them is folded."""
_DASHES: Final = {"-": "solid", "--": "dashed", "-.": "dashdot", ":": "dotted"}
_WHOLE: Final = {"%": 100.0, "hidden / all": 1.0}
"""Of a unit of shares: the range on which it is drawn."""


def step_charts(series: Mapping[str, Series]) -> tuple[list[Chart], list[str]]:
    """Return charts of overlap ratio, job step and devices, all over the same steps; and sentences about what is not
    drawn: a device's value that does not change, and what has one step.
    """
    band = "Line: median over ranks. Band: lowest to highest rank."
    slowest = "Line: the slowest rank, which decides. Band: fastest to slowest rank."
    ratio = {label: each.curve("overlap_ratio") for label, each in series.items()}
    job = {label: each.job_step() for label, each in series.items()}
    devices = {label: each.devices() for label, each in series.items()}
    throttled = {label: each.throttled for label, each in series.items()}
    rows = [
        ("overlap_ratio", "Overlap ratio", "hidden / all", ratio, band),
        ("job_step", "Job step", "ms", job, slowest),
    ]
    for name, title, unit in _DEVICES:
        told = "Marks: throttled." if name == "device_sclk_mhz" and any(map(len, throttled.values())) else ""
        rows.append((name, title, unit, {label: each.get(name, _NOTHING) for label, each in devices.items()}, told))
    charts: list[Chart] = []
    notes: list[str] = []
    shared = model("DataRange1d")
    for name, title, unit, curves, caption in rows:
        known = {label: curve for label, curve in curves.items() if curve.known}
        still = {label: curve.constant(_WHOLE.get(unit)) for label, curve in known.items()}
        if not known:
            continue
        if all(len(curve.x) == 1 for curve in known.values()):
            named = "ratio" if unit == "hidden / all" else unit
            values = [
                f"{PAGE.quantity(float(curve.middle[0]), named).strip()} ({label}, global step {curve.x[0]:.0f})"
                for label, curve in known.items()
            ]
            notes.append(f"{title} has one step and no chart: {', '.join(values)}.")
            continue
        if name.startswith("device_") and None not in still.values() and not caption:
            continue  # a flat line: the median in the table of metrics says it
        whole = _WHOLE.get(unit)
        share = None if whole is None else model("Range1d", start=-0.03 * whole, end=1.03 * whole)
        heights = share or model("DataRange1d", **({"start": 0} if unit == "ms" else {}))
        plot = new_chart(f"steps-{name}", 190, "", unit, x_range=shared, y_range=heights)
        plot["below"][0].attributes["ticker"] = _whole_numbers()
        for number, (label, curve) in enumerate(curves.items()):
            if curve.known:
                _draw(plot, (number, label), curve)
            if curve.known and caption.startswith("Marks"):
                at = throttled[label]
                marks = source({"x": at, "y": np.full(len(at), np.nanmin(curve.low)), "marker": ["x"] * len(at)})
                look = {"marker": "marker", "size": 8, "line_color": light("worse")}
                draw(plot, "Scatter", marks, (number, label), x="x", y="y", **look)
        charts.append(Chart(plot["name"], title, caption, plot, folded=True))
    if charts:
        charts[-1].model["below"][0].attributes["axis_label"] = "global step"
    return charts, notes


_NOTHING: Final = Curve(*(np.empty(0),) * 4)


def _draw(plot: Model, owner: tuple[int, str], curve: Curve) -> None:
    color, dash = SERIES[owner[0] % len(SERIES)]
    columns = source({"x": curve.x, "low": curve.low, "middle": curve.middle, "high": curve.high})
    draw(plot, "VArea", columns, owner, x="x", y1="low", y2="high", fill_color=color, fill_alpha=0.18)
    look = {"line_color": color, "line_width": 1.8, "line_dash": _DASHES[dash]}
    line = draw(plot, "Line", columns, owner, x="x", y="middle", **look)
    if len(curve.x) <= MARKED_STEPS:
        draw(plot, "Scatter", columns, owner, x="x", y="middle", size=4, fill_color=color, line_color=None)
    numbers = [("value", "@middle{0,0.[0000]}"), ("lowest", "@low{0,0.[0000]}"), ("highest", "@high{0,0.[0000]}")]
    hover(plot, [line], ("run", "$name"), ("global step", "@x{0,0.[0]}"), *numbers, mode="vline")


def map_charts(series: Mapping[str, Series], ranks: Sequence[tuple[int, int]]) -> tuple[list[Chart], list[str]]:
    """Return a map of rank by step for each dataset, with the same colours; and the metrics it can show (`MAPPED`).

    Args:
        ranks: of each dataset, how many ranks were read and how many its run has.
    """
    maps = {label: {name: each.map(name) for name in MAPPED} for label, each in series.items()}
    names = [name for name in MAPPED if any(found[name] is not None for found in maps.values())]
    charts: list[Chart] = []
    shared = model("DataRange1d")
    mapper = model("LinearColorMapper", palette=list(RAMP), low=0, high=1, name="map-colors")
    mapper.attributes["nan_color"] = "rgba(127,127,127,0.25)"
    for number, (label, found) in enumerate(maps.items()):
        shape = next((each for each in found.values() if each is not None), None)
        if shape is None:
            continue
        height = int(np.clip(70 + 8 * shape.values.shape[0], 130, 420))
        rows = model("Range1d", start=shape.end_rank - 0.5, end=shape.first_rank - 0.5)
        plot = new_chart(f"map-{number}", height, "global step", "rank", x_range=shared, y_range=rows)
        for side in ("below", "left"):
            plot[side][0].attributes["ticker"] = _whole_numbers()
        plot.attributes["center"] = []
        images = {name: [_values(found[name], shape)] for name in names}
        corner = {"x": [shape.first_step - 0.5], "y": [shape.first_rank - 0.5]}
        size = {"dw": [shape.end_step - shape.first_step], "dh": [shape.end_rank - shape.first_rank]}
        columns = source({"image": images[names[0]], **images, **corner, **size}, f"map-data-{number}")
        # The first row lies at `y`, which is the top: the range of ranks is reversed.
        box = {key: key for key in ("image", "x", "y", "dw", "dh")}
        image = draw(plot, "Image", columns, **box, color_mapper=mapper, origin="bottom_left")
        hover(plot, [image], ("value", "@image{0,0.[0000]}"), ("global step", "$x{0,0}"), ("rank", "$y{0,0}"))
        text = {"major_label_text_font": FONT, "major_label_text_font_size": "11px"}
        colors = dict.fromkeys(("major_label_text_color", "major_tick_line_color"), INK)
        bar = model("ColorBar", color_mapper=mapper, width=12, background_fill_color=None, padding=8, **text, **colors)
        bar.attributes["formatter"] = model("NumeralTickFormatter", format=NUMBERS)
        plot.attributes["right"] = [bar]
        folded = max(read for read, _ in ranks) < MAPPED_RANKS
        charts.append(Chart(plot["name"], plain(label), _cells(shape, *ranks[number]), plot, number, folded))
    return charts, names


def _whole_numbers() -> Model:
    return model("BasicTicker", min_interval=1)


def _values(drawn: Map | None, shape: Map) -> np.ndarray:
    return np.full_like(shape.values, np.nan) if drawn is None else drawn.values


def _cells(shape: Map, ranks: int, of: int) -> str:
    parts = [f"{ranks} of {of} ranks." if ranks < of else f"All {ranks} ranks." if ranks > 1 else "One rank."]
    if shape.steps_a_column > 1 or shape.ranks_a_row > 1:
        parts.append(f"A cell is the mean of {shape.ranks_a_row} rank(s) x {shape.steps_a_column} step(s).")
    if np.isnan(shape.values).any():
        parts.append("Grey: not read, or unknown.")
    return " ".join(parts)
