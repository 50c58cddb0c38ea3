"""Two ranks of blocks and collectives of exact lengths on the simulated device, in virtual time.

Enters: a folder and the cases as JSON. Leaves: one run folder a case with the record of each rank, and `rank_<r>.json`.
Nothing here computes what is expected. Run by `test_known_answers`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from aorta.distributed.topology import Topology
from aorta.records.schema import InstrumentMode
from aorta.records.step_line import StepFacts
from tests.device_path.launch import by_rank
from tests.known_answers.program import VALUES, build, recording
from tests.simulated import device as simulated

WARM_UP, STEPS = 2, 16


@dataclass
class Case:
    """`way`: ddp (a bucket a block), after (the same buckets after backward), one (DDP with one parameter, in the block
    `owner`), waited (a synchronous all-reduce after each block's backward), or queued (all-reduces issued one after
    another, and waited for together). Rank 1 is late to each collective by `late_ns`.
    """

    name: str
    way: str
    mode: InstrumentMode
    compute_ns: int
    transfer_ns: int
    blocks: int = 8
    owner: int | None = None
    late_ns: int = 0


def main() -> None:
    """Every case, one after another."""
    folder, cases = Path(sys.argv[1]), [Case(**case) for case in json.loads(sys.argv[2])]
    simulated.costs(launch_ns=0)
    simulated.lengths(**dict.fromkeys(simulated.CLASSES, (0, 0.0)))

    def each(topology: Topology, device: torch.device) -> None:
        for case in cases:
            run(case, folder / case.name, device, topology.rank, topology.world_size)
        dist.barrier()

    by_rank(each)


def run(case: Case, folder: Path, device: torch.device, rank: int, world_size: int) -> None:
    """Train, and leave a record."""
    folder.mkdir(parents=True, exist_ok=True)
    simulated.collective_lengths(default=(case.transfer_ns, 0.0))
    late_ns = case.late_ns if rank == 1 else 0
    blocks, model = build(case, partial(sleep, case.compute_ns), device, partial(sleep, late_ns))
    with recording(folder, device, case.mode, rank, world_size, blocks, model, native=True) as instrument:
        for step in range(WARM_UP + STEPS):
            together(device)
            with instrument.recorder.step(StepFacts(0, step, step, 0.0, step < WARM_UP)):
                if case.way == "queued":
                    queued(case, late_ns, device)
                else:
                    model(torch.ones(VALUES, device=device, requires_grad=True)).sum().backward()


def together(device: torch.device) -> None:
    """Both ranks' devices and hosts at one moment of virtual time."""
    torch.accelerator.synchronize(device)
    now = torch.tensor([simulated.host_ns()])
    dist.all_reduce(now, dist.ReduceOp.MAX)
    simulated.advance_host(int(now) - simulated.host_ns())


def sleep(length_ns: int) -> None:
    """Put the current stream to sleep, if for any time at all."""
    if length_ns:
        torch.cuda._sleep(length_ns)


def queued(case: Case, late_ns: int, device: torch.device) -> None:
    """One all-reduce behind the other, none waited for before the last is issued."""
    tensors = [torch.ones(VALUES, device=device) for _ in range(case.blocks)]
    works = []
    for tensor in tensors:
        sleep(case.compute_ns)
        sleep(late_ns)
        works.append(dist.all_reduce(tensor, async_op=True))
    for work in works:
        work.wait()


if __name__ == "__main__":
    main()
