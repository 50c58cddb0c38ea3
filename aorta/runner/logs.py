"""Logging: everything to the rank's log file, rank 0's messages and every rank's warnings to the terminal.

Must not let third-party warnings reach the terminal; they are in the log file.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

EVERY_RANK = {"every_rank": True}
"""`extra` of messages that every rank shows on the terminal."""

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class _Terminal(logging.Handler):
    """Shows rank 0's own messages, messages marked `EVERY_RANK`, and warnings of any rank with its number. Writes
    above a progress bar, not into it.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(logging.INFO)
        self._rank = rank
        self._prefix = f"[rank {rank}] " if world_size > 1 else ""
        self.addFilter(self._wanted)

    def _wanted(self, record: logging.LogRecord) -> bool:
        loud = record.levelno >= logging.WARNING or self._rank == 0 or hasattr(record, "every_rank")
        return loud and record.name.startswith("aorta")

    def emit(self, record: logging.LogRecord) -> None:
        from tqdm import tqdm

        prefix = self._prefix if record.levelno >= logging.WARNING else ""
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        with suppress(OSError, ValueError):  # a closed terminal or pipe must not end the training
            # One write for the line and its end, so that another rank's line cannot come between.
            tqdm.write(f"{prefix}{level}{record.getMessage()}\n", file=sys.stderr, end="")


class _LogFile(logging.FileHandler):
    """Ignores write errors (a full disk): the record raises an error for the same reason, which is the one to be
    seen.
    """

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  logging's name
        pass


def start_logging(rank: int, world_size: int) -> None:
    """Start logging: only to the terminal, until the run's folder is known."""
    root = logging.getLogger()
    for handler in list(root.handlers):
        root.removeHandler(handler)
    root.setLevel(logging.INFO)
    logging.getLogger("aorta").setLevel(logging.DEBUG)
    root.addHandler(_Terminal(rank, world_size))
    logging.captureWarnings(True)


@contextmanager
def log_to(path: Path) -> Iterator[None]:
    """Also write everything to `path`, for the length of a `with` block."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = _LogFile(path, mode="w", encoding="utf-8")
    handler.setFormatter(logging.Formatter(_FORMAT))
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        with suppress(OSError):
            handler.close()
