"""Ranks and links as an event queue in virtual time: what a change really does, by another way than a replay.

Each rank carries out a list of operations; whatever happens is an event at an integer nanosecond, and the next one is
taken from a heap. Nothing is computed ahead: a collective begins when an event finds its last rank there and its link
free, a rank goes on when an event ends what it waits for. Must not share code, or a formula, with
`aorta.whatif`.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

US = 1_000


class Group(NamedTuple):
    """A process group: the name that each of its ranks knows it by, and its global ranks."""

    name: str
    ranks: tuple[int, ...]


class Issue(NamedTuple):
    """Hand a collective over. `tag` is what a wait of the same step calls it."""

    tag: str
    group: Group
    kind: str
    bytes: int


class Wait(NamedTuple):
    """Go on when the collective has ended."""

    tag: str


Operation = int | str | Issue | Wait
"""A number is nanoseconds in which the rank's host (or stream) is busy, a text names a moment to write down."""


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


@dataclass
class Account:
    """What one rank did in one step, in absolute nanoseconds: collectives with their issue, and with the begin and the
    end of a wait.
    """

    marks: dict[str, int] = field(default_factory=dict)
    issued: list[tuple[Collective, int]] = field(default_factory=list)
    waited: list[tuple[Collective, int, int]] = field(default_factory=list)


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


@dataclass(frozen=True, kw_only=True)
class Laws:
    """How long things take.

    Args:
        backend_ns: what the backend itself takes from the last arrival; it bounds a collective from below.
        wake_ns: from the end of a collective to going on.
        late_rank, late_ns: a rank that is late to every issue, and by how much.
    """

    network: Network = field(default_factory=Network)
    backend_ns: int = 100 * US
    wake_ns: int = 30 * US
    late_rank: int | None = None
    late_ns: int = 0


class Simulation:
    """Ranks that carry out their steps. Of what happens at one nanosecond, what was asked for first comes first.

    Args:
        programs: of each rank, of each step, its operations.
    """

    def __init__(self, programs: Sequence[Sequence[Iterable[Operation]]], laws: Laws) -> None:
        self.laws, self.now_ns = laws, 0
        self.accounts = [[Account() for _ in steps] for steps in programs]
        self._ranks = [self._rank(rank, steps) for rank, steps in enumerate(programs)]
        self._at_end = 0
        # Of each group: collectives in the order of their first issue, one at a time, each when its last rank is there.
        self._made = defaultdict[Group, list[Collective]](list)
        self._issued, self._begun = Counter[tuple[Group, int]](), Counter[Group]()
        self._free_ns = defaultdict[Group, int | None](int)  # None: the link is busy
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._asked = 0

    def run(self) -> list[list[Account]]:
        """Until nothing is left; of each rank the account of each step."""
        for rank in range(len(self._ranks)):
            self._after(0, partial(self._go_on, rank))
        while self._heap:
            self.now_ns, _, happens = heapq.heappop(self._heap)
            happens()
        assert self._at_end == len(self._ranks), "deadlock: not every rank came to its end"
        return self.accounts

    def _after(self, ns: int, happens: Callable[[], None]) -> None:
        assert ns >= 0
        heapq.heappush(self._heap, (self.now_ns + ns, self._asked, happens))
        self._asked += 1

    def _go_on(self, rank: int) -> None:
        next(self._ranks[rank], None)

    def _rank(self, rank: int, steps: Sequence[Iterable[Operation]]) -> Iterator[None]:
        """What a rank does, until it takes time: then it yields, and goes on with the event that it asked for."""
        go_on = partial(self._go_on, rank)
        for account, operations in zip(self.accounts[rank], steps, strict=True):
            tagged: dict[str, Collective] = {}
            for one in operations:
                match one:
                    case str(name):
                        account.marks[name] = self.now_ns
                    case int(ns):
                        self._after(ns, go_on)
                        yield
                    case Issue():
                        if rank == self.laws.late_rank:
                            self._after(self.laws.late_ns, go_on)
                            yield
                        tagged[one.tag] = self._issue(rank, one)
                        account.issued.append((tagged[one.tag], self.now_ns))
                    case Wait(tag):
                        enter_ns = self.now_ns
                        if tagged[tag].end_ns is None:
                            tagged[tag].sleepers.append(go_on)
                            yield
                        self._after(self.laws.wake_ns, go_on)
                        yield
                        account.waited.append((tagged[tag], enter_ns, self.now_ns))
        self._at_end += 1

    def _issue(self, rank: int, issue: Issue) -> Collective:
        made, seq = self._made[issue.group], self._issued[issue.group, rank]
        self._issued[issue.group, rank] += 1
        if seq == len(made):
            made.append(Collective(issue.group, seq, issue.kind, issue.bytes))
        one = made[seq]
        assert (one.kind, one.bytes) == (issue.kind, issue.bytes), "the programs of the ranks do not fit each other"
        one.arrived[rank] = self.now_ns
        self._begin_next(issue.group)
        return one

    def _begin_next(self, group: Group) -> None:
        made, begun, free_ns = self._made[group], self._begun[group], self._free_ns[group]
        if free_ns is None or begun == len(made) or len(made[begun].arrived) < len(group.ranks):
            return
        one = made[begun]
        one.link_free_ns = free_ns
        self._begun[group], self._free_ns[group] = begun + 1, None
        one.network_end_ns = self.now_ns + self.laws.network.cost_ns(one, len(self._ranks))
        one.backend_end_ns = max(one.arrived.values()) + self.laws.backend_ns
        self._after(max(one.network_end_ns, one.backend_end_ns) - self.now_ns, partial(self._end, one))

    def _end(self, one: Collective) -> None:
        one.end_ns = self._free_ns[one.group] = self.now_ns
        for go_on in one.sleepers:
            go_on()
        self._begin_next(one.group)
