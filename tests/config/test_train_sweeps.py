"""Sweeps on the command line: what is refused, and what whoever launches the jobs gets."""

from __future__ import annotations

import pytest

from aorta.errors import ConfigError
from aorta.train_command import split_ranks
from tests.config.conftest import Noting


@pytest.mark.parametrize("flag", ["-m", "--multirun"])
@pytest.mark.spec("D57")
def test_the_jobs_of_a_sweep_are_launched_one_after_another(door, flag, tmp_path):
    answer = door(flag, "training.max_steps=1,2", "training.batch_size=3", f"training.output_dir={tmp_path}/out")
    assert (answer.code, answer.out, answer.err, answer.jobs) == (0, "", "", [])
    words = [f"training.output_dir={tmp_path}/out"]
    assert answer.swept.jobs == [
        ([f"training.max_steps={steps}", "training.batch_size=3", *words], tmp_path / "out" / "sweep")
        for steps in (1, 2)
    ]
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")] == ["out/sweep/multirun.yaml"]


@pytest.mark.parametrize("flag", ["-m", "--multirun", "--multi"])
@pytest.mark.spec("D57")
def test_a_sweep_inside_torchrun_is_refused(door, flag, monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "2")
    answer = door(flag, "training.max_steps=1,2")
    assert (answer.code, answer.jobs, answer.swept.jobs) == (1, [], [])
    assert "--multirun inside torchrun" in answer.err
    assert "one torchrun a job" in answer.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("label=a,b", "label=a,b: says where the sweep writes"),
        ("+training.output_dir=a,b", "says where the sweep writes"),
        ("hydra.launcher.nproc=2", "hydra.launcher.nproc"),
        ("hydra/launcher=nonsense", "hydra/launcher=nonsense"),
        ("training.max_stepz=1,2", "training.max_stepz"),
    ],
)
def test_a_slip_in_a_sweep(door, word, said):
    answer = door("-m", "training.batch_size=1,2", word)
    assert (answer.code, answer.swept.jobs) == (1, [])
    assert said in answer.err
    assert "Traceback" not in answer.err


def test_the_launching_decides_on_the_exit_code_and_gets_the_label_as_folder(door, tmp_path):
    door.noting = Noting()
    door.noting.code = 5
    answer = door("-m", "training.max_steps=1,2", "label=named")
    assert answer.code == 5
    assert {folder for _, folder in answer.swept.jobs} == {tmp_path / "artifacts" / "named"}
    assert answer.swept.options == []


def test_jobs_get_the_file_that_the_sweep_was_built_on(door, tmp_path):
    (tmp_path / "mine.yaml").write_text("defaults: [default, _self_]\n")
    answer = door("training.max_steps=1,2", "--config", "mine.yaml", "--multirun")
    assert answer.swept.options == [f"--config-dir={tmp_path}", f"--config-name={tmp_path}/mine.yaml"]


def test_an_error_while_launching_ends_the_sweep_and_a_bug_keeps_its_traceback(door):
    door.noting = Noting()
    door.noting.fails = ConfigError("no folder")
    answer = door("-m", "training.max_steps=1,2")
    assert (answer.code, answer.err, len(answer.swept.jobs)) == (1, "error: no folder\n", 1)
    door.noting.fails = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        door("-m", "training.max_steps=1,2")


def test_ranks_of_a_sweep_are_those_of_each_job():
    assert split_ranks(["-m", "--nproc_per_node", "2", "a=1,2"]) == ("2", ["-m", "a=1,2"])
