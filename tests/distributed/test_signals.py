"""Real signals, sent to this process: one stops after the step, repetitions are ignored, impatience is heard."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch.distributed as dist

from aorta.distributed import stop_agreement
from aorta.distributed.stop_agreement import StopAgreement, stop_on_signals
from tests.distributed.conftest import DeadStore
from tests.runs import HANGS_S

TERM, INT = signal.SIGTERM, signal.SIGINT


@pytest.fixture
def alone():
    return StopAgreement(DeadStore(), 0, 1)


@pytest.mark.parametrize("number", [TERM, INT])
def test_a_signal_stops_after_the_step_and_a_repetition_is_ignored(alone, number, monkeypatch):
    monkeypatch.setattr(stop_agreement, "_IMPATIENCE_S", HANGS_S)  # however long this process is held up
    before = [signal.getsignal(each) for each in (TERM, INT)]
    with stop_on_signals(alone):
        assert alone.stopped_by is None
        os.kill(os.getpid(), number)
        assert not alone.may_start(1)
        for other in (TERM, INT, number):
            os.kill(os.getpid(), other)
        assert alone.stopped_by is number
    assert [signal.getsignal(each) for each in (TERM, INT)] == before


def test_handlers_are_restored_after_an_error_too(alone):
    before = [signal.getsignal(each) for each in (TERM, INT)]
    with pytest.raises(ZeroDivisionError), stop_on_signals(alone):
        raise ZeroDivisionError
    assert [signal.getsignal(each) for each in (TERM, INT)] == before


def test_a_person_losing_patience_interrupts_at_once(alone, monkeypatch):
    monkeypatch.setattr(stop_agreement, "_IMPATIENCE_S", 0.02)
    with stop_on_signals(alone):
        os.kill(os.getpid(), INT)
        time.sleep(0.03)
        os.kill(os.getpid(), TERM)  # a launcher has no patience to lose
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), INT)


def test_the_first_signal_here_is_no_impatience_though_another_rank_was_asked_long_before(monkeypatch):
    monkeypatch.setattr(stop_agreement, "_IMPATIENCE_S", -1.0)
    agreement = StopAgreement(DeadStore(), 0, 1)
    agreement.request(TERM)
    with stop_on_signals(agreement):
        os.kill(os.getpid(), INT)
        assert agreement.stopped_by is TERM


def test_a_signal_wakes_a_rank_that_waits_for_the_others():
    # The main thread blocks in may_start until rank 1 posts; a signal there must still be heard.
    store = dist.HashStore()
    agreement = StopAgreement(store, 0, 2)
    store.set("stop/asked", str(int(INT)))
    while not store.check(["stop/at/0"]):
        time.sleep(0.001)

    def others():
        time.sleep(0.03)
        os.kill(os.getpid(), TERM)
        until = time.monotonic() + 10  # less than the agreement waits
        while agreement.stopped_by is None and time.monotonic() < until:
            time.sleep(0.001)
        store.set("stop/at/1", "4")

    with stop_on_signals(agreement):
        threading.Thread(target=others).start()
        assert agreement.may_start(4)
        assert not agreement.may_start(5)
        assert agreement.stopped_by is TERM
    agreement.close()
