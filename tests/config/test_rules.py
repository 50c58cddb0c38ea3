"""Rules between keys (those that a command line breaks: `command_lines.json`): settings that a run says it ignores; how
many batches the ranks of a strategy train on at once, and what workload=resnet18 brings with it.
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
