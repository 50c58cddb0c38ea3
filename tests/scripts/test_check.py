"""The gate: which stages run, in which order and with which words, what ends it, what is skipped without a GPU; and
that every script parses, is executable and begins by saying what it is for.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time

import pytest

from aorta.records.process import process_facts
from tests.runs import environment
from tests.scripts.conftest import ROOT, ready


def answer(sh, **said):
    """Let the environment's Python print something where its last word asks for it."""
    python = sh.repo / ".venv/bin/python"
    begin, *words = python.read_text().splitlines()
    asked = [f'for last; do :; done; test "$last" = {word} && printf "{text}" && exit' for word, text in said.items()]
    python.write_text("\n".join([begin, *asked, *words, ""]))


@pytest.fixture
def gate(sh, repo, pytestconfig):
    """A ready environment, and a machine that lacks nothing."""
    shutil.copytree(pytestconfig.rootpath / ".ci", repo / ".ci")
    ready(sh, repo)
    answer(sh, **{"--why-not": ""})
    for name in ("shellcheck", "hadolint", "mkdocs", "c++"):
        sh.program(name, "exit 0")
    return sh


TESTS = "not gpu and not simulated and not alone and not slow"


@pytest.mark.parametrize(
    ("words", "fails_on", "code", "ends", "said"),
    [
        ([], "--check", 2, 2, "check: stage 'format' failed (exit 2): ruff format --check ."),
        (["--all"], TESTS, 5, 5, "check: stage 'tests' failed (exit 5)"),
        (["-k", "a name"], TESTS, 5, 0, ""),  # words may match tests of one stage only
    ],
)
def test_the_first_failure_ends_it_and_is_named(gate, words, fails_on, code, ends, said):
    result = gate("check", *words, STANDIN_FAIL_ON=fails_on, STANDIN_EXIT=str(code))
    assert result.code == ends
    assert said in result.err


def test_what_is_built_meanwhile_ends_with_the_gate(gate):
    """The first stage fails when the build of the simulated device has begun."""
    folder, pid = gate.repo / ".venv/bin", gate.home / "pid"
    building = f'test "$2" = tests.simulated.build && echo $$ >"{pid}" && exec sleep 60'
    (folder / "python").write_text(f"#!/bin/sh\n{building}\n")
    (folder / "ruff").write_text(f'#!/bin/sh\nuntil test -s "{pid}"; do sleep 0.01; done\nexit 3\n')
    assert gate("check").code == 3
    until = time.monotonic() + 30
    while (process := process_facts(int(pid.read_text()))) is not None and process.state != "Z":
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("program", "stage", "why"),
    [
        ("shellcheck", "shell", "shellcheck is not installed"),
        ("hadolint", "dockerfiles", "hadolint is not installed"),
        ("mkdocs", "site", "mkdocs is not installed"),
        ("c++", "compile", "no C++ compiler"),
        (None, "tests on the simulated device", "written for another torch"),
    ],
)
def test_what_is_missing_is_skipped_and_fails_in_continuous_integration(gate, program, stage, why):
    if program:
        (gate.bin / program).unlink()
    else:
        answer(gate, **{"--why-not": why})
    result = gate("../.ci/run")
    assert result.code == 1
    assert f"check: stage '{stage}' cannot be run here, and here it has to be: {why}" in result.err
    elsewhere = gate("check")
    assert elsewhere.code == 0
    assert f"== {stage}: skipped, {why}" in elsewhere.out


def test_every_script_parses_can_be_run_and_stops_at_the_first_error():
    named = (*("scripts/check", "scripts/dependency_ends", "scripts/fuzz", "scripts/torch_versions"), ".ci/run")
    run = [*ROOT.glob("scripts/*.sh"), *ROOT.glob("scripts/*.sbatch"), *(ROOT / name for name in named)]
    sourced = ROOT.glob("scripts/lib/*.sh")
    assert [path for path in (*run, *sourced) if subprocess.run(["bash", "-n", path]).returncode] == []
    wrong = []
    for path in run:
        first, second, *lines = path.read_text().splitlines()
        begins_well = first == "#!/usr/bin/env bash" and second.startswith("# ")
        if not (begins_well and os.access(path, os.X_OK) and "set -euo pipefail" in lines):
            wrong.append(path)
    assert wrong == []
    named = (word for path in run for word in re.findall(r"\btests/[\w/]+(?:\.py\b|(?=[ \n]))", path.read_text()))
    assert [path for path in {*named} if not (ROOT / path).exists()] == []


@pytest.mark.spec("D45")
@pytest.mark.thorough
def test_without_a_gpu_the_tests_of_devices_are_skipped_with_a_reason():
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "AORTA_SIMULATED_DEVICE": "", "GATE_COMPLETE": ""}
    words = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "tests/gpu/test_clock.py"]
    done = subprocess.run(words, cwd=ROOT, env=environment() | hidden, capture_output=True, text=True)
    assert (done.returncode, "torch sees no CUDA or HIP device" in done.stdout) == (0, True), done.stdout
