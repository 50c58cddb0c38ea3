"""A configuration of somebody else's runs no program: it is refused before Hydra calls or imports anything it names."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

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
        for sweep in ((), ("-m", "training.seed=1,2")):
            answer = door(*words, *sweep)
            assert (answer.code, called in sys.modules) == (1, False)
            assert "hydra.callbacks.x._target_" in answer.err


def test_what_is_installed_can_be_chosen(door):
    assert door("hydra/sweeper=basic", "hydra/launcher=basic", "hydra.sweeper.max_batch_size=3").code == 0
