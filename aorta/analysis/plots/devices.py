"""The overlap ratio over the steps, and under it what the devices did: a dip that comes with a lower clock is theirs.

Enters: a dataset. Leaves: `{label}_devices.png`. Must not: draw a value that no sample gave.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.ticker import MaxNLocator

from aorta.analysis.aggregate import Dataset
from aorta.analysis.devices import JOINED_ON, THROTTLED, step_columns
from aorta.analysis.plots.over_steps import draw_line, shade_warmup
from aorta.analysis.plots.palette import BLUE, GREEN, ORANGE, PURPLE, RED
from aorta.analysis.plots.style import heading, legend, new_figure, save, tidy

_PANELS = (
    ("overlap_ratio", "overlap ratio", GREEN),
    ("device_sclk_mhz", "clock, MHz", BLUE),
    ("device_power_w", "power, W", ORANGE),
    ("device_temp_c", "temperature, °C", RED),
    ("device_util_pct", "busy, %", PURPLE),
)
_WHOLE = {"overlap_ratio": 1.0, "device_util_pct": 100.0}
"""Shares are drawn on their whole range: a per cent of difference must not look like a fall."""


def draw_devices(dataset: Dataset, path: Path) -> str | None:
    """One panel for each thing that was sampled; throttled steps are ticked below the clock."""
    samples = dataset.device_samples
    if samples.empty or samples["failed"].all():
        return "no device samples in the record"
    measured = [name for name, *_ in _PANELS if name in dataset.metrics]
    frame = dataset.table(*JOINED_ON, "global_step", "warmup", *measured, warmup=True)
    frame = frame.join(step_columns(dataset.run, frame, samples))
    drawn = [panel for panel in _PANELS if panel[0] in frame and frame[panel[0]].notna().any()]
    if all(name == "overlap_ratio" for name, _, _ in drawn):
        return "no device sample belongs to a step"
    figure = new_figure(9, 1.2 + 1.5 * len(drawn))
    panels = figure.subplots(len(drawn), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (name, title, color) in zip(panels, drawn, strict=True):
        draw_line(axes, frame, name, f"_{title}", color, "-")  # the axis says what it is, not the legend
        shade_warmup(axes, frame)
        tidy(axes)
        axes.set_ylabel(title)
        if name in _WHOLE:
            axes.set_ylim(-0.03 * _WHOLE[name], 1.03 * _WHOLE[name])
        if name == "device_sclk_mhz":
            throttled = frame.loc[frame[THROTTLED] == 1.0, "global_step"].unique()
            if len(throttled):
                low, high = axes.get_ylim()
                room = 0.2 * (high - low)  # below the curve, so that no tick lies on it
                ticks = [low - room / 2] * len(throttled)
                axes.plot(throttled, ticks, "|", color=RED, markersize=9, markeredgewidth=2, label="throttled")
                axes.set_ylim(low - room, high)
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    panels[-1].set_xlabel("global step (line: median over ranks, band: lowest to highest rank)", fontsize=9)
    legend(figure, panels)
    heading(figure, panels[0], dataset, "devices under the overlap ratio")
    save(figure, path)
    return None
