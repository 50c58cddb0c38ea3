"""Reads the program of a run from its records.

    program = read_program("artifacts/cuda", last=100)  # its last hundred steps
    program = program_of(run)                           # of a run that has been read

Only steps behind the warm-up that every rank has. Refuses, and says why, what a replay could not follow: a step of
which something was missed, ranks without a common clock, waits that were not recorded, sends and receives, groups of
unknown ranks. Must not guess a wait, an end or a clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial, reduce
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import numpy as np

from aorta.analysis.frames import NO_TIME, CollectiveName, Collectives, Floats, Ints, SpanName
from aorta.analysis.host_bound import Pace
from aorta.analysis.load.locations import load_source
from aorta.analysis.load.record_columns import FORMAT
from aorta.analysis.run import HOST_TIMER, RankTables, Run
from aorta.analysis.step_intervals import StepContents, contents_of
from aorta.analysis.whatif.program import (
    Column,
    Facts,
    Issued,
    ProgramSpans,
    RankLayout,
    RunProgram,
    StepProgram,
    compact,
    not_replayable,
)
from aorta.analysis.whatif.recorded import Costs, IssuedCollective, Key, RankStep, Recorded, rank_step
from aorta.analysis.whatif.schedule import Schedules
from aorta.config.groups.fabric import emulated_rules, spans_nodes
from aorta.config.schema import EmulatedFabric, Sharing
from aorta.errors import InputError

_LEAST_STEPS: Final = 2
_TIMED_AT_BOTH_ENDS: Final = frozenset({"send", "recv"})
_REMEMBERED_STEPS: Final = 2
"""A wait may be for a collective of that many steps ago."""


def read_program(location: str | Path, last: int | None = None) -> RunProgram:
    """Return the program of one run folder.

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
    _refuse(run)
    common = reduce(np.intersect1d, [tables.steps.global_step[tables.steps.used] for tables in run.ranks.values()])
    if len(common) < _LEAST_STEPS:
        raise not_replayable(
            run.location, f"{len(common)} step(s) behind the warm-up are on all ranks; it takes {_LEAST_STEPS}"
        )
    if run.manifest is None:
        raise not_replayable(run.location, run.health.manifest_problem)
    try:
        network = network_of(run.health.fabric, run.health.world_size)
    except ValueError as error:
        raise InputError(f"{run.location}: run.json states an emulated network that is none ({error})") from error
    return _Reader(run, network, common if last is None else common[-last:]).program()


def _refuse(run: Run) -> None:
    health, no = run.health, partial(not_replayable, run.location)
    if run.source.format != FORMAT:
        raise no(f"it takes AORTA's own record of the run, and these are traces ({run.source.format})")
    if health.world_size == 1:
        emulated = health.emulated_ranks
        raise no("one rank communicates with nobody" if emulated is None else f"it has {health.ranks}")
    if health.ranks_missing:
        raise no(f"{len(health.ranks_missing)} of {health.world_size} ranks are missing")
    if health.uncovered_steps:
        reason = max(health.coverage_reasons, key=health.coverage_reasons.__getitem__)
        raise no(f"coverage is not complete in {sum(health.uncovered_steps.values())} step(s): {reason}")
    basis = Pace(run).basis("compute_ms")
    if basis.source != "marks":
        raise no(basis.reason or "when its device computed is known of the steps measured by kernels alone")
    if any(not tables.source.groups for tables in run.ranks.values()):
        raise no("a record has no footer, which names the ranks of each process group")


def network_of(fabric: Mapping[str, object] | None, world_size: int) -> EmulatedFabric | None:
    """Return the settings of an emulated network as a manifest states them; None: the network was real.

    Raises:
        ValueError: they are not settings of an emulated network.
    """
    if fabric is None:
        return None
    try:
        settings = msgspec.convert(fabric, EmulatedFabric)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error
    problems = list(emulated_rules(settings, world_size))
    if problems:
        raise ValueError("; ".join(problems))
    return settings


def _clock_offsets(run: Run) -> Mapping[int, int] | None:
    """Return what to add to each rank's wall clock; None where all ranks share a host, and with it a monotonic clock.

    Raises:
        InputError: they are on several hosts whose clocks were not measured.
    """
    if len({tables.source.host for tables in run.ranks.values()}) == 1 and run.source.host is not None:
        return None
    offsets = {}
    for rank, tables in run.ranks.items():
        clock = run.clocks.get(rank)
        if clock is None or not clock.known:
            why = run.clocks_missing or "they were not measured"
            raise not_replayable(
                run.location,
                f"the ranks are on several hosts, and their clocks cannot be compared (rank {rank}): {why}",
            )
        offsets[rank] = clock.correction_ns(int(tables.steps.t_start_ns[0]))
    return offsets


class _Rank:
    """The steps of one rank that are read, and what has been read of them.

    Attributes:
        places: index of each step in the rank's tables.
        start_ns: when each began, on the clock that all ranks share.
        known: collectives that were issued in the last steps.
        left_ns: when the last operation that was read was over.
    """

    def __init__(self, tables: RankTables, steps: Ints, offset_ns: int | None) -> None:
        columns = tables.steps
        self.tables = tables
        self.places: list[int] = np.searchsorted(columns.global_step, steps).tolist()
        began = columns.start_mono_ns if offset_ns is None else columns.t_start_ns + offset_ns
        self.start_ns: list[int] = began[self.places].tolist()
        self.groups = {name: tuple(sorted(members)) for name, members in tables.source.groups.items()}
        self.links: dict[str, int] = {}
        self.known: dict[Key, IssuedCollective] = {}
        self.left_ns = self.start_ns[0]

    def contents(self, index: int) -> StepContents:
        """Return what ran inside a step; read from the record's line where the tables were read without.

        Raises:
            InputError: it can no longer be read.
        """
        place = self.places[index]
        if self.tables.spans is not None:
            return contents_of(self.tables.spans, place)
        return contents_of(self.tables.details.spans(np.array([place])), 0)


class _RankStep(NamedTuple):
    layout: int
    step: RankStep
    start_ns: int
    issue_ns: list[int]
    rows: Collectives


class _Reader:
    """Builds the program, step by step over all ranks."""

    def __init__(self, run: Run, network: EmulatedFabric | None, steps: Ints) -> None:
        offsets_ns = _clock_offsets(run)
        self._run, self._network, self._steps = run, network, steps
        self._ranks = {
            rank: _Rank(tables, steps, None if offsets_ns is None else offsets_ns[rank])
            for rank, tables in sorted(run.ranks.items())
        }
        self._layouts: dict[RankLayout, int] = {}
        self._names: dict[SpanName, int] = {}
        self._schedules = Schedules(tuple(self._ranks))
        self._on_host = run.source.timer == HOST_TIMER
        self._shared = network is not None and network.sharing is Sharing.link and self._on_host
        self._law = network is not None and self._on_host and offsets_ns is None
        self._costs = Costs(self._law, self._shared)
        self._arrival_unknown = 0

    def program(self) -> RunProgram:
        steps = [self._step(index) for index in range(len(self._steps))]
        links = max((max(rank.links.values(), default=-1) for rank in self._ranks.values()), default=-1) + 1
        return RunProgram(
            ranks=tuple(self._ranks),
            world_size=self._run.health.world_size,
            layouts=tuple(self._layouts),
            names=tuple(self._names),
            steps=steps,
            start_ns=np.array([rank.start_ns[0] for rank in self._ranks.values()], np.int64),
            busy_ns=self._costs.busy_before(max(links, 1), len(self._ranks)),
            facts=Facts(
                parallel=self._run.source.parallel,
                device=self._run.source.device,
                network=self._network,
                law=self._law,
                collectives=self._costs.collectives,
                backend_was_limit=self._costs.backend_was_limit,
                arrival_unknown=self._arrival_unknown,
                gradient_order=next(iter(self._run.ranks.values())).gradient_order,
            ),
            shared_links=self._shared,
        )

    def _step(self, index: int) -> StepProgram:
        of_ranks = [self._rank_step(rank, index) for rank in self._ranks.values()]
        layouts = tuple(each.layout for each in of_ranks)
        try:
            plan = self._schedules.of(int(self._steps[index]), layouts, self._layouts)
        except InputError as error:
            raise not_replayable(self._run.location, error) from error
        ready = [each.step.ready_ns for each in of_ranks]
        cost, network, backend = self._costs.of(
            plan, _recorded(of_ranks, plan.places), self._charged(layouts, plan.places)
        )
        return StepProgram(
            global_step=int(self._steps[index]),
            layouts=layouts,
            host_ns=_padded([each.step.host_ns for each in of_ranks]),
            wake_ns=_padded([each.step.wake_ns for each in of_ranks]),
            cost_ns=cost,
            network_ns=network,
            backend_ns=backend,
            spans=self._spans([each.step for each in of_ranks]),
            # None: no bucket was held back, or not the same on all ranks.
            ready_ns=np.array(ready, np.int64).T if ready[0] and len(set(map(len, ready))) == 1 else None,
            recorded_ns=np.array([rank.tables.steps.length_ns[rank.places[index]] for rank in self._ranks.values()]),
            recorded_ratio=self._metric("overlap_ratio", index),
            recorded_exposed_ms=self._metric("exposed_comm_ms", index),
        )

    def _metric(self, name: str, index: int) -> Floats:
        return np.array([rank.tables.steps.column(name)[rank.places[index]] for rank in self._ranks.values()])

    def _rank_step(self, rank: _Rank, index: int) -> _RankStep:
        contents, start_ns, number = rank.contents(index), rank.start_ns[index], rank.tables.source.rank
        steps, place = rank.tables.steps, rank.places[index]
        if contents.waits is None:
            raise not_replayable(
                self._run.location,
                f"the record does not say who waited for which collective (rank {number}, global step "
                f"{self._steps[index]}); record it again with this AORTA",
            )
        rows = rank.tables.collectives.of_step(place)
        names = [rows.names[name] for name in rows.name.tolist()]
        issued = tuple(self._issued(rank, name) for name in names)
        if (rows.end_ns == NO_TIME).any() or (rows.start_ns == NO_TIME).any():
            raise InputError(f"{self._run.location}: rank {number}, global step {self._steps[index]}: no end")
        for at, (name, seq, end) in enumerate(zip(names, rows.seq.tolist(), rows.end_ns.tolist(), strict=True)):
            rank.known[name.group, seq] = IssuedCollective(index, at, start_ns + end)
        arrivals = rows.issue_ns.tolist() if self._on_host else self._on_stream(names, rows)
        length_ns = int(steps.length_ns[place])
        step = rank_step(contents, index, start_ns, length_ns, rank.left_ns, arrivals, rank.known)
        rank.left_ns = step.left_ns
        layout = self._layouts.setdefault(RankLayout(step.operations, issued), len(self._layouts))
        rank.known = {key: ended for key, ended in rank.known.items() if ended.step >= index - _REMEMBERED_STEPS}
        return _RankStep(layout, step, start_ns, arrivals, rows)

    def _on_stream(self, names: Sequence[CollectiveName], rows: Collectives) -> list[int]:
        """Return when the stream of each collective's caller had reached it. Where it was queued behind another, that
        moment left no trace: it is taken for the earliest possible.
        """
        arrivals: list[int] = []
        free: dict[str, int] = {}
        before = 0
        columns = (rows.issue_ns.tolist(), rows.start_ns.tolist(), rows.end_ns.tolist())
        for name, issue, start, end in zip(names, *columns, strict=True):
            queued = start <= free.get(name.group, -1)
            self._arrival_unknown += queued
            arrivals.append(min(max(issue, before), start) if queued else start)
            free[name.group] = end
            before = arrivals[-1]
        return arrivals

    def _issued(self, rank: _Rank, name: CollectiveName) -> Issued:
        if name.kind in _TIMED_AT_BOTH_ENDS:
            raise not_replayable(self._run.location, "it has sends and receives: nothing says which belong together")
        members = rank.groups.get(name.group)
        if members is None:
            raise not_replayable(self._run.location, f"the ranks of process group {name.group!r} are unknown")
        link: int | None = None
        if self._shared:
            assert self._network is not None  # nothing else is shared
            link = int(spans_nodes(members, self._run.health.world_size, self._network))
            rank.links[str(link)] = link
        elif self._network is not None or not self._on_host:
            link = rank.links.setdefault(name.group, len(rank.links))
        return Issued(name.kind, name.group, name.bytes, members, link)

    def _charged(self, layouts: tuple[int, ...], places: int) -> Ints | None:
        """Return what the network's law charges for each collective, shape (places, ranks) or (places, 1)."""
        if self._network is None:
            return None
        known = list(self._layouts)
        different = layouts if len(set(layouts)) > 1 else layouts[:1]
        world = self._run.health.world_size
        charged = np.zeros((places, len(different)), np.int64)
        for column, layout in enumerate(different):
            for place, issued in enumerate(known[layout].issued):
                charged[place, column] = round(issued.charge_ns(world, self._network))
        return charged

    def _spans(self, of_ranks: Sequence[RankStep]) -> ProgramSpans:
        rows = [
            (rank, self._names.setdefault(name, len(self._names)), *begin, *end)
            for rank, step in enumerate(of_ranks)
            for name, begin, end in step.spans
        ]
        table = np.array(rows, np.int64).reshape(-1, 6).T
        rank, name, begin_after, end_after = (table[at].astype(np.int32) for at in (0, 1, 2, 4))
        return ProgramSpans(rank, name, begin_after, compact(table[3]), end_after, compact(table[5]))


def _padded(rows: Sequence[Sequence[int]]) -> Column:
    """Return the rows of ranks as columns, shape (longest row, ranks); 0 behind the end of a shorter one."""
    longest = max(map(len, rows))
    table = np.zeros((longest, len(rows)), np.int64)
    for column, row in enumerate(rows):
        table[: len(row), column] = row
    return compact(table)


def _recorded(of_ranks: Sequence[_RankStep], places: int) -> Recorded:
    shape = (places, len(of_ranks))
    issue, start, end, backend_end = (np.zeros(shape, np.int64) for _ in range(4))
    found = Recorded(issue, start, end, backend_end, np.zeros(shape, bool), np.zeros(shape, bool))
    for column, each in enumerate(of_ranks):
        rows, count = each.rows, len(each.rows)
        issue[:count, column] = np.array(each.issue_ns, np.int64) + each.start_ns
        start[:count, column] = rows.start_ns + each.start_ns
        end[:count, column] = rows.end_ns + each.start_ns
        found.by_backend[:count, column] = [rows.names[name].end_source != "emulated" for name in rows.name.tolist()]
        if rows.backend_end_ns is not None:
            known = rows.backend_end_ns != NO_TIME
            backend_end[:count, column] = np.where(known, rows.backend_end_ns + each.start_ns, 0)
            found.backend_known[:count, column] = known
    return found
