"""What /proc says of a process, of this host and namespace.

Must not signal a process, or take a later one of the same pid for it (`start_ticks` tells them apart).
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

PROC: Final = Path("/proc")


class ProcessFacts(NamedTuple):
    """Of /proc/PID/stat. `state` is its letter; `exit_code` as `os.waitstatus_to_exitcode` takes it, which is there
    until the parent has asked for it.
    """

    state: str
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
    return ProcessFacts(fields[0], int(fields[19]), int(fields[49]))


def start_ticks(pid: int) -> int:
    """Return when a process started, in ticks since boot; 0 where there is no /proc."""
    facts = process_facts(pid)
    return 0 if facts is None else facts.start_ticks


def pid_namespace() -> int:
    """Return the number of the namespace that this process sees pids of (pid_namespaces(7)); 0 without /proc."""
    try:
        return (PROC / "self" / "ns" / "pid").stat().st_ino
    except OSError:
        return 0
