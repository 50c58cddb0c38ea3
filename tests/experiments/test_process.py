"""A launch as a process: signals reach it, a timeout ends it, nothing that it started is left."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from aorta.experiments import process
from aorta.experiments.process import (
    LAUNCHER_VARIABLES,
    MARK,
    LaunchEnd,
    StopRequest,
    end_marked,
    launch,
    launch_environment,
)
from tests.runs import until

# Ends with 40 + the signal's number; says when it listens.
POLITE = """
import signal, sys, time
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: sys.exit(40 + number))
open(sys.argv[1], "w").close()
time.sleep(600)
"""
# Ignores SIGTERM, and so does its child, which stands in a session of its own as a rank of torchrun does.
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
child += "; open(sys.argv[1], 'w').close(); time.sleep(600)"
env = {} if sys.argv[2] == "unmarked" else None
made = subprocess.Popen([sys.executable, "-c", child, sys.argv[1] + ".child"], start_new_session=True, env=env)
while not os.path.exists(sys.argv[1] + ".child"):
    time.sleep(0.01)
open(sys.argv[1] + ".part", "w").write(str(made.pid))
os.rename(sys.argv[1] + ".part", sys.argv[1])
time.sleep(600)
"""
CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SLEEPING = "import time; time.sleep(600)"


def has_ended(pid: int) -> bool:
    """Whether a process has ended by now, be it that nobody has collected it."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def gone(pid: int) -> bool:
    """Whether a process ends within two minutes; those of these tests live for ten unless they are ended."""
    for _ in range(12_000):
        if has_ended(pid):
            return True
        time.sleep(0.01)
    return False


def started(code: str, *words: str, stop: StopRequest | None = None, **more: Any) -> LaunchEnd:
    """Run a line of Python as a launch."""
    command = [sys.executable, "-c", code, *words]
    return launch(command, id_=secrets.token_hex(8), environment=os.environ, stop=stop or StopRequest(), **more)


def send_when(ready: Path, number: int) -> None:
    """Send us a signal as soon as a launch says that it is ready."""

    def send() -> None:
        until(ready.exists)
        os.kill(os.getpid(), number)

    threading.Thread(target=send).start()


@pytest.fixture(autouse=True)
def heeding():
    """Signals that whoever started the tests ignores (nohup, a shell's &) would be ignored here too."""
    before = [signal.signal(number, signal.SIG_DFL) for number in CAUGHT]
    yield
    for number, handler in zip(CAUGHT, before, strict=True):
        signal.signal(number, handler)


# A rank does not know of terminals.
@pytest.mark.parametrize(("number", "seen"), [*((one, one) for one in CAUGHT[:2]), (signal.SIGHUP, signal.SIGTERM)])
def test_a_signal_goes_on_to_the_launch_and_is_remembered(tmp_path, number, seen):
    ready = tmp_path / "ready"
    before = [signal.getsignal(each) for each in CAUGHT]
    stop = StopRequest()
    send_when(ready, number)
    with stop.on_signals():
        ended = started(POLITE, str(ready), stop=stop)
    assert (ended.exit_code, ended.timed_out, stop.signal) == (40 + seen, False, number)
    assert [signal.getsignal(each) for each in CAUGHT] == before


def test_a_signal_that_the_caller_ignores_stays_ignored():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop = StopRequest()
    with stop.on_signals():
        os.kill(os.getpid(), signal.SIGHUP)
        assert started("raise SystemExit(7)", stop=stop).exit_code == 7
    assert stop.signal is None


def test_a_signal_between_two_launches_stops_the_next():
    stop = StopRequest()
    with stop.on_signals():
        os.kill(os.getpid(), signal.SIGTERM)
        ended = started(SLEEPING, stop=stop)
    assert ended.exit_code == 128 + signal.SIGTERM


def test_a_launch_that_does_not_end_is_stopped():
    stop = StopRequest()
    with stop.on_signals():
        ended = started(SLEEPING, stop=stop, timeout_s=0.2)
    assert (ended.exit_code, ended.timed_out, stop.signal) == (128 + signal.SIGTERM, True, None)


@pytest.mark.parametrize("kind", ["marked", "unmarked"])
def test_what_ignores_the_stop_is_killed_with_everything_it_started(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(process, "GRACE_S", 0.2)
    ready, stop = tmp_path / "ready", StopRequest()
    send_when(ready, signal.SIGTERM)
    with stop.on_signals():
        ended = started(STUBBORN, str(ready), kind, stop=stop)
    assert (ended.exit_code, ended.timed_out) == (128 + signal.SIGKILL, False)
    assert gone(int(ready.read_text()))


def test_an_error_of_ours_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "GRACE_S", 0.2)
    ready = tmp_path / "ready"

    def broken() -> None:
        until(ready.exists)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        started(STUBBORN, str(ready), "unmarked", tick=broken)
    assert gone(int(ready.read_text()))


def test_a_launch_finds_nothing_of_the_torchrun_round_it():
    given = {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "x", "NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "1"}
    assert launch_environment(given) == {"NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "1"}


def test_every_variable_that_torchrun_sets_for_a_place_is_known():
    from torch.distributed.elastic.agent.server import local_elastic_agent

    source = Path(local_elastic_agent.__file__).read_text()
    block = source[source.index("worker_env = {") :]
    names = {line.split('"')[1] for line in block[: block.index("}")].splitlines() if '": ' in line}
    places = {name for name in names if "RANK" in name or "WORLD" in name or "MASTER" in name or "ROLE" in name}
    assert places
    assert places <= set(LAUNCHER_VARIABLES)


def test_only_marked_processes_are_ended():
    command = ["sleep", "600"]
    one, two = secrets.token_hex(8), secrets.token_hex(8)  # tests of another checkout may run beside these
    mine = subprocess.Popen(command, env={"PATH": "/usr/bin:/bin", MARK: one})
    other = subprocess.Popen(command, env={"PATH": "/usr/bin:/bin", MARK: two})
    try:
        assert end_marked(one) == 1
        assert gone(mine.pid)
        assert other.poll() is None
    finally:
        for process in (mine, other):
            process.kill()
            process.wait()
