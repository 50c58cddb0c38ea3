"""One rank as a process: its topology, its log, the process group, and its exit code.

Must not know what is run between opening and closing the process group.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import TypeAlias

import torch

from aorta.config.resolve import Resolved
from aorta.distributed.environment_checks import refuse_two_tracers
from aorta.distributed.peers import Peers
from aorta.distributed.process_group import process_group
from aorta.distributed.topology import Topology, read_topology, select_device
from aorta.errors import EXIT_OK, SIGNAL_EXIT_BASE
from aorta.runner.logs import start_logging

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
