"""A launch as a process: signals reach it, a timeout ends it, nothing that it started is left.

Plans as processes: signals, a runner killed outright, a launch that hangs, and a program of one's own launched as a
user starts it (those of train.py are launched by the demo: `tests/test_package.py`); their journal.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import pty
import secrets
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from aorta.errors import ConfigError, RecordWriteError
from aorta.experiments import process
from aorta.experiments.launch_engine import PLAN_JOURNAL, Closed, Journal, PlanLine
from aorta.experiments.process import (
    LAUNCHER_VARIABLES,
    MARK,
    LaunchEnd,
    StopRequest,
    end_marked,
    launch,
    launch_environment,
)
from aorta.read.record import load_run
from aorta.records.files import read_lines
from tests.experiments.conftest import Bench
from tests.libraries import stand_in
from tests.runs import HANGS_S, ROOT, finished, until

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


# --- plans


AB = ("--launches", "1", "--candidate", "a=2")


def hanging(bench: Bench) -> dict[str, int]:
    """Once a launch hangs: ids of its torchrun and of its rank."""
    (call,) = until(lambda: [call for call in bench.calls if call["call"] == "hangs"])
    return {name: call[name] for name in ("pid", "rank")}


@pytest.mark.thorough
def test_a_signal_ends_the_launch_its_ranks_and_the_plan(bench):
    bench.acts(candidate_00={"hang": 1})
    runner = bench.start(*AB)
    left = hanging(bench)
    runner.send_signal(signal.SIGINT)
    _, err = runner.communicate(timeout=HANGS_S)
    assert runner.returncode == 128 + signal.SIGINT
    assert "stopped; run the same command again for the missing launches" in err
    assert has_ended(left["pid"])
    assert has_ended(left["rank"])
    end = bench.events("end")[-1]
    assert (end["outcome"], end["reason"], end["left_behind"]) == ("stopped", "stopped by SIGINT", 1)
    assert bench.events("close")[-1]["exit_code"] == 128 + signal.SIGINT
    code, _, _ = bench(*AB)
    assert code == 0
    assert bench.launched == ["reference/00", "candidate/00", "candidate/00"]
    assert (bench.home / "plan" / "aside" / "candidate" / "00.stopped").is_dir()


@pytest.mark.thorough
def test_a_terminal_that_was_closed_costs_neither_the_journal_nor_the_exit_code(bench):
    bench.acts(reference_00={"hang": 1})
    mine, its = pty.openpty()
    runner = bench.start(*AB, stderr=its)
    os.close(its)
    left = hanging(bench)
    os.close(mine)  # what is written from now on fails with EIO
    runner.terminate()
    runner.communicate(timeout=HANGS_S)
    assert runner.returncode == 143
    assert bench.events("close")[-1]["exit_code"] == 143
    assert has_ended(left["rank"])


@pytest.mark.thorough
def test_a_runner_killed_outright_leaves_no_torchrun_and_its_launch_is_done_again(bench):
    bench.acts(candidate_00={"hang": 1})
    runner = bench.start(*AB)
    left = hanging(bench)
    runner.kill()
    runner.communicate(timeout=HANGS_S)
    assert gone(left["pid"])  # Linux tells it; without, the next runner ends it
    assert not has_ended(left["rank"])
    code, _, _ = bench(*AB)
    assert code == 0
    assert has_ended(left["rank"])
    assert bench.launched == ["reference/00", "candidate/00", "candidate/00"]
    lost = next(end for end in bench.events("end") if end["outcome"] == "lost")
    assert (lost["launch"], lost["left_behind"], lost["kept"]) == ("candidate/00", 1, "aside/candidate/00.lost")
    assert (bench.home / "plan" / lost["kept"] / "rank_0_metrics.jsonl").read_text() == "{"


@pytest.mark.dist
def test_a_program_of_the_users_own_with_two_builds_of_a_library(tmp_path):
    builds = {side: stand_in(tmp_path / side, 22703, side) for side in ("reference", "candidate")}
    program = f"{{torchrun}} --standalone --nproc_per_node 2 {ROOT}/docs/examples/ddp.py {{output}}"
    command = ["bash", str(ROOT / "scripts" / "ab.sh"), "--output", "o", "--launches", "1", "--command", program]
    reference, candidate = (f"env.LD_PRELOAD={library}" for library in builds.values())
    sides = ["--reference", reference, "--candidate", f"{candidate} env.NCCL_ALGO=Tree"]
    done = finished([*command, *sides], folder=tmp_path)
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in (tmp_path / "o" / PLAN_JOURNAL).read_text().splitlines()]
    ends = [(event["launch"], event["left_behind"]) for event in events if event["event"] == "end"]
    assert ends == [("reference/00", 0), ("candidate/00", 0)]
    for side, algorithm in (("reference", None), ("candidate", "Tree")):
        run = load_run(tmp_path / "o" / side / "00")
        assert (run.health.world_size, len(run.ranks[0].steps)) == (2, 12)
        manifest = json.loads((tmp_path / "o" / side / "00" / "run.json").read_text())
        assert manifest["environment"].get("NCCL_ALGO") == algorithm
        assert manifest["collective_library"]["path"] == str(builds[side])
        assert manifest["collective_library_differences"] == {}
    assert "aorta report o --all" in done.stdout
    found = json.loads((tmp_path / "reports" / "o" / "summary.json").read_text())["comparison"]
    differ = [each["key"] for each in found["manifest_differences"]]
    assert differ == ["collective_library", "environment.LD_PRELOAD", "environment.NCCL_ALGO"]
    assert found["losses"]["sentence"] == "bit-equal in all 24 rank-steps"


# --- the journal: lines that last, one writer at a time, what a kill leaves


FIRST, SECOND, THIRD = (Closed("", number, []) for number in range(3))


def journal(folder: Path) -> Journal:
    return Journal(folder / "journal.jsonl", in_use="somebody writes it")


@pytest.mark.parametrize("torn", [b"{", b"{}"])
def test_a_line_that_a_kill_cut_short_stays_alone(tmp_path, torn):
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b"1\n" + torn)
    with closing(journal(tmp_path)) as taken_up:
        taken_up.write(FIRST)
    assert path.read_bytes() == b"1\n" + torn + b'\n{"event":"close","time":"","exit_code":0,"failed":[]}\n'


def test_a_line_that_says_nothing_is_named_by_its_number(tmp_path):
    with closing(journal(tmp_path)) as written:
        written.write(FIRST, SECOND)
        written.path.write_bytes(written.path.read_bytes() + b'{"a\n\xff\n')
        written.write(THIRD)
        found, problems = read_lines(written.path, PlanLine)
    assert found == [FIRST, SECOND, THIRD]
    assert [problem.partition(": ")[0] for problem in problems] == ["journal.jsonl:3", "journal.jsonl:4"]


def test_a_second_writer_is_refused_until_the_first_has_closed(tmp_path):
    with closing(journal(tmp_path)), pytest.raises(ConfigError, match="somebody writes it"):
        journal(tmp_path)
    held = journal(tmp_path)
    del held  # one that is forgotten is not held
    journal(tmp_path).close()


def test_on_a_disk_without_locks_it_is_written_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))))
    with closing(journal(tmp_path)) as written:
        written.write(FIRST)
    assert read_lines(written.path, PlanLine) == ([FIRST], [])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_full_disk_and_a_folder_that_is_not_there_are_told(tmp_path):
    with pytest.raises(ConfigError, match=r"no/journal\.jsonl: cannot be written: No such file"):
        journal(tmp_path / "no")
    with closing(journal(tmp_path)) as full, Path("/dev/full").open("r+b") as disk:
        os.dup2(disk.fileno(), full._file.fileno())
        with pytest.raises(RecordWriteError, match="No space left on device"):
            full.write(FIRST)
