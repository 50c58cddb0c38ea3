"""Injected faults of the emulated fabric: collectives of one kind, or of one range of sizes, take longer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from aorta.config.groups.fabric import fabric_rules
from aorta.config.schema import Config, EmulatedFabric, Mode
from aorta.instrument.emulation.network import EmulatedNetwork

RANKS = (0, 1)


def cost(kind: str, size: int, **changes: Any) -> int:
    return EmulatedNetwork(EmulatedFabric(**changes), 0, 2, None).cost_ns(kind, size, RANKS, 0)


@pytest.mark.parametrize(
    ("given", "slow"),
    [
        ({"slow_kind": "reducescatter"}, {("reducescatter", 10), ("reducescatter", 1000)}),
        ({"slow_min_bytes": 1000}, {("allgather", 1000), ("reducescatter", 1000)}),
        ({"slow_max_bytes": 999}, {("allgather", 10), ("reducescatter", 10)}),
        ({"slow_kind": "allgather", "slow_min_bytes": 10, "slow_max_bytes": 10}, {("allgather", 10)}),
        ({}, {("allgather", 10), ("allgather", 1000), ("reducescatter", 10), ("reducescatter", 1000)}),
    ],
)
def test_only_what_matches_is_slow(given: dict[str, Any], slow: set[tuple[str, int]]) -> None:
    for kind in ("allgather", "reducescatter"):
        for size in (10, 1000):
            factor = 3 if (kind, size) in slow else 1
            assert cost(kind, size, slow_factor=3.0, **given) == factor * cost(kind, size)


def test_it_multiplies_with_the_jitter() -> None:
    plain, slow = cost("allreduce", 10**6, jitter=0.2), cost("allreduce", 10**6, jitter=0.2, slow_factor=2.0)
    assert slow == pytest.approx(2 * plain, abs=1)


def broken(**changes: Any) -> list[str]:
    config = SimpleNamespace(fabric=EmulatedFabric(**changes), instrument=SimpleNamespace(mode=Mode.dedicated))
    return list(fabric_rules(cast("Config", config), 2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slow_factor": 0.0}, "fabric.slow_factor=0.0: must be greater than 0 and finite; 1 changes nothing"),
        ({"slow_factor": float("nan")}, "fabric.slow_factor=nan: must be greater than 0"),
        ({"slow_factor": float("inf")}, "fabric.slow_factor=inf: must be greater than 0"),
        ({"slow_factor": 2.0, "slow_kind": "all_reduce"}, "fabric.slow_kind=all_reduce: must be one of allreduce, "),
        ({"slow_factor": 2.0, "slow_min_bytes": -1}, "fabric.slow_min_bytes=-1: must be at least 0"),
        ({"slow_factor": 2.0, "slow_max_bytes": -1}, "fabric.slow_max_bytes=-1: must be at least 0"),
        (
            {"slow_factor": 2.0, "slow_min_bytes": 5, "slow_max_bytes": 4},
            "fabric.slow_max_bytes=4: must be at least fabric.slow_min_bytes=5",
        ),
        ({"slow_kind": "allgather"}, "fabric.slow_kind=allgather: changes nothing at fabric.slow_factor=1"),
        ({"slow_min_bytes": 5}, "fabric.slow_min_bytes=5: changes nothing at fabric.slow_factor=1"),
    ],
)
def test_a_broken_rule_says_key_value_and_what_is_allowed(changes: dict[str, Any], message: str) -> None:
    (said,) = broken(**changes)
    assert said.startswith(message)


def test_what_is_allowed() -> None:
    assert broken() == []
    assert broken(slow_factor=0.5, slow_kind="barrier", slow_min_bytes=0, slow_max_bytes=0) == []
