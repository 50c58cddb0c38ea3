"""An RPC run whose second worker dies: `python -m tests.rpc.rpc_program FOLDER`, on each rank."""

from __future__ import annotations

import os
import signal
import sys

from aorta.distributed import clock_measurement
from aorta.distributed.process_group import process_group
from aorta.distributed.topology import read_topology, select_device
from aorta.rpc.rpc_run import RpcRun, WorkerWindow
from aorta.runner.rank_process import start_logging
from tests.loop import resolved


def main(folder: str) -> None:
    """Rank 1 is killed when it is to save its first window. Its clock is waited for at the end, in vain: less long."""
    clock_measurement._COMES_S = 4.0
    topology = read_topology()
    start_logging(topology.rank, topology.world_size)
    words = ("workload=rpc", "workload.windows=3", "workload.calls=7", "workload.timeout_s=12", "label=dies")
    base = ("profiling.enabled=true", "training.device=cpu", "training.timeout_s=60", f"training.output_dir={folder}")
    if topology.rank == 1:
        WorkerWindow.stop = lambda self, path: os.kill(os.getpid(), signal.SIGKILL)
    run = resolved(*words, *base)
    device = select_device(run.config.training.device, topology.local_rank)
    with process_group(topology, device, 60.0) as peers:
        RpcRun(run, topology, device, peers).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
