"""Processes of this host as /proc shows them, and stacks that their own faulthandler writes.

Must not stop a process, or send a signal to one that does not catch it.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from aorta.autopsy.evidence import ProcessState, RankExit, ThreadStack

_PROC: Final = Path("/proc")
_THREAD: Final = re.compile(r"^(?:Current thread|Thread) 0x(?P<id>[0-9a-f]+)(?: \[(?P<name>.*)\])? \(most recent")
_FRAME: Final = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)$')
_FATAL: Final = re.compile(r"^Fatal Python error: (?P<what>.*)$", re.MULTILINE)
_FATAL_SIGNALS: Final = {
    "Segmentation fault": "SIGSEGV",
    "Aborted": "SIGABRT",
    "Bus error": "SIGBUS",
    "Floating point exception": "SIGFPE",
    "Floating-point exception": "SIGFPE",
    "Illegal instruction": "SIGILL",
}
"""What faulthandler calls the signals it catches (CPython, Modules/faulthandler.c)."""
_DUMP_S: Final = 1.0


class ProcessFacts(NamedTuple):
    """Of /proc/PID/stat. `state` is its letter; `exit_code` as `os.waitstatus_to_exitcode` takes it, which is there
    until the parent has asked for it.
    """

    state: str
    start_ticks: int
    exit_code: int


def process_facts(pid: int) -> ProcessFacts | None:
    """What /proc says of a process; None: there is none, or no /proc."""
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    # Fields are counted from 1 in proc(5), and the second may hold blanks and parentheses.
    fields = text.rpartition(")")[2].split()
    return ProcessFacts(fields[0], int(fields[19]), int(fields[49]))


def process_state(pid: int, start_ticks: int) -> ProcessState:
    """State of a process of this host. A later process with the same pid does not count."""
    facts = process_facts(pid)
    if facts is None or facts.state in "ZX" or facts.start_ticks != start_ticks:
        return "dead"
    return "stopped" if facts.state in "Tt" else "running"


def exit_of_zombie(pid: int, start_ticks: int) -> RankExit | None:
    """How a process ended whose parent has not asked yet; None where that is not to be known."""
    facts = process_facts(pid)
    if facts is None or facts.state not in "ZX" or facts.start_ticks != start_ticks:
        return None
    return exit_from(os.waitstatus_to_exitcode(facts.exit_code))


def exit_from(code: int) -> RankExit:
    """An exit as Python's subprocess has it: the code, or minus the number of the signal."""
    if code >= 0:
        return RankExit(exit_code=code)
    try:
        return RankExit(signal=signal.Signals(-code).name)
    except ValueError:
        return RankExit(signal=f"signal {-code}")


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal, which would end it otherwise."""
    try:
        status = (_PROC / str(pid) / "status").read_text()
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


def stacks_of(pid: int, number: int, path: Path, main_thread: int | None) -> list[ThreadStack]:
    """The stacks of a running process, written by its faulthandler to `path` when asked by signal `number`.

    The handler is C and needs no interpreter lock. Empty where there is no such handler, or it does not answer within
    a second (a process that is stopped does not).
    """
    if not catches(pid, number):
        return []
    try:
        before = path.stat().st_size
        os.kill(pid, number)
    except OSError:
        return []
    text = _settled(lambda: path.read_bytes()[before:])
    return parse_stacks(text.decode(errors="replace"), main_thread)


def _settled(read: Callable[[], bytes]) -> bytes:
    """What `read` gives once it has given the same twice, and something; or after `_DUMP_S`."""
    deadline, last = time.monotonic() + _DUMP_S, b""
    while time.monotonic() < deadline:
        time.sleep(0.02)
        try:
            now = read()
        except OSError:
            return last
        if now and now == last:
            break
        last = now
    return last


def parse_stacks(text: str, main_thread: int | None) -> list[ThreadStack]:
    """Stacks in faulthandler's format; the one of `main_thread` first."""
    threads: list[tuple[int, str, list[str]]] = []
    for line in text.splitlines():
        if head := _THREAD.match(line):
            number = int(head["id"], 16)
            name = head["name"] or ("MainThread" if number == main_thread else f"0x{number:x}")
            threads.append((number, name, []))
        elif (frame := _FRAME.match(line)) and threads:
            threads[-1][2].append(f"{frame['file']}:{frame['line']} {frame['function']}")
    threads.sort(key=lambda thread: thread[0] != main_thread)
    return [ThreadStack(name=name, frames=tuple(frames)) for _, name, frames in threads]


def fatal_in(path: Path, main_thread: int | None) -> tuple[RankExit | None, list[ThreadStack]]:
    """How a process ended by its faulthandler's own account, and where it was then; (None, []) if it left none."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return None, []
    found = list(_FATAL.finditer(text))
    if not found:
        return None, []
    name = _FATAL_SIGNALS.get(found[-1]["what"])
    ended = RankExit(signal=name) if name else RankExit(exception=found[-1]["what"])
    return ended, parse_stacks(text[found[-1].start() :], main_thread)
