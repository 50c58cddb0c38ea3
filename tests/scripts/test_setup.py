"""setup.sh where it does not install: a ready environment, none that can be made, an argument it does not know.

And its two users, check and demo.sh, on top of a ready environment.
"""

from __future__ import annotations

import re
import shutil
from importlib import metadata
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

CONSTRAINTS = Path(__file__).resolve().parents[2] / "constraints.txt"


def ready(sh, repo, extras="dev"):
    """What setup.sh leaves behind, with stand-ins for every program of the environment."""
    folder = repo / ".venv/bin"
    folder.mkdir(parents=True)
    for name in ("python", "torchrun", "ruff", "mypy", "lint-imports"):
        sh.standin(name, "torchrun.py")
        (sh.bin / name).rename(folder / name)
    script = (repo / "scripts/setup.sh").read_text()
    (repo / f".venv/{extras}.stamp").write_text(f"{repo}\n{script}")  # pyproject.toml and constraints.txt are empty
    return folder / "python"


@pytest.mark.parametrize(("extras", "arguments"), [("run", []), ("dev", []), ("dev", ["--dev"])])
def test_a_ready_environment_is_only_named(sh, repo, extras, arguments):
    python = ready(sh, repo, extras)
    result = sh("setup.sh", *arguments)
    assert (result.code, result.out, result.err, result.calls) == (0, f"{python}\n", "", [])


@pytest.mark.parametrize("stale", ["pyproject.toml", "constraints.txt", "scripts/setup.sh", "extras"])
def test_a_change_in_what_it_was_made_from_makes_it_stale(sh, repo, stale):
    ready(sh, repo, "run" if stale == "extras" else "dev")
    if stale != "extras":
        with (repo / stale).open("a") as file:
            file.write("# changed\n")
    result = sh("setup.sh", "--dev")
    assert result.code == 0, result.err
    installs = [call["argv"] for call in result.calls if "install" in call["argv"]]
    assert installs[-1][-3:] == [str(sh.repo / ".venv/torch.txt"), "-e", ".[dev,dask,optuna]"]
    assert result.out.splitlines()[-1] == str(sh.repo / ".venv/bin/python")
    assert sh("setup.sh", "--dev").calls == [], "the second call finds it ready"


@pytest.mark.parametrize("why", ["interrupted", "moved", "its python is gone"])
def test_an_environment_that_cannot_be_mended_is_made_again(sh, repo, why):
    ready(sh, repo)
    (repo / "pyproject.toml").write_text("# changed\n")
    if why == "interrupted":
        (repo / ".venv/unfinished").write_text("")
    elif why == "moved":
        sh.repo = repo.rename(repo.with_name("elsewhere"))
    else:
        (repo / ".venv/bin/python").unlink()
    # An interpreter that makes environments: it leaves a stand-in where the new one would be.
    (sh.repo / ".venv/leftover").write_text("")
    sh.standin("python3-inside", "torchrun.py")
    make = 'for place; do :; done; test "$1" = -m || exit 0; mkdir -p "$place/bin"; cp "$0-inside" "$place/bin/python"'
    sh.program("python3", make)
    (sh.bin / "cp").symlink_to(shutil.which("cp"))
    result = sh("setup.sh", "--dev", PYTHON="python3")
    assert result.code == 0, result.err
    assert f"making {sh.repo}/.venv from {sh.bin}/python3" in result.err
    assert not (sh.repo / ".venv/leftover").exists()
    assert not (sh.repo / ".venv/unfinished").exists()
    assert (sh.repo / ".venv/dev.stamp").exists()
    assert f'exec "{sh.repo}/.venv/bin/python" -m torch' in (sh.repo / ".venv/bin/torchrun").read_text()


def test_the_environment_of_another_checkout_is_not_emptied_through_a_link(sh, repo, tmp_path):
    ready(sh, repo)
    other = (repo / ".venv").rename(tmp_path / "other-venv")
    (repo / ".venv").symlink_to(other)
    (other / "dev.stamp").write_text("/another/checkout\n")
    result = sh("setup.sh", "--dev")
    assert (result.code, result.out) == (1, "")
    assert f"is a link to {other}, an environment that was not made for this checkout" in result.err
    assert (other / "bin/python").exists()
    (other / "dev.stamp").write_text(f"{repo}\nstale\n")
    assert sh("setup.sh", "--dev").code == 0, "a link to its own environment, on another disk, is as good as a folder"


def test_a_failed_install_says_so_and_is_not_taken_for_ready(sh, repo):
    ready(sh, repo, "run")
    for _ in range(2):
        result = sh("setup.sh", "--dev", STANDIN_FAIL_ON="install", STANDIN_EXIT="1")
        assert (result.code, result.out) == (1, "")
        assert "pip could not install" in result.err or "found no Python" in result.err
    assert not list((repo / ".venv").glob("*.stamp"))


@pytest.mark.parametrize("other", [None, "exit 1", "exit 127"], ids=["none", "too old", "a broken shim"])
def test_without_a_python_it_says_what_to_do(sh, repo, other):
    if other:
        sh.program("python3", other)
    result = sh("setup.sh")
    assert (result.code, result.out) == (1, "")
    assert "found no Python >= 3.11 (tried python3.13 python3.12 python3.11 python3)" in result.err
    assert "PYTHON=/path/to/python3.12 bash scripts/setup.sh" in result.err
    assert not (repo / ".venv").exists()


def test_a_python_asked_for_by_name_is_not_replaced_by_another(sh):
    sh.program("python3", "exit 0")
    assert "(tried /no/such/python)" in sh("setup.sh", PYTHON="/no/such/python").err


def test_an_unknown_argument_is_refused(sh):
    result = sh("setup.sh", "--develop")
    assert (result.code, result.err) == (1, "setup.sh: unknown argument '--develop'; allowed: --dev\n")


OF_THE_CPU = "not gpu and not simulated and not alone"
MAIN = f"{OF_THE_CPU} and not slow"
OF_TIMES = "alone and not gpu and not simulated"
ALONE = [f"{OF_TIMES} and not slow", "-n", "0"]
OF_DEVICES = "(gpu or simulated)"
ROOMS = ["tests/device_path", "tests/gpu", "tests/simulated"]
TWO_AT_A_TIME = ["-m", "tests.run_again", "-n", "2", "--dist", "loadfile", "-m"]


def compiler(sh, why_not=""):
    """A machine with a C++ compiler, and what its Python says of the simulated device."""
    sh.program("c++", "exit 0")
    python = sh.repo / ".venv/bin/python"
    words = python.read_text().splitlines()
    ask = f'if test "$3" = --why-not; then echo "{why_not}"; exit; fi'
    python.write_text("\n".join([words[0], ask, *words[1:], ""]))


def test_check_runs_its_stages_in_order_and_passes_words_to_pytest(sh, repo):
    (repo / ".ci").mkdir()
    ready(sh, repo)
    result = sh("check", "-k", "a name")
    assert result.code == 0, result.err
    assert [call["argv"] for call in result.calls] == [
        ["format", "--check", "."],
        ["check", "."],
        [],
        [],
        [*TWO_AT_A_TIME, MAIN, "-k", "a name"],
        [*TWO_AT_A_TIME, *ALONE, "-k", "a name"],
    ]
    assert {call["env"]["OMP_NUM_THREADS"] for call in result.calls} == {"1"}
    assert {call["cwd"] for call in result.calls} == {str(repo)}
    assert "== shell: skipped, shellcheck is not installed" in result.out
    assert "== tests on the simulated device: skipped, no C++ compiler" in result.out
    assert result.out.endswith("== all good\n")


@pytest.mark.parametrize(
    ("words", "rooms", "seeds", "fuzz", "without"),
    [
        ([], ROOMS, [], [], " and not thorough"),
        (["--all"], ROOMS, [["-m", "tests.seeds", "--seconds", "60"]], [["-m", "tests.fuzzing", "--minutes", "2"]], ""),
        (["-k", "a name"], [], [], [], ""),
        (["--all", "-k", "a name"], [], [], [], ""),
    ],
)
def test_with_a_compiler_the_device_path_is_tested_on_the_simulated_device(
    sh, repo, words, rooms, seeds, fuzz, without
):
    ready(sh, repo)
    compiler(sh)
    result = sh("check", *words)
    assert result.code == 0, result.err
    assert ("skipped (--all runs them)" in result.out) == bool(without)
    main, alone, device = (f"{marks}{without} and not slow" for marks in (OF_THE_CPU, OF_TIMES, OF_DEVICES))
    named = [word for word in words if word != "--all"]
    assert [call["argv"] for call in result.calls[4:]] == [
        *seeds,
        ["-m", "aorta.instrument.native"],
        ["-m", "tests.simulated.build"],
        [*TWO_AT_A_TIME, main, *named],
        [*TWO_AT_A_TIME, alone, "-n", "0", *named],
        *fuzz,
        [*TWO_AT_A_TIME, device, *rooms, *named],
    ]
    assert [call["env"].get("AORTA_SIMULATED_DEVICE") for call in result.calls[-2:]] == [None, "virtual"]


def test_check_stops_at_the_first_failure_and_names_it(sh, repo):
    ready(sh, repo)
    result = sh("check", STANDIN_FAIL_ON="--check", STANDIN_EXIT="2")
    assert (result.code, len(result.calls)) == (2, 1)
    assert "check: stage 'format' failed (exit 2): ruff format --check ." in result.err


def test_words_that_match_in_one_half_of_the_tests_only_are_no_failure(sh, repo):
    ready(sh, repo)
    words = sh("check", "-k", "a name", STANDIN_FAIL_ON=MAIN, STANDIN_EXIT="5")
    assert (words.code, len(words.calls)) == (0, 6)
    none = sh("check", "--all", STANDIN_FAIL_ON=MAIN, STANDIN_EXIT="5")
    assert none.code == 5
    assert "check: stage 'tests' failed (exit 5)" in none.err


def test_check_fast_runs_the_pure_tests_alone(sh, repo):
    ready(sh, repo)
    python = repo / ".venv/bin/python"
    python.write_text(
        python.read_text().replace("\n", '\ntest "$2" = tests.pure && echo tests/a.py && echo tests/b.py && exit\n', 1)
    )
    result = sh("check", "--fast", "-x")
    assert result.code == 0, result.err
    assert [call["argv"] for call in result.calls[4:]] == [
        [*TWO_AT_A_TIME, "not dist and not gpu and not simulated and not slow", "tests/a.py", "tests/b.py", "-x"]
    ]
    assert "== all other tests: skipped (--fast)" in result.out
    failed = sh("check", "--fast", STANDIN_FAIL_ON="tests.pure", STANDIN_EXIT="1")
    assert failed.code == 0
    python.write_text("#!/bin/sh\nexit 1\n")
    assert "check: stage 'pure tests' failed" in sh("check", "--fast").err


def test_check_without_an_environment_names_that_stage(sh):
    result = sh("check")
    assert result.code == 1
    assert "check: stage 'environment' failed" in result.err


@pytest.fixture
def complete(sh, repo, pytestconfig):
    """A repository with continuous integration, and a machine that lacks nothing."""
    shutil.copytree(pytestconfig.rootpath / ".ci", repo / ".ci")
    ready(sh, repo)
    compiler(sh)
    for name in ("shellcheck", "hadolint", "mkdocs"):
        sh.program(name, "exit 0")
    return repo / ".ci/run"


def test_continuous_integration_runs_the_gate_with_nothing_left_out(sh, complete):
    result = sh(complete)
    assert result.code == 0, result.err
    assert result.calls[-1]["argv"][:2] == TWO_AT_A_TIME[:2]
    assert {call["env"].get("GATE_COMPLETE") for call in result.calls} == {"1"}
    assert "skipped" not in result.out


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("shellcheck", "check: stage 'shell' cannot be run here, and here it has to be: shellcheck is not installed"),
        (
            "hadolint",
            "check: stage 'dockerfiles' cannot be run here, and here it has to be: hadolint is not installed",
        ),
        ("mkdocs", "check: stage 'site' cannot be run here, and here it has to be: mkdocs is not installed"),
        ("c++", "check: stage 'compile' cannot be run here, and here it has to be: no C++ compiler"),
    ],
)
def test_what_is_missing_fails_in_continuous_integration(sh, complete, program, said):
    (sh.bin / program).unlink()
    result = sh(complete)
    assert result.code == 1
    assert said in result.err
    assert sh("check").code == 0, "elsewhere the stage is left out"


def test_in_continuous_integration_the_simulated_device_has_to_be_there(sh, repo, complete):
    (repo / ".venv/bin/python").unlink()
    (repo / ".venv/dev.stamp").unlink()
    shutil.rmtree(repo / ".venv")
    ready(sh, repo)
    compiler(sh, "written for another torch")
    result = sh(complete)
    assert result.code == 1
    assert "check: stage 'tests on the simulated device' cannot be run here" in result.err
    assert "written for another torch" in result.err


def test_the_demo_is_the_command_after_set_up(sh, repo):
    ready(sh, repo, "run")
    result = sh("demo.sh", "training.max_steps=3", STANDIN_EXIT="5", STANDIN_FAIL_ON="training.max_steps=3")
    (call,) = result.calls
    assert call["argv"] == ["-m", "aorta", "demo", "training.max_steps=3"]
    assert call["cwd"] == str(repo)
    assert result.code == 5


@pytest.mark.parametrize("python", ["3.11.0", "3.12.0", "3.13.0"])
def test_what_is_pinned_installs_on_every_supported_python(python):
    pins = re.findall(r"^([\w.-]+)==", CONSTRAINTS.read_text(), re.MULTILINE)
    here = {name: found for name in pins for found in metadata.distributions(name=name)}
    needs = {name: found.metadata["Requires-Python"] or "" for name, found in here.items()}
    assert len(needs) > 100
    assert {name: asked for name, asked in needs.items() if not SpecifierSet(asked).contains(python)} == {}
