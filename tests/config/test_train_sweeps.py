"""Sweeps on the command line: what is refused, what runs job by job, and what whoever launches the jobs gets."""

from __future__ import annotations

import os
import sys

import pytest
from hydra.core.global_hydra import GlobalHydra

from aorta.config.multirun import SweepBatch, SweepStopped
from aorta.train_command import compose as main
from tests.config.conftest import ROOT


@pytest.mark.parametrize("flag", ["-m", "--multirun"])
@pytest.mark.spec("D57")
def test_a_sweep_without_a_launching_runs_one_job_after_another(door, flag, tmp_path):
    answer = door(flag, "training.max_steps=1,2", "training.batch_size=3", f"training.output_dir={tmp_path}/out")
    assert (answer.code, answer.out, answer.err) == (0, "", "")
    assert [job.config.training.max_steps for job in answer.jobs] == [1, 2]
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")] == ["out/sweep/multirun.yaml"]


@pytest.mark.parametrize("flag", ["-m", "--multirun", "--multi"])
@pytest.mark.spec("D57")
def test_a_sweep_inside_torchrun_is_refused(door, flag, monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "2")
    answer = door(flag, "training.max_steps=1,2")
    assert (answer.code, answer.jobs) == (1, [])
    assert "--multirun inside torchrun" in answer.err
    assert "one torchrun a job" in answer.err
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_is_checked_whole_before_its_first_job(door):
    answer = door("-m", "training.max_steps=1,0")
    assert (answer.code, answer.jobs) == (1, [])
    assert "job 1 (training.max_steps=0)" in answer.err
    assert "training.max_steps=0: must be at least 1" in answer.err


@pytest.mark.thorough
def test_jobs_are_checked_for_the_ranks_they_will_have(door):
    words = ("-m", "parallel=hsdp", "parallel.replicas=1,2")
    assert "parallel.replicas=2" in door(*words).err
    answer = door(*words, "hydra.launcher.nproc=4")
    assert (answer.code, len(answer.jobs)) == (0, 2)
    assert "WORLD_SIZE" not in os.environ


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("hydra.launcher.nproc=0", "hydra.launcher.nproc=0: must be at least 1"),
        ("hydra.launcher.nproc=two", "hydra.launcher.nproc=two"),
        ("hydra.launcher.nprocs=2", "hydra.launcher.nprocs"),
        ("hydra.launcher.timeout_s=0", "must be greater than 0, or null"),
        ("hydra.launcher.command=[]", "name a program, or null"),
        ("hydra/launcher=basic", "hydra/launcher=basic: the jobs of a sweep are started by hydra/launcher=torchrun"),
        ("hydra/launcher=nonsense", "hydra/launcher=nonsense"),
        ("training.max_stepz=1,2", "training.max_stepz"),
    ],
)
def test_a_slip_in_a_sweep(door, word, said):
    answer = door("-m", "training.batch_size=1,2", word)
    assert (answer.code, answer.jobs) == (1, [])
    assert said in answer.err
    assert "Traceback" not in answer.err


class Noting:
    """Notes what it is asked to launch."""

    def __init__(self) -> None:
        self.options: list[str] = []
        self.batches: list[SweepBatch] = []

    def __call__(self, options):
        self.options = options
        return self

    def launch(self, batch):
        self.batches.append(batch)
        return [float(job.number) for job in batch.jobs]

    def finish(self):
        return 5


def swept(monkeypatch, noting, *words):
    GlobalHydra.instance().clear()
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    return main(lambda resolved: pytest.fail("a job of a sweep must not run here"), ROOT / "config", noting)


def test_a_launching_gets_the_jobs_and_decides_on_the_exit_code(door, monkeypatch, tmp_path):
    noting = Noting()
    words = ("-m", "training.max_steps=1,2", "label=named", "hydra.launcher.metric=job_step_ms")
    assert swept(monkeypatch, noting, *words) == 5
    (batch,) = noting.batches
    assert [job.words for job in batch.jobs] == [(f"training.max_steps={n}", "label=named") for n in (1, 2)]
    assert [job.resolved.config.training.max_steps for job in batch.jobs] == [1, 2]
    assert batch.folder == tmp_path / "artifacts" / "named"
    assert (batch.options.metric, batch.options.nproc) == ("job_step_ms", 1)
    assert noting.options == []


def test_jobs_get_the_file_that_the_sweep_was_built_on(door, monkeypatch, tmp_path):
    (tmp_path / "mine.yaml").write_text("defaults: [default, _self_]\n")
    noting = Noting()
    assert swept(monkeypatch, noting, "training.max_steps=1,2", "--config", "mine.yaml", "--multirun") == 5
    assert noting.options == [f"--config-dir={tmp_path}", f"--config-name={tmp_path}/mine.yaml"]


def test_a_stopped_sweep_ends_with_the_signal_s_code(door, monkeypatch):
    class Interrupted(Noting):
        def launch(self, batch):
            raise SweepStopped(143)

    assert swept(monkeypatch, Interrupted(), "-m", "training.max_steps=1,2") == 143


def test_a_bug_while_launching_keeps_its_traceback(door, monkeypatch):
    class Broken(Noting):
        def launch(self, batch):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        swept(monkeypatch, Broken(), "-m", "training.max_steps=1,2")
