"""What a composed configuration becomes: rules between keys, each with its key, the value seen and what is allowed in
one message, all told at once; steps, batches and stages that follow from it; its hash; and the schema behind it.

`rules.json`, a line each: `words` for `train.py` on so many `ranks`, and the message (`says`, a pattern) of the rule
that they break; without one they can be run, with so many `steps` planned, so many parts of each step's samples
(`batches`, of ranks that share none), the `stages` of a pipeline on each rank, these `values`, and `notes` of these
patterns.
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
from aorta.config.resolve import NOT_IN_HASH, resolve, steps_planned
from aorta.config.schema import GROUPS, SECTIONS, Config
from aorta.errors import ConfigError
from scripts.config_reference import entries, reference
from tests.composed import composed
from tests.config.conftest import ROOT

RULES = json.loads((Path(__file__).parent / "rules.json").read_text())


@pytest.fixture(autouse=True)
def world_of_one_process(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)


@pytest.mark.spec("D9", "D30", "F1", "F4", "F5")
@pytest.mark.parametrize("case", RULES, ids=lambda case: f"{case.get('ranks', 1)} {case['words']}")
def test_a_configuration_is_refused_or_becomes_what_it_says(case):
    config, ranks = composed(*case["words"].split()), case.get("ranks", 1)
    if "says" in case:
        with pytest.raises(ConfigError) as refused:
            resolve(config, ranks)
        assert re.search(case["says"], str(refused.value), re.MULTILINE), refused.value
        return
    found = resolve(config, ranks)
    assert case.get("steps") in (None, steps_planned(found.config, ranks))
    assert case.get("batches") in (None, data_parallel_size(found.config, ranks))
    if stages := case.get("stages"):
        assert [pipeline_stages(found.config.parallel, rank, ranks) for rank in range(ranks)] == stages
    notes = case.get("notes", [""] * len(found.notes))
    assert all(re.search(pattern, note) for pattern, note in zip(notes, found.notes, strict=True)), found.notes
    for key, value in case.get("values", {}).items():
        assert OmegaConf.select(OmegaConf.create(found.plain), key) == value


def test_all_broken_rules_are_told_at_once():
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
def test_any_type_of_device_and_any_free_name_of_a_folder_is_taken(key, values, said):
    for value in values:
        config = composed()
        OmegaConf.update(config, key, value)
        if said is None:
            assert OmegaConf.select(OmegaConf.structured(resolve(config).config), key) == value
            continue
        with pytest.raises(ConfigError) as refused:
            resolve(config)
        assert f"  {key}={value!r}: {said}" in str(refused.value)


def test_samples_are_counted_over_all_ranks(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"num_samples=31: one step needs 32 \(8 per micro-batch x 2 x 2 ranks\)$"):
        resolve(composed("dataset.num_samples=31", "training.gradient_accumulation=2"))


def test_the_hash_changes_with_all_that_changes_the_measurement_and_nothing_else():
    def of(word):
        return resolve(composed(*([word] if word else []))).manifest_hash

    same = ["label=x", "training.output_dir=x", "training.overwrite=true", "training.start_step=3"]
    assert [word.partition("=")[0] in NOT_IN_HASH for word in same] == [True] * len(same)
    assert {of(word) for word in same} == {of("")}
    changes = "training.seed=43 dataset.seed=43 parallel=none parallel.overlap=false instrument.mode=off "
    changes += "training.max_steps=199 experiment=full optimizer.lr=1e-3"
    assert len({of(word) for word in ("", *changes.split())}) == 1 + len(changes.split())


def test_a_machine_without_a_device_is_refused_with_why_and_what_to_use(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    with pytest.raises(ConfigError, match=r"torch sees no accelerator: .* workload=ranking trains") as refused:
        train_command.run(resolve(composed("workload=streams")))
    assert refused.value.exit_code == 1


# The schema: its comments, which are its documentation, and the files of `config/`

SECTIONS_OF_ROOT = {name: node for name, node in get_type_hints(Config).items() if dataclasses.is_dataclass(node)}
OPTIONS = [(f"{group}={option}", group, node) for group, options in GROUPS.items() for option, node in options.items()]
DEFAULTS = {"workload": "ranking", "parallel": "ddp", "profiling": "aorta", "fabric": "none", "telemetry": "default"}


def plain(node):
    return OmegaConf.to_container(OmegaConf.structured(node), enum_to_str=True)


def test_the_page_is_up_to_date_and_every_key_has_a_comment():
    page = (ROOT / "docs/configuration.md").read_text()
    assert page == reference(), "run: python -m scripts.config_reference > docs/configuration.md"
    sections = [node for name, node in SECTIONS_OF_ROOT.items() if name not in GROUPS]
    nodes = [Config, *sections, *(node for _, _, node in OPTIONS)]
    silent = [(node.__name__, key.name) for node in nodes for key in entries(node) if key.kind and not key.meaning]
    assert silent == [], "a comment above the field is its documentation"


def test_options_and_sections_have_the_schema_s_values():
    defaults = {group: plain(GROUPS[group][option]) for group, option in DEFAULTS.items()}
    assert OmegaConf.to_container(composed(), enum_to_str=True) == plain(Config) | defaults
    found = {word: OmegaConf.to_container(composed(word)[group], enum_to_str=True) for word, group, _ in OPTIONS}
    assert found == {word: plain(node) for word, _, node in OPTIONS}
