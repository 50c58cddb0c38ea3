"""Ranks that are forked: what they find, what is said of them, and that none is left."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.experiments.test_process import gone
from tests.ranks import forked
from tests.runs import HANGS_S, environment, program, succeeded

pytestmark = [pytest.mark.dist, pytest.mark.thorough]


BEGINNING = """
import os, signal, subprocess, sys, time
rank, ready = os.environ["RANK"], os.path.join(os.path.dirname(__file__), "ready")


def say(*words, to=sys.stdout):
    # One write, for ranks share a file: `print` makes one of each word where Python does not buffer.
    to.write(" ".join(map(str, words)) + "\\n")
    to.flush()


def hang(*others):
    say(os.getpid(), *others)
    open(ready, "w").close()
    time.sleep(600)


def after_it_hangs():
    while not os.path.exists(ready):
        time.sleep(0.01)


"""


def run(folder: Path, text: str, *words: str, ranks: int = 2, **limits: float) -> subprocess.CompletedProcess[str]:
    """`text` as a script in `folder`."""
    script = folder / "script.py"
    script.write_text(BEGINNING + text)
    return forked(script, *words, ranks=ranks, environment=environment(), **({"timeout_s": HANGS_S} | limits))


def lives(pid: int) -> bool:
    """Whether it runs; its parent, the server, may not have collected it yet."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):  # before it was opened, or before it was read
        return False


@pytest.mark.parametrize(("how", "code"), [("raise ValueError('made to fail')", 1), ("os.kill(os.getpid(), 9)", -9)])
def test_a_rank_that_fails_ends_the_others(tmp_path: Path, how: str, code: int) -> None:
    text = f"if rank == '0':\n    hang()\nafter_it_hangs()\n{how}"
    done = run(tmp_path, text)
    assert done.returncode == code
    assert f"rank 1 failed; exit codes by rank: [-15, {code}]" in done.stderr
    assert ("ValueError: made to fail" in done.stderr) is ("ValueError" in how)
    assert not lives(int(done.stdout))


def test_a_rank_that_will_not_end_is_ended_with_what_it_started(tmp_path: Path) -> None:
    text = (
        "if rank == '0':\n    signal.signal(15, signal.SIG_IGN)\n    hang(subprocess.Popen(['sleep', '600']).pid)\n"
        "after_it_hangs()\nsys.exit(3)"
    )
    done = run(tmp_path, text, grace_s=0.3)
    assert done.returncode == 3
    assert "exit codes by rank: [-9, 3]" in done.stderr
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    assert all(map(gone, pids))  # whoever takes in the child of a rank may take its time


def test_a_launch_that_takes_too_long_leaves_nobody_and_says_what_it_said(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired) as late:
        run(tmp_path, "signal.signal(15, signal.SIG_IGN)\nhang()", timeout_s=10)
    assert time.monotonic() - began < 300  # far less than the ranks would live
    pids = late.value.output.split()
    assert len(pids) == 2
    assert pids[0] in late.value.__notes__[0]
    assert not any(lives(int(pid)) for pid in pids)


def test_the_server_s_and_the_caller_s_environment_are_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AORTA_TEST", "mine")
    monkeypatch.setenv("WORLD_SIZE", "5")  # of a launch that started pytest
    before = dict(os.environ)
    done = run(tmp_path, "say(os.environ['AORTA_TEST'], os.environ['WORLD_SIZE'])")
    assert done.stdout.splitlines() == ["mine 2"] * 2
    assert dict(os.environ) == before


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What ranks find, under both launchers."""
    told = {}
    for launcher in ("fork", "torchrun"):
        folder = tmp_path_factory.mktemp(launcher)
        succeeded(program("tests.found", str(folder), launcher=launcher))  # type: ignore[arg-type]
        told[launcher] = [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]
    return told


def test_a_rank_finds_what_torchrun_shows_it(found: dict[str, list[dict[str, Any]]]) -> None:
    for forked_one, real in zip(found["fork"], found["torchrun"], strict=True):
        assert forked_one["same"] == real["same"]
        assert forked_one["modules"] > real["modules"]  # nothing else is the point of it
