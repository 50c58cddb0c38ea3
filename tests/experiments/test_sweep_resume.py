"""A sweep taken up again: what is done stays, the rest is run, and another sweep is refused."""

from __future__ import annotations

import json
import math
import subprocess
from contextlib import closing
from dataclasses import replace

import pytest

from aorta.config.multirun import SweepJob
from aorta.errors import ConfigError
from aorta.experiments.journal import SWEEP_FILE, read_sweep, sweep_journal
from aorta.experiments.launch_folder import launch_id
from aorta.experiments.process import MARK
from aorta.experiments.sweep_launcher import TorchrunJobs
from tests.experiments.test_process import gone
from tests.experiments.test_sweep_launcher import batch, recorded, statuses


def launched(tmp_path, *values, **more):
    """One sweep from its beginning to its end; returns the results of its jobs."""
    return TorchrunJobs([str(tmp_path / "train.py")], ["--config-dir=/mine"]).launch(batch(tmp_path, *values, **more))


def started(tmp_path):
    """Jobs that noted their words since this was asked last."""
    notes = sorted((tmp_path / "sweep").glob("*/words.json"))
    names = [path.parent.name for path in notes]
    for path in notes:
        path.unlink()
    return names


def test_what_is_done_is_not_run_again(tmp_path):
    recorded(tmp_path, "00")
    launched(tmp_path, "0", "3", "0")
    assert started(tmp_path) == ["00", "01", "02"]
    values = launched(tmp_path, "0", "3", "0", resume=True)
    assert started(tmp_path) == ["01", "02"]
    assert values[0] == 0.75
    assert all(map(math.isnan, values[1:]))
    assert statuses(tmp_path) == [("00", "done"), ("01", "failed"), ("02", "failed")]
    assert not (tmp_path / "sweep" / "history").exists()


def test_without_resume_a_sweep_begins_anew(tmp_path):
    recorded(tmp_path, "00")
    launched(tmp_path, "0")
    started(tmp_path)
    launched(tmp_path, "0")
    assert started(tmp_path) == ["00"]
    assert (tmp_path / "sweep" / "history").exists()


def test_a_folder_without_a_sweep_gets_one(tmp_path):
    launched(tmp_path, "3", resume=True)
    assert statuses(tmp_path) == [("00", "failed")]


def test_a_done_job_whose_run_is_gone_is_run_again(tmp_path):
    recorded(tmp_path, "00")
    launched(tmp_path, "0")
    started(tmp_path)
    (tmp_path / "sweep" / "00" / "rank_0_metrics.jsonl").unlink()
    launched(tmp_path, "0", resume=True)
    assert started(tmp_path) == ["00"]


@pytest.mark.parametrize(
    ("values", "more", "said"),
    [
        (("0", "4"), {}, r"words: \['x=0,3'\] there, \['x=0,4'\] now"),
        (("0", "3"), {"nproc": 2}, "nproc: 1 there, 2 now"),
        (("0", "3"), {"metric": "job_step_ms"}, "metric: 'overlap_ratio' there, 'job_step_ms' now"),
        (("0", "3"), {"command": ["other"]}, r"command: .* there, \['other'\] now"),
    ],
)
def test_another_sweep_is_refused_by_key_and_both_values(tmp_path, values, more, said):
    launched(tmp_path, "0", "3")
    started(tmp_path)
    with pytest.raises(ConfigError, match=said):
        launched(tmp_path, *values, resume=True, **more)
    assert started(tmp_path) == []


def test_a_job_that_was_another_one_is_refused(tmp_path):
    """An optimiser may propose something else, and a grid may be shuffled."""
    launched(tmp_path, "0", "3")
    started(tmp_path)
    asked = batch(tmp_path, "0", "3", resume=True)
    asked = replace(asked, jobs=(SweepJob(0, ("x=5",), None), asked.jobs[1]))
    with pytest.raises(ConfigError, match=r"job 00 of .* was x=0, and is x=5 now"):
        TorchrunJobs([str(tmp_path / "train.py")], ["--config-dir=/mine"]).launch(asked)
    assert started(tmp_path) == []


def test_a_job_that_was_begun_again_and_has_not_ended_is_not_run(tmp_path):
    launched(tmp_path, "3")
    with (tmp_path / "sweep" / SWEEP_FILE).open("ab") as file:
        file.write(json.dumps({"record": "planned", "job": "00", "words": ["x=3"]}).encode() + b"\n")
    assert statuses(tmp_path) == [("00", "not run")]


def test_a_torn_line_stays_alone(tmp_path):
    launched(tmp_path, "3")
    with (tmp_path / "sweep" / SWEEP_FILE).open("ab") as file:
        file.write(b'{"record":"ended","job":"00","sta')
    launched(tmp_path, "3", resume=True)
    sweep = read_sweep(tmp_path / "sweep")
    assert [job.status for job in sweep.jobs] == ["failed"]
    assert [problem.partition(": ")[0] for problem in sweep.problems] == ["sweep.jsonl:4"]


@pytest.mark.parametrize("resume", [True, False])
def test_two_sweeps_do_not_share_a_folder(tmp_path, resume):
    launched(tmp_path, "3")
    started(tmp_path)
    with closing(sweep_journal(tmp_path / "sweep")):
        with pytest.raises(ConfigError, match="another process runs a sweep there"):
            launched(tmp_path, "3", resume=resume)
        assert started(tmp_path) == []
    launched(tmp_path, "3", resume=resume)


def test_a_job_that_a_killed_sweep_left_running_is_ended_first(tmp_path):
    folder = tmp_path / "sweep"
    launched(tmp_path, "3")
    journal = folder / SWEEP_FILE
    journal.write_text("".join(journal.read_text().splitlines(keepends=True)[:2]))  # begun and planned, no end
    left = subprocess.Popen(["sleep", "600"], env={"PATH": "/usr/bin:/bin", MARK: launch_id(folder, "00")})
    try:
        launched(tmp_path, "3", resume=True)
        assert gone(left.pid)
    finally:
        left.kill()
        left.wait()
