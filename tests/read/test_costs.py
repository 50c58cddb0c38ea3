"""Cost of collectives by kind, group and size, against numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from aorta.read.traces.collective_costs import CostKey, costs, parts_of
from aorta.read.traces.interval_table import Trace
from tests.read.tables import COMM, COMPUTE, row, trace

HOUR_NS = 3_600_000_000_000
WORLD = {"world": (0, 1)}


def allreduce(rank: int, start: int, length: int, seq: int, **more: Any) -> dict[str, Any]:
    given = {"kind": "allreduce", "group": "world", "size": 1_000_000, **more}
    return row(COMM, start, start + length, rank=rank, seq=seq, **given)


def of(*traces: Trace) -> list[dict[str, Any]]:
    return costs([part for each in traces for part in parts_of(each)])


def pair() -> tuple[Trace, Trace]:
    """Two all-reduces on two ranks. Rank 1 comes 40,000 ns late to the first: its duration is the transfer."""
    first = trace(
        [allreduce(0, 1_000, 100_000, 1), allreduce(0, 200_000, 50_000, 2), row(COMPUTE, 51_000, 230_000)],
        groups=WORLD,
    )
    second = trace([allreduce(1, 41_000, 60_000, 1), allreduce(1, 200_000, 50_000, 2)], groups=WORLD)
    return first, second


def test_transfer_is_the_shortest_over_the_ranks_and_bandwidth_follows_from_it() -> None:
    (cost,) = of(*pair())
    assert (
        CostKey(*cost["key"]).kind,
        CostKey(*cost["key"]).group,
        CostKey(*cost["key"]).size,
        CostKey(*cost["key"]).bytes,
    ) == ("allreduce", "world", 2, 1_000_000)
    assert (cost["ranks"], cost["count"], cost["matched"]) == (2, 4, 2)
    # 60 us and 50 us; 1 MB in 60 us and in 50 us: 16.7 and 20 GB/s.
    assert cost["transfer_ms"] == pytest.approx(0.055)
    assert cost["algbw_gb_per_s"] == pytest.approx((1e6 / 60_000 + 1e6 / 50_000) / 2)
    assert cost["algbw_gb_per_s"] is not None
    assert cost["busbw_gb_per_s"] == pytest.approx(cost["algbw_gb_per_s"])  # 2 (n-1)/n = 1 for two ranks
    assert not cost["reasons"]


def test_hidden_and_exposed_add_up_to_the_time() -> None:
    (cost,) = of(*pair())
    assert cost["time_ms"] == pytest.approx(0.26)
    # Rank 0: [51, 101) and [200, 230) us lie in compute; rank 1 has none.
    assert cost["hidden_ms"] == pytest.approx(0.08)
    assert cost["exposed_ms"] == pytest.approx(0.18)
    assert cost["overlap_ratio"] == pytest.approx(0.08 / 0.26)


def test_w5_a_single_rank_gives_no_transfer() -> None:
    (cost,) = of(pair()[0])
    assert (cost["transfer_ms"], cost["algbw_gb_per_s"], cost["busbw_gb_per_s"]) == (None, None, None)
    assert cost["reasons"]["transfer_ms"] == "not in the traces of rank 1"


def test_w10_collectives_at_the_same_time_count_once() -> None:
    rows = [allreduce(0, 0, 100_000, 1, stream=1), allreduce(0, 50_000, 100_000, 2, stream=2)]
    (cost,) = of(trace(rows, groups=WORLD))
    assert cost["count"] == 2
    assert cost["time_ms"] == pytest.approx(0.15)


def test_w11_ranks_whose_clocks_are_an_hour_apart_match_by_number() -> None:
    first, _ = pair()
    late = trace([allreduce(1, 41_000 + HOUR_NS, 60_000, 1), allreduce(1, 200_000 + HOUR_NS, 50_000, 2)], groups=WORLD)
    (cost,) = of(first, late)
    assert cost["transfer_ms"] == pytest.approx(0.055)


def test_w19_busbw_rests_on_the_size_of_the_group() -> None:
    quad = {"half": (0, 1, 2, 3)}
    traces = [trace([allreduce(rank, 0, 100_000, 1, group="half")], groups=quad, world_size=64) for rank in range(4)]
    (cost,) = of(*traces)
    assert cost["algbw_gb_per_s"] == pytest.approx(10.0)
    assert cost["busbw_gb_per_s"] == pytest.approx(10.0 * 2 * 3 / 4)


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
    traces = []
    for rank in (0, 1):
        made = allreduce(rank, 0, 1000, 1)
        traces.append(trace([made | change], groups=WORLD))
    (cost,) = of(*traces)
    assert cost["reasons"]["transfer_ms"] == cost["reasons"]["busbw_gb_per_s"] == reason
    assert cost["transfer_ms"] is None
    assert cost["time_ms"] == pytest.approx(0.002)


def test_an_unknown_size_leaves_the_transfer_and_takes_the_bandwidth() -> None:
    (cost,) = of(*(trace([allreduce(rank, 0, 1000, 1, size=-1)], groups=WORLD) for rank in (0, 1)))
    assert cost["transfer_ms"] == pytest.approx(0.001)
    assert cost["reasons"] == dict.fromkeys(("algbw_gb_per_s", "busbw_gb_per_s"), "its size is not known")


def test_a_barrier_has_no_bus_bandwidth_and_no_error() -> None:
    (cost,) = of(*(trace([allreduce(rank, 0, 1000, 1, kind="barrier")], groups=WORLD) for rank in (0, 1)))
    assert cost["busbw_gb_per_s"] is None
    assert cost["reasons"]["busbw_gb_per_s"] == "no bus bandwidth is defined for this kind"


def test_a_number_that_occurs_twice_on_a_rank_matches_nothing() -> None:
    first = trace([allreduce(0, 0, 1000, 1), allreduce(0, 2000, 900, 1), allreduce(0, 4000, 800, 2)], groups=WORLD)
    second = trace([allreduce(1, 0, 1000, 1), allreduce(1, 4000, 700, 2)], groups=WORLD)
    (cost,) = of(first, second)
    assert cost["matched"] == 1
    assert cost["transfer_ms"] is not None
    assert math.isclose(cost["transfer_ms"], 0.0007)


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


def test_traces_without_communication_have_no_rows() -> None:
    assert of(trace([]), trace([row(COMPUTE, 0, 1)])) == []
