"""One launch as a process group of its own: started, waited for, stopped, and nothing of it left behind.

Enters: a command line, a log file. Leaves: how it ended. Must not: know what a plan is, or end a process that does not
carry the launch's own mark.

torchrun puts its ranks into sessions of their own, so that no process group reaches them: it passes SIGTERM and SIGINT
on. Where it was killed itself, the ranks are found by a variable in their environment.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

import psutil

from aorta.errors import SIGNAL_EXIT_BASE

MARK: Final = "AORTA_PLAN_LAUNCH"
"""Variable that holds the id of a launch in all its processes."""
GRACE_S: Final = 45.0
"""From the request to stop to SIGKILL: torchrun kills its ranks 30 s after its own signal (docs/running.md)."""
_POLL_S: Final = 0.5
_SETTLE_S: Final = 2.0
"""Helpers of multiprocessing end by themselves a moment after their parent."""
_LAST_LINES: Final = 20
_TAIL_BYTES: Final = 16_384
_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h


@dataclass(frozen=True)
class Ended:
    """How a launch ended: 128 + n where signal n killed it; `left_behind` counts processes that had to be ended."""

    exit_code: int
    seconds: float
    timed_out: bool
    left_behind: int


class Stop:
    """The signal that asked the runner to stop, if any; while a launch runs, it gets the signal too."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.asked_s: float | None = None
        self.process: subprocess.Popen[bytes] | None = None

    def pass_on(self, number: int) -> None:
        """Send a signal to the process group of the launch, if one runs."""
        if self.process is not None and self.process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self.asked_s = signal.Signals(number), time.monotonic()
        self.pass_on(number)

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Catch SIGINT, SIGTERM and SIGHUP; one that the caller ignores (nohup) stays ignored."""
        caught = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
        before = {number: signal.signal(number, self._handle) for number in caught}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def launch(
    command: Sequence[str],
    *,
    id_: str,
    folder: Path,
    environment: Mapping[str, str],
    log: Path,
    stop: Stop,
    timeout_s: float | None,
    tick: Callable[[], None],
) -> Ended:
    """Run `command` to its end; its words go to `log`.

    Args:
        id_: unique; set as `MARK`. folder: where it runs. environment: all of it. timeout_s: after which it is stopped
            like by a signal. tick: called now and then.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with log.open("wb") as words:
        try:
            process = subprocess.Popen(
                command,
                cwd=folder,
                env={**environment, MARK: id_},
                stdin=subprocess.DEVNULL,
                stdout=words,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_parent(),
            )
        except OSError as error:  # as a shell would: not there, or not a program
            words.write(f"cannot run {command[0]}: {error.strerror or error}\n".encode())
            return Ended(127 if isinstance(error, FileNotFoundError) else 126, time.monotonic() - began, False, 0)
        stop.process = process
        if stop.signal is not None:  # it came while the process was being made
            stop.pass_on(stop.signal)
        timed_out = _wait(process, began, timeout_s, stop, tick)
        stop.process = None
    seconds = time.monotonic() - began
    code = process.returncode
    return Ended(code if code >= 0 else SIGNAL_EXIT_BASE - code, seconds, timed_out, end_marked(id_))


def run_to_end(command: Sequence[str]) -> int:
    """Run what follows a plan, its words where ours go; signals are passed on. Returns its exit code, 128 + n where a
    signal ended it, be it by way of its own handler.
    """
    stop = Stop()
    with stop.on_signals():
        stop.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_end_with_parent()
        )
        if stop.signal is not None:  # it came while the process was being made
            stop.pass_on(stop.signal)
        code = stop.process.wait()
    if code and stop.signal is not None:
        return SIGNAL_EXIT_BASE + stop.signal
    return code if code >= 0 else SIGNAL_EXIT_BASE - code


def _wait(
    process: subprocess.Popen[bytes], began: float, timeout_s: float | None, stop: Stop, tick: Callable[[], None]
) -> bool:
    asked_s: float | None = None
    while True:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_POLL_S)
            return asked_s is not None
        now = time.monotonic()
        if timeout_s is not None and asked_s is None and stop.asked_s is None and now - began > timeout_s:
            asked_s = now
            stop.pass_on(signal.SIGTERM)
        since = stop.asked_s if stop.asked_s is not None else asked_s
        if since is not None and now - since > GRACE_S:
            stop.pass_on(signal.SIGKILL)
        tick()


def end_marked(id_: str, grace_s: float = GRACE_S) -> int:
    """End whatever still carries the mark of a launch; returns how many processes it was."""
    left = _marked(id_)
    if left:
        _, left = psutil.wait_procs(left, _SETTLE_S)
    for process in left:
        with suppress(psutil.Error):
            process.terminate()
    _, stubborn = psutil.wait_procs(left, grace_s)
    for process in stubborn:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(stubborn, _SETTLE_S)
    return len(left)


def last_lines(log: Path) -> list[str]:
    """The end of what a launch said."""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        return file.read().decode(errors="replace").splitlines()[-_LAST_LINES:]


def _marked(id_: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # another user's, or gone by now
            if process.environ().get(MARK) == id_ and process.pid != os.getpid():
                found.append(process)
    return found


def _end_with_parent() -> Callable[[], None] | None:
    """What a new process does first on Linux: ask for SIGTERM when the runner dies, be it by SIGKILL."""
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None, use_errno=True)

    def ask() -> None:
        library.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

    return ask
