"""A run that is resumed goes on as if it had never stopped: the same losses and gradient norms, to the last digit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runner.test_every_strategy import TINY
from tests.runs import record, train

pytestmark = [pytest.mark.dist, pytest.mark.slow]
# Dropout and the schedule go on too, and the optimizer's moments are those of a sharded model.
WORDS = (*TINY, "training.max_steps=6", "training.checkpoint_interval=3", "training.epochs=2")
CASES = [
    pytest.param("tp", "workload.dropout=0.1", 2, id="tp"),
    pytest.param("hsdp", "workload.dropout=0.1", 4, id="hsdp"),
    pytest.param("fsdp_tp", "workload.dropout=0.1", 4, id="fsdp_tp"),
    pytest.param("fsdp_cp", "workload=gpt", 4, id="fsdp_cp"),
]


@pytest.mark.parametrize(("strategy", "workload", "ranks"), CASES)
def test_a_resumed_run_continues_bit_identically(tmp_path: Path, strategy: str, workload: str, ranks: int) -> None:
    words = (*WORDS, f"parallel={strategy}", workload)
    train(tmp_path, *words, ranks=ranks)
    whole = [record(tmp_path, rank).steps for rank in range(ranks)]
    assert [step.global_step for step in whole[0]] == list(range(6))
    train(tmp_path, *words, "training.start_step=3", ranks=ranks)
    for rank in range(ranks):
        resumed = record(tmp_path, rank)
        assert resumed.header.start_step == 3
        for got, expected in zip(resumed.steps, whole[rank][3:], strict=True):
            assert got.global_step == expected.global_step
            assert None not in (got.loss, got.grad_norm)
            assert (got.loss, got.grad_norm, got.lr) == (expected.loss, expected.grad_norm, expected.lr)
    # What is compared changes from step to step: a run that stood still would agree with itself.
    assert len({step.loss for step in whole[0]}) == 6
