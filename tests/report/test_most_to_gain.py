"""What would gain most: the same as whatif says, in the summary, the text and the page; or why there is nothing."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from aorta.analysis.compare.launch_set import read_subjects
from aorta.analysis.compare.verdict import Rules
from aorta.documents import as_json
from aorta.read.record import load_run
from aorta.report import summary as room
from aorta.report.files import Report, write_report
from aorta.report.summary import LAST_STEPS, most_to_gain, summarize
from aorta.terminal_style import Style
from aorta.whatif.gains import gains
from aorta.whatif.prediction import base_of
from aorta.whatif.read_program import program_of
from tests.analysis.builders import simulated_run, strict_json
from tests.report.pages import text_of
from tests.runs import once
from tests.scripts.test_json_schemas import published
from tests.whatif.simulated_job import Job
from tests.whatif.simulated_record import record

DDP = Job("ddp")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def make(folder: Path) -> None:
        record(DDP, folder / "fast")
        for name, latency_us in (("narrow", DDP.network.latency_us), ("slow", 2 * DDP.network.latency_us)):
            network = replace(DDP.network, gb_per_s=DDP.network.gb_per_s / 3, latency_us=latency_us)
            record(replace(DDP, network=network), folder / name)

    return once(tmp_path_factory, "runs of three networks", make)


@pytest.fixture(scope="module")
def compared(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Report:
    sources = {label: runs / label for label in ("fast", "slow")}
    output = tmp_path_factory.mktemp("out")
    return write_report(sources, output, "fast", "slow", style=Style(width=80))


def test_values_are_those_of_whatif(runs: Path, compared: Report) -> None:
    program = program_of(load_run(runs / "slow"), LAST_STEPS)
    dataset = compared.summary["datasets"]["slow"]
    assert not dataset["stragglers"]["ranks"]
    wanted = gains(base_of(program), no_straggler=dataset["stragglers"]["reason"])
    assert "every rank as fast as the typical one" not in str([*wanted.gains, *wanted.bounds])
    assert dataset["stragglers"]["reason"] in str(dataset["what_if"]["notes"])
    found = compared.summary["datasets"]["slow"]["what_if"]
    assert found["reason"] is None
    assert found["steps"] == len(program.steps)
    assert found["check"] is None
    assert found["gains"] == as_json(wanted.gains)
    assert found["gains"][0]["gain_ms"] > 0
    assert found["bounds"] == as_json(wanted.bounds)
    assert found["marginals"][0] == as_json(wanted.marginals[0])
    published("summary").validate(strict_json(compared.files[0]))


def test_what_the_comparison_measured_is_not_predicted(runs: Path) -> None:
    subjects = read_subjects({label: runs / label for label in ("fast", "narrow")}, Rules())
    for entry in summarize(subjects, "fast", "narrow").datasets.values():
        assert all(gain.change != "network.bandwidth=x2" for gain in entry.what_if.gains)
        said = "twice the bandwidth: not predicted, because this comparison measured fabric.inter_bandwidth_gb_per_s"
        assert said in entry.what_if.notes
        assert "significant" not in str(entry.what_if), "a word of tests over launches"


def test_without_waits_the_reason_stands_in_its_place(tmp_path: Path) -> None:
    sources = {"old": simulated_run(tmp_path / "old", label="old", ranks=2, steps=6)}
    report = write_report(sources, tmp_path / "out")
    found = report.summary["datasets"]["old"]["what_if"]
    assert set(found) == {"reason"}
    assert f"old: what would gain most: no prediction: {found['reason']}" in " ".join(report.text.split())
    page = next(path for path in report.files if path.name == "report.html").read_text(encoding="utf-8")
    assert f"no prediction: {found['reason']}" in text_of(page)


def test_a_rank_that_is_missing_is_said(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "fast", tmp_path / "run")
    (tmp_path / "run" / "rank_1_metrics.jsonl").unlink()
    assert as_json(most_to_gain(load_run(tmp_path / "run"))) == {"reason": "1 of 2 ranks are missing"}


def test_of_many_ranks_less_is_replayed_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(replace(DDP, steps=14), tmp_path / "run")
    run = load_run(tmp_path / "run")
    assert most_to_gain(run).steps == 12
    monkeypatch.setattr(room, "RANK_STEPS", 16)
    assert most_to_gain(run).steps == 8
    monkeypatch.setattr(room, "RANK_STEPS", 15)
    assert "2 ranks are too many to be replayed for a report; ask aorta whatif" in str(most_to_gain(run).reason)
