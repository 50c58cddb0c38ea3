"""W&B through its real client, and clients that are missing. TensorBoard: `tests/report/test_report_command.py`."""

from __future__ import annotations

import warnings

import pytest

from aorta import loggers
from aorta.config.schema import Loggers
from aorta.loggers import NAMES, LoggedRun, missing_client, open_logger
from tests.logger_files import wandb_records

STEPS = {4: {"overlap_ratio": 0.25, "exposed_comm_ms": 12.5, "steps_per_s": 8.0}, 5: {"exposed_comm_ms": 10.0}}
SUMMARY = {"overlap_ratio_median": 0.5, "step_ms_median": 20.0, "verdict": "regression"}


def test_wandb_keeps_steps_and_summary_of_an_offline_run(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("HOME", str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the client's own
        import wandb

        logger = open_logger("wandb", LoggedRun(tmp_path, "mine", {"run_id": "20261122T140403Z-bb52", "world_size": 2}))
        for step, values in STEPS.items():
            logger.log_step(step, values)
        logger.log_summary("new-vs-base", SUMMARY)
        logger.close()
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
