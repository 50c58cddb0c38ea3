"""`--config FILE`: a user's own file builds on AORTA's, and runs no program: it is refused before Hydra imports
anything that it names.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.config.conftest import ROOT

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
    (tmp_path / "default.yaml").write_text(f"{text}training: {{max_steps: 7}}\n")
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


FILES = {
    "callbacks": "hydra: {callbacks: {x: {_target_: hydra.utils.get_class, path: CALLED}}}",
    "callbacks of an installed class": "hydra: {callbacks: {x: {_target_: hydra.experimental.callback.Callback}}}",
    "launcher": "hydra: {launcher: {_target_: hydra._internal.core_plugins.basic_launcher.logging.os.system}}",
    "sweeper": "hydra: {sweeper: {_target_: CALLED.Sweeper}}",
    "inside of the sweeper": "hydra: {sweeper: {params: {x: {_target_: CALLED.sampler}}}}",
    "logging": "hydra: {hydra_logging: {version: 1, handlers: {x: {'()': CALLED.handler}}}}",
    "logging class": "hydra: {job_logging: {version: 1, handlers: {x: {class: logging.FileHandler, filename: x}}}}",
    "search path": "hydra: {searchpath: ['pkg://CALLED']}",
    "environment": "hydra: {job: {env_set: {CXX: CALLED}}}",
}


@pytest.fixture
def called(tmp_path, monkeypatch) -> str:
    """A module that tells whether it was imported."""
    (tmp_path / "called_by_aorta.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    return "called_by_aorta"


@pytest.mark.parametrize("content", FILES.values(), ids=FILES)
def test_a_file_that_names_a_program_is_refused_before_it_is_called(door, tmp_path: Path, called, content):
    (tmp_path / "theirs.yaml").write_text("defaults: [default, _self_]\n" + content.replace("CALLED", called))
    answer = door("--config", str(tmp_path / "theirs.yaml"))
    assert (answer.code, called in sys.modules) == (1, False)
    assert "could run any program" in answer.err


@pytest.mark.parametrize(
    "word",
    [
        "+hydra.callbacks.x={_target_:hydra.utils.get_class,path:CALLED}",
        "hydra.sweeper._target_=CALLED.Sweeper",
        "hydra.searchpath=[pkg://CALLED]",
        "++hydra.job.env_set.CXX=CALLED",
        "hydra/job_logging=default",
    ],
)
def test_so_is_the_command_line_of_a_copied_command(door, called, word):
    answer = door(word.replace("CALLED", called))
    assert (answer.code, called in sys.modules) == (1, False)
    assert "could run any program" in answer.err


def test_a_group_beside_the_file_is_no_way_around_it(door, tmp_path: Path, called):
    (tmp_path / "theirs.yaml").write_text("defaults: [default, evil@hydra.callbacks.x, _self_]")
    (tmp_path / "evil.yaml").write_text(f"_target_: hydra.utils.get_class\npath: {called}")
    for words in (("--config", str(tmp_path / "theirs.yaml")), ("--config-dir", str(tmp_path), "--config-name=theirs")):
        answer = door(*words)
        assert (answer.code, called in sys.modules) == (1, False)
        assert "hydra.callbacks.x._target_" in answer.err


def test_what_is_installed_can_be_chosen(door):
    assert door("hydra/sweeper=basic", "hydra/launcher=basic", "hydra.sweeper.max_batch_size=3").code == 0
