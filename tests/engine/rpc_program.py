"""RPC runs one after another in one launch, or one whose second worker dies: `python -m tests.engine.rpc_program`."""

from __future__ import annotations

import os
import signal
import sys

import torch.distributed as dist

from aorta.capture.rpc_window import WorkerWindow
from aorta.engine.logs import start_logging
from aorta.engine.rpc import RpcRun
from aorta.launch.peers import Peers
from aorta.launch.process_group import process_group
from aorta.launch.topology import read_topology, select_device
from tests.loop import resolved


def main(folder: str, how: str) -> None:
    """`how`: "threads" for runs of 1, 4 and 16 server threads, "dies" for a worker that is killed before it saves."""
    topology = read_topology()
    start_logging(topology.rank, topology.world_size)
    base = ("workload=rpc", "profiling.enabled=true", "training.device=cpu", "training.timeout_s=60")
    cases = {
        f"threads{threads}": (
            f"workload.num_worker_threads={threads}",
            "workload.windows=20",
            "workload.calls=3",
            f"profiling.record_shapes={str(threads == 4).lower()}",
        )
        for threads in (1, 4, 16)
    }
    if how == "dies":
        cases = {"dies": ("workload.windows=3", "workload.calls=6", "workload.timeout_s=5")}
        if topology.rank == 1:
            WorkerWindow.stop = lambda self, path: os.kill(os.getpid(), signal.SIGKILL)
    device = select_device(resolved(*base).config.training.device, topology.local_rank)
    with process_group(topology, device, 60.0) as peers:
        for label, words in cases.items():
            run = resolved(*base, *words, f"training.output_dir={folder}", f"label={label}")
            own = Peers(dist.PrefixStore(label, peers.store), topology.rank, topology.world_size, 60.0)
            RpcRun(run, topology, device, own).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
