"""The pipeline of `program`, followed by its isolated baselines, on the same emulated link.

Enters: a folder and the cases as JSON. Leaves: one folder a case with the record of each rank. Nothing here computes
what is expected.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

from aorta.config.schema import EmulatedFabric
from aorta.distributed.peers import Peers
from aorta.instrument.emulation.network import EmulatedNetwork
from aorta.instrument.emulation.replay import Rehearsal, Replay
from aorta.instrument.emulation.stand_in import StandIn
from aorta.instrument.instrumentation import Instrumentation
from aorta.instrument.open_step import StepFacts
from aorta.records.clocks import read_clocks
from aorta.records.schema import Footer, Phase
from aorta.records.writer import RecordWriter
from tests.analysis.builders import header
from tests.known_answers.program import FORWARD_NS, START_NS, VALUES, Case, Timetable, build, main, wait_until

CPU = torch.device("cpu")


def run(case: Case, folder: Path, peers: Peers, place: Path | None) -> None:
    rank, world_size = peers.rank, peers.world_size
    timetable = Timetable(fixed=case.way != "waited")
    blocks, model = build(case, timetable)

    def train() -> None:
        model(torch.ones(VALUES, requires_grad=True)).sum().backward()

    with RecordWriter(folder / f"rank_{rank}_metrics.jsonl", rank) as writer:
        clocks = read_clocks()
        writer.write(header(rank, world_size, clock=clocks))
        fabric = EmulatedNetwork(EmulatedFabric(**case.fabric), rank, world_size, place)
        with Instrumentation(CPU, "dedicated", rank, world_size, clocks, writer.write, fabric=fabric) as instrument:
            instrument.watch((f"block{index}", block) for index, block in enumerate(blocks))
            instrument.watch_backward(model)
            recorder = instrument.recorder

            def phase(name: Phase, body: Callable[[], None], warmup: int) -> None:
                for number in range(warmup + case.steps):
                    timetable.block_ns = 0 if number < warmup else round(case.compute_ms * 1e6)
                    at = f"{case.name}/{name}/{number}"
                    start_ns = peers.from_rank_zero(at, time.perf_counter_ns() + START_NS)
                    timetable.begin(start_ns + FORWARD_NS)
                    wait_until(start_ns)
                    with recorder.step(StepFacts(0, number, number, 0.0, number < warmup, name)):
                        body()

            phase("train", train, case.warmup)
            rehearsal = Rehearsal(CPU)
            timetable.block_ns = 0
            with instrument.replaced(rehearsal):
                train()
            with instrument.replaced(StandIn(CPU, instrument.clock, recorder.on_stall)):
                phase("compute_only", train, 0)
            phase("comm_only", Replay(rehearsal.events).run, 0)
            recorder.finish()
            groups = {name: list(group.ranks) for name, group in instrument.groups.items()}
            writer.write(Footer("completed", 0, recorder.steps_written, read_clocks(), groups))


if __name__ == "__main__":
    main(run)
