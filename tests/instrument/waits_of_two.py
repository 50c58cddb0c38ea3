"""Run on two ranks, for `python` or `native`: steps with waits of every sort. Their rows are held to what was waited
for, in that order, and to the caller's own clock round each wait. Ends with an error where something is wrong.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from aorta.instrument.instrumentation import Instrumentation
from aorta.records.clocks import read_clocks
from aorta.records.schema import Step
from aorta.records.step_line import StepFacts

Waited = tuple[int, str | None, int, int]
"""Number, kind of a send or receive, and between which times of the caller's clock."""


class Scenes:
    """Steps, each with what was waited for in it."""

    def __init__(self, instrument: Instrumentation, steps: list[Step]) -> None:
        self.instrument, self.steps = instrument, steps
        self.waited: list[list[Waited]] = []

    def step(self, body: Callable[[], None]) -> None:
        self.waited.append([])
        number = len(self.waited)
        with self.instrument.recorder.step(StepFacts(0, number, number, 0.0, warmup=False)):
            body()

    def waiting(self, seq: int, wait: Callable[[], Any], kind: str | None = None) -> None:
        before = time.perf_counter_ns()
        wait()
        self.waited[-1].append((seq, kind, before, time.perf_counter_ns()))

    def hold(self) -> None:
        """The rows tell every wait, within the caller's times."""
        for step, waited in zip(self.steps, self.waited, strict=True):
            rows = [(wait.group, wait.seq, wait.kind) for wait in step.waits]
            assert rows == [(dist.group.WORLD.group_name, seq, kind) for seq, kind, _, _ in waited]
            for wait, (_, _, before, after) in zip(step.waits, waited, strict=True):
                assert before <= step.start_mono_ns + wait.enter_ns <= step.start_mono_ns + wait.leave_ns <= after


def by_hand(scenes: Scenes, rank: int) -> None:
    """Collectives of all ranks are numbered from 0 over all scenes."""
    ones, waiting, late = torch.ones, scenes.waiting, list[Any]()

    def in_another_order() -> None:
        first, second = (dist.all_reduce(ones(1 << 16), async_op=True) for _ in range(2))
        waiting(1, second.wait)
        waiting(0, first.wait)
        first.wait()  # again: it returns at once, and is no row

    def never() -> None:
        late.extend(dist.all_reduce(ones(8), async_op=True) for _ in range(2))

    def synchronous() -> None:
        waiting(4, lambda: dist.all_reduce(ones(4)))
        waiting(5, lambda: dist.reduce_scatter_tensor(ones(3), ones(6)))
        waiting(6, dist.barrier)

    def by_tensor() -> None:
        reduced = functional.all_reduce(ones(4), "sum", dist.group.WORLD)
        waiting(7, lambda: functional.wait_tensor(reduced))

    def exchange() -> None:
        send, receive = dist.isend(ones(2), 1 - rank), dist.irecv(ones(2), 1 - rank)
        waiting(0, send.wait, "send")
        waiting(0, receive.wait, "recv")

    def failing() -> None:
        waiting(8, lambda: dist.all_reduce(ones(4)))
        raise KeyError

    for body in (in_another_order, never, lambda: waiting(3, late[1].wait), synchronous, by_tensor, exchange):
        scenes.step(body)
    try:
        scenes.step(failing)
    except KeyError:
        del scenes.waited[-1]  # it has no line
    scenes.step(lambda: waiting(9, lambda: dist.all_reduce(ones(4))))


def of_ddp(scenes: Scenes) -> None:
    """Two passes of DDP, whose waits are in C++: what is round them is the whole backward pass."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[1].weight, model[1].bias = nn.Parameter(torch.ones(2, 4)), nn.Parameter(torch.ones(2))
    wrapped = DistributedDataParallel(model)
    scenes.instrument.watch(list(model.named_children()))
    scenes.instrument.watch_backward(wrapped)
    for _ in range(2):
        seq = next_number(scenes)
        scenes.step(lambda seq=seq: scenes.waiting(seq, wrapped(torch.ones(3, 4)).sum().backward))
        wrapped(torch.ones(3, 4)).sum().backward()  # DDP cuts its buckets anew: collectives of no step


def next_number(scenes: Scenes) -> int:
    """DDP's construction issued collectives outside any step; the next one's number is told by one of our own."""
    scenes.step(lambda: dist.barrier() and None)
    scenes.instrument.recorder.finish()
    last = scenes.steps[-1]
    seq = last.collectives[-1].seq
    scenes.waited[-1] = [(seq, None, last.start_mono_ns, last.end_mono_ns)]
    return seq + 1


def main(ends: str) -> None:
    """All scenes, and the end."""
    dist.init_process_group("gloo")
    rank, steps = dist.get_rank(), list[Step]()
    with Instrumentation(
        torch.device("cpu"), "observe", rank, 2, read_clocks(), steps.append, native=ends == "native"
    ) as instrument:
        scenes = Scenes(instrument, steps)
        by_hand(scenes, rank)
        of_ddp(scenes)
        instrument.recorder.finish()
    scenes.hold()
    del instrument, scenes
    # DDP's reducer goes before the group. Were it the group's last owner, its destructor would join gloo's threads with
    # the interpreter lock held, and one of them may need that lock to let go of a collective's work (torch 2.13).
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
