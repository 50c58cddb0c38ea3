"""Metrics over global steps: a line for the median of the ranks, a band from the lowest rank to the highest.

`{label}_timeline.png` shows times, `overlap_ratio.png` the ratio of every dataset, and `{label}_devices.png` the ratio
above what the devices did: a dip that comes with a lower clock is theirs. Must not hide warm-up in the timeline (it is
shaded), show it in the ratio (it is left out, as in the numbers), or draw a value that no sample gave.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from aorta.analysis.aggregate import LabelledRun
from aorta.analysis.devices import JOINED_ON, THROTTLED, step_columns
from aorta.analysis.report.charts.style import WARM_UP, heading, legend, new_figure, save, tidy, titled
from aorta.analysis.report.palette import BAND, INK, SERIES, light
from aorta.analysis.report.step_curves import constant, over_steps

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
MARKED_STEPS = 60  # with more, markers run into a thick line


def draw_timeline(dataset: LabelledRun, path: Path) -> str | None:
    """Compute, communication, hidden and exposed milliseconds per global step."""
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
    """Overlap ratio per global step, one line per dataset."""
    drawn = [dataset for dataset in datasets if not np.isnan(dataset.values("overlap_ratio")).all()]
    if not drawn:
        return "no overlap ratio in any step after warm-up"
    if all(dataset.table("global_step")["global_step"].nunique() == 1 for dataset in drawn):
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
    """One panel for each thing that was sampled and changes; what does not is a sentence. Throttled steps are ticked
    below the clock.
    """
    samples = dataset.device_samples
    if samples.empty or samples["failed"].all():
        return "no device samples in the record"
    measured = [name for name, *_ in _DEVICE_PANELS if name in dataset.metrics]
    frame = dataset.table(*JOINED_ON, "global_step", "warmup", *measured, warmup=True)
    frame = frame.join(step_columns(dataset.run, frame, samples))
    drawn = [panel for panel in _DEVICE_PANELS if panel[0] in frame and frame[panel[0]].notna().any()]
    sampled = [panel for panel in drawn if panel[0] != "overlap_ratio"]
    if not sampled:
        return "no device sample belongs to a step"
    throttled = frame.loc[frame[THROTTLED] == 1.0, "global_step"].unique()
    still = [panel for panel in sampled if constant(frame[panel[0]].to_numpy(), _WHOLE.get(panel[0])) is not None]
    if len(throttled):
        still = [panel for panel in still if panel[0] != "device_sclk_mhz"]  # its ticks are told nowhere else
    told = [f"{title} {frame[name].median():,.4g} {unit}" for name, title, unit in still]
    unchanged = f"the same in every step: {', '.join(told)}" if told else ""
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
    """Median over ranks, and a band from the lowest rank to the highest."""
    curve = over_steps(frame["global_step"].to_numpy(), frame[column])
    marker = "o" if len(curve.x) <= MARKED_STEPS else ""
    axes.plot(curve.x, curve.middle, color=color, linestyle=style, marker=marker, markersize=3.5, label=title)
    axes.fill_between(curve.x, curve.low, curve.high, color=color, alpha=0.2, linewidth=0)


def shade_warmup(axes: Axes, frame: pd.DataFrame) -> None:
    """Behind the steps that the numbers leave out."""
    warm = frame.loc[frame["warmup"], "global_step"]
    if not warm.empty:
        axes.axvspan(warm.min() - 0.5, warm.max() + 0.5, color=BAND, linewidth=0, zorder=0, label=WARM_UP)
