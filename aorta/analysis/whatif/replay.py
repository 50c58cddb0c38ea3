"""When everything in a program happens: the longest path through it, in one pass over its operations.

    begin of a collective = max(last arrival of its ranks, its link is free)
    its end               = max(begin + cost, last arrival + what the backend took)
    a wait goes on at     = max(own arrival, that end) + wake

Every operation is worked out on all ranks, and for all scenarios, at once (`schedule`). The state at the end of a step
is that at the beginning of the next. Exact: integers throughout. Must not change a program, or measure overlap.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from aorta.analysis.tables import Bools, Floats, Ints
from aorta.analysis.whatif.program import RunProgram, StepProgram, What
from aorta.analysis.whatif.recorded import LONG_AGO
from aorta.analysis.whatif.schedule import Act, CollectiveBatch, ReplayOrder, schedule
from aorta.errors import InputError
from aorta.timeline.overlap import NS_PER_MS


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
        """Duration of each step on the rank where it took longest."""
        lengths: Ints = self.end_ns[:, :, scenario] - self.begin_ns[:, :, scenario]
        return np.asarray(lengths.max(axis=1), np.int64)

    def job_step_ms(self, scenario: int = 0) -> Floats:
        """The same in ms."""
        return self.job_step_ns(scenario) / NS_PER_MS


@dataclass(frozen=True)
class Freed:
    """Scenarios in which some collectives cost nothing: (layout, place) -> in which scenarios, shape (scenarios,)."""

    scenarios: int
    of: dict[tuple[int, int], Bools]

    def keeps(self, step: StepProgram, places: int) -> npt.NDArray[np.int64]:
        """1 where a collective keeps its cost, shape (places, ranks, scenarios); one rank where all are the same."""
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


class Schedules:
    """The schedules of a program's steps, each made once."""

    def __init__(self, program: RunProgram) -> None:
        self._program = program
        self._known: dict[tuple[int, ...], ReplayOrder] = {}

    def of(self, step: StepProgram) -> ReplayOrder:
        """The schedule of one step.

        Raises:
            InputError: the ranks do not fit each other in it.
        """
        found = self._known.get(step.layouts)
        if found is None:
            layouts = [self._program.layouts[index] for index in step.layouts]
            try:
                found = schedule(self._program.ranks, layouts)
            except InputError as error:
                raise InputError(f"global step {step.global_step}: {error}") from error
            self._known[step.layouts] = found
        return found


class _Replay:
    """State of a replay: each rank's clock, when its links are free, and ends of collectives waited for later."""

    def __init__(self, program: RunProgram, freed: Freed | None) -> None:
        self._program, self._freed = program, freed
        scenarios = 1 if freed is None else freed.scenarios
        self._shape = (len(program.ranks), scenarios)
        self._now: Ints = np.repeat(program.start_ns[:, None], scenarios, axis=1)
        self._free: Ints = np.repeat(program.busy_ns[:, :, None], scenarios, axis=2)
        self._schedules = Schedules(program)
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
        plan = self._schedules.of(step)
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
            went_on = clock.copy()
            if row.back < len(self._ends):  # otherwise of a step before the first
                np.maximum(went_on, self._ends[row.back][row.place, row.ranks], out=went_on)
            went_on += wake[row.operation, row.ranks, None]
            np.maximum(clock, went_on, out=clock)  # nobody goes on before it came, however early its end was noticed
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
        """Work out collectives that all their ranks have issued."""
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
