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
    assert "NSYS_PROFILING_SESSION_ID" in result.calls[0]["env"]  # the ranks see that nsys is there


@pytest.mark.parametrize(
    ("variables", "options", "warned"),
    [
        ({"STANDIN_OLD": "1"}, DEFAULT[:2], "this nsys has no --cpuctxsw: left out"),
        (
            {"NSYS_ARGS": "  --trace=cuda,nvtx,osrt   --cuda-graph-trace=node "},
            ["--trace=cuda,nvtx,osrt", "--cuda-graph-trace=node"],
            "",
        ),
    ],
)
@pytest.mark.spec("D28")
def test_the_options_of_nsys(cuda, sh, variables, options, warned):
    result = cuda(NSYS_OUTPUT_DIR="to this", **variables)
    assert (result.code, warned in result.err) == (0, True), result.err
    run = only_run(sh.home / "to this")
    assert calls(sh)[0][: len(options) + 2] == ["profile", *options, f"--output=to this/{run.name}/report"]


@pytest.mark.parametrize("option", ["-o x", "--output=x"])
@pytest.mark.spec("D28")
def test_the_reports_name_is_not_the_callers(cuda, repo, option):
    result = cuda(NSYS_ARGS=f"--trace=cuda {option}")
    assert (result.code, result.calls) == (1, [])
    assert "NSYS_OUTPUT_DIR=DIR" in result.err
    assert not (repo / "nsys_traces").exists()


@pytest.mark.parametrize(
    ("variables", "code", "left"),
    [
        ({"NSYS_ARGS": "--no-such-option=1"}, 1, set()),
        ({"STANDIN_EXIT": "143"}, 143, {"report.nsys-rep", "report.sqlite"}),
        ({"STANDIN_NO_REPORT": "1"}, 5, set()),
        ({"STANDIN_NO_EXPORT": "1"}, 5, {"report.nsys-rep"}),
    ],
)
@pytest.mark.spec("D28")
def test_what_was_not_captured_fails_a_run_that_went_well(cuda, repo, variables, code, left):
    result = cuda(**variables)
    assert result.code == code
    run = only_run(repo / "nsys_traces")
    assert {path.name for path in run.iterdir()} == left
    if left == {"report.nsys-rep"}:
        again = shlex.split(result.err.split("Try again by hand: ")[1])
        assert again == ["nsys", "export", "--type=sqlite", f"--output={run}/report.sqlite", f"{run}/report.nsys-rep"]


@pytest.mark.spec("D28")
def test_a_dry_run_prints_both_commands_and_needs_neither_tool(sh, repo):
    (sh.bin / "torchrun").unlink()
    sh.program("nvidia-smi", "echo 'GPU 0: a'; echo 'GPU 1: b'")
    result = sh(SCRIPT, "--dry-run", "a=b c")
    assert result.code == 0, result.err
    profile, export = (shlex.split(line) for line in result.out.splitlines())
    assert profile[:5] == ["nsys", "profile", *DEFAULT]
    assert profile[6:] == ["torchrun", "--standalone", "--nproc_per_node", "2", str(repo / "train.py"), "a=b c"]
    assert export[:3] == ["nsys", "export", "--type=sqlite"]
    assert not (repo / "nsys_traces").exists()
