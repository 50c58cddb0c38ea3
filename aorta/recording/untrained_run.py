"""Opens the run of a workload that trains nothing, and so has no record of steps.

Must not wait for a rank longer than its peers do.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from aorta.config.resolve import Resolved
from aorta.distributed.clock_measurement import ClockSynchronisation
from aorta.distributed.output_folder import RequestedConfig, occupied, prepare, rank_facts
from aorta.distributed.peers import Peers
from aorta.distributed.topology import Topology
from aorta.recording.rank_process import log_to
from aorta.recording.recorded_run import publish_manifest
from aorta.recording.run_request import RunSite

_log = logging.getLogger(__name__)


@contextmanager
def untrained_run(
    resolved: Resolved,
    topology: Topology,
    device: torch.device,
    peers: Peers,
    backend: str | None,
    plan: Mapping[str, Any],
) -> Iterator[tuple[RunSite, ClockSynchronisation]]:
    """Open the run of a workload that trains nothing: a fresh folder with manifest, clocks and log; collective. Yields
    the site and the clocks, which the caller measures again at the end.

    Raises:
        ConfigError: another run uses the folder. PeerFailed: a rank did not take part.
    """
    config = resolved.config
    base = Path(config.training.output_dir) / (config.label or "")
    with occupied(base, topology, peers) as folder, ExitStack() as stack:
        prepare(folder, topology, peers, overwrite=config.training.overwrite, resuming=False)
        stack.enter_context(log_to(folder.log(topology.rank)))
        for note in resolved.notes if topology.rank == 0 else ():
            _log.warning(note)
        site = RunSite(folder, topology, device, peers)
        clocks = ClockSynchronisation(config.clock, peers, topology, folder)
        clocks.at_start()
        ranks = peers.gather("facts", rank_facts(topology, device))
        asked = RequestedConfig(config.label, resolved.plain, resolved.manifest_hash)
        publish_manifest(site, asked, clocks, ranks, backend, plan)
        yield site, clocks
