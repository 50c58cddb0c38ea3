"""Loggers while a run goes on: what they get, on which rank, and that no logger can hurt the run; and
what rank 0 says.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import nn

import aorta
from aorta.config.schema import Training
from aorta.distributed.peers import Peers
from aorta.errors import ConfigError
from aorta.loggers import LoggedRun
from aorta.recording import live_steps
from aorta.recording.live_steps import LiveLoggers, progress_of, refuse_missing_clients, scalars
from aorta.records.run_files import read_manifest
from tests.analysis.builders import metrics, step
from tests.logger_files import tensorboard_events
from tests.runs import HANGS_S, record, train

NUMBERS = metrics(20.0, 10.0, 5.0, 2.5)


class Keeper:
    """A logger of one's own. `fails_at`: the step at which it raises."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.seen: dict[int, dict[str, float]] = {}
        self.fails_at, self.is_closed = fails_at, False

    def log_step(self, step: int, values: Mapping[str, float]) -> None:
        self.seen[step] = dict(values)
        if step == self.fails_at:
            raise OSError("the disk is gone")

    def log_summary(self, label: str, values: Mapping[str, float | str]) -> None:
        raise AssertionError("a run has no summary")

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))


def loop(folder: Path, model: nn.Module, steps: int = 6, **words) -> None:
    with aorta.record(folder, model=model, devices="off", **words) as recording:
        for number in range(steps):
            loss = model(torch.ones(2, 4)).square().mean()
            loss.backward()
            recording.note(loss=loss if number else None)
            recording.step()


def test_a_logger_of_ones_own_gets_what_the_record_has(tmp_path, model):
    keeper, seldom = Keeper(), Keeper()
    assert isinstance(keeper, aorta.Logger)
    loop(tmp_path, model, loggers=[seldom], logger_interval=3)
    loop(tmp_path, model, loggers=[keeper])
    steps = record(tmp_path).steps
    assert (keeper.is_closed, list(seldom.seen)) == (True, [2, 5])
    assert list(keeper.seen) == [line.global_step for line in steps] == list(range(6))
    for line in steps:
        values = keeper.seen[line.global_step]
        assert values["compute_ms"] == line.overlap["compute_ms"]
        assert values["step_ms"] == line.overlap["window_ms"]
        assert values.get("loss") == line.loss
        assert "overlap_ratio" not in values  # one process: null in the record
    assert "loss" not in keeper.seen[0]
    rates = scalars(step(0, 2, 0, overlap=NUMBERS), samples_per_step=16)
    assert (rates["steps_per_s"], rates["samples_per_s"], rates["exposed_comm_ms"]) == (50.0, 800.0, 2.5)
    assert "samples_per_s" not in scalars(step(0, 2, 0, overlap=NUMBERS), None)


class Slow(Keeper):
    """Its first step lasts until the test lets it go on."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go_on = threading.Event(), threading.Event()

    def log_step(self, step: int, values: Mapping[str, float]) -> None:
        super().log_step(step, values)
        self.begun.set()
        self.go_on.wait()


def live_loggers(folder: Path, *loggers: Keeper, names: Sequence[str] = ()) -> LiveLoggers:
    return LiveLoggers(names, LoggedRun(folder, "mine", {}), loggers)


def behind_the_first(live: LiveLoggers, slow: Slow, stop: int) -> None:
    """Steps that come while the first one is logged."""
    live.take(step(0, 1, 0, overlap=NUMBERS))
    slow.begun.wait()
    for number in range(1, stop):
        live.take(step(0, 1, number, overlap=NUMBERS))


def test_a_logger_that_hangs_holds_no_step_back_and_its_losses_are_counted(tmp_path, monkeypatch, caplog):
    """The training thread never waits for it, nor does the end of the run, for long."""
    monkeypatch.setattr(live_steps, "MOST_WAITING", 5)
    monkeypatch.setattr(live_steps, "LEAVE_S", 0.01)
    slow = Slow()
    with live_loggers(tmp_path, slow) as live:
        behind_the_first(live, slow, 9)
    slow.go_on.set()
    assert "still busy 0.01 s after the run" in caplog.text
    assert "8 steps not logged" in caplog.text  # three that came too late for the queue, and the five that waited in it


@pytest.mark.parametrize("how", ["error", "signal"])
def test_an_early_end_leaves_out_what_waits_and_closes_the_logger(tmp_path, monkeypatch, caplog, how):
    monkeypatch.setattr(live_steps, "LEAVE_EARLY_S", 0.02)
    slow = Slow()
    real = LiveLoggers._drop_waiting

    def dropped(live: LiveLoggers) -> None:
        real(live)
        live._leave_s = HANGS_S  # the first half is over; the logger goes on, and may take the time it needs
        slow.go_on.set()

    monkeypatch.setattr(LiveLoggers, "_drop_waiting", dropped)
    with suppress(OSError), live_loggers(tmp_path, slow) as live:
        behind_the_first(live, slow, 4)
        if how == "error":
            raise OSError("the run has failed")
        live.hurry()
    assert (list(slow.seen), slow.is_closed) == ([0], True)
    assert "3 steps not logged" in caplog.text


def test_the_manifest_names_the_loggers_its_hash_does_not_and_files_are_moved_with_their_run(tmp_path, model):
    loop(tmp_path, model, loggers=["tensorboard", Keeper()], logger_interval=2)
    loop(tmp_path, model)
    (earlier,) = (tmp_path / "history").iterdir()
    assert [folder / "tensorboard" for folder in (earlier, tmp_path) if (folder / "tensorboard").exists()] == [
        earlier / "tensorboard"
    ]
    told = [read_manifest(folder) for folder in (earlier, tmp_path)]
    telemetry = [each["config"]["telemetry"] for each in told]
    assert [(each["loggers"], each["logger_interval"]) for each in telemetry] == [
        (["tensorboard", "Keeper"], 2),
        ([], 1),
    ]
    assert told[0]["manifest_hash"] == told[1]["manifest_hash"]


def test_loggers_that_fail_are_named_once_and_the_others_go_on(tmp_path, caplog):
    (tmp_path / "tensorboard").write_text("")
    failing, other = Keeper(fails_at=1), Keeper()
    with live_loggers(tmp_path, failing, other, names=["tensorboard"]) as live:
        for number in range(4):
            live.take(step(0, 1, number, overlap=NUMBERS))
    assert [text.partition(": NotADirectoryError")[0] for text in caplog.messages] == [
        "logger tensorboard cannot be opened; the run goes on without it",
        "logger Keeper failed and is not called again: OSError: the disk is gone",
    ]
    assert (list(failing.seen), list(other.seen)) == ([0, 1], [0, 1, 2, 3])


def test_ranks_that_were_given_no_loggers_learn_why_rank_zero_refuses_its_own(monkeypatch):
    """`loggers=[...] if rank == 0 else []`: all ranks end, none waits for rank 0."""
    monkeypatch.setattr("aorta.loggers.find_spec", lambda _module: None)
    store = dist.HashStore()
    for rank, names in ((0, ["wandb"]), (1, [])):
        with pytest.raises(ConfigError, match=r"^loggers=wandb: wandb is not installed"):
            refuse_missing_clients(names, Peers(store, rank, 2, timeout_s=HANGS_S), "loggers")


@pytest.mark.dist
def test_rank_zero_alone_logs(tmp_path):
    train(tmp_path, "telemetry.loggers=[tensorboard]", "telemetry.logger_interval=2")
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1
    events = tensorboard_events(tmp_path / "tensorboard")
    steps = record(tmp_path).steps
    for name in ("overlap_ratio", "exposed_comm_ms"):
        assert events[f"aorta/{name}"] == pytest.approx({at: steps[at].overlap[name] for at in (1, 3, 5, 7)})
    rates = (events["aorta/samples_per_s"], events["aorta/steps_per_s"])
    assert [samples / steps for samples, steps in zip(*(rate.values() for rate in rates), strict=True)] == (
        pytest.approx([16] * 4)
    )


def test_a_line_has_throughput_the_ratio_so_far_and_the_time_left(caplog):
    """Steps of 100 ms, the hidden part of 10 ms of communication growing from 0 to 4 ms. Other ranks say nothing."""
    training = Training(log_interval=5, max_steps=15)
    with caplog.at_level(logging.INFO, "aorta.recording.live_steps"):
        for progress in (progress_of(training, 0, 15, 64, shown=shown) for shown in (False, True)):
            for number in range(5):
                row = step(0, 1, number, overlap=metrics(100, 80, 10, number))
                progress.show(msgspec.structs.replace(row, t_end_ns=(number + 1) * 100_000_000))
    (line,) = caplog.messages
    assert line.startswith("step 5/15  ")
    assert [words for words in ("overlap 0.40 (0.25 so far)", "640 samples/s", "10 steps/s") if words not in line] == []
    assert line.endswith("1 s left")


NULLS = dict.fromkeys(("compute_comm_ms", "exposed_comm_ms", "overlap_ratio"))
BOUNDS = {"compute_comm_ms": (2.0, 6.0), "exposed_comm_ms": (4.0, 8.0), "overlap_ratio": (0.2, 0.6)}
# Of 10 ms of communication 2 to 6 ms are hidden.
HOST_BOUND = {"overlap": metrics(100, 80, 10, 6) | NULLS, "bounds": BOUNDS}
BY_KERNELS = {"overlap": metrics(100, 80, 10, 4), "measured_by": "kernels"}
DECIDED = {"overlap": metrics(100, 80, 10, 9)}


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([HOST_BOUND] * 3, "overlap 0.20 to at most 0.60 (0.20 to at most 0.60 so far)"),
        # What marks decided is in the bounds of all, and is not chosen from among them.
        ([HOST_BOUND, DECIDED, HOST_BOUND], "overlap 0.20 to at most 0.60 (0.55 to at most 0.75 so far)"),
        ([HOST_BOUND, BY_KERNELS, HOST_BOUND], "overlap 0.20 to at most 0.60 (0.40 in 1 step by kernels)"),
        ([DECIDED, BY_KERNELS, BY_KERNELS], "overlap 0.40 by kernels (0.40 in 2 steps by kernels)"),
        # Where marks decide, steps that a profiler measured are no part of what they say.
        ([DECIDED, DECIDED, BY_KERNELS], "overlap 0.40 by kernels (0.90 so far)"),
    ],
)
def test_bounds_and_steps_of_a_calibration_are_called_what_they_are(caplog, steps, said):
    progress = progress_of(Training(log_interval=3), 0, 3, 64, shown=True)
    with caplog.at_level(logging.INFO, "aorta.recording.live_steps"):
        for number, made in enumerate(steps):
            progress.show(step(0, 1, number, **made))
    (line,) = caplog.messages
    assert f"{said}  " in line or line.endswith(said)
