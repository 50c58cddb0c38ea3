"""Sweeps: what a job is started with (a line of Python here), what becomes of one that goes wrong, and the table."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from aorta.errors import ConfigError, RunIncomplete, ToolMissing
from aorta.experiments.launch_engine import SweepJobs
from aorta.experiments.launch_folder import Journal
from aorta.report.command import overlap_report
from tests.analysis.builders import write_manifest
from tests.analysis.compare.builders import launch
from tests.experiments.test_process import wait_for
from tests.runs import ROOT, SMALL, finished, record

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
def jobs() -> SweepJobs:
    return SweepJobs(["-c", PROGRAM], ["--config-dir=/mine"], None)


def lines(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "sweep.jsonl").read_text().splitlines()]


def test_a_job_gets_its_words_its_folder_and_the_sweep_s_options(tmp_path: Path, jobs: SweepJobs) -> None:
    jobs.launch(["x=0", "label=mine", "++training.output_dir=there", "n='a b'", "~compile"], tmp_path)
    assert json.loads((tmp_path / "00" / "words.json").read_text()) == [
        "--config-dir=/mine",
        "x=0",
        "n='a b'",
        "~compile",
        f"training.output_dir='{tmp_path}'",
        "label='00'",
        "hydra.mode=RUN",
    ]


def test_failures_are_recorded_and_named_and_the_rest_is_run(
    tmp_path: Path, jobs: SweepJobs, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in (1, 2):
        launch(tmp_path / "made" / f"0{number}", 0.25 * number, ranks=2)
        write_manifest(tmp_path / "made" / f"0{number}", world_size=2)
    assert math.isnan(jobs.launch(["x=3", "label=w"], tmp_path / "sweep"))
    assert math.isnan(jobs.launch(["x=0"], tmp_path / "sweep"))  # ended well, and left nothing to read
    (tmp_path / "made" / "02").rename(tmp_path / "sweep" / "02")
    assert jobs.launch(["x=0"], tmp_path / "sweep") > 0
    with pytest.raises(
        RunIncomplete, match=r"2 of 3 jobs failed: 00 \(x=3 label=w\): exit code 3; 01 \(x=0\): there is no record in"
    ):
        jobs.finish()
    assert [(line["job"], line["exit_code"], line["reason"] is None) for line in lines(tmp_path / "sweep")] == [
        ("00", 3, False), ("01", 0, False), ("02", 0, True)
    ]  # fmt: skip
    with (tmp_path / "sweep" / "sweep.jsonl").open("a") as file:
        file.write('{"job":')  # a kill cut it short
    capsys.readouterr()
    assert overlap_report([str(tmp_path / "sweep")]) == 0
    said = capsys.readouterr().out
    assert [line.split() for line in said.splitlines() if line.startswith("0") and ":" not in line] == [
        ["00", "3", "w", "-", "-", "-", "failed"],
        ["01", "0", "-", "-", "-", "-", "failed"],
        ["02", "0", "-", "5", "100", "50", "%", "done"],
    ]
    assert "\n00: exit code 3\n" in said
    assert "sweep.jsonl:4: " in said


def test_an_earlier_sweep_or_run_or_a_sweep_under_way_is_left_alone(tmp_path: Path) -> None:
    def launched(folder: Path) -> None:
        SweepJobs(["-c", PROGRAM], [], None).launch(["x=0"], folder)

    launched(tmp_path / "sweep")
    kept = lines(tmp_path / "sweep")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "rank_0_metrics.jsonl").touch()
    for name in ("sweep", "run"):
        with pytest.raises(ConfigError, match="holds an earlier sweep or a run; give this sweep another label=NAME"):
            launched(tmp_path / name)
    assert lines(tmp_path / "sweep") == kept
    (tmp_path / "other").mkdir()
    journal = Journal(tmp_path / "other" / "sweep.jsonl", "in use")
    with pytest.raises(ConfigError):
        launched(tmp_path / "other")
    journal.close()


def test_a_signal_ends_the_job_and_the_sweep(tmp_path: Path, jobs: SweepJobs) -> None:
    def send() -> None:
        wait_for(tmp_path / "00" / "words.json")
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=send).start()
    assert math.isnan(jobs.launch(["x=hang"], tmp_path))
    assert math.isnan(jobs.launch(["x=0"], tmp_path))
    assert jobs.finish() == 143
    assert [line["reason"] for line in lines(tmp_path)] == ["stopped by SIGTERM"]


def test_a_program_that_is_not_there_ends_the_sweep(
    tmp_path: Path, jobs: SweepJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs._command[0] = "no-such-program"
    with pytest.raises(ToolMissing, match="no-such-program"):
        jobs.launch(["x=0"], tmp_path)


@pytest.mark.dist
@pytest.mark.thorough
def test_each_job_is_a_launch_of_its_own_under_torchrun(tmp_path: Path) -> None:
    train = [sys.executable, str(ROOT / "train.py"), "-m", "--nproc_per_node", "2", *SMALL]
    words = [f"training.output_dir={tmp_path}", "label=steps", "training.max_steps=4,6"]
    done = finished([*train, *words], folder=tmp_path)
    assert done.returncode == 0, done.stderr
    folders = [tmp_path / "steps" / name for name in ("00", "01")]
    for folder, steps in zip(folders, (4, 6), strict=True):
        records = [record(folder, rank) for rank in (0, 1)]
        assert [len(each.steps) for each in records] == [steps, steps]
        assert {each.header.world_size for each in records} == {2}
    headers = [record(folder, rank).header for folder in folders for rank in (0, 1)]
    assert len({header.run_id for header in headers}) == 2
    assert len({header.pid for header in headers}) == 4
    assert {path.name for path in (tmp_path / "steps").iterdir()} == {"00", "01", "sweep.jsonl", "multirun.yaml"}
