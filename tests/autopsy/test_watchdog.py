"""The watchdog beside ranks that are real processes: it sees what becomes of them, and leaves with the last."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from aorta.autopsy import processes
from aorta.autopsy.evidence import RankEvidence, RankExit, ThreadStack
from aorta.autopsy.processes import process_state, progress_evidence
from aorta.autopsy.report import verdict_on_run
from aorta.autopsy.stacks import parse_stacks
from aorta.autopsy.watchdog import LEAST_S, RECENT_STEPS, Patience, WatchdogTask
from aorta.records.process import pid_namespace, start_ticks
from aorta.records.progress import PROGRESS_DIR, ProgressState, progress_files
from aorta.records.ring_file import RingFile
from tests.autopsy.watched_rank import facts
from tests.runs import HANGS_S, until

TIMEOUT_S = 2.0


class Host:
    """Two ranks and their watchdog."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.ranks = folder, list[subprocess.Popen[bytes]]()
        self._watchdogs = list[subprocess.Popen[str]]()

    def start(self, *fates: str) -> None:
        """Start a rank for each fate."""
        (self.folder / PROGRESS_DIR).mkdir()
        for rank, fate in enumerate(fates):
            command = [sys.executable, "-m", "tests.autopsy.watched_rank", str(self.folder / PROGRESS_DIR), str(rank)]
            self.ranks.append(subprocess.Popen([*command, fate]))
        until(lambda: len(progress_files(self.folder)) == len(fates))

    def watch(self, grace_s: float = 60.0, writes_bytes: int | None = None) -> subprocess.Popen[str]:
        """Start the watchdog, whose files the kernel may keep from growing beyond `writes_bytes`."""
        task = WatchdogTask(
            folder=str(self.folder),
            run_id="run",
            attempt=0,
            ranks=tuple(range(len(self.ranks))),
            timeout_s=TIMEOUT_S,
            grace_s=grace_s,
        )
        command = [sys.executable, "-m", "aorta.autopsy.watchdog", msgspec.json.encode(task).decode()]
        watchdog = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        if writes_bytes is not None:
            resource.prlimit(watchdog.pid, resource.RLIMIT_FSIZE, (writes_bytes, writes_bytes))
        self._watchdogs.append(watchdog)
        return watchdog

    def evidence(self) -> dict[int, RankEvidence]:
        return {each.rank: each for each in progress_evidence(self.folder)}

    def end(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.wait()
        for watchdog in self._watchdogs:
            watchdog.wait(timeout=HANGS_S)  # it leaves by itself, when the last rank has
            watchdog.stderr.close()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    host = Host(tmp_path)
    yield host
    host.end()


@pytest.mark.parametrize(("fate", "state"), [("sleep", "running"), ("lock", "running"), ("stop", "stopped")])
def test_a_rank_that_is_stuck_is_seen_while_it_is(host: Host, fate: str, state: str) -> None:
    host.start(fate, "sleep")
    watchdog = host.watch()
    line = watchdog.stderr.readline()
    assert " (no progress for " in line  # whichever rank was late first
    assert all(rank.poll() is None for rank in host.ranks)  # nobody was ended
    stuck = host.evidence()[0]
    assert (stuck.state, stuck.step, stuck.phase, stuck.exit) == (state, 9, "forward", None)
    innermost = [stack.frames[0] for stack in stuck.stacks[:1]]
    assert bool(innermost) == (state == "running")
    assert all("watched_rank.py" in frame and frame.endswith(" meet") for frame in innermost)
    host.end()
    assert watchdog.returncode == 0
    after = host.evidence()[0]
    assert (after.state, after.stacks) == (stuck.state, stuck.stacks)  # saved before they were ended
    assert progress_evidence(host.folder, saved=False)[0].state == "dead"


def test_a_rank_at_work_goes_on_however_often_its_stacks_are_asked_for(host: Host) -> None:
    host.start("work", "sleep")
    until(lambda: all(each.phase == "forward" for each in progress_evidence(host.folder)))
    answers = Counter[tuple[str, ...]]()
    for _ in range(40):
        working, asleep = progress_evidence(host.folder, stacks=True)
        for stack in working.stacks:  # a thread that has just been started has no frame yet
            assert not stack.frames or stack.frames[-1].endswith((" _run_module_as_main", " _bootstrap"))
        assert [stack.name for stack in asleep.stacks] in (["MainThread"], [])
        # Nor has it a name, but a number.
        answers[tuple("worker" if stack.name.startswith("0x") else stack.name for stack in working.stacks)] += 1
    # A rank that got no processor time within a second answers for its main thread, or not at all.
    assert set(answers) <= {("MainThread", "worker"), ("MainThread",), ()}
    assert answers["MainThread", "worker"] > 20
    assert all(rank.poll() is None for rank in host.ranks)


@pytest.mark.parametrize(("fate", "name"), [("kill", "SIGKILL"), ("segfault", "SIGSEGV")])
def test_a_rank_that_dies_leaves_its_signal_and_phase(host: Host, fate: str, name: str) -> None:
    host.start(fate, "sleep")
    (host.folder / PROGRESS_DIR / "rank_2.bin").touch()  # as a full disk leaves it
    watchdog = host.watch(grace_s=600)
    said = watchdog.stderr.readline()
    assert said.startswith(
        f"aorta: watchdog: rank 0 (PID {host.ranks[0].pid} on {socket.gethostname()}) ended by {name}"
    )
    assert "(rank 0 ended before the run did)" in said
    evidence = host.evidence()
    assert (evidence[0].state, evidence[0].exit, evidence[0].phase) == ("dead", RankExit(signal=name), "forward")
    assert (evidence[1].state, evidence[1].exit) == ("running", None)


def test_all_ranks_killed_at_once_leave_evidence_and_one_without_a_file_is_not_waited_for(host: Host) -> None:
    host.start("sleep", "sleep")
    until(lambda: all(each.step == 9 for each in progress_evidence(host.folder)))
    for rank in host.ranks:
        rank.kill()
    host.ranks.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))
    watchdog = host.watch(grace_s=2 * HANGS_S)  # so long it waits for a file while others run
    assert "(ranks 0-1 ended before the run did)" in watchdog.stderr.readline()
    assert watchdog.wait(timeout=HANGS_S) == 0
    assert [(each.state, each.step) for each in host.evidence().values()] == [("dead", 9)] * 2


def test_a_report_on_ranks_that_go_on_is_withdrawn(host: Host) -> None:
    host.start("go_on", "go_on")
    watchdog = host.watch()
    late, went_on = watchdog.stderr.readline(), watchdog.stderr.readline()
    assert "no progress for" in late
    assert "all ranks go on, after" in went_on
    report = msgspec.json.decode((host.folder / "autopsy" / "autopsy.json").read_bytes())
    assert (report["kind"], report["culprits"]) == ("not_stuck", [])
    assert watchdog.wait(timeout=HANGS_S) == 0
    assert watchdog.stderr.read() == ""


@pytest.mark.parametrize("writes_bytes", [0, 1024])  # nothing of the evidence, or its beginning
def test_a_full_disk_leaves_the_answer_in_the_log_and_the_evidence_in_memory(host: Host, writes_bytes: int) -> None:
    host.start("kill", "sleep")
    watchdog = host.watch(writes_bytes=writes_bytes)
    said = watchdog.stderr.readline()
    assert "(rank 0 ended before the run did)" in said
    assert "SIGKILL" in said
    assert "File too large" in said
    assert not list((host.folder / "autopsy").glob("autopsy*"))
    assert host.evidence()[0].exit == RankExit(signal="SIGKILL")
    assert verdict_on_run(host.folder).culprits[0].rank == 0  # once there is room again


def test_a_later_process_with_the_same_pid_is_dead_and_one_that_cannot_be_seen_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ticks = start_ticks(os.getpid())
    assert process_state(os.getpid(), ticks) == "running"
    assert process_state(os.getpid(), ticks + 1) == "dead"
    monkeypatch.setattr(processes, "process_facts", lambda _pid: None)  # as /proc hides those of other users
    assert process_state(os.getpid(), 1) == "unknown"
    assert process_state(0, 1) == process_state(10**30, 1) == "dead"


def test_a_rank_in_another_namespace_of_pids_is_neither_dead_nor_watched(host: Host) -> None:
    host.start("sleep")
    elsewhere = msgspec.structs.replace(facts(1, None), pid_namespace=pid_namespace() + 1)
    RingFile.create(host.folder / PROGRESS_DIR / "rank_1.bin", elsewhere)
    host.ranks.append(subprocess.Popen([sys.executable, "-c", ""]))
    watchdog = host.watch()
    assert " s on rank 0)" in watchdog.stderr.readline()
    assert host.evidence()[1].state == "unknown"
    host.ranks[0].kill()
    assert watchdog.wait(timeout=HANGS_S) == 0


def test_a_host_that_was_started_again_has_lost_its_ranks(tmp_path: Path) -> None:
    earlier = msgspec.structs.replace(facts(0, None), boot_id="an earlier one")
    path = RingFile.create(tmp_path / PROGRESS_DIR / "rank_0.bin", earlier).path
    assert progress_evidence(tmp_path)[0].state == "unknown"  # written since: by another host of that name
    os.utime(path, (0, 0))
    assert progress_evidence(tmp_path)[0].state == "dead"


@pytest.mark.parametrize(
    ("number", "forged", "user", "sent"),
    [
        pytest.param(signal.SIGRTMIN + 1, False, None, True, id="the rank's own file"),
        pytest.param(signal.SIGRTMIN + 1, True, None, False, id="a file that the process has not mapped"),
        pytest.param(signal.SIGRTMIN + 1, False, 54321, False, id="a process of another user"),
        pytest.param(signal.SIGTERM, False, None, False, id="no real-time signal"),
        pytest.param(0, False, None, False, id="no signal"),
        pytest.param(10**12, False, None, False, id="a number of no signal"),
    ],
)
def test_a_signal_goes_to_the_rank_that_has_the_file_mapped_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, forged: bool, user: int | None, sent: bool
) -> None:
    got, folder = list[int](), tmp_path / "a\nfolder"
    ring = RingFile.create(folder / PROGRESS_DIR / "rank_0.bin", facts(0, number))
    if forged:
        shutil.copytree(folder, folder := tmp_path / "another")
    (folder / PROGRESS_DIR / "rank_0.stacks").touch()
    if user is not None:
        monkeypatch.setattr(os, "geteuid", lambda: user)
    caught = (signal.SIGRTMIN + 1, signal.SIGTERM)
    before = {each: signal.signal(each, lambda found, _: got.append(found)) for each in caught}
    try:
        assert progress_evidence(folder, stacks=True)[0].state == "running"
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert got == [number] * sent
    ring.close()


def test_no_run_no_watchdog(host: Host) -> None:
    host.ranks = [subprocess.Popen([sys.executable, "-c", ""])]
    assert host.watch().wait(timeout=HANGS_S) == 0


def state(steps_done: int, at_s: float, phase: str = "forward") -> ProgressState:
    return ProgressState(steps_done, phase, int(at_s * 1e9), steps_done, int(at_s * 1e9), None)


def overdue(patience: Patience, now_s: float, *states: ProgressState) -> list[int]:
    return sorted(patience.overdue(dict(enumerate(states)), int(now_s * 1e9)))


def test_a_first_step_that_compiles_is_waited_for() -> None:
    learning = Patience(None, 600.0, warmup_steps=5)
    assert overdue(learning, 60, state(0, 0)) == []
    assert overdue(learning, 601, state(0, 0)) == [0]
    given = Patience(3.0, 600.0, warmup_steps=5)
    assert overdue(given, 60, state(0, 0)) == []
    assert overdue(given, 64, state(1, 60)) == [0]


def test_the_timeout_is_learned_behind_the_warmup() -> None:
    patience = Patience(None, 600.0, warmup_steps=5)
    for step, at_s in ((0, 0), (1, 90), (10, 91)):  # the second is of the warm-up
        overdue(patience, at_s, state(step, at_s))
    assert patience.timeout_s({0: state(10, 91)}) == LEAST_S
    overdue(patience, 94, state(11, 94))
    assert patience.timeout_s({0: state(11, 94)}) == pytest.approx(30)
    assert overdue(patience, 94 + 5 * 3, state(11, 94)) == []  # a straggler of five times the pace
    assert overdue(patience, 125, state(11, 94)) == [0]


@pytest.mark.parametrize(
    ("steps", "pauses", "pause_s", "timeout_s"),
    [
        pytest.param(600, [500], 7.0, 10.5, id="one pause lengthens it a little"),
        pytest.param(600 + RECENT_STEPS, [500], 7.0, LEAST_S, id="and is forgotten"),
        pytest.param(100, range(9, 100, 10), 3.0, 30.0, id="what one step in ten needs is usual"),
    ],
)
def test_pauses_lengthen_the_timeout(steps: int, pauses: Sequence[int], pause_s: float, timeout_s: float) -> None:
    patience, at_s = Patience(None, 600.0, warmup_steps=0), 0.0
    for step in range(steps):
        at_s += pause_s if step in pauses else 0.3
        assert overdue(patience, at_s, state(step, at_s)) == []
    assert patience.timeout_s({0: state(steps, at_s)}) == pytest.approx(timeout_s)
    assert overdue(patience, at_s + timeout_s + 1, state(steps, at_s)) == [0]


def test_who_waits_for_a_checkpoint_is_not_late_when_it_ends() -> None:
    patience = Patience(3.0, 600.0, warmup_steps=0)
    assert overdue(patience, 30, state(9, 1, "checkpoint"), state(9, 1)) == []
    assert overdue(patience, 31, state(9, 30.9), state(9, 1)) == []
    assert overdue(patience, 34, state(9, 30.9), state(9, 1)) == [0, 1]
    assert overdue(Patience(3.0, 600.0, 0), 700, state(9, 1, "checkpoint")) == [0]
    assert overdue(Patience(3.0, 600.0, 0), 700, state(9, 1, "paused")) == []
    patience = Patience(3.0, 600.0, warmup_steps=0)
    patience.quiet_until_ns = int(99e9)  # a host that was asleep is no alarm
    assert overdue(patience, 100, state(9, 1)) == []


def test_stacks_of_faulthandler() -> None:
    text = """\
Thread 0x000000000000000a (most recent call first):
  File "/a b.py", line 3 in wait

Current thread 0x000000000000000b (most recent call first):
  File "/c.py", line ??? in <module>
"""
    main, other = parse_stacks(text, 0xB)
    assert (main.name, main.frames) == ("MainThread", ("/c.py:??? <module>",))
    assert (other.name, other.frames) == ("0xa", ("/a b.py:3 wait",))
    by_signal = 'Stack (most recent call first):\n  File "/c.py", line 7 in main\n'
    assert parse_stacks(by_signal, 0xB) == [ThreadStack(name="MainThread", frames=("/c.py:7 main",))]
    assert parse_stacks(text + by_signal, 0xB) == [main, other]  # an answer that came late, and the signal's
