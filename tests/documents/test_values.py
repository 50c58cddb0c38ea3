"""How sizes and numbers are written, and the numbers of many values."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aorta.documents.comparison import Effect
from aorta.documents.formatting import PAGE, TEXT, group_title, p_value, rough_ms, rough_percent, value_text
from aorta.documents.statistics import describe, entry

CASES = json.loads(Path(__file__).with_suffix(".json").read_text())
WAYS = ("size", "number", "count", "quantity", "percent", "effect")
DOORS = {
    **{f"{name}.{way}": getattr(medium, way) for name, medium in (("TEXT", TEXT), ("PAGE", PAGE)) for way in WAYS},
    "interval": lambda *effect: PAGE.interval(Effect(*effect)),
    **{each.__name__: each for each in (rough_ms, rough_percent, p_value, value_text)},
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['door']} {case['of']}")
def test_a_value_is_written_as(case):
    """Three significant digits, and only 0 is written as 0; on a page a size stays on one line, thousands are separated
    and minus is a sign of its own; a share is in per cent, a difference of shares in points.
    """
    signed = {"signed": True} if case.get("signed") else {}
    assert DOORS[case["door"]](*case["of"], **signed) == case["written"]


MESH = {"replicate": 2, "shard": 2, "tensor": 2}


@pytest.mark.parametrize(
    ("name", "members", "title"),
    [
        ("0", [range(8)], "default group"),
        ("3", [[0, 1]], "tensor, ranks 0-1"),
        ("3", [[1, 3]], "shard, ranks 1, 3"),
        ("3", [[0, 4], [1, 5]], "replicate"),
        ("3", [[0, 1], [0, 2]], "group 3"),
        ("3", [[0, 1, 2]], "group 3, ranks 0-2"),
        ("3", [range(8)], "group 3"),
        ("3", [range(0, 40, 2)], "group 3, ranks 0, 2, 4, 6, 8, 10, ..."),
        ("world", [], "group world"),
    ],
)
def test_a_group_is_called_by_its_dimension_of_the_mesh_and_its_ranks(name, members, title):
    assert group_title(name, members, MESH, 8) == title


# --- the numbers of many values


@given(st.lists(st.floats(-1e15, 1e15), min_size=1, max_size=63))
def test_the_numbers_of_a_metric_are_those_of_its_values(values):
    found, column = entry(np.array(values), 0), np.array(values)
    p5, median, p95 = np.percentile(column, (5, 50, 95), method="linear")
    assert found.count == len(values)
    assert [found.median, found.p5, found.p95] == [median, p5, p95]
    assert [found.mean, found.min, found.max] == [column.mean(), column.min(), column.max()]


def test_nothing_is_no_number():
    found = entry(np.empty(0), 0)
    assert (found.count, found.reason) == (0, "no values")
    assert [found.value, found.median, found.p5, found.p95, found.mean, found.min, found.max] == [None] * 7


def test_ranks_may_come_in_any_order():
    found = describe([1.0, 10.0, 3.0, 30.0, np.nan], [0, 1, 0, 1, 2])
    assert found.per_rank_median == {"0": 2.0, "1": 20.0, "2": None}
    assert found.rank_spread == 18.0
    assert (found.count, found.nulls) == (4, 1)


def test_without_a_value_the_commonest_reason_stands_for_all():
    assert describe([np.nan] * 4, None, {"rare": 1, "common": 3}).reason == "common"
