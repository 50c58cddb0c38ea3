"""Run on every rank: FSDP's loop beside two threads that issue all-reduces and never sleep.

Arguments: a folder, and how many each thread issues. Leaves: the run folder of `aorta.record`.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import aorta

ITEMS = 1000
"""Of each all-reduce of the threads; nothing else of the loop has as many."""
THREADS = 2


def main(folder: Path, count: int) -> None:
    """Train until the threads are done."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    torch.manual_seed(0)
    model = nn.Sequential(*(fully_shard(nn.Linear(32, 32, device=device)) for _ in range(3)))
    fully_shard(model)
    optimizer, x = torch.optim.SGD(model.parameters(), 1e-3), torch.randn(8, 32, device=device)

    def talk(group: dist.ProcessGroup) -> None:
        # A stream of its own: on one, collectives of two groups in other orders wait for each other for ever.
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(count):
                dist.all_reduce(torch.ones(ITEMS, device=device), group=group)

    threads = [threading.Thread(target=talk, args=(dist.new_group(),)) for _ in range(THREADS)]
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
    main(Path(sys.argv[1]), int(sys.argv[2]))
