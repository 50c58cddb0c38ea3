"""Each logger through its real client: what was given is what the tool's own format holds."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest

from aorta.config.schema import Loggers
from aorta.loggers import Logger, clients
from aorta.loggers.clients import NAMES, Place, missing_client, open_logger
from tests.loggers.written import prometheus_gauges, tensorboard_events, wandb_records

STEPS = {4: {"overlap_ratio": 0.25, "exposed_comm_ms": 12.5, "steps_per_s": 8.0}, 5: {"exposed_comm_ms": 10.0}}
SUMMARY = {"overlap_ratio_median": 0.5, "step_ms_median": 20.0, "verdict": "regression"}


def write(name: str, folder: Path, *, steps: bool = True, summary: bool = True) -> Logger:
    logger = open_logger(name, Place(folder, "mine", {"run_id": "20261122T140403Z-bb52", "world_size": 2}))
    for step, values in STEPS.items() if steps else ():
        logger.log_step(step, values)
    if summary:
        logger.log_summary("new-vs-base", SUMMARY)
    logger.close()
    return logger


def test_the_configuration_knows_the_same_names():
    assert tuple(Loggers.__members__) == NAMES


def test_tensorboard_has_a_curve_per_name_and_text_for_words(tmp_path):
    write("tensorboard", tmp_path)
    assert tensorboard_events(tmp_path / "tensorboard") == {
        "aorta/overlap_ratio": {4: 0.25},
        "aorta/exposed_comm_ms": {4: 12.5, 5: 10.0},
        "aorta/steps_per_s": {4: 8.0},
        "new-vs-base/overlap_ratio_median": {0: 0.5},
        "new-vs-base/step_ms_median": {0: 20.0},
        "new-vs-base/verdict": {0: "regression"},
    }


def test_prometheus_has_the_last_step_in_its_own_units(tmp_path):
    write("prometheus", tmp_path, summary=False)
    assert prometheus_gauges(tmp_path / "aorta_mine.prom") == {
        ("aorta_running", None): 0.0,
        ("aorta_global_step", None): 5.0,
        ("aorta_exposed_comm_seconds", None): 0.01,  # what step 5 does not have is not that of step 4
    }
    write("prometheus", tmp_path, steps=False)
    assert prometheus_gauges(tmp_path / "aorta_mine.prom") == {
        ("aorta_overlap_ratio_median", None): 0.5,
        ("aorta_step_seconds_median", None): 0.02,
        ("aorta_verdict_info", "regression"): 1.0,
    }


def test_the_collector_never_sees_half_a_file(tmp_path, monkeypatch):
    collected = tmp_path / "collector"
    place = Place(tmp_path / "run", "mine", {}, prometheus_dir=collected)
    logger = open_logger("prometheus", place)
    seen = []
    real = os.rename

    def rename(part, target):
        seen.append((Path(target).name, Path(part).parent == collected, Path(part).suffix != ".prom"))
        real(part, target)

    monkeypatch.setattr(os, "rename", rename)
    logger.log_step(1, {"overlap_ratio": 0.5})
    assert seen == [("aorta_mine.prom", True, True)]
    assert [path.name for path in collected.iterdir()] == ["aorta_mine.prom"]


def test_wandb_keeps_steps_and_summary_of_an_offline_run(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("HOME", str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the client's own
        import wandb

        write("wandb", tmp_path)
        wandb.teardown()
    history, summary = wandb_records(tmp_path)
    assert {step: {k: v for k, v in values.items() if k.startswith("aorta/")} for step, values in history.items()} == {
        step: {f"aorta/{name}": value for name, value in values.items()} for step, values in STEPS.items()
    }
    assert {f"new-vs-base/{name}": value for name, value in SUMMARY.items()}.items() <= summary.items()


def test_mlflow_keeps_steps_summary_and_identity(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/store")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "overlap")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the client's own
        from mlflow import MlflowClient

        write("mlflow", tmp_path)
        client = MlflowClient()
        experiment = client.get_experiment_by_name("overlap")
        assert experiment is not None
        (run,) = client.search_runs([experiment.experiment_id])
        curve = client.get_metric_history(run.info.run_id, "aorta/exposed_comm_ms")
    assert (run.info.status, run.info.run_name) == ("FINISHED", "mine")
    assert {point.step: point.value for point in curve} == {4: 12.5, 5: 10.0}
    assert run.data.metrics["new-vs-base/overlap_ratio_median"] == 0.5
    assert run.data.tags["new-vs-base/verdict"] == "regression"
    assert run.data.tags["aorta.run_id"] == "20261122T140403Z-bb52"


def test_a_missing_client_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch):
    assert missing_client(NAMES) is None
    monkeypatch.setattr(clients, "find_spec", lambda module: None if module in {"wandb", "tensorboardX"} else module)
    assert missing_client(["prometheus"]) is None
    assert missing_client(["tensorboard", "wandb"]) == (
        'tensorboardX, wandb are not installed: pip install "PATH/TO/CHECKOUT[tensorboard,wandb]"'
    )
