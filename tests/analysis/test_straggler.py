"""Who is named a straggler, from arrivals written down by hand: a collective ends 10 ms after its last rank came."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from aorta.analysis.aggregate import LabelledRun, aggregate
from aorta.analysis.load.records import load_run
from aorta.analysis.report.report_folder import write_report
from aorta.analysis.straggler import judge
from tests.analysis.builders import collective, footer, header, metrics, step, write_rank

TRANSFER_MS = 10.0


def entries(
    folder: Path,
    ranks: int,
    arrival_ms: Callable[[int, int], float],
    groups: Sequence[Sequence[int]] | None = None,
    count: int = 20,
    kind: str = "allreduce",
) -> list[dict[str, Any]]:
    """`arrival_ms(rank, n)`: when a rank comes to the n-th collective of its group, all groups being called "g"."""
    groups = groups or [range(ranks)]
    for rank in range(ranks):
        (mine,) = [group for group in groups if rank in group]
        lines = []
        for number in range(count):
            end = max(arrival_ms(peer, number) for peer in mine) + TRANSFER_MS
            row = collective(kind, number, arrival_ms(rank, number), end, group="g")
            lines.append(step(rank, ranks, number, overlap=metrics(100, 50, 20, 10), collectives=[row]))
        write_rank(folder, header(rank, ranks), lines, footer(count, ranks, groups={"g": list(mine)}))
    found = aggregate(LabelledRun("x", load_run(folder)))["stragglers"]
    assert isinstance(found, list)
    return found


def test_one_late_rank_of_four_is_named_with_its_lateness(tmp_path: Path) -> None:
    # Rank 2 comes 5 ms late, the others within 0.3 ms of each other.
    (entry,) = entries(tmp_path, 4, lambda rank, n: 5.0 if rank == 2 else 0.1 * ((rank + n) % 4))
    assert (entry["rank"], entry["group_ranks"], entry["collectives"]) == (2, [0, 1, 2, 3], 20)
    assert entry["late_ms"] == pytest.approx(5.0, abs=0.3)
    assert entry["last_share"] == 1.0
    assert entry["wait_ms_median_per_rank"]["2"] == 0.0
    text = write_report({"x": tmp_path}, tmp_path / "out", html=False).text
    assert "rank 2 is a straggler: the other ranks of group g wait for it" in " ".join(text.split())


def test_groups_of_one_name_are_judged_apart(tmp_path: Path) -> None:
    late = {1: 4.0, 2: 8.0}
    found = entries(tmp_path, 4, lambda rank, _n: late.get(rank, 0.0), [(0, 1), (2, 3)])
    named = {tuple(entry["group_ranks"]): (entry["rank"], entry["late_ms"]) for entry in found}
    assert named == {(0, 1): (1, pytest.approx(4.0)), (2, 3): (2, pytest.approx(8.0))}


def test_ranks_that_take_turns_are_not_named(tmp_path: Path) -> None:
    (entry,) = entries(tmp_path, 2, lambda rank, n: 5.0 if rank == n % 2 else 0.0)
    assert entry["rank"] is None
    assert "was the last in 50% of the collectives only" in entry["reason"]


def test_a_rank_that_is_hardly_late_is_not_named(tmp_path: Path) -> None:
    # A tenth of the transfer is 1 ms.
    (entry,) = entries(tmp_path, 2, lambda rank, _n: 0.9 * rank)
    assert entry["rank"] is None
    assert entry["reason"] == "rank 1 is late by 0.9 ms, not by more than 1 ms"


def test_few_collectives_are_no_evidence(tmp_path: Path) -> None:
    (entry,) = entries(tmp_path, 2, lambda rank, _n: 5.0 * rank, count=15)
    assert (entry["rank"], entry["reason"]) == (None, "15 collectives known on every rank, 16 are needed")


def ruled(waits: Sequence[float], last: int, collectives: int = 20, transfer_ms: float = 0.0) -> dict[str, Any]:
    """The rule alone: rank 0 was the last in `last` collectives."""
    return judge(collectives, dict(enumerate(waits)), {0: last}, transfer_ms)


@pytest.mark.parametrize(
    ("waits", "last", "collectives", "transfer_ms", "named"),
    [
        pytest.param((0, 5), 16, 16, 0, True, id="16 collectives are enough"),
        pytest.param((0, 5), 15, 15, 0, False, id="15 are not"),
        pytest.param((0, 5), 16, 20, 0, True, id="the last in four fifths"),
        pytest.param((0, 5), 15, 20, 0, False, id="the last in three quarters"),
        pytest.param((0, 0.21), 20, 20, 0, True, id="more than 0.2 ms"),
        pytest.param((0, 0.2), 20, 20, 0, False, id="0.2 ms"),
        pytest.param((0, 1.01), 20, 20, 10, True, id="more than a tenth of the transfer"),
        pytest.param((0, 1.0), 20, 20, 10, False, id="a tenth of the transfer"),
        pytest.param((0, 0.1, 5, 5), 20, 20, 0, False, id="one peer waits as little"),
        pytest.param((0, 0.3, 5, 5), 20, 20, 0, True, id="every peer waits longer"),
    ],
)
def test_the_edges_of_the_rule(
    waits: Sequence[float], last: int, collectives: int, transfer_ms: float, named: bool
) -> None:
    found = ruled(waits, last, collectives, transfer_ms)
    assert found["rank"] == (0 if named else None)
    assert (found["reason"] is None) == named


def test_lateness_is_the_median_wait_of_the_peers_less_the_ranks_own() -> None:
    assert ruled((1, 4, 5, 9), 20)["late_ms"] == 4


def test_in_a_tie_nobody_was_the_last(tmp_path: Path) -> None:
    """Ranks 0 and 1 come late together in a quarter of the collectives, else rank 0 alone."""
    (entry,) = entries(tmp_path, 3, lambda rank, n: 5.0 if rank == 0 or (rank == 1 and n % 4 == 0) else 0.0)
    assert (entry["rank"], entry["last_share"]) == (None, 0.75)


def test_waits_of_warm_up_and_waits_that_are_not_known_do_not_count(tmp_path: Path) -> None:
    """Rank 0 waits 5 ms in every collective that counts, and 1 ms in the warm-up, which is longer; some of rank 1's
    ends were not seen, so that nobody's wait is known there.
    """
    for rank in (0, 1):
        lines = []
        for number in range(60):
            warm, unseen = number < 24, 24 <= number < 44
            arrives = (1.0 if warm else 5.0) if rank else 0.0
            end = None if rank and unseen else 15.0
            row = collective("allreduce", number, arrives, end)
            lines.append(step(rank, 2, number, overlap=metrics(100, 50, 20, 10), warmup=warm, collectives=[row]))
        write_rank(tmp_path, header(rank, 2), lines)
    (entry,) = aggregate(LabelledRun("x", load_run(tmp_path)))["stragglers"]
    assert (entry["rank"], entry["collectives"], entry["late_ms"]) == (1, 16, 5.0)
    assert entry["wait_ms_median_per_rank"] == {"0": 5.0, "1": 0.0}


def test_two_ranks_late_together_hide_each_other(tmp_path: Path) -> None:
    (entry,) = entries(tmp_path, 4, lambda rank, _n: 5.0 if rank in (1, 3) else 0.0)
    assert entry["rank"] is None


def test_kinds_that_a_rank_may_end_early_say_nothing(tmp_path: Path) -> None:
    (entry,) = entries(tmp_path, 2, lambda rank, _n: 5.0 * rank, kind="broadcast")
    assert (entry["rank"], entry["collectives"]) == (None, 0)


def test_a_run_of_one_rank_has_no_straggler(tmp_path: Path) -> None:
    assert entries(tmp_path, 1, lambda rank, _n: 0.0) == []
