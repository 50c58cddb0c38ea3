"""Stacks of a running rank, and of a rank that a fatal signal ends, by faulthandler.

A rank writes its stacks to a file: on request, and when a fatal signal ends it. A thread of the rank answers requests
from a socket, with the interpreter lock held: nothing else may walk the frames of other threads, which change under a
signal handler's feet and would crash a healthy rank (CPython, Modules/faulthandler.c, says so of `all_threads`). A rank
in which compiled code keeps the lock cannot answer. It is asked by a signal then, whose handler needs no lock, and
writes the stack of the thread that it interrupts alone: of the main thread.

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
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final

from aorta.autopsy.evidence import RankExit, ThreadStack
from aorta.records.files import OF_THIS_PROCESS, open_own, read_small
from aorta.records.process import PROC, start_ticks
from aorta.records.progress import ProgressFacts

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
        The signal that asks for the main thread's stack, which nothing else used; None where all are used.

    Raises:
        OSError: `path` cannot be written.
    """
    with open_own(path, new=True) as file, ExitStack() as stack:
        OF_THIS_PROCESS.add(file.fileno())  # a worker that dies by a signal is not the rank
        stack.callback(OF_THIS_PROCESS.discard, file.fileno())
        free = range(signal.SIGRTMAX - 1, signal.SIGRTMIN, -1)
        number = next((number_free for number_free in free if signal.getsignal(number_free) == signal.SIG_DFL), None)
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
    """Answer requests in a thread; where there can be no socket, they stay without an answer."""
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
        if thread.is_alive():  # not in a forked child
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
                names = "".join(
                    f"Name 0x{thread.ident:x} {thread.name}\n" for thread in threading.enumerate() if thread.ident
                )
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
    deadline, last = time.monotonic() + _ANSWER_S, b""
    while time.monotonic() < deadline:  # until it has been the same twice, and something
        time.sleep(0.02)
        try:
            now = read_small(path)[before:]
        except OSError:
            break
        if now and now == last:
            break
        last = now
    stacks = parse_stacks(last.decode(errors="replace"), facts.main_thread)
    return [stack for stack in stacks if not (stack.frames and stack.frames[0].startswith(f"{__file__}:"))]


def _signal(facts: ProgressFacts, progress_file: Path) -> None:
    """Send a process of this user the signal that asks for its stack, if it catches it and has mapped the file."""
    pid, number, process = facts.pid, facts.stack_signal, PROC / str(facts.pid)
    if number is None or not signal.SIGRTMIN <= number <= signal.SIGRTMAX:
        return
    opened = os.pidfd_open(pid)  # a later process with this pid is another
    try:
        name = os.fsencode(progress_file.resolve()).replace(b"\n", rb"\012")  # as proc(5) writes it
        mapped = [line.split(maxsplit=5)[5:] for line in (process / "maps").read_bytes().split(b"\n")]
        status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines() if ":" in line)
        catches = int(status.get("SigCgt", "0"), 16) >> (number - 1) & 1
        ours = process.stat().st_uid == os.geteuid() and start_ticks(pid) == facts.start_ticks
        if ours and [name] in mapped and catches:
            signal.pidfd_send_signal(opened, number)
    finally:
        os.close(opened)


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
    by_main = sorted(threads.items(), key=lambda item: item[0] != main_thread)
    return [ThreadStack(name=name, frames=tuple(frames)) for _, (name, frames) in by_main]


def fatal_ending(path: Path, main_thread: int | None) -> tuple[RankExit, list[ThreadStack]] | None:
    """Return the fatal signal that ended the rank which writes its stacks to `path`, and its stacks then; None where
    there was none.
    """
    try:
        text = read_small(path).decode(errors="replace")
    except OSError:
        return None
    if not (fatal := list(_FATAL.finditer(text))):
        return None
    what = fatal[-1]["what"]
    name = _FATAL_SIGNALS.get(what)
    ended = RankExit(signal=name) if name else RankExit(exception=what)
    return ended, parse_stacks(text[fatal[-1].start() :], main_thread)
