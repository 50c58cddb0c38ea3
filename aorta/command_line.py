"""How a command of AORTA ends: an error is one line on stderr and an exit code, never a traceback.

    @command()
    def main(arguments: Sequence[str]) -> int:
        options = parser().parse_args(arguments)  # argparse itself ends with 0 or 2
        ...                                       # raise InputError, GateFailed, ...: `errors` has their exit codes
        return EXIT_OK

Of several ranks rank 0 prints its error. Another rank leaves it in the file that torchrun names in
TORCHELASTIC_ERROR_FILE, for the launcher's summary, and prints only where there is no such file.

Whatever a command prints, argparse, Hydra and tracebacks too, is without secrets (`redaction`). Must not let a command
lose its exit code or journal because the terminal was closed, or catch an error that AORTA did not raise on purpose.
"""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from functools import wraps
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Any, Final, ParamSpec

from aorta.errors import SIGNAL_EXIT_BASE, AortaError, InputError, ToolMissing
from aorta.installation import what_to_install
from aorta.redaction import redact
from aorta.terminal_style import printable, style_of

_INTERRUPTED_S: Final = 2.0
"""From Ctrl-C to the end of a process that ignores it: an import may swallow KeyboardInterrupt, C++ does not see it."""
_ORPHANED_S: Final = 8.0
"""From the end of the launcher, which would have killed its ranks, to that of a rank that waits in C++."""
_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h


def begin_process() -> None:
    """Make this process end when it is interrupted, and as a rank with its launcher; called first, once, by the main
    thread. A handler for SIGINT that is installed later, such as training's, takes over. A standard stream that was
    closed reads and writes nothing.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: PTH123, SIM115
    parent = os.getppid()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent(parent)()
    sys.excepthook = _say_interrupted
    warnings.showwarning = lambda message, *_, **__: to_stderr(f"warning: {message}")
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    threading.Thread(target=_end_when_asked, args=(reader, parent), name="aorta-signals", daemon=True).start()


def _say_interrupted(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error that ends the process as Python does; Ctrl-C during an import is none."""
    if issubclass(kind, KeyboardInterrupt):
        to_stderr("interrupted")
    else:
        to_stderr("".join(traceback.format_exception(kind, error, trace)).rstrip())


def _end_when_asked(reader: int, parent: int) -> None:
    while True:
        (number,) = os.read(reader, 1)
        interrupted = number == signal.SIGINT and signal.getsignal(number) is signal.default_int_handler
        if interrupted or (number == signal.SIGTERM and os.getppid() != parent):
            time.sleep(_INTERRUPTED_S if interrupted else _ORPHANED_S)
            to_stderr("interrupted, and ended at once" if interrupted else "ended, as the launcher is gone")
            os._exit(SIGNAL_EXIT_BASE + number)


def end_with_parent(parent: int) -> Callable[[], None]:
    """Return a function by which a child gets SIGTERM when the thread of process `parent` that started it ends, even by
    SIGKILL (Linux; elsewhere it does nothing).
    """
    if not sys.platform.startswith("linux"):
        return lambda: None
    import ctypes

    library = ctypes.CDLL(None, use_errno=True)  # here: after a fork nothing is loaded

    def ask() -> None:
        library.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it ended before that
            os.kill(os.getpid(), signal.SIGTERM)

    return ask


def name_ranks(ranks: Sequence[int], most: int | None = None) -> str:
    """Return ascending ranks in words: `rank 3`, `ranks 0-2, 5`; `most`: of so many stretches, then `, ...`."""
    runs = [[rank for _, rank in group] for _, group in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])]
    named = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs[:most])
    named += ", ..." if most is not None and len(runs) > most else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {named}"


_Arguments = ParamSpec("_Arguments")


class _Redacting:
    """A text stream to which secrets are not written."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> Any:
        return self._stream.write(redact(text))


def command() -> Callable[[Callable[_Arguments, int]], Callable[_Arguments, int]]:
    """Make a function a command: its `AortaError` becomes the line `error: ...` and the exit code."""

    def decorate(main: Callable[_Arguments, int]) -> Callable[_Arguments, int]:
        @wraps(main)
        def ended(*arguments: _Arguments.args, **named: _Arguments.kwargs) -> int:
            if isinstance(sys.stdout, io.TextIOWrapper):
                sys.stdout.reconfigure(errors="backslashreplace")  # names of files need not be UTF-8
            try:
                with redirect_stdout(_Redacting(sys.stdout)), redirect_stderr(_Redacting(sys.stderr)):
                    return main(*arguments, **named)
            except AortaError as error:
                _say_error(str(error))
                return error.exit_code
            except PermissionError as error:
                _say_error(f"{error.filename}: no permission ({error.strerror}); run as its owner")
                return InputError.exit_code
            except ModuleNotFoundError as missing:
                advice = what_to_install(missing.name)
                if advice is None:
                    raise
                _say_error(advice)
                return ToolMissing.exit_code
            except KeyboardInterrupt:
                to_stderr("interrupted")
                return SIGNAL_EXIT_BASE + signal.SIGINT
            finally:
                with tolerate_closed_terminal():
                    sys.stdout.flush()

        return ended

    return decorate


def _say_error(message: str) -> None:
    """Write an error to stderr on rank 0, and elsewhere where no launcher takes it."""
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        named = message.startswith(tuple(f"rank {rank}{end}" for end in ":, "))
        message = message if named else f"rank {rank}: {message}"
        if _leave_for_launcher(message):
            return
    to_stderr(f"{style_of(sys.stderr).error('error:')} {message}")
    if rank == "0":
        _leave_for_launcher(message)  # behind what was said: the launcher takes it for said


def _leave_for_launcher(message: str) -> bool:
    """Leave an error where torchrun reads it, as its `ErrorHandler` does; return whether that worked."""
    content = {"message": {"message": redact(message), "extraInfo": {"timestamp": str(int(time.time()))}}}
    try:
        with Path(os.environ["TORCHELASTIC_ERROR_FILE"]).open("x") as file:
            json.dump(content, file)
    except (KeyError, OSError):
        return False
    return True


def to_stderr(line: str) -> None:
    """Write a line; nothing where a user's program has no stderr."""
    with tolerate_closed_terminal():
        if sys.stderr is not None:
            sys.stderr.write(f"{printable(line)}\n")
            sys.stderr.flush()


def shown_path(path: Path) -> str:
    """Return a path relative to the current directory if it is below it, otherwise as it is."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_absolute() and path.is_relative_to(here) else str(path)


def to_stdout(line: str) -> None:
    with tolerate_closed_terminal():
        sys.stdout.write(f"{printable(line)}\n")
        sys.stdout.flush()


@contextmanager
def tolerate_closed_terminal() -> Iterator[None]:
    """Wrap writing to stdout or stderr: where the terminal is closed (EIO), only the text is lost."""
    try:
        yield
    except (OSError, ValueError):
        # What is left in a buffer would fail again when the interpreter ends, which then ends with 120.
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                with suppress(OSError, ValueError):
                    nowhere = os.open(os.devnull, os.O_WRONLY)
                    os.dup2(nowhere, stream.fileno())
                    os.close(nowhere)


def rounded_time(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} h"
