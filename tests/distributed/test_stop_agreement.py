"""All ranks end after the same step, whoever was asked to stop and when; nothing hangs.

Ranks are threads with an agreement each on one store; a step's collectives are a barrier, which breaks (and fails the
test) where one rank starts a step that another does not.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence

import pytest
import torch.distributed as dist

from aorta.distributed import peers
from aorta.distributed.peers import StopAgreement, stop_on_signals
from tests.distributed.conftest import DeadStore
from tests.runs import HANGS_S

TERM, INT = signal.SIGTERM, signal.SIGINT
STEPS = 20_000
"""More than a rank takes while another one that was asked is held up; they end when they have agreed."""


@pytest.fixture(autouse=True)
def brisk(monkeypatch):
    """Polls as often as a test needs."""
    monkeypatch.setattr(peers, "_STOP_POLL_S", 0.005)


class Rank:
    """What one rank's loop did."""

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self.rank, self.agreement = rank, StopAgreement(store, rank, world_size)
        self.steps: list[int] = []


def train(
    world_size: int,
    ask: Callable[[Rank, int], None],
    *,
    steps: int | Sequence[int] = STEPS,
    coupled: bool = True,
) -> list[Rank]:
    """Run the loops of all ranks; `ask(rank, step)` is called inside each step and may request a stop."""
    store = dist.HashStore()
    ranks = [Rank(store, rank, world_size) for rank in range(world_size)]
    collective = threading.Barrier(world_size)
    lengths = [steps] * world_size if isinstance(steps, int) else steps
    broken: list[int] = []

    def loop(rank: Rank) -> None:
        try:
            for step in range(lengths[rank.rank]):
                if not rank.agreement.may_start(step):
                    break
                ask(rank, step)
                time.sleep(0.001)
                if coupled:
                    collective.wait(timeout=HANGS_S)
                rank.steps.append(step)
        except threading.BrokenBarrierError:
            broken.append(rank.rank)
        finally:
            rank.agreement.close()

    threads = [threading.Thread(target=loop, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=HANGS_S)
        assert not thread.is_alive(), [(rank.rank, rank.steps[-1:]) for rank in ranks]
    assert not broken, f"ranks {broken} waited in a step that the others did not start"
    return ranks


def at(asked: dict[int, int], by: signal.Signals = TERM) -> Callable[[Rank, int], None]:
    """Ask rank -> step."""

    def ask(rank: Rank, step: int) -> None:
        if asked.get(rank.rank) == step:
            rank.agreement.request(by)

    return ask


def last_steps(ranks: list[Rank]) -> set[int]:
    for rank in ranks:
        assert rank.steps == list(range(len(rank.steps))), "no step is skipped"
    return {len(rank.steps) - 1 for rank in ranks}


@pytest.mark.parametrize(("world_size", "coupled"), [(3, True), (2, False)], ids=["collectives", "no collectives"])
@pytest.mark.parametrize(
    "asked", [{0: 7}, {1: 7}, {0: 7, 1: 7}, {0: 7, 1: 9}, {0: 0}], ids=["rank 0", "rank 1", "both", "apart", "at once"]
)
def test_all_stop_after_the_same_step(world_size, coupled, asked):
    ranks = train(world_size, at(asked), coupled=coupled)
    (last,) = last_steps(ranks)
    assert min(asked.values()) <= last < STEPS - 1
    assert {rank.agreement.stopped_by for rank in ranks} == {TERM}


def test_asked_before_the_first_step():
    store = dist.HashStore()
    ranks = [Rank(store, rank, 2) for rank in range(2)]
    ranks[0].agreement.request(TERM)
    for rank in ranks:
        assert rank.agreement._decided.wait(HANGS_S)
        assert not rank.agreement.may_start(0)
        rank.agreement.close()


@pytest.mark.parametrize("asked", [{}, {0: 29}], ids=["nobody", "in the last step"])
def test_asked_in_no_step_or_the_last_no_rank_waits_for_another(asked):
    ranks = train(3, at(asked), steps=30)
    assert last_steps(ranks) == {29}
    assert ranks[0].agreement.stopped_by is (TERM if asked else None)


def test_a_rank_whose_loop_is_over_is_not_waited_for():
    # Without collectives ranks drift apart: rank 0 is done long before rank 1 is asked.
    ranks = train(2, at({1: 60}), steps=[3, STEPS], coupled=False)
    assert len(ranks[0].steps) == 3
    assert 60 <= len(ranks[1].steps) - 1 < STEPS - 1


# --- what breaks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked_before", [False, True])
def test_a_rank_whose_store_dies_goes_on_to_meet_the_failure_unless_it_was_asked(asked_before):
    store = dist.HashStore()
    agreement = StopAgreement(store, 0, 2)
    if asked_before:
        agreement.request(TERM)
        store.wait(["stop/at/0"])
        agreement._store = DeadStore()
    else:
        assert agreement.may_start(0)
        agreement._store = DeadStore()
        assert agreement._decided.wait(HANGS_S)
        assert agreement.may_start(1)
        assert agreement.stopped_by is None
        agreement.request(TERM)  # what a launcher that was killed leaves asks each of its ranks
    assert not agreement.may_start(2)
    agreement.close()


@pytest.mark.parametrize("asked", [True, False])
def test_a_dead_rank_is_waited_for_only_so_long(monkeypatch, asked):
    monkeypatch.setattr(peers, "_STOP_GRACE_S", 0.05)
    store = dist.HashStore()
    agreement = StopAgreement(store, 0, 2)  # rank 1 was killed
    assert agreement.may_start(0)
    if asked:
        agreement.request(TERM)
    else:
        store.set("stop/asked", str(int(TERM)))
    assert agreement._decided.wait(HANGS_S)
    # Asked, it stops; not asked, it goes on, and its next collective says who is missing.
    assert agreement.may_start(1) is not asked
    agreement.close()


def test_closing_ends_the_watcher_also_while_it_waits_for_others():
    store = dist.HashStore()
    agreement = StopAgreement(store, 0, 2)
    agreement.request(TERM)
    store.wait(["stop/at/0"])
    agreement.close()
    agreement._thread.join(HANGS_S)  # it was told; how soon it hears of it is a matter of speed
    assert not agreement._thread.is_alive()


# --- signals of this process


@pytest.fixture
def alone():
    return StopAgreement(DeadStore(), 0, 1)


def handlers():
    return [signal.getsignal(each) for each in (TERM, INT)]


@pytest.mark.parametrize("number", [TERM, INT])
def test_a_signal_stops_after_the_step_and_a_repetition_is_ignored(alone, number, monkeypatch):
    monkeypatch.setattr(peers, "_IMPATIENCE_S", HANGS_S)  # however long this process is held up
    before = handlers()
    with stop_on_signals(alone.request):
        assert alone.stopped_by is None
        os.kill(os.getpid(), number)
        assert not alone.may_start(1)
        for other in (TERM, INT, number):
            os.kill(os.getpid(), other)
        assert alone.stopped_by is number
    assert handlers() == before
    with pytest.raises(ZeroDivisionError), stop_on_signals(alone.request):
        raise ZeroDivisionError
    assert handlers() == before


def test_a_person_losing_patience_interrupts_at_once_but_not_by_the_first_signal_here(alone, monkeypatch):
    monkeypatch.setattr(peers, "_IMPATIENCE_S", -1.0)
    alone.request(TERM)  # another rank was asked long before
    with stop_on_signals(alone.request):
        os.kill(os.getpid(), INT)
        os.kill(os.getpid(), TERM)  # a launcher has no patience to lose
        assert alone.stopped_by is TERM
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), INT)


def test_a_signal_wakes_a_rank_that_waits_for_the_others(monkeypatch):
    monkeypatch.setattr(peers, "_STOP_GRACE_S", HANGS_S)
    # The main thread blocks in may_start until rank 1 posts; a signal there must still be heard.
    store = dist.HashStore()
    agreement = StopAgreement(store, 0, 2)
    store.set("stop/asked", str(int(INT)))
    store.wait(["stop/at/0"])

    def others():
        time.sleep(0.03)
        os.kill(os.getpid(), TERM)
        until = time.monotonic() + HANGS_S / 2  # less than the agreement waits
        while agreement.stopped_by is None and time.monotonic() < until:
            time.sleep(0.001)
        store.set("stop/at/1", "4")

    with stop_on_signals(agreement.request):
        threading.Thread(target=others).start()
        assert agreement.may_start(4)
        assert not agreement.may_start(5)
        assert agreement.stopped_by is TERM
    agreement.close()
