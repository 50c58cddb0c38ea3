"""A training loop of DistributedDataParallel without a line of AORTA, whose words plant a cause; for `planted_causes`.

    torchrun --nproc_per_node 2 benchmarks/planted_program.py width=256 slow_rank=1 slow_ms=40

Each rank times its own loop by a stopwatch, and writes what it saw to the file `stopwatch=PREFIX` with its rank: mean
milliseconds of the step, of `next()` of the loader, of the optimizer, and of processor time of all its threads, after
the first `FIRST` steps, and of all. With `traceml=1` it has the two lines that TraceML asks for.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

FIRST = 6
"""Steps that are warm-up in a zero-line recording: the first is not recorded, the next five are marked."""

PARTS = ("step", "data", "optimizer", "processor")


@dataclass
class Words:
    """Sizes, and what is planted. What begins with `slow` is of `slow_rank` alone; `idle_ms` is of all."""

    width: int = 256
    bucket_mb: int = 4
    batch: int = 32
    steps: int = 34
    slow_rank: int = -1
    slow_ms: float = 0.0
    slow_computations: int = 1
    slow_data_ms: float = 0.0
    idle_ms: float = 0.0
    computations: int = 1
    data_ms: float = 0.0
    optimizer_ms: float = 0.0
    synchronous: int = 0
    traceml: int = 0
    stopwatch: str = ""

    @classmethod
    def of(cls, words: list[str]) -> Words:
        given = dict(word.split("=", 1) for word in words)
        known = {field.name: {"str": str, "int": int, "float": float}[str(field.type)] for field in fields(cls)}
        return cls(**{name: known[name](value) for name, value in given.items()})


class Block(nn.Module):
    def __init__(self, width: int, computations: int) -> None:
        super().__init__()
        self.up, self.down, self.computations = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), computations

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.computations):
            x = x + self.down(nn.functional.gelu(self.up(x)))
        return x


class Net(nn.Module):
    def __init__(self, width: int, computations: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(64, width), nn.Linear(width, 10)
        self.layers = nn.ModuleList(Block(width, computations) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


class Batches(IterableDataset[Any]):
    def __init__(self, words: Words, rank: int) -> None:
        self._size, self._rank = words.batch, rank
        self._delay_ms = words.data_ms + words.slow_data_ms * (rank == words.slow_rank)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        generator, size = torch.Generator().manual_seed(self._rank), self._size
        while True:
            time.sleep(self._delay_ms / 1e3)
            yield torch.randn(size, 64, generator=generator), torch.randint(0, 10, (size,), generator=generator)


class SlowAdamW(torch.optim.AdamW):
    delay_ms = 0.0

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        time.sleep(self.delay_ms / 1e3)
        return super().step(closure)  # type: ignore[no-any-return]


def main() -> None:
    words = Words.of(sys.argv[1:])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    slow = rank == words.slow_rank
    net = Net(words.width, words.slow_computations if slow else words.computations)
    model = DistributedDataParallel(net, bucket_cap_mb=words.bucket_mb)
    optimizer = (SlowAdamW if words.optimizer_ms else torch.optim.AdamW)(model.parameters(), lr=1e-3)
    SlowAdamW.delay_ms = words.optimizer_ms
    traced: Any = nullcontext
    if words.traceml:
        import traceml_ai  # type: ignore[import-not-found]  # in an environment of its own

        traceml_ai.init(mode="auto")
        traced = partial(traceml_ai.trace_step, model)
    delay_s = (words.idle_ms + words.slow_ms * slow) / 1e3
    loader = iter(DataLoader(Batches(words, rank), batch_size=None))
    seen, begun, spent = [], time.perf_counter(), time.process_time()
    for _ in range(words.steps):
        x, y = next(loader)
        loaded = time.perf_counter()
        with traced():
            time.sleep(delay_s)
            with model.no_sync() if words.synchronous else nullcontext():
                nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            if words.synchronous:
                for parameter in net.parameters():
                    assert parameter.grad is not None
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= ranks
            updating = time.perf_counter()
            optimizer.step()
            updated = time.perf_counter()
            optimizer.zero_grad()
        now, used = time.perf_counter(), time.process_time()
        seen.append((now - begun, loaded - begun, updated - updating, used - spent))
        begun, spent = now, used
    if words.stopwatch:
        found, every = (
            {name: 1e3 * sum(part) / len(part) for name, part in zip(PARTS, zip(*steps, strict=True), strict=True)}
            for steps in (seen[FIRST:], seen)
        )
        text = json.dumps({**found, "load": os.getloadavg()[0], "all": every})
        Path(f"{words.stopwatch}-{rank}.json").write_text(text)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
