"""Which launches did the same work, from facts written by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aorta.analysis.compare.launch_comparison import refuse_unlike
from aorta.analysis.compare.launch_set import Launch, LaunchSet
from aorta.analysis.compare.verdict import Rules
from aorta.errors import InputError

FACTS = {
    "header.world_size": 2,
    "header.platform": "cuda",
    "config.workload.name": "ranking",
    "config.training.seed": 1,
}


def side(name: str, *launches: dict[str, Any]) -> LaunchSet:
    """Launches whose facts are `FACTS` and what is given; None takes a fact away."""
    facts = [{key: value for key, value in (FACTS | changes).items() if value is not None} for changes in launches]
    made = [Launch(Path(name, str(place)), f"{name}{place}", {}, each, ()) for place, each in enumerate(facts)]
    return LaunchSet(Path(name), tuple(made), ())


def refused(left: LaunchSet, right: LaunchSet, *allow: str) -> list[tuple[str, str]]:
    """Where and in which key they differ, everything allowed; what is not allowed raises."""
    return [(found.where, found.key) for found in refuse_unlike(left, right, Rules(allow_unlike=allow))]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("header.world_size", 4),
        ("config.workload.width", 64),
        ("config.workload.name", None),
        ("config.training.mixed_precision", "bf16"),
        ("config.training.dtype", "bfloat16"),
        ("config.training.batch_size", 3),
        ("config.training.gradient_accumulation", 2),
        ("config.dataset.sequence_length", 8),
    ],
)
def test_what_changes_the_work_is_refused_also_where_one_side_does_not_state_it(key: str, value: Any) -> None:
    left, right = side("a", {}, {}), side("b", {key: value}, {key: value})
    with pytest.raises(InputError, match=f"NOT COMPARABLE: {key} is .*the two sides did not do the same work"):
        refused(left, right)
    with pytest.raises(InputError, match=f"NOT COMPARABLE: {key}"):
        refused(right, left)
    assert refused(left, right, "all") == [("between", key)]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("header.platform", "rocm"),
        ("config.parallel.strategy", "fsdp"),
        ("config.parallel.batch_size", 3),
        ("config.fabric.kind", "emulated"),
        ("config.instrument.mode", "observe"),
        ("config.training.seed", 7),
        ("config.training.output_dir", "elsewhere"),
    ],
)
def test_what_is_compared_may_differ_between_the_sides(key: str, value: Any) -> None:
    """`parallel.batch_size` stands for a setting that only one strategy has."""
    assert refused(side("a", {}), side("b", {key: value})) == []


@pytest.mark.parametrize("key", ["header.platform", "config.parallel.strategy", "config.fabric.kind"])
def test_within_a_side_it_must_not(key: str) -> None:
    mixed = side("b", {}, {key: "other"})
    with pytest.raises(InputError, match=f"{key} .*launches of the candidate did not do the same work"):
        refused(side("a", {}), mixed)
    with pytest.raises(InputError, match=f"{key} .*launches of the reference"):
        refused(mixed, side("a", {}))
    assert refused(side("a", {}), mixed, key) == [("candidate", key)]


def test_launches_of_a_side_may_have_seeds_of_their_own() -> None:
    assert refused(side("a", {"config.fabric.seed": 1}, {"config.fabric.seed": 2}), side("b", {})) == []


def test_a_launch_that_states_no_configuration_is_compared_by_its_header_only() -> None:
    silent = {"config.workload.name": None, "config.training.seed": None}
    assert refused(side("a", {}), side("b", silent)) == []
    with pytest.raises(InputError, match=r"header.world_size is 2 in a/0, 4 in b/0"):
        refused(side("a", {}), side("b", silent | {"header.world_size": 4}))
    wide = {"config.workload.width": 64}
    with pytest.raises(InputError, match=r"width is '\(absent\)' in a/0, 64 in b/1"):
        refused(side("a", {}), side("b", silent, wide))
