"""A training script that knows nothing of AORTA: plain torch, two ranks or one.

    torchrun --nproc_per_node 2 untouched.py KIND [STEPS]

Prints the hash of the trained parameters on each rank; KIND says what else than training happens.
"""

from __future__ import annotations

import copy
import hashlib
import os
import shutil
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import barrier, destroy_process_group  # names taken early stay AORTA's
from torch.nn.parallel import DistributedDataParallel

APART = {"alone", "evaluator", "actor", "late"}
"""Kinds whose ranks train apart from each other; slowly where they are recorded, so that they meet."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(1000 * rank + step))


def spread(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model) if dist.is_initialized() else model


def said(*models: nn.Module) -> None:
    # A reducer that is freed while a thread of gloo frees its last work waits for that thread, which waits for the GIL.
    sys.kept = models  # type: ignore[attr-defined]
    digest = hashlib.sha256()
    for model in models:
        for value in model.state_dict().values():
            digest.update(value.detach().contiguous().view(torch.uint8).numpy().tobytes())
    sys.stdout.write(f"weights {os.environ.get('RANK', '0')} {digest.hexdigest()[:16]}\n")
    sys.stdout.flush()


def main(kind: str, steps: int) -> None:
    torch.manual_seed(0)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    net = Net()
    model = net if kind in APART else spread(net)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000, enabled=kind == "scaler")
    if kind == "save":
        torch.save(model.state_dict(), os.devnull)  # before anything is recorded
    folder = Path(os.environ.get("THE_FOLDER", os.devnull))
    recorded = "THE_FOLDER" in os.environ
    if kind == "late" and rank == 1 and recorded:
        time.sleep(1.0)
    for step in range(steps):
        if kind in APART and recorded:
            time.sleep(0.02)
        if kind in {"alone", "evaluator"} and rank == 1:
            break
        if kind == "actor" and rank == 1:
            dist.recv(torch.ones(1), 0)
        if kind == "barrier":
            barrier()
        for micro in range(3 if kind == "accumulation" else 1):
            x = batch(10 * step + micro, rank)
            loss = model(x).square().mean()
            scale = float("inf") if kind == "scaler" and step == 2 else 1.0
            scaler.scale(loss * scale).backward()
        scaler.step(optimizer)
        scaler.update()
        if kind == "actor" and rank == 0:
            dist.send(torch.ones(1), 1)
        if step == 4 and rank == 0 and folder.is_dir():
            match kind:
                case "removes":
                    shutil.rmtree(folder)
                case "replaces":
                    folder.rename(f"{folder}.old")
                    folder.mkdir()
        optimizer.zero_grad()
        if kind == "evaluation" and step % 2:
            model.eval()
            with torch.no_grad():
                seen = model(batch(9, rank)).mean()
            if dist.is_initialized():
                dist.all_reduce(seen)
            if rank == 0:
                torch.save(model.state_dict(), os.devnull)
            if dist.is_initialized():
                barrier()
            model.train()
        if kind.startswith("unseen evaluation") and step % 2:
            if kind.endswith("compiled"):  # as Transformers' Trainer wraps it
                torch.compile(model.module).eval()
            else:
                copy.deepcopy(model.module).eval()
            dist.all_reduce(torch.ones(1))
            model.train()
        if kind == "save" and step == 4 and rank == 0:
            torch.save(model.state_dict(), os.devnull)
        if kind == "error" and step == 3:
            raise ValueError("in the middle")
    said(model)
    if kind == "exit":
        sys.exit(3)
    if dist.is_initialized():
        destroy_process_group()


def engine(steps: int) -> None:
    from tests.recording.engine import DeepSpeedEngine

    torch.manual_seed(0)
    dist.init_process_group("gloo")
    net = Net()
    model = DeepSpeedEngine(net, torch.optim.SGD(net.parameters(), 0.01))
    for step in range(steps):
        for micro in range(2):
            model(batch(10 * step + micro, dist.get_rank())).square().mean().backward()
            model.step()
        if step % 2:
            model.eval()
            dist.all_reduce(torch.ones(1))
            model.train()
    said(model)
    dist.destroy_process_group()


def gan(steps: int) -> None:
    torch.manual_seed(0)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    generator, critic = spread(Net(2)), spread(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)))
    of_generator = torch.optim.Adam(generator.parameters(), 0.01)
    of_critic = torch.optim.Adam(critic.parameters(), 0.01)
    for step in range(steps):
        of_critic.zero_grad()
        with torch.no_grad():
            made = generator(batch(step, 0))
        (critic(made).mean() - critic(torch.ones(8, 4)).mean()).backward()
        of_critic.step()
        of_generator.zero_grad()
        (-critic(generator(batch(step, 1))).mean()).backward()
        of_generator.step()
    said(generator, critic)


if __name__ == "__main__":
    kind, steps = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 8
    if kind in {"gan", "engine"}:
        {"gan": gan, "engine": engine}[kind](steps)
    else:
        main(kind, steps)
