"""Nobody times out because a peer is busy; a silent one is given up."""

from __future__ import annotations

import threading
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from aorta.distributed.peers import Peers, gather_when_idle
from aorta.errors import PeerFailed


class Rounds:
    """A clock for two ranks: it moves on when both of them sleep, by as long as they sleep."""

    def __init__(self):
        self.now = 0.0
        self._both = threading.Barrier(2, action=self._go_on)

    def _go_on(self):
        self.now += 0.01

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        assert seconds == 0.01
        with suppress(threading.BrokenBarrierError):
            self._both.wait(60)

    def over(self):
        """The other one sleeps alone from now on, and not for long."""
        self._both.abort()


def test_a_busy_rank_is_waited_for_beyond_the_timeout(monkeypatch):
    store, beats, answers, clock = dist.HashStore(), [0], {}, Rounds()
    monkeypatch.setattr("aorta.distributed.peers.time", clock)

    def busy():
        beats[0] += 1
        return beats[0] < 60  # 60 beats of 10 ms, with a timeout of 100 ms

    def run(rank, is_busy):
        peers = Peers(store, rank, 2, timeout_s=0.1)
        try:
            answers[rank] = gather_when_idle(peers, "key", is_busy, lambda: {"rank": rank}, beat_s=0.01)
        finally:
            clock.over()

    threads = [threading.Thread(target=run, args=(0, lambda: False)), threading.Thread(target=run, args=(1, busy))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert answers == {0: [{"rank": 0}, {"rank": 1}], 1: [{"rank": 0}, {"rank": 1}]}
    assert beats[0] == 60
    assert clock.now == pytest.approx(0.59)  # between the beats


def test_a_silent_rank_is_named():
    peers = Peers(dist.HashStore(), 0, 2, timeout_s=0.05)
    with pytest.raises(PeerFailed, match=r"rank 1 has said nothing for 0\.05 s \(key\)"):
        gather_when_idle(peers, "key", lambda: False, lambda: None, beat_s=0.01)


def test_alone_there_is_nobody_to_wait_for():
    left = [3]

    def busy():
        left[0] -= 1
        return left[0] > 0

    peers = Peers(dist.HashStore(), 0, 1, timeout_s=0.05)
    assert gather_when_idle(peers, "key", busy, lambda: left[0], beat_s=0.001) == [0]


def test_waiting_costs_one_question_a_beat_however_many_ranks_there_are(monkeypatch):
    ranks, beats = 16, 50
    store, asked, now = dist.HashStore(), [], [0.0]

    def sleep(seconds):
        now[0] += seconds

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    monkeypatch.setattr("aorta.distributed.peers.time", clock)

    class Counting:
        """As the store, with the questions counted; the others are done after so many."""

        def check(self, names):
            asked.append(len(names))
            if len(asked) == ranks + beats:
                for rank in range(1, ranks):
                    store.set(f"done/key/{rank}", "null")
            return store.check(names)

        def __getattr__(self, name):
            return getattr(store, name)

    gather_when_idle(Peers(Counting(), 0, ranks, 1000.0), "key", lambda: False, lambda: None, beat_s=0.0001)
    assert asked.count(1) == ranks - 1  # one look at each of the others; the next is seconds away
    assert asked.count(ranks) == beats + 1
