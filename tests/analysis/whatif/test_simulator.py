"""The simulator against answers worked out by hand: it is the witness of other tests, and must be right by itself."""

from __future__ import annotations

import pytest

from tests.analysis.whatif.event_loop import Account, Group, Issue, Laws, Mark, Operation, Wait, Work, carry_out

BOTH = Group("0", (0, 1))


def laws(cost_ns: int, backend_ns: int = 0, wake_ns: int = 0, late_ns: int = 0) -> Laws:
    return Laws(
        cost_ns=lambda one: cost_ns,
        backend_ns=lambda one: backend_ns,
        wake_ns=wake_ns,
        late_ns=lambda rank: late_ns if rank == 1 else 0,
    )


def reduce(tag: str, group: Group = BOTH) -> Issue:
    return Issue(tag, group, "allreduce", 1)


def pipeline(blocks: int, each_ns: int) -> list[Operation]:
    """Blocks, each followed by the issue of its collective; all are waited for at the end."""
    done: list[Operation] = []
    for block in range(blocks):
        done += [Work(each_ns), reduce(str(block))]
    return [*done, *(Wait(str(block)) for block in range(blocks)), Mark("step>")]


def end_of(accounts: list[list[Account]], rank: int = 0) -> int:
    return accounts[rank][-1].marks[-1][1]


@pytest.mark.parametrize(
    ("cost_ns", "end_ns"),
    [(3, 4 * 10 + 3), (10, 4 * 10 + 10), (25, 10 + 4 * 25)],  # the flow shop of two machines
)
def test_a_pipeline_ends_as_a_flow_shop_does(cost_ns: int, end_ns: int) -> None:
    assert end_of(carry_out([[pipeline(4, 10)]] * 2, laws(cost_ns))) == end_ns


def test_a_collective_begins_with_its_last_rank_and_both_end_together() -> None:
    slow, fast = [Work(50), *pipeline(1, 10)], pipeline(1, 10)
    accounts = carry_out([[slow], [fast]], laws(7))
    assert [end_of(accounts, rank) for rank in (0, 1)] == [67, 67]
    (issued,) = accounts[1][0].issued
    assert (issued.issue_ns, issued.collective.end_ns) == (10, 67)


def test_the_backend_bounds_a_collective_from_below_and_holds_the_link() -> None:
    accounts = carry_out([[pipeline(2, 10)]] * 2, laws(5, backend_ns=30))
    assert [one.collective.end_ns for one in accounts[0][0].issued] == [40, 50]  # 20 + 30, and not 40 + 30


def test_a_link_carries_one_at_a_time_and_groups_do_not_meet() -> None:
    other = Group("1", (0, 1))
    program = [reduce("a"), reduce("b"), reduce("c", other), Wait("b"), Mark("b"), Wait("c"), Mark("c"), Wait("a")]
    accounts = carry_out([[program]] * 2, laws(10))
    assert accounts[0][0].marks == [("b", 20), ("c", 20)]
    assert [one.collective.end_ns for one in accounts[0][0].issued] == [10, 20, 10]


def test_a_late_rank_holds_up_what_is_queued_behind() -> None:
    first, second = [reduce("a"), reduce("b"), Wait("b")], [Work(100), reduce("a"), reduce("b"), Wait("b")]
    accounts = carry_out([[first], [second]], laws(10))
    assert [one.collective.end_ns for one in accounts[0][0].issued] == [110, 120]
