"""A run that is resumed goes on as if it had never stopped: the same losses and gradient norms, to the last digit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runner.test_every_strategy import TINY
from tests.runs import record, train
from tests.trained_ways import PIPELINES

pytestmark = [pytest.mark.dist, pytest.mark.slow]
# Dropout and the schedule go on too, and the optimizer's moments are those of a sharded model.
WORDS = (*TINY, "training.max_steps=6", "training.checkpoint_interval=3", "training.epochs=2")
DROPOUT, ONE_BATCH = "workload.dropout=0.1", "training.gradient_accumulation=1"
CASES = {
    "tp": (2, (DROPOUT,)),
    "hsdp": (4, (DROPOUT,)),
    "fsdp_tp": (4, (DROPOUT,)),
    "fsdp_cp": (4, ("workload=gpt",)),
    # One expert on a rank: each is cut between the groups.
    "fsdp_ep": (4, ("workload=moe", "workload.num_experts=2")),
    "pp": (2, (DROPOUT, ONE_BATCH)),
    "fsdp_pp": (4, (DROPOUT, ONE_BATCH)),
}


@pytest.mark.parametrize("strategy", CASES)
def test_a_resumed_run_continues_bit_identically(tmp_path: Path, strategy: str) -> None:
    ranks, words = CASES[strategy]
    words = (*WORDS, f"parallel={strategy}", *words)
    train(tmp_path, *words, ranks=ranks)
    with_the_loss = range(ranks - ranks // 2 if strategy in PIPELINES else 0, ranks)
    whole = [record(tmp_path, rank).steps for rank in range(ranks)]
    assert [step.global_step for step in whole[0]] == list(range(6))
    train(tmp_path, *words, "training.start_step=3", ranks=ranks)
    for rank in range(ranks):
        resumed = record(tmp_path, rank)
        assert resumed.header.start_step == 3
        for got, expected in zip(resumed.steps, whole[rank][3:], strict=True):
            assert got.global_step == expected.global_step
            assert got.grad_norm is not None
            assert (got.loss is None) == (rank not in with_the_loss)
            assert (got.loss, got.grad_norm, got.lr) == (expected.loss, expected.grad_norm, expected.lr)
    # What is compared changes from step to step: a run that stood still would agree with itself.
    assert all(len({step.loss for step in whole[rank]}) == 6 for rank in with_the_loss)
