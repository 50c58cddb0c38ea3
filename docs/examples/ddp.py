"""Plain DistributedDataParallel training, recorded by AORTA: the three lines are marked.

torchrun --nproc_per_node 2 docs/examples/ddp.py [FOLDER]
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import aorta  # AORTA, line 1

STEPS, BATCH, WIDTH, LAYERS = 12, 32, 128, 4


class Block(nn.Module):
    """A residual multi-layer perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, WIDTH] to the same."""
        return x + self.mlp(x)


def main(folder: str) -> None:
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    train(device, folder)
    dist.destroy_process_group()  # DDP is gone: as the last to hold the group it can wait for gloo's thread forever


def train(device: torch.device, folder: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, WIDTH), nn.Sequential(*(Block() for _ in range(LAYERS))), nn.Linear(WIDTH, 1))
    model = DistributedDataParallel(net.to(device), bucket_cap_mb=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + dist.get_rank())

    with aorta.record(folder, model=model, parallel="ddp") as recording:  # AORTA, line 2
        for step in range(STEPS):
            x = torch.randn(BATCH, 16, device=device)
            loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            recording.note(loss=loss, lr=1e-3)  # AORTA, if you like
            recording.step()  # AORTA, line 3
            print(f"rank {dist.get_rank()} step {step} loss {loss.item()!r}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "artifacts/ddp_example")
