"""The search itself: what is wrong is found, kept and repeated, and the same numbers give the same cases."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from aorta.errors import InputError
from tests.fuzzing import __main__ as command
from tests.fuzzing import worker
from tests.fuzzing.doors import Door
from tests.fuzzing.worker import ANSWER, FINDING, LIMIT_BYTES, REFUSAL

pytestmark = pytest.mark.thorough


def seed(folder: Path) -> None:
    (folder / "one").mkdir()
    (folder / "one" / "a.json").write_text('{"a": 1}')


def answers(case: Path, out: Path) -> None:
    pass


def refuses(case: Path, out: Path) -> None:
    raise InputError("no")


def refuses_as_a_command(case: Path, out: Path) -> int:
    return InputError.exit_code


def fails(case: Path, out: Path) -> None:
    raise KeyError("x")


def takes_memory(case: Path, out: Path) -> None:
    size = LIMIT_BYTES + (256 << 20)
    memory = bytearray(size)
    memory[::4096] = b"x" * len(range(0, size, 4096))


def takes_time(case: Path, out: Path) -> None:
    while True:
        pass


def waits(case: Path, out: Path) -> None:
    time.sleep(1e6)


def changes_its_input(case: Path, out: Path) -> None:
    (case / "new").touch()


def writes_beside(case: Path, out: Path) -> None:
    (out.parent / "beside").touch()


def prints_what_no_terminal_shows(case: Path, out: Path) -> None:
    sys.stdout.write("\udcff")


@pytest.mark.parametrize(
    ("opens", "outcome", "what"),
    [
        (answers, ANSWER, ""),
        (refuses, REFUSAL, ""),
        (refuses_as_a_command, REFUSAL, ""),
        (fails, FINDING, "KeyError"),
        (takes_memory, FINDING, "more than 1024 MiB"),
        (takes_time, FINDING, "more than 0 s"),
        (waits, FINDING, "waits for ever"),
        (changes_its_input, FINDING, "it changed its input"),
        (writes_beside, FINDING, "it wrote outside its output folder"),
        (prints_what_no_terminal_shows, FINDING, "UnicodeEncodeError"),
    ],
)
def test_what_becomes_of_a_case(opens, outcome, what, tmp_path, monkeypatch):
    if opens is takes_time:
        monkeypatch.setattr(worker, "LIMIT_S", 0.5)
    if opens is waits:
        monkeypatch.setattr(worker, "WAIT_S", 5.0)
    (result,) = worker.opened(Door("x", seed, opens), [{"a.json": b"{}"}], tmp_path)
    assert (result.outcome, result.what.partition(" at tests")[0]) == (outcome, what)


def test_the_same_seed_gives_the_same_cases(tmp_path):
    door = Door("x", seed, answers)
    seeds = worker.load_seeds(door, tmp_path / "seeds")
    cases = list(worker.drawn(door, 3, range(300), seeds))
    assert cases == list(worker.drawn(door, 3, range(300), seeds)) != list(worker.drawn(door, 4, range(300), seeds))
    assert len({repr(tree) for *_, tree in cases}) > 150


def test_a_finding_is_kept_and_repeated(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(command, "DOORS", (Door("x", seed, fails), Door("y", seed, answers)))
    monkeypatch.setattr(command, "warm", lambda: None)
    keep = tmp_path / "keep"
    words = ["--minutes", "0.03", "--seed", "5", "--keep", str(keep), "--jobs", "2"]
    assert command.main([*words, "--only", "y"]) == 0
    assert not keep.exists()
    assert command.main(words) == 1
    summary = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert (summary["seed"], summary["doors"]["y"]["finding"]) == (5, 0)
    assert summary["findings"] == summary["doors"]["x"]["finding"] > 0
    (kept,) = keep.iterdir()
    assert command.main(["--repeat", str(kept)]) == 1
    assert "KeyError" in capfd.readouterr().out
