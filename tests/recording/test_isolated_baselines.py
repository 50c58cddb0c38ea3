"""Isolated baselines behind real trainings: training does not notice them, and each is what it says it is."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from aorta.records.schema import Step
from tests.recording.isolated import CASES, COMPARED
from tests.recording.test_endings import PATIENCE_S, start, wait_for_steps
from tests.runs import once, program, record, succeeded

pytestmark = pytest.mark.dist
FOUR = ("hsdp", "fsdp_tp")
TWO = tuple(name for name in CASES if name not in FOUR)
EVERY = [pytest.param(name, marks=pytest.mark.slow) if name in FOUR else name for name in CASES]
"""Four ranks on two cores take longest."""
STEPS = 3


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory, name: str) -> Path:
    """That of a case. Cases of two ranks run in one launch, those of four in another, when first asked for."""
    ranks, names = (4, FOUR) if name in FOUR else (2, TWO)

    def launch(folder: Path) -> None:
        succeeded(program("tests.recording.isolated", str(folder), *names, ranks=ranks))

    return once(tmp_path_factory, f"isolated-{ranks}", launch)


def ranks_of(name: str) -> range:
    return range(4 if name in FOUR else 2)


def issued(step: Step) -> Counter[tuple[str, int, str, str | None]]:
    return Counter((row.kind, row.bytes, row.group, row.dtype) for row in step.collectives)


def digests(folder: Path, name: str, rank: int) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((folder / f"{name}.rank_{rank}.json").read_text())
    return told


@pytest.mark.thorough
@pytest.mark.parametrize("name", EVERY)
def test_what_training_depends_on_is_put_back(folder: Path, name: str) -> None:
    for rank in ranks_of(name):
        told = digests(folder, name, rank)["with"]
        assert told["after"] == told["before"]
        assert told["later"]["optimizer"] != told["after"]["optimizer"]


@pytest.mark.parametrize("name", COMPARED)
def test_training_is_bit_identical_with_and_without(folder: Path, name: str) -> None:
    for rank in ranks_of(name):
        told = digests(folder, name, rank)
        assert told["with"]["before"] == told["without"]["before"]
        assert told["with"]["later"] == told["without"]["later"]
        with_, without = (record(folder / f"{name}-{form}", rank) for form in ("with", "without"))
        assert [step.loss for step in with_.steps] == [step.loss for step in without.steps]
        assert all(step.loss is not None for step in with_.steps)


@pytest.mark.parametrize("name", EVERY)
def test_the_phases_follow_the_training_with_their_own_warmup(folder: Path, name: str) -> None:
    phases = ["compute_only"] if name == "none" else ["compute_only", "comm_only"]
    for rank in ranks_of(name):
        kept = record(folder / f"{name}-with", rank)
        assert [(s.phase, s.global_step, s.warmup) for s in kept.isolated] == [
            (phase, number, number < 1) for phase in phases for number in range(STEPS)
        ]
        assert kept.footer is not None
        assert kept.footer.steps_written == len(kept.steps) + len(kept.isolated)
        assert kept.footer.reason == "completed"
        ends = [step.end_mono_ns for step in (*kept.steps, *kept.isolated)]
        assert ends == sorted(ends)


@pytest.mark.parametrize("name", EVERY)
def test_a_compute_only_step_computes_all_and_issues_nothing(folder: Path, name: str) -> None:
    for rank in ranks_of(name):
        kept = record(folder / f"{name}-with", rank)
        blocks = sorted((span.block, span.phase) for span in kept.steps[-1].compute)
        for step in kept.isolated[:STEPS]:
            # What passed the seam and what the backends counted: nothing.
            assert (step.coverage.seen, step.coverage.issued, step.coverage.complete) == (0, 0, True)
            assert (step.overlap["comm_ms"], step.overlap["overlap_ratio"]) == (0, None)
            assert sorted((span.block, span.phase) for span in step.compute) == blocks
            assert {span.name for span in step.aux} == {span.name for span in kept.steps[-1].aux}


@pytest.mark.parametrize("name", [name for name in EVERY if name != "none"])
def test_a_comm_only_step_issues_what_a_step_of_training_does(folder: Path, name: str) -> None:
    for rank in ranks_of(name):
        kept = record(folder / f"{name}-with", rank)
        wanted = issued(kept.steps[-1])
        assert wanted
        for step in kept.isolated[STEPS:]:
            if name == "ddp-after":  # its only step of training was DDP's first, with one bucket for all gradients
                assert sum(r.bytes for r in step.collectives) == sum(r.bytes for r in kept.steps[-1].collectives)
            else:
                assert issued(step) == wanted
            assert step.coverage.complete, step.coverage.reason
            assert (step.compute, step.aux, step.loss, step.lr) == ([], [], None, None)
            assert step.reasons["loss"] == "a comm_only step trains nothing"
        orders = [[(r.kind, r.bytes, r.group) for r in step.collectives] for step in kept.isolated[STEPS:]]
        assert all(order == orders[0] for order in orders)


@pytest.mark.thorough
def test_a_signal_during_a_phase_ends_it_on_all_ranks_after_the_same_step(tmp_path: Path) -> None:
    run = start(tmp_path, "training.max_steps=4", "baseline=true", "baseline.steps=100000")
    try:
        os.kill(wait_for_steps(tmp_path, 12), signal.SIGTERM)
        run.communicate(timeout=PATIENCE_S)
    finally:
        run.terminate()  # the launcher ends its ranks
        run.wait(timeout=PATIENCE_S)
    kept = [record(tmp_path, rank) for rank in (0, 1)]
    for one in kept:
        assert one.footer is not None
        assert (one.footer.reason, one.footer.signal, one.footer.exit_code) == ("signal", "SIGTERM", 143)
        assert len(one.steps) == 4
        assert {step.phase for step in one.isolated} == {"compute_only"}
    assert len(kept[0].isolated) == len(kept[1].isolated) > 0


@pytest.mark.thorough
def test_a_rank_that_fails_in_a_phase_leaves_nobody_waiting(tmp_path: Path) -> None:
    # A hang would be the launch's timeout.
    done = program("tests.recording.isolated", str(tmp_path), "fail", launcher="torchrun")
    assert done.returncode != 0
    kept = [record(tmp_path, rank) for rank in (0, 1)]
    for one in kept:
        assert one.footer is not None
        assert len(one.steps) == 4
    assert kept[1].footer is not None
    assert "made to fail" in (kept[1].footer.error or "")
    assert kept[0].footer is not None
    # Told through the store, or ended by the launcher in between, whichever came first.
    assert kept[0].footer.reason == "signal" or "rank 1 failed: RuntimeError: made to fail" in (
        kept[0].footer.error or ""
    )
