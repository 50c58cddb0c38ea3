"""A process beside the ranks of one host: makes the lines of their records, reads their progress
files, and writes an autopsy when they are stuck or die.

    python -m aorta.autopsy.watchdog '{"folder": ...}'     # started by `aorta.recording.rank_record` in local rank 0

It shares nothing with the ranks but files, so that it sees a rank that holds the interpreter lock, is stopped, or was
killed, and it ends when each of them has ended. Must not import torch, end or delay a rank, or outlive them all.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from aorta.autopsy.evidence import RankExit
from aorta.autopsy.processes import EVIDENCE_FILE, exit_of_zombie, is_visible, process_state, progress_evidence
from aorta.autopsy.report import verdict_on, verdict_on_run, write_verdict
from aorta.command_line import name_ranks, to_stderr
from aorta.errors import SIGNAL_EXIT_BASE, InputError
from aorta.records.files import shared_folder, write_whole
from aorta.records.progress import (
    ANNOUNCED,
    PROGRESS_DIR,
    PROGRESS_FILE,
    ProgressState,
    ProgressWatch,
    UnreadableProgress,
    progress_files,
)
from aorta.records.ring_record import RingRecord, salvage
from aorta.records.run_files import AUTOPSY_DIR

LEAST_S: Final = 10.0
RECENT_STEPS: Final = 1000
USUAL: Final = 0.95
TIMES_USUAL: Final = 10.0
TIMES_LONGEST: Final = 1.5
"""The learned timeout, at least `LEAST_S`, from the longest gap between two signs of progress in each of the recent
steps behind the warm-up: `TIMES_USUAL` the `USUAL` quantile of these, twice what a straggler of five times the usual
pace needs; and `TIMES_LONGEST` the longest, so that a pause which comes again is reported once. How often that is
wrong, and a stop is missed: `python -m benchmarks.learned_timeout`."""
LEARNING_STEPS: Final = 5
"""Steps behind the warm-up from which a timeout is learned; before them `grace_s` holds."""
POLL_S: Final = 0.25
_ASLEEP_S: Final = 5.0
"""A pause between two looks that is longer means that the host was asleep, and the ranks too."""
_FILES_WITHIN_S: Final = 60.0
_FILES_AFTER_DEATH_S: Final = 2.0
"""The same once every rank that has a file has died: its launcher then ends the others."""
_OTHERS_WITHIN_S: Final = 0.3
"""How long after the first rank died the others may, before their state is taken."""
_LINES_EVERY_S: Final = 2.0
"""Lines of many steps together cost a fraction of those of one. A kill loses none; a progress line waits for them."""
_LINES_OF: Final = 64
"""They are made of so many steps, if there are before. `ring_steps.MOST`, which loads numpy."""
_RING_SHARE: Final = 8
"""They are made at once where a ring is fuller than one in so many."""


class LineMaker:
    """Makes the lines of ranks whose records are in `folder`, as their threads that train append rows alone. What goes
    wrong with one rank's lines is that rank's business, which then makes them itself.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._awaited: set[int] = set()
        self._records: dict[int, RingRecord] = {}
        self._made_s, self._made = time.monotonic(), 0

    def add(self, rank: int) -> None:
        """Make this rank's lines, once its ring has rows."""
        self._awaited.add(rank)

    def make(self) -> None:
        """Append the lines of steps that are complete. Never raises."""
        for rank in sorted(self._awaited):
            path = self._folder / PROGRESS_DIR / PROGRESS_FILE.format(rank=rank)
            if path.exists():
                with suppress(OSError, InputError, ValueError):  # an earlier run's, or it says nothing of rows yet
                    self._records[rank] = RingRecord(self._folder, path)
                    self._awaited.discard(rank)
        rings = [record.ring for record in self._records.values()]
        full = any(ring.count - ring.read > ring.slots // _RING_SHARE for ring in rings)
        ended = max((ring.steps_ended for ring in rings), default=0)
        if full or ended - self._made >= _LINES_OF or time.monotonic() - self._made_s >= _LINES_EVERY_S:
            self._made_s, self._made = time.monotonic(), ended
            for rank, record in list(self._records.items()):
                try:
                    if record.is_there and record.claim():
                        record.append()
                        continue
                except BlockingIOError:  # the rank is taking it back
                    continue
                except Exception as error:  # noqa: BLE001  the rank goes on without this process
                    record.give_up()
                    to_stderr(f"aorta: watchdog: rank {rank} makes the lines of its record itself: {error}")
                record.close()
                del self._records[rank]


class WatchdogTask(msgspec.Struct, frozen=True, kw_only=True):
    """What is watched: the run in `folder`, on the host of the process.

    Attributes:
        ranks: of this host.
        timeout_s: allowed without progress from the end of the first step on; None: learned from the run's own steps.
        grace_s: allowed before that, and in a phase that is announced (checkpoint, evaluation, ...).
    """

    folder: str
    run_id: str
    attempt: int
    ranks: tuple[int, ...]
    timeout_s: float | None = None
    grace_s: float = 600.0


class Patience:
    """Decides which ranks are overdue, by what their steps took.

    `quiet_until_ns`: time without progress before it is ignored, as a rank was paused or announced a long phase, in
    which the others may wait for it, or the host slept.
    """

    def __init__(self, timeout_s: float | None, grace_s: float, warmup_steps: int) -> None:
        self._timeout_s, self._grace_s = timeout_s, grace_s
        self._ready = warmup_steps + LEARNING_STEPS if timeout_s is None else 1
        self._warmup_steps = warmup_steps
        self._gaps_s: deque[float] = deque(maxlen=RECENT_STEPS)
        self._gap_s: dict[int, float] = {}
        """Rank -> the longest in the step that it is in."""
        self._last: dict[int, ProgressState] = {}
        self.quiet_until_ns = 0

    def timeout_s(self, states: dict[int, ProgressState]) -> float:
        if min(state.steps_done for state in states.values()) < self._ready:
            return max(self._grace_s, self._timeout_s or 0)
        if self._timeout_s is not None:
            return self._timeout_s
        gaps_s = sorted([0.0, *self._gaps_s, *self._gap_s.values()])
        return max(LEAST_S, TIMES_USUAL * gaps_s[int(USUAL * len(gaps_s))], TIMES_LONGEST * gaps_s[-1])

    def overdue(self, states: dict[int, ProgressState], now_ns: int) -> dict[int, float]:
        """Return ranks without progress for longer than allowed, with seconds; learns from those with progress."""
        for state in states.values():
            announced = state.phase in ANNOUNCED and now_ns - state.progress_ns < self._grace_s * 1e9
            if state.phase == "paused" or announced:
                self.quiet_until_ns = now_ns
        # No learned timeout is shorter than the least, and to learn it takes as long as all else here.
        least_s = LEAST_S if self._timeout_s is None else self._timeout_s
        ended_s, late = list[float](), {}
        for rank, state in states.items():
            idle_s = (now_ns - max(state.progress_ns, self.quiet_until_ns)) / 1e9
            if idle_s > least_s and idle_s > self.timeout_s(states):
                late[rank] = idle_s
            before, self._last[rank] = self._last.get(rank), state
            if before is None or before.steps_done < self._warmup_steps or before.progress_ns < self.quiet_until_ns:
                continue
            self._gap_s[rank] = max(self._gap_s.get(rank, 0.0), (state.progress_ns - before.progress_ns) / 1e9)
            if state.steps_done > before.steps_done:
                ended_s.append(self._gap_s.pop(rank))
        if ended_s:
            self._gaps_s.append(max(ended_s))
        return late


class HostWatchdog:
    """Watches until every rank has ended; `run` is its whole life."""

    def __init__(self, task: WatchdogTask) -> None:
        self._task, self._folder = task, Path(task.folder)
        self._watches: dict[int, ProgressWatch] = {}
        self._poller = select.poll()
        """Of the processes of the ranks."""
        self._exits: dict[int, RankExit] = {}
        self._dead: set[int] = set()
        self._reported: dict[int, int] = {}
        self._lines = LineMaker(self._folder)

    def run(self) -> None:
        if not self._open():
            return
        warmup = max(watch.facts.warmup_steps for watch in self._watches.values())
        patience = Patience(self._task.timeout_s, self._task.grace_s, warmup)
        looked_ns = time.perf_counter_ns()
        while True:
            for process, _ in self._poller.poll(POLL_S * 1000):
                self._poller.unregister(process)
            self._lines.make()
            now_ns = time.perf_counter_ns()
            if now_ns - looked_ns > _ASLEEP_S * 1e9:
                patience.quiet_until_ns = now_ns
            looked_ns = now_ns
            states, failed = self._alive()
            if failed and not self._reported:
                time.sleep(_OTHERS_WITHIN_S)
                self._report(f"{name_ranks(self._alive()[1])} ended before the run did")
                salvage(self._folder)
            if self._reported and all(
                self._watches[rank].state().progress_ns > at for rank, at in self._reported.items()
            ):
                # The ranks were late and not stuck: the report is written again. What was saved of them stays.
                idle_s = (time.perf_counter_ns() - max(self._reported.values())) / 1e9
                self._reported = {}
                answer, where = _answer(self._folder)
                to_stderr(f"aorta: watchdog: all ranks go on, after {idle_s:.0f} s; {answer}; {where}")
                continue  # `states` are of before
            if not states:
                salvage(self._folder)
                return
            late = patience.overdue(states, now_ns)
            if late and not self._reported:
                self._report(f"no progress for {max(late.values()):.0f} s on {name_ranks(sorted(late))}")

    def _open(self) -> bool:
        """Open the progress files of the task's ranks; whether there are any. The first rank's was there before this
        process: where it is gone, another run has the folder. Ranks whose process cannot be seen are not watched.
        """
        deadline, wanted = time.monotonic() + _FILES_WITHIN_S, set(self._task.ranks)
        while wanted and time.monotonic() < deadline:
            for path in progress_files(self._folder):
                with suppress(OSError, UnreadableProgress):
                    watch = ProgressWatch(path)
                    facts = watch.facts
                    ours = (facts.run_id, facts.attempt) == (self._task.run_id, self._task.attempt)
                    if not ours or facts.rank not in wanted:
                        continue
                    wanted.remove(facts.rank)
                    if is_visible(facts):
                        self._watches[facts.rank] = watch
                        self._lines.add(facts.rank)
                        with suppress(OSError, OverflowError):  # gone already, or no pid
                            self._poller.register(os.pidfd_open(facts.pid), select.POLLIN)
            if self._task.ranks[0] not in self._watches:
                return False
            if all(_is_dead(watch) for watch in self._watches.values()):
                deadline = min(deadline, time.monotonic() + _FILES_AFTER_DEATH_S)
            self._lines.make()
            if wanted:
                time.sleep(0.05)
        return bool(self._watches)

    def _alive(self) -> tuple[dict[int, ProgressState], list[int]]:
        """Return the state of each rank that is in its recorded loop, and the ranks that died in there or left it with
        an error; a run that a signal ends in order has none.
        """
        states, failed = {}, []
        for rank, watch in sorted(self._watches.items()):
            state = watch.state()
            if rank not in self._dead and _is_dead(watch):
                self._dead.add(rank)
                if ended := exit_of_zombie(watch.facts.pid, watch.facts.start_ticks):
                    self._exits[rank] = ended
            if state.exit_code is None and rank not in self._dead:
                states[rank] = state
            elif state.exit_code is None or 0 < state.exit_code < SIGNAL_EXIT_BASE:
                failed.append(rank)
        return states, failed

    def _report(self, what: str) -> None:
        """Save evidence of every rank, have the report written, and say so in one line that begins with the accused."""
        self._reported = {rank: watch.state().progress_ns for rank, watch in self._watches.items()}
        evidence, output = progress_evidence(self._folder, stacks=True, saved=False), self._folder / AUTOPSY_DIR
        try:
            shared_folder(output)
            for entry in evidence:
                if entry.rank in self._watches:
                    entry.exit = entry.exit or self._exits.get(entry.rank)
                    write_whole(output / EVIDENCE_FILE.format(rank=entry.rank), msgspec.json.encode(entry).decode())
        except OSError as error:
            answer = verdict_on(evidence, watched=True).summary
            where = f"evidence cannot be saved in {output}: {error.strerror or error}"
        else:
            answer, where = _answer(self._folder)
        to_stderr(f"aorta: watchdog: {answer} ({what}); {where}")


def _is_dead(watch: ProgressWatch) -> bool:
    return process_state(watch.facts.pid, watch.facts.start_ticks) == "dead"


def _answer(folder: Path) -> tuple[str, str]:
    output = folder / AUTOPSY_DIR
    try:
        verdict = verdict_on_run(folder)
    except Exception as error:  # noqa: BLE001  the evidence is saved, whatever is wrong with the report
        return f"the report failed: {error}", f"evidence is in {output}"
    try:
        write_verdict(folder, verdict)
    except OSError as error:
        return verdict.summary, f"the report cannot be written in {output}: {error.strerror or error}"
    return verdict.summary, f"see {output}"


if __name__ == "__main__":
    os.chdir("/")  # no mount is kept busy
    # json.loads, since the name of a folder need not be UTF-8.
    HostWatchdog(msgspec.convert(json.loads(sys.argv[1]), WatchdogTask)).run()
