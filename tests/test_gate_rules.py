"""How the gate picks tests: a skip that nobody has listed fails in continuous integration and is shown elsewhere, the
pure tests load neither torch nor what draws, the tests nearest to a change come first, and forked ranks begin as those
of torchrun do.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import pure, since
from tests.allowed_skips import VARIABLE
from tests.ranks import forked
from tests.runs import HANGS_S, ROOT, Launcher, environment, program, succeeded

pytestmark = pytest.mark.thorough

FILE = """
import pytest

@pytest.mark.skipif(True, reason="no browser on this machine")
def test_with_a_condition(): ...

def test_inside():
    pytest.skip("no compiler on this machine")

@pytest.fixture
def part():
    pytest.skip("no compiled part")

def test_with_a_fixture(part): ...

def test_listed():
    pytest.skip("root may write into a read-only folder")

@pytest.mark.xfail(strict=True)
def test_that_is_expected_to_fail():
    raise ZeroDivisionError

def test_that_runs(): ...
"""
WHOLE_FILE = 'import pytest\npytest.importorskip("no_such_package")\n'


def outcomes(folder: Path, **variables: str) -> tuple[int, dict[str, int], str]:
    """Exit code, counts and output of a small suite with one skip of each sort."""
    (folder / "test_small.py").write_text(FILE)
    (folder / "test_whole_file.py").write_text(WHOLE_FILE)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -ra\n")
    own = environment(PYTHONPATH=str(ROOT)) | {VARIABLE: ""} | variables  # the gate itself may have it set
    plugin = ["-p", "tests.allowed_skips", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    words = [sys.executable, "-m", "pytest", *plugin, "-n", "1", str(folder)]
    done = subprocess.run(words, cwd=folder, env=own, capture_output=True, text=True, check=False)
    last = done.stdout.splitlines()[-1].partition(" in ")[0] + ","
    counts = {what: int(count) for count, what in re.findall(r"(\d+) ([a-z]+)[, ]", last)}
    return done.returncode, counts, done.stdout


def test_an_unlisted_skip_fails_in_continuous_integration_and_is_shown_elsewhere(tmp_path: Path) -> None:
    code, counts, said = outcomes(tmp_path, **{VARIABLE: "1"})
    assert code == 1
    # pytest counts what fails before a test's own lines, and a file that cannot be collected, as errors.
    assert counts == {"failed": 1, "errors": 3, "passed": 1, "skipped": 1, "xfailed": 1}
    for reason in ("no browser on", "no compiler on", "no compiled part", "could not import 'no_such_package'"):
        assert f"skipped for a reason that tests/allowed_skips.py does not list: {reason}" in said
    code, counts, said = outcomes(tmp_path)
    assert (code, counts) == (0, {"passed": 1, "skipped": 5, "xfailed": 1})
    assert "no browser on this machine" in said


@pytest.mark.spec("D45")
def test_without_a_gpu_the_tests_of_devices_are_skipped_with_a_reason() -> None:
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "AORTA_SIMULATED_DEVICE": "", VARIABLE: ""}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "tests/gpu/test_clock.py"],
        cwd=ROOT,
        env=environment() | hidden,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert re.search(r"^\d+ skipped in ", done.stdout, re.MULTILINE), done.stdout
    reasons = re.findall(r"^SKIPPED \[\d+\] \S+ (.*)$", done.stdout, re.MULTILINE)
    assert "torch sees no CUDA or HIP device" in reasons
    assert all(reasons)


def test_the_pure_tests_load_neither_torch_nor_what_draws() -> None:
    names = [str(path.relative_to(ROOT).with_suffix("")).replace("/", ".") for path in pure.files()]
    assert len(names) > 30
    program = (
        f"import importlib, sys\nfor name in {names!r}:\n    importlib.import_module(name)\n"
        "print(sorted({'torch', 'PIL', 'matplotlib', 'bokeh'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_the_tests_nearest_to_a_change_come_first_and_of_a_page_its_checks() -> None:
    near, others = since.chosen({ROOT / "aorta/read/traces/nsys.py"})
    assert near[0] == ROOT / "tests/read/test_nsys.py"
    assert (len(near) <= since.MOST, others > len(near)) == (True, True)
    assert since.chosen({ROOT / "tests/read/test_matching.py"}) == ([ROOT / "tests/read/test_matching.py"], 0)
    pages, _ = since.chosen({ROOT / "docs/traces.md"})
    assert {path.parent.name for path in pages} == {"docs"}


FAILING = """
import os, time
from pathlib import Path

ready = Path(__file__).with_name("ready")
if os.environ["RANK"] == "0":
    print(os.getpid(), flush=True)
    ready.touch()
    time.sleep(600)
while not ready.exists():
    time.sleep(0.01)
"""


@pytest.mark.parametrize(("how", "code"), [("raise ValueError('made to fail')", 1), ("os.kill(os.getpid(), 9)", -9)])
@pytest.mark.dist
def test_a_rank_that_fails_ends_the_others(tmp_path: Path, how: str, code: int) -> None:
    script = tmp_path / "script.py"
    script.write_text(FAILING + how)
    done = forked(script, ranks=2, environment=environment(), timeout_s=HANGS_S)
    assert done.returncode == code
    assert f"rank 1 failed; exit codes by rank: [-15, {code}]" in done.stderr
    assert ("ValueError: made to fail" in done.stderr) is ("ValueError" in how)
    with pytest.raises(ProcessLookupError):
        os.killpg(int(done.stdout), 0)


@pytest.mark.dist
def test_a_forked_rank_begins_as_one_of_torchrun_does(tmp_path: Path) -> None:
    launchers: tuple[Launcher, ...] = ("fork", "torchrun")
    ranks: dict[str, list[dict[str, Any]]] = {}
    for launcher in launchers:
        (tmp_path / launcher).mkdir()
        succeeded(program("tests.program_environment", str(tmp_path / launcher), launcher=launcher))
        ranks[launcher] = [json.loads((tmp_path / launcher / f"{rank}.json").read_text()) for rank in (0, 1)]
    for by_fork, by_torchrun in zip(ranks["fork"], ranks["torchrun"], strict=True):
        assert by_fork["same"] == by_torchrun["same"]
        assert by_fork["modules"] > by_torchrun["modules"]  # what the fork saves
