"""What a composed configuration becomes: rules between keys, each with its key, the value seen and what is allowed in
one message, all told at once; steps, batches and stages that follow from it; its hash; and the schema behind it.

`rules.json`, a line each: `words` for `train.py` on so many `ranks`, and the message (`says`, a pattern) of the rule
that they break; without one they can be run.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import get_type_hints

import pytest
import torch
from omegaconf import OmegaConf

from aorta import train_command
from aorta.config.loop import number_rules
from aorta.config.parallel import data_parallel_size, pipeline_stages
from aorta.config.resolve import NOT_IN_HASH, environment_number, resolve, steps_planned
from aorta.config.schema import (
    DDP,
    FSDP,
    FSDPPP,
    GROUPS,
    PP,
    SECTIONS,
    Config,
    DType,
    Naming,
    Precision,
    Resnet18,
    Wording,
)
from aorta.errors import ConfigError
from scripts.config_reference import entries, reference
from tests.config.conftest import ROOT

RULES = json.loads((Path(__file__).parent / "rules.json").read_text())


@pytest.fixture(autouse=True)
def world_of_one_process(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)


@pytest.mark.parametrize("case", RULES, ids=lambda case: f"{case.get('ranks', 1)} {case['words']}")
def test_a_rule_between_keys(composed, case):
    config, ranks = composed(*case["words"].split()), case.get("ranks", 1)
    if "says" not in case:
        resolve(config, ranks)
        return
    with pytest.raises(ConfigError) as refused:
        resolve(config, ranks)
    assert re.search(case["says"], str(refused.value), re.MULTILINE), refused.value


def test_all_broken_rules_are_told_at_once(composed):
    words = "label=.x training.epochs=0 optimizer.lr=-1 parallel=fsdp parallel.forward_prefetch=-2"
    with pytest.raises(ConfigError) as refused:
        resolve(composed(*words.split()))
    assert str(refused.value).splitlines() == [
        "the configuration cannot be run:",
        "  label='.x': a label is a folder name of at most 64 letters, digits, '.', '_' and '-' that begins with a "
        "letter or digit, does not end in .json or .jsonl and is none of checkpoints, history, logs, torch_profiler",
        "  training.epochs=0: must be at least 1",
        "  optimizer.lr=-1.0: must be greater than 0 and finite",
        "  parallel.forward_prefetch=-2: must be at least 0",
    ]


def test_every_number_has_a_rule_by_its_type_or_one_of_its_own():
    """A number of which `number_rules` says nothing is checked elsewhere, or may be anything."""
    unchecked = set()
    for section, nodes in SECTIONS.items():
        for node in nodes.values():
            numbers = [f.name for f in dataclasses.fields(node) if f.type.removesuffix(" | None") in ("int", "float")]
            for name in numbers:
                if not any(f".{name}=-1: must be" in rule for rule in number_rules(section, node(**{name: -1}))):
                    unchecked.add(f"{section}.{name}")
    assert unchecked == {
        *("instrument.stream_priority", "clock.fake_offset_ns", "clock.fake_drift_ppm", "profiling.num_traces_to_keep"),
        *("workload.kernel_us", "fabric.ranks", "fabric.emulated_world_size", "fabric.straggler_rank", "fabric.seed"),
    }


OUTSIDE = ["../x", "a/b", "/etc", ".hidden", "", " ", "a b", "a\\b", "a\n", "-x", "x" * 65, "é", "~", "a:b"]
TAKEN = ["history", "logs", "checkpoints", "torch_profiler", "run.json", "rank_0_metrics.jsonl"]
LABELS = ["cuda", "rocm-6.4", "A", "9", "x" * 64, "a.b_c-d", None]


@pytest.mark.parametrize(
    ("key", "values", "said"),
    [
        ("label", OUTSIDE + TAKEN, "a label is a folder name"),
        ("label", LABELS, None),
        ("training.device", ["cuda:1", "CUDA", "", "1"], "must be auto, cpu, or the type of an accelerator"),
        ("training.device", ["auto", "cpu", "cuda", "xpu", "privateuseone"], None),
    ],
)
def test_any_type_of_device_and_any_free_name_of_a_folder_is_taken(composed, key, values, said):
    for value in values:
        config = composed()
        OmegaConf.update(config, key, value)
        if said is None:
            assert OmegaConf.select(OmegaConf.structured(resolve(config).config), key) == value
            continue
        with pytest.raises(ConfigError) as refused:
            resolve(config)
        assert f"  {key}={value!r}: {said}" in str(refused.value)


def test_samples_are_counted_over_all_ranks(composed, monkeypatch):
    words = ("dataset.num_samples=31", "training.gradient_accumulation=2")
    assert resolve(composed(*words)).config.dataset.num_samples == 31
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"num_samples=31: one step needs 32 \(8 per micro-batch x 2 x 2 ranks\)$"):
        resolve(composed(*words))


@pytest.mark.parametrize("word", ["training.output_dir=${nowhere}", "training.batch_size=${training.output_dir}"])
def test_an_interpolation_that_leads_nowhere_is_refused(composed, word):
    with pytest.raises(ConfigError, match=r"nowhere|artifacts"):
        resolve(composed(word))


def test_typed_and_plain_form(composed):
    words = ("parallel=fsdp", "training.mixed_precision=bf16", "training.output_dir=${label}", "label=x")
    resolved = resolve(composed(*words))
    training = resolved.config.training
    assert isinstance(resolved.config.parallel, FSDP)
    assert (training.mixed_precision, training.device, training.output_dir) == (Precision.bf16, "auto", "x")
    assert json.loads(json.dumps(resolved.plain)) == resolved.plain
    assert resolved.plain["training"]["mixed_precision"] == "bf16"


def test_the_hash_changes_with_all_that_changes_the_measurement_and_nothing_else(composed):
    def of(word):
        return resolve(composed(*([word] if word else []))).manifest_hash

    same = ["label=x", "training.output_dir=x", "training.overwrite=true", "training.start_step=3"]
    assert [word.partition("=")[0] in NOT_IN_HASH for word in same] == [True] * len(same)
    assert {of(word) for word in same} == {of("")}
    changes = "training.seed=43 dataset.seed=43 parallel=none parallel.overlap=false instrument.mode=off "
    changes += "training.max_steps=199 experiment=full optimizer.lr=1e-3"
    assert len({of(word) for word in ("", *changes.split())}) == 1 + len(changes.split())


@pytest.mark.parametrize(
    ("words", "world_size", "steps"),
    [
        ("", 1, 200),
        ("training.max_steps=null", 1, 1250),
        ("training.max_steps=null training.epochs=2", 2, 1250),
        ("training.max_steps=null training.gradient_accumulation=3", 1, 416),
        ("training.max_steps=null dataset.num_samples=23 training.epochs=3", 2, 3),
        ("training.max_steps=5 dataset.num_samples=16 training.epochs=1", 1, 2),
        ("training.max_steps=5 dataset.num_samples=16 training.epochs=3", 1, 5),
        ("training.max_steps=5 dataset.num_samples=16", 1, 5),
    ],
)
@pytest.mark.spec("D30")
def test_the_steps_planned_are_the_earlier_of_max_steps_and_the_last_epoch(composed, words, world_size, steps):
    assert steps_planned(resolve(composed(*words.split())).config, world_size) == steps


@pytest.mark.spec("D30")
def test_a_training_that_epochs_cut_short_is_noted_with_the_planned_steps(composed):
    (note,) = resolve(composed("dataset.num_samples=200", "training.epochs=1")).notes
    assert "training.max_steps=200: training.epochs=1 ends after 25 steps (dataset.num_samples=200)" in note
    for words in ((), ("training.epochs=1",), ("training.max_steps=null", "training.epochs=1")):
        assert resolve(composed(*words)).notes == ()


def test_a_number_from_the_environment():
    assert [environment_number("X", 3, found) for found in ({}, {"X": "5"})] == [3, 5]
    with pytest.raises(ConfigError, match=r"environment variable X='5\.0': must be a whole number"):
        environment_number("X", 3, {"X": "5.0"})


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("profiling.enabled=true", None),
        ("profiling.enabled=false profiling.ranks=[1]", None),
        ("profiling.enabled=true profiling.ranks=[1]", "profiling.ranks"),
        ("profiling=d9d profiling.enabled=true", "profiling.naming, profiling.compression"),
        ("profiling.enabled=true profiling.num_traces_to_keep=1", "profiling.num_traces_to_keep"),
        ("telemetry.devices=nvml", "telemetry.devices"),
        ("telemetry.devices=off", None),
        ("telemetry.loggers=[wandb]", "telemetry.loggers"),
    ],
)
def test_what_a_run_of_calls_ignores_is_said(composed, words, named):
    said = f"workload=rpc has no steps, samples no device and profiles every worker; it ignores {named}"
    assert resolve(composed("workload=rpc", *words.split())).notes == (() if named is None else (said,))


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
        (4, "parallel=fsdp_tp parallel.tp_size=4", 1),
        (6, "parallel=fsdp_tp", 3),
        (4, "parallel=cp workload=gpt", 1),
        (8, "parallel=fsdp_cp parallel.cp_size=4 workload=moe", 2),
    ],
)
def test_ranks_that_share_layers_share_a_batch(composed, world_size, words, size):
    config = resolve(composed(*words.split(), "training.max_steps=null", "dataset.num_samples=240"), world_size).config
    assert data_parallel_size(config, world_size) == size
    assert steps_planned(config, world_size) == 240 // (8 * size)


@pytest.mark.parametrize(
    ("parallel", "stages"),
    [
        (PP(), [[0], [1]]),
        (PP(stages_per_rank=2), [[0, 2], [1, 3]]),
        (PP(schedule="zbv_zero_bubble", stages_per_rank=2), [[0, 3], [1, 2]]),
        (FSDPPP(stages_per_rank=2), [[0, 2], [0, 2], [1, 3], [1, 3]]),
        (FSDPPP(pp_size=3), [[0], [0], [1], [1], [2], [2]]),
    ],
)
def test_ranks_that_follow_one_another_have_the_stages_of_pipelines_beside_each_other(parallel, stages):
    assert [pipeline_stages(parallel, rank, len(stages)) for rank in range(len(stages))] == stages


# What workload=resnet18 brings with it


@pytest.mark.spec("B9")
def test_the_workload_comes_with_the_tutorial_s_step(door):
    config = door("workload=resnet18").job.config
    assert config.workload == Resnet18(image_size=224, dtype=DType.bf16)
    training, optimizer, scheduler = config.training, config.optimizer, config.scheduler
    assert (training.batch_size, training.max_steps, training.log_interval) == (10, 100, 10)
    assert (training.grad_clip_norm, training.progress) == (None, Wording.tutorial)
    assert (optimizer.lr, optimizer.weight_decay) == (1e-3, 0)
    assert (scheduler.warmup_steps, scheduler.total_steps) == (0, None)
    assert isinstance(config.parallel, DDP)
    assert not config.profiling.enabled
    assert steps_planned(config, 512) == 100


@pytest.mark.spec("B9")
def test_the_experiment_is_the_workload_with_the_tutorial_s_window_and_the_batch_size_has_two_spellings(door):
    config = door("experiment=tutorial").job.config
    assert (config.workload, type(config.parallel)) == (Resnet18(), DDP)
    window = config.profiling
    assert (window.enabled, window.naming, window.ranks) == (True, Naming.rank_iter, "all")
    assert (window.wait, window.warmup, window.active, window.repeat) == (10, 5, 3, 1)
    assert (config.training.max_steps, config.training.batch_size) == (100, 10)
    for words in (("experiment=tutorial", "workload.batch_size=3"), ("training.batch_size=3", "experiment=tutorial")):
        assert door(*words).job.config.training.batch_size == 3


def test_words_and_your_own_file_win_over_what_the_workload_brings(door, tmp_path):
    words = ("training.max_steps=20", "optimizer.lr=0.1", "scheduler.total_steps=50", "training.progress=overlap")
    config = door(*words, "workload=resnet18").job.config
    assert (config.training.max_steps, config.optimizer.lr, config.scheduler.total_steps) == (20, 0.1, 50)
    assert config.training.progress is Wording.overlap
    own = tmp_path / "mine.yaml"
    own.write_text("defaults:\n  - default\n  - override workload: resnet18\n  - _self_\ntraining:\n  max_steps: 7\n")
    config = door("--config", str(own)).job.config
    assert (config.training.max_steps, config.training.batch_size) == (7, 10)


# The schema: its comments, which are its documentation, and the files of `config/`

SECTIONS_OF_ROOT = {name: node for name, node in get_type_hints(Config).items() if dataclasses.is_dataclass(node)}
OPTIONS = [(f"{group}={option}", group, node) for group, options in GROUPS.items() for option, node in options.items()]
DEFAULTS = {"workload": "ranking", "parallel": "ddp", "profiling": "aorta", "fabric": "none", "telemetry": "default"}


def plain(node):
    return OmegaConf.to_container(OmegaConf.structured(node), enum_to_str=True)


@pytest.fixture
def defaults():
    return plain(Config) | {group: plain(GROUPS[group][option]) for group, option in DEFAULTS.items()}


def test_the_page_is_up_to_date_and_every_key_has_a_comment():
    page = (ROOT / "docs/configuration.md").read_text()
    assert page == reference(), "run: python -m scripts.config_reference > docs/configuration.md"
    sections = [node for name, node in SECTIONS_OF_ROOT.items() if name not in GROUPS]
    nodes = [Config, *sections, *(node for _, _, node in OPTIONS)]
    silent = [(node.__name__, key.name) for node in nodes for key in entries(node) if key.kind and not key.meaning]
    assert silent == [], "a comment above the field is its documentation"


def test_options_and_sections_have_the_schema_s_values(composed, defaults):
    assert OmegaConf.to_container(composed(), enum_to_str=True) == defaults
    found = {word: OmegaConf.to_container(composed(word)[group], enum_to_str=True) for word, group, _ in OPTIONS}
    assert found == {word: plain(node) for word, _, node in OPTIONS}


def test_a_file_states_only_what_differs_from_the_schema(defaults):
    def leaves(node, above=""):
        for name, value in node.items():
            yield from leaves(value, f"{above}{name}.") if isinstance(value, dict) else [(f"{above}{name}", value)]

    repeated = []
    for path in (ROOT / "config").rglob("*.yaml"):
        stated = leaves(OmegaConf.to_container(OmegaConf.load(path), resolve=False))
        given = {key: value for key, value in stated if not key.startswith(("defaults", "hydra"))}
        values = OmegaConf.create(defaults)
        repeated += [(path.stem, key) for key, value in given.items() if OmegaConf.select(values, key) == value]
    assert repeated == []
