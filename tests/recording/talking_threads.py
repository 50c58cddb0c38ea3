"""Run on every rank: a loop beside two threads that issue all-reduces and never sleep.

    torchrun --nproc_per_node 2 -m tests.recording.talking_threads FOLDER 5000 ddp native

Arguments: the folder, how many each thread issues, `ddp` or `fsdp`, and `native` or `python`. Leaves: the run folder of
`aorta.record`, on the CPU or on the device that the process has.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import aorta
from aorta.instrument import instrumentation

ITEMS = 1000
"""Of each all-reduce of the threads; nothing else of the loop has as many."""
THREADS = 2


def main(folder: Path, count: int, strategy: str, timed: str) -> None:
    """Train until the threads are done."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(32, 32, device=device) for _ in range(3)))
    model: nn.Module = DistributedDataParallel(layers) if strategy == "ddp" else layers
    if strategy == "fsdp":
        for layer in layers:
            fully_shard(layer)
        fully_shard(layers)
    optimizer, x = torch.optim.SGD(model.parameters(), 1e-3), torch.randn(8, 32, device=device)
    groups = [dist.new_group() for _ in range(THREADS)]

    def talk(group: dist.ProcessGroup) -> None:
        # A stream of its own: on one, collectives of two groups in other orders wait for each other for ever.
        with torch.cuda.stream(torch.cuda.Stream()) if device.type == "cuda" else nullcontext():
            for _ in range(count):
                dist.all_reduce(torch.ones(ITEMS, device=device), group=group)

    threads = [threading.Thread(target=talk, args=(group,)) for group in groups]
    if timed == "python":
        instrumentation.compiled = lambda *_, **__: (None, "not wanted")  # type: ignore[assignment]
    with aorta.record(folder, model=model, calibration="off") as recording:
        for thread in threads:
            thread.start()
        going = torch.ones(1, device=device)
        while going.item():  # the same number of steps on every rank
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            going = torch.tensor([float(any(map(threading.Thread.is_alive, threads)))], device=device)
            dist.all_reduce(going)
            recording.step()
        for thread in threads:
            thread.join()
        recording.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
