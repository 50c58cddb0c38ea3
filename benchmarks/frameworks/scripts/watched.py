"""What the scripts share: a small model, and a witness of their training that is not AORTA.

Must not import AORTA.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile

STEPS = 12
LOADING_S = 0.5
"""A step waits as long for its data at least, so that one without is seen, and AORTA's own time is little of it."""
VOCABULARY, WIDTH = 64, 32


_pauses: list[tuple[str, int, int]] = []
_loads: list[int] = []


class Block(nn.Module):
    """A residual multi-layer perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Tokens [B, T] to scores [B, T, VOCABULARY]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Cross entropy of a model that has to return its tokens."""
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


class Tokens(torch.utils.data.Dataset[torch.Tensor]):
    """128 sentences of 8 tokens each, the same in every process; 4 make a step."""

    def __len__(self) -> int:
        return 128

    def __getitem__(self, index: int) -> torch.Tensor:
        _loads.append(time.time_ns())
        time.sleep(LOADING_S / 4)
        return torch.randint(VOCABULARY, (8,), generator=torch.Generator().manual_seed(index))


def batch(step: int) -> torch.Tensor:
    """The tokens [4, 8] of this rank's step."""
    _loads.append(time.time_ns())
    time.sleep(LOADING_S)
    seed = step * dist.get_world_size() + dist.get_rank()
    return torch.randint(VOCABULARY, (4, 8), generator=torch.Generator().manual_seed(seed))


@contextlib.contextmanager
def pause(what: str) -> Iterator[None]:
    """Mark an "evaluation" or a "checkpoint" of the script's, which is no part of a step."""
    begin = time.time_ns()
    yield
    _pauses.append((what, begin, time.time_ns()))


@contextlib.contextmanager
def watched(*models: nn.Module) -> Iterator[None]:
    """Note in $WATCHED/rank_N.json, however the block ends: every c10d operator that torch.profiler sees (start, name),
    when optimizers have stepped (torch's public hook), pauses (what, begin, end), when this process began to load data,
    all in ns of the system's clock, and a digest of the weights afterwards.
    """
    stepped: list[int] = []
    hook = register_optimizer_step_post_hook(lambda *_: stepped.append(time.time_ns()))
    every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    recorded = profile(activities=[ProfilerActivity.CPU], experimental_config=every_thread)
    try:
        with recorded:
            yield
    finally:
        hook.remove()
        events = recorded.profiler.kineto_results.events()
        answer = {
            "collectives": sorted([e.start_ns(), e.name()] for e in events if e.name().startswith("c10d::")),
            "stepped": stepped,
            "pauses": _pauses,
            "loads": _loads,
            "weights": _digest(models),
        }
        Path(os.environ["WATCHED"], f"rank_{dist.get_rank()}.json").write_text(json.dumps(answer))


def _digest(models: tuple[nn.Module, ...]) -> str:
    digest = hashlib.sha256()
    for model in models:
        for _, value in sorted(model.state_dict().items()):
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            digest.update(whole.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
