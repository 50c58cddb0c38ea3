"""Cost of collectives by kind, group and size, against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from aorta.analysis.load.collective_costs import CostKey, costs, parts_of
from aorta.analysis.load.interval_table import Trace
from tests.analysis.load.tables import COMM, COMPUTE, row, trace

HOUR_NS = 3_600_000_000_000
WORLD = {"world": (0, 1)}


def allreduce(rank: int, start: int, length: int, seq: int, **more: Any) -> dict[str, Any]:
    given = {"kind": "allreduce", "group": "world", "size": 1_000_000, **more}
    return row(COMM, start, start + length, rank=rank, seq=seq, **given)


def of(*traces: Trace) -> list[dict[str, Any]]:
    return costs([part for each in traces for part in parts_of(each)])


def pair() -> tuple[Trace, Trace]:
    """Two all-reduces on two ranks. Rank 1 comes 40,000 ns late to the first: its duration is the transfer. Of rank 0's
    [51, 101) and [200, 230) us lie in compute; rank 1 has none.
    """
    first = trace(
        [allreduce(0, 1_000, 100_000, 1), allreduce(0, 200_000, 50_000, 2), row(COMPUTE, 51_000, 230_000)],
        groups=WORLD,
    )
    second = trace([allreduce(1, 41_000, 60_000, 1), allreduce(1, 200_000, 50_000, 2)], groups=WORLD)
    return first, second


def later(made: Trace, by_ns: int) -> Trace:
    table = made.intervals
    return replace(made, intervals=replace(table, start_ns=table.start_ns + by_ns, end_ns=table.end_ns + by_ns))


def both(*rows: dict[str, Any]) -> list[Trace]:
    """These rows on rank 0, and on rank 1."""
    return [trace([{**each, "rank": rank} for each in rows], groups=WORLD) for rank in (0, 1)]


def test_transfer_is_the_shortest_over_the_ranks_and_hidden_and_exposed_add_up() -> None:
    (cost,) = of(*pair())
    assert CostKey(*cost["key"]) == ("allreduce", "world", (0, 1), 2, 1_000_000)
    assert (cost["ranks"], cost["count"], cost["matched"], cost["reasons"]) == (2, 4, 2, {})
    # 60 us and 50 us; 1 MB in 60 us and in 50 us: 16.7 and 20 GB/s. For two ranks 2 (n-1)/n = 1.
    rate = (1e6 / 60_000 + 1e6 / 50_000) / 2
    expected = {"transfer_ms": 0.055, "algbw_gb_per_s": rate, "busbw_gb_per_s": rate}
    expected |= {"time_ms": 0.26, "hidden_ms": 0.08, "exposed_ms": 0.18, "overlap_ratio": 0.08 / 0.26}
    assert {name: cost[name] for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize(
    ("traces", "expected", "reasons"),
    [
        pytest.param(
            [pair()[0]],
            {"transfer_ms": None, "algbw_gb_per_s": None, "busbw_gb_per_s": None},
            {"transfer_ms": "not in the traces of rank 1"},
            id="W5: one rank gives no transfer",
        ),
        pytest.param(
            [trace([allreduce(0, at, 100_000, seq, stream=seq) for seq, at in ((1, 0), (2, 50_000))], groups=WORLD)],
            {"count": 2, "time_ms": 0.15},
            {},
            id="W10: collectives at the same time count once",
        ),
        pytest.param(
            [pair()[0], later(pair()[1], HOUR_NS)],
            {"transfer_ms": 0.055},
            {},
            id="W11: ranks whose clocks are an hour apart match by number",
        ),
        pytest.param(
            [
                trace([allreduce(rank, 0, 100_000, 1, group="half")], groups={"half": (0, 1, 2, 3)}, world_size=64)
                for rank in range(4)
            ],
            {"algbw_gb_per_s": 10.0, "busbw_gb_per_s": 10.0 * 2 * 3 / 4},
            {},
            id="W19: the bus bandwidth rests on the size of the group",
        ),
        pytest.param(
            both(allreduce(0, 0, 1000, 1, size=-1)),
            {"transfer_ms": 0.001, "algbw_gb_per_s": None},
            dict.fromkeys(("algbw_gb_per_s", "busbw_gb_per_s"), "its size is not known"),
            id="an unknown size leaves the transfer",
        ),
        pytest.param(
            both(allreduce(0, 0, 1000, 1, kind="barrier")),
            {"busbw_gb_per_s": None},
            {"busbw_gb_per_s": "no bus bandwidth is defined for this kind"},
            id="a barrier",
        ),
        pytest.param(
            [
                trace([allreduce(0, at, 1000, seq) for seq, at in ((1, 0), (1, 2000), (2, 4000))], groups=WORLD),
                trace([allreduce(1, 0, 1000, 1), allreduce(1, 4000, 700, 2)], groups=WORLD),
            ],
            {"matched": 1, "transfer_ms": 0.0007},
            {},
            id="a number that occurs twice on a rank matches nothing",
        ),
    ],
)
def test_what_ranks_and_their_collectives_give(
    traces: list[Trace], expected: dict[str, float | None], reasons: dict[str, str]
) -> None:
    (cost,) = of(*traces)
    for name, value in expected.items():
        assert cost[name] == (None if value is None else pytest.approx(value)), name
    assert {name: cost["reasons"].get(name) for name in reasons} == reasons


def test_groups_of_one_name_and_other_ranks_stay_apart() -> None:
    pairs = [(0, 1), (2, 3)]
    traces = [
        trace([allreduce(rank, 0, 1000 * (rank + 1), 1, group="tp")], groups={"tp": ranks})
        for ranks in pairs
        for rank in ranks
    ]
    found = {CostKey(*cost["key"]).members: cost["transfer_ms"] for cost in of(*traces)}
    assert found == {(0, 1): pytest.approx(0.001), (2, 3): pytest.approx(0.003)}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"kind": None}, "its kind is not known"),
        ({"kind": "broadcast"}, "a rank may end this kind early, so no rank's duration is its transfer"),
        ({"group": None}, "its group is not in the trace"),
        ({"group": "other"}, "the ranks of its group are not in the trace"),
        ({"seq": -1}, "the trace does not number it, so it cannot be found on other ranks"),
    ],
)
def test_what_a_trace_does_not_tell_is_null_with_its_reason(change: dict[str, Any], reason: str) -> None:
    (cost,) = of(*both(allreduce(0, 0, 1000, 1) | change))
    assert cost["reasons"]["transfer_ms"] == cost["reasons"]["busbw_gb_per_s"] == reason
    assert cost["transfer_ms"] is None
    assert cost["time_ms"] == pytest.approx(0.002)


@pytest.mark.parametrize(("platform", "matched"), [("cpu", 3), ("cuda", 0), (None, 0)])
def test_order_numbers_collectives_only_on_a_cpu_with_marked_steps(platform: str | None, matched: int) -> None:
    """Step 5 has three on both ranks, step 6 two on one and one on the other."""
    made = []
    for rank, starts in ((0, (0, 20, 40, 100, 120)), (1, (1, 21, 41, 101))):
        rows = [allreduce(rank, start, 10 - rank, -1) for start in starts]
        made.append(trace(rows, steps=[(5, 0, 100), (6, 100, 200)], groups=WORLD, platform=platform))
    (cost,) = of(*made)
    assert cost["matched"] == matched
    assert cost["transfer_ms"] == (pytest.approx(9e-6) if matched else None)
    unmarked = [trace([allreduce(rank, 0, 9, -1)], groups=WORLD, platform=platform) for rank in (0, 1)]
    (cost,) = of(*unmarked)
    assert cost["reasons"]["transfer_ms"] == "the trace does not number it, so it cannot be found on other ranks"
