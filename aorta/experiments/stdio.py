"""Output for whoever started us, who may have closed the terminal meanwhile.

Must not let a plan or a sweep lose its exit code or its journal over text that nobody can read.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress


def to_stderr(line: str) -> None:
    """Write a line to stderr."""
    with tolerate_closed_terminal():
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


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
