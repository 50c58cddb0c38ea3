"""Words for whoever started us, who may have closed the terminal meanwhile.

Must not: let a plan or a sweep lose its exit code or its journal over words that nobody can read.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress


def say(text: str) -> None:
    """Write to stderr."""
    with unheard():
        sys.stderr.write(text)
        sys.stderr.flush()


def tell(text: str) -> None:
    """Write to stdout."""
    with unheard():
        sys.stdout.write(text)
        sys.stdout.flush()


@contextmanager
def unheard() -> Iterator[None]:
    """Where a write fails inside (EIO: the terminal is closed), nothing is said any more."""
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
