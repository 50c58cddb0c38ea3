"""A worker waits for its driver as long as that lives, and no longer; a signal ends it when its files are written."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from aorta.distributed.peers import Peers, stop_on_signals
from aorta.errors import EXIT_OK, PeerFailed, RunIncomplete
from aorta.recording import rank_process
from aorta.rpc import rpc_run
from aorta.rpc.rpc_run import Coordination, RpcRun, StopAtOnce, Stopped, run_rpc
from tests.distributed.conftest import place
from tests.loop import resolved
from tests.runs import HANGS_S


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setattr(rpc_run, "_POLL_S", 0.005)
    return dist.HashStore()


def one(store, rank=1, size=3, timeout_s=0.1, *words):
    run = resolved("workload=rpc", f"training.timeout_s={timeout_s}", *words)
    return RpcRun(run, place(rank, size), torch.device("cpu"), Peers(store, rank, size, timeout_s))


def test_a_driver_that_lives_is_waited_for_beyond_the_timeout(store, monkeypatch):
    signs, now = 60, [0.0]  # 60 signs of 10 ms, with a timeout of 100 ms; on a clock set by hand

    def drive(_):
        now[0] += 0.01
        if store.add("rpc/beat", 1) > signs:
            store.set("rpc/ended/0", '"done"')

    monkeypatch.setattr(rpc_run, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=drive))
    assert one(store).together.listen("ended/0") == "done"
    assert now[0] == pytest.approx(0.61)


def test_only_the_drivers_word_of_failure_ends_the_wait_and_one_that_is_silent_is_named(store):
    Peers(store, 2, 3, 1.0).report_failure("a full disk", own=True)
    worker = one(store)
    with pytest.raises(PeerFailed, match=r"rank 0, the driver, has given no sign of life for 0\.1 s \(ended/0\)"):
        worker.together.listen("ended/0")
    Peers(store, 0, 3, 1.0).report_failure("out of memory", own=True)
    with pytest.raises(PeerFailed, match="rank 1 stops: rank 0 failed: out of memory"):
        worker.together.listen("ended/0")


def test_the_driver_gives_signs_of_life(store, monkeypatch):
    monkeypatch.setattr(rpc_run, "_BEAT_S", 0.005)
    with one(store, rank=0).together.beating():
        while store.add("rpc/beat", 0) < 3:
            pass
    for thread in threading.enumerate():
        if thread.name == "aorta-rpc-beat":  # it has been told; it is waited for as long as a beat lasts
            thread.join(HANGS_S)
            assert not thread.is_alive()


def test_a_driver_that_cannot_write_its_trace_lets_the_workers_go(store, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("no space left on device")

    for name, what in {"start": lambda *_: None, "stop": fail}.items():
        monkeypatch.setattr(rpc_run.WorkerWindow, name, what)
    monkeypatch.setattr(rpc_run.Driver, "call", lambda *_: None)
    driver = one(store, 0, 2, 5.0, "profiling.enabled=true", "workload.windows=2")
    store.set("rpc/started/0/1", "true")

    traced = SimpleNamespace(window=0, settle=lambda _: True, of_window=lambda _: [])
    with pytest.raises(OSError, match="no space left"):
        driver._drive(traced, SimpleNamespace(traces=lambda _: tmp_path))
    worker = one(store, 1, 2)
    assert [worker.together.listen(key) for key in ("ended/0", "window/1")] == [None] * 2


def test_who_confirms_nothing_is_named_after_the_limit_that_all_share(store):
    driver = Coordination(Peers(store, 0, 4, 1.0))
    for rank in (1, 3):
        Coordination(Peers(store, rank, 4, 1.0)).confirm("saved/0")
    began = time.monotonic()
    assert driver.silent("saved/0", [1, 2, 3], 0.2) == [2]
    assert time.monotonic() - began >= 0.2
    assert driver.silent("saved/0", [1, 3], 600.0) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_at_once_but_not_while_files_are_written(number):
    stop, did = StopAtOnce(), []

    def write() -> None:
        with stop.writing():
            os.kill(os.getpid(), number)
            did.append("written")

    with stop_on_signals(stop.request), pytest.raises(Stopped):
        write()
    assert (stop.stopped_by, did) == (number, ["written"])
    stop = StopAtOnce()
    with stop_on_signals(stop.request), pytest.raises(Stopped):
        os.kill(os.getpid(), number)
    assert stop.stopped_by == number
    with stop.writing():  # what is written afterwards is not interrupted again
        did.append("the rest")
    assert did == ["written", "the rest"]


def test_what_an_rpc_run_fails_of_is_explained_and_said_to_the_others(store, monkeypatch):
    told = Peers(store, 0, 1, 1.0)

    def fail(_):
        raise ValueError("a bug")

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(rank_process, "process_group", lambda *_: nullcontext(told))
    monkeypatch.setattr(rank_process, "start_logging", lambda *_: None)
    monkeypatch.setattr(RpcRun, "run", fail)
    with pytest.raises(RunIncomplete, match="rank 0: ValueError: a bug"):
        run_rpc(resolved("workload=rpc", "training.device=cpu"))
    assert told.reported_failure(0) == "ValueError: a bug"
    monkeypatch.setattr(RpcRun, "run", lambda _: None)
    assert run_rpc(resolved("workload=rpc", "training.device=cpu")) == EXIT_OK
