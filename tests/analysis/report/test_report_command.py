"""The command as a person runs it: another directory, exit codes, what it loads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.analysis.builders import header, simulated_run, write_rank

ROOT = Path(__file__).resolve().parents[3]
COMMAND = ROOT / "analysis" / "overlap_report.py"
HEAVY = ("torch", "pandas", "matplotlib")


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


@pytest.mark.spec("D20", "D22")
def test_folders_labels_and_output_from_elsewhere(two_runs: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    folders = ["--log-dir", "../artifacts/cuda", "--label", "a", "--log-dir", "../artifacts_rocm", "--label", "b"]
    done = run(elsewhere, *folders, "--output", "out", "--reference", "a", "--candidate", "b", "--all")
    assert (done.returncode, done.stderr) == (0, "")
    assert (elsewhere / "out" / "overlap_ratio.png").exists()
    assert "reference: a; candidate: b." in done.stdout


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
        (["--log-dir", ".", "--label", "x"], "no rank_<rank>_metrics.jsonl in this folder"),
        (["--reference", "cuda", "--candidate", "cuda"], "given twice"),
        (["--candidate", "never-made-here"], "aorta train --nproc_per_node 2 label=never-made-here"),
    ],
)
def test_bad_input_ends_with_2_and_one_message(
    tmp_path: Path, arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from aorta.analysis.report.report_command import overlap_report

    monkeypatch.chdir(tmp_path)
    assert overlap_report(arguments) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err.startswith("error: ")
    assert said in streams.err


def test_exit_codes_of_the_process(tmp_path: Path) -> None:
    write_rank(tmp_path / "run", header(), [])
    (tmp_path / "taken").write_text("a file")
    for arguments in (["--no-such-option"], ["--log-dir", "run", "--label", "x", "--output", "taken/below"]):
        done = run(tmp_path, *arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert "error:" in done.stderr
        assert "Traceback" not in done.stderr


def test_the_default_output_of_one_label(two_runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from aorta.analysis.report.report_command import overlap_report

    monkeypatch.chdir(two_runs)
    assert overlap_report(["--reference", "cuda"]) == 0
    assert (two_runs / "reports" / "cuda" / "cuda_timeline.png").exists()


def loaded_after(here: Path, code: str) -> set[str]:
    done = run(here, code=f"{code}\nimport sys\nprint('LOADED', *sys.modules)")
    assert done.returncode == 0, done.stderr
    return set(done.stdout.rpartition("LOADED")[2].split())


def test_importing_and_asking_for_help_load_nothing_heavy(tmp_path: Path) -> None:
    root = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
    help_ = f"import runpy, contextlib; sys.argv = [{str(COMMAND)!r}, '--help']\n"
    help_ += f"with contextlib.suppress(SystemExit): runpy.run_path({str(COMMAND)!r}, run_name='__main__')"
    for code in (root + "import aorta.analysis", root + help_):
        assert loaded_after(tmp_path, code).isdisjoint(HEAVY)


@pytest.mark.thorough
def test_a_whole_report_never_loads_torch_nor_pyplot(two_runs: Path) -> None:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\nfrom pathlib import Path\n"
    code += "from aorta.analysis.report.report_command import overlap_report\n"
    code += "assert overlap_report(['--reference', 'cuda', '--candidate', 'rocm']) == 0"
    loaded = loaded_after(two_runs, code)
    assert {"pandas", "matplotlib"} <= loaded
    assert loaded.isdisjoint({"torch", "matplotlib.pyplot"})
