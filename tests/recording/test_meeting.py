"""Ranks that know nothing of each other's training agree on a step behind which all of them begin."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from aorta.errors import PeerFailed
from aorta.recording import meeting
from aorta.recording.meeting import Meeting, announce
from tests.runs import HANGS_S

COMPILES = "the program ended while the interceptor was compiled, which goes on: record again in a minute"


class Opened:
    """What opens a run: it waits as `aorta.record` does, and is closed where nobody wants it any more."""

    def __init__(self, own: list[Meeting], behind: int) -> None:
        self.behind, self.error = behind, None
        own[0].until_held()

    def close(self, error: Exception) -> None:
        self.error = error


def joins(store: dist.Store, rank: int, ranks: int) -> Meeting:
    own: list[Meeting] = []
    ready = threading.Event()

    def open_run(behind: int) -> Opened:
        ready.wait(HANGS_S)
        return Opened(own, behind)

    own.append(Meeting(store, rank, ranks, lambda: None, open_run))
    ready.set()
    return own[0]


@pytest.mark.parametrize("ahead", [0, 1, 50])
def test_ranks_begin_behind_one_step_however_far_one_is_ahead(ahead: int) -> None:
    store, begun = dist.HashStore(), {}

    def trains(rank: int) -> None:
        own = joins(store, rank, 2)
        for step in range(1, 100_000):
            slow = rank == 0 or step <= ahead
            if own.stepped():
                begun[rank] = (step, own.result.behind, own.left_out)
                return
            threading.Event().wait(0.003 if slow else 0.001)

    threads = [threading.Thread(target=trains, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANGS_S)
    assert begun[0] == begun[1]
    step, behind, left_out = begun[0]
    assert (step, left_out) == (behind, [])


def test_ranks_that_step_together_begin_behind_their_first_step() -> None:
    store, begun = dist.HashStore(), {}

    def trains(rank: int) -> None:
        own = joins(store, rank, 2)
        begun[rank] = own.stepped(HANGS_S) and own.result.behind

    threads = [threading.Thread(target=trains, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANGS_S)
    assert begun == {0: 1, 1: 1}


def test_a_rank_that_cannot_is_named_and_one_that_comes_late_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    announce(store, 1, "ValueError: no model")
    with pytest.raises(PeerFailed, match="rank 1: ValueError: no model"):
        joins(store, 0, 2).stepped(HANGS_S)

    monkeypatch.setattr(meeting, "OTHERS_S", 0.0)
    store = dist.HashStore()
    alone = joins(store, 0, 2)
    assert alone.stepped(HANGS_S)
    assert (alone.result.behind, alone.left_out) == (1, [1])
    with pytest.raises(PeerFailed, match="rank 1 took its first optimizer step when the others had begun"):
        joins(store, 1, 2).stepped(HANGS_S)


def test_a_program_that_ends_is_not_waited_for_and_hears_who_was_missing() -> None:
    own = joins(dist.HashStore(), 0, 3)
    assert not own.stepped()
    assert own.give_up() == "no optimizer step was taken by ranks 1, 2"


def test_a_program_that_ends_while_its_rank_prepares_says_so() -> None:
    prepared, asked = threading.Event(), threading.Event()

    def prepare() -> None:
        asked.set()
        prepared.wait(HANGS_S)

    own = Meeting(dist.HashStore(), 0, 1, prepare, lambda _behind: None)
    assert asked.wait(HANGS_S)
    assert not own.stepped()
    assert own.give_up() == COMPILES
    prepared.set()
