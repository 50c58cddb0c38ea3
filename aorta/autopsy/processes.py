"""Processes of this host as /proc shows them."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from aorta.autopsy.evidence import ProcessState, RankExit

_PROC: Final = Path("/proc")


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
        text = (_PROC / str(pid) / "stat").read_text()
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
        return (_PROC / "self" / "ns" / "pid").stat().st_ino
    except OSError:
        return 0


def process_state(pid: int, start_ticks: int) -> ProcessState:
    """Return the state of a process of this host and namespace. A later process with the same pid does not count."""
    facts = process_facts(pid)
    if facts is None:
        with suppress(OSError, OverflowError):  # there is no /proc, or it hides the processes of other users
            os.close(os.pidfd_open(pid))
            return "unknown"
    if facts is None or facts.state in "ZX" or facts.start_ticks != start_ticks:
        return "dead"
    return "stopped" if facts.state in "Tt" else "running"


def exit_of_zombie(pid: int, start_ticks: int) -> RankExit | None:
    """Return how a process ended whose parent has not asked yet; None where that is not to be known."""
    facts = process_facts(pid)
    if facts is None or facts.state not in "ZX" or facts.start_ticks != start_ticks:
        return None
    return exit_from(os.waitstatus_to_exitcode(facts.exit_code))


def exit_from(code: int) -> RankExit:
    """Return an exit as Python's subprocess has it: the code, or minus the number of the signal."""
    if code >= 0:
        return RankExit(exit_code=code)
    try:
        return RankExit(signal=signal.Signals(-code).name)
    except ValueError:
        return RankExit(signal=f"signal {-code}")


def has_mapped(pid: int, path: Path) -> bool:
    """Return whether a process of the same user has a file mapped into its memory."""
    name = os.fsencode(path.resolve()).replace(b"\n", rb"\012")  # as proc(5) writes it
    try:
        lines = (_PROC / str(pid) / "maps").read_bytes().split(b"\n")
        ours = (_PROC / str(pid)).stat().st_uid == os.geteuid()
    except OSError:
        return False
    return ours and any(line.split(maxsplit=5)[5:] == [name] for line in lines)


def catches(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal, which would end it otherwise."""
    try:
        status = (_PROC / str(pid) / "status").read_text()
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)
