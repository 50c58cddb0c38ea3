"""Each logger through its real client: what was given is what the tool's own format holds."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from aorta import loggers
from aorta.config.schema import Loggers
from aorta.loggers import NAMES, LoggedRun, missing_client, open_logger
from tests.logger_files import tensorboard_events, wandb_records

STEPS = {4: {"overlap_ratio": 0.25, "exposed_comm_ms": 12.5, "steps_per_s": 8.0}, 5: {"exposed_comm_ms": 10.0}}
SUMMARY = {"overlap_ratio_median": 0.5, "step_ms_median": 20.0, "verdict": "regression"}


def write(name: str, folder: Path) -> None:
    logger = open_logger(name, LoggedRun(folder, "mine", {"run_id": "20261122T140403Z-bb52", "world_size": 2}))
    for step, values in STEPS.items():
        logger.log_step(step, values)
    logger.log_summary("new-vs-base", SUMMARY)
    logger.close()


def test_tensorboard_has_a_curve_per_name_and_text_for_words(tmp_path):
    write("tensorboard", tmp_path)
    curves = {
        f"aorta/{name}": {step: values[name] for step, values in STEPS.items() if name in values} for name in STEPS[4]
    }
    summary = {f"new-vs-base/{name}": {0: value} for name, value in SUMMARY.items()}
    assert tensorboard_events(tmp_path / "tensorboard") == curves | summary


def test_wandb_keeps_steps_and_summary_of_an_offline_run(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("HOME", str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the client's own
        import wandb

        write("wandb", tmp_path)
        wandb.teardown()
    history, summary = wandb_records(tmp_path)
    assert {f"new-vs-base/{name}": value for name, value in SUMMARY.items()}.items() <= summary.items()
    assert history.keys() == STEPS.keys()
    for step, values in STEPS.items():
        logged = {name: value for name, value in history[step].items() if name.startswith("aorta/")}
        assert logged == {f"aorta/{name}": value for name, value in values.items()}


def test_a_missing_client_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch):
    assert tuple(Loggers.__members__) == NAMES
    assert missing_client(NAMES) is None
    monkeypatch.setattr(loggers, "find_spec", lambda module: module if module == "wandb" else None)
    assert missing_client(["wandb"]) is None
    monkeypatch.setattr(loggers, "find_spec", lambda _module: None)
    assert missing_client(["tensorboard", "wandb"]) == (
        'tensorboardX, wandb are not installed: pip install "PATH/TO/CHECKOUT[tensorboard,wandb]"'
    )
