"""FLOPs of a step from its manifest, held to torch's own counter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from aorta.analysis.attribution.attribute import NO_MANIFEST, flops_per_rank_step
from aorta.config.schema import Ranking
from aorta.workload.ranking import ListwiseLoss, RankingTransformer

SHAPE = Ranking(
    model_dim=32, num_heads=4, num_layers=3, mlp_hidden_dim=48, vocab_size=50, embedding_dim=12, dense_features=5,
    categorical_features=3, dropout=0.0,
)  # fmt: skip
BATCH, ITEMS = 6, 7


def manifest(**changes: Any) -> dict[str, Any]:
    workload = {name: getattr(SHAPE, name) for name in SHAPE.__dataclass_fields__}
    training = {"batch_size": BATCH, "gradient_accumulation": 2}
    config = {
        "workload": workload,
        "training": training,
        "dataset": {"sequence_length": ITEMS},
        "parallel": {"strategy": "ddp"},
    }
    return {"config": {**config, **changes}, "plan": {}}


def test_the_count_is_that_of_torch() -> None:
    model, loss = RankingTransformer(SHAPE), ListwiseLoss()
    dense = torch.randn(BATCH, ITEMS, SHAPE.dense_features)
    categorical = torch.randint(SHAPE.vocab_size, (BATCH, ITEMS, SHAPE.categorical_features))
    # By products of matrices, which the counter knows; the fused kernels recompute in backward.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        loss(model(dense, categorical), torch.randn(BATCH, ITEMS)).backward()
    assert flops_per_rank_step(manifest()) == (2 * counter.get_total_flops(), None)


def test_a_plan_that_knows_its_work_is_believed() -> None:
    assert flops_per_rank_step({"plan": {"flops_per_step": 10**12}}) == (1e12, None)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (None, NO_MANIFEST),
        ({}, "does not count the FLOPs of workload None"),
        (manifest(workload={"name": "resnet18"}), "does not count the FLOPs of workload 'resnet18'"),
        (manifest(parallel={"strategy": "tp"}), "ranks share a layer"),
        (manifest(parallel={"strategy": "pp"}), "ranks compute different layers"),
        (manifest(training={}), "lacks a size that the count needs"),
    ],
)
def test_what_is_not_known_is_null_with_a_reason(given: Any, reason: str) -> None:
    count, why = flops_per_rank_step(given)
    assert count is None
    assert reason in str(why)
