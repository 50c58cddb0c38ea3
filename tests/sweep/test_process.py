"""A launch as a process: signals reach it, a timeout ends it, nothing that it started is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from aorta.errors import ToolMissing
from aorta.sweep import process
from aorta.sweep.process import Signals, own_environment, stop

# Ends with 40 + the signal's number; says when it listens.
POLITE = """
import signal, sys, time
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: sys.exit(40 + number))
open(sys.argv[1], "w").close()
time.sleep(60)
"""
# Ignores SIGTERM, and so does its child, which stands in a session of its own as a rank of torchrun does.
STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
child += "; open(sys.argv[1], 'w').close(); time.sleep(60)"
made = subprocess.Popen([sys.executable, "-c", child, sys.argv[1] + ".child"], start_new_session=True)
open(sys.argv[1], "w").write(str(made.pid))
time.sleep(60)
"""


def wait_for(path):
    for _ in range(3000):
        if path.exists():
            return
        time.sleep(0.01)
    pytest.fail(f"{path} did not appear")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_goes_on_to_the_launch_and_is_remembered(tmp_path, number):
    ready = tmp_path / "ready"
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]

    def send():
        wait_for(ready)
        os.kill(os.getpid(), number)

    threading.Thread(target=send).start()
    with Signals() as signals:
        ended = signals.run([sys.executable, "-c", POLITE, str(ready)], os.environ, None)
    assert (ended.exit_code, ended.timed_out, signals.received) == (40 + number, False, number)
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_signal_between_two_launches_stops_the_next(tmp_path):
    with Signals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        ended = signals.run([sys.executable, "-c", "import time; time.sleep(60)"], os.environ, None)
    assert ended.exit_code == 128 + signal.SIGTERM


def test_a_launch_ends_with_its_own_code():
    with Signals() as signals:
        assert signals.run([sys.executable, "-c", "raise SystemExit(7)"], os.environ, None).exit_code == 7


def test_a_launch_that_does_not_end_is_stopped():
    with Signals() as signals:
        ended = signals.run([sys.executable, "-c", "import time; time.sleep(60)"], os.environ, 0.2)
    assert (ended.exit_code, ended.timed_out, signals.received) == (128 + signal.SIGTERM, True, None)


def test_what_ignores_the_stop_is_killed_with_everything_it_started(tmp_path):
    ready = tmp_path / "ready"
    launch = subprocess.Popen([sys.executable, "-c", STUBBORN, str(ready)], start_new_session=True)
    wait_for(tmp_path / "ready.child")
    wait_for(ready)
    child = psutil.Process(int(ready.read_text()))
    assert stop(launch, patience_s=0.2) == -signal.SIGKILL
    assert not child.is_running() or child.wait(10) is None


def test_a_program_that_is_not_there():
    with Signals() as signals, pytest.raises(ToolMissing, match="no-such-program: cannot be started"):
        signals.run(["no-such-program"], os.environ, None)


def test_a_launch_finds_nothing_of_the_torchrun_round_the_sweep():
    given = {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "x", "NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "1"}
    assert own_environment(given) == {"NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "1"}


def test_every_variable_that_torchrun_sets_for_a_place_is_known():
    from torch.distributed.elastic.agent.server import local_elastic_agent

    source = Path(local_elastic_agent.__file__).read_text()
    block = source[source.index("worker_env = {") :]
    names = {line.split('"')[1] for line in block[: block.index("}")].splitlines() if '": ' in line}
    places = {name for name in names if "RANK" in name or "WORLD" in name or "MASTER" in name or "ROLE" in name}
    assert places
    assert places <= set(process._LAUNCHERS_OWN)
