"""Charts of curves over global steps, and of maps of rank by step; they share one range of steps.

Must not draw a value that no sample gave, or scale a share to less than its whole range.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from bokeh.models import BasicTicker, ColorBar, ColumnDataSource, LinearColorMapper, NumeralTickFormatter, Range1d
from bokeh.palettes import Cividis256

from aorta.analysis.formatting import PAGE
from aorta.analysis.report.figure_data import MARKED_STEPS, Curve, Map, Series
from aorta.analysis.report.html.bokeh_chart import DASHES, FONT, NUMBERS, Chart, belongs, hover, new_chart, plain
from aorta.analysis.report.palette import INK, SERIES

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
BAND: Final = "Line: median over ranks. Band: lowest to highest rank."


def step_charts(series: Mapping[str, Series]) -> tuple[list[Chart], list[str]]:
    """Return charts of overlap ratio, job step and devices, all over the same steps; and sentences about what is not
    drawn: what does not change or has one step.
    """
    ratio = {label: each.curve("overlap_ratio") for label, each in series.items()}
    charts: list[Chart] = []
    notes: list[str] = []

    def add(name: str, title: str, unit: str, curves: Mapping[str, Curve], caption: str, whole: float | None) -> None:
        if not any(curve.known for curve in curves.values()):
            return
        if (sentence := _one_step(title, unit, curves)) is not None:
            notes.append(sentence)
            return
        plot = new_chart(f"steps-{name}", 190, "", unit, under=charts)
        plot.xaxis.ticker = _whole_numbers()
        if whole is not None:
            plot.y_range = Range1d(-0.03 * whole, 1.03 * whole)
        elif unit == "ms":
            plot.y_range.start = 0
        for number, (label, curve) in enumerate(curves.items()):
            if curve.known:
                _draw(plot, number, label, curve)
        charts.append(Chart(plot.name, title, caption, plot, folded=True))

    add("overlap_ratio", "Overlap ratio", "hidden / all", ratio, BAND, 1.0)
    job = {label: each.job_step() for label, each in series.items()}
    add(
        "job_step", "Job step", "ms", job, "Line: the slowest rank, which decides. Band: fastest to slowest rank.", None
    )
    sampled = {label: each.devices() for label, each in series.items()}
    for name, title, unit in _DEVICES:
        curves = {label: found[name] for label, found in sampled.items() if name in found}
        placed = {label: curves.get(label, _NOTHING) for label in series}
        if (sentence := _unchanged(title, unit, curves)) is not None:
            notes.append(sentence)
        else:
            add(name, title, unit, placed, "", 100.0 if unit == "%" else None)
    if charts:
        charts[-1].model.xaxis.axis_label = "global step"
    return charts, notes


def _unchanged(title: str, unit: str, curves: Mapping[str, Curve]) -> str | None:
    """Return what a chart of these would say, where none of them changes."""
    values = {label: curve.constant(100.0 if unit == "%" else None) for label, curve in curves.items() if curve.known}
    if not values or None in values.values():
        return None
    values_text = ", ".join(f"{value:,.4g}{f' {unit}' if unit else ''} ({label})" for label, value in values.items())
    return f"{title} does not change over the steps and has no chart: {values_text}."


def _one_step(title: str, unit: str, curves: Mapping[str, Curve]) -> str | None:
    """Return what a chart of these would say, where none of them has more than one step."""
    known = {label: curve for label, curve in curves.items() if curve.known}
    if any(len(curve.x) > 1 for curve in known.values()):
        return None
    name = unit if unit in ("", "ms") else "ratio" if unit == "hidden / all" else unit
    values_text = ", ".join(
        f"{PAGE.quantity(float(curve.middle[0]), name).strip()} ({label}, global step {curve.x[0]:.0f})"
        for label, curve in known.items()
    )
    return f"{title} has one step and no chart: {values_text}."


_NOTHING: Final = Curve(*(np.empty(0),) * 4)


def _draw(plot: Any, number: int, label: str, curve: Curve) -> None:
    color, dash = SERIES[number % len(SERIES)]
    source = ColumnDataSource({"x": curve.x, "low": curve.low, "middle": curve.middle, "high": curve.high})
    band = plot.varea(x="x", y1="low", y2="high", fill_color=color, fill_alpha=0.18, source=source)
    line = plot.line(x="x", y="middle", line_color=color, line_width=1.8, line_dash=DASHES[dash], source=source)
    drawn = [band, line]
    if len(curve.x) <= MARKED_STEPS:
        drawn.append(plot.scatter(x="x", y="middle", size=4, fill_color=color, line_color=None, source=source))
    for each in drawn:
        belongs(each, number, label)
    hover(
        plot,
        [line],
        ("run", "$name"),
        ("global step", "@x{0,0.[0]}"),
        ("value", "@middle{0,0.[0000]}"),
        ("lowest", "@low{0,0.[0000]}"),
        ("highest", "@high{0,0.[0000]}"),
        mode="vline",
    )


def map_charts(series: Mapping[str, Series], ranks: Sequence[tuple[int, int]]) -> tuple[list[Chart], list[str]]:
    """Return a map of rank by step for each dataset, with the same colours; and the metrics it can show (`MAPPED`).

    Args:
        ranks: of each dataset, how many ranks were read and how many its run has.
    """
    maps = {label: {name: each.map(name) for name in MAPPED} for label, each in series.items()}
    names = [name for name in MAPPED if any(found[name] is not None for found in maps.values())]
    charts: list[Chart] = []
    if not names:
        return [], []
    mapper = LinearColorMapper(palette=Cividis256, low=0, high=1, nan_color="rgba(127,127,127,0.25)", name="map-colors")
    for number, (label, found) in enumerate(maps.items()):
        known = [each for each in found.values() if each is not None]
        if not known:
            continue
        shape = known[0]
        height = int(np.clip(70 + 8 * shape.values.shape[0], 130, 420))
        plot = new_chart(f"map-{number}", height, "global step", "rank", under=charts)
        plot.y_range = Range1d(shape.end_rank - 0.5, shape.first_rank - 0.5)
        plot.xaxis.ticker, plot.yaxis.ticker = _whole_numbers(), _whole_numbers()
        plot.grid.visible = False
        images = {name: [_values(found[name], shape)] for name in names}
        source = ColumnDataSource(
            {"image": images[names[0]], **images, "x": [shape.first_step - 0.5], "y": [shape.first_rank - 0.5]}
            | {"dw": [shape.end_step - shape.first_step], "dh": [shape.end_rank - shape.first_rank]},
            name=f"map-data-{number}",
        )
        # The first row lies at `y`, which is the top: the range of ranks is reversed.
        image = plot.image(
            "image", x="x", y="y", dw="dw", dh="dh", color_mapper=mapper, source=source, origin="bottom_left"
        )
        hover(plot, [image], ("value", "@image{0,0.[0000]}"), ("global step", "$x{0,0}"), ("rank", "$y{0,0}"))
        bar = ColorBar(color_mapper=mapper, width=12, background_fill_color=None, title=None, padding=8)
        bar.formatter = NumeralTickFormatter(format=NUMBERS)
        bar.major_label_text_font, bar.major_label_text_font_size = FONT, "11px"
        bar.major_label_text_color, bar.major_tick_line_color = INK, INK
        plot.add_layout(bar, "right")
        caption = _cells(shape, *ranks[number])
        folded = max(read for read, _ in ranks) < MAPPED_RANKS
        charts.append(Chart(plot.name, plain(label), caption, plot, number, folded))
    return charts, names


def _whole_numbers() -> BasicTicker:
    return BasicTicker(min_interval=1)


def _values(drawn: Map | None, shape: Map) -> np.ndarray:
    return np.full_like(shape.values, np.nan) if drawn is None else drawn.values


def _cells(shape: Map, ranks: int, of: int) -> str:
    parts = [f"{ranks} of {of} ranks." if ranks < of else f"All {ranks} ranks." if ranks > 1 else "One rank."]
    if shape.steps_a_column > 1 or shape.ranks_a_row > 1:
        parts.append(f"A cell is the mean of {shape.ranks_a_row} rank(s) x {shape.steps_a_column} step(s).")
    if np.isnan(shape.values).any():
        parts.append("Grey: not read, or unknown.")
    return " ".join(parts)
