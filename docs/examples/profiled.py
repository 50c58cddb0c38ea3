"""Windows of torch.profiler in a training loop of one's own, without a record: the three lines are marked.

torchrun --nproc_per_node 2 docs/examples/profiled.py [FOLDER]
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import aorta  # AORTA, line 1

STEPS, BATCH, WIDTH = 12, 32, 64


def main(folder: str) -> None:
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    mesh = init_device_mesh(device.type, (1, dist.get_world_size()), mesh_dim_names=("pp", "dp"))
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1)).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    # AORTA, line 2: of every 6 steps the last 2 are kept, after 1 of warm-up
    with aorta.Profiler(folder, period_steps=6, warmup_steps=1, active_steps=2, dist_context=mesh) as profiler:
        for _ in range(STEPS):
            loss = model(torch.randn(BATCH, 16, device=device)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            profiler.step()  # AORTA, line 3
    for moment, paths in profiler.saved_traces:
        print(f"rank {dist.get_rank()}: after {moment.batch} steps {paths[dist.get_rank()]}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "artifacts/profiled_example")
