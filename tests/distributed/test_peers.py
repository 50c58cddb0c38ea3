"""What ranks tell each other through the store, also when one of them is dead, or the store is."""

from __future__ import annotations

import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from aorta.distributed.peers import Peers, gather_when_idle
from aorta.errors import PeerFailed, RecordWriteError, RunIncomplete
from tests.distributed.conftest import DeadStore
from tests.runs import HANGS_S

GLOO = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer\nmore")


def test_one_that_cannot_stops_all_and_is_named(world):
    outcomes = world(4, lambda peers: peers.agree("start", "no disk" if peers.rank in (1, 3) else None))
    assert [str(outcome) for outcome in outcomes] == ["rank 1: no disk; rank 3: no disk"] * 4
    assert all(isinstance(outcome, PeerFailed) for outcome in outcomes)


def test_a_world_of_one_needs_nobody_and_blames_nobody_else(world):
    def work(peers):
        peers.agree("start", None)
        return peers.from_first_rank("x", 1), peers.gather("y", 2), peers.diagnose(), peers.explain(GLOO)

    ((*told, error),) = world(1, work)
    assert told == [1, [2], "no rank reported an error of its own"]
    assert type(error) is RunIncomplete
    assert str(error).startswith("rank 0: RuntimeError: [gloo/")


def test_waiting_has_an_end_and_names_the_missing(world):
    world.timeout_s = 1.0
    outcomes = world(4, lambda peers: peers.gather("facts", 1) if peers.rank in (0, 2) else None)
    for rank in (0, 2):
        assert isinstance(outcomes[rank], PeerFailed)
        assert str(outcomes[rank]).startswith(f"rank {rank} waited 1 s for 'facts' from rank 1, rank 3 (")
        assert "longer timeout_s" in str(outcomes[rank])
    outcomes = world(2, lambda peers: peers.from_first_rank("x", 1) if peers.rank else None)
    assert "waited 1 s for 'x' from rank 0" in str(outcomes[1])


def diagnoses(world, words, grace_s):
    """What rank 0 finds out when the others leave `words`: (text, own), or None for silence; a number delays."""

    def work(peers):
        if peers.rank == 0:
            peers.store.wait([f"said/{rank}" for rank in range(1, len(words) + 1)])
            return peers.diagnose(grace_s)
        for word in words[peers.rank - 1]:
            if isinstance(word, float):
                peers.store.set(f"said/{peers.rank}", "")
                time.sleep(word)
            else:
                peers.report_failure(word[0], own=word[1])
        peers.store.set(f"said/{peers.rank}", "")
        return None

    return world(len(words) + 1, work)[0]


MET = ("connection closed", False)


@pytest.mark.parametrize(
    ("words", "grace_s", "expected"),
    [
        ([[("out of memory", True)]], HANGS_S, "rank 1 failed: out of memory"),
        ([[MET], [("NaN", True)]], HANGS_S, "rank 2 failed: NaN"),
        ([[("b", True)], [("a", True)]], HANGS_S, "rank 1 failed: b; rank 2 failed: a"),
        ([[0.1, ("slow to say", True)]], HANGS_S, "rank 1 failed: slow to say"),
        ([[]], 0.1, "rank 1 exited without reporting an error, or hangs"),
        ([[MET], [], [("NaN", True)]], 0.1, "rank 3 failed: NaN; rank 2 exited without reporting an error, or hangs"),
        ([[MET], [MET]], HANGS_S, "no rank reported an error of its own"),
    ],
    ids=["own error", "only the culprit", "two culprits", "late word", "silence", "mixed", "nobody's fault"],
)
def test_a_diagnosis_names_the_culprit(world, words, grace_s, expected):
    """And waits no longer than it needs to: the grace of most is that of a test that hangs."""
    assert diagnoses(world, words, grace_s) == expected


def test_a_dead_store_is_said_and_waited_for_by_nobody():
    peers = Peers(DeadStore(), 1, 2, timeout_s=20.0)
    assert peers.diagnose() == (
        "the rendezvous store stopped answering (Connection reset by peer): the process that held it is gone"
    )
    with pytest.raises(PeerFailed, match=r"rank 1 waited [01]\S* s for 'x' from rank 0 \(Connection reset by peer\)"):
        peers.from_first_rank("x", 1)
    with pytest.raises(PeerFailed, match="rank 1: the rendezvous store stopped answering"):
        peers.gather("x", 1)
    assert str(peers.explain(ValueError("x"))).startswith("rank 1: ValueError: x")
    assert "the rendezvous store stopped answering" in str(peers.explain(GLOO))


def test_an_error_of_its_own_is_explained_and_the_others_are_told(world):
    def work(peers):
        return peers.explain(ValueError("loss is NaN\nmore") if peers.rank == 1 else GLOO)

    outcomes = world(3, work)
    assert type(outcomes[1]) is RunIncomplete
    assert str(outcomes[1]) == "rank 1: ValueError: loss is NaN; the traceback is in its log file"
    for rank in (0, 2):
        assert type(outcomes[rank]) is PeerFailed
        assert str(outcomes[rank]).startswith(
            f"rank {rank}: a collective failed because of a peer: rank 1 failed: ValueError: loss is NaN (RuntimeError"
        )


def test_an_error_that_is_worded_already_stays_as_it_is(world):
    error = RecordWriteError("rank 1 cannot write its record: disk full")

    def work(peers):
        first = peers.explain(error if peers.rank else GLOO)
        return first, peers.explain(first)

    outcomes = world(2, work)
    assert outcomes[1] == (error, error)
    assert "rank 1 failed: rank 1 cannot write its record: disk full" in str(outcomes[0][0])
    assert outcomes[0][0] is outcomes[0][1]


def test_a_rank_goes_on_until_another_fails() -> None:
    store = dist.HashStore()
    ranks = [Peers(store, rank, 3, 1.0) for rank in range(3)]
    for one in ranks:
        one.raise_if_peer_failed()
    ranks[2].report_failure("a peer's", own=False)
    ranks[0].raise_if_peer_failed()
    ranks[1].report_failure("rank 1: disk full", own=True)
    with pytest.raises(PeerFailed, match="rank 0 stops: rank 1 failed: disk full"):
        ranks[0].raise_if_peer_failed()


# --- ranks that are busy at the end -----------------------------------------------------------------------------------


def test_a_busy_rank_is_waited_for_beyond_the_timeout(monkeypatch):
    """60 beats of 10 ms, with a timeout of 100 ms, on a clock that is set by hand; first of the rank that is busy."""
    store, left, now = dist.HashStore(), [60, 60], [0.0]
    zero, one = (Peers(store, rank, 2, timeout_s=0.1) for rank in (0, 1))

    def go_on(seconds):
        now[0] += seconds
        if left[0] == 0:  # rank 1 beside rank 0, which waits
            left[1] -= 1
            store.add("busy/other/1", 1)
            if left[1] == 0:
                store.set("done/other/1", "1")

    def busy():
        left[0] -= 1
        return left[0] > 0

    monkeypatch.setattr("aorta.distributed.peers.time", SimpleNamespace(monotonic=lambda: now[0], sleep=go_on))
    store.set("done/key/0", "0")
    assert gather_when_idle(one, "key", busy, lambda: 1, beat_s=0.01) == [0, 1]
    assert store.add("busy/key/1", 0) == 59
    assert gather_when_idle(zero, "other", lambda: False, lambda: 0, beat_s=0.01) == [0, 1]
    assert now[0] == pytest.approx(0.59 + 0.6)


def test_a_silent_rank_is_named_and_alone_there_is_nobody_to_wait_for():
    left = [3]

    def busy():
        left[0] -= 1
        return left[0] > 0

    of_two, alone = (Peers(dist.HashStore(), 0, size, timeout_s=0.05) for size in (2, 1))
    with pytest.raises(PeerFailed, match=r"rank 1 has said nothing for 0\.05 s \(key\)"):
        gather_when_idle(of_two, "key", lambda: False, lambda: None, beat_s=0.01)
    assert gather_when_idle(alone, "key", busy, lambda: left[0], beat_s=0.001) == [0]


def test_waiting_costs_one_question_a_beat_however_many_ranks_there_are(monkeypatch):
    ranks, beats = 16, 50
    asked, now = [], [0.0]

    def sleep(seconds):
        now[0] += seconds

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    monkeypatch.setattr("aorta.distributed.peers.time", clock)

    class Counting(dist.HashStore):
        """With the questions counted; the others are done after so many."""

        def check(self, names):
            asked.append(len(names))
            if len(asked) == ranks + beats:
                for rank in range(1, ranks):
                    self.set(f"done/key/{rank}", "null")
            return super().check(names)

    gather_when_idle(Peers(Counting(), 0, ranks, 1000.0), "key", lambda: False, lambda: None, beat_s=0.0001)
    assert asked.count(1) == ranks - 1  # one look at each of the others; the next is seconds away
    assert asked.count(ranks) == beats + 1


def test_some_ranks_of_the_world_alone(world):
    store = dist.HashStore()

    def work(peers):
        if peers.rank in (0, 2):
            return None
        some = Peers(store, peers.rank, 4, 20.0, ranks=[1, 3])
        return some.is_first, some.from_first_rank("x", peers.rank), some.gather("y", peers.rank)

    assert world(4, work) == [None, (True, 1, [1, 3]), None, (False, 1, [1, 3])]


def test_a_wait_can_be_ended():
    with pytest.raises(PeerFailed, match="enough"):
        Peers(dist.HashStore(), 0, 2, 20.0, go_on=Mock(side_effect=PeerFailed("enough"))).gather("y", 0)
