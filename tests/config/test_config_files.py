"""`--config FILE`: a user's own file builds on AORTA's, whatever it is called."""

from __future__ import annotations

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


@pytest.mark.spec("D55")
@pytest.mark.parametrize(
    ("name", "said"),
    [("gone.yaml", "--config gone.yaml: no such file"), ("old.json", "only YAML is read (.yaml), not .json")],
)
def test_a_file_that_is_missing_or_json_is_named(door, tmp_path, name, said):
    (tmp_path / "old.json").write_text("{}")
    answer = door("--config", name)
    assert (answer.code, answer.jobs) == (1, [])
    assert said in answer.err
