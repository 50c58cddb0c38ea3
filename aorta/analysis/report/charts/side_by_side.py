"""Draws a step of the reference above the same step of the candidate, on one time scale; and chooses the step whose
picture represents the difference between the two datasets best.

Must not line ranks up in time; each starts at its own zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb, to_rgba
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke

from aorta.analysis.aggregate import LabelledRun
from aorta.analysis.formatting import TEXT
from aorta.analysis.report.charts.style import new_figure, save, tidy
from aorta.analysis.report.palette import INK, PAPER, lane_color, light, phase_color, text_on
from aorta.analysis.step_intervals import StepIntervals
from aorta.analysis.tables import NO_TIME, Collectives, Floats, Ints
from aorta.errors import InputError
from aorta.timeline.intervals import Interval, clip, measure, merge
from aorta.timeline.overlap import NS_PER_MS, exposure

EXPOSED: Final = "exposed_comm_ms"


@dataclass(frozen=True)
class TypicalStep:
    """The steps and ranks to draw. `ranks` exist on both sides, the one whose exposed communication differs most first.
    `difference_ms` is candidate minus reference, averaged over the ranks of these two steps; `mean_ms` is the same for
    the means over all steps.
    """

    reference_step: int
    candidate_step: int
    ranks: tuple[int, ...]
    difference_ms: float
    mean_ms: float


def typical_step(reference: LabelledRun, candidate: LabelledRun) -> TypicalStep | None:
    """Choose the step whose difference is closest to the mean difference, so that the picture shows what the summary
    says and not the worst outlier.

    Where both sides have steps in common it is the same global step on both; otherwise each side's step nearest to its
    own mean. Only steps after warm-up count whose exposed communication is known on all ranks of the side.

    Returns:
        None where a side has no such step, or no rank exists on both sides.
    """
    left, right = _by_rank(reference), _by_rank(candidate)
    ranks = [rank for rank in left.ranks if rank in right.ranks]
    if left.steps.size == 0 or right.steps.size == 0 or not ranks:
        return None
    before, after = left.values.mean(axis=0), right.values.mean(axis=0)
    mean = float(after.mean() - before.mean())
    _, first, second = np.intersect1d(left.steps, right.steps, assume_unique=True, return_indices=True)
    if len(first):
        chosen = _nearest(after[second] - before[first], mean)
        at, to = int(first[chosen]), int(second[chosen])
    else:
        at, to = _nearest(before, float(before.mean())), _nearest(after, float(after.mean()))
    apart = {
        rank: abs(float(right.values[right.ranks.index(rank), to] - left.values[left.ranks.index(rank), at]))
        for rank in ranks
    }
    order = tuple(sorted(ranks, key=lambda rank: (-apart[rank], rank)))
    return TypicalStep(int(left.steps[at]), int(right.steps[to]), order, float(after[to] - before[at]), mean)


@dataclass(frozen=True)
class _Table:
    """Exposed communication in ms: one row per rank, one column per global step that every rank has."""

    ranks: list[int]
    steps: Ints
    values: Floats


def _by_rank(dataset: LabelledRun) -> _Table:
    known = {rank: _known(dataset, rank) for rank in dataset.run.ranks}
    common = reduce(np.intersect1d, (steps for steps, _ in known.values()))
    values = np.array([mine[np.searchsorted(steps, common)] for steps, mine in known.values()])
    return _Table(list(known), common, values)


def _known(dataset: LabelledRun, rank: int) -> tuple[Ints, Floats]:
    """Return a rank's global steps after warm-up whose exposed communication is known, and their values."""
    steps = dataset.run.ranks[rank].steps
    values = steps.column(EXPOSED)
    used = steps.used & ~np.isnan(values)
    return steps.global_step[used], values[used]


def _nearest(values: Floats, wanted: float) -> int:
    return int(np.argmin(np.abs(values - wanted)))


FILE: Final = "side_by_side.png"
SHOWN_RANKS: Final = 2
_HEIGHT: Final = 0.8
_WIDTH_INCHES: Final = 12.0
_LETTER_INCHES: Final = 0.062
"""Width of a letter at the size of labels; a label that does not fit into its bar is left out."""
_LABEL_SIZE: Final = 7


def draw_side_by_side(reference: LabelledRun, candidate: LabelledRun, path: Path) -> str | None:
    """Draw the step that `typical_step` chooses.

    The rows of a rank: passes of blocks (backward darker, stalls hatched), work outside the blocks, the collectives of
    each group (stacked where they are in flight together), and the exposed time in black.

    Returns:
        None, or the reason why there is no picture.
    """
    shown = typical_step(reference, candidate)
    if shown is None:
        return "no step after warm-up that all ranks have, on both sides, with known exposed communication"
    ranks = sorted(shown.ranks[:SHOWN_RANKS])
    sides = [(reference, shown.reference_step), (candidate, shown.candidate_step)]
    try:
        steps = [_steps(dataset, number, ranks) for dataset, number in sides]
    except InputError as error:  # only the picture reads this again, so the report goes on without it
        return str(error)
    lanes = [[_Lanes(rank, *step) for rank, step in found.items()] for found in steps]
    if any(not side for side in lanes):
        return "a side has no such step on the ranks that are shown"
    if not any(lane.rows for side in lanes for lane in side):
        return "these steps hold no collective that could be drawn (steps of traces never do)"
    heights = [sum(rank.count for rank in side) + len(side) - 1 for side in lanes]
    end_ms = max(lane.length_ns for side in lanes for lane in side) / NS_PER_MS
    figure = new_figure(_WIDTH_INCHES, 2.3 + 0.25 * sum(heights))
    axes = figure.subplots(2, 1, sharex=True, height_ratios=heights, squeeze=False)[:, 0]
    kinds: dict[str, None] = {}
    for (dataset, number), side, ax, height in zip(sides, lanes, axes, heights, strict=True):
        _draw(ax, side, end_ms)
        kinds |= dict.fromkeys(row.kind for lane in side for row in lane.rows)
        ax.set_ylim(height - 0.4, -0.6)
        exposed = sum(measure(lane.lanes.exposed) for lane in side) / len(side) / NS_PER_MS
        emulated = ", EMULATED FABRIC" if dataset.run.health.fabric is not None else ""
        role = "reference" if ax is axes[0] else "candidate"
        who = role if dataset.label == role else f"{role} {dataset.label}"
        ax.set_title(
            f"{who}: global step {number}, {TEXT.number(exposed, 'ms')} ms exposed (mean of ranks shown){emulated}",
            fontsize=10,
            loc="left",
        )
    axes[0].set_xlim(0, end_ms)
    axes[1].set_xlabel("ms since the start of the step on that rank (ranks are not clock-aligned)")
    figure.legend(handles=_legend(list(kinds)), loc="outside lower center", frameon=False, ncols=6, fontsize=8)
    more = len(shown.ranks) - len(ranks)
    rest = f"; the {len(ranks)} ranks that differ most, of {len(shown.ranks)}" if more else ""
    figure.suptitle(
        f"The step nearest to the mean difference: {_signed(shown.difference_ms)} ms exposed communication; mean "
        f"over steps and ranks: {_signed(shown.mean_ms)} ms{rest}",
        fontsize=11,
    )
    save(figure, path)
    return None


def _signed(value_ms: float) -> str:
    return TEXT.number(value_ms, "ms", signed=True)


class _Collective(NamedTuple):
    start: int
    end: int
    kind: str
    group: str
    bytes: int


class _Lanes:
    """One rank's step, laid out in rows of bars."""

    def __init__(self, rank: int, step: StepIntervals, rows: Collectives) -> None:
        self.rank, self.step = rank, step
        self.length_ns = step.length_ns
        self.rows = [
            _Collective(start, end, *rows.names[name][:3])
            for name, start, end in zip(rows.name.tolist(), rows.start_ns.tolist(), rows.end_ns.tolist(), strict=True)
            if NO_TIME not in (start, end)
        ]
        stalls = [(part.start_ns, part.end_ns) for part in step.stalls or ()]
        self.lanes = exposure(
            (0, self.length_ns), [(row.start, row.end) for row in self.rows], step.computing(), stalls
        )
        self.tracks = _tracks(self.rows)
        self.count = 2 + len(self.tracks)
        """Rows of bars: blocks, exposed, and those of collectives."""


def _tracks(rows: Sequence[_Collective]) -> list[tuple[str, list[_Collective]]]:
    """Return the collectives by group; those in flight together go to separate rows."""
    found: list[tuple[str, list[_Collective]]] = []
    for group in dict.fromkeys(row.group for row in rows):
        mine: list[list[_Collective]] = []
        for row in sorted((row for row in rows if row.group == group), key=lambda row: row.start):
            free = next((track for track in mine if track[-1].end <= row.start), None)
            if free is None:
                mine.append(free := [])
            free.append(row)
        found += [(f"group {group}" if number == 0 else "", track) for number, track in enumerate(mine)]
    return found


def _steps(dataset: LabelledRun, number: int, ranks: Sequence[int]) -> dict[int, tuple[StepIntervals, Collectives]]:
    found = {}
    for rank in ranks:
        tables = dataset.run.ranks[rank]
        step = tables.step_intervals(number)
        if step is not None:
            place = int(np.searchsorted(tables.steps.global_step, number))
            found[rank] = step, tables.collectives.take(tables.steps.rows_of(place, place + 1))
    return found


def _draw(ax: Axes, side: Sequence[_Lanes], end_ms: float) -> None:
    ticks: list[tuple[float, str]] = []
    top = 0.0
    for lane in side:
        ticks.append((top, f"rank {lane.rank} blocks"))
        _blocks(ax, lane, top, end_ms)
        for number, (name, rows) in enumerate(lane.tracks, start=1):
            ticks.append((top + number, name))
            for row in rows:
                _bar(ax, (row.start, row.end), top + number, lane_color(row.kind), outline=True)
                _label(ax, (row.start, row.end), top + number, _names(row), lane_color(row.kind), end_ms)
        last = top + lane.count - 1
        ticks.append((last, "exposed"))
        for span in lane.lanes.exposed:
            _bar(ax, span, last, light("exposed"))
        top += lane.count + 1
    tidy(ax)
    ax.grid(visible=False, axis="y")
    ax.set_yticks([place for place, _ in ticks], [name for _, name in ticks], fontsize=8)
    ax.tick_params(axis="y", length=0)


def _blocks(ax: Axes, lane: _Lanes, row: float, end_ms: float) -> None:
    for part in lane.step.aux or ():
        span = (part.start_ns, part.end_ns)
        _bar(ax, span, row, light("other-work"))
    for block in lane.step.compute or ():
        span = (block.start_ns, block.end_ns)
        _bar(ax, span, row, phase_color(block.phase), outline=True)
    if lane.step.compute is None:
        for span in lane.step.computing():
            _bar(ax, span, row, light("compute"), outline=True)
    window = (0, lane.length_ns)
    for stall in merge(clip(((part.start_ns, part.end_ns) for part in lane.step.stalls or ()), window)):
        ax.broken_barh(
            [_ms(stall)],
            (row - _HEIGHT / 2, _HEIGHT),
            facecolors=to_rgba(PAPER, 0.6),  # the lines do not show on the dark of a backward pass
            edgecolors=INK,
            hatch="/////",
            linewidth=0.0,
        )
    for part in lane.step.aux or ():  # labels last, so that they are drawn over the hatching
        _label(ax, (part.start_ns, part.end_ns), row, (part.name,), light("other-work"), end_ms)
    for block in lane.step.compute or ():
        _label(ax, (block.start_ns, block.end_ns), row, (block.block,), phase_color(block.phase), end_ms)


def _bar(ax: Axes, span: Interval, row: float, color: str, *, outline: bool = False) -> None:
    ax.broken_barh(
        [_ms(span)],
        (row - _HEIGHT / 2, _HEIGHT),
        facecolors=color,
        edgecolors="white" if outline else "none",
        linewidth=0.6 if outline else 0.0,
    )


def _names(row: _Collective) -> tuple[str, ...]:
    """Return labels from the longest to the shortest; the first that fits is drawn."""
    short = {"allreduce": "AR", "reducescatter": "RS", "allgather": "AG", "alltoall": "A2A"}.get(row.kind, row.kind)
    return f"{row.kind} {TEXT.size(row.bytes)}", f"{short} {TEXT.size(row.bytes)}", short


def _label(ax: Axes, span: Interval, row: float, names: Sequence[str], color: str, end_ms: float) -> None:
    """Write the first name that fits inside its bar of that colour; nothing where none does."""
    width = (span[1] - span[0]) / NS_PER_MS / end_ms * (_WIDTH_INCHES - 2)
    name = next((name for name in names if len(name) * _LETTER_INCHES + 0.05 <= width), None)
    if name is None:
        return
    middle = (span[0] + span[1]) / 2 / NS_PER_MS
    text = ax.text(middle, row, name, ha="center", va="center_baseline", fontsize=_LABEL_SIZE, color=text_on(color))
    text.set_clip_on(True)
    text.set_path_effects([withStroke(linewidth=2, foreground=color, alpha=0.8)])  # legible over hatching


def _ms(span: Interval) -> tuple[float, float]:
    return span[0] / NS_PER_MS, (span[1] - span[0]) / NS_PER_MS


def _legend(kinds: Sequence[str]) -> list[Patch]:
    named: Mapping[str, str] = {
        "forward": light("forward"),
        "backward": light("backward"),
        "other work": light("other-work"),
        **{kind: lane_color(kind) for kind in kinds},
        "exposed communication": light("exposed"),
    }
    patches = [Patch(facecolor=to_rgb(color), label=name) for name, color in named.items()]
    return [*patches, Patch(facecolor="white", edgecolor=INK, hatch="/////", label="blocked on a collective")]
