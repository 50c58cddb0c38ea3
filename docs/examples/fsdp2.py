"""FSDP2 training (fully_shard) with gradient accumulation, recorded by AORTA: the three lines are marked.

torchrun --nproc_per_node 2 docs/examples/fsdp2.py [FOLDER]
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import aorta  # AORTA, line 1

STEPS, MICRO_BATCHES, WIDTH, LAYERS = 8, 2, 64, 3


class Model(nn.Module):
    """Tokens [T, B] to scores [T, B, 100]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, WIDTH)
        self.layers = nn.Sequential(*(nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH) for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, 100)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embedding(tokens)))


def main(folder: str) -> None:
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh(kind, (int(os.environ["WORLD_SIZE"]),))
    torch.manual_seed(0)
    model = Model().to(kind)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + dist.get_rank())

    with aorta.record(folder, model=model, parallel="fsdp") as recording:  # AORTA, line 2
        for step in range(STEPS):
            for micro in range(MICRO_BATCHES):
                model.set_requires_gradient_sync(micro == MICRO_BATCHES - 1)
                tokens = torch.randint(100, (4, 16), device=kind)
                loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
                (loss / MICRO_BATCHES).backward()
            optimizer.step()
            optimizer.zero_grad()
            recording.step()  # AORTA, line 3
            print(f"rank {dist.get_rank()} step {step} loss {loss.item()!r}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "artifacts/fsdp2_example")
