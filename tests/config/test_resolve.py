"""Rules between keys: each has its key, the value seen and what is allowed in one message, and all are told at once;
and the reference that is written of them.
"""

from __future__ import annotations

import dataclasses
import json
from typing import get_type_hints

import pytest
from omegaconf import OmegaConf

from aorta.config.resolve import NOT_IN_HASH, environment_number, resolve, steps_planned
from aorta.config.schema import FSDP, GROUPS, Config, Precision
from aorta.errors import ConfigError
from scripts.config_reference import entries, reference
from tests.config.conftest import ROOT


@pytest.fixture(autouse=True)
def world_of_one(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)


@pytest.fixture
def rules(composed):
    """The rules that a command line breaks."""

    def broken(*words):
        with pytest.raises(ConfigError) as refused:
            resolve(composed(*words))
        first, *rules = str(refused.value).splitlines()
        assert first == "the configuration cannot be run:"
        return [rule.strip() for rule in rules]

    return broken


def test_all_broken_rules_are_told_at_once(rules):
    assert rules(
        "label=.x", "training.epochs=0", "optimizer.lr=-1", "parallel=fsdp", "parallel.forward_prefetch=-2"
    ) == [
        "label='.x': a label is a folder name of at most 64 letters, digits, '.', '_' and '-' that begins with a "
        "letter or digit, does not end in .json or .jsonl and is none of checkpoints, history, logs, torch_profiler",
        "training.epochs=0: must be at least 1",
        "optimizer.lr=-1.0: must be greater than 0 and finite",
        "parallel.forward_prefetch=-2: must be at least 0",
    ]


OUTSIDE = ["../x", "a/b", "/etc", ".hidden", "..", "", " ", "a b", "a\\b", "a\n", "-x", "x" * 65, "é", "~", "a:b"]
TAKEN = ["history", "logs", "checkpoints", "torch_profiler", "run.json", "rank_0_metrics.jsonl"]


@pytest.mark.parametrize("label", [*OUTSIDE, *TAKEN])
def test_a_label_that_would_leave_the_folder_or_meet_a_file_of_the_record_is_refused(composed, label):
    config = composed()
    config.label = label
    with pytest.raises(ConfigError) as refused:
        resolve(config)
    assert f"label={label!r}: a label is a folder name" in str(refused.value)


def test_any_type_of_device_and_any_folder_name_as_label_is_taken(composed, rules):
    for device in ("auto", "cpu", "cuda", "xpu", "privateuseone"):
        assert resolve(composed(f"training.device={device}")).config.training.device == device
    for device in ("'cuda:1'", "CUDA", "''", "1"):
        (rule,) = rules(f"training.device={device}")
        assert "must be auto, cpu, or the type of an accelerator as torch names it" in rule
    for label in ("cuda", "rocm-6.4", "A", "9", "x" * 64, "a.b_c-d", None):
        config = composed()
        config.label = label
        assert resolve(config).config.label == label


def test_samples_are_counted_over_all_ranks(rules, composed, monkeypatch):
    words = ("dataset.num_samples=31", "training.gradient_accumulation=2")
    assert resolve(composed(*words)).config.dataset.num_samples == 31
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert rules(*words) == ["dataset.num_samples=31: one step needs 32 (8 per micro-batch x 2 x 2 ranks)"]


@pytest.mark.parametrize("word", ["training.output_dir=${nowhere}", "training.batch_size=${training.output_dir}"])
def test_an_interpolation_that_leads_nowhere_is_refused(composed, word):
    with pytest.raises(ConfigError, match=r"nowhere|artifacts"):
        resolve(composed(word))


def test_typed_and_plain_form(composed):
    resolved = resolve(
        composed("parallel=fsdp", "training.mixed_precision=bf16", "training.output_dir=${label}", "label=x")
    )
    assert isinstance(resolved.config.parallel, FSDP)
    assert resolved.config.training.mixed_precision is Precision.bf16
    assert resolved.config.training.device == "auto"
    assert resolved.config.training.output_dir == "x"
    assert json.loads(json.dumps(resolved.plain)) == resolved.plain
    assert resolved.plain["training"]["mixed_precision"] == "bf16"


@pytest.mark.parametrize(
    "word", ["label=x", "training.output_dir=x", "training.overwrite=true", "training.start_step=3"]
)
def test_the_hash_leaves_out_what_does_not_change_the_measurement(composed, word):
    assert word.partition("=")[0] in NOT_IN_HASH
    assert resolve(composed(word)).manifest_hash == resolve(composed()).manifest_hash


CHANGES = ["training.seed=43", "dataset.seed=43", "parallel=none", "parallel.overlap=false", "instrument.mode=off"]


def test_the_hash_changes_with_everything_else(composed):
    changes = [(), *((word,) for word in [*CHANGES, "training.max_steps=199", "experiment=full", "optimizer.lr=1e-3"])]
    assert len({resolve(composed(*words)).manifest_hash for words in changes}) == len(changes)


@pytest.mark.parametrize(
    ("words", "world_size", "steps"),
    [
        ((), 1, 200),
        (("training.max_steps=null",), 1, 1250),
        (("training.max_steps=null", "training.epochs=2"), 2, 1250),
        (("training.max_steps=null", "training.gradient_accumulation=3"), 1, 416),
        (("training.max_steps=null", "dataset.num_samples=23", "training.epochs=3"), 2, 3),
        (("training.max_steps=5", "dataset.num_samples=16", "training.epochs=1"), 1, 2),
        (("training.max_steps=5", "dataset.num_samples=16", "training.epochs=3"), 1, 5),
        (("training.max_steps=5", "dataset.num_samples=16"), 1, 5),
        (("dataset.num_samples=200",), 1, 200),
    ],
)
@pytest.mark.spec("D30")
def test_the_steps_planned_are_the_earlier_of_max_steps_and_the_last_epoch(composed, words, world_size, steps):
    assert steps_planned(resolve(composed(*words)).config, world_size) == steps


@pytest.mark.spec("D30")
def test_a_training_that_epochs_cut_short_is_noted_with_the_planned_steps(composed):
    (note,) = resolve(composed("dataset.num_samples=200", "training.epochs=1")).notes
    assert "training.max_steps=200: training.epochs=1 ends after 25 steps (dataset.num_samples=200)" in note
    for words in ((), ("training.epochs=1",), ("training.max_steps=null", "training.epochs=1")):
        assert resolve(composed(*words)).notes == ()


def test_a_number_from_the_environment():
    assert environment_number("X", 3, {}) == 3
    assert environment_number("X", 3, {"X": "5"}) == 5
    with pytest.raises(ConfigError, match=r"environment variable X='5\.0': must be a whole number"):
        environment_number("X", 3, {"X": "5.0"})


SECTIONS = {name: node for name, node in get_type_hints(Config).items() if dataclasses.is_dataclass(node)}
OPTIONS = [(f"{group}={option}", group, node) for group, options in GROUPS.items() for option, node in options.items()]
DEFAULTS = {"workload": "ranking", "parallel": "ddp", "profiling": "aorta", "fabric": "none", "telemetry": "default"}
NODES = [
    ("root", Config),
    *((name, node) for name, node in SECTIONS.items() if name not in GROUPS),
    *((word, node) for word, _, node in OPTIONS),
]


def test_the_page_is_up_to_date():
    page = (ROOT / "docs/configuration.md").read_text()
    assert page == reference(), "run: python -m scripts.config_reference > docs/configuration.md"


@pytest.mark.parametrize(("where", "node"), NODES, ids=[where for where, _ in NODES])
def test_every_key_has_a_comment(where, node):
    silent = [entry.name for entry in entries(node) if entry.kind and not entry.meaning]
    assert silent == [], f"{node.__name__} in {node.__module__}: a comment above the field is its documentation"


def plain(node):
    return OmegaConf.to_container(OmegaConf.structured(node), enum_to_str=True)


def test_options_and_sections_have_the_schema_s_values(composed):
    own = OmegaConf.to_container(composed(), enum_to_str=True)
    assert own == plain(Config) | {group: plain(GROUPS[group][option]) for group, option in DEFAULTS.items()}
    differing = {
        word: found
        for word, group, node in OPTIONS
        if (found := OmegaConf.to_container(composed(word)[group], enum_to_str=True)) != plain(node)
    }
    assert differing == {}


@pytest.mark.parametrize("path", sorted((ROOT / "config").rglob("*.yaml")), ids=lambda path: path.stem)
def test_a_file_states_only_what_differs_from_the_schema(path):
    def leaves(node, above=""):
        for name, value in node.items():
            yield from leaves(value, f"{above}{name}.") if isinstance(value, dict) else [(f"{above}{name}", value)]

    stated = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    values = OmegaConf.create(
        plain(Config) | {group: plain(GROUPS[group][option]) for group, option in DEFAULTS.items()}
    )
    given = {key: value for key, value in leaves(stated) if not key.startswith(("defaults", "hydra"))}
    assert [key for key, value in given.items() if OmegaConf.select(values, key) == value] == []
