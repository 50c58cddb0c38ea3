"""Loggers while a run goes on: what they get, on which rank, and that no logger can hurt the run; and
what rank 0 says.
"""

from __future__ import annotations

import logging
import shlex
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
from aorta.records.schema import Step
from tests.analysis.builders import metrics, step
from tests.logger_files import tensorboard_events
from tests.runs import HANGS_S, attempt, record, train

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


def test_loggers_that_fail_or_hang_are_named_once_and_the_run_completes(tmp_path, model, monkeypatch, caplog):
    failing, other, go_on = Keeper(fails_at=1), Keeper(), threading.Event()
    loop(tmp_path, model, loggers=[failing, other])
    assert caplog.messages.count("logger Keeper failed and is not called again: OSError: the disk is gone") == 1
    assert (list(failing.seen), list(other.seen)) == ([0, 1], list(range(6)))
    monkeypatch.setattr(live_steps, "LEAVE_S", 0.01)
    monkeypatch.setattr(live_steps, "open_logger", lambda _name, _place: go_on.wait() and other)
    loop(tmp_path, model, loggers=["tensorboard"])  # which hangs while it opens
    go_on.set()
    assert "still busy 0.01 s after the run" in caplog.text
    for folder in (tmp_path, *(tmp_path / "history").iterdir()):
        end = record(folder).footer
        assert (end.reason, end.steps_written) == ("completed", 6)


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


def test_the_manifest_names_the_loggers_and_its_hash_does_not(tmp_path, model):
    loop(tmp_path / "with", model, loggers=["tensorboard", Keeper()], logger_interval=2)
    loop(tmp_path / "without", model)
    told = [read_manifest(tmp_path / name) for name in ("with", "without")]
    telemetry = [each["config"]["telemetry"] for each in told]
    assert [(each["loggers"], each["logger_interval"]) for each in telemetry] == [
        (["tensorboard", "Keeper"], 2),
        ([], 1),
    ]
    assert told[0]["manifest_hash"] == told[1]["manifest_hash"]


def test_a_logger_that_cannot_be_opened_is_named_and_left_out(tmp_path, caplog):
    (tmp_path / "tensorboard").write_text("")
    keeper = Keeper()
    with live_loggers(tmp_path, keeper, names=["tensorboard"]) as live:
        live.take(step(0, 1, 3, overlap=NUMBERS))
    assert "logger tensorboard cannot be opened; the run goes on without it: NotADirectoryError" in caplog.text
    assert list(keeper.seen) == [3]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ({"loggers": ["tensorbord"]}, r"loggers: 'tensorbord': must be one of tensorboard, wandb"),
        ({"loggers": "wandb"}, r"loggers='wandb': must be a list: loggers=\['wandb'\]"),
        ({"loggers": [Keeper]}, r"an object \(not its class\) with the methods of aorta\.Logger"),
        ({"loggers": [object()]}, r"must be one of .* or an object .* with the methods of aorta\.Logger"),
        ({"loggers": ["wandb"]}, r'loggers=wandb: wandb is not installed: pip install "PATH/TO/CHECKOUT\[wandb\]"'),
        ({"logger_interval": 0}, r"logger_interval=0: must be at least 1"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_touched(tmp_path, model, monkeypatch, words, problem):
    monkeypatch.setattr("aorta.loggers.find_spec", lambda _module: None)
    with pytest.raises(ConfigError, match=problem):
        loop(tmp_path / "run", model, **words)
    assert not (tmp_path / "run").exists()


def test_ranks_that_were_given_no_loggers_learn_why_rank_zero_refuses_its_own(monkeypatch):
    """`loggers=[...] if rank == 0 else []`: all ranks end, none waits for rank 0."""
    monkeypatch.setattr("aorta.loggers.find_spec", lambda _module: None)
    store = dist.HashStore()
    for rank, names in ((0, ["wandb"]), (1, [])):
        with pytest.raises(ConfigError, match=r"^loggers=wandb: wandb is not installed"):
            refuse_missing_clients(names, Peers(store, rank, 2, timeout_s=HANGS_S), "loggers")


@pytest.mark.dist
def test_rank_zero_alone_logs_and_a_second_run_moves_what_the_first_left(tmp_path):
    words = ("label=two", "telemetry.loggers=[tensorboard]", "telemetry.logger_interval=2")
    train(tmp_path, *words)
    events = tensorboard_events(tmp_path / "two" / "tensorboard")
    steps = {line.global_step: line for line in record(tmp_path / "two").steps}
    assert list(events["aorta/step_ms"]) == [1, 3, 5, 7]
    for name in ("overlap_ratio", "exposed_comm_ms"):
        assert events[f"aorta/{name}"] == pytest.approx(
            {number: steps[number].overlap[name] for number in (1, 3, 5, 7)}
        )
    per_step = [events["aorta/samples_per_s"][number] / events["aorta/steps_per_s"][number] for number in (1, 3, 5, 7)]
    assert per_step == pytest.approx([16] * 4)
    train(tmp_path, *words)
    (earlier,) = (tmp_path / "two" / "history").iterdir()
    assert "tensorboard" in {path.name for path in earlier.iterdir()}
    assert len(list((tmp_path / "two" / "tensorboard").iterdir())) == 1


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


def host_bound(number: int) -> Step:
    """10 ms of communication, of which 2 to 6 ms are hidden."""
    values = metrics(100, 80, 10, 6) | dict.fromkeys(("compute_comm_ms", "exposed_comm_ms", "overlap_ratio"))
    bounds = {"compute_comm_ms": (2.0, 6.0), "exposed_comm_ms": (4.0, 8.0), "overlap_ratio": (0.2, 0.6)}
    return step(0, 1, number, overlap=values, bounds=bounds)


def by_kernels(number: int) -> Step:
    return step(0, 1, number, overlap=metrics(100, 80, 10, 4), measured_by="kernels")


def decided(number: int) -> Step:
    return step(0, 1, number, overlap=metrics(100, 80, 10, 9))


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([host_bound] * 3, "overlap 0.20 to at most 0.60 (0.20 to at most 0.60 so far)"),
        # What marks decided is in the bounds of all, and is not chosen from among them.
        ([host_bound, decided, host_bound], "overlap 0.20 to at most 0.60 (0.55 to at most 0.75 so far)"),
        ([host_bound, by_kernels, host_bound], "overlap 0.20 to at most 0.60 (0.40 in 1 step by kernels)"),
        ([decided, by_kernels, by_kernels], "overlap 0.40 by kernels (0.40 in 2 steps by kernels)"),
        # Where marks decide, steps that a profiler measured are no part of what they say.
        ([decided, decided, by_kernels], "overlap 0.40 by kernels (0.90 so far)"),
    ],
)
def test_bounds_and_steps_of_a_calibration_are_called_what_they_are(caplog, steps, said):
    progress = progress_of(Training(log_interval=3), 0, 3, 64, shown=True)
    with caplog.at_level(logging.INFO, "aorta.recording.live_steps"):
        for number, made in enumerate(steps):
            progress.show(made(number))
    (line,) = caplog.messages
    assert f"{said}  " in line or line.endswith(said)


@pytest.mark.dist
def test_a_run_ends_with_the_report_of_its_folder_and_the_trace_to_open(tmp_path):
    done = attempt(tmp_path, "profiling.enabled=true", "label=a")
    assert (done.returncode, done.stdout) == (0, "")
    said = [line for line in done.stderr.splitlines() if line.startswith("Next: ")]
    assert said[0] == f"Next: aorta report {shlex.quote(str(tmp_path / 'a'))}"
    opened = Path(said[1].removeprefix("Next: https://ui.perfetto.dev, Open trace file: "))
    assert opened.is_file()
    assert opened.parent == tmp_path / "a" / "torch_profiler" / "rank0"
