"""Progress files: what is written is read back; what is torn, foreign or of another version is said to be."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from aorta.records import progress_file
from aorta.records.process import pid_namespace, start_ticks
from aorta.records.progress_file import (
    NOWHERE,
    SLOTS,
    WHEN_UNKNOWN,
    ProgressFacts,
    ProgressFile,
    ProgressWatch,
    UnreadableProgress,
    progress_files,
    read_progress,
)


def facts(rank: int = 0) -> ProgressFacts:
    return ProgressFacts(
        rank=rank,
        world_size=2,
        local_rank=rank,
        pid=os.getpid(),
        start_ticks=start_ticks(os.getpid()),
        pid_namespace=pid_namespace(),
        host="here",
        boot_id="boot",
        run_id="run",
        attempt=0,
        opened_ns=1,
        warmup_steps=5,
        kinds=("allreduce", "send"),
        dtypes=("float32", "int64"),
    )


@pytest.fixture
def progress(tmp_path: Path) -> ProgressFile:
    return ProgressFile.create(tmp_path / "progress" / "rank_0.bin", facts())


def test_what_is_noted_is_read_back(progress: ProgressFile) -> None:
    assert read_progress(progress.path).state.step is None
    progress.begin_step(7)
    group = progress.group("dp", (1, 0))
    assert progress.group("dp", (1, 0)) == group
    first = progress.issue(group, 0, 0, "float32", 4096, NOWHERE, 100)
    second = progress.issue(group, 3, 1, None, 8, 1, 200)
    progress.completed(first, 150)
    with progress.phase("checkpoint"):
        seen = read_progress(progress.path)
    assert seen.facts == facts()
    assert (seen.state.step, seen.state.phase, seen.state.steps_done, seen.state.exit_code) == (
        7,
        "checkpoint",
        0,
        None,
    )
    one, two = seen.collectives
    assert (one.kind, one.dtype, one.bytes, one.peer, one.completed_ns) == ("allreduce", "float32", 4096, None, 150)
    assert (two.index, two.number, two.kind, two.dtype, two.peer, two.completed_ns) == (
        second,
        3,
        "send",
        None,
        1,
        None,
    )
    assert one.group is not None
    assert one.group.ranks == (1, 0)
    assert seen.torn is None
    progress.end_step()
    progress.end(3)
    state = ProgressWatch(progress.path).state()
    assert (state.phase, state.steps_done, state.exit_code) == ("none", 1, 3)


def test_an_error_leaves_the_phase_in_which_it_happened(progress: ProgressFile) -> None:
    progress.begin_step(0)
    with pytest.raises(OSError, match="full"), progress.phase("checkpoint"):
        raise OSError("full")
    assert read_progress(progress.path).state.phase == "checkpoint"


def test_a_name_that_is_no_phase_changes_nothing(progress: ProgressFile) -> None:
    progress.begin_step(0)
    assert progress.enter("mine") == "mine"
    assert read_progress(progress.path).state.phase == "step"


def test_the_ring_keeps_the_newest(progress: ProgressFile) -> None:
    for number in range(SLOTS + 10):
        progress.issue(NOWHERE, number, 0, "int64", 8, NOWHERE, number + 1)
    progress.completed(3, WHEN_UNKNOWN)  # its slot belongs to another by now
    seen = read_progress(progress.path)
    assert [row.number for row in seen.collectives] == list(range(10, SLOTS + 10))
    assert all(row.completed_ns is None for row in seen.collectives)
    assert (seen.issued, seen.torn) == (SLOTS + 10, None)


@pytest.mark.parametrize("before", [0, SLOTS + 5])
def test_a_rank_killed_while_it_wrote_a_collective(progress: ProgressFile, before: int) -> None:
    for number in range(before):
        progress.issue(NOWHERE, number, 0, None, 8, NOWHERE, number + 1)
    index = progress.issue(NOWHERE, before, 0, None, 8, NOWHERE, 1)
    progress._words[progress_file._RING_AT // 8 + index % SLOTS * progress_file.SLOT_WORDS] = 0
    seen = read_progress(progress.path)
    assert before not in [row.number for row in seen.collectives]
    assert seen.torn is not None
    assert "1 of the newest collectives" in seen.torn


def test_a_rank_killed_while_it_wrote_its_step(progress: ProgressFile) -> None:
    progress.begin_step(4)
    progress._state[progress_file._SINCE] += 1  # the first of the two stores
    torn = read_progress(progress.path).torn
    assert torn is not None
    assert "step and phase" in torn


def test_a_file_that_is_none(tmp_path: Path, progress: ProgressFile) -> None:
    text = progress.path.read_bytes()
    other = tmp_path / "rank_1.bin"
    for content, said in (
        (b"", "cut off"),
        (text[:-1], "cut off"),
        (b"X" + text[1:], "not a progress file"),
        (text[:8] + (1).to_bytes(8, "little") + text[16:], "version 1"),
        (text[: progress_file._FACTS_AT] + b"[" + text[progress_file._FACTS_AT + 1 :], "facts"),
    ):
        other.write_bytes(content)
        for read in (read_progress, ProgressWatch):
            with pytest.raises(UnreadableProgress, match=said):
                read(other)


def test_a_file_that_is_cut_off_while_it_is_watched_keeps_its_last_state(progress: ProgressFile) -> None:
    progress.begin_step(3)
    watch = ProgressWatch(progress.path)
    before = watch.state()
    os.truncate(progress.path, 0)  # a mapping would end this process here
    assert watch.state() == before


def test_a_full_disk_is_an_error_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_file: int, _at: int, _size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        ProgressFile.create(tmp_path / "rank_0.bin", facts())
    assert not list(tmp_path.iterdir())


def test_files_are_listed_by_rank(tmp_path: Path) -> None:
    assert progress_files(tmp_path) == []
    for rank in (10, 2):
        ProgressFile.create(tmp_path / "progress" / f"rank_{rank}.bin", facts(rank))
    (tmp_path / "progress" / "rank_x.bin").touch()
    assert [path.name for path in progress_files(tmp_path)] == ["rank_2.bin", "rank_10.bin"]
