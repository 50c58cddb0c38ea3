"""Whole runs on two gloo ranks: what is reduced, gathered and hidden, and how accumulation and precision train."""

from __future__ import annotations

import json
import math
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


def test_ddp_hides_part_of_its_all_reduce_and_none_without_overlap(tmp_path_factory: pytest.TempPathFactory) -> None:
    # The default sizes: a small model's all-reduce can end before the next block begins to compute.
    sizes = ("workload.model_dim=128", "workload.num_layers=4", "workload.mlp_hidden_dim=512", "training.max_steps=16")

    def measure(folder: Path) -> Path:
        train(folder / "on", "parallel.overlap=true", *sizes)
        return folder

    def hides(folder: Path) -> None:
        for rank in (0, 1):
            on = [s for s in record(folder / "on", rank).steps if not s.warmup]
            assert sum(s.overlap["compute_allreduce_ms"] or 0 for s in on) > 0
            assert sum(s.overlap["overlap_ratio"] or 0 for s in on) / len(on) > 0.1

    folder = undisturbed(tmp_path_factory, "hides", measure, hides)
    hides(folder)
    train(folder / "off", "parallel.overlap=false", *sizes)
    for rank in (0, 1):
        on, off = ([s for s in record(folder / name, rank).steps if not s.warmup] for name in ("on", "off"))
        assert all(s.overlap["overlap_ratio"] == 0 for s in off)
        assert all(s.overlap["exposed_allreduce_ms"] == s.overlap["allreduce_ms"] for s in off)
        # The same buckets, the same arithmetic: only the time moved.
        assert [(c.kind, c.bytes) for c in on[-1].collectives] == [(c.kind, c.bytes) for c in off[-1].collectives]
    assert losses(folder / "on") == losses(folder / "off")


def test_fsdp_hides_something_and_nothing_without_overlap(tmp_path_factory: pytest.TempPathFactory) -> None:
    sizes = ("workload.model_dim=128", "workload.num_layers=4", "workload.mlp_hidden_dim=512")

    def measure(folder: Path) -> Path:
        train(folder / "on", "parallel=fsdp", *sizes)
        return folder

    def hides(folder: Path) -> None:
        on = [s for s in record(folder / "on").steps if not s.warmup]
        assert sum(s.overlap["compute_allgather_ms"] or 0 for s in on) > 0

    folder = undisturbed(tmp_path_factory, "hides", measure, hides)
    hides(folder)
    train(folder / "off", "parallel=fsdp", "parallel.overlap=false", *sizes)
    assert all(s.overlap["compute_comm_ms"] == 0 for s in record(folder / "off").steps if not s.warmup)
    assert losses(folder / "on") == losses(folder / "off")


def test_accumulated_micro_batches_train_like_one_batch(tmp_path: Path) -> None:
    words = ("workload.dropout=0", "scheduler.warmup_steps=1", "training.max_steps=6")
    train(tmp_path / "whole", "training.batch_size=8", *words)
    train(tmp_path / "parts", "training.batch_size=4", "training.gradient_accumulation=2", *words)

    def mean_losses(folder: Path) -> list[float]:
        return [(a or 0) / 2 + (b or 0) / 2 for a, b in zip(losses(folder, 0), losses(folder, 1), strict=True)]

    # The same samples a step over both ranks, summed in another order.
    assert mean_losses(tmp_path / "parts") == pytest.approx(mean_losses(tmp_path / "whole"), rel=1e-4)


@pytest.mark.parametrize(
    ("strategy", "precision"),
    [
        ("ddp", "fp16"),
        ("fsdp", "bf16"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("ddp", "bf16"), ("fsdp1", "fp16"), ("fsdp", "fp16"), ("tp", "bf16"))
        ),
    ],
)
def test_mixed_precision_trains(tmp_path: Path, strategy: str, precision: str) -> None:
    train(tmp_path, f"parallel={strategy}", f"training.mixed_precision={precision}", "training.max_steps=4")
    assert all(math.isfinite(loss or math.nan) for loss in losses(tmp_path))
