"""Whole runs on two gloo ranks: what is reduced, gathered and hidden, and how accumulation and precision train."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.known_answers.again import undisturbed
from tests.runs import losses, record, train

pytestmark = pytest.mark.dist


def test_fsdp_gathers_twice_and_scatters_once_per_block(tmp_path: Path) -> None:
    train(tmp_path, "parallel=fsdp", "parallel.reshard_after_forward=true")
    blocks = len(json.loads((tmp_path / "run.json").read_text())["plan"]["sharded_blocks"])
    for step in record(tmp_path).steps:
        kinds = Counter(c.kind for c in step.collectives)
        # One all-reduce: the norm of the sharded gradients.
        assert kinds == {"allgather": 2 * blocks, "reducescatter": blocks, "allreduce": 1}
        gathered = sum(c.bytes for c in step.collectives if c.kind == "allgather")
        scattered = sum(c.bytes for c in step.collectives if c.kind == "reducescatter")
        assert gathered == 2 * scattered


@pytest.mark.parametrize(("strategy", "kind"), [("ddp", "allreduce"), ("fsdp", "allgather")])
def test_with_overlap_part_of_it_is_hidden_and_without_nothing(
    tmp_path_factory: pytest.TempPathFactory, strategy: str, kind: str
) -> None:
    # The default sizes: a small model's all-reduce can end before the next block begins to compute.
    sizes = ("workload.model_dim=128", "workload.num_layers=4", "workload.mlp_hidden_dim=512", "training.max_steps=16")

    def trained(folder: Path, overlap: str) -> Path:
        train(folder, f"parallel={strategy}", f"parallel.overlap={overlap}", *sizes)
        return folder

    def hides(folder: Path) -> None:
        for rank in (0, 1):
            on = [s for s in record(folder, rank).steps if not s.warmup]
            assert any((s.overlap[f"compute_{kind}_ms"] or 0) > 0 and (s.overlap["overlap_ratio"] or 0) > 0 for s in on)

    with_overlap = undisturbed(tmp_path_factory, "hides", lambda folder: trained(folder / "on", "true"), hides)
    hides(with_overlap)
    without = trained(with_overlap.with_name("off"), "false")
    for rank in (0, 1):
        on, off = ([s for s in record(folder, rank).steps if not s.warmup] for folder in (with_overlap, without))
        assert all(s.overlap["overlap_ratio"] == 0 for s in off)
        assert all(s.overlap[f"exposed_{kind}_ms"] == s.overlap[f"{kind}_ms"] for s in off)
        # The same buckets, the same arithmetic: only the time moved.
        rows = [sorted((c.kind, c.bytes) for c in steps[-1].collectives) for steps in (on, off)]
        assert rows[0] == rows[1]
    assert losses(with_overlap) == losses(without)


def test_accumulated_micro_batches_train_like_one_batch(tmp_path: Path) -> None:
    words = ("workload.dropout=0", "scheduler.warmup_steps=1", "training.max_steps=6")
    train(tmp_path / "whole", "training.batch_size=8", *words)
    train(tmp_path / "parts", "training.batch_size=4", "training.gradient_accumulation=2", *words)

    def mean_losses(folder: Path) -> list[float]:
        return [(a or 0) / 2 + (b or 0) / 2 for a, b in zip(losses(folder, 0), losses(folder, 1), strict=True)]

    # The same samples a step over both ranks, summed in another order.
    assert mean_losses(tmp_path / "parts") == pytest.approx(mean_losses(tmp_path / "whole"), rel=1e-4)
