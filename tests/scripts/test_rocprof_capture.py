"""rocprof_capture.sh against a stand-in that takes only what the real rocprofv3 takes (D14-D18, D41, D58)."""

from __future__ import annotations

import re
import shlex

import pytest

SCRIPT = "rocprof_capture.sh"
DEFAULT = ["--kernel-trace", "--memory-copy-trace", "--rccl-trace", "--marker-trace"]


@pytest.fixture
def rocm(sh):
    """A machine with rocprofv3, one trace a rank, one device unless the test says otherwise."""
    sh.standin("rocprofv3", "rocprofv3.py")

    def capture(*arguments, traces="1", **environment):
        return sh(SCRIPT, *arguments, **{"STANDIN_TRACES": traces, "NPROC": "1", **environment})

    return capture


def captured(folder):
    """The only run folder in `folder`, and rocprofv3's argv split at `--`."""
    (run,) = folder.iterdir()
    assert re.fullmatch(r"run_[0-9]{8}_[0-9]{6}", run.name)
    argv = (run / "argv").read_text().splitlines()
    return run, argv[: argv.index("--")], argv[argv.index("--") + 1 :]


@pytest.mark.spec("D14")
def test_a_whole_run_is_captured(rocm, repo):
    result = rocm("config/default.yaml", "--override", "training.max_steps=50", NPROC="2", traces="2")
    assert result.code == 0, result.err
    run, options, program = captured(repo / "rocprof_traces")
    output = ["--output-format", "rocpd", "json", "-d", str(run), "-o", "rank%env{RANK}%/%pid%"]
    assert options == [*DEFAULT, "--process-sync", *output]
    assert program[0].endswith("/torchrun")
    assert program[1:] == result.argv == [
        *("--standalone", "--nproc_per_node", "2", str(repo / "train.py")),
        *("--config", str(repo / "config/default.yaml"), "--override", "training.max_steps=50"),
    ]  # fmt: skip
    assert f"kernels of 2 of 2 ranks in {run}" in result.err


@pytest.mark.spec("D14")
def test_an_older_rocprofv3_is_asked_only_for_what_it_has(rocm, repo):
    result = rocm(STANDIN_OLD="1")
    assert result.code == 0, result.err
    run, options, _ = captured(repo / "rocprof_traces")
    output = ["--output-format", "json", "-d", str(run), "-o", "rank%env{RANK}%/%pid%"]
    assert options == ["--kernel-trace", "--memory-copy-trace", "--marker-trace", *output]
    assert "this rocprofv3 has no --rccl-trace: left out" in result.err


@pytest.mark.parametrize("code", [1, 5, 130])
@pytest.mark.spec("D14")
def test_the_exit_code_of_torchrun_is_passed_on(rocm, code):
    assert rocm(STANDIN_EXIT=str(code)).code == code
    assert rocm(STANDIN_EXIT=str(code), traces="0", ROCPROF_OUTPUT_DIR="elsewhere").code == code


@pytest.mark.spec("D14")
def test_ranks_without_a_trace_fail_a_run_that_went_well(rocm, repo):
    result = rocm(NPROC="3", traces="2")
    assert result.code == 5
    assert "1 of 3 ranks left no kernel" in result.err
    assert captured(repo / "rocprof_traces")[0].is_dir()


@pytest.mark.parametrize("own", [{}, {"ROCPROF_ARGS": "--kernel-trace -f json -o rank%env{RANK}%/%pid%"}])
@pytest.mark.spec("D14")
def test_files_that_hold_no_kernel_do_not_count(rocm, own):
    result = rocm(NPROC="2", traces="2", STANDIN_IDLE="1", **own)
    assert result.code == 5
    assert ("2 of 2 ranks left no kernel" if not own else "no file holds a kernel") in result.err
    assert rocm(NPROC="2", traces="2", ROCPROF_OUTPUT_DIR="elsewhere", **own).code == 0


@pytest.mark.spec("D14")
def test_one_process_a_device_or_one(rocm, sh):
    assert "no ROCm device found: one process" in rocm(NPROC="").err
    sh.program("amd-smi", "echo 'GPU: 0'; echo 'GPU: 1'")
    result = rocm(NPROC="", traces="2", ROCPROF_OUTPUT_DIR=str(sh.home / "second"))
    assert result.argv[:3] == ["--standalone", "--nproc_per_node", "2"]


@pytest.mark.spec("D15")
def test_another_output_folder(rocm, repo, sh):
    result = rocm(ROCPROF_OUTPUT_DIR=str(sh.home / "to this/folder"))
    assert result.code == 0, result.err
    run, options, _ = captured(sh.home / "to this/folder")
    assert options[options.index("-d") + 1] == str(run)
    assert not (repo / "rocprof_traces").exists()


@pytest.mark.spec("D16")
def test_arguments_of_the_callers_own_replace_the_default_ones(rocm, repo):
    result = rocm(ROCPROF_ARGS="  --hip-trace   --kernel-trace ")
    assert result.code == 0, result.err
    _, options, _ = captured(repo / "rocprof_traces")
    assert options[: options.index("--process-sync")] == ["--hip-trace", "--kernel-trace"]


@pytest.mark.spec("D16")
def test_the_documented_example_runs_with_one_warning_a_word(rocm, repo):
    result = rocm(ROCPROF_ARGS="--att --kernel-trace --kernel-symbols --kernel-symbols")
    assert result.code == 0, result.err
    _, options, _ = captured(repo / "rocprof_traces")
    assert options[:2] == ["--att", "--kernel-trace"]
    assert "--kernel-symbols" not in options
    assert result.err.count("dropped --kernel-symbols") == 1
    assert result.err.count("--att runs kernels one after another") == 1


@pytest.mark.spec("D16")
def test_what_the_caller_says_about_format_and_file_stands(rocm, repo):
    result = rocm(ROCPROF_ARGS="--kernel-trace --process-sync -f csv -o all/%pid%")
    assert result.code == 0, result.err
    run, options, _ = captured(repo / "rocprof_traces")
    assert options == ["--kernel-trace", "--process-sync", "-f", "csv", "-o", "all/%pid%", "-d", str(run)]


@pytest.mark.spec("D16")
def test_stars_in_the_arguments_are_not_file_names(rocm, repo, sh):
    (sh.home / "file").write_text("")
    rocm(ROCPROF_ARGS="--kernel-trace --kernel-include-regex *")
    assert "*" in captured(repo / "rocprof_traces")[1]


@pytest.mark.spec("D16")
def test_an_option_rocprofv3_does_not_know_is_its_own_error_and_leaves_no_folder(rocm, repo):
    result = rocm(ROCPROF_ARGS="--kernel-trace --no-such-option")
    assert result.code == 2
    assert "unrecognized arguments: --no-such-option" in result.err
    assert "nothing was captured" in result.err
    assert list((repo / "rocprof_traces").iterdir()) == []


@pytest.mark.spec("D17")
def test_without_rocprofv3_nothing_is_left_behind(sh, repo):
    before = sorted(repo.rglob("*"))
    result = sh(SCRIPT)
    assert (result.code, result.calls) == (127, [])
    assert "rocprofv3 not found" in result.err
    assert "ROCm" in result.err
    assert sorted(repo.rglob("*")) == before
    assert list(sh.home.iterdir()) == []


@pytest.mark.spec("D17")
def test_rocprofv3_is_also_found_where_rocm_puts_it(sh, tmp_path):
    sh.standin("rocprofv3", "rocprofv3.py")
    (tmp_path / "rocm/bin").mkdir(parents=True)
    (sh.bin / "rocprofv3").rename(tmp_path / "rocm/bin/rocprofv3")
    assert sh(SCRIPT, NPROC="1", STANDIN_TRACES="1", ROCM_PATH=str(tmp_path / "rocm")).code == 0


@pytest.mark.parametrize(
    "word",
    ["profiling.enabled=true", "profiling.enabled=True", "++profiling.enabled=1", "--override=profiling.enabled=yes"],
)
@pytest.mark.spec("D28")
def test_two_tracers_at_once_are_refused(rocm, repo, word):
    result = rocm("training.max_steps=2", word)
    assert (result.code, result.calls) == (1, [])
    assert f"'{word}' asks for torch.profiler, which cannot run under rocprofv3" in result.err
    assert not (repo / "rocprof_traces").exists()


@pytest.mark.spec("D28")
def test_switching_the_profiler_off_is_fine(rocm):
    assert rocm("profiling.enabled=false", "profiling.enabled_x=true").code == 0


@pytest.mark.parametrize("word", ["training.max_steps=50", "--override", "--cfg"])
@pytest.mark.spec("D41")
def test_a_first_argument_with_an_equals_sign_or_a_dash_is_no_configuration(rocm, word):
    argv = rocm(word).argv
    assert argv[-1] == word
    assert "--config" not in argv


def test_a_dry_run_prints_the_command_and_runs_nothing(rocm, repo):
    result = rocm("--dry-run", "config/default.yaml", "a=b c", ROCPROF_ARGS="--kernel-trace")
    assert (result.code, result.calls) == (0, [])
    (line,) = result.out.splitlines()
    words = shlex.split(line)
    assert words[:3] == ["rocprofv3", "--kernel-trace", "--process-sync"]
    assert "rank%env{RANK}%/%pid%" in words
    assert words[-4:] == [str(repo / "train.py"), "--config", str(repo / "config/default.yaml"), "a=b c"]
    assert not (repo / "rocprof_traces").exists()


def test_a_dry_run_needs_neither_rocprofv3_nor_torchrun(sh):
    (sh.bin / "torchrun").unlink()
    result = sh(SCRIPT, "--dry-run", NPROC="2")
    assert result.code == 0, result.err
    assert shlex.split(result.out)[:5] == ["rocprofv3", *DEFAULT]


@pytest.mark.spec("D14")
def test_a_traced_launcher_is_not_taken_for_a_rank(rocm, repo, sh):
    sh.program(
        "torchrun", 'd=$(echo "$OUT"/run_*); mkdir "$d/rank"; echo \'{"dispatch_info"\' >"$d/rank/1_results.json"'
    )
    result = rocm(traces="0", ROCPROF_OUTPUT_DIR=str(repo / "out"), OUT=str(repo / "out"))
    assert result.code == 5
    assert "kernels of 0 of 1 ranks" in result.err


@pytest.mark.spec("D16")
def test_no_file_at_all_fails_whatever_the_callers_names(rocm, sh):
    sh.program("torchrun", 'rm "$(echo "$OUT"/run_*)/argv"')
    result = rocm(traces="0", ROCPROF_ARGS="--kernel-trace -o mine", ROCPROF_OUTPUT_DIR="out", OUT=str(sh.home / "out"))
    assert result.code == 5
    assert "nothing was captured" in result.err
    assert list((sh.home / "out").iterdir()) == []


@pytest.mark.spec("D16")
def test_options_that_trace_nothing_do_not_pass_for_a_capture(rocm):
    result = rocm(ROCPROF_ARGS="--group-by-queue")
    assert (result.code, "No tracing options were enabled" in result.err) == (5, True)
    assert "does ROCPROF_ARGS switch --kernel-trace on?" in result.err
    assert rocm(ROCPROF_ARGS="--stats", ROCPROF_OUTPUT_DIR="elsewhere").code == 1
