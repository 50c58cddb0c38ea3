"""Builds the program of a run from the steps of its ranks.

    ProgramReader(run, network, steps, {rank: RankSteps(...)}).program()

Refuses, and says why, what a replay could not follow: waits that were not recorded, sends and receives, groups of
unknown ranks. Must not read a file, or guess a wait, an end or a clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from aorta.analysis.step_intervals import SpanName, StepContents
from aorta.analysis.tables import HOST_TIMER, NO_TIME, CollectiveName, Collectives, Floats, Ints, RankTables, Run
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
from aorta.analysis.whatif.recorded import Anchor, Costs, IssuedCollective, Key, RankStep, Recorded, rank_step
from aorta.analysis.whatif.schedule import Schedules
from aorta.config.groups.fabric import spans_nodes
from aorta.config.schema import EmulatedFabric, Sharing
from aorta.errors import InputError
from aorta.records.schema import Gradient

LEAST_STEPS: Final = 2
_TIMED_AT_BOTH_ENDS: Final = frozenset({"send", "recv"})
_PEERS_UNKNOWN: Final = "sends and receives: nothing says which belong together"
_REMEMBERED_STEPS: Final = 2
"""A wait may be for a collective of that many steps ago."""


class RankSteps(NamedTuple):
    """The steps of one rank that are read, one element for each.

    Attributes:
        start_ns: when it began, on the clock that all ranks share.
        length_ns: its duration.
        contents: what ran inside it.
        rows: its rows in `collectives`.
        collectives: `issue_ns` says when the host issued a collective.
    """

    start_ns: Ints
    length_ns: Ints
    contents: Sequence[StepContents]
    rows: Sequence[slice]
    collectives: Collectives


class _RankStep(NamedTuple):
    """One step of one rank: its operations, and its collectives on the common clock."""

    layout: int
    step: RankStep
    start_ns: int
    length_ns: int
    issue_ns: list[int]
    rows: Collectives


@dataclass
class _Rank:
    """What has been read of one rank."""

    tables: RankTables
    given: RankSteps
    groups: Mapping[str, tuple[int, ...]]
    links: dict[str, int] = field(default_factory=dict)
    known: dict[Key, IssuedCollective] = field(default_factory=dict)
    left_ns: int | None = None
    begun_ns: int = 0


class ProgramReader:
    """Builds the program of a run, step by step over all ranks.

    Args:
        network: the emulated network of the run; None: it was real.
        steps: global steps.
        of_rank: rank -> those steps of it.
        gradient_order: as in `program.Facts`.
    """

    def __init__(
        self,
        run: Run,
        network: EmulatedFabric | None,
        steps: Ints,
        of_rank: Mapping[int, RankSteps],
        *,
        gradient_order: tuple[Gradient, ...] = (),
    ) -> None:
        self._run, self._network, self._steps = run, network, steps
        self._on_host = run.source.timer == HOST_TIMER
        self._ranks = {
            rank: _Rank(
                tables,
                of_rank[rank],
                {name: tuple(sorted(each)) for name, each in tables.source.groups.items()},
            )
            for rank, tables in sorted(run.ranks.items())
        }
        self._layouts: dict[RankLayout, int] = {}
        self._names: dict[SpanName, int] = {}
        self._schedules = Schedules(tuple(self._ranks))
        self._gradients = gradient_order
        self._shared = network is not None and network.sharing is Sharing.link and self._on_host
        one_host = len({tables.source.host for tables in run.ranks.values()}) == 1
        self._law = network is not None and self._on_host and one_host
        self._costs = Costs(self._law, self._shared)

    def program(self) -> RunProgram:
        """Read every step."""
        steps = [self._step(index) for index in range(len(self._steps))]
        links = max((max(rank.links.values(), default=-1) for rank in self._ranks.values()), default=-1) + 1
        source = self._run.source
        return RunProgram(
            ranks=tuple(self._ranks),
            world_size=self._run.health.world_size,
            layouts=tuple(self._layouts),
            names=tuple(self._names),
            steps=steps,
            start_ns=np.array([rank.begun_ns for rank in self._ranks.values()], np.int64),
            busy_ns=self._costs.busy_before(max(links, 1), len(self._ranks)),
            facts=Facts(
                parallel=source.parallel,
                device=source.device,
                network=self._network,
                law=self._law,
                collectives=self._costs.collectives,
                backend_was_limit=self._costs.backend_was_limit,
                arrival_unknown=self._costs.arrival_unknown,
                gradient_order=self._gradients,
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
            spans=self._spans([each.step.spans for each in of_ranks]),
            ready_ns=_ready([each.step.ready_ns for each in of_ranks]),
            recorded_ns=np.array([each.length_ns for each in of_ranks], np.int64),
            recorded_ratio=self._metric("overlap_ratio", index),
            recorded_exposed_ms=self._metric("exposed_comm_ms", index),
        )

    def _metric(self, name: str, index: int) -> Floats:
        """Return a recorded metric of one step on all ranks."""
        places = [
            int(np.searchsorted(each.tables.steps.global_step, self._steps[index])) for each in self._ranks.values()
        ]
        return np.array(
            [each.tables.steps.column(name)[place] for each, place in zip(self._ranks.values(), places, strict=True)]
        )

    def _rank_step(self, rank: _Rank, index: int) -> _RankStep:
        given, number = rank.given, rank.tables.source.rank
        contents, start_ns, length_ns = given.contents[index], int(given.start_ns[index]), int(given.length_ns[index])
        if contents.waits is None:
            raise not_replayable(
                self._run.location,
                f"the record does not say who waited for which collective (rank {number}, global step "
                f"{self._steps[index]}); record it again with this AORTA",
            )
        rows = given.collectives.take(given.rows[index])
        names = [rows.names[name] for name in rows.name.tolist()]
        issued = tuple(self._issued(rank, name) for name in names)
        if rank.left_ns is None:
            rank.left_ns = rank.begun_ns = start_ns
        if (rows.end_ns == NO_TIME).any() or (rows.start_ns == NO_TIME).any():
            raise InputError(f"{self._run.location}: rank {number}, global step {self._steps[index]}: no end")
        for place, (name, seq, end) in enumerate(zip(names, rows.seq.tolist(), rows.end_ns.tolist(), strict=True)):
            rank.known[name.group, seq] = IssuedCollective(index, place, start_ns + end)
        arrivals = rows.issue_ns.tolist() if self._on_host else self._on_stream(names, rows)
        step = rank_step(contents, index, start_ns, length_ns, rank.left_ns, arrivals, rank.known)
        rank.left_ns = step.left_ns
        layout = self._layouts.setdefault(RankLayout(step.operations, issued), len(self._layouts))
        rank.known = {key: ended for key, ended in rank.known.items() if ended.step >= index - _REMEMBERED_STEPS}
        return _RankStep(layout, step, start_ns, length_ns, arrivals, rows)

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
            self._costs.arrival_unknown += queued
            arrivals.append(min(max(issue, before), start) if queued else start)
            free[name.group] = end
            before = arrivals[-1]
        return arrivals

    def _issued(self, rank: _Rank, name: CollectiveName) -> Issued:
        if name.kind in _TIMED_AT_BOTH_ENDS:
            raise not_replayable(self._run.location, f"it has {_PEERS_UNKNOWN}")
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

    def _spans(self, of_ranks: Sequence[Sequence[tuple[SpanName, Anchor, Anchor]]]) -> ProgramSpans:
        rows = [
            (rank, self._names.setdefault(name, len(self._names)), *begin, *end)
            for rank, spans in enumerate(of_ranks)
            for name, begin, end in spans
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


def _ready(rows: Sequence[Sequence[int]]) -> Ints | None:
    """Return when buckets were ready, shape (buckets, ranks); None: none held back, or not the same on all ranks."""
    if not rows[0] or len(set(map(len, rows))) > 1:
        return None
    return np.array(rows, np.int64).T


def _recorded(of_ranks: Sequence[_RankStep], places: int) -> Recorded:
    """Return the collectives of a step on the common clock."""
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
