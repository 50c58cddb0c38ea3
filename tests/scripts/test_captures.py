"""rocprof_capture.sh and nsys_capture.sh against stand-ins that take what the real tools take (D14-D17, D28, D41)."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

CASES = json.loads(Path(__file__).with_suffix(".json").read_text())
ROCPROF, NSYS = "rocprof_capture.sh", "nsys_capture.sh"
KERNELS = ["--kernel-trace", "--memory-copy-trace", "--rccl-trace", "--marker-trace"]
NAMES = ["-o", "rank%env{RANK}%/%pid%"]
NSYS_DEFAULT = ["--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none"]
WORDS = ("config/default.yaml", "--override", "training.max_steps=50")


def only_run(folder):
    """The only run folder in `folder`."""
    (run,) = folder.iterdir()
    assert re.fullmatch(r"run_[0-9]{8}_[0-9]{6}", run.name)
    return run


def rocprof_words(run):
    """rocprofv3's options, and the program behind `--`."""
    argv = (run / "argv").read_text().splitlines()
    return argv[: argv.index("--")], argv[argv.index("--") + 1 :]


def nsys_calls(sh):
    return [json.loads(line) for line in (sh.home / "nsys.jsonl").read_text().splitlines()]


def launched(repo, ranks="2"):
    """What torchrun is given for `WORDS`."""
    config = str(repo / WORDS[0])
    return ["--standalone", "--nproc_per_node", ranks, str(repo / "train.py"), "--config", config, *WORDS[1:]]


# --- rocprofv3 ----------------------------------------------------------------------------------------------------


@pytest.mark.spec("D14", "D15")
def test_a_whole_run_is_captured(launch, sh, repo):
    result = launch(ROCPROF, *WORDS, NPROC="2", STANDIN_TRACES="2", ROCPROF_OUTPUT_DIR=str(sh.home / "to this/folder"))
    assert result.code == 0, result.err
    run = only_run(sh.home / "to this/folder")
    options, program = rocprof_words(run)
    assert options == [*KERNELS, "--process-sync", "--output-format", "rocpd", "json", "-d", str(run), *NAMES]
    assert program[0].endswith("/torchrun")
    assert program[1:] == result.argv == launched(repo)
    assert not (repo / "rocprof_traces").exists()


@pytest.mark.parametrize(("variables", "expected", "warned"), CASES["options"].values(), ids=CASES["options"])
@pytest.mark.spec("D14", "D16")
def test_the_options_of_rocprofv3(launch, repo, variables, expected, warned):
    result = launch(ROCPROF, **variables)
    assert result.code == 0, result.err
    run = only_run(repo / "rocprof_traces")
    before_folder, *behind_it = expected
    assert rocprof_words(run)[0] == [*before_folder.split(), str(run), *behind_it]
    assert [result.err.count(warning) for warning in warned] == [1] * len(warned)


@pytest.mark.parametrize(("variables", "code", "said"), CASES["not captured"])
@pytest.mark.spec("D14", "D16")
def test_what_was_not_captured_fails_a_run_that_went_well(launch, repo, variables, code, said):
    result = launch(ROCPROF, **variables)
    assert (result.code, said in result.err) == (code, True), result.err
    assert bool(list((repo / "rocprof_traces").iterdir())) == (said != "nothing was captured")


@pytest.mark.spec("D14")
def test_a_traced_launcher_is_not_taken_for_a_rank(launch, repo, sh):
    trace = 'd=$(echo "$OUT"/run_*); mkdir "$d/rank"; echo \'{"dispatch_info"\' >"$d/rank/1_results.json"'
    sh.program("torchrun", trace)
    result = launch(ROCPROF, STANDIN_TRACES="0", ROCPROF_OUTPUT_DIR=str(repo / "out"), OUT=str(repo / "out"))
    assert result.code == 5
    assert "kernels of 0 of 1 ranks" in result.err


@pytest.mark.spec("D17")
def test_rocprofv3_is_looked_for_in_the_folder_of_rocm(launch, sh, tmp_path):
    (tmp_path / "rocm/bin").mkdir(parents=True)
    (sh.bin / "rocprofv3").rename(tmp_path / "rocm/bin/rocprofv3")
    assert launch(ROCPROF, ROCM_PATH=str(tmp_path / "rocm")).code == 0


@pytest.mark.spec("D28", "D41")
def test_one_process_a_device_or_one_and_the_profiler_may_be_switched_off(launch, sh):
    assert "no ROCm device found: one process" in launch(ROCPROF, "profiling.enabled=false", NPROC="").err
    sh.program("amd-smi", "echo 'GPU: 0'; echo 'GPU: 1'")
    result = launch(
        ROCPROF, "profiling.enabled_x=true", NPROC="", STANDIN_TRACES="2", ROCPROF_OUTPUT_DIR=str(sh.home / "second")
    )
    assert (result.code, result.argv[:3]) == (0, ["--standalone", "--nproc_per_node", "2"])


def test_a_dry_run_prints_the_command_and_needs_neither_rocprofv3_nor_torchrun(sh, repo):
    (sh.bin / "torchrun").unlink()
    result = sh(ROCPROF, "--dry-run", "config/default.yaml", "a=b c", NPROC="2")
    assert (result.code, result.calls) == (0, []), result.err
    (line,) = result.out.splitlines()
    words = shlex.split(line)
    assert words[:5] == ["rocprofv3", *KERNELS]
    assert "rank%env{RANK}%/%pid%" in words
    assert words[-4:] == [str(repo / "train.py"), "--config", str(repo / "config/default.yaml"), "a=b c"]
    assert not (repo / "rocprof_traces").exists()


# --- nsys ---------------------------------------------------------------------------------------------------------


@pytest.mark.spec("D28")
def test_a_whole_run_is_captured_and_exported(launch, sh, repo):
    result = launch(NSYS, *WORDS, NPROC="2")
    assert result.code == 0, result.err
    run = only_run(repo / "nsys_traces")
    profile, export = nsys_calls(sh)
    assert profile[:5] == ["profile", *NSYS_DEFAULT, f"--output={run}/report"]
    assert profile[5].endswith("/torchrun")
    assert profile[6:] == result.argv == launched(repo)
    assert export == ["export", "--type=sqlite", f"--output={run}/report.sqlite", f"{run}/report.nsys-rep"]
    assert {path.name for path in run.iterdir()} == {"report.nsys-rep", "report.sqlite"}
    assert "NSYS_PROFILING_SESSION_ID" in result.calls[0]["env"]  # the ranks see that nsys is there


@pytest.mark.parametrize(
    ("variables", "options", "warned"),
    [
        ({"STANDIN_OLD": "1"}, NSYS_DEFAULT[:2], "this nsys has no --cpuctxsw: left out"),
        ({"NSYS_ARGS": "  --trace=cuda,osrt   --wait=all "}, ["--trace=cuda,osrt", "--wait=all"], ""),
    ],
)
@pytest.mark.spec("D28")
def test_the_options_of_nsys(launch, sh, variables, options, warned):
    result = launch(NSYS, NSYS_OUTPUT_DIR="to this", **variables)
    assert (result.code, warned in result.err) == (0, True), result.err
    run = only_run(sh.home / "to this")
    assert nsys_calls(sh)[0][: len(options) + 2] == ["profile", *options, f"--output=to this/{run.name}/report"]


@pytest.mark.parametrize("option", ["-o x", "--output=x"])
@pytest.mark.spec("D28")
def test_the_reports_name_is_not_the_callers(launch, repo, option):
    result = launch(NSYS, NSYS_ARGS=f"--trace=cuda {option}")
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
def test_what_nsys_did_not_capture_fails_a_run_that_went_well(launch, repo, variables, code, left):
    result = launch(NSYS, **variables)
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
    result = sh(NSYS, "--dry-run", "a=b c")
    assert result.code == 0, result.err
    profile, export = (shlex.split(line) for line in result.out.splitlines())
    assert profile[:5] == ["nsys", "profile", *NSYS_DEFAULT]
    assert profile[6:] == ["torchrun", "--standalone", "--nproc_per_node", "2", str(repo / "train.py"), "a=b c"]
    assert export[:3] == ["nsys", "export", "--type=sqlite"]
    assert not (repo / "nsys_traces").exists()
