"""A journal: lines that last, one writer at a time, what a kill leaves; that of a sweep, and the folder round it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from aorta.errors import ConfigError, InputError, RecordWriteError
from aorta.experiments.journal import (
    SWEEP_FILE,
    JobEnded,
    JobPlanned,
    Journal,
    PlanLine,
    SweepLine,
    SweepRequest,
    job_name,
    read_journal,
    read_plan_history,
    read_sweep,
    sweep_journal,
)
from aorta.experiments.launch_folder import move_earlier_sweep

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


ASKED = SweepRequest(
    journal_version=1,
    started="2026-11-21T10:00:00Z",
    words=["a=1,2", "b=x"],
    options=[],
    nproc=2,
    command=["python"],
    metric="overlap_ratio",
)


def write(folder, *lines):
    with closing(sweep_journal(folder)) as journal:
        journal.write(ASKED, *lines)
    return folder


def test_what_was_written_is_read(tmp_path):
    planned = [JobPlanned("00", ["a=1", "b=x"]), JobPlanned("01", ["a=2", "b=x"]), JobPlanned("02", ["a=3", "b=x"])]
    ended = [
        JobEnded("00", "done", 0, 1.5, 0.25, None),
        JobEnded("01", "failed", 1, 0.5, None, "exit code 1"),
    ]
    sweep = read_sweep(write(tmp_path, *planned, *ended))
    assert [(job.name, job.status) for job in sweep.jobs] == [("00", "done"), ("01", "failed"), ("02", "not run")]
    assert sweep.jobs[0].ended == ended[0]
    assert sweep.swept == ["a"]  # b never differs
    assert sweep.run_folder(sweep.jobs[2]) == tmp_path / "02"


def test_a_key_that_only_some_jobs_have_was_swept(tmp_path):
    sweep = read_sweep(write(tmp_path, JobPlanned("00", ["a=1"]), JobPlanned("01", ["a=1", "+c=2"])))
    assert sweep.swept == ["+c"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "give the folder of a sweep"),
        (b"", "it is empty"),
        (b"not JSON\n", "not the journal of a sweep: sweep.jsonl:1"),
        (b'{"record":"planned","job":"00","words":[]}\n', "it begins with another line"),
        (b'{"record":"header"}\n', "not the journal of a sweep"),
    ],
)
def test_what_is_no_journal_is_refused(tmp_path, content, said):
    if content is not None:
        (tmp_path / SWEEP_FILE).write_bytes(content)
    with pytest.raises(InputError, match=said):
        read_sweep(tmp_path)


def test_a_newer_journal_is_refused(tmp_path):
    write(tmp_path)
    path = tmp_path / SWEEP_FILE
    path.write_text(path.read_text().replace('"journal_version":1', '"journal_version":2'))
    with pytest.raises(InputError, match="journal_version 2; this AORTA reads 1"):
        read_sweep(tmp_path)


def test_a_job_name_that_is_a_path_is_not_followed(tmp_path):
    assert read_sweep(write(tmp_path, JobPlanned("../x", []), JobPlanned("00", []))).jobs[0].name == "00"


def test_jobs_are_numbered_in_two_digits_or_more():
    assert [job_name(number) for number in (0, 7, 99, 100)] == ["00", "07", "99", "100"]


def test_an_earlier_sweep_moves_to_history_whole(tmp_path):
    folder = tmp_path / "sweep"
    for text in ("first", "second"):
        move_earlier_sweep(folder)
        for name in ("00", "01"):
            (folder / name).mkdir()
            (folder / name / "run.json").write_text(text)
        (folder / SWEEP_FILE).write_text(text)
    move_earlier_sweep(folder)
    assert [path.name for path in folder.iterdir()] == ["history"]
    kept = sorted((folder / "history").iterdir())
    assert {(path / SWEEP_FILE).read_text() for path in kept} == {"first", "second"}
    for path in kept:
        assert {(path / name / "run.json").read_text() for name in ("00", "01")} == {(path / SWEEP_FILE).read_text()}


def test_a_folder_with_a_run_is_no_place_for_a_sweep(tmp_path):
    (tmp_path / "rank_0_metrics.jsonl").write_text("")
    with pytest.raises(ConfigError, match="holds a run, not a sweep; give the sweep another label"):
        move_earlier_sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["rank_0_metrics.jsonl"]


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        move_earlier_sweep(tmp_path / "file" / "sweep")
