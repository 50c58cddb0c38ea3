"""Where a rank is, by its ring: what is noted is read back; what is torn, foreign, or of another version is named."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from aorta.instrument.ring_rows import RingRows
from aorta.records import progress as module
from aorta.records.process import pid_namespace, start_ticks
from aorta.records.progress import NOBODY, ProgressFacts, ProgressWatch, UnreadableProgress, read_progress
from aorta.records.ring_file import NO_DTYPE, ON_DEVICE, STEP, RingFacts, RingFile, RingGroup, RingOperator
from aorta.records.schema import ClockReading


def facts(rank: int = 0) -> ProgressFacts:
    process = {"pid": os.getpid(), "start_ticks": start_ticks(os.getpid()), "pid_namespace": pid_namespace()}
    run = {"host": "here", "boot_id": "boot", "run_id": "run", "attempt": 0, "warmup_steps": 5}
    return ProgressFacts(rank=rank, world_size=2, local_rank=rank, **process, **run)


def of_rows() -> RingFacts:
    clock = ClockReading(realtime_ns=0, boottime_ns=0, monotonic_ns=0, uncertainty_ns=1)
    operators = (RingOperator("allreduce", False), RingOperator("send", True))
    more = {"no_copies": None, "no_values": None, "dtypes": ("float32", "int64")}
    return RingFacts(rank=0, world_size=2, anchor=clock, stall_cutoff_ns=0, operators=operators, **more)


class Rank:
    """A rank's ring, of few rows, and how collectives get there. The process has it mapped, and ends here."""

    def __init__(self, path: Path, slots: int = 4096, process: ProgressFacts | None = None) -> None:
        self.path = path
        self.ring = RingFile.create(path, process or facts(), slots)
        self.ring.describe(of_rows())
        self.rows, self.progress = RingRows(self.ring), self.ring.progress

    def issue(self, number: int, *, group: int = 0, flags: int = 0) -> int:
        """An all-reduce of a float32; returns the index of its row."""
        return self.rows.issue(flags, 0, 0, group, 4096, number, module.NO_PEER)[0]


@pytest.fixture
def rank(tmp_path):
    return Rank(tmp_path / "progress" / "rank_0.bin")


def test_what_is_noted_is_read_back(rank):
    progress, rows = rank.progress, rank.rows
    assert read_progress(rank.path).state.step is None
    progress.begin_step(7)
    group = rank.ring.group(RingGroup("dp", 1, False, (1, 0)))
    assert rank.ring.group(RingGroup("dp", 1, False, (1, 0))) == group
    first = rank.issue(0, group=group)
    rows.append(STEP)  # other rows are none of a collective
    rows.issue(0, 1, NO_DTYPE, group, 8, 9, 3 << 32 | 1)  # the third to rank 1, of nine
    rank.issue(1, flags=ON_DEVICE)
    rows.complete(first, 1 << 61, by_wait=True)
    with progress.phase("checkpoint"):
        seen = read_progress(rank.path)
    assert seen.facts == facts()
    state = seen.state
    assert (state.step, state.phase, state.steps_done, state.exit_code) == (7, "checkpoint", 0, None)
    assert state.progress_ns == 1 << 61
    one, two, three = seen.collectives
    assert (one.kind, one.dtype, one.bytes, one.number, one.peer) == ("allreduce", "float32", 4096, 0, None)
    assert (one.completed_ns, one.on_device) == (1 << 61, False)
    assert (two.number, two.kind, two.dtype, two.peer, two.completed_ns) == (3, "send", None, 1, None)
    assert (three.group, three.on_device) == (None, True)
    assert one.group.ranks == (1, 0)
    assert one.issued_ns < two.issued_ns < three.issued_ns
    assert seen.torn is None
    progress.end_step()
    progress.end(3)
    state = ProgressWatch(rank.path).state()
    assert (state.phase, state.steps_done, state.exit_code) == ("none", 1, 3)


def test_a_rank_whose_instrument_is_not_there_yet_says_where_it_is(tmp_path):
    path = tmp_path / "rank_0.bin"
    ring = RingFile.create(path, facts())
    ring.progress.enter("data")
    assert read_progress(path).state.phase == "data"
    assert not module.may_have_unread_rows(path)
    with pytest.raises(UnreadableProgress, match="nothing of rows"):
        RingFile.open(path)
    ring.close()
    assert read_progress(path).state.phase == "data"


def test_an_error_leaves_the_phase_in_which_it_happened_and_a_name_that_is_none_changes_nothing(rank):
    rank.progress.begin_step(0)
    assert rank.progress.enter("mine") == "mine"
    assert read_progress(rank.path).state.phase == "step"
    with pytest.raises(OSError, match="full"), rank.progress.phase("checkpoint"):
        raise OSError("full")
    assert read_progress(rank.path).state.phase == "checkpoint"


@pytest.mark.parametrize("between", [0, 5, 20])
def test_the_newest_are_read_and_of_what_was_overwritten_nothing_is_known(rank, between):
    """Of 4,096 rows; each collective has some of other kinds beside it."""
    issued = 3 * module.KEPT
    rank.ring.group(RingGroup("used", 1, False))
    first = rank.issue(0)
    for number in range(1, issued):
        rank.issue(number)
        for _ in range(between):
            rank.rows.append(STEP)
    rank.rows.complete(first + 3, 9, by_wait=False)  # a row that belongs to another by now, where there are so many
    seen = read_progress(rank.path)
    known = min(module.KEPT, 4096 // (between + 1))
    assert [row.number for row in seen.collectives] == list(range(issued - known, issued))
    assert all(row.completed_ns is None for row in seen.collectives)
    assert seen.torn is None
    assert seen.overwritten == (("used",) if known < module.KEPT else ())


@pytest.mark.parametrize("before", [0, 5000])
def test_a_rank_killed_while_it_wrote_a_collective_or_its_step(rank, before):
    for number in range(before):
        rank.issue(number)
    rank.ring._rows["stamp"][rank.issue(before) % rank.ring.slots] = 0
    seen = read_progress(rank.path)
    assert before not in [row.number for row in seen.collectives]
    assert "1 of the newest rows" in seen.torn
    rank.progress.begin_step(4)
    rank.progress._words[module.SINCE_WORD] += 1  # the first of the two stores
    assert "step and phase" in read_progress(rank.path).torn


def test_a_ring_whose_rows_are_in_the_record_keeps_its_state_and_newest_collectives(rank):
    group = rank.ring.group(RingGroup("dp", 1, False, (0, 1)))
    for number in range(2 * module.KEPT):
        index = rank.issue(number, group=group, flags=ON_DEVICE)
        rank.rows.append(STEP)
        rank.rows.end(index, 2 * number)
    watch = ProgressWatch(rank.path)
    before = read_progress(rank.path)
    rank.ring.is_whole = True
    rank.progress.end(7)
    rank.ring.close()
    after = read_progress(rank.path)
    assert after == module.ProgressSeen(
        facts=before.facts,
        state=before.state._replace(exit_code=7),
        groups=before.groups,
        collectives=before.collectives,
        looked_ns=None,
        overwritten=(),
        torn=None,
    )
    assert len(after.collectives) == module.KEPT
    assert watch.state() == after.state  # also for who looked at the file before
    assert rank.path.stat().st_size < module.ROWS_AT + 4096 * module.ROW_BYTES
    assert not module.may_have_unread_rows(rank.path)
    rank.issue(0)  # what is mapped stays: a backend may complete something later


def test_a_ring_whose_rows_are_in_no_record_stays(rank):
    rank.issue(0)
    before = rank.path.read_bytes()
    rank.ring.close()
    assert rank.path.read_bytes() == before
    assert module.may_have_unread_rows(rank.path)
    assert RingFile.open(rank.path).owner == NOBODY


def test_groups_of_many_ranks_leave_space_for_names(rank):
    for number in range(12):
        rank.issue(number, group=rank.ring.group(RingGroup(str(number), 1, False, tuple(range(5000)))))
    block = rank.ring.text("block")
    assert rank.ring.names()[block] == "block"
    seen = read_progress(rank.path)
    assert [row.group.name for row in seen.collectives if row.group is not None] == [str(each) for each in range(12)]
    assert {len(row.group.ranks) for row in seen.collectives if row.group is not None} == {0, 5000}
    assert 0 < len(seen.groups) < 12


def test_a_forked_child_notes_nothing_and_does_not_close_the_ring(rank):
    rank.progress.begin_step(1)
    rank.ring.is_whole = True
    before = rank.path.read_bytes()
    child = os.fork()
    if child == 0:
        rank.progress.leave()
        rank.progress.begin_step(2)
        rank.ring.close()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert rank.path.read_bytes() == before


def test_a_file_that_is_none(tmp_path, rank):
    text = rank.path.read_bytes()
    other = tmp_path / "rank_1.bin"
    at = module.FACTS_AT
    for content, said in (
        (b"", "cut off"),
        (text[: module.PAGE], "cut off"),
        (text[:-1], "cut off"),
        (b"X" + text[1:], "not a progress file"),
        (text[:8] + (1).to_bytes(8, "little") + text[16:], "version 1"),
        (text[:16] + (3).to_bytes(8, "little") + text[24:], "3 slots"),
        (text[: module.PAGE] + b"[" + text[module.PAGE + 1 :], "facts"),
    ):
        other.write_bytes(content)
        for read in (read_progress, ProgressWatch):
            with pytest.raises(UnreadableProgress, match=said):
                read(other)
    other.write_bytes(text[:at] + b"[" + text[at + 1 :])
    torn = read_progress(other).torn
    assert "groups: " in torn


def test_a_file_that_is_cut_off_while_it_is_watched_keeps_its_last_state(rank):
    rank.progress.begin_step(3)
    watch = ProgressWatch(rank.path)
    before = watch.state()
    os.truncate(rank.path, 0)  # a mapping would end this process here
    assert watch.state() == before


def test_a_full_disk_is_an_error_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "posix_fallocate", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        RingFile.create(tmp_path / "rank_0.bin", facts())
    assert not list(tmp_path.iterdir())


def test_files_are_listed_by_rank(tmp_path):
    assert module.progress_files(tmp_path) == []
    for number in (10, 2):
        RingFile.create(tmp_path / "progress" / f"rank_{number}.bin", facts(number))
    (tmp_path / "progress" / "rank_x.bin").touch()
    assert [path.name for path in module.progress_files(tmp_path)] == ["rank_2.bin", "rank_10.bin"]
