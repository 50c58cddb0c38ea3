"""Ranks and links as an event queue in virtual time: what a change really does, by another way than a replay.

Each rank carries out a list of operations; whatever happens is an event at an integer nanosecond, and the next one is
taken from a heap. Nothing is computed ahead: a collective begins when an event finds its last rank there and its link
free, a rank goes on when an event ends what it waits for. Must not share code, or a formula, with
`aorta.whatif`.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple


class Group(NamedTuple):
    """A process group: the name that each of its ranks knows it by, and its global ranks."""

    name: str
    ranks: tuple[int, ...]


class Work(NamedTuple):
    """The rank's host (or stream) is busy."""

    ns: int


class Mark(NamedTuple):
    """A moment to write down, by name."""

    name: str


class Issue(NamedTuple):
    """Hand a collective over. `tag` is what a wait of the same step calls it."""

    tag: str
    group: Group
    kind: str
    bytes: int


class Wait(NamedTuple):
    """Go on when the collective has ended."""

    tag: str


Operation = Work | Mark | Issue | Wait


@dataclass
class Collective:
    """One collective of a group, as all its ranks see it."""

    group: Group
    seq: int
    kind: str
    bytes: int
    arrived: dict[int, int] = field(default_factory=dict)
    link_free_ns: int = 0
    end_ns: int | None = None
    backend_end_ns: int = 0
    network_end_ns: int = 0
    sleepers: list[Callable[[], None]] = field(default_factory=list)


class Issued(NamedTuple):
    """A collective in the account of one rank."""

    collective: Collective
    issue_ns: int


class Waited(NamedTuple):
    """A wait in the account of one rank."""

    collective: Collective
    enter_ns: int
    leave_ns: int


@dataclass
class Account:
    """What one rank did in one step, in absolute nanoseconds."""

    marks: list[tuple[str, int]] = field(default_factory=list)
    issued: list[Issued] = field(default_factory=list)
    waited: list[Waited] = field(default_factory=list)


class Laws(NamedTuple):
    """How long things take: a collective on the network, in the backend, and going on after a wait; how late a rank is
    to each issue.
    """

    cost_ns: Callable[[Collective], int]
    backend_ns: Callable[[Collective], int]
    wake_ns: int
    late_ns: Callable[[int], int]


@dataclass
class Link:
    """Of one group: collectives in the order of their first issue, one at a time, each when its last rank is there."""

    made: list[Collective] = field(default_factory=list)
    queue: deque[Collective] = field(default_factory=deque)
    issued: Counter[int] = field(default_factory=Counter)
    busy: bool = False
    free_ns: int = 0


class Simulation:
    """Ranks that carry out their steps. Of what happens at one nanosecond, what was asked for first comes first."""

    def __init__(self, programs: Sequence[Sequence[Sequence[Operation]]], laws: Laws) -> None:
        self.laws, self.now_ns, self.links = laws, 0, defaultdict[Group, Link](Link)
        self.accounts = [[Account() for _ in steps] for steps in programs]
        self._todo = [deque((number, one) for number, step in enumerate(steps) for one in step) for steps in programs]
        self._open: dict[tuple[int, int, str], Collective] = {}
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._asked = 0

    def run(self) -> None:
        """Until nothing is left."""
        for rank in range(len(self._todo)):
            self._after(0, partial(self._go_on, rank))
        while self._heap:
            self.now_ns, _, happens = heapq.heappop(self._heap)
            happens()
        assert not any(self._todo), "deadlock: not every rank came to its end"

    def _after(self, ns: int, happens: Callable[[], None]) -> None:
        assert ns >= 0
        heapq.heappush(self._heap, (self.now_ns + ns, self._asked, happens))
        self._asked += 1

    def _go_on(self, rank: int) -> None:
        """Do what comes next, until it takes time."""
        while self._todo[rank]:
            number, one = self._todo[rank].popleft()
            match one:
                case Mark(name):
                    self.accounts[rank][number].marks.append((name, self.now_ns))
                case Work(ns):
                    return self._after(ns, partial(self._go_on, rank))
                case Issue():
                    late_ns = self.laws.late_ns(rank)
                    if late_ns:
                        return self._after(late_ns, partial(self._issue, rank, number, one, goes_on=True))
                    self._issue(rank, number, one)
                case Wait(tag):
                    return self._wait(rank, number, self._open.pop((rank, number, tag)))
        return None

    def _issue(self, rank: int, number: int, issue: Issue, goes_on: bool = False) -> None:
        link = self.links[issue.group]
        seq = link.issued[rank]
        link.issued[rank] += 1
        if seq == len(link.made):
            link.made.append(Collective(issue.group, seq, issue.kind, issue.bytes))
            link.queue.append(link.made[-1])
        one = self._open[rank, number, issue.tag] = link.made[seq]
        assert (one.kind, one.bytes) == (issue.kind, issue.bytes), "the programs of the ranks do not fit each other"
        one.arrived[rank] = self.now_ns
        self._begin_next(link)
        self.accounts[rank][number].issued.append(Issued(one, self.now_ns))
        if goes_on:
            self._go_on(rank)

    def _begin_next(self, link: Link) -> None:
        if link.busy or not link.queue or len(link.queue[0].arrived) < len(link.queue[0].group.ranks):
            return
        one = link.queue.popleft()
        link.busy, one.link_free_ns = True, link.free_ns
        one.network_end_ns = self.now_ns + self.laws.cost_ns(one)
        one.backend_end_ns = max(one.arrived.values()) + self.laws.backend_ns(one)
        self._after(max(one.network_end_ns, one.backend_end_ns) - self.now_ns, partial(self._end, link, one))

    def _end(self, link: Link, one: Collective) -> None:
        one.end_ns = link.free_ns = self.now_ns
        link.busy = False
        for go_on in one.sleepers:
            go_on()
        self._begin_next(link)

    def _wait(self, rank: int, number: int, collective: Collective) -> None:
        enter_ns = self.now_ns

        def leave() -> None:
            self.accounts[rank][number].waited.append(Waited(collective, enter_ns, self.now_ns))
            self._go_on(rank)

        wake = partial(self._after, self.laws.wake_ns, leave)
        if collective.end_ns is not None:
            wake()
        else:
            collective.sleepers.append(wake)


def carry_out(programs: Sequence[Sequence[Sequence[Operation]]], laws: Laws) -> list[list[Account]]:
    """Of each rank the account of each step.

    Args:
        programs: of each rank, of each step, its operations.
    """
    made = Simulation(programs, laws)
    made.run()
    return made.accounts


@dataclass(frozen=True)
class Network:
    """What a collective costs, written down once more from the papers' tables: one link a group, at full bandwidth.

    Rounds of latency and passes of the array, for rings and for recursive halving and doubling (Thakur, Rabenseifner,
    Gropp, Int. J. of High Performance Computing Applications 19 (2005) 49-66).

    Args:
        jitter: each collective takes up to this part more or less.
        slow_node: a rank whose groups are `slow_factor` times as slow.
        world: groups of all ranks cost what those of so many would.
    """

    gb_per_s: float = 0.125
    latency_us: float = 50.0
    algorithm: str = "ring"
    jitter: float = 0.0
    seed: int = 0
    slow_node: int | None = None
    slow_factor: float = 1.0
    world: int | None = None

    def cost_ns(self, one: Collective, all_ranks: int) -> int:
        """In nanoseconds, from the moment when all are there and the link is free."""
        ranks = len(one.group.ranks)
        if ranks == all_ranks and self.world is not None:
            ranks = self.world
        if ranks == 1:
            return 0
        halves = 2 if one.kind == "allreduce" else 1  # an all-reduce is a reduce-scatter and an all-gather
        rounds = ranks - 1 if self.algorithm == "ring" else (ranks - 1).bit_length()
        passes = (ranks - 1) / ranks
        cost = halves * (rounds * self.latency_us * 1e3 + passes * one.bytes / self.gb_per_s)
        if self.slow_node in one.group.ranks:
            cost *= self.slow_factor
        if self.jitter:
            chance = random.Random(f"{self.seed} {one.group} {one.seq}")
            cost *= 1 + self.jitter * chance.uniform(-1, 1)
        return round(cost)
