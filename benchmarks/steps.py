"""Recorded steps of many tiny collectives and blocks, without a model: what the record costs by itself."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from aorta.instrument.instrumentation import Instrumentation
from aorta.instrument.open_step import StepFacts
from aorta.records.clocks import read_clocks
from aorta.records.record_file import RecordWriter

CPU = torch.device("cpu")
GROUP_OF = 10
"""Collectives issued before the first of them is waited for, as a sharded model prefetches and a reducer queues."""


class TinySteps:
    """Steps of a given number of all-reduces and one block range for each.

    Args:
        writer: takes the record. rank, world_size: of this process. native: with the compiled tap, where it is built.
    """

    def __init__(self, writer: RecordWriter, rank: int, world_size: int, *, native: bool) -> None:
        self.instrument = Instrumentation(
            CPU, "dedicated", rank, world_size, read_clocks(), writer.write, native=native
        )
        self._blocks = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(8)])
        self.instrument.watch([(f"layer_{number}", block) for number, block in enumerate(self._blocks)])
        self._tensor, self._input = torch.ones(1), torch.ones(4)
        self._steps = 0

    def step(self, collectives: int) -> int:
        """One step; returns the processor nanoseconds of this thread, its reading and writing included."""
        begin = time.thread_time_ns()
        self._steps += 1
        with self.instrument.recorder.step(StepFacts(0, self._steps, self._steps, 0.0, warmup=False)):
            for first in range(0, collectives, GROUP_OF):
                works = [
                    dist.all_reduce(self._tensor, async_op=True) for _ in range(min(GROUP_OF, collectives - first))
                ]
                self._blocks[first // GROUP_OF % len(self._blocks)](self._input)
                for work in works:
                    assert work is not None
                    work.wait()
        return time.thread_time_ns() - begin

    def close(self) -> None:
        """Write what is left, and take everything off."""
        self.instrument.recorder.finish()
        self.instrument.close()
