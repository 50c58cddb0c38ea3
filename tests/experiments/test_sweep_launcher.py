"""What a job is started with (a line of Python here), what becomes of one that goes wrong, a sweep taken up again."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
from contextlib import closing
from dataclasses import replace

import pytest

from aorta.config.multirun import SweepBatch, SweepJob, SweepStopped, TorchrunConf
from aorta.errors import ConfigError, RunIncomplete, ToolMissing
from aorta.experiments.journal import SWEEP_FILE, read_sweep, sweep_journal
from aorta.experiments.launch_folder import launch_id
from aorta.experiments.process import MARK
from aorta.experiments.sweep_launcher import TorchrunJobs
from tests.analysis.builders import header, metrics, step, write_rank
from tests.experiments.test_process import gone, wait_for

# Notes its words; then does what `x=` says.
PROGRAM = """
import json, os, sys, time
told = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
folder = os.path.join(told["training.output_dir"].strip("'"), told["label"].strip("'"))
os.makedirs(folder, exist_ok=True)
json.dump(sys.argv[1:], open(os.path.join(folder, "words.json"), "w"))
if told["x"] == "hang":
    time.sleep(600)
raise SystemExit(int(told["x"]) if told["x"].isdigit() else 0)
"""


@pytest.fixture
def jobs(tmp_path):
    return TorchrunJobs([str(tmp_path / "train.py")], ["--config-dir=/mine"])


def batch(tmp_path, *values, words=(), first=0, refused=None, **options):
    settings = {"command": [sys.executable, "-c", PROGRAM]} | options
    made = [
        SweepJob(first + place, (f"x={value}", *words), None, refused if value == "refused" else None)
        for place, value in enumerate(values)
    ]
    return SweepBatch(tuple(made), tmp_path / "sweep", TorchrunConf(**settings), ("x=" + ",".join(values), *words))


def recorded(tmp_path, name):
    """Leave a run in a job's folder, as the program would."""
    folder = tmp_path / "sweep" / name
    folder.mkdir(parents=True)
    for rank in range(2):
        lines = [step(rank, 2, global_step=n, overlap=metrics(10.0, 6.0, 4.0, 3.0)) for n in (0, 1)]
        write_rank(folder, header(rank, 2), lines)


def statuses(tmp_path):
    return [(job.name, job.status) for job in read_sweep(tmp_path / "sweep").jobs]


def test_a_job_gets_its_words_its_folder_and_the_sweep_s_options(tmp_path, jobs):
    jobs.launch(batch(tmp_path, "0", words=("label=mine", "++training.output_dir=there", "n='a b'", "~compile")))
    words = json.loads((tmp_path / "sweep" / "00" / "words.json").read_text())
    assert words == [
        "--config-dir=/mine",
        "x=0",
        "n='a b'",
        "~compile",
        f"training.output_dir='{tmp_path}/sweep'",
        "label='00'",
        "hydra.mode=RUN",
    ]


def test_failures_are_recorded_and_named_and_the_rest_is_run(tmp_path, jobs):
    values = jobs.launch(batch(tmp_path, "3", "0", "refused", "4", refused="it cannot be run"))
    assert len(values) == 4
    assert all(map(math.isnan, values))
    # 01 ended well and left nothing to read: that is a failure too.
    assert statuses(tmp_path) == [("00", "failed"), ("01", "failed"), ("02", "refused"), ("03", "failed")]
    with pytest.raises(
        RunIncomplete, match=r"4 of 4 jobs failed: 00 \(x=3\): exit code 3; 01.*; 02 .*cannot be run; 03"
    ):
        jobs.finish()


def test_the_result_is_the_metric_of_the_job_s_run(tmp_path, jobs):
    recorded(tmp_path, "00")
    (value,) = jobs.launch(batch(tmp_path, "0", metric="overlap_ratio"))
    assert value == 0.75
    assert jobs.finish() == 0


def test_batches_add_to_one_journal(tmp_path, jobs):
    jobs.launch(batch(tmp_path, "1"))
    jobs.launch(batch(tmp_path, "2", first=1))
    assert statuses(tmp_path) == [("00", "failed"), ("01", "failed")]
    assert not (tmp_path / "sweep" / "history").exists()


def test_a_job_that_does_not_end_in_time_has_failed(tmp_path, jobs):
    jobs.launch(batch(tmp_path, "hang", "5", timeout_s=5.0))  # the second starts Python in it, and ends
    ended = [job.ended for job in read_sweep(tmp_path / "sweep").jobs]
    assert [(each.status, each.reason) for each in ended] == [
        ("failed", "not done after 5.0 s"),
        ("failed", "exit code 5"),
    ]


def test_a_signal_ends_the_job_and_the_sweep(tmp_path, jobs):
    def send():
        wait_for(tmp_path / "sweep" / "00" / "words.json")
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=send).start()
    with pytest.raises(SweepStopped) as stopped:
        jobs.launch(batch(tmp_path, "hang", "0"))
    assert stopped.value.exit_code == 143
    assert statuses(tmp_path) == [("00", "stopped"), ("01", "not run")]


def test_a_metric_that_there_is_not_starts_nothing(tmp_path, jobs):
    with pytest.raises(
        ConfigError, match=r"hydra\.launcher\.metric=overlap: no metric of a run; there are job_step_ms"
    ):
        jobs.launch(batch(tmp_path, "0", metric="overlap"))
    assert not (tmp_path / "sweep").exists()


@pytest.mark.parametrize("key", ["label", "training.output_dir"])
def test_the_sweep_s_folder_cannot_be_swept_over(tmp_path, jobs, key):
    made = [SweepJob(number, (f"{key}={value}",), None) for number, value in enumerate("ab")]
    asked = SweepBatch(tuple(made), tmp_path / "sweep", TorchrunConf(), (f"{key}=a,b",))
    with pytest.raises(ConfigError, match=f"{key}=a, {key}=b: {key} says where the sweep writes"):
        jobs.launch(asked)
    assert not (tmp_path / "sweep").exists()


def test_a_program_that_is_not_there_ends_the_sweep(tmp_path, jobs):
    with pytest.raises(ToolMissing, match="no-such-program"):
        jobs.launch(batch(tmp_path, "0", "1", command=["no-such-program"]))
    assert (tmp_path / "sweep" / SWEEP_FILE).exists()


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
    for record in (tmp_path / "sweep" / "00").glob("rank_*_metrics.jsonl"):
        record.unlink()
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
