"""Two ranks of blocks and collectives of exact lengths on the simulated device, in virtual time.

Enters: a folder and the cases as JSON. Leaves: one run folder a case with the record of each rank, and `rank_<r>.json`.
Nothing here computes what is expected. Run by `test_known_answers`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from aorta.distributed.topology import Topology
from aorta.instrument.instrumentation import Instrumentation
from aorta.instrument.open_step import StepFacts
from aorta.parallel.ddp import ReduceAfterBackward
from aorta.records.clocks import read_clocks
from aorta.records.schema import Footer, InstrumentMode
from aorta.records.writer import RecordWriter
from tests.analysis.builders import header
from tests.device_path.ranks import by_rank
from tests.simulated import device as simulated

VALUES = 1024
"""Elements of a block's parameter: one bucket of 4 KiB."""
WARM_UP, STEPS = 2, 4


@dataclass
class Case:
    """`way`: ddp (a bucket a block), after (the same buckets after backward), one (DDP with one parameter, in the block
    `owner`), waited (a synchronous all-reduce after each block's backward), or queued (all-reduces issued one after
    another, and waited for together). Rank 1 is late to each collective by `late_ns`.
    """

    name: str
    way: str
    mode: InstrumentMode
    native: bool
    compute_ns: int
    transfer_ns: int
    blocks: int = 8
    owner: int | None = None
    late_ns: int = 0


class Sleep(torch.autograd.Function):
    """Identity that takes the block's time in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, length_ns: int) -> torch.Tensor:
        ctx.length_ns = length_ns
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        torch.cuda._sleep(ctx.length_ns)
        return gradient, None


class Waited(torch.autograd.Function):
    """Identity whose backward all-reduces the gradient and waits; late by so much."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, late_ns: int) -> torch.Tensor:
        ctx.late_ns = late_ns
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        reduced = gradient.clone()
        if ctx.late_ns:
            torch.cuda._sleep(ctx.late_ns)
        dist.all_reduce(reduced)
        return reduced, None


class Block(nn.Module):
    """Computes first in backward, then its own gradient (if it has a parameter) and that of its input are ready."""

    def __init__(self, length_ns: int, device: torch.device, *, learns: bool) -> None:
        super().__init__()
        self.length_ns = length_ns
        self.weight = nn.Parameter(torch.zeros(VALUES, device=device)) if learns else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Sleep.apply(x + self.weight if self.weight is not None else x * 1.0, self.length_ns)


class WaitsAfterEach(nn.Module):
    """The blocks, with a synchronous all-reduce behind each in backward."""

    def __init__(self, blocks: list[Block], late_ns: int) -> None:
        super().__init__()
        self.blocks, self.late_ns = nn.ModuleList(blocks), late_ns

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(Waited.apply(x, self.late_ns))
        return x


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
    blocks = [Block(case.compute_ns, device, learns=case.owner in (None, index)) for index in range(case.blocks)]
    if case.way in ("ddp", "after", "one"):
        model: nn.Module = DistributedDataParallel(
            nn.Sequential(*blocks), [device.index], bucket_cap_mb=VALUES * 4 / 2**20, gradient_as_bucket_view=True
        )
        if case.way == "after":
            model.register_comm_hook(None, ReduceAfterBackward(device).keep)
    else:
        model = WaitsAfterEach(blocks, late_ns)
    clocks = read_clocks()
    with (
        RecordWriter(folder / f"rank_{rank}_metrics.jsonl", rank) as writer,
        Instrumentation(device, case.mode, rank, world_size, clocks, writer.write, native=case.native) as instrument,
    ):
        writer.write(header(rank, world_size, clock=clocks))
        instrument.watch((f"block{index}", block) for index, block in enumerate(blocks))
        instrument.watch_backward(model)
        recorder = instrument.recorder
        for step in range(WARM_UP + STEPS):
            together(device)
            with recorder.step(StepFacts(0, step, step, 0.0, step < WARM_UP)):
                if case.way == "queued":
                    queued(case, late_ns, device)
                else:
                    model(torch.ones(VALUES, device=device, requires_grad=True)).sum().backward()
        recorder.finish()
        groups = {name: list(group.ranks) for name, group in instrument.groups.items()}
        writer.write(Footer("completed", 0, recorder.steps_written, read_clocks(), groups))


def together(device: torch.device) -> None:
    """Both ranks' devices and hosts at one moment of virtual time."""
    torch.accelerator.synchronize(device)
    now = torch.tensor([simulated.host_ns()])
    dist.all_reduce(now, dist.ReduceOp.MAX)
    simulated.advance_host(int(now) - simulated.host_ns())


def queued(case: Case, late_ns: int, device: torch.device) -> None:
    """One all-reduce behind the other, none waited for before the last is issued."""
    tensors = [torch.ones(VALUES, device=device) for _ in range(case.blocks)]
    works = []
    for tensor in tensors:
        torch.cuda._sleep(case.compute_ns)
        if late_ns:
            torch.cuda._sleep(late_ns)
        works.append(dist.all_reduce(tensor, async_op=True))
    for work in works:
        work.wait()


if __name__ == "__main__":
    main()
