"""Which worlds fit which strategy, and how many batches they train on at once."""

from __future__ import annotations

import pytest

from aorta.config.mesh import data_parallel_size
from aorta.config.resolve import resolve, steps_planned
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
    (4, "parallel=tp dataset.num_samples=7", r"needs 8 \(8 per micro-batch x 1 x 4 ranks, 4 ranks sharing a batch\)"),
]


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
        (4, "parallel=fsdp_tp", 2),
        (4, "parallel=fsdp_tp parallel.tp_size=4", 1),
        (6, "parallel=fsdp_tp", 3),
    ],
)
def test_ranks_that_share_layers_share_a_batch(composed, monkeypatch, world_size, words, size):
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    config = resolve(composed(*words.split(), "training.max_steps=null", "dataset.num_samples=240")).config
    assert data_parallel_size(config, world_size) == size
    assert steps_planned(config, world_size) == 240 // (8 * size)
