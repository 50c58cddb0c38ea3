"""The launch scripts: arguments, process count and environment, seen from torchrun's side (D18, D58); one_card.sh, of
which every part has a limit, a log and a line of the table, whatever became of those before it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

OWN_WORDS = {
    "launch_cpu.sh": ["label=cpu", "training.device=cpu"],
    "launch_cuda.sh": ["label=cuda", "training.device=cuda"],
    "launch_rocm.sh": ["label=rocm", "training.device=cuda", "--enable-rocm-metrics"],
}
"""What a launcher says before the caller's words."""
CAPTURES = {"rocprof_capture.sh": "rocprofv3", "nsys_capture.sh": "nsys"}
"""A capture, and the tool that it needs."""
NVIDIA_SMI = """test "$*" = "-L" && cat <<END
GPU 0: NVIDIA H200 (UUID: GPU-0)
  MIG 1g.18gb     Device  0: (UUID: MIG-0)
GPU 1: NVIDIA H200 (UUID: GPU-1)
GPU 2: NVIDIA H200 (UUID: GPU-2)
END"""
ROCM_SMI = """test "$*" = "--showid" && cat <<END
============================ ROCm System Management Interface ============================
GPU[0]\t\t: Device Name: \t\tAMD Instinct MI300X
GPU[0]\t\t: Device ID: \t\t0x74a1
GPU[1]\t\t: Device ID: \t\t0x74a1
END"""
AMD_SMI = """test "$*" = "list" && printf 'GPU: 0\\n    BDF: 0000:0c:00.0\\nGPU: 1\\nGPU: 2\\nGPU: 3\\n'"""


def nproc(argv: list[str]) -> str:
    return argv[argv.index("--nproc_per_node") + 1]


@pytest.mark.parametrize("script", [*OWN_WORDS, *CAPTURES])
@pytest.mark.spec("D18", "D41")
def test_words_are_passed_on_untouched_and_so_is_the_exit_code(launch, sh, repo, script):
    words = ["training.max_steps=2", "--override", "a=b c", "profiling.filename='rank{rank}.json'", "", "*"]
    result = launch(script, *words, NPROC="3", STANDIN_TRACES="3")
    assert result.code == 0, result.err
    assert result.argv[:4] == ["--standalone", "--nproc_per_node", "3", str(repo / "train.py")]
    assert result.argv[-len(words) :] == words
    assert "--config" not in result.argv
    assert result.argv[4 : -len(words)] == OWN_WORDS.get(script, [])
    assert launch(script, STANDIN_EXIT="5", TZ="UTC-9").code == 5  # another hour: another folder


@pytest.mark.parametrize("word", ["label=mine", "++label=mine", "--override=label=mine"])
@pytest.mark.spec("D18")
def test_a_label_of_the_callers_own_stands_alone(sh, word):
    argv = sh("launch_cpu.sh", word, "workload.mylabel=x").argv
    assert [given for given in argv if "label=" in given] == [word, "workload.mylabel=x"]
    assert "label=cpu" in sh("launch_cpu.sh", "workload.mylabel=x").argv


@pytest.mark.spec("D58")
def test_a_configuration_is_looked_for_in_the_callers_folder_then_in_the_repository(sh, repo):
    (sh.home / "config").mkdir()
    for word, place in (
        ("config/default.yaml", repo / "config/default.yaml"),
        ("config/default.yaml", sh.home / "config/default.yaml"),
        ("my own.yaml", sh.home / "my own.yaml"),
        (str(repo / "config/default.yaml"), repo / "config/default.yaml"),
    ):
        place.touch()
        argv = sh("launch_cpu.sh", word, "a=b").argv
        assert (argv[argv.index("--config") + 1], argv[-1]) == (str(place), "a=b")


MISSING = "'absent.yaml' not found (looked in {home} and {repo})"
TRACED = "'{word}' asks for torch.profiler, which cannot run under {tool}"
BOTH = ("profiling.enabled=true", "profiling.enabled=True", "++profiling.enabled=1", "--override=profiling.enabled=yes")


@pytest.mark.parametrize(
    ("script", "words", "code", "said"),
    [
        *((script, ["absent.yaml"], 1, MISSING) for script in ("launch_rocm.sh", *CAPTURES)),
        *((script, ["training.max_steps=2", word], 1, TRACED) for script in CAPTURES for word in BOTH),
        *((script, [], 127, "{tool} not found") for script in CAPTURES),
    ],
)
@pytest.mark.spec("D17", "D28", "D58")
def test_what_cannot_be_captured_or_found_is_named_and_leaves_nothing(launch, sh, repo, script, words, code, said):
    if code == 127:
        (sh.bin / CAPTURES[script]).unlink()
    before = sorted(repo.rglob("*"))
    result = launch(script, *words)
    assert (result.code, result.calls, sorted(repo.rglob("*"))) == (code, [], before)
    assert list(sh.home.iterdir()) == []
    assert said.format(home=sh.home, repo=repo, word=(words or [""])[-1], tool=CAPTURES.get(script)) in result.err


@pytest.mark.spec("D58")
def test_a_script_works_by_a_relative_path_and_through_a_link(sh, repo):
    assert sh("../scripts/launch_cpu.sh", cwd=repo / "config").argv[3] == str(repo / "train.py")
    (sh.home / "link").symlink_to(repo / "scripts/launch_cpu.sh")
    assert sh(sh.home / "link").argv[3] == str(repo / "train.py")


@pytest.mark.parametrize("script", OWN_WORDS)
def test_the_environment_is_left_alone_but_for_the_threads(sh, script):
    given = {"NCCL_DEBUG": "WARN", "GPU_MAX_HW_QUEUES": "8", "NPROC": "1", "SPACED": "a  b"}
    env = sh(script, **given).calls[0]["env"]
    added = env.keys() - given.keys() - {"PATH", "HOME", "RECORD", "PWD", "OLDPWD", "SHLVL", "_", "LC_CTYPE"}
    assert added == {"OMP_NUM_THREADS"}
    assert {name: env[name] for name in given} == given


@pytest.mark.parametrize(("own", "threads"), [({}, "1"), ({"OMP_NUM_THREADS": "4"}, "4")])
def test_a_cpu_run_has_two_ranks_of_one_thread(sh, own, threads):
    (call,) = sh("launch_cpu.sh", **own).calls
    assert (nproc(call["argv"]), call["env"]["OMP_NUM_THREADS"]) == ("2", threads)


@pytest.mark.parametrize("count", ["0", "-1", "1.5", "2 ", "08"])
def test_a_process_count_that_is_none_is_refused(sh, count):
    result = sh("launch_cpu.sh", NPROC=count)
    assert (result.code, result.calls) == (1, [])
    assert f"NPROC is '{count}'; it must be a whole number of processes, 1 or more" in result.err


@pytest.mark.parametrize(
    ("script", "tools", "variables", "count"),
    [
        pytest.param("cuda", {"nvidia-smi": NVIDIA_SMI}, {}, "3", id="without their slices"),
        pytest.param("cuda", {"nvidia-smi": NVIDIA_SMI}, {"NPROC": "8"}, "8", id="as asked"),
        pytest.param("cuda", {"nvidia-smi": NVIDIA_SMI}, {"CUDA_VISIBLE_DEVICES": "0,-1,1"}, "1", id="hidden"),
        pytest.param("rocm", {"rocm-smi": ROCM_SMI}, {"HIP_VISIBLE_DEVICES": "0,1,5"}, "3", id="hidden from HIP"),
        pytest.param("rocm", {"rocm-smi": ROCM_SMI}, {"ROCR_VISIBLE_DEVICES": "2"}, "1", id="hidden from ROCr"),
        pytest.param("rocm", {"rocm-smi": ROCM_SMI}, {}, "2", id="rocm-smi"),
        pytest.param("rocm", {"rocm-smi": "echo no driver; exit 2", "amd-smi": AMD_SMI}, {}, "4", id="amd-smi"),
        pytest.param("rocm", {"rocm-smi": "true", "amd-smi": "true", "python3": "echo 5"}, {}, "5", id="torch"),
    ],
)
@pytest.mark.spec("D18")
def test_devices_are_counted(sh, script, tools, variables, count):
    for name, text in tools.items():
        sh.program(name, text)
    assert nproc(sh(f"launch_{script}.sh", **variables).argv) == count


@pytest.mark.spec("D18")
def test_the_kernels_list_counts_devices_that_this_container_has(repo, tmp_path):
    (tmp_path / "dri").mkdir()
    for node, minor in enumerate([0, 0, 128, 129, 130]):  # two processors, three devices
        (tmp_path / f"nodes/{node}").mkdir(parents=True)
        (tmp_path / f"nodes/{node}/properties").write_text(f"simd_count 1\ndrm_render_minor {minor}\n")
    for minor in (128, 130):
        (tmp_path / f"dri/renderD{minor}").write_text("")
    code = f'source "{repo}/scripts/lib/launch.sh"; kfd_devices "$1/nodes" "$1/dri"; kfd_devices "$1/no" "$1/dri"'
    seen = subprocess.run(["bash", "-c", code, "-", tmp_path], capture_output=True, text=True)
    assert (seen.stdout, seen.returncode) == ("2\n0\n", 1), seen.stderr


@pytest.mark.parametrize(("script", "platform"), [("launch_cuda.sh", "CUDA"), ("launch_rocm.sh", "ROCm")])
@pytest.mark.parametrize("variables", [{"CUDA_VISIBLE_DEVICES": ""}, {}], ids=["hidden", "none"])
@pytest.mark.spec("D18")
def test_no_device_is_an_error_that_says_what_to_do(sh, script, platform, variables):
    result = sh(script, **variables)
    assert (result.code, result.calls) == (1, [])
    assert f"no {platform} device found. Use scripts/launch_cpu.sh, or set NPROC" in result.err


def test_the_projects_own_torchrun_comes_first_and_the_way_to_get_one_is_named(sh, repo):
    (repo / ".venv/bin").mkdir(parents=True)
    (sh.bin / "torchrun").rename(repo / ".venv/bin/torchrun")
    sh.program("torchrun", "exit 99")
    assert sh("launch_cpu.sh").code == 0
    (repo / ".venv/bin/torchrun").unlink()
    (sh.bin / "torchrun").unlink()
    result = sh("launch_cpu.sh")
    assert result.code == 127
    assert f"Run 'bash {repo}/scripts/setup.sh' first" in result.err


# --- one_card.sh --------------------------------------------------------------------------------------------------

CHECKS = ["check_one_rank", "check_two_ranks"]
PARTS = ["facts", "tests", *CHECKS, "values", "cost", "host_bound", "captures", "hang"]
PYTHON = """
printf 'ran %s\\n\\n' "$*"
for last; do :; done
case "$*" in
    *check-gpu*) printf 'a check failed\\n'; exit 7 ;;
    *autopsy*) exit 3 ;;
    *stuck*) : >"$last/settled_0"; : >"$last/settled_1"; printf '%s' $$ >"$last/pid"; exec sleep 300 ;;
esac
"""


@pytest.fixture
def card(sh):
    """A machine with the programs that it needs more, and a Python that fails the checks."""
    for name in ("tail", "tee", "timeout", "cut"):
        (sh.bin / name).symlink_to(shutil.which(name))
    sh.program("python3", PYTHON)
    return sh


def test_without_a_device_or_a_place_no_part_runs(card) -> None:
    done = card("one_card.sh", "--only", "1")
    assert (done.code, done.out) == (1, "")
    assert "where to? bash scripts/one_card.sh OUT [--only 3,4] [OVERRIDE...]" in done.err
    card.program("python3", f'case "$1" in -c) exit 1 ;; esac{PYTHON}')
    done = card("one_card.sh", "out")
    assert (done.code, done.out) == (1, "")
    assert "there is no card to look at" in done.err


def results(table: str) -> dict[str, str]:
    """What became of each part."""
    return dict(re.findall(r"^\d  (\w+) +(ok|failed \d+|> \d+ s|no time) +\d+  ", table, re.MULTILINE))


def test_a_part_that_fails_leaves_the_others_and_the_table_is_last(card) -> None:
    done = card("one_card.sh", "out", "training.batch_size=3")
    out = card.home / "out"
    assert results(done.out) == dict.fromkeys(PARTS, "ok") | dict.fromkeys(CHECKS, "failed 7"), done.err
    assert done.code == 1
    assert (out / "summary.txt").read_text() == done.out
    assert sorted(path.stem for path in out.glob("*.log")) == sorted(PARTS)
    assert done.out.count(" a check failed\n") == 2, "the last words of a part"
    # Those that train get the words; NCCL's two ranks share the card.
    words = {name: (out / f"{name}.log").read_text() for name in PARTS}
    assert all("training.batch_size=3" in words[name] for name in PARTS[2:8])
    assert "training.ranks_per_device=2" in words["check_two_ranks"]
    stat = Path("/proc", (out / "hang/pid").read_text(), "stat")
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z", "its ranks are ended"


def test_a_part_is_ended_at_its_limit_and_what_has_no_time_left_is_said(card) -> None:
    card.program("python3", 'case "$1" in -c) exit 0 ;; esac; exec sleep 300')
    done = card("one_card.sh", "out", "--only", "1,2", LIMIT_S="8")
    assert results(done.out) == {"facts": "no time", "tests": "> 1 s"}
    assert done.code == 1
