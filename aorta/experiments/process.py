"""Runs one program as a launch: starts it in a process group of its own, waits, stops it, ends what it leaves behind.

torchrun puts its ranks into sessions of their own, where no process group reaches them; it passes SIGTERM and SIGINT
on. Where torchrun itself was killed, its ranks are found by a variable in their environment (`MARK`).

Must not know what it starts, print, or end a process without that very mark.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

import psutil

from aorta.command_line import end_with_parent
from aorta.errors import SIGNAL_EXIT_BASE, ToolMissing
from aorta.records.files import open_own

LAUNCHER_VARIABLES: Final = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "ROLE_NAME",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""Variables by which torchrun tells a process its rank; a launch must not inherit another launch's."""
MARK: Final = "AORTA_LAUNCH"
"""Environment variable with the id of the launch that a process belongs to, whatever sessions and parents it has."""
GRACE_S: Final = 45.0
"""From the request to stop to SIGKILL: torchrun kills its ranks 30 s after its own signal (docs/running.md)."""
_SETTLE_S: Final = 2.0
"""Helpers of multiprocessing end by themselves a moment after their parent."""
_POLL_S: Final = 0.5


@dataclass(frozen=True)
class LaunchEnd:
    """How a launch ended: `exit_code` is 128 + n where signal n killed it, `left_behind` how many processes of it had
    to be ended afterwards.
    """

    exit_code: int
    seconds: float
    timed_out: bool
    left_behind: int


class StopRequest:
    """The signal that asked us to stop, if one came; passed on to the launch that runs.

    A launch has a session of its own, so that Ctrl-C on a terminal reaches it once, through here.

        stop = StopRequest()
        with stop.on_signals():
            end = launch(command, id_=id_, environment=launch_environment(), stop=stop)
        if stop.signal is not None: ...
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.asked_s: float | None = None
        self.process: subprocess.Popen[bytes] | None = None

    def pass_on(self, number: int) -> None:
        """Send a signal to the launch, if one runs.

        It goes to the first process alone, which knows what to do with its children: a DataLoader's workers would die
        of it, and the rank with them. SIGKILL goes to the whole process group. SIGHUP goes on as SIGTERM: ranks that
        heed SIGTERM end after their step, and know nothing of a terminal.
        """
        if self.process is not None and self.process.poll() is None:
            with suppress(ProcessLookupError):
                if number == signal.SIGKILL:
                    os.killpg(self.process.pid, number)
                else:
                    self.process.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)

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


def launch_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables a launch starts with: the caller's, without those a torchrun around the caller put there."""
    return {
        name: value
        for name, value in environment.items()
        if name not in LAUNCHER_VARIABLES and not name.startswith("TORCHELASTIC_")
    }


def launch(
    command: Sequence[str],
    *,
    id_: str,
    environment: Mapping[str, str],
    stop: StopRequest,
    folder: Path | None = None,
    log: Path | None = None,
    timeout_s: float | None = None,
    tick: Callable[[], None] = lambda: None,
) -> LaunchEnd:
    """Run `command` to its end.

    Args:
        id_: marks its processes, so no other launch on this machine may have it.
        environment: all of its variables but the mark.
        stop: passes signals on to the launch.
        folder: where it runs; None: here.
        log: file for its stdout and stderr; None: they go where ours go.
        timeout_s: after which it is stopped as by SIGTERM.
        tick: called about twice a second.

    Raises:
        ToolMissing: the program cannot be started, or not in that folder.
    """
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with nullcontext() if log is None else open_own(log, new=True) as output:
        try:
            process = subprocess.Popen(
                command,
                cwd=folder,
                env={**environment, MARK: id_},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=None if output is None else subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=end_with_parent(os.getpid()),
            )
        except OSError as error:
            raise ToolMissing(f"{command[0]}: cannot be started: {error.strerror or error}") from error
        stop.process = process
        try:
            if stop.signal is not None:  # it came while the process was being made
                stop.pass_on(stop.signal)
            timed_out = _wait(process, began, timeout_s, stop, tick)
        except BaseException:  # an error of ours: still nothing may be left
            _wait(process, began, 0.0, stop, lambda: None)
            end_marked(id_)
            raise
        finally:
            stop.process = None
    seconds, code = time.monotonic() - began, process.returncode
    exit_code = code if code >= 0 else SIGNAL_EXIT_BASE - code
    return LaunchEnd(exit_code, seconds, timed_out, end_marked(id_))


def _wait(
    process: subprocess.Popen[bytes],
    began: float,
    timeout_s: float | None,
    stop: StopRequest,
    tick: Callable[[], None],
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
            # Its children too: ranks have sessions of their own, and a program may have unset the mark for them.
            with suppress(psutil.Error):
                for child in psutil.Process(process.pid).children(recursive=True):
                    with suppress(psutil.Error):
                        child.kill()
            stop.pass_on(signal.SIGKILL)
        tick()


def end_marked(id_: str) -> int:
    """End every process that still carries the mark of a launch: SIGTERM, and SIGKILL `GRACE_S` later.

    Returns:
        How many processes had to be signalled.
    """
    left = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # another user's, or gone by now
            if process.environ().get(MARK) == id_ and process.pid != os.getpid():
                left.append(process)
    if left:
        _, left = psutil.wait_procs(left, _SETTLE_S)
    for process in left:
        with suppress(psutil.Error):
            process.terminate()
    _, stubborn = psutil.wait_procs(left, GRACE_S)
    for process in stubborn:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(stubborn, _SETTLE_S)
    return len(left)
