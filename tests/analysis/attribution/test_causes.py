"""Which rows are causes."""

from __future__ import annotations

from collections import Counter

from aorta.analysis.attribution.breakdown import SHOWN_ROWS, Breakdowns, Means, ranked
from aorta.analysis.attribution.keys import Sums, Totals
from aorta.analysis.documents import known


def ranks_of(exposed_ns: dict[int, int]) -> Totals:
    return Totals(sums=Sums(rank_steps=1, exposed_ns=sum(exposed_ns.values())), ranks=Counter(exposed_ns))


def test_an_even_part_is_that_of_all_ranks_not_of_those_that_are_listed() -> None:
    """One of 100 ranks has 5.5 times an even part; of the 24 that are listed that would be less than 1.5 times."""
    exposed = dict.fromkeys(range(99), 945_000_000 // 99) | {99: 55_000_000}
    means = Means(ranks_of({}), ranks_of(exposed))
    rows = means.rows("rank", {}, means.candidate.ranks, lambda rank: (f"rank {rank}", {"rank": rank}))
    assert len(rows) == SHOWN_ROWS + 1
    found = Breakdowns(*([] for _ in Breakdowns._fields))._replace(rank=rows)
    lead = means.row("collective", "lead", 0, means.candidate.sums.exposed_ns)
    assert [known(row.rank) for row in ranked(found, [], lead)] == [None, 99]
