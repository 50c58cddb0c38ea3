"""Whether effects follow their causes, pair by pair: bounds add up, and what is no pair is not checked."""

from __future__ import annotations

from typing import Any

import pytest

from aorta.analysis.merge.causality import Causality, check_collectives
from aorta.analysis.merge.tracks import MergedCollective


@pytest.mark.parametrize(
    ("lead_ns", "bounds", "violated"),
    [(5, (2, 3), False), (6, (2, 3), True), (0, (0, 0), False), (1, (0, 0), True), (3, (None, 3), False)],
)
def test_the_bounds_of_both_clocks_together_may_explain_a_lead(
    lead_ns: int, bounds: tuple[int | None, int], violated: bool
) -> None:
    found = Causality()
    found.check("pair", lead_ns, bounds)
    assert bool(found.violations) == violated
    assert found.unknown_bounds == (None in bounds)


def test_the_worst_lead_is_kept() -> None:
    found = Causality()
    for lead_ns in (-7, 4, -9):
        found.check("pair", lead_ns, (9, 9))
    assert (found.pairs, found.worst_lead_ns) == (3, 4)


def row(kind: str = "allreduce", **changes: Any) -> MergedCollective:
    """Issued at 100 and over at 200 ns, on clocks without error."""
    values: dict[str, Any] = {"group": "w", "seq": 0, "issue_ns": 100, "end_ns": 200} | changes
    return MergedCollective(kind, issue_bound_ns=0, end_bound_ns=0, **values)


def checked(*per_rank: list[MergedCollective]) -> Causality:
    found, members = Causality(), {"w": list(range(len(per_rank)))}
    check_collectives(found, dict(enumerate(per_rank)), dict.fromkeys(range(len(per_rank)), members))
    return found


def test_no_rank_may_end_before_the_last_has_issued() -> None:
    """Rank 2 issues last, at 150: rank 0 ends 30 ns too early, rank 1 in time."""
    found = checked([row(end_ns=120)], [row(end_ns=150)], [row(issue_ns=150)])
    assert (found.pairs, found.worst_lead_ns) == (2, 30)
    assert [(each.what, each.lead_ns) for each in found.violations] == [
        ("allreduce#0 of group w: rank 0 ends before rank 2 begins", 30)
    ]


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([[row("broadcast")], [row("broadcast", issue_ns=900)]], "a rank may end this kind before the others begin"),
        ([[row()], []], "not seen on every rank of its group"),
        ([[row(), row()], [row(issue_ns=900)]], "not seen on every rank of its group"),
    ],
)
def test_what_is_no_pair_is_not_checked_and_counted(ranks: list[list[MergedCollective]], said: str) -> None:
    found = checked(*ranks)
    assert (found.pairs, set(found.skipped)) == (0, {said})
