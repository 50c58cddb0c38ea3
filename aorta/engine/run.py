"""The composition root: one rank's run, from a resolved configuration to an exit code.

Enters: `Resolved`. Leaves: a record, a manifest, logs, traces and checkpoints in the run's folder. Must not: compute a
metric, or know how anything it wires works inside.
"""

from __future__ import annotations

import torch.distributed as dist

from aorta.config.resolve import Resolved
from aorta.engine.logs import start_logging
from aorta.engine.training import Training
from aorta.errors import EXIT_OK, AortaError, PeerFailed, RunIncomplete
from aorta.launch.peers import Peers
from aorta.launch.process_group import process_group
from aorta.launch.topology import read_topology, select_device

EXIT_SIGNAL_BASE = 128
_COMMUNICATION_WORDS = ("gloo", "nccl", "connection", "timed out", "timeout", "socket")


def run_training(resolved: Resolved) -> int:
    """Run, and return the process's exit code: 0, or 128 + n after a clean stop by signal n.

    Raises:
        AortaError: with the words and the exit code for everything else.
    """
    topology = read_topology()
    start_logging(topology.rank, topology.world_size)
    device = select_device(resolved.config.training.device, topology.local_rank)
    with process_group(topology, device, resolved.config.training.timeout_s) as peers:
        try:
            stopped_by = Training(resolved, topology, device, peers).run()
        except AortaError as error:
            peers.report_failure(str(error), own=not isinstance(error, PeerFailed))
            raise
        except Exception as error:
            raise _explained(error, peers) from error
        # Leave together: a rank that is gone early looks like a failure to one that still has to write.
        peers.gather("done", True)
    return EXIT_OK if stopped_by is None else EXIT_SIGNAL_BASE + stopped_by


def _explained(error: Exception, peers: Peers) -> RunIncomplete:
    """What ended this rank, in words: its own fault, or that of a peer, who is named."""
    text = f"{type(error).__name__}: {str(error).strip() or 'no message'}"
    if peers.world_size > 1 and _is_communication(error):
        peers.report_failure(text, own=False)
        return PeerFailed(f"rank {peers.rank}: a collective failed because of a peer: {peers.diagnose()} ({text})")
    peers.report_failure(text, own=True)
    return RunIncomplete(f"rank {peers.rank}: {text}; the traceback is in its log file")


def _is_communication(error: Exception) -> bool:
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _COMMUNICATION_WORDS)
