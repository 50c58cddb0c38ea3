"""`--config FILE`: a user's own file builds on AORTA's, and files of AORTA 2025, YAML or JSON, run as they are."""

from __future__ import annotations

import json

import pytest
from omegaconf import OmegaConf

from aorta.config.override_words import DEAD, expand
from tests.config.conftest import ROOT

OLDER = {
    "training": {
        "epochs": 2,
        "max_steps": 50,
        "batch_size": 4,
        "gradient_accumulation": 1,
        "mixed_precision": "bf16",
        "grad_clip_norm": 1.0,
        "log_interval": 5,
        "output_dir": "artifacts",
    },
    "optimizer": {"name": "adamw", "lr": 3e-4, "weight_decay": 0.01, "betas": [0.9, 0.98], "eps": 1e-8},
    "scheduler": {"warmup_steps": 10, "total_steps": 2000},
    "fsdp": {
        "sharding_strategy": "SHARD_GRAD_OP",
        "backward_prefetch": "BACKWARD_PRE",
        "use_orig_params": True,
        "limit_all_gathers": True,
        "forward_prefetch": True,
        "sync_module_states": True,
        "param_init_device": "cpu",
    },
    "dataset": {
        "num_samples": 10000,
        "sequence_length": 64,
        "dense_dim": 256,
        "sparse_features": 16,
        "vocab_size": 50000,
        "num_dense_features": 32,
        "seed": 7,
    },
    "model": {
        "model_dim": 768,
        "num_heads": 12,
        "num_layers": 8,
        "mlp_hidden_dim": 3072,
        "embedding_dim": 128,
        "dropout": 0.2,
        "dense_dim": 256,
    },
    "dataloader": {"num_workers": 2, "pin_memory": True},
    "profiling": {
        "enabled": True,
        "wait": 1,
        "warmup": 1,
        "active": 2,
        "repeat": 1,
        "record_shapes": True,
        "profile_memory": True,
        "with_stack": False,
        "with_flops": False,
        "tensorboard": True,
        "chrome_trace": False,
        "trace_filename": "rank{rank}=trace.json",
    },
    "logging": {"level": "INFO"},
}
IN_OLDER = {key for key in DEAD if key.split(".")[1] in OLDER.get(key.split(".")[0], {})}


@pytest.fixture(params=["old.yaml", "old.json"])
def name(request, tmp_path, door):
    text = json.dumps(OLDER) if request.param.endswith("json") else OmegaConf.to_yaml(OmegaConf.create(OLDER))
    (tmp_path / request.param).write_text(text)
    return request.param


@pytest.mark.spec("D55")
def test_every_key_arrives_where_it_has_a_meaning_today(door, name):
    config = door("--config", name).job.config
    training, workload, dataset = config.training, config.workload, config.dataset
    assert (training.epochs, training.max_steps, training.batch_size, training.log_interval) == (2, 50, 4, 5)
    assert training.mixed_precision.value == "bf16"
    assert (config.optimizer.lr, config.optimizer.betas) == (3e-4, [0.9, 0.98])
    assert (workload.model_dim, workload.num_heads, workload.num_layers, workload.dropout) == (768, 12, 8, 0.2)
    assert (workload.categorical_features, workload.dense_features, workload.vocab_size) == (16, 32, 50000)
    assert (dataset.sequence_length, dataset.seed, dataset.on_device) == (64, 7, False)
    assert config.dataloader.num_workers == 2
    assert config.profiling.enabled
    assert config.profiling.trace_filename == "rank{rank}=trace.json"
    parallel = config.parallel
    assert (parallel.strategy, parallel.reshard_after_forward) == ("fsdp", False)
    assert (parallel.backward_prefetch, parallel.forward_prefetch) == (1, 1)


@pytest.mark.thorough
@pytest.mark.spec("D55")
def test_each_key_left_out_is_named_with_its_reason_once(door, name, monkeypatch):
    assert len(IN_OLDER) == 8
    said = door("--config", name).err
    for key in IN_OLDER:
        assert said.count(f"warning: --config {name}: {key} is left out: {DEAD[key]}\n") == 1
    assert said.count("warning:") == len(IN_OLDER)
    monkeypatch.setenv("RANK", "1")
    assert "warning:" not in door("--config", name).err


@pytest.mark.thorough
def test_words_of_the_command_line_come_first(door, name):
    config = door("training.max_steps=3", "--config", name, "--override", "model.dropout=0.4", "training.epochs=1").job
    assert (config.config.training.max_steps, config.config.workload.dropout) == (3, 0.4)
    for words in (["parallel=none"], ["--override=parallel=none"], ["--override", "distributed.mode=none"]):
        other = door("--config", name, *words).job.config
        assert (other.parallel.strategy, other.training.max_steps) == ("none", 50)


def older(tmp_path, **sections):
    (tmp_path / "own.json").write_text(json.dumps(sections))
    return ("--config", "own.json")


@pytest.mark.parametrize(
    ("sections", "strategy", "left_out"),
    [
        (
            {"distributed": {"mode": "ddp"}, "fsdp": {"forward_prefetch": True}},
            "ddp",
            "trains with ddp, which does not",
        ),
        ({"fsdp": {"sharding_strategy": "NO_SHARD"}}, "ddp", ""),
        ({"fsdp": {"sharding_strategy": "hybrid_shard"}}, "hsdp", ""),
        ({"training": {"max_steps": 5}}, "ddp", ""),
    ],
)
def test_the_strategy_follows_from_mode_and_sharding(door, tmp_path, monkeypatch, sections, strategy, left_out):
    monkeypatch.setenv("WORLD_SIZE", "4")
    extra = ["parallel.replicas=2"] if strategy == "hsdp" else []
    answer = door(*older(tmp_path, **sections), *extra)
    assert answer.job.config.parallel.strategy == strategy
    assert left_out in answer.err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "cannot be read as JSON"),
        ("[1]", "not a configuration of AORTA 2025"),
        ('{"defaults": []}', "not a configuration of AORTA 2025"),
        ('{"training": {"max_step": 7}}', "did you mean max_steps?"),
        ('{"fsdp": {"backward_prefetch": "BACKWARD_POST"}}', "use parallel=fsdp1"),
    ],
)
def test_what_cannot_be_meant_is_refused(door, tmp_path, text, said):
    (tmp_path / "own.json").write_text(text)
    answer = door("--config", "own.json")
    assert (answer.code, answer.jobs) == (1, [])
    assert said in answer.err


def test_a_strategy_of_the_command_line_leaves_out_the_file_s_with_a_note(tmp_path):
    (tmp_path / "old.json").write_text(
        '{"distributed": {"mode": "ddp", "enable_overlap": false}, "fsdp": {"sharding_strategy": "shard_grad_op"}}'
    )
    words, notes = expand(["--config", "old.json", "parallel=tp"], tmp_path, tmp_path)
    assert words[-1] == "parallel=tp"
    assert not [word for word in words[:-1] if word.startswith(("parallel", "distributed", "fsdp"))]
    assert any(
        "distributed.enable_overlap=false is left out: the command line chooses the strategy" in note for note in notes
    )


def test_an_override_wins_over_a_file_that_spells_the_key_otherwise(tmp_path):
    (tmp_path / "old.json").write_text(
        '{"distributed": {"mode": "fsdp"}, "fsdp": {"sharding_strategy": "shard_grad_op"}}'
    )
    words, _ = expand(["parallel.reshard_after_forward=true", "--config", "old.json"], tmp_path, tmp_path)
    assert not [word for word in words if word.startswith("fsdp.sharding_strategy")]


OWN = "defaults: [default, _self_]\ntraining: {max_steps: 7}\n"


@pytest.mark.parametrize("name", ["mine.yaml", "default.yaml", "two words.yml", "ddp.yaml"])
def test_an_own_file_builds_on_ours_whatever_it_is_called(door, tmp_path, name):
    for path in (tmp_path / name, tmp_path / "default.yaml"):  # a file called default beside it changes nothing
        path.write_text(OWN)
    config = door("--config", name, "--override", "training.batch_size=2", "parallel=fsdp").job.config
    assert (config.training.max_steps, config.training.batch_size, config.training.log_interval) == (7, 2, 5)
    assert config.parallel.strategy == "fsdp"


def test_a_copy_of_our_own_file_works_from_elsewhere(door, tmp_path):
    text = (ROOT / "config/default.yaml").read_text()
    (tmp_path / "default.yaml").write_text(text.replace("max_steps: 200", "max_steps: 7"))
    assert door("--config", "default.yaml").job.config.training.max_steps == 7


def test_groups_beside_an_own_file_can_be_chosen(door, tmp_path):
    (tmp_path / "mine.yaml").write_text(OWN)
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/tiny.yaml").write_text("# @package _global_\ntraining: {batch_size: 1}\n")
    config = door("--config", "mine.yaml", "experiment=tiny").job.config
    assert (config.training.max_steps, config.training.batch_size) == (7, 1)


@pytest.mark.parametrize("text", ["training: {max_steps: 7}\n", "", "[1, 2]\n"])
def test_an_own_file_that_does_not_build_on_ours_is_refused_with_the_advice(door, tmp_path, text):
    (tmp_path / "mine.yaml").write_text(text)
    answer = door("--config", "mine.yaml")
    assert answer.code == 1
    assert "begin it with\n  defaults:\n    - default\n    - _self_" in answer.err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [b\n", "mine.yaml: cannot be read as YAML: "),
        ("defaults: [default, _self_]\ntraining: {max_step: 7}\n", "Key 'max_step' not in 'Training'"),
        ("defaults: [default, _self_]\ntraining: {max_steps: x}\n", "Value 'x' of type 'str' could not be converted"),
        ("defaults: [nothing, _self_]\n", "Could not load 'nothing'"),
        ("defaults: [your-mine, _self_]\n", "recursion"),
    ],
    ids=["not YAML", "unknown key", "wrong type", "unknown base", "itself as base"],
)
def test_what_is_wrong_in_an_own_file_is_said(door, tmp_path, text, said):
    (tmp_path / "mine.yaml").write_text(text)
    answer = door("--config", "mine.yaml")
    assert answer.code == 1
    assert said in answer.err
