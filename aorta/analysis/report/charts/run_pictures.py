"""The pictures of one run as PNG files: metrics over global steps, and where the time of a step goes rank by rank.

`{label}_timeline.png` shows times, `overlap_ratio.png` the ratio of every dataset, and `{label}_devices.png` the ratio
above what the devices did: a line for the median of the ranks, a band from the lowest rank to the highest.
`{label}_breakdown.png` has five parts of a step that add up to it, so it must not use medians: they would no longer add
up. `{label}_streams.png` has what ran when in one step. Must not hide warm-up in the timeline (it is shaded), show it
in the ratio (it is left out, as in the numbers), draw a value that no sample gave, or line ranks up in time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from aorta.analysis.aggregate import LabelledRun
from aorta.analysis.devices import JOINED_ON, THROTTLED, step_columns
from aorta.analysis.host_bound import DRAWN
from aorta.analysis.report.charts.style import WARM_UP, heading, legend, new_figure, save, tidy, titled
from aorta.analysis.report.figure_data import (
    MARKED_STEPS,
    NEEDED,
    PARTS,
    chosen_steps,
    constant,
    over_steps,
    parts,
)
from aorta.analysis.report.palette import BAND, INK, SERIES, lane_color, light
from aorta.errors import InputError
from aorta.timeline.classes import COMPUTE
from aorta.timeline.intervals import Interval
from aorta.timeline.overlap import NS_PER_MS

_PANELS = (
    (("compute_ms", "compute", light("compute"), "-"), ("comm_ms", "communication", light("communication"), "--")),
    (
        ("compute_comm_ms", "hidden communication", light("hidden"), "-"),
        ("exposed_comm_ms", "exposed communication", light("exposed"), "--"),
    ),
)
_DEVICE_PANELS = (
    ("overlap_ratio", "overlap ratio", ""),
    ("device_sclk_mhz", "clock", "MHz"),
    ("device_power_w", "power", "W"),
    ("device_temp_c", "temperature", "°C"),
    ("device_util_pct", "busy", "%"),
)
_WHOLE = {"overlap_ratio": 1.0, "device_util_pct": 100.0}
"""Shares are drawn on their whole range: a per cent of difference must not look like a fall."""
_LABELLED_RANKS = 16
SHOWN_RANKS = 16
_EXPOSED = "exposed"
_TITLES = {
    "allreduce": "all-reduce",
    "reducescatter": "reduce-scatter",
    "allgather": "all-gather",
    "alltoall": "all-to-all",
    "aux": "optimizer, data",
    "bubble": "bubbles",
}


Draw: TypeAlias = Callable[[Path], str | None]
"""Draws to a path; returns None, or why there is nothing to draw."""


def pictures(datasets: Sequence[LabelledRun]) -> Iterator[tuple[str, Draw]]:
    """Yield every picture of a report: file name, and how to draw it."""
    for dataset in datasets:
        yield f"{dataset.label}_timeline.png", partial(draw_timeline, dataset)
        yield f"{dataset.label}_streams.png", partial(draw_streams, dataset)
        yield f"{dataset.label}_breakdown.png", partial(draw_breakdown, dataset)
        yield f"{dataset.label}_devices.png", partial(draw_devices, dataset)
    yield "overlap_ratio.png", partial(draw_overlap_ratio, datasets)


def draw_timeline(dataset: LabelledRun, path: Path) -> str | None:
    """Draw compute, communication, hidden and exposed milliseconds per global step."""
    steps = dataset.table("global_step", "warmup", warmup=True)
    if steps.empty:
        return "no steps in the record"
    if steps["global_step"].nunique() == 1:
        return "one step makes no curve; its numbers are in the tables"
    measured = set()
    figure = new_figure(9, 5.6)
    panels = figure.subplots(2, 1, sharex=True)
    for axes, lines in zip(panels, _PANELS, strict=True):
        for column, title, color, style in lines:
            if column in dataset.metrics:
                steps[column] = dataset.table(column, warmup=True)[column]
                if steps[column].notna().any():
                    measured.add(column)
                    draw_line(axes, steps, column, title, color, style)
                del steps[column]  # of a thousand ranks one column fits, and four need not
        shade_warmup(axes, steps)
        tidy(axes)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("ms per step")
    if "comm_ms" not in measured:
        panels[1].text(0.5, 0.5, "communication was not measured", ha="center", transform=panels[1].transAxes)
        panels[1].set_yticks([])
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    panels[-1].set_xlabel("global step (line: median over ranks, band: lowest to highest rank)", fontsize=9)
    legend(figure, panels)
    heading(figure, panels[0], dataset, "time in computation and communication")
    save(figure, path)
    return None


def draw_overlap_ratio(datasets: Sequence[LabelledRun], path: Path) -> str | None:
    """Draw the overlap ratio per global step, one line per dataset."""
    drawn = [dataset for dataset in datasets if not np.isnan(dataset.values("overlap_ratio")).all()]
    if not drawn:
        return "no overlap ratio in any step after warm-up"
    if all(len(dataset.global_steps) == 1 for dataset in drawn):
        return "one step makes no curve; its ratio is in the tables"
    figure = new_figure(9, 4.2)
    axes = figure.subplots()
    for number, dataset in enumerate(drawn):
        color, style = SERIES[number % len(SERIES)]
        emulated = " (emulated fabric)" if dataset.run.health.fabric is not None else ""
        draw_line(
            axes, dataset.table("global_step", "overlap_ratio"), "overlap_ratio", dataset.label + emulated, color, style
        )
    tidy(axes)
    axes.set_ylim(-0.03, 1.03)
    axes.set_ylabel("overlap ratio (hidden / all)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("global step, warm-up left out (line: median over ranks, band: lowest to highest rank)", fontsize=9)
    legend(figure, [axes])
    titled(figure, axes, "overlap ratio", "1: all communication hidden, 0: all exposed")
    save(figure, path)
    return None


def draw_devices(dataset: LabelledRun, path: Path) -> str | None:
    """Draw one panel for each thing that was sampled and changes; what does not is a sentence. Throttled steps are
    ticked below the clock. Returns why nothing was drawn, or None.
    """
    if not dataset.has_samples:
        return "no device samples in the record"
    measured = [name for name, *_ in _DEVICE_PANELS if name in dataset.metrics]
    frame = dataset.table(*JOINED_ON, "global_step", "warmup", *measured, warmup=True)
    frame = frame.join(step_columns(dataset.run, frame, dataset.device_samples))
    drawn = [panel for panel in _DEVICE_PANELS if panel[0] in frame and frame[panel[0]].notna().any()]
    sampled = [panel for panel in drawn if panel[0] != "overlap_ratio"]
    if not sampled:
        return "no device sample belongs to a step"
    throttled = frame.loc[frame[THROTTLED] == 1.0, "global_step"].unique()
    still = [panel for panel in sampled if constant(frame[panel[0]].to_numpy(), _WHOLE.get(panel[0])) is not None]
    if len(throttled):
        still = [panel for panel in still if panel[0] != "device_sclk_mhz"]  # its ticks are told nowhere else
    medians = [f"{title} {frame[name].median():,.4g} {unit}" for name, title, unit in still]
    unchanged = f"the same in every step: {', '.join(medians)}" if medians else ""
    if len(still) == len(sampled):
        return f"nothing changes: {unchanged}"
    drawn = [panel for panel in drawn if panel not in still]
    figure = new_figure(9, 1.2 + 1.5 * len(drawn))
    panels = figure.subplots(len(drawn), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (name, title, unit) in zip(panels, drawn, strict=True):
        draw_line(axes, frame, name, f"_{title}", INK, "-")  # the axis says what it is, not the legend
        shade_warmup(axes, frame)
        tidy(axes)
        axes.set_ylabel(f"{title}, {unit}" if unit else title)
        if name in _WHOLE:
            axes.set_ylim(-0.03 * _WHOLE[name], 1.03 * _WHOLE[name])
        if name == "device_sclk_mhz" and len(throttled):
            low, high = axes.get_ylim()
            room = 0.2 * (high - low)  # below the curve, so that no tick lies on it
            ticks = [low - room / 2] * len(throttled)
            axes.plot(throttled, ticks, "|", color=light("worse"), markersize=9, markeredgewidth=2, label="throttled")
            axes.set_ylim(low - room, high)
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    panels[-1].set_xlabel("global step (line: median over ranks, band: lowest to highest rank)", fontsize=9)
    legend(figure, panels)
    heading(figure, panels[0], dataset, "devices under the overlap ratio", unchanged)
    save(figure, path)
    return None


def draw_line(axes: Axes, frame: pd.DataFrame, column: str, title: str, color: str, style: str) -> None:
    """Draw the median over ranks, and a band from the lowest rank to the highest."""
    curve = over_steps(frame["global_step"].to_numpy(), frame[column])
    marker = "o" if len(curve.x) <= MARKED_STEPS else ""
    axes.plot(curve.x, curve.middle, color=color, linestyle=style, marker=marker, markersize=3.5, label=title)
    axes.fill_between(curve.x, curve.low, curve.high, color=color, alpha=0.2, linewidth=0)


def shade_warmup(axes: Axes, frame: pd.DataFrame) -> None:
    """Shade the steps that the numbers leave out."""
    warm = frame.loc[frame["warmup"], "global_step"]
    if not warm.empty:
        axes.axvspan(warm.min() - 0.5, warm.max() + 0.5, color=BAND, linewidth=0, zorder=0, label=WARM_UP)


def draw_breakdown(dataset: LabelledRun, path: Path) -> str | None:
    """Draw stacked bars, one a rank, and a last one for the mean of the ranks."""
    if not set(NEEDED) <= set(dataset.metrics):
        return "the record has no overlap metrics"
    table = parts(dataset)
    if table.empty:
        return "no step after warm-up in which communication and computation are both known"
    names = [f"rank {rank}" for rank in table.index] + ["mean"]
    table = pd.concat([table, table.mean().to_frame("mean").T])
    figure = new_figure(min(14.0, 5.5 + 0.45 * len(names)), 4.6)
    axes = figure.subplots()
    places = np.arange(len(names), dtype=float)
    places[-1] += 0.5
    bottom = np.zeros(len(names))
    for title, color, hatch in PARTS:
        heights = table[title].to_numpy(dtype=float)
        # One artist for all bars: `axes.bar` makes one each, slow to draw for hundreds of ranks.
        left, right, top = places - 0.4, places + 0.4, bottom + heights
        corners = np.array([[left, bottom], [right, bottom], [right, top], [left, top]]).transpose(2, 0, 1)
        bars = PolyCollection(
            list(corners), facecolor=color, hatch=hatch, edgecolor="white", linewidth=0.5, label=title
        )
        axes.add_collection(bars)
        bottom += heights
    every = -(-len(names) // _LABELLED_RANKS)
    shown = [*range(0, len(names) - 1 - every // 2, every), len(names) - 1]
    axes.set_xticks(places[shown], [names[index] for index in shown], rotation=45 if len(shown) > 6 else 0)
    tidy(axes)
    axes.autoscale_view()
    axes.margins(x=0.02)
    axes.set_ylim(bottom=0)
    axes.grid(visible=False, axis="x")
    axes.set_ylabel("mean ms per step")
    handles, titles = axes.get_legend_handles_labels()
    # Beside the bars, in their order from the top.
    axes.legend(handles[::-1], titles[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=9)
    heading(figure, axes, dataset, "where a step's time goes (warm-up left out)")
    save(figure, path)
    return None


def draw_streams(dataset: LabelledRun, path: Path) -> str | None:
    """Draw the lanes of the median step, from the active segments of each rank: stalls hatched, and below the other
    lanes when communication was exposed.
    """
    found = chosen_steps(dataset)
    if not found:
        return "no step after warm-up is on all ranks"
    chosen = found[0].global_step
    shown = list(dataset.run.ranks.items())[:SHOWN_RANKS]
    try:
        steps = {rank: step for rank, tables in shown if (step := tables.step_intervals(chosen)) is not None}
    except InputError as error:  # the numbers do not need what only this picture reads
        return str(error)
    lanes = {rank: step.active() for rank, step in steps.items()}
    used = [name for name in dataset.run.source.lanes if any(name in spans for spans in lanes.values())]
    if not used:
        return f"global step {chosen} has no active segments"
    exposed = {rank: step.exposed() for rank, step in steps.items()}
    if any(exposed.values()):
        used.append(_EXPOSED)
    rows = len(steps) * (len(used) + 1)
    figure = new_figure(9, 1.7 + 0.24 * rows)
    axes = figure.subplots()
    ticks: list[tuple[float, str]] = []
    for number, (rank, step) in enumerate(steps.items()):
        top = number * (len(used) + 1.0)
        for lane, name in enumerate(used):
            spans = exposed[rank] if name == _EXPOSED else lanes[rank].get(name, [])
            _bars(axes, spans, top + lane, light(_EXPOSED) if name == _EXPOSED else lane_color(name))
            ticks.append((top + lane, _TITLES.get(name, name)))
        row = top + used.index(COMPUTE) if COMPUTE in used else top
        _bars(axes, [(part.start_ns, part.end_ns) for part in step.stalls or ()], row, None)
        axes.text(1.01, top + (len(used) - 1) / 2, f"rank {rank}", transform=axes.get_yaxis_transform(), va="center")
    tidy(axes)
    axes.grid(visible=False, axis="y")
    axes.set_yticks([place for place, _ in ticks], [name for _, name in ticks], fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(rows - 1.3, -0.7)
    axes.set_xlim(0, max(step.length_ns for step in steps.values()) / NS_PER_MS)
    axes.set_xlabel("ms since the start of the step on that rank (ranks are not clock-aligned)", fontsize=9)
    patches = []
    if any(step.stalls for step in steps.values()):
        patches.append(Patch(facecolor="white", edgecolor=INK, hatch="////", label="compute blocked on a collective"))
    if _EXPOSED in used:
        patches.append(
            Patch(facecolor=light(_EXPOSED), label="exposed: a collective runs and the rank does not compute")
        )
    legend(figure, [], patches)
    more = len(dataset.run.ranks) - len(steps)
    rest = f", first {SHOWN_RANKS} ranks of {len(dataset.run.ranks)}" if more else ""
    rest += f"\n{DRAWN}" if dataset.pace.drawn_as_ranges else ""
    heading(figure, axes, dataset, f"global step {chosen}, {found[0].why}{rest}")
    save(figure, path)
    return None


def _bars(axes: Axes, spans: list[Interval], row: float, color: str | None) -> None:
    """Draw spans in their row; without a colour as hatched boxes."""
    ms = [(start / NS_PER_MS, (end - start) / NS_PER_MS) for start, end in spans]
    if color is None:
        axes.broken_barh(ms, (row - 0.4, 0.8), facecolors="none", edgecolors=INK, hatch="////", linewidth=0.5)
    else:
        axes.broken_barh(ms, (row - 0.4, 0.8), facecolors=color, linewidth=0)
