"""When everything in a program happens: the longest path through it, in one pass over its operations.

    begin of a collective = max(last arrival of its ranks, its link is free)
    its end               = max(begin + cost, last arrival + what the backend took)
    a wait goes on at     = max(own arrival, that end) + wake

Every operation is worked out on all ranks, and for all scenarios, at once (`schedule`). The state at the end of a step
is that at the beginning of the next. Exact: integers throughout. Replayed steps are measured as windows of
communication and compute by the one definition (`aorta.timeline`). Must not change a program, or define a metric.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from aorta.analysis.frames import Bools, Floats, Ints
from aorta.analysis.step_intervals import HAND_OVER
from aorta.analysis.whatif.program import RunProgram, StepProgram, What
from aorta.analysis.whatif.recorded import LONG_AGO
from aorta.analysis.whatif.schedule import CollectiveBatch, Schedules
from aorta.timeline.intervals import Interval
from aorta.timeline.overlap import NS_PER_MS, PAIRS, measure_lanes


@dataclass(frozen=True)
class StepTimes:
    """All times of one step in all scenarios, nanoseconds on the common clock.

    Attributes:
        enter_ns, leave_ns: of each operation, shape (operations, ranks, scenarios).
        begin_ns, end_ns: of each collective on its link, shape (collectives, ranks, scenarios). The begin on a rank is
            the later of its own issue and the end of the collective before it on the link, as in the record.
        last_ns: the last arrival of its ranks.
        free_ns: when its link was free for it.
    """

    enter_ns: Ints
    leave_ns: Ints
    begin_ns: Ints
    end_ns: Ints
    last_ns: Ints
    free_ns: Ints


@dataclass(frozen=True)
class Times:
    """When the steps began and ended, shape (steps, ranks, scenarios); `kept`: index of a step -> all its times."""

    begin_ns: Ints
    end_ns: Ints
    kept: dict[int, StepTimes] = field(default_factory=dict)

    def job_step_ns(self, scenario: int = 0) -> Ints:
        """Return the duration of each step on the rank where it took longest."""
        lengths: Ints = self.end_ns[:, :, scenario] - self.begin_ns[:, :, scenario]
        return np.asarray(lengths.max(axis=1), np.int64)

    def job_step_ms(self, scenario: int = 0) -> Floats:
        return self.job_step_ns(scenario) / NS_PER_MS


@dataclass(frozen=True)
class Freed:
    """Scenarios in which some collectives cost nothing: (layout, place) -> in which scenarios, shape (scenarios,)."""

    scenarios: int
    of: dict[tuple[int, int], Bools]

    def keeps(self, step: StepProgram, places: int) -> npt.NDArray[np.int64]:
        """Return 1 where a collective keeps its cost, shape (places, ranks, scenarios); one rank if all are alike."""
        layouts = step.layouts[:1] if len(set(step.layouts)) == 1 else step.layouts
        keeps = np.ones((places, len(layouts), self.scenarios), np.int64)
        for column, layout in enumerate(layouts):
            for place in range(places):
                freed = self.of.get((layout, place))
                if freed is not None:
                    keeps[place, column] = ~freed
        return keeps


def replay(program: RunProgram, keep: Collection[int] = (), freed: Freed | None = None) -> Times:
    """Work out when everything happens.

    Args:
        keep: indices of the steps of which all times are wanted.
        freed: several scenarios at once; None: one, the program as it is.

    Raises:
        InputError: the programs of the ranks do not fit each other.
    """
    steps = program.steps
    scenarios = 1 if freed is None else freed.scenarios
    of_ranks = (len(program.ranks), scenarios)
    times = Times(np.empty((len(steps), *of_ranks), np.int64), np.empty((len(steps), *of_ranks), np.int64))
    now: Ints = np.repeat(program.start_ns[:, None], scenarios, axis=1)
    free: Ints = np.repeat(program.busy_ns[:, :, None], scenarios, axis=2)
    schedules = Schedules(program.ranks)
    backs = [operation.back for layout in program.layouts for operation in layout.operations]
    ends: deque[Ints] = deque(maxlen=max(backs, default=0) + 1)  # of collectives that are waited for in a later step
    for index, step in enumerate(steps):
        plan = schedules.of(step.global_step, step.layouts, program.layouts)
        shape = (plan.places, *of_ranks)
        arrived, end = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        ends.appendleft(end)
        cost = step.cost_ns[:, :, None]
        backend = None if step.backend_ns is None else step.backend_ns[:, :, None]
        if freed is not None:
            keeps = freed.keeps(step, plan.places)
            cost = cost * keeps
            backend = None if backend is None else backend * keeps
        kept = None
        if index in keep:
            enter, leave = (np.zeros((len(step.host_ns), *of_ranks), np.int64) for _ in range(2))
            begin, last, free_for = (np.zeros(shape, np.int64) for _ in range(3))
            kept = times.kept[index] = StepTimes(enter, leave, begin, end, last, free_for)
        for row in plan.rows:
            if isinstance(row, CollectiveBatch):
                _meet(row, arrived, end, free, cost, backend, kept, shared=program.shared_links)
                continue
            clock = now[row.ranks]
            clock += step.host_ns[row.operation, row.ranks, None]
            if kept is not None:
                kept.enter_ns[row.operation, row.ranks] = clock
            match row.what:
                case What.BEGIN:
                    times.begin_ns[index][row.ranks] = clock
                case What.ISSUE:
                    arrived[row.place, row.ranks] = clock
                case What.WAIT:
                    resumed = clock.copy()
                    if row.back < len(ends):  # otherwise of a step before the first
                        np.maximum(resumed, ends[row.back][row.place, row.ranks], out=resumed)
                    resumed += step.wake_ns[row.operation, row.ranks, None]
                    np.maximum(clock, resumed, out=clock)  # nobody resumes before it arrived
                case What.END:
                    times.end_ns[index][row.ranks] = clock
            if kept is not None:
                kept.leave_ns[row.operation, row.ranks] = clock
    return times


def _meet(
    row: CollectiveBatch,
    arrived: Ints,
    end: Ints,
    link_free: Ints,
    cost: npt.NDArray[np.integer],
    backend: npt.NDArray[np.integer] | None,
    kept: StepTimes | None,
    *,
    shared: bool,
) -> None:
    """Write when collectives end, and until when their links are busy."""
    if row.whole and row.place is not None and not shared and kept is None:
        # One collective of all ranks: the common case, without copies.
        free, place = link_free[row.links[0]], row.place
        last = arrived[place].max(axis=0)
        np.maximum(free, last, out=free)
        free += cost[place]
        if backend is not None:
            np.maximum(free, last + backend[place], out=free)
        end[place] = free
        return
    columns, places = row.columns, row.places
    came = arrived[places, columns]
    last = np.maximum.reduceat(came, row.starts, axis=0)[row.which]
    linked = row.links >= 0
    free = link_free[np.maximum(row.links, 0), columns]
    free[~linked] = LONG_AGO
    if shared:
        free = np.maximum.reduceat(free, row.starts, axis=0)[row.which]
    of_rank = np.minimum(columns, cost.shape[1] - 1)
    done = np.maximum(last, free) + cost[places, of_rank]
    if backend is not None:
        done = np.maximum(done, last + backend[places, columns])
    end[places, columns] = done
    if linked.any():
        link_free[row.links[linked], columns[linked]] = done[linked]
    if kept is not None:
        kept.begin_ns[places, columns] = np.maximum(came, free)
        kept.last_ns[places, columns] = last
        kept.free_ns[places, columns] = free


RANK_STEPS: int = 512
"""Rank-steps that are measured; more would not change a median by what matters, and each takes 0.1 ms."""


@dataclass(frozen=True)
class RankStepSample:
    steps: tuple[int, ...]
    ranks: tuple[int, ...]

    def kept(self) -> set[int]:
        """Return the steps of which a replay has to keep all times: communication reaches into the step after it."""
        return {each for step in self.steps for each in (step - 1, step) if each >= 0}


@dataclass(frozen=True)
class Measured:
    """Metrics of the sampled rank-steps (NaN: null), and the index of the step of each."""

    overlap_ratio: Floats
    exposed_comm_ms: Floats
    idle_ms: Floats
    step: Ints


def sample(program: RunProgram) -> RankStepSample:
    def spread(count: int, most: int) -> tuple[int, ...]:
        return tuple(sorted({int(index) for index in np.linspace(0, count - 1, min(count, most)).round()}))

    ranks = spread(len(program.ranks), 64)
    return RankStepSample(spread(len(program.steps), max(RANK_STEPS // len(ranks), 8)), ranks)


def measure(program: RunProgram, times: Times, chosen: RankStepSample, scenario: int = 0) -> Measured:
    ratio, exposed, idle = list[float](), list[float](), list[float]()
    for index in chosen.steps:
        step, kept = program.steps[index], times.kept[index]
        for column in chosen.ranks:
            window = int(times.begin_ns[index, column, scenario]), int(times.end_ns[index, column, scenario])
            comm: dict[str, list[Interval]] = defaultdict(list)
            for earlier in (index - 1, index):
                if earlier in times.kept:
                    of_step = times.kept[earlier]
                    issued = program.layouts[program.steps[earlier].layouts[column]].issued
                    ends = (table[:, column, scenario].tolist() for table in (of_step.begin_ns, of_step.end_ns))
                    for collective, low, high in zip(issued, *ends, strict=False):
                        comm[collective.kind].append((min(low, high), high))
            compute, stalls = list[Interval](), list[Interval]()
            for name, span in span_edges(step, kept, column, scenario):
                lane = program.names[name].lane
                if lane == "compute":
                    compute.append(span)
                elif lane == HAND_OVER:
                    stalls.append(span)
            for number, operation in enumerate(program.layouts[step.layouts[column]].operations):
                if operation.what is What.WAIT:
                    enter, leave = (table[number, column, scenario] for table in (kept.enter_ns, kept.leave_ns))
                    stalls.append((int(enter), int(leave)))
            measured, _ = measure_lanes(PAIRS, window, compute=compute, comm=comm, stalls=stalls)
            ratio.append(float("nan") if measured.overlap_ratio is None else measured.overlap_ratio)
            exposed.append(measured.exposed_ns / NS_PER_MS)
            idle.append(measured.idle_ns / NS_PER_MS)
    step_of = np.repeat(np.array(chosen.steps, np.int64), len(chosen.ranks))
    return Measured(np.array(ratio), np.array(exposed), np.array(idle), step_of)


def span_edges(step: StepProgram, times: StepTimes, column: int, scenario: int = 0) -> list[tuple[int, Interval]]:
    """Return the spans of one rank of a step as replayed: index of the name, and when. A span begins behind the waits
    that came before it, and is over when the rank reaches the operation behind it.
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
