"""One step, lane by lane and rank by rank: what ran when.

Enters: a dataset. Leaves: `{label}_streams.png`. Must not: line ranks up in time; each starts at its own zero.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from aorta.analysis.aggregate import Dataset, job_steps
from aorta.analysis.plots.style import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    YELLOW,
    heading,
    new_figure,
    save,
    tidy,
)
from aorta.errors import InputError
from aorta.telemetry.schema import Step
from aorta.timeline.classes import AUX, COMPUTE, COPY
from aorta.timeline.intervals import Interval, merge
from aorta.timeline.overlap import NS_PER_MS

SHOWN_RANKS = 16
_COLORS = {
    COMPUTE: BLUE,
    "allreduce": ORANGE,
    "reducescatter": RED,
    "allgather": GREEN,
    COPY: SKY,
    AUX: PURPLE,
}


def representative_step(dataset: Dataset) -> int | None:
    """The global step whose job step time is the median (the lower of two middle ones; the earliest of equals)."""
    # Where no rank is known, the traces are still drawn.
    ranks = dataset.run.health.ranks_read or tuple(dataset.run.records)
    times = job_steps(dataset.table("rank", "global_step", "step_ms"), ranks)
    if times.empty:
        return None
    ordered = times.sort_index().sort_values(kind="stable")
    return int(ordered.index[(len(ordered) - 1) // 2])


def draw_streams(dataset: Dataset, path: Path) -> str | None:
    """Lanes of the representative step, from the active segments of each rank, with stalls hatched."""
    chosen = representative_step(dataset)
    if chosen is None:
        return "no step after warm-up is on all ranks"
    shown = list(dataset.run.records.items())[:SHOWN_RANKS]
    streams = dataset.run.header.streams
    try:
        steps = {rank: step for rank, record in shown if (step := record.step(chosen)) is not None}
        lanes = {rank: _lanes(step, streams) for rank, step in steps.items()}
    except InputError as error:  # the numbers do not need what only this picture reads
        return str(error)
    used = [name for name in streams if any(name in spans for spans in lanes.values())]
    if not used:
        return f"global step {chosen} has no active segments"
    rows = len(steps) * (len(used) + 1)
    figure = new_figure(10, 2.2 + 0.2 * rows)
    axes = figure.subplots()
    ticks: list[tuple[float, str]] = []
    for number, (rank, step) in enumerate(steps.items()):
        top = number * (len(used) + 1.0)
        for lane, name in enumerate(used):
            _bars(axes, lanes[rank].get(name, []), top + lane, _COLORS.get(name, YELLOW))
            ticks.append((top + lane, name))
        _stalls(axes, step, top + used.index(COMPUTE) if COMPUTE in used else top)
        axes.text(1.01, top + (len(used) - 1) / 2, f"rank {rank}", transform=axes.get_yaxis_transform(), va="center")
    tidy(axes)
    axes.grid(visible=False, axis="y")
    axes.set_yticks([place for place, _ in ticks], [name for _, name in ticks], fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(rows - 1.3, -0.7)
    axes.set_xlim(0, max(step.end_mono_ns - step.start_mono_ns for step in steps.values()) / NS_PER_MS)
    axes.set_xlabel("ms since the start of the step on that rank (ranks are not clock-aligned)")
    if any(step.stalls for step in steps.values()):
        stalled = Patch(facecolor="white", edgecolor=INK, hatch="////", label="compute blocked on a collective")
        figure.legend(handles=[stalled], loc="outside lower center", frameon=False)
    more = len(dataset.run.records) - len(steps)
    rest = f", first {SHOWN_RANKS} ranks of {len(dataset.run.records)}" if more else ""
    heading(figure, dataset, f"global step {chosen}, of median job step time{rest}")
    save(figure, path)
    return None


def _lanes(step: Step, streams: tuple[str, ...]) -> dict[str, list[Interval]]:
    """Lane -> merged spans in which it was active; lanes never active are left out."""
    spans = {
        name: merge((part.start_ns, part.end_ns) for part in step.active_segments if part.streams >> bit & 1)
        for bit, name in enumerate(streams)
    }
    return {name: merged for name, merged in spans.items() if merged}


def _bars(axes: Axes, spans: list[Interval], row: float, color: str) -> None:
    ms = [(start / NS_PER_MS, (end - start) / NS_PER_MS) for start, end in spans]
    axes.broken_barh(ms, (row - 0.4, 0.8), facecolors=color, linewidth=0)


def _stalls(axes: Axes, step: Step, row: float) -> None:
    ms = [(part.start_ns / NS_PER_MS, (part.end_ns - part.start_ns) / NS_PER_MS) for part in step.stalls]
    axes.broken_barh(ms, (row - 0.4, 0.8), facecolors="none", edgecolors=INK, hatch="////", linewidth=0.5)
