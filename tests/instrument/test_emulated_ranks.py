"""One process that stands for all ranks: it issues what rank 0 of real ranks does, and says what it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aorta.instrument.emulation.stand_in import NO_VALUES
from aorta.read.record import load_run
from tests.runs import record, train
from tests.trained_ways import TINY

pytestmark = [pytest.mark.dist]
WORDS = (
    *TINY,
    "training.max_steps=4",
    "telemetry.warmup_steps=1",
    "dataset.num_samples=512",
    "instrument.native=false",
)
LATENCY_US = 500
EMULATED = ("fabric=emulated", f"fabric.inter_latency_us={LATENCY_US}")
WAYS = {
    "ddp": (2, ()),
    "fsdp": (2, ()),
    "tp": (2, ()),
    "hsdp": (4, ()),
    "fsdp_cp": (4, ("workload=gpt",)),
}
SHORT = ("ddp", "fsdp", "tp")


def issued(folder: Path) -> list[list[tuple[str, int, str | None, tuple[int, ...]]]]:
    """Kind, bytes, type and ranks of what each step of rank 0 issued, by group."""
    one = record(folder)
    assert one.footer is not None
    return [
        sorted((row.kind, row.bytes, row.dtype, tuple(one.footer.groups[row.group])) for row in step.collectives)
        for step in one.steps
    ]


@pytest.mark.parametrize(
    "strategy", [name if name in SHORT else pytest.param(name, marks=pytest.mark.thorough) for name in WAYS]
)
def test_it_issues_what_a_rank_of_as_many_processes_does(tmp_path: Path, strategy: str) -> None:
    ranks, words = WAYS[strategy]
    words = (*WORDS, f"parallel={strategy}", *words)
    train(tmp_path / "real", *words, ranks=ranks)
    train(tmp_path / "one", *words, *EMULATED, f"fabric.ranks={ranks}", ranks=1)
    assert issued(tmp_path / "one") == issued(tmp_path / "real")
    plans = [json.loads((tmp_path / name / "run.json").read_text())["plan"] for name in ("real", "one")]
    assert plans[0] == plans[1]  # the mesh, and how many parameters there are
    one = record(tmp_path / "one")
    assert (one.header.emulated_ranks, one.header.world_size) == (ranks, 1)
    for step in one.steps:
        assert step.coverage.complete, step.coverage.reason
        assert step.coverage.seen == step.coverage.issued == len(step.collectives)
        assert (step.loss, step.grad_norm) == (None, None)
        assert {step.reasons["loss"], step.reasons["grad_norm"]} == {NO_VALUES}


def test_many_ranks_with_the_compiled_interceptor_and_what_the_report_says(tmp_path: Path) -> None:
    words = (*WORDS, *EMULATED, "parallel=fsdp", "instrument.native=true", "fabric.ranks=64")
    train(tmp_path, *words, "baseline=true", "baseline.steps=2", ranks=1)
    manifest = json.loads((tmp_path / "run.json").read_text())
    assert (manifest["emulated_ranks"], manifest["backend"], manifest["warnings"]) == (64, "fake", [])
    for step in record(tmp_path).steps:
        for row in step.collectives:
            assert row.end_ns is not None
            # A ring of 64 ranks: 63 messages, one behind another.
            assert row.end_ns - row.issue_ns >= 63 * LATENCY_US * 1000
    run = load_run(tmp_path)
    assert run.health.ranks == "one rank of 64, emulated"
    first, second, *others = run.health.notes
    assert first.startswith("ONE RANK OF 64, EMULATED: all ranks are assumed to be as fast as this one")
    assert second.startswith("EMULATED FABRIC: ")
    assert not [note for note in others if "one rank: it has no other rank" in note or "missing" in note]


def test_nothing_is_measured_and_collectives_still_take_as_long(tmp_path: Path) -> None:
    """The backend is emulated, and not what sees it: a run with `instrument.mode=off` is the reference of its cost."""
    train(tmp_path, *WORDS, *EMULATED, "parallel=ddp", "instrument.mode=off", "fabric.ranks=8", ranks=1)
    for step in record(tmp_path).steps:
        assert not step.collectives
        assert step.coverage.issued
        assert step.end_mono_ns - step.start_mono_ns >= 14 * LATENCY_US * 1000
