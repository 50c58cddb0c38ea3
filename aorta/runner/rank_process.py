"""The composition root: one rank's run, from a resolved configuration to an exit code.

Enters: `Resolved`. Leaves: a record, a manifest, logs, traces and checkpoints in the run's folder. Must not: compute a
metric, or know how anything it wires works inside.
"""

from __future__ import annotations

import os

from aorta.config.resolve import Resolved
from aorta.config.schema import Rpc
from aorta.errors import EXIT_OK, SIGNAL_EXIT_BASE
from aorta.launch.process_group import process_group
from aorta.launch.topology import read_topology, select_device
from aorta.launch.tracers import refuse_two_tracers
from aorta.runner.logs import start_logging
from aorta.runner.rpc_run import RpcRun
from aorta.runner.train import Training


def run_training(resolved: Resolved) -> int:
    """Run, and return the process's exit code: 0, or 128 + n after a clean stop by signal n.

    Raises:
        AortaError: with the words and the exit code for everything else.
    """
    refuse_two_tracers(resolved.config.profiling.enabled, os.environ)
    topology = read_topology()
    start_logging(topology.rank, topology.world_size)
    device = select_device(resolved.config.training.device, topology.local_rank)
    with process_group(topology, device, resolved.config.training.timeout_s) as peers:
        try:
            if isinstance(resolved.config.workload, Rpc):
                RpcRun(resolved, topology, device, peers).run()
                # Also when a worker was lost: what the others saw is kept, and rpc.json says `incomplete`.
                return EXIT_OK
            stopped_by = Training(resolved, topology, device, peers).run()
        except Exception as error:
            explained = peers.explain(error)
            if explained is error:
                raise
            raise explained from error
        # Leave together: a rank that is gone early looks like a failure to one that still has to write.
        peers.gather("done", True)
    return EXIT_OK if stopped_by is None else SIGNAL_EXIT_BASE + stopped_by
