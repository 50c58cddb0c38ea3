"""One step, lane by lane and rank by rank: what ran when.

Drawn as `{label}_streams.png`. Must not line ranks up in time; each starts at its own zero.
"""

from __future__ import annotations

from pathlib import Path

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
