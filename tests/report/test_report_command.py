"""The command as a person runs it: another directory, exit codes, what it loads, what it gives to loggers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from aorta import loggers
from aorta.report import command as report_command
from aorta.report.command import overlap_report
from tests.analysis.builders import simulated_run, strict_json
from tests.analysis.compare.builders import launch_set
from tests.logger_files import tensorboard_events

ROOT = Path(__file__).resolve().parents[2]
COMMAND = ROOT / "analysis" / "overlap_report.py"
HEAVY = ("torch", "pandas", "matplotlib", "scipy", "bokeh")


def run(here: Path, *arguments: str, code: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command in `here`, or `code` followed by it; not installed, no display."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "DISPLAY")}
    start = [sys.executable, "-W", "error"]
    start += [str(COMMAND)] if code is None else ["-c", code]
    return subprocess.run([*start, *arguments], cwd=here, env=environment, capture_output=True, text=True, timeout=600)


@pytest.fixture
def two_runs(tmp_path: Path) -> Path:
    simulated_run(tmp_path / "artifacts" / "cuda", label="cuda", ranks=2, steps=5)
    simulated_run(tmp_path / "artifacts_rocm", label="rocm", ranks=2, steps=5, platform="rocm")
    return tmp_path


@pytest.mark.spec("D20")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "nothing to report on"),
        (["--log-dir", "a"], "--log-dir and --label counts must match"),
        (["--log-dir", "a", "--label", "x", "--label", "y"], "--log-dir and --label counts must match"),
        (["--log-dir", "a", "--label", "x", "--log-dir", "b", "--label", "x"], "label 'x' is given twice"),
        (["--log-dir", "a", "--label", "x", "--reference", "y"], "'y' is not among the labels; known labels: x"),
        (["--log-dir", "a", "--label", "x", "--reference", "x", "--candidate", "x"], "label 'x' is given twice"),
        (["--log-dir", "a", "--label", "../x"], "letters, digits and ._-"),
        (["--log-dir", "a", "--label", "x"], "a: No such file or directory"),
        (["--log-dir", ".", "--label", "x"], "nothing that can be read as a trace (no files)"),
        (["--reference", "cuda", "--candidate", "cuda"], "given twice"),
        (["--candidate", "never-made-here"], "aorta train --nproc_per_node 2 label=never-made-here"),
    ],
)
def test_bad_input_ends_with_2_and_one_message(
    tmp_path: Path, arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert overlap_report(arguments) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err.startswith("error: ")
    assert said in streams.err


def loaded_after(here: Path, code: str) -> set[str]:
    done = run(here, code=f"{code}\nimport sys\nprint('LOADED', *sys.modules)")
    assert done.returncode == 0, done.stderr
    return set(done.stdout.rpartition("LOADED")[2].split())


@pytest.mark.thorough
def test_a_whole_report_loads_nothing_heavy(two_runs: Path) -> None:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\nfrom pathlib import Path\n"
    code += "from aorta.report.command import overlap_report\n"
    code += "assert overlap_report(['--reference', 'cuda', '--candidate', 'rocm']) == 0"
    assert loaded_after(two_runs, code).isdisjoint(HEAVY)


@pytest.fixture
def two_sets(tmp_path):
    for label, ratio in (("base", 0.8), ("new", 0.5)):
        launch_set(tmp_path / label, [ratio, ratio + 0.01, ratio - 0.01, ratio])
    return [str(tmp_path / "base"), str(tmp_path / "new"), "--no-html", "--output", str(tmp_path / "out")]


def test_medians_and_verdicts_are_those_of_the_summary(tmp_path, two_sets, capsys):
    assert overlap_report([*two_sets, "--assume-no-drift", "--log", "tensorboard"]) == 0
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
    assert events["new-vs-base/overlap_ratio_p"] == {0: pytest.approx(ratio["test"]["p"])}
    tests = {name: each["test"] for name, each in compared["metrics"].items()}
    corrected = {name: test["p_corrected"] for name, test in tests.items() if test["p_corrected"] is not None}
    assert any(p != tests[name]["p"] for name, p in corrected.items())
    for name, p in corrected.items():  # what the verdict beside it rests on
        assert events[f"new-vs-base/{name}_p"] == {0: pytest.approx(p)}


def test_events_of_an_earlier_report_are_replaced_and_those_of_others_stay(tmp_path, two_sets, capsys):
    folder = tmp_path / "out" / "tensorboard"
    folder.mkdir(parents=True)
    (folder / "events.out.tfevents.1.host").write_bytes(b"")
    for _ in range(2):
        assert overlap_report([*two_sets, "--log", "tensorboard"]) == 0
        assert len(list(folder.iterdir())) == 2
    assert (folder / "events.out.tfevents.1.host").exists()


@pytest.mark.parametrize(("gate", "code"), [([], 2), (["--assume-no-drift", "--fail-on", "overlap_ratio<-0.02"], 3)])
def test_a_logger_that_fails_leaves_the_report_and_the_answer_of_a_gate(
    tmp_path, two_sets, capsys, monkeypatch, gate, code
):
    def refused(name, place):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(report_command, "open_logger", refused)
    assert overlap_report([*two_sets, *gate, "--log", "wandb"]) == code
    said = capsys.readouterr()
    assert "wandb: ConnectionError: no route to host" in said.err
    assert str(tmp_path / "out" / "summary.json") in said.out


def test_a_missing_client_is_said_before_anything_is_read(tmp_path, two_sets, capsys, monkeypatch):
    monkeypatch.setattr(loggers, "find_spec", lambda _module: None)
    assert overlap_report([*two_sets, "--log", "wandb"]) == 2
    assert '--log wandb: wandb is not installed: pip install "PATH/TO/CHECKOUT[wandb]"' in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
