"""The launch scripts: arguments, process count and environment, seen from torchrun's side (D18, D58)."""

from __future__ import annotations

import subprocess

import pytest

OWN_WORDS = {
    "launch_cpu.sh": ["label=cpu", "training.device=cpu"],
    "launch_cuda.sh": ["label=cuda", "training.device=cuda"],
    "launch_rocm.sh": ["label=rocm", "training.device=cuda", "--enable-rocm-metrics"],
}
"""What a launcher says before the caller's words."""
SCRIPTS = pytest.mark.parametrize("script", OWN_WORDS)
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
AMD_SMI = """test "$*" = "list" && cat <<END
GPU: 0
    BDF: 0000:0c:00.0
GPU: 1
    BDF: 0000:22:00.0
GPU: 2
GPU: 3
END"""


@pytest.fixture
def launch(sh):
    """A launcher or a capture with one process, on a machine with both tracers."""
    sh.standin("rocprofv3", "rocprofv3.py")
    sh.standin("nsys", "nsys.py")
    return lambda script, *words, **own: sh(script, *words, **{"NPROC": "1", "STANDIN_TRACES": "1"} | own)


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
    def found(word):
        argv = sh("launch_cpu.sh", word, "a=b").argv
        assert argv[-1] == "a=b"
        return argv[argv.index("--config") + 1]

    (sh.home / "my own.yaml").write_text("")
    assert found("my own.yaml") == str(sh.home / "my own.yaml")
    assert found("config/default.yaml") == str(repo / "config/default.yaml")
    (sh.home / "config").mkdir()
    (sh.home / "config/default.yaml").write_text("")
    assert found("config/default.yaml") == str(sh.home / "config/default.yaml")
    assert found(str(repo / "config/default.yaml")) == str(repo / "config/default.yaml")


@pytest.mark.parametrize("script", ["launch_rocm.sh", *CAPTURES])
@pytest.mark.spec("D58")
def test_a_missing_configuration_is_named_with_both_places_and_leaves_nothing(launch, sh, repo, script):
    before = sorted(repo.rglob("*"))
    result = launch(script, "absent.yaml")
    assert (result.code, result.calls, sorted(repo.rglob("*"))) == (1, [], before)
    assert f"'absent.yaml' not found (looked in {sh.home} and {repo})" in result.err


@pytest.mark.parametrize(("script", "tool"), CAPTURES.items())
@pytest.mark.parametrize(
    "word",
    ["profiling.enabled=true", "profiling.enabled=True", "++profiling.enabled=1", "--override=profiling.enabled=yes"],
)
@pytest.mark.spec("D28")
def test_two_tracers_at_once_are_refused(launch, repo, script, tool, word):
    before = sorted(repo.rglob("*"))
    result = launch(script, "training.max_steps=2", word)
    assert (result.code, result.calls, sorted(repo.rglob("*"))) == (1, [], before)
    assert f"'{word}' asks for torch.profiler, which cannot run under {tool}" in result.err


@pytest.mark.parametrize(("script", "tool"), CAPTURES.items())
@pytest.mark.spec("D17", "D28")
def test_without_its_tool_a_capture_leaves_nothing_behind(sh, repo, script, tool):
    before = sorted(repo.rglob("*"))
    result = sh(script)
    assert (result.code, result.calls, sorted(repo.rglob("*"))) == (127, [], before)
    assert f"{tool} not found" in result.err
    assert list(sh.home.iterdir()) == []


@pytest.mark.spec("D58")
def test_a_script_works_by_a_relative_path_and_through_a_link(sh, repo):
    assert sh("../scripts/launch_cpu.sh", cwd=repo / "config").argv[3] == str(repo / "train.py")
    (sh.home / "link").symlink_to(repo / "scripts/launch_cpu.sh")
    assert sh(sh.home / "link").argv[3] == str(repo / "train.py")


@SCRIPTS
def test_the_environment_is_left_alone_but_for_the_threads(sh, script):
    given = {"NCCL_DEBUG": "WARN", "GPU_MAX_HW_QUEUES": "8", "NPROC": "1", "SPACED": "a  b"}
    env = sh(script, **given).calls[0]["env"]
    added = env.keys() - given.keys() - {"PATH", "HOME", "RECORD", "PWD", "OLDPWD", "SHLVL", "_", "LC_CTYPE"}
    assert added == {"OMP_NUM_THREADS"}
    assert {name: env[name] for name in given} == given


def test_a_cpu_run_has_two_ranks_of_one_thread(sh):
    result = sh("launch_cpu.sh")
    assert (nproc(result.argv), result.calls[0]["env"]["OMP_NUM_THREADS"]) == ("2", "1")
    assert sh("launch_cpu.sh", OMP_NUM_THREADS="4").calls[0]["env"]["OMP_NUM_THREADS"] == "4"


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
@pytest.mark.parametrize("visible", ["", None])
@pytest.mark.spec("D18")
def test_no_device_is_an_error_that_says_what_to_do(sh, script, platform, visible):
    result = sh(script, **({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}))
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
