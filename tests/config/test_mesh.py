"""Which worlds fit which strategy, and how many batches they train on at once."""

from __future__ import annotations

import pytest

from aorta.config.mesh import data_parallel_size, pipeline_stages
from aorta.config.resolve import resolve, steps_planned
from aorta.config.schema import FSDPPP, PP
from aorta.errors import ConfigError

BROKEN = [
    (1, "parallel=hsdp", r"parallel\.replicas=2: 1 rank\(s\) cannot form copies.*multiple of 2 ranks"),
    (
        3,
        "parallel=hsdp",
        r"parallel\.replicas=2: 3 rank\(s\) cannot form copies.*or set parallel\.replicas to a divisor",
    ),
    (4, "parallel=hsdp parallel.replicas=0", r"parallel\.replicas=0: must be at least 1"),
    (2, "parallel=hsdp parallel.forward_prefetch=-1", r"parallel\.forward_prefetch=-1: must be at least 0"),
    (3, "parallel=fsdp_tp", r"parallel\.tp_size=2: 3 rank\(s\) cannot form groups.*multiple of 2 ranks"),
    (4, "parallel=fsdp_tp parallel.tp_size=-2", r"parallel\.tp_size=-2: must be at least 1"),
    (3, "parallel=tp", r"workload\.num_heads=4: 3 ranks compute a layer together \(parallel=tp\).*a multiple of 3"),
    (4, "parallel=tp workload.mlp_hidden_dim=510", r"workload\.mlp_hidden_dim=510: 4 ranks .*hidden units.*of 4"),
    (4, "parallel=fsdp_tp workload.num_heads=1", r"workload\.num_heads=1: 2 ranks .*parallel=fsdp_tp.*of 2"),
    (2, "parallel=tp training.mixed_precision=fp16", r"training\.mixed_precision=fp16: parallel=tp .*use bf16"),
    (
        4,
        "parallel=fsdp_tp training.mixed_precision=fp16",
        r"training\.mixed_precision=fp16: parallel=fsdp_tp .*use bf16",
    ),
    (
        2,
        "parallel=fsdp1 compile.enabled=true parallel.use_orig_params=false",
        r"parallel\.use_orig_params=false: torch\.compile cannot .*set it to true",
    ),
    (
        2,
        "parallel=fsdp1 training.checkpoint_interval=5",
        r"training\.checkpoint_interval=5: torch does not .*parallel=fsdp",
    ),
    (2, "parallel=pp parallel.schedule=gpip", r"parallel\.schedule='gpip': must be one of gpipe, 1f1b, "),
    (2, "parallel=pp parallel.stages_per_rank=2", r"parallel\.stages_per_rank=2: parallel\.schedule=1f1b takes 1"),
    (2, "parallel=pp parallel.schedule=zbv_zero_bubble", r"stages_per_rank=1: .*zbv_zero_bubble takes 2"),
    (2, "parallel=pp parallel.microbatches=3", r"training\.batch_size=8: must be a multiple of .*microbatches=3"),
    (2, "parallel=pp parallel.microbatches=0", r"parallel\.microbatches=0: must be at least 1"),
    (8, "parallel=pp parallel.microbatches=8", r"num_layers=4: 8 rank\(s\) .* make 8 stages.*8 layers or more"),
    (4, "parallel=pp parallel.microbatches=2", r"parallel\.microbatches=2: .*=1f1b needs .*\(4\) or more"),
    (2, "parallel=pp training.gradient_accumulation=2", r"training\.gradient_accumulation=2: with parallel=pp"),
    (2, "parallel=pp training.mixed_precision=fp16", r"training\.mixed_precision=fp16: .*parallel=pp.*use bf16"),
    (2, "parallel=pp baseline.enabled=true", r"baseline\.enabled=true: a stage cannot compute alone"),
    (2, "parallel=pp workload=resnet18", r"parallel=pp: workload=resnet18 has no layers .*use workload=gpt"),
    (2, "parallel=pp workload=moe", r"workload=moe counts and balances .*use workload=gpt, or parallel=ep"),
    (2, "parallel=cp workload=gpt dataset.sequence_length=30", r"sequence_length=30: 2 ranks share .*multiple of 4"),
    (4, "parallel=cp workload=gpt dataset.sequence_length=20", r"sequence_length=20: 4 ranks share .*multiple of 8"),
    (4, "parallel=fsdp_cp workload=moe dataset.sequence_length=6", r"sequence_length=6: 2 ranks share .*multiple of 4"),
    (3, "parallel=fsdp_cp workload=gpt", r"parallel\.cp_size=2: 3 rank\(s\) cannot form groups that share sequences"),
    (4, "parallel=fsdp_cp workload=gpt parallel.cp_size=0", r"parallel\.cp_size=0: must be at least 1"),
    (2, "parallel=cp", r"parallel=cp: workload=ranking has no causal attention .*workload=gpt or moe, or parallel=ddp"),
    (2, "parallel=fsdp_cp workload=resnet18", r"parallel=fsdp_cp: workload=resnet18 has no causal attention"),
    (3, "parallel=fsdp_ep workload=moe", r"parallel\.ep_size=2: 3 rank\(s\) cannot form groups that share the experts"),
    (4, "parallel=fsdp_ep workload=moe parallel.ep_size=0", r"parallel\.ep_size=0: must be at least 1"),
    (4, "parallel=fsdp_ep workload=moe workload.num_experts=9", r"num_experts=9: 2 ranks .*parallel=fsdp_ep.*of 2"),
    (4, "parallel=fsdp_ep workload=gpt", r"parallel=fsdp_ep: workload=gpt has no experts .*use workload=moe"),
    (4, "parallel=fsdp_ep workload=moe compile.enabled=true", r"compile\.enabled=true: .*tokens of parallel=fsdp_ep"),
    (4, "parallel=fsdp_pp parallel.pp_size=3", r"parallel\.pp_size=3: 4 rank\(s\) cannot form pipelines"),
    (4, "parallel=fsdp_pp workload.num_layers=1", r"num_layers=1: 2 rank\(s\) .* make 2 stages.*2 layers or more"),
    (8, "parallel=fsdp_pp parallel.pp_size=4 parallel.microbatches=2", r"microbatches=2: .*1f1b needs .*\(4\)"),
    (4, "parallel=fsdp_pp training.gradient_accumulation=2", r"gradient_accumulation=2: with parallel=fsdp_pp"),
    (4, "parallel=fsdp_pp training.mixed_precision=fp16", r"mixed_precision=fp16: .*parallel=fsdp_pp.*use bf16"),
    (4, "parallel=fsdp_pp workload=moe", r"parallel=fsdp_pp: workload=moe counts and balances"),
    (4, "parallel=tp dataset.num_samples=7", r"needs 8 \(8 per micro-batch x 1 x 4 ranks, 4 ranks sharing a batch\)"),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("world_size", "words", "rule"), BROKEN)
def test_what_does_not_fit_is_refused_with_the_reason(composed, monkeypatch, world_size, words, rule):
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    with pytest.raises(ConfigError, match=rule):
        resolve(composed(*words.split()))


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
def test_ranks_that_share_layers_share_a_batch(composed, monkeypatch, world_size, words, size):
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    config = resolve(composed(*words.split(), "training.max_steps=null", "dataset.num_samples=240")).config
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
