"""Real runs on the emulated fabric, each with one injected fault: attribution names it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from aorta.analysis.aggregate import LabelledRun
from aorta.analysis.attribution import NO_ROW
from aorta.documents.explanations import ExposedBreakdown
from aorta.read.record import load_run
from tests.analysis.test_attribution import attributed
from tests.known_answers.again import each_undisturbed
from tests.runs import train

pytestmark = [pytest.mark.dist, pytest.mark.alone, pytest.mark.thorough]
FABRIC = (
    "parallel=fsdp",
    "fabric=emulated",
    "fabric.inter_latency_us=12000",  # the backend of two busy cores is quicker than that, most of the time
    "fabric.inter_bandwidth_gb_per_s=0.1",
    "workload.vocab_size=4000",  # 1.1 MB, where a layer of the encoder has 0.13
)
LARGE_BYTES = 500_000


FAULTS: dict[str, tuple[str, ...]] = {
    "kind": ("fabric.slow_factor=3", "fabric.slow_kind=reducescatter"),
    "straggler": ("fabric.straggler_rank=1", "fabric.straggler_ms=30"),
    "block": ("fabric.slow_factor=4", f"fabric.slow_min_bytes={LARGE_BYTES}"),
}
Pair = tuple[LabelledRun, LabelledRun]
"""A run without a fault, and one with it."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    """Of each fault; a few steps of ranks on two busy cores, so others may disturb them."""

    def measure(folder: Path, faults: Sequence[str]) -> dict[str, Pair]:
        even = taken(folder, "even")
        return {fault: (even, taken(folder, fault, *FAULTS[fault])) for fault in faults}

    def holds(fault: str, pair: Pair) -> None:
        CHECKS[fault](pair)

    return each_undisturbed(tmp_path_factory, "injected", list(FAULTS), measure, holds)


def taken(folder: Path, name: str, *words: str) -> LabelledRun:
    train(folder / name, *FABRIC, *words)
    return LabelledRun(name, load_run(folder / name))


def against_even(pair: Pair) -> ExposedBreakdown:
    found = attributed(*pair)
    assert found.difference_ms > 5
    assert not any(NO_ROW in row.what for row in found.dimensions["collective"])
    return found


def names_a_slow_kind(pair: Pair) -> None:
    found = against_even(pair)
    slow = [row for row in found.dimensions["collective"] if row.what.startswith("reducescatter of ")]
    assert sum(row.share for row in slow) > 0.6
    parts = {row.what: row.difference_ms for row in found.dimensions["part"]}
    assert "transfer" in parts
    assert parts["transfer"] > parts.get("waiting for peers", 0)


def names_a_straggler(pair: Pair) -> None:
    found = against_even(pair)
    assert found.dimensions["part"][0].what == "waiting for peers"
    assert found.dimensions["rank"][0].what == "rank 0"  # the one that waits


def names_a_block(pair: Pair) -> None:
    found = against_even(pair)
    of_block = [row for row in found.dimensions["region"] if row.what.endswith(" of embedding")]
    assert sum(row.share for row in of_block) > 0.6
    assert " MB on " in found.dimensions["collective"][0].what


CHECKS = {"kind": names_a_slow_kind, "straggler": names_a_straggler, "block": names_a_block}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_fault_is_the_largest_row(runs: dict[str, Pair], fault: str) -> None:
    CHECKS[fault](runs[fault])
