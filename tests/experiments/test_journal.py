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
from aorta.experiments.journal import Journal, read_journal


def journal(folder: Path) -> Journal:
    return Journal(folder / "journal.jsonl", in_use="somebody writes it")


def test_lines_are_appended_and_read_in_order(tmp_path: Path) -> None:
    with closing(journal(tmp_path)) as first:
        first.append(b"1", b"2")
        first.append()
    with closing(journal(tmp_path)) as second:
        second.append(b"3")
        assert read_journal(second.path, json.loads) == ([1, 2, 3], [])


@pytest.mark.parametrize("torn", [b"[4", b"[4]"])
def test_a_line_that_a_kill_cut_short_stays_alone(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b"1\n" + torn)
    with closing(journal(tmp_path)) as taken_up:
        taken_up.append(b"5")
    assert path.read_bytes() == b"1\n" + torn + b"\n5\n"


def test_a_line_that_says_nothing_is_named_by_its_number(tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").write_bytes(b'1\n{"a\n\xff\n4\n')
    found, problems = read_journal(tmp_path / "journal.jsonl", json.loads)
    assert found == [1, 4]
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
        written.append(b"1")
    assert read_journal(written.path, json.loads) == ([1], [])


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no/journal\.jsonl: cannot be written: No such file"):
        journal(tmp_path / "no")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_full_disk_is_told(tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").symlink_to("/dev/full")
    with closing(journal(tmp_path)) as full, pytest.raises(RecordWriteError, match="No space left on device"):
        full.append(b"1")
