"""Two ledgers -> the difference of their means, broken down in several ways, each of which adds up to it.

Enters: ledgers of the reference and the candidate, both with rank-steps. Leaves: rows as plain JSON values. Must not:
leave a nanosecond out of a way of breaking down; what is not listed is in its last row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from aorta.analysis.attribution.cells import Cell, Ledger, Place
from aorta.analysis.attribution.naming import PARTS, collective_name, group_name, order_name, place_name
from aorta.timeline.overlap import NS_PER_MS

SHOWN_ROWS: Final = 24
_NO_BLOCK: Final = "outside of every block"


@dataclass(frozen=True)
class Means:
    """Forms the rows: sums of nanoseconds over the rank-steps of a side, and their share of the whole difference."""

    reference: Ledger
    candidate: Ledger

    def ms(self, ledger: Ledger, total_ns: int) -> float:
        """Mean over the rank-steps of one side."""
        return total_ns / ledger.sums.rank_steps / NS_PER_MS

    @property
    def difference_ms(self) -> float:
        """Of the mean exposed communication, candidate minus reference."""
        return self.ms(self.candidate, self.candidate.sums.exposed_ns) - self.ms(
            self.reference, self.reference.sums.exposed_ns
        )

    def row(self, dimension: str, what: str, before_ns: int, after_ns: int, **key: Any) -> dict[str, Any]:
        """One row. The sums in nanoseconds stand in it so that anybody can add them up exactly."""
        left, right, total = self.ms(self.reference, before_ns), self.ms(self.candidate, after_ns), self.difference_ms
        return {
            "what": what,
            "dimension": dimension,
            "reference_ms": left,
            "candidate_ms": right,
            "difference_ms": right - left,
            "share": (right - left) / total if total else None,
            "reference_ns": before_ns,
            "candidate_ns": after_ns,
            **key,
        }

    def rows(
        self,
        dimension: str,
        before: Mapping[Any, int],
        after: Mapping[Any, int],
        describe: Callable[[Any], tuple[str, dict[str, Any]]],
    ) -> list[dict[str, Any]]:
        """A row a key, the largest difference first; what is beyond `SHOWN_ROWS` is summed up in one row."""
        keys = dict.fromkeys([*before, *after])
        found = []
        for key in keys:
            what, fields = describe(key)
            found.append(self.row(dimension, what, before.get(key, 0), after.get(key, 0), **fields))
        found.sort(key=lambda row: (-abs(row["difference_ms"]), row["what"]))
        rest = found[SHOWN_ROWS:]
        if rest:
            sums = [sum(row[name] for row in rest) for name in ("reference_ns", "candidate_ns")]
            found[SHOWN_ROWS:] = [self.row(dimension, f"{len(rest)} others", sums[0], sums[1], others=len(rest))]
        return found


def dimensions(means: Means, parallel: str) -> dict[str, list[dict[str, Any]]]:
    """Every way of breaking the difference down; the rows of each add up to it.

    Args:
        parallel: the strategy of the runs, which says whether an all-reduce is a bucket.
    """

    def by(name: str, key: Callable[[Cell], Hashable], describe: Callable[[Cell], tuple[str, dict[str, Any]]]) -> None:
        example: dict[Hashable, Cell] = {}

        def summed(ledger: Ledger) -> Counter[Hashable]:
            sums: Counter[Hashable] = Counter()
            for cell, length in ledger.cells.items():
                sums[key(cell)] += length
                example.setdefault(key(cell), cell)
            return sums

        before, after = summed(means.reference), summed(means.candidate)
        found[name] = means.rows(name, before, after, lambda key: describe(example[key]))

    def collective(cell: Cell) -> dict[str, Any]:
        return {"kind": cell.kind, "group": cell.group, "group_size": cell.size, "bytes": cell.bytes}

    found: dict[str, list[dict[str, Any]]] = {}
    by("kind", lambda cell: cell.kind, lambda cell: (cell.kind, {"kind": cell.kind}))
    by(
        "group",
        lambda cell: (cell.group, cell.size),
        lambda cell: (group_name(cell.group, cell.size), {"group": cell.group, "group_size": cell.size}),
    )
    by("collective", lambda cell: cell[:4], lambda cell: (collective_name(cell), collective(cell)))
    by(
        "order",
        lambda cell: cell[:5],
        lambda cell: (order_name(cell, parallel), {**collective(cell), "order": cell.order}),
    )
    by("phase", lambda cell: cell.phase, lambda cell: (place_name(Place(cell.phase, None)), {"phase": cell.phase}))
    by("block", lambda cell: cell.block, lambda cell: (cell.block or _NO_BLOCK, {"block": cell.block}))
    by(
        "place",
        lambda cell: (cell.phase, cell.block),
        lambda cell: (place_name(Place(cell.phase, cell.block)), {"phase": cell.phase, "block": cell.block}),
    )
    by("part", lambda cell: cell.part, lambda cell: (PARTS[cell.part], {"part": cell.part}))
    found["rank"] = means.rows(
        "rank", means.reference.ranks, means.candidate.ranks, lambda rank: (f"rank {rank}", {"rank": rank})
    )
    found["balance"] = balance(means)
    return found


def balance(means: Means) -> list[dict[str, Any]]:
    """Exposed is communication less what of it is hidden: how much of the difference is which."""
    before, after = means.reference.sums, means.candidate.sums
    return [
        means.row("balance", "time in communication", before.comm_ns, after.comm_ns, term="communication"),
        means.row("balance", "communication that is hidden", -before.hidden_ns, -after.hidden_ns, term="hidden"),
    ]


def computing(means: Means) -> list[dict[str, Any]]:
    """Computing of each pass of each block, per rank-step: not a part of the difference, so it has no share."""
    rows = means.rows(
        "computing",
        means.reference.computing,
        means.candidate.computing,
        lambda place: (place_name(place), {"phase": place.phase, "block": place.block}),
    )
    return [row | {"share": None} for row in rows]


def stragglers(means: Means) -> list[dict[str, Any]]:
    """Waiting for a rank that a side names: exposed time in which the others of its group waited for a peer. `late_ms`:
    the median over the launches of a side that name it; None where none does. `alone`: no other group of that name and
    size waited, so that cells of the group, which hold no rank, are those of this one.
    """
    ledgers = {"reference": means.reference, "candidate": means.candidate}
    found = []
    for late in dict.fromkeys([*means.reference.stragglers, *means.candidate.stragglers]):
        waits = {side: ledger.waits_in(late) for side, ledger in ledgers.items()}
        others = [rank for rank in late.members if rank != late.rank]
        sums = [sum(of_rank.get(rank, 0) for rank in others) for of_rank in waits.values()]
        named = {side: ledger.stragglers[late] for side, ledger in ledgers.items()}
        where = " and ".join(f"the {side}" for side, launches in named.items() if launches)
        of_group = group_name(late.group, len(late.members))
        found.append(
            means.row(
                "straggler",
                f"waiting for rank {late.rank}, a straggler of {of_group} in {where}",
                *sums,
                rank=late.rank,
                group=late.group,
                group_size=len(late.members),
                group_ranks=list(late.members),
                alone=all(rank in late.members for of_rank in waits.values() for rank in of_rank),
                launches=named,
                late_ms={
                    side: median(ledger.late_ms[late]) if late in ledger.late_ms else None
                    for side, ledger in ledgers.items()
                },
            )
        )
    return found
