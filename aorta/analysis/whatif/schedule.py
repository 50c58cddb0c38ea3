"""In which order the operations of all ranks of a step can be worked out, so that each comes after what it waits for.

Where all ranks do the same, one row of the schedule is one operation on all of them, which numpy carries out at once
however many ranks there are; where they do not, a row is one operation of one rank. Either way a collective is worked
out when its last rank has issued it. Must not know any time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from aorta.analysis.run import Members
from aorta.analysis.whatif.program import Issued, Operation, RankLayout, What
from aorta.errors import InputError

Indices: TypeAlias = npt.NDArray[np.intp]
_Instance: TypeAlias = tuple[str, Members, int]
"""A collective of a step: its group by name and ranks, and which of the group's it is."""


class Act(NamedTuple):
    operation: int
    what: What
    place: int
    back: int
    ranks: slice


@dataclass(frozen=True)
class CollectiveBatch:
    """Collectives whose ranks have all issued them; no rank takes part in two of them.

    Attributes:
        columns: of the ranks, those of one collective side by side.
        places: of the collective on each of these ranks.
        links: of these ranks; -1 where it waits for no other collective.
        starts: where in `columns` each collective's ranks begin.
        which: for each of `columns`, the index of its collective.
        place: where `places` are all the same, that one.
        whole: one collective of all ranks, on one link.
    """

    columns: Indices
    places: Indices
    links: Indices
    starts: Indices
    which: Indices
    place: int | None
    whole: bool


@dataclass(frozen=True)
class ReplayOrder:
    """Rows in an order in which they can be worked out. `places`: the most collectives that a rank issues."""

    rows: tuple[Act | CollectiveBatch, ...]
    places: int


def schedule(ranks: Sequence[int], layouts: Sequence[RankLayout]) -> ReplayOrder:
    """Return the schedule of a step.

    Raises:
        InputError: ranks of a group issue different collectives, or some wait for each other for ever.
    """
    column = {rank: index for index, rank in enumerate(ranks)}
    met: dict[_Instance, dict[int, int]] = defaultdict(dict)
    instances: list[list[_Instance]] = []
    for index, layout in enumerate(layouts):
        counts: dict[tuple[str, Members], int] = defaultdict(int)
        named: list[_Instance] = []
        for place, issued in enumerate(layout.issued):
            group = (issued.group, issued.ranks)
            instance = (*group, counts[group])
            counts[group] += 1
            met[instance][index] = place
            named.append(instance)
        instances.append(named)
    _check(met, layouts, column, ranks)
    places = max((len(layout.issued) for layout in layouts), default=0)
    alike = (
        all(layout.operations == layouts[0].operations for layout in layouts)
        and all(len(set(placed.values())) == 1 for placed in met.values())
        and len({len(layout.issued) for layout in layouts}) == 1
    )
    rows = _together(layouts, instances, met) if alike else _in_turn(ranks, layouts, instances, met)
    return ReplayOrder(tuple(rows), places)


class Schedules:
    """The schedules of a program's steps; steps in which all ranks have the same layouts share one."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = ranks
        self._known: dict[tuple[int, ...], ReplayOrder] = {}

    def of(self, global_step: int, numbers: tuple[int, ...], layouts: Iterable[RankLayout]) -> ReplayOrder:
        """Return the schedule of one step.

        Args:
            numbers: for each rank, the index of its layout among `layouts`.

        Raises:
            InputError: the ranks do not fit each other in it.
        """
        if numbers not in self._known:
            known = list(layouts)
            try:
                self._known[numbers] = schedule(self._ranks, [known[number] for number in numbers])
            except InputError as error:
                raise InputError(f"global step {global_step}: {error}") from error
        return self._known[numbers]


def _check(
    met: dict[_Instance, dict[int, int]],
    layouts: Sequence[RankLayout],
    column: dict[int, int],
    ranks: Sequence[int],
) -> None:
    def said(index: int, issued: Issued) -> str:
        return f"rank {ranks[index]} {issued.kind} of {issued.bytes} bytes"

    for (group, members, number), places in met.items():
        if missing := [rank for rank in members if column.get(rank) not in places]:
            raise InputError(
                f"collective {number} of group {group!r} in a step was not issued by its rank(s) "
                f"{', '.join(map(str, missing[:8]))} in that step: a replay needs every rank to issue the collectives "
                "of a group in the same steps"
            )
        first, *others = ((index, layouts[index].issued[place]) for index, place in places.items())
        for other in others:
            if other[1][::2] != first[1][::2]:  # kind, bytes and link
                raise InputError(
                    f"collective {number} of group {group!r} in a step: {said(*first)}, {said(*other)}: the order of "
                    "issue differs between ranks, which a replay cannot follow"
                )


def _meeting(
    chosen: Sequence[tuple[_Instance, dict[int, int]]], layouts: Sequence[RankLayout], whole_world: int
) -> CollectiveBatch:
    columns = np.array([index for _, places in chosen for index in places], np.intp)
    at = np.array([place for _, places in chosen for place in places.values()], np.intp)
    links = [layouts[index].issued[place].link for index, place in zip(columns.tolist(), at.tolist(), strict=True)]
    sizes = [len(places) for _, places in chosen]
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.intp)
    return CollectiveBatch(
        columns=columns,
        places=at,
        links=np.array([-1 if link is None else link for link in links], np.intp),
        starts=starts,
        which=np.repeat(np.arange(len(sizes)), sizes),
        place=int(at[0]) if len(set(at.tolist())) == 1 else None,
        whole=len(sizes) == 1 and sizes[0] == whole_world and len(set(links)) == 1 and links[0] is not None,
    )


def _together(
    layouts: Sequence[RankLayout], instances: list[list[_Instance]], met: dict[_Instance, dict[int, int]]
) -> list[Act | CollectiveBatch]:
    everyone = slice(0, len(layouts))
    rows: list[Act | CollectiveBatch] = []
    issued = set[int]()
    for index, operation in enumerate(layouts[0].operations):
        if operation.what is What.WAIT and not operation.back and operation.place not in issued:
            raise InputError(f"a step waits for its collective {operation.place} before issuing it")
        rows.append(Act(index, *operation, everyone))
        if operation.what is What.ISSUE:
            issued.add(operation.place)
            chosen = dict.fromkeys(named[operation.place] for named in instances)
            rows.append(_meeting([(each, met[each]) for each in chosen], layouts, len(layouts)))
    return rows


def _in_turn(
    ranks: Sequence[int],
    layouts: Sequence[RankLayout],
    instances: list[list[_Instance]],
    met: dict[_Instance, dict[int, int]],
) -> list[Act | CollectiveBatch]:
    """Return rows of single ranks: each continues until it waits for a collective that not all its ranks issued."""
    rows: list[Act | CollectiveBatch] = []
    at = [0] * len(layouts)
    missing = {instance: len(places) for instance, places in met.items()}

    def blocked(index: int, operation: Operation) -> bool:
        return operation.what is What.WAIT and not operation.back and missing[instances[index][operation.place]] > 0

    moved = True
    while moved:
        moved = False
        for index, layout in enumerate(layouts):
            while at[index] < len(layout.operations) and not blocked(index, layout.operations[at[index]]):
                operation = layout.operations[at[index]]
                rows.append(Act(at[index], *operation, slice(index, index + 1)))
                at[index] += 1
                moved = True
                if operation.what is What.ISSUE:
                    instance = instances[index][operation.place]
                    missing[instance] -= 1
                    if not missing[instance]:
                        rows.append(_meeting([(instance, met[instance])], layouts, len(layouts)))
    stuck = [ranks[index] for index, layout in enumerate(layouts) if at[index] < len(layout.operations)]
    if stuck:
        raise InputError(
            f"rank(s) {', '.join(map(str, stuck[:8]))} wait for collectives that are issued only after their waits: "
            "the programs of the ranks do not fit each other"
        )
    return rows
