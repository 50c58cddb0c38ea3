"""Ranks and links as an event queue in virtual time: what a change really does, by another way than a replay.

Each rank carries out a list of operations; whatever happens is an event at an integer nanosecond, and the next one is
taken from a heap. Nothing is computed ahead: a collective begins when an event finds its last rank there and its link
free, a rank goes on when an event ends what it waits for. Must not share code, or a formula, with
`aorta.whatif`.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
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


class Events:
    """The queue. Of what happens at the same nanosecond, what was asked for first comes first."""

    def __init__(self) -> None:
        self.now_ns = 0
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._asked = 0

    def after(self, ns: int, happens: Callable[[], None]) -> None:
        """Ask for something `ns` from now."""
        assert ns >= 0
        heapq.heappush(self._heap, (self.now_ns + ns, self._asked, happens))
        self._asked += 1

    def run(self) -> None:
        """Until nothing is left."""
        while self._heap:
            self.now_ns, _, happens = heapq.heappop(self._heap)
            happens()


class Link:
    """Of one group: collectives in the order of their first issue, one at a time, each when its last rank is there."""

    def __init__(self, group: Group, events: Events, laws: Laws) -> None:
        self.group, self._events, self._laws = group, events, laws
        self._queue: deque[Collective] = deque()
        self._all: list[Collective] = []
        self._next = dict.fromkeys(group.ranks, 0)
        self._busy = False
        self._free_ns = 0

    def arrive(self, rank: int, issue: Issue) -> Collective:
        """A rank is there."""
        seq = self._next[rank]
        self._next[rank] += 1
        if seq == len(self._all):
            self._all.append(Collective(self.group, seq, issue.kind, issue.bytes))
            self._queue.append(self._all[-1])
        one = self._all[seq]
        assert (one.kind, one.bytes) == (issue.kind, issue.bytes), "the programs of the ranks do not fit each other"
        one.arrived[rank] = self._events.now_ns
        self._begin_next()
        return one

    def _begin_next(self) -> None:
        if self._busy or not self._queue or len(self._queue[0].arrived) < len(self.group.ranks):
            return
        one = self._queue.popleft()
        self._busy, one.link_free_ns = True, self._free_ns
        now_ns, last_ns = self._events.now_ns, max(one.arrived.values())
        one.network_end_ns = now_ns + self._laws.cost_ns(one)
        one.backend_end_ns = last_ns + self._laws.backend_ns(one)
        length_ns = max(one.network_end_ns, one.backend_end_ns) - now_ns
        self._events.after(length_ns, lambda: self._end(one))

    def _end(self, one: Collective) -> None:
        one.end_ns = self._free_ns = self._events.now_ns
        self._busy = False
        for go_on in one.sleepers:
            go_on()
        self._begin_next()


class Rank:
    """Carries out its steps, one operation after the other."""

    def __init__(
        self, rank: int, steps: Sequence[Sequence[Operation]], links: dict[Group, Link], events: Events, laws: Laws
    ) -> None:
        self.accounts = [Account() for _ in steps]
        self._rank, self._links, self._events, self._laws = rank, links, events, laws
        self._todo = deque((number, one) for number, step in enumerate(steps) for one in step)
        self._open: dict[tuple[int, str], Collective] = {}

    @property
    def done(self) -> bool:
        """Nothing is left to do."""
        return not self._todo

    def go_on(self) -> None:
        """Do what comes next, until it takes time."""
        while self._todo:
            number, one = self._todo.popleft()
            account, now_ns = self.accounts[number], self._events.now_ns
            match one:
                case Mark(name):
                    account.marks.append((name, now_ns))
                case Work(ns):
                    return self._events.after(ns, self.go_on)
                case Issue():
                    late_ns = self._laws.late_ns(self._rank)
                    if late_ns:
                        return self._events.after(late_ns, partial(self._issue_and_go_on, number, one))
                    self._issue(number, one)
                case Wait(tag):
                    return self._wait(account, self._open.pop((number, tag)))
        return None

    def _issue_and_go_on(self, number: int, issue: Issue) -> None:
        self._issue(number, issue)
        self.go_on()

    def _issue(self, number: int, issue: Issue) -> None:
        collective = self._links[issue.group].arrive(self._rank, issue)
        self._open[number, issue.tag] = collective
        self.accounts[number].issued.append(Issued(collective, self._events.now_ns))

    def _wait(self, account: Account, collective: Collective) -> None:
        enter_ns = self._events.now_ns

        def leave() -> None:
            account.waited.append(Waited(collective, enter_ns, self._events.now_ns))
            self.go_on()

        def wake() -> None:
            self._events.after(self._laws.wake_ns, leave)

        if collective.end_ns is not None:
            wake()
        else:
            collective.sleepers.append(wake)


def carry_out(programs: Sequence[Sequence[Sequence[Operation]]], laws: Laws) -> list[list[Account]]:
    """Of each rank the account of each step.

    Args:
        programs: of each rank, of each step, its operations.
    """
    events = Events()
    groups = {one.group for steps in programs for step in steps for one in step if isinstance(one, Issue)}
    links = {group: Link(group, events, laws) for group in groups}
    ranks = [Rank(number, steps, links, events, laws) for number, steps in enumerate(programs)]
    for rank in ranks:
        events.after(0, rank.go_on)
    events.run()
    assert all(rank.done for rank in ranks), "deadlock: not every rank came to its end"
    return [rank.accounts for rank in ranks]


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
