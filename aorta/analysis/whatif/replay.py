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
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from aorta.analysis.step_intervals import HAND_OVER
from aorta.analysis.tables import Bools, Floats, Ints
from aorta.analysis.whatif.program import RunProgram, StepProgram, What
from aorta.analysis.whatif.recorded import LONG_AGO
from aorta.analysis.whatif.schedule import Act, CollectiveBatch, Schedules
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
    return _Replay(program, freed).run(set(keep))


class _Replay:
    """State of a replay: each rank's clock, when its links are free, and ends of collectives waited for later."""

    def __init__(self, program: RunProgram, freed: Freed | None) -> None:
        self._program, self._freed = program, freed
        scenarios = 1 if freed is None else freed.scenarios
        self._shape = (len(program.ranks), scenarios)
        self._now: Ints = np.repeat(program.start_ns[:, None], scenarios, axis=1)
        self._free: Ints = np.repeat(program.busy_ns[:, :, None], scenarios, axis=2)
        self._schedules = Schedules(program.ranks)
        backs = [operation.back for layout in program.layouts for operation in layout.operations]
        self._ends: deque[Ints] = deque(maxlen=max(backs, default=0) + 1)

    def run(self, keep: set[int]) -> Times:
        steps: Sequence[StepProgram] = self._program.steps
        times = Times(np.empty((len(steps), *self._shape), np.int64), np.empty((len(steps), *self._shape), np.int64))
        for index, step in enumerate(steps):
            kept = self._step(step, times.begin_ns[index], times.end_ns[index], keep=index in keep)
            if kept is not None:
                times.kept[index] = kept
        return times

    def _step(self, step: StepProgram, begun: Ints, ended: Ints, *, keep: bool) -> StepTimes | None:
        plan = self._schedules.of(step.global_step, step.layouts, self._program.layouts)
        now, host, wake = self._now, step.host_ns, step.wake_ns
        shape = (plan.places, *self._shape)
        arrived, end = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        self._ends.appendleft(end)
        cost = step.cost_ns[:, :, None]
        backend = None if step.backend_ns is None else step.backend_ns[:, :, None]
        if self._freed is not None:
            keeps = self._freed.keeps(step, plan.places)
            cost = cost * keeps
            backend = None if backend is None else backend * keeps
        kept = None
        if keep:
            enter, leave = (np.zeros((len(host), *self._shape), np.int64) for _ in range(2))
            begin, last, free = (np.zeros(shape, np.int64) for _ in range(3))
            kept = StepTimes(enter, leave, begin, end, last, free)
        for row in plan.rows:
            if isinstance(row, CollectiveBatch):
                self._meet(row, arrived, end, cost, backend, kept)
                continue
            clock = now[row.ranks]
            clock += host[row.operation, row.ranks, None]
            if kept is not None:
                kept.enter_ns[row.operation, row.ranks] = clock
            self._act(row, clock, arrived, wake, begun, ended)
            if kept is not None:
                kept.leave_ns[row.operation, row.ranks] = clock
        return kept

    def _act(
        self, row: Act, clock: Ints, arrived: Ints, wake: npt.NDArray[np.integer], begun: Ints, ended: Ints
    ) -> None:
        if row.what is What.ISSUE:
            arrived[row.place, row.ranks] = clock
        elif row.what is What.WAIT:
            resumed = clock.copy()
            if row.back < len(self._ends):  # otherwise of a step before the first
                np.maximum(resumed, self._ends[row.back][row.place, row.ranks], out=resumed)
            resumed += wake[row.operation, row.ranks, None]
            np.maximum(clock, resumed, out=clock)  # nobody resumes before it arrived, however early its end was noticed
        elif row.what is What.BEGIN:
            begun[row.ranks] = clock
        else:
            ended[row.ranks] = clock

    def _meet(
        self,
        row: CollectiveBatch,
        arrived: Ints,
        end: Ints,
        cost: npt.NDArray[np.integer],
        backend: npt.NDArray[np.integer] | None,
        kept: StepTimes | None,
    ) -> None:
        if row.whole and row.place is not None and not self._program.shared_links and kept is None:
            # One collective of all ranks: the common case, without copies.
            free, place = self._free[row.links[0]], row.place
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
        free = self._free[np.maximum(row.links, 0), columns]
        free[~linked] = LONG_AGO
        if self._program.shared_links:
            free = np.maximum.reduceat(free, row.starts, axis=0)[row.which]
        of_rank = np.minimum(columns, cost.shape[1] - 1)
        done = np.maximum(last, free) + cost[places, of_rank]
        if backend is not None:
            done = np.maximum(done, last + backend[places, columns])
        end[places, columns] = done
        if linked.any():
            self._free[row.links[linked], columns[linked]] = done[linked]
        if kept is not None:
            kept.begin_ns[places, columns] = np.maximum(came, free)
            kept.last_ns[places, columns] = last
            kept.free_ns[places, columns] = free


RANK_STEPS: int = 512
"""Rank-steps that are measured; more would not change a median by what matters, and each takes 0.1 ms."""


@dataclass(frozen=True)
class RankStepSample:
    """Which steps and ranks are measured: indices and columns, evenly spread."""

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
    ranks = _spread(len(program.ranks), 64)
    return RankStepSample(_spread(len(program.steps), max(RANK_STEPS // len(ranks), 8)), ranks)


def _spread(count: int, most: int) -> tuple[int, ...]:
    return tuple(sorted({int(each) for each in np.linspace(0, count - 1, min(count, most)).round()}))


def measure(program: RunProgram, times: Times, chosen: RankStepSample, scenario: int = 0) -> Measured:
    found = [
        (*_window(program, times, index, column, scenario), index) for index in chosen.steps for column in chosen.ranks
    ]
    ratio, exposed, idle, step = zip(*found, strict=True)
    return Measured(np.array(ratio), np.array(exposed), np.array(idle), np.array(step))


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


def _window(program: RunProgram, times: Times, index: int, column: int, scenario: int) -> tuple[float, float, float]:
    """Return the overlap ratio, exposed and idle milliseconds of one rank-step."""
    window = int(times.begin_ns[index, column, scenario]), int(times.end_ns[index, column, scenario])
    step, kept = program.steps[index], times.kept[index]
    comm: dict[str, list[Interval]] = defaultdict(list)
    for earlier in (index - 1, index):
        if earlier in times.kept:
            of_step = times.kept[earlier]
            issued = program.layouts[program.steps[earlier].layouts[column]].issued
            begin, end = of_step.begin_ns[:, column, scenario].tolist(), of_step.end_ns[:, column, scenario].tolist()
            for each, low, high in zip(issued, begin, end, strict=False):
                comm[each.kind].append((min(low, high), high))
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
