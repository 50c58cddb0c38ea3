"""The watchdog makes the lines of a rank; whatever becomes of it, each finished step is in the record once."""

from __future__ import annotations

import errno
import fcntl
import os
import signal

import msgspec
import psutil
import pytest

from aorta.errors import RecordWriteError
from aorta.records.progress import GIVEN_UP, may_have_unread_rows
from aorta.records.ring_record import RingRecord, salvage
from aorta.records.schema import Anchor, Footer
from tests.analysis import builders
from tests.instrument.test_rows import ByHand
from tests.recording.told_program import Recorded, lines_of, steps_of

pytestmark = pytest.mark.dist


@pytest.fixture
def run(tmp_path):
    recorded = Recorded(tmp_path / "run")
    with recorded.process:
        yield recorded
        recorded.process.kill()


def holds_each_step_once(run: Recorded) -> None:
    assert steps_of(run.record) == list(range(run.done))
    footer = lines_of(run.record)[-1]
    assert isinstance(footer, Footer)
    assert (footer.reason, footer.steps_written) == ("completed", run.done)
    assert not may_have_unread_rows(run.ring)


def test_lines_are_there_while_the_run_goes_on_though_it_writes_none(run):
    run.steps(250)
    run.until_written(250)
    for process in (run.process.pid, run.line_maker().pid):  # both have it open
        assert str(run.record) in [file.path for file in psutil.Process(process).open_files()]
    run.steps(3)
    assert f"aorta: {run.done} steps recorded" in run.end()
    holds_each_step_once(run)
    anchors = [line.global_step for line in lines_of(run.record) if isinstance(line, Anchor)]
    assert anchors == [99, 199]


@pytest.mark.thorough
@pytest.mark.parametrize(("how", "first"), [("SIGKILL", 101), ("SIGSTOP", 1)])
def test_a_rank_goes_on_without_it(run, how, first):
    run.steps(first)
    other = run.line_maker()
    other.send_signal(signal.Signals[how])
    run.stopped = other if how == "SIGSTOP" else None
    run.steps(100)
    said = run.end()
    if how == "SIGKILL" or "has not finished" not in said:  # it may have been stopped while it wrote
        holds_each_step_once(run)


@pytest.mark.thorough
def test_a_ring_that_nobody_reads_is_read_by_the_rank_before_it_is_full(run):
    run.steps(1)
    run.line_maker().kill()
    run.steps(30_000)
    assert run.record.read_bytes().count(b'"record":"step"') > 5_000
    run.end()
    holds_each_step_once(run)


@pytest.mark.thorough
def test_a_record_that_the_other_process_never_gives_back_gets_no_footer_and_its_steps_later(run):
    run.steps(1)
    run.line_maker().kill()
    with run.record.open("rb") as held:  # as if the other process hung while it wrote
        fcntl.flock(held, fcntl.LOCK_EX)
        run.steps(20)
        assert "another process still writes to it" in run.end()
    assert not any(isinstance(line, Footer) for line in lines_of(run.record))
    assert salvage(run.folder) == 20
    assert steps_of(run.record) == list(range(21))


@pytest.mark.spec("D1")
def test_a_rank_and_the_other_process_that_die_together_lose_nothing(run):
    run.steps(1)
    other = run.line_maker()
    other.suspend()
    run.steps(70)
    other.kill()
    run.process.kill()
    run.process.wait()
    assert salvage(run.folder) == 70
    assert steps_of(run.record) == list(range(run.done))


@pytest.fixture
def by_hand(tmp_path):
    """A ring, three of whose steps have ended, and its record."""
    hand = ByHand(path=tmp_path / "progress" / "rank_0.bin", anchor_interval=2)
    header = builders.header(0, 2, clock=hand.ring.facts.anchor)
    (tmp_path / "rank_0_metrics.jsonl").write_bytes(msgspec.json.encode(header) + b"\n")
    for number in range(3):
        hand.step(10 * number + 10, 10 * number + 19, lambda: None)
    return hand, RingRecord(tmp_path, hand.ring.path)


def kinds(record: RingRecord) -> list[str]:
    return [type(line).__name__ for line in lines_of(record.path)]


def test_steps_are_appended_once_with_readings_of_the_clocks_unless_the_ring_is_the_rank_s(by_hand):
    hand, record = by_hand
    owner, hand.ring.owner = hand.ring.owner, os.getpid() + 1
    assert not RingRecord(record.path.parent, hand.ring.path).claim()
    hand.ring.owner = owner
    assert record.claim()
    assert record.append() == 3
    assert kinds(record) == ["Header", "Step", "Step", "Anchor", "Step"]
    hand.step(50, 59, lambda: None)
    assert record.claim()
    assert record.append() == 1
    assert hand.ring.written[0] == 4
    assert hand.ring.read == hand.steps.ring.count - 1  # behind the last step stands its summary


def test_a_disk_that_takes_no_line_leaves_the_rest_to_the_rank(by_hand, monkeypatch):
    hand, record = by_hand
    write, left = os.write, [1]

    def full(file, data):
        if not left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left.pop()
        return write(file, data)

    assert record.claim()
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(RecordWriteError, match="No space left"):
        record.append()
    monkeypatch.undo()
    assert (hand.ring.owner, hand.ring.written[0]) == (GIVEN_UP, 1)
    assert kinds(record) == ["Header", "Step"]
    later = RingRecord(record.path.parent, hand.ring.path)
    assert later.claim(of_dead=True)
    assert later.append(late=True) == 2
    assert kinds(record) == ["Header", "Step", "Step", "Anchor", "Step"]
