"""When everything in a program happens: the longest path through it, in one pass over its operations.

    begin of a collective = max(last arrival of its ranks, its link is free)
    its end               = max(begin + cost, last arrival + what the backend took)
    a wait goes on at     = max(own arrival, that end) + wake

First comes the order (`schedule`), in which an operation follows what it waits for. Where all ranks do the same, a row
of it is one operation on all of them, which numpy carries out at once; otherwise it is one operation of one rank. The
state at the end of a step is that at the beginning of the next. Exact: integers throughout. Replayed steps are measured
by the definition of overlap that records have (`aorta.timeline`). Must not change a program, or define a metric.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from aorta.errors import InputError
from aorta.read.frames import Floats, Ints
from aorta.read.run import Members
from aorta.timeline.arrays import Interval, interval_array, merge
from aorta.timeline.overlap import NS_PER_MS, measure_windows
from aorta.whatif.program import RankLayout, RunProgram, StepProgram, What

LONG_AGO: Final = -(2**60)
"""Until then a link was busy that nothing was queued on."""
_Indices: TypeAlias = npt.NDArray[np.intp]
_Instance: TypeAlias = tuple[str, Members, int]
"""A collective of a step: its group by name and ranks, and its index among those of the group."""


class Act(NamedTuple):
    """One operation, of all ranks or of one."""

    operation: int
    what: What
    position: int
    back: int
    ranks: slice


@dataclass(frozen=True)
class CollectiveBatch:
    """Collectives whose ranks have all issued them; no rank takes part in two of them.

    Attributes:
        columns: their ranks, those of one collective side by side.
        positions: of the collective on each of these ranks.
        links: of these ranks; -1 where it waits for no other collective.
        starts: where in `columns` each collective's ranks begin.
        which: for each of `columns`, the index of its collective.
        position: of the one collective that is here, where it is of all ranks, on one link and at one position.
    """

    columns: _Indices
    positions: _Indices
    links: _Indices
    starts: _Indices
    which: _Indices
    position: int | None


Schedule: TypeAlias = list[Act | CollectiveBatch]
"""Operations and collectives of a step in an order in which they can be worked out."""


def schedule_of(
    known: dict[tuple[int, ...], Schedule],
    ranks: Sequence[int],
    global_step: int,
    numbers: tuple[int, ...],
    layouts: Iterable[RankLayout],
) -> Schedule:
    """Return the schedule of one step.

    Args:
        known: of steps before it; steps in which all ranks have the same layouts share one.
        numbers: for each rank, the index of its layout among `layouts`.

    Raises:
        InputError: the ranks do not fit each other in it.
    """
    if numbers not in known:
        of_program = list(layouts)
        try:
            known[numbers] = schedule(ranks, [of_program[number] for number in numbers])
        except InputError as error:
            raise InputError(f"global step {global_step}: {error}") from error
    return known[numbers]


def schedule(ranks: Sequence[int], layouts: Sequence[RankLayout]) -> Schedule:
    """Return the schedule of a step.

    Raises:
        InputError: ranks of a group issue different collectives, or some wait for each other for ever.
    """
    met: dict[_Instance, dict[int, int]] = defaultdict(dict)  # collective -> column of a rank -> its position there
    instances: list[list[_Instance]] = []  # of each rank, by position
    for column, layout in enumerate(layouts):
        counts: dict[tuple[str, Members], int] = defaultdict(int)
        instances.append([])
        for position, issued in enumerate(layout.issued):
            group = (issued.group, issued.ranks)
            instances[-1].append((*group, counts[group]))
            met[*group, counts[group]][column] = position
            counts[group] += 1
    for (name, members, number), position_of in met.items():
        here = {ranks[column] for column in position_of}
        if missing := [rank for rank in members if rank not in here]:
            raise InputError(
                f"collective {number} of group {name!r} in a step was not issued by its rank(s) "
                f"{', '.join(map(str, missing[:8]))} in that step: a replay needs every rank to issue the collectives "
                "of a group in the same steps"
            )
        first, *others = ((ranks[column], layouts[column].issued[position]) for column, position in position_of.items())
        for other in others:
            if other[1][::2] != first[1][::2]:  # kind, bytes and link
                issues = (f"rank {rank} {issued.kind} of {issued.bytes} bytes" for rank, issued in (first, other))
                raise InputError(
                    f"collective {number} of group {name!r} in a step: {', '.join(issues)}: the order of issue differs "
                    "between ranks, which a replay cannot follow"
                )
    alike = (
        all(layout.operations == layouts[0].operations for layout in layouts)
        and all(len(set(position_of.values())) == 1 for position_of in met.values())
        and len({len(layout.issued) for layout in layouts}) == 1
    )
    # Ranks that all do the same go on together; of others each goes on until it waits for what not all have issued.
    parts = [range(len(layouts))] if alike else [range(column, column + 1) for column in range(len(layouts))]
    rows: Schedule = []
    done = [0] * len(parts)
    outstanding = {instance: len(position_of) for instance, position_of in met.items()}
    moved = True
    while moved:
        moved = False
        for number, part in enumerate(parts):
            for operation in layouts[part.start].operations[done[number] :]:
                of_step = operation.position >= 0 and not operation.back
                reached = [instances[column][operation.position] for column in part] if of_step else []
                if operation.what is What.WAIT and any(outstanding[instance] for instance in reached):
                    break
                rows.append(Act(done[number], *operation, slice(part.start, part.stop)))
                done[number] += 1
                moved = True
                if operation.what is What.ISSUE:
                    for instance in reached:
                        outstanding[instance] -= 1
                    if whole := [met[instance] for instance in dict.fromkeys(reached) if not outstanding[instance]]:
                        rows.append(_batch(whole, layouts))
    waiting = zip(parts, done, strict=True)
    if stuck := [ranks[column] for part, at in waiting for column in part if at < len(layouts[column].operations)]:
        if alike:
            waited_for = layouts[0].operations[done[0]].position
            raise InputError(f"a step waits for its collective {waited_for} before issuing it")
        raise InputError(
            f"rank(s) {', '.join(map(str, stuck[:8]))} wait for collectives that are issued only after their waits: "
            "the programs of the ranks do not fit each other"
        )
    return rows


def _batch(chosen: Sequence[dict[int, int]], layouts: Sequence[RankLayout]) -> CollectiveBatch:
    rows = [
        (column, position, layouts[column].issued[position].link) for met in chosen for column, position in met.items()
    ]
    columns, positions, links = zip(*rows, strict=True)
    sizes = [len(met) for met in chosen]
    alone = sizes == [len(layouts)] and len(set(positions)) == len(set(links)) == 1 and links[0] is not None
    return CollectiveBatch(
        columns=np.array(columns, np.intp),
        positions=np.array(positions, np.intp),
        links=np.array([-1 if link is None else link for link in links], np.intp),
        starts=np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.intp),
        which=np.repeat(np.arange(len(sizes)), sizes),
        position=positions[0] if alone else None,
    )


@dataclass(frozen=True)
class StepTimes:
    """All times of one step, nanoseconds on the common clock.

    Attributes:
        enter_ns, leave_ns: of each operation, shape (operations, ranks).
        begin_ns, end_ns: of each collective on its link, shape (collectives, ranks). The begin on a rank is the later
            of its own issue and the end of the collective before it on the link, as in the record.
    """

    enter_ns: Ints
    leave_ns: Ints
    begin_ns: Ints
    end_ns: Ints


@dataclass(frozen=True)
class Times:
    """When the steps began and ended, shape (steps, ranks); `kept`: index of a step -> all its times."""

    begin_ns: Ints
    end_ns: Ints
    kept: dict[int, StepTimes] = field(default_factory=dict)

    def job_step_ns(self) -> Ints:
        """Return the duration of each step on the rank where it took longest."""
        return np.asarray((self.end_ns - self.begin_ns).max(axis=1), np.int64)

    def job_step_ms(self) -> Floats:
        return self.job_step_ns() / NS_PER_MS

    def gained_ms(self, before: Times) -> Floats:
        """Return by how much each step is shorter than before."""
        return (before.job_step_ns() - self.job_step_ns()) / NS_PER_MS


def replay(program: RunProgram, keep: Collection[int] = ()) -> Times:
    """Work out when everything happens.

    Args:
        keep: indices of the steps of which all times are wanted.

    Raises:
        InputError: the programs of the ranks do not fit each other.
    """
    steps, ranks = program.steps, len(program.ranks)
    times = Times(np.empty((len(steps), ranks), np.int64), np.empty((len(steps), ranks), np.int64))
    now, free = program.start_ns.copy(), program.busy_ns.copy()
    schedules: dict[tuple[int, ...], Schedule] = {}
    backs = [operation.back for layout in program.layouts for operation in layout.operations]
    ends: deque[Ints] = deque(maxlen=max(backs, default=0) + 1)  # of collectives that are waited for in a later step
    for index, step in enumerate(steps):
        arrived, end, begin = (np.zeros((len(step.cost_ns), ranks), np.int64) for _ in range(3))
        ends.appendleft(end)
        kept = None
        if index in keep:
            enter, leave = (np.zeros((len(step.host_ns), ranks), np.int64) for _ in range(2))
            kept = times.kept[index] = StepTimes(enter, leave, begin, end)
        for row in schedule_of(schedules, program.ranks, step.global_step, step.layouts, program.layouts):
            if isinstance(row, CollectiveBatch):
                _meet(row, step, arrived, free, end, None if kept is None else begin)
                continue
            clock = now[row.ranks]  # a view: what is added to it moves the ranks on
            clock += step.host_ns[row.operation, row.ranks]
            if kept is not None:
                kept.enter_ns[row.operation, row.ranks] = clock
            match row.what:
                case What.BEGIN:
                    times.begin_ns[index, row.ranks] = clock
                case What.ISSUE:
                    arrived[row.position, row.ranks] = clock
                case What.WAIT:
                    resumed = clock.copy()
                    if row.back < len(ends):  # otherwise of a step before the first
                        np.maximum(resumed, ends[row.back][row.position, row.ranks], out=resumed)
                    resumed += step.wake_ns[row.operation, row.ranks]
                    np.maximum(clock, resumed, out=clock)  # never before it arrived
                case What.END:
                    times.end_ns[index, row.ranks] = clock
            if kept is not None:
                kept.leave_ns[row.operation, row.ranks] = clock
    return times


def _meet(
    row: CollectiveBatch, step: StepProgram, arrived: Ints, link_free: Ints, end: Ints, begin: Ints | None
) -> None:
    """Write when collectives end (and begin, if that is wanted), and until when their links are busy."""
    cost, backend = step.cost_ns, step.backend_ns
    if row.position is not None and begin is None:
        # One collective of all ranks: the common case, without copies.
        free, position = link_free[row.links[0]], row.position
        last = arrived[position].max()
        np.maximum(free, last, out=free)
        free += cost[position]
        if backend is not None:
            np.maximum(free, last + backend[position], out=free)
        end[position] = free
        return
    columns, positions = row.columns, row.positions
    came = arrived[positions, columns]
    last = np.maximum.reduceat(came, row.starts)[row.which]
    linked = row.links >= 0
    free = np.where(linked, link_free[np.maximum(row.links, 0), columns], LONG_AGO)
    done = np.maximum(last, free) + cost[positions, np.minimum(columns, cost.shape[1] - 1)]
    if backend is not None:
        done = np.maximum(done, last + backend[positions, columns])
    end[positions, columns] = done
    link_free[row.links[linked], columns[linked]] = done[linked]
    if begin is not None:
        begin[positions, columns] = np.maximum(came, free)


RANK_STEPS: int = 512
"""Rank-steps that are measured, 0.1 ms each; more would hardly change a median."""


class RankStepSample(NamedTuple):
    """Indices of the steps and columns of the ranks that are measured."""

    steps: tuple[int, ...]
    ranks: tuple[int, ...]

    def kept(self) -> set[int]:
        """Return the steps of which a replay has to keep all times: communication reaches into the step after it."""
        return {index for step in self.steps for index in (step - 1, step) if index >= 0}


class Measured(NamedTuple):
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


def measure(program: RunProgram, times: Times, chosen: RankStepSample) -> Measured:
    """Measure the sampled rank-steps of a replay that kept the times of `chosen.kept()`."""
    rows = []
    for index in chosen.steps:
        step, kept = program.steps[index], times.kept[index]
        for column in chosen.ranks:
            comm: dict[str, list[Interval]] = defaultdict(list)
            for earlier in (index - 1, index):
                if earlier in times.kept:
                    of_step = times.kept[earlier]
                    issued = program.layouts[program.steps[earlier].layouts[column]].issued
                    ends = (table[:, column].tolist() for table in (of_step.begin_ns, of_step.end_ns))
                    for collective, low, high in zip(issued, *ends, strict=False):
                        comm[collective.kind].append((min(low, high), high))
            compute, stalls = _spans(step, kept, column)
            for number, operation in enumerate(program.layouts[step.layouts[column]].operations):
                if operation.what is What.WAIT:
                    stalls.append((int(kept.enter_ns[number, column]), int(kept.leave_ns[number, column])))
            window = int(times.begin_ns[index, column]), int(times.end_ns[index, column])
            (measured,) = measure_windows(
                interval_array([window]),
                compute=merge(interval_array(compute)),
                comm={kind: merge(interval_array(spans)) for kind, spans in comm.items()},
                stalls=merge(interval_array(stalls)),
            )
            ratio = float("nan") if measured.overlap_ratio is None else measured.overlap_ratio
            rows.append((ratio, measured.exposed_ns / NS_PER_MS, measured.idle_ns / NS_PER_MS))
    ratio_of, exposed_ms, idle_ms = np.array(rows, np.float64).T
    step_of = np.repeat(np.array(chosen.steps, np.int64), len(chosen.ranks))
    return Measured(ratio_of, exposed_ms, idle_ms, step_of)


def _spans(step: StepProgram, times: StepTimes, column: int) -> tuple[list[Interval], list[Interval]]:
    """Return when one rank computed in a step as replayed, and when a call of the backend held it up. A span begins
    behind the waits that came before it, and is over when the rank reaches the operation behind it.
    """
    spans, chosen = step.spans, step.spans.of_rank(column)
    enter, leave = times.enter_ns[:, column], times.leave_ns[:, column]

    def at(after: Ints, offset: Ints) -> Ints:
        behind = np.minimum(after + 1, len(enter) - 1)
        return np.where(after < len(enter) - 1, np.minimum(leave[after] + offset, enter[behind]), leave[after] + offset)

    begin = at(spans.begin_after[chosen].astype(np.int64), spans.begin_ns[chosen].astype(np.int64))
    end = np.maximum(at(spans.end_after[chosen].astype(np.int64), spans.end_ns[chosen].astype(np.int64)), begin)
    computes = spans.computes[chosen]
    compute, held_up = (
        list(zip(begin[rows].tolist(), end[rows].tolist(), strict=True)) for rows in (computes, ~computes)
    )
    return compute, held_up
