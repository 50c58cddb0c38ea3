"""A journal: lines that last, one writer at a time, and what a kill leaves of a line."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from aorta.errors import ConfigError, RecordWriteError
from aorta.experiments.journal import (
    JobPlanned,
    Journal,
    PlanLine,
    SweepLine,
    read_journal,
    read_plan_history,
    read_sweep,
)

OLDER = Path(__file__).with_name("older")
"""Journals that AORTA wrote when plans and sweeps had a module each for theirs; only paths and host were changed."""
FIRST, SECOND, THIRD = (JobPlanned(f"0{number}", [f"x={number}"]) for number in range(3))


def journal(folder: Path) -> Journal:
    return Journal(folder / "journal.jsonl", in_use="somebody writes it")


def test_an_older_journal_of_a_sweep_is_read() -> None:
    sweep = read_sweep(OLDER)
    assert (sweep.asked.nproc, sweep.asked.metric, sweep.problems) == (2, "overlap_ratio", ())
    assert [(job.name, job.status) for job in sweep.jobs] == [
        *(("00", "done"), ("01", "failed"), ("02", "refused"), ("03", "failed"), ("04", "stopped"), ("05", "not run")),
    ]
    assert [job.ended.value for job in sweep.jobs if job.ended is not None] == [0.75, None, None, None, None]
    assert [job.ended.exit_code for job in sweep.jobs if job.ended is not None] == [0, 3, None, 0, 143]
    assert sweep.swept == ["x"]


def test_an_older_journal_of_a_plan_is_read() -> None:
    history = read_plan_history(OLDER)
    assert history.done() == {
        "reference/00": "reference-00-2", "candidate/01": "candidate-01-5", "reference/01": "reference-01-6",
        "candidate/00": "candidate-00-7",
    }  # fmt: skip
    assert [history.starts_of(name) for name in ("candidate/00", "reference/00")] == [3, 1]
    assert history.open_starts() == []
    assert history.seconds() == [0.193, 0.156, 0.142, 0.135]


def test_a_line_has_its_fields_in_the_order_of_the_documents(tmp_path: Path) -> None:
    """What is written now is what stood in older journals, but for the spaces."""
    for name in ("sweep.jsonl", "journal.jsonl"):
        lines = (OLDER / name).read_bytes().splitlines()
        read, problems = read_journal(OLDER / name, SweepLine if name == "sweep.jsonl" else PlanLine)
        assert problems == []
        with closing(Journal(tmp_path / name, in_use="")) as again:
            again.write(*read)
        written = (tmp_path / name).read_bytes().splitlines()
        assert [list(json.loads(line).items()) for line in written] == [
            list(json.loads(line).items()) for line in lines
        ]


def test_lines_are_appended_and_read_in_order(tmp_path: Path) -> None:
    with closing(journal(tmp_path)) as first:
        first.write(FIRST, SECOND)
        first.write()
    with closing(journal(tmp_path)) as second:
        second.write(THIRD)
        assert read_journal(second.path, SweepLine) == ([FIRST, SECOND, THIRD], [])


@pytest.mark.parametrize("torn", [b"{", b"{}"])
def test_a_line_that_a_kill_cut_short_stays_alone(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b"1\n" + torn)
    with closing(journal(tmp_path)) as taken_up:
        taken_up.write(FIRST)
    assert path.read_bytes() == b"1\n" + torn + b'\n{"record":"planned","job":"00","words":["x=0"]}\n'


def test_a_line_that_says_nothing_is_named_by_its_number(tmp_path: Path) -> None:
    with closing(journal(tmp_path)) as written:
        written.write(FIRST)
        written.path.write_bytes(written.path.read_bytes() + b'{"a\n\xff\n')
        written.write(THIRD)
        found, problems = read_journal(written.path, SweepLine)
    assert found == [FIRST, THIRD]
    assert [problem.partition(": ")[0] for problem in problems] == ["journal.jsonl:2", "journal.jsonl:3"]


def test_a_second_writer_is_refused_until_the_first_has_closed(tmp_path: Path) -> None:
    with closing(journal(tmp_path)), pytest.raises(ConfigError, match="somebody writes it"):
        journal(tmp_path)
    journal(tmp_path).close()


def test_a_journal_that_is_forgotten_is_not_held(tmp_path: Path) -> None:
    held = journal(tmp_path)
    del held
    journal(tmp_path).close()


def test_on_a_disk_without_locks_it_is_written_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", none)
    with closing(journal(tmp_path)) as written:
        written.write(FIRST)
    assert read_journal(written.path, SweepLine) == ([FIRST], [])


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no/journal\.jsonl: cannot be written: No such file"):
        journal(tmp_path / "no")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_full_disk_is_told(tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").symlink_to("/dev/full")
    with closing(journal(tmp_path)) as full, pytest.raises(RecordWriteError, match="No space left on device"):
        full.write(FIRST)
