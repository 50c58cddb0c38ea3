"""What /proc says of a process, where `start_ticks` tells it from a later one of the same pid."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Final, NamedTuple

from aorta.records.clocks import boot_id
from aorta.records.progress import ProgressFacts

PROC: Final = Path("/proc")
_SIGKILL: Final = 1 << signal.SIGKILL - 1
_EXITING: Final = 0x4
"""PF_EXITING of Linux (include/linux/sched.h): the process has begun to end, and still holds files and locks."""


class ProcessFacts(NamedTuple):
    """Of /proc/PID/stat. `state` is its letter; `exit_code` as `os.waitstatus_to_exitcode` takes it, which is there
    until the parent has asked for it.
    """

    state: str
    flags: int
    start_ticks: int
    exit_code: int


def process_facts(pid: int) -> ProcessFacts | None:
    """Return what /proc says of a process; None: there is none, or no /proc."""
    try:
        text = (PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    # Fields are counted from 1 in proc(5), and the second may hold blanks and parentheses.
    fields = text.rpartition(")")[2].split()
    return ProcessFacts(fields[0], int(fields[6]), int(fields[19]), int(fields[49]))


def start_ticks(pid: int) -> int:
    """Return when a process started, in ticks since boot; 0 where there is no /proc."""
    facts = process_facts(pid)
    return 0 if facts is None else facts.start_ticks


def is_ending(facts: ProgressFacts) -> bool:
    """Return whether the process of a ring has ended or is sure to, where it can be seen from here. It holds its locks
    until the kernel has freed its memory.
    """
    if (facts.boot_id, facts.pid_namespace) != (boot_id(), pid_namespace()):
        return False
    process = process_facts(facts.pid)
    try:
        if process is None:  # or /proc hides it, as that of another user
            os.close(os.pidfd_open(facts.pid))
            return False
        if process.start_ticks != facts.start_ticks or process.state in "ZX" or process.flags & _EXITING:
            return True
        signals = re.findall(r"^S[hi][dg]Pnd:\s*(\w+)$", (PROC / str(facts.pid) / "status").read_text(), re.MULTILINE)
        return any(int(pending, 16) & _SIGKILL for pending in signals)
    except (OSError, OverflowError):
        return True


def pid_namespace() -> int:
    """Return the number of the namespace that this process sees pids of (pid_namespaces(7)); 0 without /proc."""
    try:
        return (PROC / "self" / "ns" / "pid").stat().st_ino
    except OSError:
        return 0
