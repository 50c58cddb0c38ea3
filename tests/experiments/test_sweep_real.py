"""Sweeps of real runs: one launch a job, each in a folder of its own; failures and results."""

from __future__ import annotations

import json
import statistics

import pytest

from tests.runs import record

pytestmark = [pytest.mark.dist, pytest.mark.thorough]


def test_each_job_is_a_launch_of_its_own_under_torchrun(sweep, tmp_path):
    done, found = sweep("training.max_steps=4,6", "hydra.launcher.nproc=2", "label=steps", name="steps")
    assert done.returncode == 0, done.stderr
    folders = [tmp_path / "steps" / name for name in ("00", "01")]
    for folder, steps in zip(folders, (4, 6), strict=True):
        records = [record(folder, rank) for rank in (0, 1)]
        assert [len(each.steps) for each in records] == [steps, steps]
        assert {each.header.world_size for each in records} == {2}
        assert json.loads((folder / "run.json").read_text())["config"]["training"]["max_steps"] == steps
    headers = [record(folder, rank).header for folder in folders for rank in (0, 1)]
    assert len({header.run_id for header in headers}) == 2
    assert len({header.pid for header in headers}) == 4
    assert [job.status for job in found.jobs] == ["done", "done"]
    assert found.swept == ["training.max_steps"]
    # The result of a job is the median of the sweep's metric: computed here from the record itself.
    for folder, job in zip(folders, found.jobs, strict=True):
        used = [step for rank in (0, 1) for step in record(folder, rank).steps if not step.warmup]
        ratios = [step.overlap["overlap_ratio"] for step in used if step.overlap["overlap_ratio"] is not None]
        assert job.ended.value == pytest.approx(statistics.median(ratios))
    assert {path.name for path in (tmp_path / "steps").iterdir()} == {"00", "01", "sweep.jsonl", "multirun.yaml"}


def test_a_failed_job_is_recorded_the_sweep_goes_on_and_taken_up_again_runs_what_is_not_done(sweep, tmp_path):
    words = ("training.start_step=3,null", "parallel=none")  # no checkpoint to resume from: seen at run time
    done, first = sweep(*words)
    assert done.returncode == 5
    assert "1 of 2 jobs failed: 00 (" in done.stderr
    assert "training.start_step=3" in done.stderr.splitlines()[-1]
    assert [(job.status, job.ended.exit_code == 0) for job in first.jobs] == [("failed", False), ("done", True)]
    assert record(tmp_path / "sweep" / "01").footer.exit_code == 0
    # parallel=none communicates nothing: the job is done and its result is null, with the reason.
    assert first.jobs[1].ended.value is None
    assert first.jobs[1].ended.reason
    kept = record(tmp_path / "sweep" / "01").header.run_id
    done, again = sweep(*words, "hydra.launcher.resume=true")
    assert done.returncode == 5
    assert [job.status for job in again.jobs] == ["failed", "done"]
    assert again.jobs[1] == first.jobs[1]
    assert again.jobs[0].ended.seconds != first.jobs[0].ended.seconds
    assert record(tmp_path / "sweep" / "01").header.run_id == kept
    refused, _ = sweep("training.start_step=4,null", "parallel=none", "hydra.launcher.resume=true")
    assert refused.returncode == 1
    assert "holds another sweep" in refused.stderr
