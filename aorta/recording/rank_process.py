"""One rank as a process: its topology, its log, the process group, and its exit code.

Everything is logged to the rank's file; rank 0's messages and every rank's warnings go to the terminal too. In a user's
program (`meet`) the process group is the default one, or none in a single process, and ranks communicate under a prefix
of their own in its store. Must not let warnings of other packages reach the terminal, or issue a collective in a group
of the caller's, where it would be counted as the caller's.
"""

from __future__ import annotations

import io
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import TypeAlias

import torch
import torch.distributed as dist

from aorta.config.fabric import emulated_ranks
from aorta.config.resolve import Resolved, environment_number
from aorta.distributed import cuda
from aorta.distributed.environment_checks import refuse_two_tracers
from aorta.distributed.peers import Peers
from aorta.distributed.topology import Topology, process_group, read_topology, select_device, share_device
from aorta.errors import EXIT_OK, SIGNAL_EXIT_BASE, ConfigError
from aorta.recording.meeting import default_store, joined
from aorta.records.files import open_own, shared_folder
from aorta.redaction import redact
from aorta.terminal_style import printable

EVERY_RANK = {"every_rank": True}
"""`extra` of messages that every rank shows on the terminal."""

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class _Terminal(logging.Handler):
    """Shows rank 0's messages, messages marked `EVERY_RANK`, and warnings of any rank with its number; above a progress
    bar, not in it.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(logging.INFO)
        self._rank, self._prefix = rank, f"[rank {rank}] " if world_size > 1 else ""

    def emit(self, record: logging.LogRecord) -> None:
        from tqdm import tqdm

        loud = record.levelno >= logging.WARNING
        if not record.name.startswith("aorta") or not (loud or self._rank == 0 or hasattr(record, "every_rank")):
            return
        prefix, level = (self._prefix, f"{record.levelname.lower()}: ") if loud else ("", "")
        with suppress(OSError, ValueError):  # a closed terminal or pipe must not end the training
            # One write for the line and its end, so that another rank's line cannot come between.
            tqdm.write(f"{printable(prefix + level + record.getMessage())}\n", file=sys.stderr, end="")


class _LogFile(logging.FileHandler):
    """Writes no secrets, and ignores a full disk, for which the record raises an error."""

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))

    def _open(self) -> io.TextIOWrapper:
        return io.TextIOWrapper(io.BufferedWriter(open_own(Path(self.baseFilename), new=True)), encoding="utf-8")

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
    """Write everything to `path` as well, for the length of a `with` block."""
    shared_folder(path.parent)
    handler = _LogFile(path)
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
    """Run `body`; returns the exit code: 0, or 128 + n after a clean stop by signal n. Anything else is an AortaError.

    Args:
        leave_together: no rank leaves before all are done. Not for a body that continues without ranks that died.
    """
    refuse_two_tracers(resolved.config.profiling.enabled, os.environ)
    topology = read_topology()
    start_logging(topology.rank, topology.world_size)
    sharing = resolved.config.training.ranks_per_device
    device = select_device(resolved.config.training.device, topology.local_rank, sharing)
    if sharing > 1 and device.type == cuda.TYPE:
        share_device(topology.rank, cuda.nccl_version())
    ranks = emulated_ranks(resolved.config.fabric)
    with process_group(topology, device, resolved.config.training.timeout_s, ranks) as peers:
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


_recordings = count()


def meet(timeout_s: float, who: str = "aorta.record") -> tuple[Topology, Peers]:
    """Return this rank's topology and its peers; every rank of the group must call it. `who` stands in error messages.

    Raises:
        ConfigError: the launcher's variables name other ranks, but no process group is open.
        PeerFailed: another rank did not call it within `timeout_s`.
        InstrumentError: this torch does not expose the store of a process group.
    """
    if (meeting := joined.get()) is not None and meeting.peers is not None:
        rank, peers = meeting.peers.rank, meeting.peers
    elif not (dist.is_available() and dist.is_initialized()):
        promised = environment_number("WORLD_SIZE", 1)
        if promised > 1:
            raise ConfigError(
                f"{who}: WORLD_SIZE={promised}, but torch.distributed is not initialised; call "
                "torch.distributed.init_process_group first, or unset WORLD_SIZE"
            )
        rank, peers = 0, Peers(dist.HashStore(), 0, 1, timeout_s)
    else:
        # The count is the same on every rank: a second recording must not read what the first one left.
        store = dist.PrefixStore(f"aorta/recording_{next(_recordings)}", default_store())
        rank, peers = dist.get_rank(), Peers(store, dist.get_rank(), dist.get_world_size(), timeout_s)
    # From host names, since the launcher's variables may belong to something else.
    hosts = peers.gather("host", socket.gethostname())
    index = peers.ranks.index(rank)
    topology = Topology(
        rank=rank,
        world_size=peers.world_size,
        local_rank=hosts[:index].count(hosts[index]),
        local_world_size=hosts.count(hosts[index]),
        node_rank=list(dict.fromkeys(hosts)).index(hosts[index]),
        restart_count=environment_number("TORCHELASTIC_RESTART_COUNT", 0),
        elastic_run_id=os.environ.get("TORCHELASTIC_RUN_ID"),
        host=hosts[index],
        pid=os.getpid(),
    )
    return topology, peers
