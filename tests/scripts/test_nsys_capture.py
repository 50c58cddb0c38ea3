"""nsys_capture.sh against a stand-in that takes only what the real nsys takes (D28)."""

from __future__ import annotations

import json
import re
import shlex

import pytest

SCRIPT = "nsys_capture.sh"
DEFAULT = ["--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none"]


@pytest.fixture
def cuda(sh):
    """A machine with nsys and one device, unless the test says otherwise."""
    sh.standin("nsys", "nsys.py")

    def capture(*arguments, **environment):
        return sh(SCRIPT, *arguments, **{"NPROC": "1", **environment})

    return capture


def only_run(folder):
    (run,) = folder.iterdir()
    assert re.fullmatch(r"run_[0-9]{8}_[0-9]{6}", run.name)
    return run


def calls(sh):
    return [json.loads(line) for line in (sh.home / "nsys.jsonl").read_text().splitlines()]


@pytest.mark.spec("D28")
def test_a_whole_run_is_captured_and_exported(cuda, sh, repo):
    result = cuda("config/default.yaml", "--override", "training.max_steps=50", NPROC="2")
    assert result.code == 0, result.err
    run = only_run(repo / "nsys_traces")
    profile, export = calls(sh)
    assert profile[:5] == ["profile", *DEFAULT, f"--output={run}/report"]
    assert profile[5].endswith("/torchrun")
    assert profile[6:] == result.argv == [
        *("--standalone", "--nproc_per_node", "2", str(repo / "train.py")),
        *("--config", str(repo / "config/default.yaml"), "--override", "training.max_steps=50"),
    ]  # fmt: skip
    assert export == ["export", "--type=sqlite", f"--output={run}/report.sqlite", f"{run}/report.nsys-rep"]
    assert {path.name for path in run.iterdir()} == {"report.nsys-rep", "report.sqlite"}


@pytest.mark.spec("D28")
def test_the_ranks_see_that_nsys_is_there(cuda):
    (call,) = cuda().calls
    assert "NSYS_PROFILING_SESSION_ID" in call["env"]


@pytest.mark.spec("D28")
def test_an_older_nsys_is_asked_only_for_what_it_has(cuda, sh):
    result = cuda(STANDIN_OLD="1")
    assert result.code == 0, result.err
    assert calls(sh)[0][1:3] == ["--trace=cuda,nvtx", "--sample=none"]
    assert "this nsys has no --cpuctxsw: left out" in result.err


@pytest.mark.spec("D28")
def test_options_of_the_callers_own_replace_the_default_ones(cuda, sh):
    result = cuda(NSYS_ARGS="  --trace=cuda,nvtx,osrt   --cuda-graph-trace=node ", NSYS_OUTPUT_DIR="to this")
    assert result.code == 0, result.err
    run = only_run(sh.home / "to this")
    assert calls(sh)[0][1:3] == ["--trace=cuda,nvtx,osrt", "--cuda-graph-trace=node"]
    assert (run / "report.sqlite").is_file()


@pytest.mark.parametrize("option", ["-o x", "--output=x", "--output x"])
@pytest.mark.spec("D28")
def test_the_reports_name_is_not_the_callers(cuda, repo, option):
    result = cuda(NSYS_ARGS=f"--trace=cuda {option}")
    assert (result.code, result.calls) == (1, [])
    assert "NSYS_OUTPUT_DIR=DIR" in result.err
    assert not (repo / "nsys_traces").exists()


@pytest.mark.spec("D28")
def test_an_option_nsys_does_not_know_is_its_own_error(cuda):
    result = cuda(NSYS_ARGS="--no-such-option=1")
    assert (result.code, result.calls) == (1, [])
    assert "unrecognised option '--no-such-option=1'" in result.err
    assert "no report in" in result.err


@pytest.mark.parametrize("code", [1, 5, 143])
@pytest.mark.spec("D28")
def test_the_exit_code_of_torchrun_is_passed_on(cuda, repo, code):
    assert cuda(STANDIN_EXIT=str(code)).code == code
    assert (only_run(repo / "nsys_traces") / "report.sqlite").is_file()


@pytest.mark.spec("D28")
def test_a_run_that_went_well_without_a_report_fails(cuda):
    result = cuda(STANDIN_NO_REPORT="1")
    assert result.code == 5
    assert "nsys left no report" in result.err


@pytest.mark.spec("D28")
def test_a_report_that_cannot_be_exported_fails_and_is_kept(cuda, repo):
    result = cuda(STANDIN_NO_EXPORT="1")
    assert result.code == 5
    run = only_run(repo / "nsys_traces")
    assert [path.name for path in run.iterdir()] == ["report.nsys-rep"]
    again = shlex.split(result.err.split("Try again by hand: ")[1])
    assert again == ["nsys", "export", "--type=sqlite", f"--output={run}/report.sqlite", f"{run}/report.nsys-rep"]


@pytest.mark.spec("D28")
def test_without_nsys_nothing_is_left_behind(sh, repo):
    before = sorted(repo.rglob("*"))
    result = sh(SCRIPT)
    assert (result.code, result.calls) == (127, [])
    assert "nsys not found" in result.err
    assert sorted(repo.rglob("*")) == before


@pytest.mark.spec("D28")
def test_torch_profiler_is_refused(cuda, repo):
    result = cuda("profiling.enabled=true")
    assert (result.code, result.calls) == (1, [])
    assert "'profiling.enabled=true' asks for torch.profiler, which cannot run under nsys" in result.err
    assert not (repo / "nsys_traces").exists()


@pytest.mark.spec("D28")
def test_a_dry_run_prints_both_commands_and_needs_neither_tool(sh, repo):
    (sh.bin / "torchrun").unlink()
    result = sh(SCRIPT, "--dry-run", "a=b c", NPROC="2")
    assert result.code == 0, result.err
    profile, export = (shlex.split(line) for line in result.out.splitlines())
    assert profile[:5] == ["nsys", "profile", *DEFAULT]
    assert profile[6:] == ["torchrun", "--standalone", "--nproc_per_node", "2", str(repo / "train.py"), "a=b c"]
    assert export[:3] == ["nsys", "export", "--type=sqlite"]
    assert not (repo / "nsys_traces").exists()


@pytest.mark.spec("D28")
def test_one_process_a_device(cuda, sh):
    sh.program("nvidia-smi", "echo 'GPU 0: a'; echo 'GPU 1: b'")
    assert cuda(NPROC="").argv[:3] == ["--standalone", "--nproc_per_node", "2"]
