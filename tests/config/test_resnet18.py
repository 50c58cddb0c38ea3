"""`workload=resnet18` and `experiment=tutorial`: what they bring with them, and what they refuse."""

from __future__ import annotations

import pytest

from aorta.config.resolve import steps_planned
from aorta.config.schema import DDP, DType, Naming, Resnet18, Wording

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
