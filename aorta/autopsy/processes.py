"""Processes of this host as /proc shows them, and the stacks of a rank, written to a file by its faulthandler: on
request, and when a fatal signal ends it.

A thread of the rank answers requests from a socket, with the interpreter lock held: nothing else may walk the
frames of other threads, which change under a signal handler's feet and would crash a healthy rank (CPython,
Modules/faulthandler.c, says so of `all_threads`). A rank in which compiled code keeps the lock cannot answer. It is
asked by a signal then, whose handler needs no lock, and writes the stack of the thread that it interrupts alone: of the
main thread.

Must not end or stop a process, or send a signal that is not a real-time one, or to a process that does not catch it or
has not mapped the progress file which names it: anybody may write such a file.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

from aorta.autopsy.evidence import ProcessState, RankExit, ThreadStack
from aorta.records.files import OF_THIS_PROCESS, read_small
from aorta.records.progress_file import ProgressFacts

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
    try:
        status = (_PROC / str(pid) / "status").read_text()
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


_THREAD: Final = re.compile(
    r"^(?:(?:Current thread|Thread) 0x(?P<id>[0-9a-f]+)(?: \[(?P<name>.*)\])?|Stack) \(most recent"
)
_NAMED: Final = re.compile(r"^Name 0x(?P<id>[0-9a-f]+) (?P<name>.*)$")
"""A line of our own: faulthandler gives threads no names (CPython 3.11 to 3.13)."""
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
_ANSWER_S: Final = 1.0
_CREDENTIALS: Final = struct.Struct("3i")  # pid, uid, gid: struct ucred of unix(7)


@contextmanager
def stacks_on_request(path: Path) -> Iterator[int | None]:
    """Have this process write its stacks to `path` when `stacks_of` asks, and on a fatal signal unless the program has
    faulthandler on already, for the length of a `with` block.

    Yields:
        The signal that asks for the main thread's stack, which nobody used; None where all are used.

    Raises:
        OSError: `path` cannot be written.
    """
    with path.open("wb", buffering=0) as file, ExitStack() as stack:
        OF_THIS_PROCESS.add(file.fileno())  # a worker that dies by a signal is not the rank
        stack.callback(OF_THIS_PROCESS.discard, file.fileno())
        free = range(signal.SIGRTMAX - 1, signal.SIGRTMIN, -1)
        number = next((each for each in free if signal.getsignal(each) == signal.SIG_DFL), None)
        if number is not None:
            faulthandler.register(number, file=file, all_threads=False)
            stack.callback(faulthandler.unregister, number)
        if not faulthandler.is_enabled():
            faulthandler.enable(file=file, all_threads=True)
            stack.callback(faulthandler.disable)
        stack.enter_context(_answering(file))
        yield number


@contextmanager
def _answering(file: BinaryIO) -> Iterator[None]:
    """Answer requests in a thread; where there can be no socket, nobody answers."""
    try:
        server = socket.socket(socket.AF_UNIX)
        server.bind(_address(os.getpid(), start_ticks(os.getpid())))
    except OSError:
        yield
        return
    server.setblocking(True)  # whatever the program's default is
    server.listen()
    OF_THIS_PROCESS.add(server.fileno())
    thread = threading.Thread(target=_answer, args=(server, file), name="aorta stacks", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closing it would not
        thread.join()
        OF_THIS_PROCESS.discard(server.fileno())
        server.close()


def _answer(server: socket.socket, file: BinaryIO) -> None:
    while True:
        try:
            asker, _ = server.accept()
        except OSError:
            return
        with asker:
            _, user, _ = _CREDENTIALS.unpack(asker.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
            if user in (0, os.geteuid()):
                faulthandler.dump_traceback(file, all_threads=True)
                names = "".join(f"Name 0x{each.ident:x} {each.name}\n" for each in threading.enumerate() if each.ident)
                with suppress(OSError):  # as faulthandler, to which a full disk is no error
                    file.write(names.encode())


def _address(pid: int, ticks: int) -> str:
    """Return the address of an abstract socket (unix(7)), which is no file and ends with the process."""
    return f"\0aorta-stacks-{pid}-{ticks}"


def stacks_of(facts: ProgressFacts, progress_file: Path, path: Path) -> list[ThreadStack]:
    """Return the stacks of a running rank, which writes them to `path`; of its main thread alone, where compiled code
    keeps the interpreter lock. Empty where it does not answer within two seconds (a process that is stopped does not).
    """
    try:
        before = path.stat().st_size
        answered = False
        with socket.socket(socket.AF_UNIX) as asker, suppress(OSError):
            asker.settimeout(_ANSWER_S)
            asker.connect(_address(facts.pid, facts.start_ticks))
            answered = asker.recv(1) == b""
        if not answered:
            _signal(facts, progress_file)
    except OSError:
        return []
    text = _settled(lambda: read_small(path)[before:]).decode(errors="replace")
    stacks = parse_stacks(text, facts.main_thread)
    return [each for each in stacks if not (each.frames and each.frames[0].startswith(f"{__file__}:"))]


def _signal(facts: ProgressFacts, progress_file: Path) -> None:
    pid, number = facts.pid, facts.stack_signal
    if number is None or not signal.SIGRTMIN <= number <= signal.SIGRTMAX:
        return
    process = os.pidfd_open(pid)  # a later process with this pid is another
    try:
        if start_ticks(pid) == facts.start_ticks and has_mapped(pid, progress_file) and catches(pid, number):
            signal.pidfd_send_signal(process, number)
    finally:
        os.close(process)


def _settled(read: Callable[[], bytes]) -> bytes:
    """Return what `read` gives once it has given the same twice, and something; or after `_ANSWER_S`."""
    deadline, last = time.monotonic() + _ANSWER_S, b""
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
    """Parse faulthandler's stacks; that of `main_thread` first, as is one without a thread's name."""
    threads: dict[int | None, tuple[str, list[str]]] = {}
    frames: list[str] = []
    for line in text.splitlines():
        if head := _THREAD.match(line):
            number = int(head["id"], 16) if head["id"] else main_thread
            name = "MainThread" if number == main_thread else f"0x{number:x}"
            frames = []
            threads.setdefault(number, (head["name"] or name, frames))
        elif frame := _FRAME.match(line):
            frames.append(f"{frame['file']}:{frame['line']} {frame['function']}")
        elif (named := _NAMED.match(line)) and int(named["id"], 16) in threads:
            threads[int(named["id"], 16)] = (named["name"], threads[int(named["id"], 16)][1])
    by_main = sorted(threads.items(), key=lambda each: each[0] != main_thread)
    return [ThreadStack(name=name, frames=tuple(frames)) for _, (name, frames) in by_main]


def fatal_in(path: Path, main_thread: int | None) -> tuple[RankExit | None, list[ThreadStack]]:
    """Return how a process ended by its faulthandler's account, and its stacks then; (None, []) if it left none."""
    try:
        text = read_small(path).decode(errors="replace")
    except OSError:
        return None, []
    found = list(_FATAL.finditer(text))
    if not found:
        return None, []
    name = _FATAL_SIGNALS.get(found[-1]["what"])
    ended = RankExit(signal=name) if name else RankExit(exception=found[-1]["what"])
    return ended, parse_stacks(text[found[-1].start() :], main_thread)
