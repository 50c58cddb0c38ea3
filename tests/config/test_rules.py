"""Rules between keys: configurations that break one, those that do not, settings that a run says it ignores; how many
batches the ranks of a strategy train on at once, and what workload=resnet18 brings with it.
"""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from aorta import train_command
from aorta.config.loop import number_rules
from aorta.config.parallel import data_parallel_size, pipeline_stages
from aorta.config.resolve import resolve, steps_planned
from aorta.config.schema import DDP, FSDPPP, PP, SECTIONS, DType, Naming, Resnet18, Wording
from aorta.errors import ConfigError

ALONE = [
    ("training.max_steps=0", r"training\.max_steps=0: must be at least 1\Z"),
    ("scheduler.warmup_steps=-1", r"scheduler\.warmup_steps=-1: must be at least 0\Z"),
    ("optimizer.lr=0", r"optimizer\.lr=0\.0: must be greater than 0 and finite\Z"),
    *(
        (f"parallel.bucket_cap_mb={value}", f"mb={value}: must be greater than 0 and finite")
        for value in ("nan", "inf")
    ),
    ("optimizer.weight_decay=nan", "optimizer.weight_decay=nan: must be at least 0 and finite"),
    ("instrument.stall_cutoff_us=0", r"stall_cutoff_us=0\.0: must be greater than 0 and finite; null measures it"),
    ("watchdog.timeout_s=-1", "must be at least 0 and finite; null learns it, 0 is off"),
    ("optimizer.betas=[0.9,1.0]", r"optimizer\.betas=\[0\.9, 1\.0\]: must be two numbers in \[0, 1\)"),
    ("optimizer.betas=[0.9]", r"optimizer\.betas=\[0\.9\]: must be two numbers"),
    ("optimizer.betas=[0.9,0.9,0.9]", r"optimizer\.betas=\[0\.9, 0\.9, 0\.9\]: must be two numbers"),
    ("scheduler.warmup_steps=2001", r"scheduler\.warmup_steps=2001: must not exceed scheduler\.total_steps=2000"),
    ("training.start_step=200", r"training\.start_step=200: must be below the 200 steps planned \(training\.max_st"),
    ("training.output_dir=''", r"training\.output_dir='': name a folder, for instance artifacts"),
    ("dataloader.num_workers=2", r"num_workers=2: .* set dataset\.on_device=false as well, or num_workers=0"),
    ("dataset.num_samples=7", r"dataset\.num_samples=7: one step needs 8 \(8 per micro-batch x 1 x 1 ranks\)"),
    ("workload.num_heads=3", r"workload\.model_dim=128: must be a multiple of workload\.num_heads=3"),
    ("workload.dropout=1", r"workload\.dropout=1\.0: must be in \[0, 1\)"),
    ("workload=gpt workload.size=9b", r"workload\.size='9b': must be one of 10m, 100m, 350m, 1b, 3b, 7b"),
    ("workload=gpt workload.model_dim=100", r"model_dim=100: must be an even multiple of workload\.num_heads=8"),
    ("workload=gpt workload.num_kv_heads=3", r"num_kv_heads=3: must divide workload\.num_heads=8"),
    ("workload=moe workload.top_k=9", r"workload\.top_k=9: must not exceed workload\.num_experts=8"),
    ("workload.name=other", r"workload\.name=other: repeats the option chosen; choose with workload=other"),
    ("parallel.strategy=fsdp", r"parallel\.strategy=fsdp: repeats the option chosen; choose with parallel=fsdp"),
    ("fabric.kind=slow", r"fabric\.kind=slow: repeats the option chosen"),
    ("profiling.trace_filename=a/b.json", r"profiling\.trace_filename='a/b\.json': a file name ending in \.json or"),
    ("profiling.trace_filename=trace", r"profiling\.trace_filename='trace': a file name ending in \.json or"),
    ("profiling.enabled=true profiling.tensorboard=false", r"profiling\.enabled=true: nothing would be written"),
]
"""One word of one rank."""
RANKS = [
    (1, "parallel=hsdp", r"parallel\.replicas=2: 1 rank\(s\) cannot form copies.*multiple of 2 ranks"),
    (3, "parallel=hsdp", r"replicas=2: 3 rank\(s\) cannot form copies.*or set parallel\.replicas to a divisor"),
    (4, "parallel=hsdp parallel.replicas=0", r"parallel\.replicas=0: must be at least 1"),
    (3, "parallel=fsdp_tp", r"parallel\.tp_size=2: 3 rank\(s\) cannot form groups.*multiple of 2 ranks"),
    (3, "parallel=tp", r"workload\.num_heads=4: 3 ranks compute a layer together \(parallel=tp\).*a multiple of 3"),
    (4, "parallel=tp workload.mlp_hidden_dim=510", r"workload\.mlp_hidden_dim=510: 4 ranks .*a multiple of 4"),
    (4, "parallel=fsdp_tp workload.num_heads=1", r"workload\.num_heads=1: 2 ranks .*parallel=fsdp_tp.*of 2"),
    (2, "parallel=tp training.mixed_precision=fp16", r"training\.mixed_precision=fp16: with parallel=tp .*use bf16"),
    (4, "parallel=fsdp_tp training.mixed_precision=fp16", r"=fp16: with parallel=fsdp_tp .*use bf16"),
    (2, "parallel=fsdp1 compile.enabled=true parallel.use_orig_params=false", r"params=false: .*set it to true"),
    (2, "parallel=fsdp1 training.checkpoint_interval=5", r"interval=5: torch does not .*parallel=fsdp"),
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
    (2, "parallel=pp workload=moe", r"workload=moe balances .*use workload=gpt, or parallel=ep"),
    (2, "parallel=cp workload=gpt dataset.sequence_length=30", r"sequence_length=30: 2 ranks share .*multiple of 4"),
    (4, "parallel=fsdp_cp workload=moe dataset.sequence_length=6", r"sequence_length=6: 2 ranks share .*multiple of 4"),
    (3, "parallel=fsdp_cp workload=gpt", r"parallel\.cp_size=2: 3 rank\(s\) cannot form groups that share sequences"),
    (2, "parallel=cp", r"parallel=cp: workload=ranking has no causal attention .*workload=gpt or moe, or parallel=ddp"),
    (3, "parallel=fsdp_ep workload=moe", r"parallel\.ep_size=2: 3 rank\(s\) cannot form groups that share the experts"),
    (4, "parallel=fsdp_ep workload=moe workload.num_experts=9", r"num_experts=9: 2 ranks .*parallel=fsdp_ep.*of 2"),
    (4, "parallel=fsdp_ep workload=gpt", r"parallel=fsdp_ep: workload=gpt has no experts .*use workload=moe"),
    (4, "parallel=fsdp_ep workload=moe compile.enabled=true", r"compile\.enabled=true: .*tokens of parallel=fsdp_ep"),
    (2, "parallel=ep workload=moe workload.num_experts=9", r"num_experts=9: 2 ranks share the experts"),
    (2, "parallel=ep workload=moe compile.enabled=true", r"torch\.compile does not trace the exchange"),
    (2, "workload=moe training.mixed_precision=fp16", r"mixed_precision=fp16: workload=moe: the scaled loss"),
    (8, "workload=gpt parallel=tp", r"num_kv_heads=4: 8 ranks compute a layer together \(parallel=tp\)"),
    (4, "parallel=fsdp_pp parallel.pp_size=3", r"parallel\.pp_size=3: 4 rank\(s\) cannot form pipelines"),
    (4, "parallel=tp dataset.num_samples=7", r"needs 8 \(8 per micro-batch x 1 x 4 ranks, 4 ranks sharing a batch\)"),
    (1, "baseline.enabled=true instrument.mode=off", r"instrument\.mode=off: baseline=true replaces what is seen"),
    (2, "fabric=emulated instrument.mode=off", r"fabric=emulated .* set instrument\.mode=observe or dedicated"),
    (
        2,
        "fabric=emulated fabric.slow_factor=2 fabric.slow_min_bytes=8 fabric.slow_max_bytes=7",
        r"fabric\.slow_max_bytes=7: must be at least fabric\.slow_min_bytes=8",
    ),
    (2, "fabric=emulated fabric.slow_factor=2 fabric.slow_kind=all_reduce", r"=all_reduce: must be one of allreduce, "),
    (2, "fabric=emulated fabric.slow_factor=2 fabric.slow_min_bytes=-1", r"slow_min_bytes=-1: must be at least 0"),
    *(
        (
            1,
            f"fabric=emulated fabric.ranks={ranks}",
            rf"fabric\.ranks={ranks}: must be at least 2 and at most 65536; null",
        )
        for ranks in (1, 65537, 10**12)
    ),
    (2, "fabric=emulated fabric.ranks=4", r"fabric\.ranks=4: one process .*, and 2 were started; start one"),
    (1, "fabric=emulated fabric.ranks=4 parallel=pp", r"fabric\.ranks=4: parallel=pp cannot .*use one of ddp, fsdp, "),
    (1, "fabric=emulated fabric.ranks=4 parallel=ep workload=moe", r"fabric\.ranks=4: parallel=ep cannot be emulated"),
    (1, "fabric=emulated fabric.ranks=4 workload=moe", r"workload=moe computes what other ranks' values decide"),
    (1, "fabric=emulated fabric.ranks=2 fabric.straggler_rank=1 fabric.straggler_ms=1", r"set .*straggler_rank=null"),
    (1, "fabric=emulated fabric.ranks=2 training.checkpoint_interval=5", r"leave out training\.checkpoint_interval"),
    (1, "fabric=emulated fabric.ranks=3 parallel=hsdp", r"parallel\.replicas=2: 3 rank\(s\) cannot form copies"),
    (1, "fabric=emulated fabric.ranks=4 fault.kind=sigkill fault.rank=3", r"fault\.rank=3: .*below 1"),
    (1, "parallel=fsdp parallel.forward_prefetch=-1", r"parallel\.forward_prefetch=-1: must be at least 0"),
]
"""Ranks, and the words that do not fit them or each other."""
FABRIC = [
    ("intra_bandwidth_gb_per_s=inf", "must be greater than 0 and finite"),
    ("inter_latency_us=nan", "must be at least 0 and finite"),
    ("ranks_per_node=0", "must be at least 1"),
    ("slow_factor=0", "must be greater than 0 and finite; 1 changes nothing"),
    ("slow_kind=allgather", r"changes nothing at fabric\.slow_factor=1; set fabric\.slow_factor"),
    ("slow_min_bytes=5", r"changes nothing at fabric\.slow_factor=1; set fabric\.slow_factor"),
    *((f"jitter={value}", r"must be in \[0, 1\)") for value in ("-0.1", "1")),
    ("emulated_world_size=1", "must be at least the world size 2; null takes that"),
    *((f"straggler_rank={rank}", "must be a rank of this run, 0 to 1") for rank in (-1, 2)),
    ("straggler_ms=1", r"no rank is late by it; set fabric\.straggler_rank"),
]
"""A word of `fabric=emulated` on two ranks."""
RESNET18 = [
    ("workload.image_size=0", r"workload\.image_size=0: must be at least 1"),
    ("workload.image_size=32 training.batch_size=1", r"workload\.image_size=32: the last stage sees one pixel"),
    ("workload.dtype=fp16", r"workload\.dtype=fp16: must be bf16 or fp32"),
    ("training.mixed_precision=bf16", "the parameters are in bf16 already; set it to none, or workload.dtype"),
    ("parallel=fsdp1", r"parallel=fsdp1: workload=resnet18 cannot .* use parallel=ddp or parallel=none"),
    ("parallel=tp", r"parallel=tp: workload=resnet18 cannot .* use parallel=ddp or parallel=none"),
]
"""Words of `workload=resnet18` on four ranks."""
UNTRAINED = [
    ("rpc", "baseline.enabled=true", "baseline=true: workload=rpc has no training steps"),
    ("rpc", "fabric=emulated", "fabric=emulated: delays collectives"),
    ("rpc", "profiling.remote_root=s3://b/c", r"profiling\.remote_root='s3://b/c': workload=rpc uploads nothing"),
    ("streams", "training.device=cpu", "training.device=cpu: .* a CPU has no streams; run it on a machine with"),
    ("streams", "workload.streams=[1,65]", r"workload\.streams=\[1, 65\]: numbers from 1 to 64"),
    ("streams", "workload.streams=[2,4]", "must have 1, which the others are compared with"),
    ("streams", "workload.kernel_us=0", r"workload\.kernel_us=0\.0: must be greater than 0"),
    ("streams", "workload.repeats=0", r"workload\.repeats=0: must be at least 1"),
    ("streams", "workload.knee_tolerance=1", "must be in"),
    ("streams", "profiling.enabled=true", "takes no traces"),
]
"""A workload that trains nothing, and a word that it cannot use."""
BROKEN = [
    *((1, words.split(), rule) for words, rule in ALONE),
    *((ranks, words.split(), rule) for ranks, words, rule in RANKS),
    *(
        (2, ("fabric=emulated", f"fabric.{word}"), rf"fabric\.{word.partition('=')[0]}=\S+: {rule}\Z")
        for word, rule in FABRIC
    ),
    *((4, ("workload=resnet18", *words.split()), rule) for words, rule in RESNET18),
    *((1, (f"workload={workload}", word), rule) for workload, word, rule in UNTRAINED),
]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("world_size", "words", "rule"), BROKEN, ids=[f"{ranks} {' '.join(words)}" for ranks, words, _ in BROKEN]
)
def test_a_broken_rule_says_key_value_and_what_is_allowed(composed, world_size, words, rule):
    with pytest.raises(ConfigError, match=rule):
        resolve(composed(*words), world_size)


def test_every_number_has_a_rule_by_its_type_or_one_of_its_own():
    """A number of which `number_rules` says nothing is checked elsewhere, or may be anything."""
    unchecked = set()
    for section, nodes in SECTIONS.items():
        for node in nodes.values():
            numbers = [field.name for field in fields(node) if field.type.removesuffix(" | None") in ("int", "float")]
            for name in numbers:
                if not any(f".{name}=-1: must be" in rule for rule in number_rules(section, node(**{name: -1}))):
                    unchecked.add(f"{section}.{name}")
    assert unchecked == {
        *("instrument.stream_priority", "clock.fake_offset_ns", "clock.fake_drift_ppm", "profiling.num_traces_to_keep"),
        *("workload.kernel_us", "fabric.ranks", "fabric.emulated_world_size", "fabric.straggler_rank", "fabric.seed"),
    }


@pytest.mark.parametrize("words", ["", "instrument.mode=off", "parallel=hsdp", "fabric.emulated_world_size=512"])
def test_what_one_process_may_stand_for(composed, words):
    resolve(composed("fabric=emulated", "fabric.ranks=64", *words.split()), 1)


@pytest.mark.parametrize(
    "words",
    [
        "fabric=emulated fabric.emulated_world_size=512 fabric.straggler_rank=1 fabric.straggler_ms=3",
        "fabric=emulated fabric.slow_factor=2 fabric.slow_min_bytes=8 fabric.slow_max_bytes=8",
        "instrument.mode=off",
        "workload=resnet18 workload.image_size=33 training.batch_size=1",
        "workload=resnet18 workload.image_size=32",
        "workload=resnet18 workload.dtype=fp32 training.mixed_precision=bf16 parallel=none",
        "workload=rpc",
        "workload=streams",
        "profiling.remote_root=s3://b/c",
    ],
)
def test_what_is_allowed(composed, words):
    resolve(composed(*words.split()), 2)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ((), None),
        (("profiling.enabled=true",), None),
        (("profiling.enabled=false", "profiling.ranks=[1]"), None),
        (("profiling.enabled=true", "profiling.ranks=[1]"), "profiling.ranks"),
        (("profiling=d9d", "profiling.enabled=true"), "profiling.naming, profiling.compression"),
        (("profiling.enabled=true", "profiling.num_traces_to_keep=1"), "profiling.num_traces_to_keep"),
        (("telemetry.devices=nvml",), "telemetry.devices"),
        (("telemetry.devices=off",), None),
        (("telemetry.loggers=[wandb]",), "telemetry.loggers"),
    ],
)
def test_what_a_run_of_calls_ignores_is_said(composed, words, named):
    said = f"workload=rpc has no steps, samples no device and profiles every worker; it ignores {named}"
    assert resolve(composed("workload=rpc", *words)).notes == (() if named is None else (said,))


def test_a_machine_without_a_device_is_refused_with_why_and_what_to_use(composed, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    with pytest.raises(ConfigError, match=r"torch sees no accelerator: .* workload=ranking trains") as refused:
        train_command.run(resolve(composed("workload=streams")))
    assert refused.value.exit_code == 1


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


WORKLOAD = "workload=resnet18"


@pytest.mark.spec("B9")
def test_the_workload_comes_with_the_tutorial_s_step(door):
    config = door(WORKLOAD).job.config
    assert config.workload == Resnet18(image_size=224, dtype=DType.bf16)
    training, optimizer, scheduler = config.training, config.optimizer, config.scheduler
    assert (training.batch_size, training.max_steps, training.log_interval) == (10, 100, 10)
    assert (training.grad_clip_norm, training.progress) == (None, Wording.tutorial)
    assert (optimizer.lr, optimizer.weight_decay) == (1e-3, 0)
    assert (scheduler.warmup_steps, scheduler.total_steps) == (0, None)
    assert isinstance(config.parallel, DDP)
    assert not config.profiling.enabled
    assert steps_planned(config, 512) == 100


@pytest.mark.parametrize("key", ["workload", "training"])
@pytest.mark.parametrize("words", [("experiment=tutorial",), ()], ids=["experiment", "ranking"])
@pytest.mark.spec("B9")
def test_the_batch_size_has_two_spellings(door, key, words):
    for order in ((*words, f"{key}.batch_size=3"), (f"{key}.batch_size=3", *words)):
        assert door(*order).job.config.training.batch_size == 3


@pytest.mark.spec("B9")
def test_the_experiment_is_the_workload_with_the_tutorial_s_window(door):
    config = door("experiment=tutorial").job.config
    assert (config.workload, type(config.parallel)) == (Resnet18(), DDP)
    window = config.profiling
    assert (window.enabled, window.naming, window.ranks) == (True, Naming.rank_iter, "all")
    assert (window.wait, window.warmup, window.active, window.repeat) == (10, 5, 3, 1)
    assert (config.training.max_steps, config.training.batch_size) == (100, 10)


def test_words_and_your_own_file_win_over_what_the_workload_brings(door, tmp_path):
    words = ("training.max_steps=20", "optimizer.lr=0.1", "scheduler.total_steps=50", "training.progress=overlap")
    config = door(*words, WORKLOAD).job.config
    assert (config.training.max_steps, config.optimizer.lr, config.scheduler.total_steps) == (20, 0.1, 50)
    assert config.training.progress is Wording.overlap
    own = tmp_path / "mine.yaml"
    own.write_text("defaults:\n  - default\n  - override workload: resnet18\n  - _self_\ntraining:\n  max_steps: 7\n")
    config = door("--config", str(own)).job.config
    assert (config.training.max_steps, config.training.batch_size) == (7, 10)
