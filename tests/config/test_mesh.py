"""Which worlds fit which strategy, and how many batches they train on at once."""

from __future__ import annotations

import pytest

from aorta.config.mesh import data_parallel_size, pipeline_stages
from aorta.config.resolve import resolve, steps_planned
from aorta.config.schema import FSDPPP, PP


@pytest.mark.parametrize(
    ("world_size", "words", "size"),
    [
        (1, "parallel=ddp", 1),
        (4, "parallel=ddp", 4),
        (4, "parallel=hsdp", 4),
        (4, "parallel=tp", 1),
        (4, "parallel=pp", 1),
        (4, "parallel=fsdp_pp", 2),
        (4, "parallel=fsdp_ep workload=moe", 4),
        (4, "parallel=fsdp_tp", 2),
        (4, "parallel=fsdp_tp parallel.tp_size=4", 1),
        (6, "parallel=fsdp_tp", 3),
        (4, "parallel=cp workload=gpt", 1),
        (4, "parallel=fsdp_cp workload=gpt", 2),
        (8, "parallel=fsdp_cp parallel.cp_size=4 workload=moe", 2),
    ],
)
def test_ranks_that_share_layers_share_a_batch(composed, world_size, words, size):
    config = resolve(composed(*words.split(), "training.max_steps=null", "dataset.num_samples=240"), world_size).config
    assert data_parallel_size(config, world_size) == size
    assert steps_planned(config, world_size) == 240 // (8 * size)


@pytest.mark.parametrize(
    ("parallel", "world_size", "stages"),
    [
        (PP(), 2, [[0], [1]]),
        (PP(stages_per_rank=2), 2, [[0, 2], [1, 3]]),
        (PP(schedule="zbv_zero_bubble", stages_per_rank=2), 2, [[0, 3], [1, 2]]),
        (FSDPPP(), 4, [[0], [0], [1], [1]]),
        (FSDPPP(stages_per_rank=2), 4, [[0, 2], [0, 2], [1, 3], [1, 3]]),
        (FSDPPP(pp_size=3), 6, [[0], [0], [1], [1], [2], [2]]),
    ],
)
def test_ranks_that_follow_one_another_have_the_stages_of_pipelines_beside_each_other(parallel, world_size, stages):
    assert [pipeline_stages(parallel, rank, world_size) for rank in range(world_size)] == stages
