"""One launch as a process: started, waited for, stopped. Nothing it started outlives it.

Enters: a command line. Leaves: how it ended. Must not: print, or know what it starts.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, Final

import psutil

from aorta.errors import SIGNAL_EXIT_BASE, ToolMissing

PATIENCE_S: Final = 60.0
"""From a stop to the kill: torchrun gives its ranks 30 s of it."""
_LAUNCHERS_OWN: Final = (
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
"""Variables by which torchrun tells a process its place; a launch of its own must not find those of another."""


@dataclass(frozen=True)
class Ended:
    """How a launch ended: 128 + n where signal n killed it."""

    exit_code: int
    seconds: float
    timed_out: bool


class Signals:
    """While open, SIGINT and SIGTERM go on to the launch of the moment, and the first one is remembered.

    The launch stands in a session of its own, so that Ctrl-C on a terminal reaches it once, through here.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        self._before = {number: signal.signal(number, self._pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        self.received = self.received or number
        if self._process is not None:
            self._process.send_signal(number)  # does nothing once it was waited for

    def run(self, command: Sequence[str], environment: Mapping[str, str], timeout_s: float | None) -> Ended:
        """Start a launch and wait for its end, or for the timeout and then its end.

        Raises:
            ToolMissing: the program is not there.
        """
        began = time.monotonic()
        try:
            process = subprocess.Popen(list(command), env=dict(environment), start_new_session=True)
        except OSError as error:
            raise ToolMissing(f"{command[0]}: cannot be started: {error.strerror or error}") from error
        self._process = process
        try:
            if self.received is not None:  # it came between two launches
                process.send_signal(self.received)
            try:
                code, timed_out = process.wait(timeout_s), False
            except subprocess.TimeoutExpired:
                code, timed_out = stop(process), True
        finally:
            if process.poll() is None:  # an error of ours: still nothing may be left
                stop(process)
            self._process = None
        return Ended(code if code >= 0 else SIGNAL_EXIT_BASE - code, time.monotonic() - began, timed_out)


def stop(process: subprocess.Popen[bytes], patience_s: float = PATIENCE_S) -> int:
    """Ask a launch to end; after `patience_s` kill it and all that it started. Returns its code as `Popen` does."""
    process.terminate()
    try:
        return process.wait(patience_s)
    except subprocess.TimeoutExpired:
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(process.pid).children(recursive=True):  # ranks have sessions of their own
                with suppress(psutil.NoSuchProcess):
                    child.kill()
        process.kill()
        return process.wait()


def own_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The caller's environment without what a torchrun round the sweep left there."""
    return {
        name: value
        for name, value in environment.items()
        if name not in _LAUNCHERS_OWN and not name.startswith("TORCHELASTIC_")
    }
