"""Programs that compile: what Dynamo does with them, with AORTA around torch's functions and hooks, and without.

    python -m tests.recording.test_compiled FOLDER

Each kind trains twice, in forks of a process that has torch loaded: as it is, and recorded as below `aorta record`.
Prints a JSON line for each with Dynamo's counters, the sum of the weights, what ended it, and the steps recorded.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

from aorta.recording import zero_lines
from tests.rank_records import read_rank
from tests.recording.untouched_on_forked_ranks import patched
from tests.runs import program, succeeded


class Part(nn.Module):
    def __init__(self, inside: Callable[[nn.Module, torch.Tensor], object]) -> None:
        super().__init__()
        self.frozen, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.inside = inside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.inside(self.frozen, x)
        return self.last(torch.relu(self.frozen(x)))


def net_of(inside: Callable[[nn.Module, torch.Tensor], object] = lambda _module, _x: None) -> nn.Sequential:
    return nn.Sequential(Part(inside), Part(inside), nn.Linear(8, 2))


def compiled(function: Any, *, whole: bool = False) -> Any:
    return torch.compile(function, backend="eager", fullgraph=whole)


def train(
    net: nn.Module,
    *,
    called: Callable[[torch.Tensor], torch.Tensor] | None = None,
    step: Callable[[torch.optim.Optimizer], None] = lambda optimizer: optimizer.step(),
    then: Callable[[nn.Module, torch.Tensor], object] = lambda _net, _x: None,
    scaler: torch.amp.GradScaler | None = None,
) -> nn.Module:
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    for number in range(8):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
        loss = (called or net)(x).square().mean()
        (loss if scaler is None else scaler.scale(loss)).backward()
        step(optimizer)
        if scaler is not None:
            scaler.update()
        optimizer.zero_grad()
        if number == 5:
            then(net, x)
    return net


def whole_step() -> nn.Module:
    net = net_of()
    optimizer = torch.optim.SGD(net.parameters(), 0.01)

    def step(x: torch.Tensor) -> None:
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step = compiled(step)
    for number in range(8):
        step(torch.randn(4, 8, generator=torch.Generator().manual_seed(number)))
    return net


def saves(_module: nn.Module, x: torch.Tensor) -> None:
    torch.save(x.detach(), os.devnull)


def scaled() -> nn.Module:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    return train(net_of(), step=compiled(scaler.step), scaler=scaler)


def compiled_inside(then: Callable[[nn.Module, torch.Tensor], object] = lambda _net, _x: None) -> nn.Module:
    net = net_of()
    layers = compiled(lambda x: net[1](net[0](x)), whole=True)
    return train(net, called=lambda x: net[2](layers(x)), then=then)


def compiled_block() -> nn.Module:
    net = net_of()
    net[0] = compiled(net[0])
    return train(net)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "eval in a whole graph": lambda: train(compiled(net_of(lambda module, _x: module.eval()), whole=True)),
    "save": lambda: train(compiled(net_of(saves))),
    "barrier": lambda: train(compiled(net_of(lambda _module, _x: dist.barrier()))),
    "optimizer step": lambda: train(net_of(), step=compiled(lambda optimizer: optimizer.step())),
    "whole training step": whole_step,
    "scaler's step": scaled,
    "DDP inside": lambda: train(compiled(DistributedDataParallel(net_of()))),
    "DDP around": lambda: train(DistributedDataParallel(compiled(net_of()))),
    "a block": compiled_block,
    "a function around blocks": compiled_inside,
    "a new shape": lambda: compiled_inside(lambda net, _x: net(torch.randn(5, 8))),
    "exported": lambda: train(net_of(), then=lambda net, x: torch.export.export(net, (x,), strict=True)),
    "scripted": lambda: train(nn.Sequential(nn.Linear(8, 2), nn.ReLU()), then=lambda net, _x: torch.jit.script(net)),
}


def trained(kind: str, folder: str | None) -> dict[str, Any]:
    torch.manual_seed(0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if folder is not None:
        patched(folder)
    ended, total = "", 0.0
    try:
        net = KINDS[kind]()
        total = sum(float(value.detach().double().sum()) for value in net.parameters())
    except Exception as error:  # noqa: BLE001  what would end the program
        ended = f"{type(error).__name__}: {error}"
    zero_lines._zero._end_with_program()
    counted = {name: dict(counters[name]) for name in ("stats", "frames", "graph_break", "recompiles", "unimplemented")}
    steps = len(read_rank(file).steps) if folder and (file := Path(folder, "rank_0_metrics.jsonl")).exists() else 0
    return {"counted": counted, "sum": total, "ended": ended, "steps": steps}


def main(folder: str) -> None:
    for kind in KINDS:
        for target in (None, str(Path(folder, kind.replace(" ", "_")))):
            child = os.fork()
            if child == 0:
                said = json.dumps(trained(kind, target))
                os.write(1, f"{said}\n".encode())
                os._exit(0)
            os.waitpid(child, 0)


@pytest.mark.dist
@pytest.mark.thorough
def test_compiled_programs_are_compiled_as_without(tmp_path):
    done = succeeded(program("tests.recording.test_compiled", str(tmp_path), ranks=1))
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    for kind, plain, seen in zip(KINDS, said[::2], said[1::2], strict=True):
        assert plain["ended"] == seen["ended"] == "", kind
        assert plain["sum"] == seen["sum"], kind
        before, after = plain["counted"], seen["counted"]
        assert before.pop("stats") == after.pop("stats"), kind
        for name, counts in before.items():
            assert sum(counts.values()) >= sum(after[name].values()), (kind, name)
        assert seen["steps"] == (0 if kind == "whole training step" else 7), kind
    assert "whole_training_step: no further optimizer step was seen; inside of torch.compile none is" in done.stderr


if __name__ == "__main__":
    main(*sys.argv[1:])
