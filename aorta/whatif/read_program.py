"""Reads the program of a run from its records.

    program = read_program("artifacts/cuda", last=100)  # its last hundred steps
    program = program_of(run)                           # of a run that has been read

Only steps after the warm-up that every rank has. Refuses, with the reason, what a replay could not follow.

The order of a rank's operations follows from their times. At the same instant (frequent on virtual clocks) an issue
comes before a wait that blocked, or that was for that collective; otherwise the wait was over before the issue.

The cost of a collective is its time once all its ranks had arrived and its link was free. On an emulated network on one
host the record shows it exactly: an end that the emulation set is that moment plus the network's charge; one that the
backend set says how long the backend took. Everywhere else the recorded time is the cost, and the network's charge a
part of it. Must not guess a wait, an end or a clock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from functools import partial, reduce
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import numpy as np

from aorta.analysis.pace import Pace
from aorta.config.fabric import EmulatedFabric, Sharing, emulated_rules
from aorta.errors import InputError
from aorta.read.frames import NO_TIME, Bools, CollectiveName, Ints, Lane, Spans
from aorta.read.locations import load_source
from aorta.read.record_columns import FORMAT
from aorta.read.run import HOST_TIMER, RankTables, Run
from aorta.whatif.program import (
    Column,
    Issued,
    Operation,
    ProgramSpans,
    RankLayout,
    RunProgram,
    StepProgram,
    What,
    compact,
)
from aorta.whatif.replay import LONG_AGO, CollectiveBatch, Schedule, schedule_of

_LEAST_STEPS: Final = 2
_REMEMBERED_STEPS: Final = 2
"""A wait may be for a collective of at most this many steps before."""


def read_program(location: str | Path, last: int | None = None) -> RunProgram:
    """Return the program of one run folder, by `program_of`.

    Raises:
        InputError: it cannot be read, or not be replayed.
    """
    return program_of(load_source(location, spans=True), last)


def program_of(run: Run, last: int | None = None) -> RunProgram:
    """Return the program of a run that has been read.

    Args:
        last: only the last so many steps; None: all.

    Raises:
        InputError: it cannot be replayed; the message says why.
    """
    health, no = run.health, partial(_not_replayable, run)
    if run.source.format != FORMAT:
        raise no(
            f"it takes AORTA's own record of the run, and these are traces ({run.source.format}). Record the run with "
            "aorta record DIR -- COMMAND, or aorta train"
        )
    if health.world_size == 1:
        emulated = health.emulated_ranks
        raise no("a single rank does not communicate" if emulated is None else f"it has {health.ranks}")
    if health.ranks_missing:
        raise no(f"{len(health.ranks_missing)} of {health.world_size} ranks are missing")
    for gap in health.gaps:
        if gap.lanes:
            raise no(f"{gap.why} (rank {gap.rank}, {gap.steps} steps)")
    basis = Pace(run).basis("compute_ms")
    if basis.source != "marks":
        raise no(basis.reason or "the device's computation is known of the steps measured by kernels alone")
    if any(not tables.source.groups for tables in run.ranks.values()):
        raise no("a record has no footer, which names the ranks of each process group")
    common = reduce(np.intersect1d, [tables.steps.global_step[tables.steps.used] for tables in run.ranks.values()])
    if len(common) < _LEAST_STEPS:
        raise no(f"{len(common)} step(s) after the warm-up are on all ranks; it takes {_LEAST_STEPS}")
    if run.manifest is None:
        raise no(health.manifest_problem)
    network = network_of(run.location, health.emulated_fabric, health.world_size)
    if network is not None and network.sharing is Sharing.link:
        raise no("its process groups share links (fabric.sharing=link); record with fabric.sharing=group")
    return _Reader(run, network, common if last is None else common[-last:]).program()


def _not_replayable(run: Run, why: object) -> InputError:
    """Return the error for a run whose program would have to be guessed."""
    return InputError(f"{run.location}: a replay is not possible: {why}")


def network_of(location: str, fabric: Mapping[str, object] | None, world_size: int) -> EmulatedFabric | None:
    """Return the settings of an emulated network as the manifest of a run states them; None: the network was real.

    Raises:
        InputError: they are not settings of an emulated network.
    """
    if fabric is None:
        return None
    try:
        settings = msgspec.convert(fabric, EmulatedFabric)
        problem = "; ".join(emulated_rules(settings, world_size))
    except msgspec.ValidationError as error:
        problem = str(error)
    if problem:
        raise InputError(f"{location}: run.json states an emulated network that is none ({problem})")
    return settings


class _Known(NamedTuple):
    """A collective that was issued: index of its step, its position in it, its end on the common clock."""

    step: int
    position: int
    end_ns: int


class _Rank:
    """The steps of one rank that are read, and what has been read of them.

    Attributes:
        rows: index of each step in the rank's tables.
        start_ns: when each began, on the clock that all ranks share.
        links: name of a link -> its number on this rank.
        known: group and number -> a collective that was issued in the last steps.
        left_ns: when the last operation that was read was over.
    """

    def __init__(self, tables: RankTables, steps: Ints, offset_ns: int | None) -> None:
        columns = tables.steps
        self.tables = tables
        self.rows: list[int] = np.searchsorted(columns.global_step, steps).tolist()
        began = columns.start_mono_ns if offset_ns is None else columns.t_start_ns + offset_ns
        self.start_ns: list[int] = began[self.rows].tolist()
        self.groups = {name: tuple(sorted(members)) for name, members in tables.source.groups.items()}
        self.links: dict[str, int] = {}
        self.known: dict[tuple[str, int], _Known] = {}
        self.left_ns = self.start_ns[0]


class _Moment(NamedTuple):
    """One operation as it was recorded; `until_ns` is the end of the collective that a wait is for."""

    enter_ns: int
    leave_ns: int
    operation: Operation
    until_ns: int = 0


class _RankStep(NamedTuple):
    """One step of one rank.

    Attributes:
        layout, host_ns, wake_ns: as in `program.StepProgram`.
        times_ns: when each of its collectives reached its link, began, ended, and ended in the backend (`NO_TIME`:
            unknown), on the common clock; shape (4, collectives).
        spans: whether a block computes, and from when to when, as `_anchor` gives both.
        by_backend: whether the end of each is that of the backend, not one that an emulated network set.
    """

    layout: int
    host_ns: list[int]
    wake_ns: list[int]
    spans: list[tuple[bool, int, int, int, int]]
    times_ns: Ints
    by_backend: list[bool]


class _Reader:
    def __init__(self, run: Run, network: EmulatedFabric | None, steps: Ints) -> None:
        # Ranks on one host share its monotonic clock; otherwise the wall clocks are corrected by what was measured.
        one_host = len({tables.source.host for tables in run.ranks.values()}) == 1 and run.source.host is not None
        self._ranks: list[_Rank] = []
        for rank, tables in sorted(run.ranks.items()):
            clock = run.clocks.get(rank)
            if not one_host and (clock is None or not clock.known):
                why = run.clocks_missing or "they were not measured"
                raise _not_replayable(
                    run, f"the ranks are on several hosts, and their clocks cannot be compared (rank {rank}): {why}"
                )
            start_ns = int(tables.steps.t_start_ns[0])
            self._ranks.append(_Rank(tables, steps, None if one_host or not clock else clock.correction_ns(start_ns)))
        self._run, self._network, self._steps = run, network, steps
        self._layouts: dict[RankLayout, int] = {}
        self._numbers = tuple(rank.tables.source.rank for rank in self._ranks)
        self._schedules: dict[tuple[int, ...], Schedule] = {}
        self._on_host = run.source.timer == HOST_TIMER
        self._law = network is not None and self._on_host and one_host
        self._arrival_unknown = self._collectives = self._backend_was_limit = 0
        self._queued_ns = self._cost_ns = 0
        self._free: dict[tuple[int, int], int] = {}  # link and column -> until when it is busy
        self._busy_before: dict[tuple[int, int], int] = {}  # ... before the first step

    def program(self) -> RunProgram:
        steps = [self._step(index) for index in range(len(self._steps))]
        links = 1 + max((link for rank in self._ranks for link in rank.links.values()), default=0)
        busy_ns = np.full((links, len(self._ranks)), LONG_AGO, np.int64)
        for lane, until_ns in self._busy_before.items():
            busy_ns[lane] = until_ns
        recorded = [rank.tables.steps.take(np.array(rank.rows)) for rank in self._ranks]
        return RunProgram(
            ranks=self._numbers,
            world_size=self._run.health.world_size,
            layouts=tuple(self._layouts),
            steps=steps,
            start_ns=np.array([rank.start_ns[0] for rank in self._ranks], np.int64),
            busy_ns=busy_ns,
            recorded_ns=np.array([of_rank.length_ns for of_rank in recorded]).T,
            recorded_ratio=np.array([of_rank.column("overlap_ratio") for of_rank in recorded]).T,
            recorded_exposed_ms=np.array([of_rank.column("exposed_comm_ms") for of_rank in recorded]).T,
            backend=self._run.source.backend,
            network=self._network,
            law=self._law,
            collectives=self._collectives,
            backend_was_limit=self._backend_was_limit,
            arrival_unknown=self._arrival_unknown,
            queued_share=self._queued_ns / self._cost_ns if self._cost_ns else 0.0,
        )

    def _step(self, index: int) -> StepProgram:
        made = [self._rank_step(rank, index) for rank in self._ranks]
        layouts, global_step = tuple(of_rank.layout for of_rank in made), int(self._steps[index])
        try:
            rows = schedule_of(self._schedules, self._numbers, global_step, layouts, self._layouts)
        except InputError as error:
            raise _not_replayable(self._run, error) from error
        count = max(len(of_rank.by_backend) for of_rank in made)
        charged = None  # by the network's formula, shape (collectives, ranks) or (collectives, 1)
        if self._network is not None:
            known, world = list(self._layouts), self._run.health.world_size
            different = layouts if len(set(layouts)) > 1 else layouts[:1]
            charged = np.zeros((count, len(different)), np.int64)
            for column, layout in enumerate(different):
                for position, issued in enumerate(known[layout].issued):
                    charged[position, column] = round(issued.charge_ns(world, self._network))
        times_ns = np.zeros((4, count, len(made)), np.int64)
        by_backend = np.zeros((count, len(made)), bool)
        for column, of_rank in enumerate(made):
            times_ns[:, : len(of_rank.by_backend), column] = of_rank.times_ns
            by_backend[: len(of_rank.by_backend), column] = of_rank.by_backend
        cost, backend = np.zeros_like(times_ns[0]), np.zeros_like(times_ns[0])
        for row in rows:
            if isinstance(row, CollectiveBatch):
                self._meet(row, times_ns, by_backend, charged, cost, backend)
        if cost.size and (cost == cost[:, :1]).all():
            cost = cost[:, :1]
        spans = [(column, *span) for column, of_rank in enumerate(made) for span in of_rank.spans]
        rank, computes, *ends = map(compact, np.array(spans, np.int64).reshape(-1, 6).T)
        return StepProgram(
            global_step=global_step,
            layouts=layouts,
            host_ns=_padded([of_rank.host_ns for of_rank in made]),
            wake_ns=_padded([of_rank.wake_ns for of_rank in made]),
            cost_ns=compact(cost),
            network_ns=None if charged is None else compact(charged),
            backend_ns=compact(backend) if backend.any() else None,
            spans=ProgramSpans(rank, computes.astype(bool), *ends),
        )

    def _rank_step(self, rank: _Rank, index: int) -> _RankStep:
        """Return one step of one rank. A wait for a collective that was issued before the first step of the program is
        own time.
        """
        row, start_ns, number = rank.rows[index], rank.start_ns[index], rank.tables.source.rank
        rows, spans, at = rank.tables.collectives.of_step(row), rank.tables.spans, row
        if spans is None:  # the tables were read without: read them from the record's line
            spans, at = rank.tables.details.spans(np.array([row])), 0
        if spans.waits_known is None or not spans.waits_known[at]:
            raise _not_replayable(
                self._run,
                f"the record does not say who waited for which collective (rank {number}, global step "
                f"{self._steps[index]}); record it again with this AORTA",
            )
        if (rows.end_ns == NO_TIME).any() or (rows.start_ns == NO_TIME).any():
            raise InputError(f"{self._run.location}: rank {number}, global step {self._steps[index]}: no end")
        inside, names = spans.of_step(at), [rows.names[name] for name in rows.name.tolist()]
        issued = tuple(self._issued(rank, name) for name in names)
        for position, (name, seq, end) in enumerate(zip(names, rows.seq.tolist(), rows.end_ns.tolist(), strict=True)):
            rank.known[name.group, seq] = _Known(index, position, start_ns + end)
        arrivals: list[int] = rows.issue_ns.tolist()
        if not self._on_host:
            # When the caller's stream reached it. Where it was queued behind another collective, that moment left no
            # trace: it is taken for the earliest possible.
            busy: dict[str, int] = {}
            earliest = 0
            ends = zip(names, rows.start_ns.tolist(), rows.end_ns.tolist(), strict=True)
            for position, (name, start, end) in enumerate(ends):
                queued = start <= busy.get(name.group, -1)
                self._arrival_unknown += queued
                earliest = arrivals[position] = min(max(arrivals[position], earliest), start) if queued else start
                busy[name.group] = end
        waits = []
        for name, seq, enter_ns, leave_ns in _rows(inside.of_lanes(Lane.WAIT), "name", "ref", "start_ns", "end_ns"):
            if (ended := rank.known.get((inside.names[name].name, seq))) is not None:
                operation = Operation(What.WAIT, ended.position, index - ended.step)
                waits.append(_Moment(enter_ns, leave_ns, operation, ended.end_ns - start_ns))
        host, wake, moments = list[int](), list[int](), list[_Moment]()
        now = rank.left_ns - start_ns
        for moment in _in_order(waits, arrivals, int(rank.tables.steps.length_ns[row])):
            enter = max(moment.enter_ns, now)
            leave = max(moment.leave_ns, enter)
            host.append(enter - now)
            wake.append(leave - max(enter, moment.until_ns) if moment.operation.what is What.WAIT else 0)
            moments.append(moment._replace(enter_ns=enter, leave_ns=leave))
            now = leave
        rank.left_ns = start_ns + now
        rank.known = {key: ended for key, ended in rank.known.items() if ended.step >= index - _REMEMBERED_STEPS}
        layout = RankLayout(tuple(moment.operation for moment in moments), issued)
        times = np.full((4, len(rows)), NO_TIME, np.int64)
        times[:3] = start_ns + np.array([arrivals, rows.start_ns, rows.end_ns])
        if rows.backend_end_ns is not None:
            times[3] = np.where(rows.backend_end_ns == NO_TIME, NO_TIME, rows.backend_end_ns + start_ns)
        return _RankStep(
            layout=self._layouts.setdefault(layout, len(self._layouts)),
            host_ns=host,
            wake_ns=wake,
            spans=[
                (lane == Lane.COMPUTE, *_anchor(moments, begin, begins=True), *_anchor(moments, end, begins=False))
                for lane, begin, end in _rows(
                    inside.of_lanes(Lane.COMPUTE, Lane.HAND_OVER), "lane", "start_ns", "end_ns"
                )
                if begin < end
            ],
            times_ns=times,
            by_backend=[name.end_source != "emulated" for name in names],
        )

    def _issued(self, rank: _Rank, name: CollectiveName) -> Issued:
        if name.kind in ("send", "recv"):
            raise _not_replayable(self._run, "it has sends and receives: nothing says which belong together")
        members = rank.groups.get(name.group)
        if members is None:
            raise _not_replayable(self._run, f"the ranks of process group {name.group!r} are unknown")
        link: int | None = None
        if self._network is not None or not self._on_host:
            link = rank.links.setdefault(name.group, len(rank.links))
        return Issued(name.kind, name.group, name.bytes, members, link)

    def _meet(
        self,
        row: CollectiveBatch,
        times_ns: Ints,
        by_backend: Bools,
        charged: Ints | None,
        cost: Ints,
        backend: Ints,
    ) -> None:
        """Write costs of collectives, and until when their links are busy."""
        positions, columns = row.positions, row.columns
        issue, start, end, backend_end = times_ns[:, positions, columns]
        links = list(zip(row.links.tolist(), columns.tolist(), strict=True))
        for link, came_ns, begun_ns in zip(links, issue.tolist(), start.tolist(), strict=True):
            if link[0] >= 0 and link not in self._free:  # before its first collective only that collective can tell
                self._free[link] = self._busy_before[link] = begun_ns if begun_ns > came_ns else LONG_AGO
        free = np.array([self._free[link] if link[0] >= 0 else LONG_AGO for link in links], np.int64)
        last = np.maximum.reduceat(issue, row.starts)[row.which]
        took = end - np.maximum(last, free)
        self._collectives += len(columns)
        self._cost_ns += int(took.sum())
        self._queued_ns += int(np.maximum(start - last, 0)[row.links < 0].sum())
        if not self._law:
            cost[positions, columns] = took
        else:
            backend_set = by_backend[positions, columns]
            self._backend_was_limit += int(backend_set.sum())
            assert charged is not None  # an emulated network charges
            by_law = charged[positions, np.minimum(columns, charged.shape[1] - 1)]
            # The same on every rank, jitter included: where the backend set the end here, another rank may know it.
            shown = np.maximum.reduceat(np.where(backend_set, LONG_AGO, took), row.starts)[row.which]
            cost[positions, columns] = np.where(backend_set, np.where(shown > LONG_AGO, shown, by_law), took)
            known = backend_end != NO_TIME
            until = np.where(known, backend_end, end)
            backend[positions, columns] = np.where(backend_set | known, np.maximum(until - last, 0), 0)
        self._free |= {link: until_ns for link, until_ns in zip(links, end.tolist(), strict=True) if link[0] >= 0}


def _rows(spans: Spans, *columns: str) -> Iterator[tuple[int, ...]]:
    return zip(*(getattr(spans, name).tolist() for name in columns), strict=True)


def _in_order(waits: Sequence[_Moment], issue_ns: Sequence[int], length_ns: int) -> list[_Moment]:
    """Return the operations of a step in the order in which the rank did them; times count from its start.

    Args:
        waits: in order.
        issue_ns: when each collective reached its link, in order.
    """
    moments = [_Moment(0, 0, Operation(What.BEGIN))]
    index = 0
    for position, came_ns in enumerate(issue_ns):
        tied = index
        while index < len(waits) and waits[index].enter_ns < came_ns:
            index += 1
        moments += waits[tied:index]
        tied = index
        while tied < len(waits) and waits[tied].enter_ns == came_ns:
            tied += 1
        same = waits[index:tied]
        if not any(wait.leave_ns > came_ns or wait.operation[1:] == (position, 0) for wait in same):
            moments += same  # all of these waits were over before the issue
            index = tied
        moments.append(_Moment(came_ns, came_ns, Operation(What.ISSUE, position)))
    return [*moments, *waits[index:], _Moment(length_ns, length_ns, Operation(What.END))]


def _anchor(moments: Sequence[_Moment], at_ns: int, *, begins: bool) -> tuple[int, int]:
    """Return the index of the last operation before a moment, and nanoseconds since its end. A span begins behind every
    operation that was over by then, and behind a wait that it began in; it ends before an operation that the rank
    reached at that very moment, and before a wait that it ended in.
    """

    def later(moment: _Moment) -> bool:
        if begins:
            inside_wait = moment.enter_ns < at_ns and moment.operation.what is What.WAIT
            return moment.leave_ns > at_ns and not inside_wait
        return moment.enter_ns >= at_ns or moment.leave_ns > at_ns

    index = max(bisect_left(moments, True, key=later) - 1, 0)
    return index, max(at_ns - moments[index].leave_ns, 0)


def _padded(rows: Sequence[Sequence[int]]) -> Column:
    """Return the rows of ranks as columns, shape (longest row, ranks); 0 behind the end of a shorter one."""
    table = np.zeros((max(map(len, rows)), len(rows)), np.int64)
    for column, row in enumerate(rows):
        table[: len(row), column] = row
    return compact(table)
