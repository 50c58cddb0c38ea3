"""Builds the program of a run from the lines of its steps, wherever they come from.

    ProgramReader(run, network, steps, StepLines(lines)).program()

Refuses, and says why, what a replay could not follow: waits that were not recorded, sends and receives, groups of
unknown ranks. Must not read a file, or guess a wait, an end or a clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec
import numpy as np

from aorta.analysis.tables import HOST_TIMER, Floats, Ints, RankTables, Run
from aorta.analysis.whatif.program import (
    Column,
    Facts,
    Issued,
    ProgramSpans,
    RankLayout,
    RunProgram,
    SpanName,
    StepProgram,
    compact,
)
from aorta.analysis.whatif.rank_program import Anchor, Ended, Key, RankStep, StepLine, rank_step
from aorta.analysis.whatif.recorded_costs import Costs, Recorded
from aorta.analysis.whatif.schedule import ReplayOrder, schedule
from aorta.config.schema import EmulatedFabric, Sharing
from aorta.errors import InputError
from aorta.instrument.emulation.cost_model import spans_nodes
from aorta.records.schema import Collective, Gradient

LEAST_STEPS: Final = 2
_TIMED_AT_BOTH_ENDS: Final = frozenset({"send", "recv"})
_PEERS_UNKNOWN: Final = "sends and receives: nothing says which belong together"
_REMEMBERED_STEPS: Final = 2
"""A wait may be for a collective of that many steps ago."""


@dataclass(frozen=True)
class StepLines:
    """The lines of the steps that are read, and what they leave open.

    Attributes:
        of_rank: rank -> its line of each step.
        offset_ns: what to add to each rank's `t_start_ns`; None: `start_mono_ns` is on a clock that all share.
        gradient_order: as in `program.Facts`.
        arrivals: `issue_ns` says when the caller's stream had come to a collective; otherwise, on a device, when the
            host issued it.
        groups: groups whose links are numbered ahead, in this order; others are in that of their first collectives.
    """

    of_rank: Mapping[int, Iterator[StepLine]]
    offset_ns: Mapping[int, int] | None = None
    gradient_order: tuple[Gradient, ...] = ()
    arrivals: bool = False
    groups: tuple[str, ...] = ()


class _RankLine(NamedTuple):
    """One step of one rank: its operations, and its collectives on the common clock."""

    layout: int
    step: RankStep
    start_ns: int
    length_ns: int
    rows: Sequence[Collective]


@dataclass
class _Rank:
    """What has been read of one rank."""

    tables: RankTables
    lines: Iterator[StepLine]
    groups: Mapping[str, tuple[int, ...]]
    links: dict[str, int] = field(default_factory=dict)
    known: dict[Key, Ended] = field(default_factory=dict)
    left_ns: int | None = None
    begun_ns: int = 0


class ProgramReader:
    """Builds the program of a run, step by step over all ranks."""

    def __init__(self, run: Run, network: EmulatedFabric | None, steps: Ints, lines: StepLines) -> None:
        self._run, self._network, self._steps = run, network, steps
        self._on_host = run.source.timer == HOST_TIMER
        self._ranks = {
            rank: _Rank(
                tables,
                lines.of_rank[rank],
                {name: tuple(each) for name, each in tables.source.groups.items()},
                {group: link for link, group in enumerate(lines.groups)},
            )
            for rank, tables in sorted(run.ranks.items())
        }
        self._offset_ns = lines.offset_ns
        self._layouts: dict[RankLayout, int] = {}
        self._names: dict[SpanName, int] = {}
        self._schedules: dict[tuple[int, ...], ReplayOrder] = {}
        self._gradients = lines.gradient_order
        self._arrivals = self._on_host or lines.arrivals
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
        lines = [self._rank_line(rank, index) for rank in self._ranks.values()]
        layouts = tuple(line.layout for line in lines)
        plan = self._schedule(layouts, int(self._steps[index]))
        cost, network, backend = self._costs.of(
            plan, _recorded(lines, plan.places), self._charged(layouts, plan.places)
        )
        return StepProgram(
            global_step=int(self._steps[index]),
            layouts=layouts,
            host_ns=_padded([line.step.host_ns for line in lines]),
            wake_ns=_padded([line.step.wake_ns for line in lines]),
            cost_ns=cost,
            network_ns=network,
            backend_ns=backend,
            spans=self._spans([line.step.spans for line in lines]),
            ready_ns=_ready([line.step.ready_ns for line in lines]),
            recorded_ns=np.array([line.length_ns for line in lines], np.int64),
            recorded_ratio=self._metric("overlap_ratio", index),
            recorded_exposed_ms=self._metric("exposed_comm_ms", index),
        )

    def _metric(self, name: str, index: int) -> Floats:
        """A recorded metric of one step on all ranks."""
        places = [
            int(np.searchsorted(each.tables.steps.global_step, self._steps[index])) for each in self._ranks.values()
        ]
        return np.array(
            [each.tables.steps.column(name)[place] for each, place in zip(self._ranks.values(), places, strict=True)]
        )

    def _rank_line(self, rank: _Rank, index: int) -> _RankLine:
        line = next(rank.lines)
        number = rank.tables.source.rank
        if line.waits is None:
            raise InputError(
                f"{self._run.location}: a replay is not possible: the record does not say who waited for which "
                f"collective (rank {number}, global step {line.global_step}); record it again with this AORTA"
            )
        start_ns = line.start_mono_ns if self._offset_ns is None else line.t_start_ns + self._offset_ns[number]
        rows = line.collectives
        issued = tuple(self._issued(rank, row) for row in rows)
        if rank.left_ns is None:
            rank.left_ns = rank.begun_ns = start_ns
        for place, row in enumerate(rows):
            if row.end_ns is None or row.start_ns is None:
                raise InputError(f"{self._run.location}: rank {number}, global step {line.global_step}: no end")
            rank.known[row.group, row.seq] = Ended(index, place, start_ns + row.end_ns)
        arrivals = [row.issue_ns for row in rows] if self._arrivals else self._on_stream(rows)
        step = rank_step(line, index, start_ns, rank.left_ns, arrivals, rank.known)
        rank.left_ns = step.left_ns
        layout = self._layouts.setdefault(RankLayout(step.operations, issued), len(self._layouts))
        for place, row in enumerate(rows):
            rows[place] = msgspec.structs.replace(row, issue_ns=arrivals[place])
        rank.known = {key: ended for key, ended in rank.known.items() if ended.step >= index - _REMEMBERED_STEPS}
        return _RankLine(layout, step, start_ns, line.end_mono_ns - line.start_mono_ns, rows)

    def _on_stream(self, rows: Sequence[Collective]) -> list[int]:
        """When the stream of each collective's caller had come to it. Where it was queued behind another, that moment
        left no trace: it is taken for the earliest possible.
        """
        arrivals: list[int] = []
        free: dict[str, int] = {}
        before = 0
        for row in rows:
            assert row.start_ns is not None  # checked
            assert row.end_ns is not None
            queued = row.start_ns <= free.get(row.group, -1)
            self._costs.arrival_unknown += queued
            arrivals.append(min(max(row.issue_ns, before), row.start_ns) if queued else row.start_ns)
            free[row.group] = row.end_ns
            before = arrivals[-1]
        return arrivals

    def _issued(self, rank: _Rank, row: Collective) -> Issued:
        if row.kind in _TIMED_AT_BOTH_ENDS:
            raise InputError(f"{self._run.location}: a replay is not possible: it has {_PEERS_UNKNOWN}")
        members = rank.groups.get(row.group)
        if members is None:
            raise InputError(
                f"{self._run.location}: a replay is not possible: the ranks of process group {row.group!r} are unknown"
            )
        link: int | None = None
        if self._shared:
            assert self._network is not None  # nothing else is shared
            link = int(spans_nodes(members, self._run.health.world_size, self._network))
            rank.links[str(link)] = link
        elif self._network is not None or not self._on_host:
            link = rank.links.setdefault(row.group, len(rank.links))
        return Issued(row.kind, row.group, row.bytes, members, link)

    def _charged(self, layouts: tuple[int, ...], places: int) -> Ints | None:
        """What the network's law charges for each collective, shape (places, ranks) or (places, 1)."""
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

    def _schedule(self, layouts: tuple[int, ...], global_step: int) -> ReplayOrder:
        if layouts not in self._schedules:
            known = list(self._layouts)
            try:
                self._schedules[layouts] = schedule(tuple(self._ranks), [known[layout] for layout in layouts])
            except InputError as error:
                raise InputError(
                    f"{self._run.location}: a replay is not possible: global step {global_step}: {error}"
                ) from error
        return self._schedules[layouts]

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
    """Rows of ranks as columns, shape (longest row, ranks); 0 behind the end of a shorter one."""
    longest = max(map(len, rows))
    table = np.zeros((longest, len(rows)), np.int64)
    for column, row in enumerate(rows):
        table[: len(row), column] = row
    return compact(table)


def _ready(rows: Sequence[Sequence[int]]) -> Ints | None:
    """When buckets were ready, shape (buckets, ranks); None: none were held back, or not the same on all ranks."""
    if not rows[0] or len(set(map(len, rows))) > 1:
        return None
    return np.array(rows, np.int64).T


def _recorded(lines: Sequence[_RankLine], places: int) -> Recorded:
    """The collectives of a step on the common clock."""
    shape = (places, len(lines))
    issue, start, end, backend_end = (np.zeros(shape, np.int64) for _ in range(4))
    found = Recorded(issue, start, end, backend_end, np.zeros(shape, bool), np.zeros(shape, bool))
    for column, line in enumerate(lines):
        for place, row in enumerate(line.rows):
            found.issue_ns[place, column] = line.start_ns + row.issue_ns
            found.start_ns[place, column] = line.start_ns + (row.start_ns or 0)
            found.end_ns[place, column] = line.start_ns + (row.end_ns or 0)
            found.by_backend[place, column] = row.end_source != "emulated"
            if row.backend_end_ns is not None:
                found.backend_end_ns[place, column] = line.start_ns + row.backend_end_ns
                found.backend_known[place, column] = True
    return found
