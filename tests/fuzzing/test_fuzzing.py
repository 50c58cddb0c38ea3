"""The search itself: what is wrong is found, kept and repeated, and the same numbers give the same cases."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from aorta.errors import InputError
from tests.fuzzing import __main__ as command
from tests.fuzzing.doors import Door
from tests.fuzzing.tree import Special, read_tree, write_tree
from tests.fuzzing.worker import ANSWER, FINDING, LIMIT_BYTES, REFUSAL, CaseResult, case_of, cases, load_seeds

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


def first(door: Door, place: Path) -> CaseResult:
    return next(cases(door, 1, range(1), load_seeds(door, place / "seeds"), place / "run"))


@pytest.mark.parametrize(
    ("opens", "outcome", "what"),
    [
        (answers, ANSWER, ""),
        (refuses, REFUSAL, ""),
        (refuses_as_a_command, REFUSAL, ""),
        (fails, FINDING, "KeyError"),
        (takes_memory, FINDING, "more than 1024 MiB"),
        (waits, FINDING, "waits for ever"),
        (changes_its_input, FINDING, "it changed its input"),
        (writes_beside, FINDING, "it wrote outside its output folder"),
        (prints_what_no_terminal_shows, FINDING, "UnicodeEncodeError"),
    ],
)
def test_what_becomes_of_a_case(opens, outcome, what, tmp_path):
    result = first(Door("x", seed, opens), tmp_path)
    assert (result.outcome, result.what) == (outcome, what)


def test_a_case_without_end_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.fuzzing.worker.LIMIT_S", 0.5)
    result = first(Door("x", seed, takes_time), tmp_path)
    assert result.outcome == FINDING
    assert result.what.startswith("more than 0 s")


def test_the_same_numbers_give_the_same_case(tmp_path):
    door = Door("x", seed, answers)
    seeds = load_seeds(door, tmp_path / "seeds")
    drawn = [case_of(door, 3, number, seeds) for number in range(300)]
    assert drawn == [case_of(door, 3, number, seeds) for number in range(300)]
    assert len({repr(tree) for _, tree, _ in drawn}) > 150
    assert drawn != [case_of(door, 4, number, seeds) for number in range(300)]


def test_a_finding_is_kept_and_repeated(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(command, "DOORS", (Door("x", seed, fails), Door("y", seed, answers)))
    monkeypatch.setattr(command, "warm", lambda: None)
    keep = tmp_path / "keep"
    assert command.main(["--minutes", "0.03", "--seed", "5", "--keep", str(keep), "--jobs", "2"]) == 1
    lines = capfd.readouterr().out.splitlines()
    summary = json.loads(lines[-1])
    assert summary["seed"] == 5
    assert summary["findings"] == summary["doors"]["x"]["cases"] > 0 == summary["doors"]["y"]["findings"]
    (kept,) = keep.iterdir()
    assert any(f"scripts/fuzz --repeat {kept}" in line for line in lines)
    assert command.main(["--repeat", str(kept)]) == 1
    assert "KeyError" in capfd.readouterr().out


def test_nothing_found_ends_with_0(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "DOORS", (Door("y", seed, answers),))
    monkeypatch.setattr(command, "warm", lambda: None)
    assert command.main(["--minutes", "0.02", "--keep", str(tmp_path / "keep")]) == 0
    assert not (tmp_path / "keep").exists()


def test_a_tree_is_written_as_it_was_read(tmp_path):
    tree = {"a/b": b"\x00\xff", "c": b""}
    write_tree({**tree, "pipe": Special("fifo"), "a/link": Special("link", "nowhere")}, tmp_path / "t")
    assert read_tree(tmp_path / "t") == tree
    assert (tmp_path / "t" / "pipe").is_fifo()
    assert (tmp_path / "t" / "a" / "link").is_symlink()
