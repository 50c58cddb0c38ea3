"""Runs a management program such as rocm-smi: never on the training thread, never traced, never left running.

Must not interpret what it prints.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from contextlib import suppress
from dataclasses import dataclass

from aorta.distributed.environment_checks import untraced
from aorta.errors import DeviceUnreadable

TIMEOUT_S = 20.0


@dataclass(frozen=True)
class ProgramOutput:
    """Exit code and output of a program."""

    code: int
    out: str
    err: str


class Program:
    """A program that is run repeatedly; `abort` from another thread ends a run in progress and prevents further ones.

    Raises:
        DeviceUnreadable: it is not on PATH.
    """

    def __init__(self, name: str) -> None:
        if shutil.which(name) is None:
            raise DeviceUnreadable(f"{name} not available")
        self.name = name
        self._child: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        self._aborted = False

    def run(self, *words: str) -> ProgramOutput:
        """Run it to completion.

        Raises:
            DeviceUnreadable: it cannot be started, takes too long, or was aborted.
        """
        command = [self.name, *words]
        try:
            with self._lock:
                if self._aborted:
                    raise DeviceUnreadable(f"{self.name}: the run has ended")
                self._child = child = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    errors="replace",
                    env=untraced(os.environ),
                )
            try:
                out, err = child.communicate(timeout=TIMEOUT_S)
            finally:
                if child.poll() is None:
                    child.kill()
                    child.communicate()
        except subprocess.TimeoutExpired as error:
            raise DeviceUnreadable(f"{self.name} failed: no answer in {TIMEOUT_S:g} s") from error
        except OSError as error:
            raise DeviceUnreadable(f"{self.name} failed: {error.strerror or error}") from error
        if self._aborted:
            raise DeviceUnreadable(f"{self.name}: the run has ended")
        return ProgramOutput(child.returncode, out, err)

    def abort(self) -> None:
        """End a run in progress, and start none again."""
        with self._lock:
            self._aborted = True
            child = self._child
        if child is not None and child.poll() is None:
            with suppress(OSError):
                child.kill()


def checked(program: Program, *words: str) -> str:
    """Run a program and return what it printed.

    Raises:
        DeviceUnreadable: it failed.
    """
    done = program.run(*words)
    if done.code != 0:
        said = (done.err or done.out).strip().splitlines()
        raise DeviceUnreadable(f"{program.name} ended with {done.code}: {said[-1] if said else 'no output'}")
    return done.out
