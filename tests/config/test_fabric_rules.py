"""Rules between the keys of `fabric=emulated`."""

from __future__ import annotations

import re

import pytest

from aorta.config.resolve import resolve
from aorta.config.schema import Algorithm, EmulatedFabric
from aorta.errors import ConfigError

pytestmark = pytest.mark.thorough

EMULATED = "fabric=emulated"
BROKEN = [
    *(
        (f"intra_bandwidth_gb_per_s={value}", "must be greater than 0 and finite")
        for value in ("0", "-1", "inf", "nan")
    ),
    ("inter_bandwidth_gb_per_s=0", "must be greater than 0 and finite"),
    *((f"{key}=-1", "must be at least 0 and finite") for key in ("intra_latency_us", "inter_latency_us")),
    ("inter_latency_us=nan", "must be at least 0 and finite"),
    ("ranks_per_node=0", "must be at least 1"),
    *((f"jitter={value}", r"must be in [0, 1)") for value in ("-0.1", "1")),
    ("emulated_world_size=1", "must not be below the real world size 2; null takes the real one"),
    *((f"straggler_rank={rank}", "must be a rank of this run, 0 to 1") for rank in (-1, 2)),
    ("straggler_ms=1", "no rank is late by it; set fabric.straggler_rank"),
]


@pytest.fixture(autouse=True)
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")


@pytest.mark.parametrize(("word", "message"), BROKEN, ids=[word for word, _ in BROKEN])
def test_a_broken_rule_says_key_value_and_what_is_allowed(composed, word, message):
    key, _ = word.split("=")
    with pytest.raises(ConfigError, match=rf"\A[^\n]*\n  fabric\.{key}=\S+: {re.escape(message)}\Z"):
        resolve(composed(EMULATED, f"fabric.{word}"))


def test_a_range_of_bytes_must_not_be_empty(composed):
    words = ("fabric.slow_factor=2", "fabric.slow_min_bytes=8")
    with pytest.raises(ConfigError, match=r"fabric.slow_max_bytes=7: must be at least fabric.slow_min_bytes=8"):
        resolve(composed(EMULATED, *words, "fabric.slow_max_bytes=7"))
    assert resolve(composed(EMULATED, *words, "fabric.slow_max_bytes=8")).config.fabric.slow_max_bytes == 8


def test_what_is_allowed(composed):
    words = ("emulated_world_size=512", "straggler_rank=1", "straggler_ms=3", "jitter=0.5", "algorithm=tree")
    fabric = resolve(composed(EMULATED, *(f"fabric.{word}" for word in words))).config.fabric
    assert fabric == EmulatedFabric(
        emulated_world_size=512, straggler_rank=1, straggler_ms=3.0, jitter=0.5, algorithm=Algorithm.tree
    )


def test_without_the_seam_nothing_can_be_delayed(composed):
    with pytest.raises(ConfigError, match=r"fabric=emulated .* set instrument\.mode=observe or dedicated"):
        resolve(composed(EMULATED, "instrument.mode=off"))


def test_the_real_fabric_needs_no_seam(composed):
    assert resolve(composed("instrument.mode=off")).config.fabric.kind == "none"
