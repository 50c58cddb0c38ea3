"""What a killed rank had finished and not written is appended to its record, once, by whoever looks first."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from aorta.read.record import load_run
from aorta.records import ring_record
from aorta.records.clocks import boot_id
from aorta.records.process import is_ending, pid_namespace, start_ticks
from aorta.records.progress import ROWS_AT, SLOTS, ProgressFacts, may_have_unread_rows
from aorta.records.ring_file import ROW
from aorta.records.ring_record import salvage
from aorta.records.ring_steps import MOST
from tests.recording.told_program import Recorded, steps_of
from tests.records.test_progress import facts as facts_of_any
from tests.runs import HANGS_S, until

STEPS = MOST + 3


def killed(folder: Path, watchdog_timeout_s: float = 0, *, steps: int = STEPS) -> Recorded:
    """A recorded program that was killed behind so many steps."""
    program = Recorded(folder, watchdog_timeout_s)
    program.steps(steps)
    program.kill()
    return program


@pytest.fixture(scope="module")
def dead(tmp_path_factory):
    """The folder of a run that nobody has looked at."""
    folder = tmp_path_factory.mktemp("dead") / "run"
    assert len(steps_of(killed(folder).record)) < STEPS
    return folder


@pytest.fixture
def run(dead, tmp_path):
    """A copy of it."""
    return Path(shutil.copytree(dead, tmp_path / "run"))


@pytest.mark.parametrize("torn", ["", '{"record":"step","rank":0,"wor'], ids=["whole", "torn"])
def test_every_finished_step_is_in_the_record_once(run, torn):
    """A line that was being written is left out; who reads the run completes it first."""
    record, ring = run / "rank_0_metrics.jsonl", run / "progress" / "rank_0.bin"
    written = record.read_text()
    record.write_text(written + torn)
    if torn:
        load_run(run)
    else:
        assert salvage(run) == STEPS - written.count('{"record":"step"')
    assert record.read_text().startswith(written)
    assert steps_of(record) == list(range(STEPS))
    assert not may_have_unread_rows(ring)
    assert ring.stat().st_size < ROWS_AT * 2
    assert salvage(run) == 0


def test_the_next_run_in_the_folder_completes_it_before_it_is_moved(run):
    killed(run, steps=1)
    (earlier,) = (run / "history").iterdir()
    assert steps_of(earlier / "rank_0_metrics.jsonl") == list(range(STEPS))


def test_the_watchdog_completes_it_when_the_rank_dies(tmp_path):
    program = killed(tmp_path, 60)
    until(lambda: not may_have_unread_rows(program.ring))
    assert steps_of(program.record) == list(range(STEPS))


def test_the_record_of_a_rank_that_lives_is_left_alone(tmp_path):
    program = Recorded(tmp_path, 0)
    with program.process:
        program.steps(STEPS)
        before = program.record.read_bytes()
        assert salvage(tmp_path) == 0
        assert program.record.read_bytes() == before
        program.end()
    assert steps_of(program.record) == list(range(STEPS))
    assert not may_have_unread_rows(program.ring)


@pytest.mark.parametrize("ends", [True, False])
def test_the_lock_of_a_killed_rank_is_waited_for_unless_a_child_of_it_keeps_it(run, monkeypatch, ends):
    problems = []
    monkeypatch.setattr(ring_record, "_ENDING_S", HANGS_S if ends else 0)
    with (run / "progress" / "rank_0.bin").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        if ends:
            threading.Timer(0.2, lambda: fcntl.flock(held, fcntl.LOCK_UN)).start()
        salvage(run, problems)
    assert (problems, steps_of(run / "rank_0_metrics.jsonl")) == ([], list(range(STEPS)))


def test_whether_a_process_is_ending():
    def facts(pid: int, **more: Any) -> ProgressFacts:
        of_process = {"pid": pid, "start_ticks": start_ticks(pid), "pid_namespace": pid_namespace(), **more}
        return msgspec.structs.replace(facts_of_any(), **{"boot_id": boot_id(), **of_process})

    assert not is_ending(facts(os.getpid()))
    assert is_ending(facts(os.getpid(), start_ticks=1))
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        of_child = facts(child.pid)
        assert not is_ending(of_child)
        child.kill()
        assert is_ending(of_child)  # whatever the kernel is at
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert is_ending(of_child)
        assert not is_ending(facts(child.pid, boot_id="another"))
    assert is_ending(of_child)


def test_a_ring_of_another_record_or_a_damaged_one_is_left_alone(run):
    record, ring, problems = run / "rank_0_metrics.jsonl", run / "progress" / "rank_0.bin", []
    whole, data = record.read_text(), bytearray(ring.read_bytes())
    changed = whole.replace('"monotonic_ns":', '"monotonic_ns":1', 1)
    record.write_text(changed)
    assert salvage(run) == 0
    assert record.read_text() == changed
    assert "rank_0.bin: steps that its rank had finished may be missing" in load_run(run).health.files_left_out[0]
    record.write_text(whole)
    data[ROWS_AT + ROW.fields["name"][1] :: ROW.itemsize] = b"\x55" * SLOTS
    ring.write_bytes(data)
    assert salvage(run, problems) == 0
    assert [problem.partition(":")[0] for problem in problems] == ["rank_0.bin"]
    assert record.read_text() == whole


def test_steps_whose_rows_are_lost_are_said(run):
    record, ring = run / "rank_0_metrics.jsonl", run / "progress" / "rank_0.bin"
    written, data = len(steps_of(record)), ring.read_bytes()
    ring.write_bytes(data[:ROWS_AT] + bytes(len(data) - ROWS_AT))
    for _ in range(2):  # each who reads the run is told
        (problem,) = load_run(run).health.files_left_out
        assert problem.endswith(f"rows of {STEPS - written} steps are lost")
    assert len(steps_of(record)) == written
    # On a device a step may end before the device has reached it.
    of_device = ring.read_bytes().replace(b'"bound_ns":null', b'"bound_ns":1000')
    ring.write_bytes(of_device)
    assert not load_run(run).health.files_left_out
    assert not may_have_unread_rows(ring)


def test_a_folder_that_cannot_be_written_is_read_as_it_is(run, monkeypatch):
    monkeypatch.setattr(ring_record, "open_own", Mock(side_effect=OSError(errno.EROFS, os.strerror(errno.EROFS))))
    assert salvage(run) == 0
