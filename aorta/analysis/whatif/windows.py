"""Replayed steps as windows of communication and compute, measured by the one definition (`aorta.timeline`).

Must not define a metric.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from aorta.analysis.step_intervals import HAND_OVER
from aorta.analysis.tables import Floats, Ints
from aorta.analysis.whatif.program import RunProgram, StepProgram, What
from aorta.analysis.whatif.replay import StepTimes, Times
from aorta.timeline.intervals import Interval
from aorta.timeline.overlap import NS_PER_MS, PAIRS, measure_lanes

RANK_STEPS: int = 512
"""Rank-steps that are measured; more would not change a median by what matters, and each takes 0.1 ms."""


@dataclass(frozen=True)
class RankStepSample:
    """Which steps and ranks are measured: indices and columns, evenly spread."""

    steps: tuple[int, ...]
    ranks: tuple[int, ...]

    def kept(self) -> set[int]:
        """Steps of which a replay has to keep all times: communication reaches into the step after it."""
        return {each for step in self.steps for each in (step - 1, step) if each >= 0}


@dataclass(frozen=True)
class Measured:
    """Metrics of the sampled rank-steps (NaN: null), and the index of the step of each."""

    overlap_ratio: Floats
    exposed_comm_ms: Floats
    idle_ms: Floats
    step: Ints


def sample(program: RunProgram, rank_steps: int = RANK_STEPS) -> RankStepSample:
    """Evenly spread steps, and of a large world evenly spread ranks."""
    ranks = _spread(len(program.ranks), 64)
    return RankStepSample(_spread(len(program.steps), max(rank_steps // len(ranks), 8)), ranks)


def _spread(count: int, most: int) -> tuple[int, ...]:
    return tuple(sorted({int(each) for each in np.linspace(0, count - 1, min(count, most)).round()}))


def measure(program: RunProgram, times: Times, chosen: RankStepSample, scenario: int = 0) -> Measured:
    """Measure the sampled rank-steps of a replay."""
    found = [
        (*_window(program, times, index, column, scenario), index) for index in chosen.steps for column in chosen.ranks
    ]
    ratio, exposed, idle, step = zip(*found, strict=True)
    return Measured(
        np.array(ratio, np.float64),
        np.array(exposed, np.float64),
        np.array(idle, np.float64),
        np.array(step, np.int64),
    )


def span_edges(step: StepProgram, times: StepTimes, column: int, scenario: int = 0) -> list[tuple[int, Interval]]:
    """Spans of one rank of a step as replayed: index of the name, and when. A span begins behind the waits that came
    before it, and is over when the rank comes to the operation behind it.
    """
    spans, chosen = step.spans, step.spans.of_rank(column)
    enter, leave = times.enter_ns[:, column, scenario], times.leave_ns[:, column, scenario]

    def at(after: Ints, offset: Ints) -> Ints:
        behind = np.minimum(after + 1, len(enter) - 1)
        return np.where(after + 1 < len(enter), np.minimum(leave[after] + offset, enter[behind]), leave[after] + offset)

    begin = at(spans.begin_after[chosen].astype(np.int64), spans.begin_ns[chosen].astype(np.int64))
    end = at(spans.end_after[chosen].astype(np.int64), spans.end_ns[chosen].astype(np.int64))
    rows = zip(spans.name[chosen].tolist(), begin.tolist(), np.maximum(begin, end).tolist(), strict=True)
    return [(name, (low, high)) for name, low, high in rows]


def communication(
    program: RunProgram, step: StepProgram, times: StepTimes, column: int, scenario: int = 0
) -> Sequence[tuple[str, Interval]]:
    """Collectives of one rank of a step as replayed: kind, and from begin to end."""
    issued = program.layouts[step.layouts[column]].issued
    begin, end = times.begin_ns[:, column, scenario].tolist(), times.end_ns[:, column, scenario].tolist()
    return [(each.kind, (min(low, high), high)) for each, low, high in zip(issued, begin, end, strict=False)]


def _window(program: RunProgram, times: Times, index: int, column: int, scenario: int) -> tuple[float, float, float]:
    """Overlap ratio, exposed and idle milliseconds of one rank-step."""
    window = int(times.begin_ns[index, column, scenario]), int(times.end_ns[index, column, scenario])
    step, kept = program.steps[index], times.kept[index]
    comm: dict[str, list[Interval]] = defaultdict(list)
    for earlier in (index - 1, index):
        if earlier in times.kept:
            for kind, span in communication(program, program.steps[earlier], times.kept[earlier], column, scenario):
                comm[kind].append(span)
    compute, stalls = list[Interval](), list[Interval]()
    for name, span in span_edges(step, kept, column, scenario):
        lane = program.names[name].lane
        if lane == "compute":
            compute.append(span)
        elif lane == HAND_OVER:
            stalls.append(span)
    for number, operation in enumerate(program.layouts[step.layouts[column]].operations):
        if operation.what is What.WAIT:
            stalls.append((int(kept.enter_ns[number, column, scenario]), int(kept.leave_ns[number, column, scenario])))
    measured, _ = measure_lanes(PAIRS, window, compute=compute, comm=comm, stalls=stalls)
    ratio = measured.overlap_ratio
    return (
        float("nan") if ratio is None else ratio,
        measured.exposed_ns / NS_PER_MS,
        measured.idle_ns / NS_PER_MS,
    )
