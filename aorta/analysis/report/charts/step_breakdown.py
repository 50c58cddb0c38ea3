"""Where the time of a step goes, rank by rank: the mean of all steps, and one step lane by lane.

`{label}_breakdown.png` has five parts that add up to the window, so it must not use medians: they would no longer add
up. `{label}_streams.png` has what ran when in one step. Must not line ranks up in time; each starts at its own zero.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from aorta.analysis.aggregate import LabelledRun
from aorta.analysis.host_bound import DRAWN
from aorta.analysis.report.charts.style import heading, legend, new_figure, save, tidy
from aorta.analysis.report.chosen_steps import chosen_steps, representative_step
from aorta.analysis.report.palette import INK, lane_color, light
from aorta.errors import InputError
from aorta.timeline.classes import COMPUTE
from aorta.timeline.intervals import Interval
from aorta.timeline.overlap import NS_PER_MS

PARTS = (
    ("communication hidden in computation", light("hidden"), ""),
    ("computation alone", light("compute"), ""),
    ("exposed communication", light("exposed"), "//"),
    ("copies, optimizer, other", light("other-work"), ""),
    ("idle", light("idle"), ""),
)
NEEDED = ["window_ms", "compute_ms", "compute_comm_ms", "exposed_comm_ms", "idle_ms"]
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


def parts(dataset: LabelledRun) -> pd.DataFrame:
    """Mean ms per step of each part (columns) for each rank (rows), over the steps used where all are known. Empty
    where there is none, and where marks do not bear them all; one rank is held at a time.
    """
    if any(dataset.pace.basis(name).source != "marks" for name in NEEDED):
        return pd.DataFrame(columns=[title for title, _, _ in PARTS])
    means: dict[int, np.ndarray] = {}
    for rank, tables in dataset.run.ranks.items():
        steps = np.column_stack([tables.steps.column(name) for name in NEEDED])
        known = tables.steps.used & ~np.isnan(steps).any(axis=1)
        if known.any():
            means[rank] = steps[known].mean(axis=0)
    rows = np.array(list(means.values())).reshape(-1, len(NEEDED))
    mean = pd.DataFrame(rows, index=pd.Index(list(means)), columns=pd.Index(NEEDED))
    hidden, exposed, idle = mean["compute_comm_ms"], mean["exposed_comm_ms"], mean["idle_ms"]
    other = (mean["window_ms"] - mean["compute_ms"] - exposed - idle).clip(lower=0)  # below 0 only by rounding
    each = (hidden, mean["compute_ms"] - hidden, exposed, other, idle)
    return pd.DataFrame({title: column for (title, _, _), column in zip(PARTS, each, strict=True)})


def draw_breakdown(dataset: LabelledRun, path: Path) -> str | None:
    """Stacked bars, one a rank, and a last one for the mean of the ranks."""
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
        axes.bar(places, heights, 0.8, bottom, color=color, hatch=hatch, edgecolor="white", linewidth=0.5, label=title)
        bottom += heights
    every = -(-len(names) // _LABELLED_RANKS)
    shown = [*range(0, len(names) - 1, every), len(names) - 1]
    axes.set_xticks(places[shown], [names[index] for index in shown], rotation=45 if len(shown) > 6 else 0)
    tidy(axes)
    axes.margins(x=0.02)
    axes.grid(visible=False, axis="x")
    axes.set_ylabel("mean ms per step")
    handles, titles = axes.get_legend_handles_labels()
    # Beside the bars, in their order from the top.
    axes.legend(handles[::-1], titles[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=9)
    heading(figure, axes, dataset, "where a step's time goes (warm-up left out)")
    save(figure, path)
    return None


def draw_streams(dataset: LabelledRun, path: Path) -> str | None:
    """Lanes of the representative step, from the active segments of each rank: stalls hatched, and below the other
    lanes when communication was exposed.
    """
    chosen = representative_step(dataset)
    if chosen is None:
        return "no step after warm-up is on all ranks"
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
        _bars(axes, [(part.start_ns, part.end_ns) for part in step.stalls or ()], _place(top, used), None)
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
    heading(figure, axes, dataset, f"global step {chosen}, {chosen_steps(dataset)[0].why}{rest}")
    save(figure, path)
    return None


def _place(top: float, used: list[str]) -> float:
    return top + used.index(COMPUTE) if COMPUTE in used else top


def _bars(axes: Axes, spans: list[Interval], row: float, color: str | None) -> None:
    """Spans in their row; without a colour as hatched boxes."""
    ms = [(start / NS_PER_MS, (end - start) / NS_PER_MS) for start, end in spans]
    if color is None:
        axes.broken_barh(ms, (row - 0.4, 0.8), facecolors="none", edgecolors=INK, hatch="////", linewidth=0.5)
    else:
        axes.broken_barh(ms, (row - 0.4, 0.8), facecolors=color, linewidth=0)
