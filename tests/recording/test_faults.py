"""Faults that are injected on purpose: what they do is noticed and explained, and nothing is lost behind a kill
(`benchmarks/kills.py` says what has to hold). What cannot be injected: `tests/config/rules.json`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess

import psutil
import pytest

from aorta.autopsy.processes import progress_evidence
from aorta.commands import main
from aorta.config.loop import Fault, PlannedFault, planned_faults
from benchmarks.autopsy_scores import Planned, run, within
from benchmarks.kills import Seen, kill
from tests.experiments.test_process import gone
from tests.runs import HANGS_S, command, environment


def test_two_faults_at_once():
    fault = Fault("slow_data+sigkill", "0+1", 7)
    assert planned_faults(fault) == [PlannedFault("slow_data", 0, 7), PlannedFault("sigkill", 1, 7)]
    assert planned_faults(Fault()) == []


def test_a_fault_of_a_training_is_explained():
    row = run(Planned("sigkill", 2, "ddp", timeout_s=60.0))
    assert (row["exact"], row["healthy_accused"], row["phase"], row["verdict"]) == (True, 0, True, True)


@pytest.mark.dist
def test_a_training_that_hangs_is_explained_live_and_when_it_was_killed(tmp_path, capsys):
    """Of torchrun and three ranks rank 0 is the only one that nobody kills."""
    folder = tmp_path / "hung"
    fault = ("fault.kind=stuck_data", "fault.rank=1", "fault.step=5", "watchdog.timeout_s=600")
    words = command(3, f"training.output_dir={tmp_path}", "label=hung", "training.max_steps=20", *fault)

    def autopsy(*options):
        code = main(["autopsy", *options, "--json", str(folder)])
        verdict = json.loads(capsys.readouterr().out or '{"culprits": []}')
        return code, [(one["rank"], one["kind"]) for one in verdict["culprits"]]

    def pids():
        ranks = sorted(progress_evidence(folder), key=lambda one: one.rank) if folder.exists() else []
        return [one.pid for one in ranks if one.pid is not None]

    agent = subprocess.Popen(words, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        assert within(HANGS_S, lambda: len(pids()) == 3)
        assert within(HANGS_S, lambda: autopsy("--live")[0] == 3)  # not stuck, slow or undecided for long enough
        assert autopsy("--live") == (3, [(1, "stuck_outside")])
        assert agent.poll() is None  # being looked at ends nothing
        agent.kill()
        agent.wait()
        assert autopsy("--live") == (3, [(1, "stuck_outside")])
        for pid in pids()[1:]:
            os.kill(pid, signal.SIGKILL)
        assert all(gone(pid) for pid in pids())  # rank 0 by the error of its collective
        assert autopsy() == (3, [(1, "dead"), (2, "dead")])
    finally:
        agent.kill()
        for pid in filter(psutil.pid_exists, pids()):
            os.kill(pid, signal.SIGKILL)


KILLED = ("launcher", "watchdog", "both", "all")
"""A rank alone: `test_endings.py`; all ranks: `tests/autopsy/test_watchdog.py`."""


@pytest.mark.dist
@pytest.mark.thorough
def test_nothing_is_left_and_nothing_lost_behind_a_kill(tmp_path):
    seen = Seen(end_s=HANGS_S)
    kill(tmp_path, len(KILLED), 1, seen, targets=KILLED)
    assert seen.findings == []
    assert seen.kills
