"""One rank as a process: its topology, its log, the process group, and its exit code.

Everything is logged to the rank's file, rank 0's messages and every rank's warnings also to the terminal. Must not know
what is run between opening and closing the process group, or let warnings of other packages reach the terminal.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeAlias

import torch

from aorta.config.resolve import Resolved
from aorta.distributed.environment_checks import refuse_two_tracers
from aorta.distributed.peers import Peers
from aorta.distributed.process_group import process_group
from aorta.distributed.topology import Topology, read_topology, select_device
from aorta.errors import EXIT_OK, SIGNAL_EXIT_BASE

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


Body: TypeAlias = Callable[[Resolved, Topology, torch.device, Peers], signal.Signals | None]
"""Code that a rank runs while its process group is open; returns the signal that ended it early, if any."""


def run_rank(resolved: Resolved, body: Body, *, leave_together: bool) -> int:
    """Run `body`, and return the process's exit code: 0, or 128 + n after a clean stop by signal n.

    Args:
        leave_together: no rank leaves before all are done. Not for a body that continues without ranks that died.

    Raises:
        AortaError: for everything else, with its message and exit code.
    """
    refuse_two_tracers(resolved.config.profiling.enabled, os.environ)
    topology = read_topology()
    start_logging(topology.rank, topology.world_size)
    device = select_device(resolved.config.training.device, topology.local_rank)
    with process_group(topology, device, resolved.config.training.timeout_s) as peers:
        try:
            stopped_by = body(resolved, topology, device, peers)
        except Exception as error:
            explained = peers.explain(error)
            if explained is error:
                raise
            raise explained from error
        if leave_together:
            # A rank that leaves early looks like a failure to one that is still writing.
            peers.gather("done", True)
    return EXIT_OK if stopped_by is None else SIGNAL_EXIT_BASE + stopped_by
