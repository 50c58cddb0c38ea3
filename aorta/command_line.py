"""How a command of AORTA ends: an error is one line on stderr and an exit code, never a traceback.

    @command()
    def main(arguments: Sequence[str]) -> int:
        options = parser().parse_args(arguments)  # argparse itself ends with 0 or 2
        ...                                       # raise InputError, GateFailed, ...: `errors` has their exit codes
        return EXIT_OK

Must not let a command lose its exit code or its journal over text that nobody can read (whoever started it may have
closed the terminal meanwhile), or catch an error that AORTA did not raise on purpose.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial, wraps
from pathlib import Path
from typing import ParamSpec

from aorta.errors import SIGNAL_EXIT_BASE, AortaError, PeerFailed, ToolMissing
from aorta.installation import what_to_install
from aorta.rank_errors import say_once
from aorta.terminal_style import style_of

_Arguments = ParamSpec("_Arguments")


def command(speaker: str = "error") -> Callable[[Callable[_Arguments, int]], Callable[_Arguments, int]]:
    """Make a function a command: an `AortaError` that it raises becomes the line `error: ...` and its exit code.

    Args:
        speaker: what stands before the message.
    """

    def decorate(main: Callable[_Arguments, int]) -> Callable[_Arguments, int]:
        @wraps(main)
        def ended(*arguments: _Arguments.args, **named: _Arguments.kwargs) -> int:
            if isinstance(sys.stdout, io.TextIOWrapper):
                sys.stdout.reconfigure(errors="backslashreplace")  # names of files need not be UTF-8
            try:
                return main(*arguments, **named)
            except AortaError as error:
                say_once(str(error), partial(_say, speaker), of_a_peer=isinstance(error, PeerFailed))
                return error.exit_code
            except ModuleNotFoundError as missing:
                advice = what_to_install(missing.name)
                if advice is None:
                    raise
                say_once(advice, partial(_say, speaker))
                return ToolMissing.exit_code
            except KeyboardInterrupt:
                to_stderr("interrupted")
                return SIGNAL_EXIT_BASE + signal.SIGINT

        return ended

    return decorate


def _say(speaker: str, ranks: str, message: str) -> None:
    """Write an error, and which ranks had it where there are several."""
    who = f"{speaker} ({ranks}):" if ranks else f"{speaker}:"
    to_stderr(f"{style_of(sys.stderr).error(who)} {message}")


def to_stderr(line: str) -> None:
    """Write a line to stderr."""
    with tolerate_closed_terminal():
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


def shown_path(path: Path) -> str:
    """A path as a person in the current directory would write it: relative below it, otherwise as it is."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_absolute() and path.is_relative_to(here) else str(path)


def to_stdout(line: str) -> None:
    """Write a line to stdout."""
    with tolerate_closed_terminal():
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


@contextmanager
def tolerate_closed_terminal() -> Iterator[None]:
    """Wrap writing to stdout or stderr: where that fails (EIO: the terminal is closed), the text is lost, no more."""
    try:
        yield
    except OSError:
        # What is left in a buffer would fail again when the interpreter ends, which then ends with 120.
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:
                with suppress(OSError):
                    nowhere = os.open(os.devnull, os.O_WRONLY)
                    os.dup2(nowhere, stream.fileno())
                    os.close(nowhere)


def rounded_time(seconds: float) -> str:
    """How long something takes, for people: seconds, minutes or hours."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} h"
