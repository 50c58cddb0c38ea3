"""`aorta report --log`: tools get the medians and verdicts of `summary.json`."""

from __future__ import annotations

import pytest

from aorta.analysis.report import report_command
from aorta.analysis.report.report_command import overlap_report
from aorta.loggers import clients
from tests.analysis.builders import strict_json
from tests.analysis.compare.builders import launch_set
from tests.loggers.written import prometheus_gauges, tensorboard_events


@pytest.fixture
def words(tmp_path):
    for label, ratio in (("base", 0.8), ("new", 0.5)):
        launch_set(tmp_path / label, [ratio, ratio + 0.01, ratio - 0.01, ratio])
    return [str(tmp_path / "base"), str(tmp_path / "new"), "--no-html", "--output", str(tmp_path / "out")]


def test_medians_and_verdicts_are_those_of_the_summary(tmp_path, words, capsys):
    assert overlap_report([*words, "--assume-no-drift", "--log", "tensorboard", "--log", "prometheus"]) == 0
    summary = strict_json(tmp_path / "out" / "summary.json")
    events = tensorboard_events(tmp_path / "out" / "tensorboard")
    for label in ("base", "new"):
        for name, entry in summary["datasets"][label]["metrics"].items():
            found = events.get(f"{label}/{name}_median")
            assert found == (None if entry["median"] is None else {0: pytest.approx(entry["median"])})
    compared = summary["comparison"]
    assert compared["verdict"] == "regression"
    assert events["new-vs-base/verdict"] == {0: "regression"}
    ratio = compared["metrics"]["overlap_ratio"]
    assert events["new-vs-base/overlap_ratio_difference"] == {0: pytest.approx(ratio["difference"])}
    assert events["new-vs-base/overlap_ratio_p"] == {0: pytest.approx(ratio["p"])}
    corrected = {
        name: each["p_corrected"] for name, each in compared["metrics"].items() if each["p_corrected"] is not None
    }
    assert any(p != compared["metrics"][name]["p"] for name, p in corrected.items())
    for name, p in corrected.items():  # what the verdict beside it rests on
        assert events[f"new-vs-base/{name}_p"] == {0: pytest.approx(p)}
    gauges = prometheus_gauges(tmp_path / "out" / "aorta_new-vs-base.prom")
    assert gauges["aorta_verdict_info", "regression"] == 1
    assert gauges["aorta_exposed_comm_seconds_difference", None] * 1e3 == pytest.approx(
        compared["metrics"]["exposed_comm_ms"]["difference"]
    )


def test_events_of_an_earlier_report_are_replaced_and_those_of_others_stay(tmp_path, words, capsys):
    folder = tmp_path / "out" / "tensorboard"
    folder.mkdir(parents=True)
    (folder / "events.out.tfevents.1.host").write_bytes(b"")
    for _ in range(2):
        assert overlap_report([*words, "--log", "tensorboard"]) == 0
        assert len(list(folder.iterdir())) == 2
    assert (folder / "events.out.tfevents.1.host").exists()


@pytest.mark.parametrize(("gate", "code"), [([], 2), (["--assume-no-drift", "--fail-on", "overlap_ratio<-0.02"], 3)])
def test_a_logger_that_fails_leaves_the_report_and_the_answer_of_a_gate(
    tmp_path, words, capsys, monkeypatch, gate, code
):
    def refused(name, place):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(report_command, "open_logger", refused)
    assert overlap_report([*words, *gate, "--log", "mlflow"]) == code
    said = capsys.readouterr()
    assert "mlflow: ConnectionError: no route to host" in said.err
    assert str(tmp_path / "out" / "summary.json") in said.out


def test_a_missing_client_is_said_before_anything_is_read(tmp_path, words, capsys, monkeypatch):
    monkeypatch.setattr(clients, "find_spec", lambda _module: None)
    assert overlap_report([*words, "--log", "wandb"]) == 2
    assert '--log wandb: wandb is not installed: pip install "PATH/TO/CHECKOUT[wandb]"' in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
