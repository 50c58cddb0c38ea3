"""How runs end: resumed, repeated, stopped, with a dead rank, on a full disk."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from aorta.recording import rank_process, recorded_run
from aorta.recording import train as training
from aorta.records.progress import read_progress
from tests.loop import resolved
from tests.rank_records import read_rank
from tests.recording.test_every_strategy import TINY
from tests.runs import HANGS_S, SMALL, command, environment, finished, record, train, until
from tests.trained_ways import PIPELINES

pytestmark = pytest.mark.dist


def start(folder: Path, *words: str, options: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """A long run in the background."""
    long = ("training.max_steps=2000", "training.epochs=1000", f"training.output_dir={folder}")
    words, pipe = command(2, *SMALL, *long, *words, options=options), subprocess.PIPE
    return subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True, env=environment())


def wait_for_steps(folder: Path, count: int, rank: int = 0) -> int:
    """Wait until a rank wrote `count` steps; its process id."""
    path = folder / f"rank_{rank}_metrics.jsonl"
    until(lambda: path.exists() and path.read_bytes().count(b"\n") > count)
    return read_rank(path).header.pid


# Dropout and the schedule go on too, and the optimizer's moments are those of a sharded model.
RESUMED = (*TINY, "training.max_steps=6", "training.checkpoint_interval=3", "training.epochs=2")
DROPOUT, ONE_BATCH = "workload.dropout=0.1", "training.gradient_accumulation=1"
RESUMED_CASES = {
    "fsdp": (2, (DROPOUT,)),
    "tp": (2, (DROPOUT,)),
    "hsdp": (4, (DROPOUT,)),
    "fsdp_tp": (4, (DROPOUT,)),
    "fsdp_cp": (4, ("workload=gpt",)),
    # One expert on a rank: each is cut between the groups.
    "fsdp_ep": (4, ("workload=moe", "workload.num_experts=2")),
    "pp": (2, (DROPOUT, ONE_BATCH)),
    "fsdp_pp": (4, (DROPOUT, ONE_BATCH)),
}


@pytest.mark.parametrize(
    "strategy",
    [pytest.param(name, marks=pytest.mark.thorough if name == "fsdp" else pytest.mark.slow) for name in RESUMED_CASES],
)
def test_a_resumed_run_continues_bit_identically(tmp_path, strategy):
    """The same losses and gradient norms as of one that never stopped, to the last digit."""
    ranks, words = RESUMED_CASES[strategy]
    words = (*RESUMED, f"parallel={strategy}", *words)
    train(tmp_path, *words, ranks=ranks)
    with_the_loss = range(ranks - ranks // 2 if strategy in PIPELINES else 0, ranks)
    whole = [record(tmp_path, rank).steps for rank in range(ranks)]
    assert [step.global_step for step in whole[0]] == list(range(6))
    train(tmp_path, *words, "training.start_step=3", ranks=ranks)
    for rank in range(ranks):
        resumed = record(tmp_path, rank)
        assert resumed.header.start_step == 3
        for got, expected in zip(resumed.steps, whole[rank][3:], strict=True):
            assert got.global_step == expected.global_step
            assert got.grad_norm is not None
            assert (got.loss is None) == (rank not in with_the_loss)
            assert (got.loss, got.grad_norm, got.lr) == (expected.loss, expected.grad_norm, expected.lr)
    # What is compared changes from step to step: a run that stood still would agree with itself.
    assert all(len({step.loss for step in whole[rank]}) == 6 for rank in with_the_loss)


@pytest.mark.thorough
@pytest.mark.spec("D31")
def test_a_signal_to_one_rank_stops_all_after_the_same_step(tmp_path):
    run = start(tmp_path)
    wait_for_steps(tmp_path, 3, rank=0)
    os.kill(wait_for_steps(tmp_path, 3, rank=1), signal.SIGINT)
    run.communicate(timeout=HANGS_S)
    ends = [record(tmp_path, rank) for rank in (0, 1)]
    assert [(end.problems, end.footer.reason) for end in ends] == [([], "signal")] * 2
    assert ends[0].steps[-1].global_step == ends[1].steps[-1].global_step


@pytest.mark.thorough
def test_a_killed_rank_is_named_by_the_other_and_a_restart_resumes_and_keeps_both_attempts(tmp_path):
    steps = 160  # far from its end when a rank is killed
    words = ("training.checkpoint_interval=4", f"training.max_steps={steps}", "training.timeout_s=300")
    run = start(tmp_path, *words, options=("--max-restarts", "1"))
    os.kill(wait_for_steps(tmp_path, 9, rank=1), signal.SIGKILL)
    _, stderr = run.communicate(timeout=HANGS_S)
    assert run.returncode == 0, stderr
    blamed = "rank 1 exited without reporting an error"
    assert f"error: rank 0: a collective failed because of a peer: {blamed}, or hangs" in stderr
    (first,) = (tmp_path / "history").iterdir()
    now, survivor, dead = record(tmp_path), record(first), record(first, 1)
    assert (survivor.problems, survivor.footer.exit_code, dead.footer) == ([], 5, None)
    assert blamed in survivor.footer.error
    assert min(len(survivor.steps), len(dead.steps)) >= 8
    assert (survivor.header.attempt, now.header.attempt) == (0, 1)
    assert survivor.header.run_id == now.header.run_id
    assert now.header.start_step > 0
    assert now.header.start_step % 4 == 0
    assert [step.global_step for step in now.steps] == list(range(now.header.start_step, steps))


@pytest.mark.thorough
def test_a_full_disk_ends_all_ranks_and_names_the_one_that_met_it(tmp_path):
    # A limit on file size is what a test can set without a disk of its own; write() fails in the same way.
    limited = ["bash", "-c", 'ulimit -f 48 && exec "$@"', "limited"]
    words = command(2, *SMALL, "training.max_steps=400", "training.epochs=1000", f"training.output_dir={tmp_path}")
    done = finished(limited + words, HANGS_S)
    assert done.returncode != 0
    assert "cannot write its record" in done.stderr
    assert "File too large" in done.stderr
    for kept in (record(tmp_path, rank) for rank in (0, 1)):
        assert len(kept.steps) > 3
        assert (kept.problems, kept.footer.exit_code) == ([], 5)


def trained_here(monkeypatch: pytest.MonkeyPatch, folder: Path, *words: str) -> int:
    """The exit code of a run of one rank in this process."""
    monkeypatch.setattr(rank_process, "start_logging", lambda *_: None)
    for name in set(os.environ) - set(environment()):
        monkeypatch.delenv(name)
    return training.run_training(resolved(*SMALL, "training.device=cpu", f"training.output_dir={folder}", *words))


@pytest.mark.spec("D31")
@pytest.mark.parametrize("stopped_by", [None, signal.SIGTERM], ids=["completed", "stopped"])
def test_a_signal_ends_the_run_after_a_step_and_clocks_are_measured_without_one(tmp_path, monkeypatch, stopped_by):
    footers = []

    class Clocks(recorded_run.ClockSynchronisation):
        def at_end(self, *, write):
            footers.append(record(tmp_path).footer.reason)
            return super().at_end(write=write)

    class Agreement(training.StopAgreement):
        def may_start(self, step):
            if step == 1 and stopped_by:
                signal.raise_signal(stopped_by)
            return super().may_start(step)

    monkeypatch.setattr(recorded_run, "ClockSynchronisation", Clocks)
    monkeypatch.setattr(training, "StopAgreement", Agreement)
    code = trained_here(monkeypatch, tmp_path, "training.max_steps=2")
    kept = record(tmp_path)
    assert kept.footer.steps_written == len(kept.steps)
    seen = (code, kept.footer.exit_code, kept.footer.reason, kept.footer.signal)
    (ring,) = map(read_progress, tmp_path.rglob("rank_0.bin"))
    assert ring.state.exit_code == code
    if stopped_by:
        assert (seen, footers) == ((143, 143, "signal", "SIGTERM"), [])
    else:  # behind the footer
        assert (seen, footers) == ((0, 0, "completed", None), ["completed"])


def test_a_folder_that_was_removed_meanwhile_is_said(tmp_path, monkeypatch, caplog):
    folder = tmp_path / "run"

    class Agreement(training.StopAgreement):
        def may_start(self, step):
            if step == 1:
                shutil.rmtree(folder)
            return super().may_start(step)

    monkeypatch.setattr(training, "StopAgreement", Agreement)
    assert trained_here(monkeypatch, folder, "training.max_steps=2") == 0
    assert f"completed: 2 steps, but {folder} was removed, renamed or replaced meanwhile" in caplog.messages
    assert not [message for message in caplog.messages if "aorta report" in message or "clock_sync" in message]


@pytest.mark.thorough
@pytest.mark.spec("D30")
def test_a_small_data_set_is_repeated_for_as_many_steps_as_asked_for(tmp_path):
    train(tmp_path, "training.max_steps=7", "dataset.num_samples=24", "training.batch_size=8", ranks=1)
    steps = record(tmp_path).steps
    assert [(step.epoch, step.step, step.global_step) for step in steps] == [
        (0, 0, 0), (0, 1, 1), (0, 2, 2), (1, 0, 3), (1, 1, 4), (1, 2, 5), (2, 0, 6)
    ]  # fmt: skip
    assert json.loads((tmp_path / "run.json").read_text())["steps_planned"] == 7
