"""The journal of a sweep: written line by line, read back in whatever state it was left; and the folder round it."""

from __future__ import annotations

from contextlib import closing

import pytest

from aorta.errors import ConfigError, InputError
from aorta.experiments.journal import (
    SWEEP_FILE,
    JobEnded,
    JobPlanned,
    SweepRequest,
    job_name,
    read_sweep,
    sweep_journal,
)
from aorta.experiments.launch_folder import make_room

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


def test_a_line_cut_off_by_a_kill_is_named_and_the_rest_is_read(tmp_path):
    write(tmp_path, JobPlanned("00", ["a=1"]), JobPlanned("01", ["a=2"]), JobEnded("00", "done", 0, 1.0, 0.5, None))
    with (tmp_path / SWEEP_FILE).open("ab") as file:
        file.write(b'{"record":"ended","job":"01","sta')
    sweep = read_sweep(tmp_path)
    assert [job.status for job in sweep.jobs] == ["done", "not run"]
    assert [problem.partition(": ")[0] for problem in sweep.problems] == ["sweep.jsonl:5"]


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
        make_room(folder)
        for name in ("00", "01"):
            (folder / name).mkdir()
            (folder / name / "run.json").write_text(text)
        (folder / SWEEP_FILE).write_text(text)
    make_room(folder)
    assert [path.name for path in folder.iterdir()] == ["history"]
    kept = sorted((folder / "history").iterdir())
    assert {(path / SWEEP_FILE).read_text() for path in kept} == {"first", "second"}
    for path in kept:
        assert {(path / name / "run.json").read_text() for name in ("00", "01")} == {(path / SWEEP_FILE).read_text()}


def test_a_folder_with_a_run_is_no_place_for_a_sweep(tmp_path):
    (tmp_path / "rank_0_metrics.jsonl").write_text("")
    with pytest.raises(ConfigError, match="holds a run, not a sweep; give the sweep another label"):
        make_room(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["rank_0_metrics.jsonl"]


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        make_room(tmp_path / "file" / "sweep")
