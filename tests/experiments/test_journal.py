"""A journal: lines that last, one writer at a time, what a kill leaves, and what is left to do of a plan."""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from aorta.errors import ConfigError, RecordWriteError
from aorta.experiments.launch_journal import Closed, Ended, Journal, PlanLine, PlanOpened, Started, read_plan_history
from aorta.records.files import read_lines

FIRST, SECOND, THIRD = (Closed("", number, []) for number in range(3))


def journal(folder: Path) -> Journal:
    return Journal(folder / "journal.jsonl", in_use="somebody writes it")


def test_lines_are_appended_and_read_in_order(tmp_path):
    with closing(journal(tmp_path)) as first:
        first.write(FIRST, SECOND)
        first.write()
    with closing(journal(tmp_path)) as second:
        second.write(THIRD)
        assert read_lines(second.path, PlanLine) == ([FIRST, SECOND, THIRD], [])


@pytest.mark.parametrize("torn", [b"{", b"{}"])
def test_a_line_that_a_kill_cut_short_stays_alone(tmp_path, torn):
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b"1\n" + torn)
    with closing(journal(tmp_path)) as taken_up:
        taken_up.write(FIRST)
    assert path.read_bytes() == b"1\n" + torn + b'\n{"event":"close","time":"","exit_code":0,"failed":[]}\n'


def test_a_line_that_says_nothing_is_named_by_its_number(tmp_path):
    with closing(journal(tmp_path)) as written:
        written.write(FIRST)
        written.path.write_bytes(written.path.read_bytes() + b'{"a\n\xff\n')
        written.write(THIRD)
        found, problems = read_lines(written.path, PlanLine)
    assert found == [FIRST, THIRD]
    assert [problem.partition(": ")[0] for problem in problems] == ["journal.jsonl:2", "journal.jsonl:3"]


def test_a_second_writer_is_refused_until_the_first_has_closed(tmp_path):
    with closing(journal(tmp_path)), pytest.raises(ConfigError, match="somebody writes it"):
        journal(tmp_path)
    held = journal(tmp_path)
    del held  # one that is forgotten is not held
    journal(tmp_path).close()


def test_on_a_disk_without_locks_it_is_written_all_the_same(tmp_path, monkeypatch):
    def none(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", none)
    with closing(journal(tmp_path)) as written:
        written.write(FIRST)
    assert read_lines(written.path, PlanLine) == ([FIRST], [])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_full_disk_and_a_folder_that_is_not_there_are_told(tmp_path):
    with pytest.raises(ConfigError, match=r"no/journal\.jsonl: cannot be written: No such file"):
        journal(tmp_path / "no")
    with closing(journal(tmp_path)) as full, Path("/dev/full").open("r+b") as disk:
        os.dup2(disk.fileno(), full._file.fileno())
        with pytest.raises(RecordWriteError, match="No space left on device"):
            full.write(FIRST)


def test_what_is_left_to_do_follows_from_the_last_end_of_each_launch(tmp_path):
    def ended(id_: str, launch: str, outcome: str) -> Ended:
        return Ended("", id_, launch, 0, 0, outcome, 0, 1.5, f"run-{id_}" if outcome == "done" else None)

    with closing(journal(tmp_path)) as written:
        written.write(
            PlanOpened(""), *(Started("", id_, f"a/0{id_}", 0, 0) for id_ in "0123"), Started("", "4", "a/00", 0, 1)
        )
        written.write(ended("0", "a/00", "failed"), ended("1", "a/01", "done"), ended("4", "a/00", "done"))
        written.write(ended("2", "a/02", "done"), ended("5", "a/02", "lost"), Closed("", 5, ["a/02"]))
    history = read_plan_history(tmp_path)
    assert history.done == {"a/00": "run-4", "a/01": "run-1"}
    assert [start.launch for start in history.starts] == ["a/00", "a/01", "a/02", "a/03", "a/00"]
    assert [start.launch for start in history.lost] == ["a/03"]
    assert history.seconds == [1.5, 1.5, 1.5]
    assert read_plan_history(tmp_path / "none").done == {}
