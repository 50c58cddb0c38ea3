"""Breaks a difference in exposed communication down by collective, region, rank and so on.

Takes the totals of the reference and of the candidate, both with at least one rank-step, and returns rows of plain JSON
values. The rows of each breakdown add up to the whole difference. Must not: lose a nanosecond; what is not listed is
summed up in the last row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from aorta.analysis.attribution.keys import ExposedKey, Region, Totals
from aorta.analysis.attribution.part_names import PARTS, collective_name, group_name, order_name, place_name
from aorta.analysis.formatting import rough_ms
from aorta.timeline.overlap import NS_PER_MS

SHOWN_ROWS: Final = 24
_NO_BLOCK: Final = "outside of every block"


@dataclass(frozen=True)
class Means:
    """Turns sums of nanoseconds into rows: means per rank-step of each side, and shares of the whole difference."""

    reference: Totals
    candidate: Totals

    def ms(self, side_totals: Totals, total_ns: int) -> float:
        """Mean over the rank-steps of one side, in milliseconds."""
        return total_ns / side_totals.sums.rank_steps / NS_PER_MS

    @property
    def difference_ms(self) -> float:
        """Difference of the mean exposed communication, candidate minus reference."""
        return self.ms(self.candidate, self.candidate.sums.exposed_ns) - self.ms(
            self.reference, self.reference.sums.exposed_ns
        )

    def row(self, dimension: str, what: str, before_ns: int, after_ns: int, **key: Any) -> dict[str, Any]:
        """One row. It keeps the sums in nanoseconds so that anybody can add the rows up exactly."""
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
        """One row per key, the largest difference first; keys beyond `SHOWN_ROWS` are summed up in one last row."""
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
    """Break the difference down in every way; the rows of each breakdown add up to it.

    Args:
        parallel: the strategy of the runs. With DDP an all-reduce is named as a bucket.
    """

    def by(
        name: str, of: Callable[[ExposedKey], Hashable], describe: Callable[[ExposedKey], tuple[str, dict[str, Any]]]
    ) -> None:
        example: dict[Hashable, ExposedKey] = {}

        def summed(side_totals: Totals) -> Counter[Hashable]:
            sums: Counter[Hashable] = Counter()
            for key, length in side_totals.exposed.items():
                sums[of(key)] += length
                example.setdefault(of(key), key)
            return sums

        before, after = summed(means.reference), summed(means.candidate)
        found[name] = means.rows(name, before, after, lambda value: describe(example[value]))

    def collective(key: ExposedKey) -> dict[str, Any]:
        return {"kind": key.kind, "group": key.group, "group_size": key.size, "bytes": key.bytes}

    found: dict[str, list[dict[str, Any]]] = {}
    by("kind", lambda key: key.kind, lambda key: (key.kind, {"kind": key.kind}))
    by(
        "group",
        lambda key: (key.group, key.size),
        lambda key: (group_name(key.group, key.size), {"group": key.group, "group_size": key.size}),
    )
    by("collective", lambda key: key[:4], lambda key: (collective_name(key), collective(key)))
    by(
        "order",
        lambda key: key[:5],
        lambda key: (order_name(key, parallel), {**collective(key), "order": key.order}),
    )
    by("phase", lambda key: key.phase, lambda key: (place_name(Region(key.phase, None)), {"phase": key.phase}))
    by("block", lambda key: key.block, lambda key: (key.block or _NO_BLOCK, {"block": key.block}))
    by(
        "place",
        lambda key: (key.phase, key.block),
        lambda key: (place_name(Region(key.phase, key.block)), {"phase": key.phase, "block": key.block}),
    )
    by("part", lambda key: key.part, lambda key: (PARTS[key.part], {"part": key.part}))
    found["rank"] = means.rows(
        "rank", means.reference.ranks, means.candidate.ranks, lambda rank: (f"rank {rank}", {"rank": rank})
    )
    found["balance"] = balance(means)
    return found


def balance(means: Means) -> list[dict[str, Any]]:
    """Split the difference in two: exposed time changes with the time spent in communication and with how much of it is
    hidden.
    """
    before, after = means.reference.sums, means.candidate.sums
    return [
        means.row("balance", "time in communication", before.comm_ns, after.comm_ns, term="communication"),
        means.row("balance", "communication that is hidden", -before.hidden_ns, -after.hidden_ns, term="hidden"),
    ]


def computing(means: Means) -> list[dict[str, Any]]:
    """Compute time of each pass of each block, per rank-step. It is no part of the difference, so it has no share."""
    rows = means.rows(
        "computing",
        means.reference.computing,
        means.candidate.computing,
        lambda place: (place_name(place), {"phase": place.phase, "block": place.block}),
    )
    return [row | {"share": None} for row in rows]


def stragglers(means: Means) -> list[dict[str, Any]]:
    """Exposed time in which a group waited for a rank that either side names as its straggler.

    Each row has `late_ms`, the median over the launches of a side that name the rank (None where none does), and
    `alone`: no other group of the same name and size waited. Keys of exposed time hold no ranks, so only then is the
    group's exposed time certainly this group's.
    """
    totals = {"reference": means.reference, "candidate": means.candidate}
    found = []
    for late in dict.fromkeys([*means.reference.stragglers, *means.candidate.stragglers]):
        waits = {side: side_totals.waits_in(late) for side, side_totals in totals.items()}
        others = [rank for rank in late.members if rank != late.rank]
        sums = [sum(of_rank.get(rank, 0) for rank in others) for of_rank in waits.values()]
        named = {side: side_totals.stragglers[late] for side, side_totals in totals.items()}
        where = " and ".join(f"the {side}" for side, launches in named.items() if launches)
        late_ms = {
            side: median(side_totals.late_ms[late]) if late in side_totals.late_ms else None
            for side, side_totals in totals.items()
        }
        worse = late_ms["candidate" if means.difference_ms > 0 else "reference"]
        by = "" if worse is None else f", late by {rough_ms(worse)} in each collective (median)"
        of_group = group_name(late.group, len(late.members))
        found.append(
            means.row(
                "straggler",
                f"waiting for rank {late.rank}, a straggler of {of_group} in {where}{by}",
                *sums,
                rank=late.rank,
                group=late.group,
                group_size=len(late.members),
                group_ranks=list(late.members),
                alone=all(rank in late.members for of_rank in waits.values() for rank in of_rank),
                launches=named,
                late_ms=late_ms,
            )
        )
    return found
