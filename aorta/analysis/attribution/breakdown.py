"""Breaks a difference in exposed communication down by collective, region, rank and so on, and ranks the causes in one
list, the one to look at first on top.

Takes the totals of the reference and of the candidate, both with at least one rank-step. The rows of each breakdown add
up to the whole difference. Must not: lose a nanosecond; what is not listed is summed up in the last row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final, NamedTuple

from msgspec.structs import replace

from aorta.analysis.attribution.keys import (
    PARTS,
    TRANSFER,
    UNEXPLAINED,
    UNTOLD_WHAT,
    ExposedKey,
    Totals,
    collective_name,
    group_name,
    order_name,
    place_name,
)
from aorta.analysis.documents import ABSENT
from aorta.analysis.documents.comparison import Attribution, AttributionRow
from aorta.analysis.frames import Region
from aorta.analysis.straggler import lateness
from aorta.timeline.overlap import NS_PER_MS

SHOWN_ROWS: Final = 24
_NO_BLOCK: Final = "outside of every block"


@dataclass(frozen=True)
class Means:
    """Turns sums of nanoseconds into rows: means per rank-step of each side, and shares of the whole difference."""

    reference: Totals
    candidate: Totals

    def ms(self, side_totals: Totals, total_ns: int) -> float:
        """Return the mean over the rank-steps of one side, in milliseconds."""
        return total_ns / side_totals.sums.rank_steps / NS_PER_MS

    @property
    def difference_ms(self) -> float:
        """Difference of the mean exposed communication, candidate minus reference."""
        return self.ms(self.candidate, self.candidate.sums.exposed_ns) - self.ms(
            self.reference, self.reference.sums.exposed_ns
        )

    def row(self, dimension: str, what: str, before_ns: int, after_ns: int, **key: Any) -> AttributionRow:
        """Return one row. It keeps the sums in nanoseconds so that anybody can add the rows up exactly."""
        left, right, total = self.ms(self.reference, before_ns), self.ms(self.candidate, after_ns), self.difference_ms
        return AttributionRow(
            what=what,
            dimension=dimension,
            reference_ms=left,
            candidate_ms=right,
            difference_ms=right - left,
            share=(right - left) / total if total else None,
            reference_ns=before_ns,
            candidate_ns=after_ns,
            **key,
        )

    def rows(
        self,
        dimension: str,
        before: Mapping[Any, int],
        after: Mapping[Any, int],
        describe: Callable[[Any], tuple[str, dict[str, Any]]],
    ) -> list[AttributionRow]:
        """Return one row per key, the largest difference first; those beyond `SHOWN_ROWS` are one last row."""
        keys = dict.fromkeys([*before, *after])
        found = []
        for key in keys:
            what, fields = describe(key)
            found.append(self.row(dimension, what, before.get(key, 0), after.get(key, 0), **fields))
        found.sort(key=lambda row: (-abs(row.difference_ms), row.what))
        rest = found[SHOWN_ROWS:]
        if rest:
            sums = sum(row.reference_ns for row in rest), sum(row.candidate_ns for row in rest)
            found[SHOWN_ROWS:] = [self.row(dimension, f"{len(rest)} others", *sums, others=len(rest))]
        return found


class Breakdowns(NamedTuple):
    """A difference, broken down in every way; `balance` has two rows (`balance`)."""

    kind: list[AttributionRow]
    group: list[AttributionRow]
    collective: list[AttributionRow]
    order: list[AttributionRow]
    phase: list[AttributionRow]
    block: list[AttributionRow]
    place: list[AttributionRow]
    part: list[AttributionRow]
    rank: list[AttributionRow]
    balance: list[AttributionRow]


def dimensions(means: Means, parallel: str) -> Breakdowns:
    """Break the difference down in every way; the rows of each breakdown add up to it.

    Args:
        parallel: the strategy of the runs. With DDP an all-reduce is named as a bucket.
    """

    def by(
        name: str, of: Callable[[ExposedKey], Hashable], describe: Callable[[ExposedKey], tuple[str, dict[str, Any]]]
    ) -> list[AttributionRow]:
        example: dict[Hashable, ExposedKey] = {}

        def summed(side_totals: Totals) -> Counter[Hashable]:
            sums: Counter[Hashable] = Counter()
            for key, length in side_totals.exposed.items():
                sums[of(key)] += length
                example.setdefault(of(key), key)
            return sums

        before, after = summed(means.reference), summed(means.candidate)
        return means.rows(name, before, after, lambda value: describe(example[value]))

    def collective(key: ExposedKey) -> dict[str, Any]:
        return {"kind": key.kind, "group": key.group, "group_size": key.size, "bytes": key.bytes}

    return Breakdowns(
        by(
            "kind",
            lambda key: key.kind,
            lambda key: (UNTOLD_WHAT if key.kind == UNEXPLAINED else key.kind, {"kind": key.kind}),
        ),
        by(
            "group",
            lambda key: (key.group, key.size),
            lambda key: (
                UNTOLD_WHAT if key.kind == UNEXPLAINED else group_name(key.group, key.size),
                {"group": key.group, "group_size": key.size},
            ),
        ),
        by("collective", lambda key: key[:4], lambda key: (collective_name(key), collective(key))),
        by(
            "order",
            lambda key: key[:5],
            lambda key: (order_name(key, parallel), {**collective(key), "order": key.order}),
        ),
        by("phase", lambda key: key.phase, lambda key: (place_name(Region(key.phase, None)), {"phase": key.phase})),
        by("block", lambda key: key.block, lambda key: (key.block or _NO_BLOCK, {"block": key.block})),
        by(
            "place",
            lambda key: (key.phase, key.block),
            lambda key: (place_name(Region(key.phase, key.block)), {"phase": key.phase, "block": key.block}),
        ),
        by("part", lambda key: key.part, lambda key: (PARTS[key.part], {"part": key.part})),
        means.rows("rank", means.reference.ranks, means.candidate.ranks, lambda rank: (f"rank {rank}", {"rank": rank})),
        balance(means),
    )


def balance(means: Means) -> list[AttributionRow]:
    """Split the difference in two: exposed time changes with the time spent in communication and with how much of it is
    hidden.
    """
    before, after = means.reference.sums, means.candidate.sums
    return [
        means.row("balance", "time in communication", before.comm_ns, after.comm_ns, term="communication"),
        means.row("balance", "communication that is hidden", -before.hidden_ns, -after.hidden_ns, term="hidden"),
    ]


def computing(means: Means) -> list[AttributionRow]:
    """Compute time of each pass of each block, per rank-step. It is no part of the difference, so it has no share."""
    rows = means.rows(
        "computing",
        means.reference.sums.computing,
        means.candidate.sums.computing,
        lambda place: (place_name(place), {"phase": place.phase, "block": place.block}),
    )
    for row in rows:
        row.share = None
    return rows


def stragglers(means: Means) -> list[AttributionRow]:
    """Return the exposed time in which a group waited for a rank that either side names as its straggler.

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
        side = "candidate" if means.difference_ms > 0 else "reference"
        bases = totals[side].bases[late]
        by = f", {lateness(late_ms[side], next(iter(bases)) if len(bases) == 1 else None)}" if late_ms[side] else ""
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


SHOWN_CAUSES: Final = 12
LEAST_SHARE: Final = 0.05
_RANKED: Final = ("straggler", "collective", "kind", "block", "place", "balance", "part", "rank")
"""Dimensions of the list; among equal differences the earlier dimension is more informative."""
_NOT_ITS_OWN: Final = 0.5
"""How far the share of communication that is no longer hidden may differ from 1; beyond it, time in communication
changed too.
"""


def ranked(breakdowns: Breakdowns, late: Sequence[AttributionRow], lead: AttributionRow | None) -> list[AttributionRow]:
    """Return the row of the sentence, then rows of all breakdowns by size of their difference: at most `SHOWN_CAUSES`,
    each with at least 5 % of the whole. Empty where there is nothing to attribute (`lead` None).

    Breakdowns overlap: their rows are views of the same milliseconds and must not be added across dimensions. A
    breakdown with a single row says nothing and is left out. Of the ranks only outliers are kept, with more than one
    and a half times an even share. Communication that is no longer hidden counts as a cause only where time in
    communication is about as before. Transfer is what communication is for, so only waiting is a cause of its own.
    """
    if lead is None:
        return []
    rows = [*late]
    for dimension in _RANKED[1:]:
        of_it: list[AttributionRow] = getattr(breakdowns, dimension)
        count = sum(1 if row.listed else row.others for row in of_it)
        if count > 1 or dimension == "collective":
            rows += [row for row in of_it if row.listed and _tells(row, count)]
    large = [row for row in rows if row.share is not None and abs(row.share) >= LEAST_SHARE]
    large.sort(key=lambda row: (-abs(row.difference_ms), _RANKED.index(row.dimension)))
    others = [row for row in large if replace(row, what=lead.what) != lead]
    return [lead, *others][:SHOWN_CAUSES]


def _tells(row: AttributionRow, count: int) -> bool:
    """Return whether a row is worth listing. `count`: rows of its dimension, with those summed up in the last one."""
    share = row.share or 0
    match row.dimension:
        case "rank":
            return bool(share > 1.5 / count)
        case "part":
            return bool(row.part != TRANSFER)
        case "balance":
            return bool(row.term == "hidden" and abs(share - 1) <= _NOT_ITS_OWN)
        case _:
            return True


def _total(what: str, before_ms: float, after_ms: float, share: float | None = None) -> AttributionRow:
    """Return a mean of both sides; it is no part of the difference, and its sums are those of the sides."""
    return AttributionRow(
        what=what,
        dimension=ABSENT,
        reference_ms=before_ms,
        candidate_ms=after_ms,
        difference_ms=after_ms - before_ms,
        share=share,
        reference_ns=ABSENT,
        candidate_ns=ABSENT,
    )


def sentence_rows(attribution: Attribution | None) -> list[AttributionRow]:
    """Return the rows that hold every number of the sentence: the means of both sides, a straggler that it names, the
    breakdown of its cause, and transfer against waiting. Empty where there is nothing to attribute.
    """
    if attribution is None or not attribution.causes:
        return []
    before, after = attribution.reference, attribution.candidate
    totals = [
        _total("exposed communication", before.exposed_comm_ms, after.exposed_comm_ms, 1.0),
        _total("time in communication", before.comm_ms, after.comm_ms),
        _total("communication that is hidden", before.compute_comm_ms, after.compute_comm_ms),
        _total("computation", before.compute_ms, after.compute_ms),
    ]
    lead, parts = attribution.causes[0], attribution.dimensions.get("part", [])
    shown = of_one_dimension(attribution)
    return [
        *totals,
        *([lead] if lead.dimension == "straggler" else []),
        *shown,
        *([] if shown is parts else parts),
    ]


def of_one_dimension(attribution: Attribution) -> list[AttributionRow]:
    """Return all rows of the breakdown that the first cause belongs to, so that their shares add up to 100 %.

    A straggler is in no breakdown: then it is waiting against transfer. Empty where there is nothing to attribute.
    """
    if not attribution.causes:
        return []
    breakdowns = attribution.dimensions
    return breakdowns.get(attribution.causes[0].dimension, breakdowns.get("part", []))
