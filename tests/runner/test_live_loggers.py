"""Loggers while a run goes on: what they get, on which rank, and that no logger can hurt the run."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

import aorta
from aorta.errors import ConfigError
from aorta.loggers import by_name
from aorta.loggers.clients import Place
from aorta.runner import live_loggers
from aorta.runner.live_loggers import LiveLoggers, scalars
from tests.analysis.builders import metrics, step
from tests.loggers.written import prometheus_gauges, tensorboard_events
from tests.runs import record, train

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
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))


def loop(folder: Path, model: nn.Module, steps: int = 6, **words) -> None:
    with aorta.record(folder, model=model, devices="off", **words) as recording:
        for number in range(steps):
            loss = model(torch.ones(2, 4)).square().mean()
            loss.backward()
            recording.note(loss=loss if number else None)
            recording.step()


def test_a_logger_of_ones_own_gets_what_the_record_has(tmp_path, model):
    keeper = Keeper()
    assert isinstance(keeper, aorta.Logger)
    loop(tmp_path, model, loggers=[keeper])
    steps = record(tmp_path).steps
    assert keeper.is_closed
    assert list(keeper.seen) == [line.global_step for line in steps] == list(range(6))
    for line in steps:
        values = keeper.seen[line.global_step]
        assert values["compute_ms"] == line.overlap["compute_ms"]
        assert values["step_ms"] == line.overlap["window_ms"]
        assert values.get("loss") == line.loss
        assert "overlap_ratio" not in values  # one process: null in the record
    assert "loss" not in keeper.seen[0]


def test_only_every_so_many_steps_where_asked(tmp_path, model):
    keeper = Keeper()
    loop(tmp_path, model, loggers=[keeper], logger_interval=3)
    assert list(keeper.seen) == [2, 5]


def test_a_logger_that_fails_is_named_once_and_the_run_completes(tmp_path, model, caplog):
    failing, other = Keeper(fails_at=1), Keeper()
    with caplog.at_level(logging.WARNING):
        loop(tmp_path, model, loggers=[failing, other])
    said = [line.getMessage() for line in caplog.records if "logger Keeper" in line.getMessage()]
    assert said == ["logger Keeper: failed, and gets nothing more: OSError: the disk is gone"]
    assert (list(failing.seen), list(other.seen)) == ([0, 1], list(range(6)))
    found = record(tmp_path).footer
    assert found is not None
    assert (found.reason, found.steps_written) == ("completed", 6)


def test_a_logger_that_hangs_holds_no_step_back_and_its_losses_are_counted(tmp_path, monkeypatch, caplog):
    """The training thread never waits for it, nor does the end of the run, for long."""
    monkeypatch.setattr(live_loggers, "MOST_WAITING", 5)
    monkeypatch.setattr(live_loggers, "LEAVE_S", 0.01)
    go_on, begun = threading.Event(), threading.Event()

    class Hanging(Keeper):
        def log_step(self, step: int, values: Mapping[str, float]) -> None:
            begun.set()
            go_on.wait()

    with caplog.at_level(logging.WARNING), LiveLoggers((), Place(tmp_path, "mine", {}), [Hanging()]) as live:
        live.take(step(0, 1, 0, overlap=NUMBERS))
        begun.wait()
        for number in range(1, 9):
            live.take(step(0, 1, number, overlap=NUMBERS))
    go_on.set()
    said = " ".join(line.getMessage() for line in caplog.records)
    assert "not done 0.01 s after the run" in said
    assert "3 steps left out" in said


def test_a_logger_that_cannot_be_opened_is_named_and_left_out(tmp_path, caplog):
    place = Place(tmp_path, "mine", {}, prometheus_dir=tmp_path / "file" / "below")
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING), LiveLoggers(["prometheus", "tensorboard"], place) as live:
        live.take(step(0, 1, 3, overlap=NUMBERS))
    assert "logger prometheus: cannot be opened, the run goes on without it: NotADirectoryError" in caplog.text
    assert set(tensorboard_events(tmp_path / "tensorboard")["aorta/step_ms"]) == {3}


def test_rates_are_those_of_the_step():
    line = step(0, 2, 0, overlap=NUMBERS)
    found = scalars(line, samples_per_step=16)
    assert (found["steps_per_s"], found["samples_per_s"]) == (50.0, 800.0)
    assert (found["exposed_comm_ms"], found["overlap_ratio"]) == (2.5, 0.5)
    assert "samples_per_s" not in scalars(line, None)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ({"loggers": ["tensorbord"]}, r"loggers: 'tensorbord': must be one of tensorboard, prometheus, wandb, mlflow"),
        ({"loggers": [object()]}, r"must be one of .* or an object with the methods of aorta\.Logger"),
        ({"loggers": ["wandb"]}, r"loggers=wandb: wandb is not installed: pip install 'aorta-bench\[wandb\]'"),
        ({"logger_interval": 0}, r"logger_interval=0: must be at least 1"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_touched(tmp_path, model, monkeypatch, words, problem):
    monkeypatch.setattr(by_name, "find_spec", lambda _module: None)
    with pytest.raises(ConfigError, match=problem):
        loop(tmp_path / "run", model, **words)
    assert not (tmp_path / "run").exists()


@pytest.mark.dist
def test_rank_zero_alone_logs_and_a_second_run_moves_what_the_first_left(tmp_path):
    words = ("label=two", "telemetry.loggers=[tensorboard,prometheus]", "telemetry.logger_interval=2")
    train(tmp_path, *words)
    events = tensorboard_events(tmp_path / "two" / "tensorboard")
    steps = {line.global_step: line for line in record(tmp_path / "two").steps}
    assert list(events["aorta/step_ms"]) == [1, 3, 5, 7]
    for name in ("overlap_ratio", "exposed_comm_ms"):
        assert events[f"aorta/{name}"] == pytest.approx(
            {number: steps[number].overlap[name] for number in (1, 3, 5, 7)}
        )
    per_step = [events["aorta/samples_per_s"][number] / events["aorta/steps_per_s"][number] for number in (1, 3, 5, 7)]
    gauges = prometheus_gauges(tmp_path / "two" / "aorta_two.prom")
    assert gauges["aorta_exposed_comm_seconds", None] * 1e3 == pytest.approx(steps[7].overlap["exposed_comm_ms"])
    assert (gauges["aorta_global_step", None], gauges["aorta_running", None]) == (7, 0)
    assert per_step == pytest.approx([16] * 4)
    train(tmp_path, *words)
    (earlier,) = (tmp_path / "two" / "history").iterdir()
    assert {"tensorboard", "aorta_two.prom"} <= {path.name for path in earlier.iterdir()}
    assert len(list((tmp_path / "two" / "tensorboard").iterdir())) == 1
