"""Run on two ranks: steps with waits of every sort, each bracketed by the caller's own clock.

Arguments: a folder, which gets `rank_<r>.json`, and `python` or `native`.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from aorta.instrument.instrumentation import Instrumentation
from aorta.records.clocks import read_clocks
from aorta.records.schema import Step
from aorta.records.step_line import StepFacts

Row = tuple[str, int, str | None]


class Scenes:
    """Steps by name, with what their rows must say, and the caller's times round each wait."""

    def __init__(self, instrument: Instrumentation, steps: list[Step]) -> None:
        self.instrument, self.steps = instrument, steps
        self.names: list[str] = []
        self.expected: dict[str, list[Row]] = {}
        self.round: dict[str, list[tuple[int, int]]] = {}
        self.count = 0

    def step(self, name: str, body: Callable[[], None]) -> None:
        self.names.append(name)
        self.expected[name], self.round[name] = [], []
        with self.instrument.recorder.step(StepFacts(0, self.count, self.count, 0.0, warmup=False)):
            body()
        self.count += 1

    def waiting(self, row: Row, wait: Callable[[], Any]) -> None:
        before = time.perf_counter_ns()
        wait()
        self.round[self.names[-1]].append((before, time.perf_counter_ns()))
        self.expected[self.names[-1]].append(row)


def main(folder: str, ends: str) -> None:
    """All scenes, and the end."""
    dist.init_process_group("gloo")
    told = played(ends)
    Path(folder, f"rank_{dist.get_rank()}.json").write_text(json.dumps(told))
    # DDP's reducer goes before the group. Were it the group's last owner, its destructor would join gloo's threads with
    # the interpreter lock held, and one of them may need that lock to let go of a collective's work (torch 2.13).
    gc.collect()
    dist.destroy_process_group()


def played(ends: str) -> dict[str, Any]:
    """What the rows say and what they must."""
    rank, steps = dist.get_rank(), list[Step]()
    assert dist.group.WORLD is not None
    world = dist.group.WORLD.group_name
    with Instrumentation(
        torch.device("cpu"), "observe", rank, 2, read_clocks(), steps.append, native=ends == "native"
    ) as instrument:
        scenes = Scenes(instrument, steps)
        play(scenes, world, rank)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        model[1].weight, model[1].bias = nn.Parameter(torch.ones(2, 4)), nn.Parameter(torch.ones(2))
        wrapped = DistributedDataParallel(model)
        with_ddp(instrument, wrapped, scenes, world)
        instrument.recorder.finish()
    origin = {name: step.start_mono_ns for name, step in zip(scenes.names, steps, strict=True)}
    rows = {name: msgspec.to_builtins(step.waits) for name, step in zip(scenes.names, steps, strict=True)}
    return {
        "scenes": {
            name: {
                "waits": [
                    [group, number, enter + origin[name], leave + origin[name], kind]
                    for group, number, enter, leave, kind in rows[name]
                ],
                "expected": scenes.expected[name],
                "round": scenes.round[name],
            }
            for name in scenes.names
        },
    }


def play(scenes: Scenes, world: str, rank: int) -> None:
    """Waits by hand. Collectives of all ranks are numbered from 0 over all scenes."""
    ones = torch.ones
    late: list[Any] = []

    def own() -> None:
        first, second = (dist.all_reduce(ones(1 << 16), async_op=True) for _ in range(2))
        scenes.waiting((world, 1, None), second.wait)
        scenes.waiting((world, 0, None), first.wait)
        first.wait()  # again: it returns at once, and is no row

    def never() -> None:
        late.append(dist.all_reduce(ones(8), async_op=True))
        late.append(dist.all_reduce(ones(8), async_op=True))

    def later() -> None:
        scenes.waiting((world, 3, None), late[1].wait)

    def synchronous() -> None:
        scenes.waiting((world, 4, None), lambda: dist.all_reduce(ones(4)))
        scenes.waiting((world, 5, None), lambda: dist.reduce_scatter_tensor(ones(3), ones(6)))
        scenes.waiting((world, 6, None), dist.barrier)

    def by_tensor() -> None:
        reduced = functional.all_reduce(ones(4), "sum", dist.group.WORLD)
        scenes.waiting((world, 7, None), lambda: functional.wait_tensor(reduced))

    def exchange() -> None:
        send, receive = dist.isend(ones(2), 1 - rank), dist.irecv(ones(2), 1 - rank)
        assert send is not None
        assert receive is not None
        scenes.waiting((world, 0, "send"), send.wait)
        scenes.waiting((world, 0, "recv"), receive.wait)

    def failing() -> None:
        scenes.waiting((world, 8, None), lambda: dist.all_reduce(ones(4)))
        raise KeyError

    for name, body in {
        "own": own,
        "never": never,
        "later": later,
        "synchronous": synchronous,
        "by_tensor": by_tensor,
        "exchange": exchange,
    }.items():
        scenes.step(name, body)
    try:
        scenes.step("failing", failing)
    except KeyError:
        scenes.names.remove("failing")
    scenes.step("after", lambda: scenes.waiting((world, 9, None), lambda: dist.all_reduce(ones(4))))


def with_ddp(instrument: Instrumentation, wrapped: nn.Module, scenes: Scenes, world: str) -> None:
    """Two passes of DDP, whose waits are in C++: what is round them is the whole backward pass."""
    blocks = list(wrapped.module.named_children())  # type: ignore[union-attr,operator]
    instrument.watch(blocks)
    instrument.watch_backward(wrapped)

    def passed() -> None:
        loss = wrapped(torch.ones(3, 4)).sum()
        scenes.waiting((world, seq, None), loss.backward)

    seq = first_number(instrument, scenes)
    scenes.step("ddp", passed)
    wrapped(torch.ones(3, 4)).sum().backward()  # DDP cuts its buckets anew: collectives of no step
    seq = first_number(instrument, scenes)
    scenes.step("ddp again", passed)


def first_number(instrument: Instrumentation, scenes: Scenes) -> int:
    """DDP's construction issued collectives outside any step; the next one's number is told by one of our own."""
    name = f"number {scenes.count}"
    scenes.step(name, lambda: dist.barrier() and None)
    instrument.recorder.finish()
    last = scenes.steps[-1]
    row = last.collectives[-1]
    scenes.expected[name] = [(row.group, row.seq, None)]
    scenes.round[name] = [(last.start_mono_ns, last.end_mono_ns)]
    return row.seq + 1


if __name__ == "__main__":
    main(*sys.argv[1:])
