"""Signals, a runner killed outright, two runners, a launch that hangs: nothing is left behind, nothing mixes."""

from __future__ import annotations

import os
import pty
import signal

import pytest

from tests.experiments.conftest import Bench
from tests.experiments.test_process import gone, has_ended
from tests.runs import HANGS_S

pytestmark = pytest.mark.thorough

AB = ("--launches", "1", "--candidate", "a=2")


def hanging(bench: Bench) -> dict[str, int]:
    """Once a launch hangs: ids of its torchrun and of its rank."""
    (call,) = bench.until(lambda: [call for call in bench.calls if call["call"] == "hangs"])
    return {name: call[name] for name in ("pid", "rank")}


def test_a_signal_ends_the_launch_its_ranks_and_the_plan(bench: Bench) -> None:
    bench.acts(candidate_00={"hang": 1})
    runner = bench.start(*AB)
    left = hanging(bench)
    runner.send_signal(signal.SIGINT)
    _, err = runner.communicate(timeout=HANGS_S)
    assert runner.returncode == 128 + signal.SIGINT
    assert "stopped; run the same command again for the missing launches" in err
    assert has_ended(left["pid"])
    assert has_ended(left["rank"])
    end = bench.events("end")[-1]
    assert (end["outcome"], end["reason"], end["left_behind"]) == ("stopped", "stopped by SIGINT", 1)
    assert bench.events("close")[-1]["exit_code"] == 128 + signal.SIGINT
    code, _, _ = bench(*AB)
    assert code == 0
    assert bench.launched == ["reference/00", "candidate/00", "candidate/00"]
    assert (bench.home / "plan" / "aside" / "candidate" / "00.stopped").is_dir()


def test_a_terminal_that_was_closed_costs_neither_the_journal_nor_the_exit_code(bench: Bench) -> None:
    bench.acts(reference_00={"hang": 1})
    mine, its = pty.openpty()
    runner = bench.start(*AB, stderr=its)
    os.close(its)
    left = hanging(bench)
    os.close(mine)  # what is written from now on fails with EIO
    runner.terminate()
    runner.communicate(timeout=HANGS_S)
    assert runner.returncode == 143
    assert bench.events("close")[-1]["exit_code"] == 143
    assert has_ended(left["rank"])


def test_a_runner_killed_outright_leaves_no_torchrun_and_its_launch_is_done_again(bench: Bench) -> None:
    bench.acts(candidate_00={"hang": 1})
    runner = bench.start(*AB)
    left = hanging(bench)
    runner.kill()
    runner.communicate(timeout=HANGS_S)
    assert gone(left["pid"])  # Linux tells it; without, the next runner ends it
    assert not has_ended(left["rank"])
    code, _, _ = bench(*AB)
    assert code == 0
    assert has_ended(left["rank"])
    assert bench.launched == ["reference/00", "candidate/00", "candidate/00"]
    lost = next(end for end in bench.events("end") if end["outcome"] == "lost")
    assert (lost["launch"], lost["left_behind"], lost["kept"]) == ("candidate/00", 1, "aside/candidate/00.lost")
    assert (bench.home / "plan" / lost["kept"] / "rank_0_metrics.jsonl").read_text() == "{"
