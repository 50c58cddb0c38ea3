"""Two ranks of blocks with an exact duration, on an emulated link with an exact duration.

Enters: a folder and the cases as JSON. Leaves: one folder a case with the record of each rank, with the isolated
baselines on the same link where a case asks for them. A block sleeps in its backward pass; its parameter's gradient is
ready when it wakes. Nothing here computes what is expected.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from aorta.config.schema import EmulatedFabric
from aorta.distributed.peers import Peers
from aorta.instrument.emulation.network import EmulatedNetwork, shared_folder
from aorta.instrument.emulation.stand_in import StandIn
from aorta.instrument.instrumentation import Instrumentation
from aorta.parallel.plan import ReduceAfterBackward
from aorta.recording.isolated_baselines import Rehearsal, Replay
from aorta.records.clocks import read_clocks
from aorta.records.record_file import RecordWriter
from aorta.records.schema import Footer, InstrumentMode, Phase
from aorta.records.step_line import StepFacts
from tests.analysis.builders import header

CPU = torch.device("cpu")
START_NS, FORWARD_NS = 20_000_000, 1_000_000
"""Until both ranks know when a step begins, and what its forward pass takes."""
VALUES = 1024
"""Elements of a block's parameter: one bucket of 4 KiB."""


@dataclass
class Case:
    """`way`: ddp (a bucket a block), after (the same buckets after backward), one (DDP with one parameter, in block
    `owner` only) or waited (a synchronous all-reduce after each block's backward, no DDP).
    """

    name: str
    way: str
    compute_ms: float
    fabric: dict[str, Any]
    blocks: int = 8
    owner: int | None = None
    warmup: int = 2  # DDP sorts its buckets anew in its second step, and broadcasts their order
    steps: int = 4
    isolated: bool = False


class Timetable:
    """When blocks compute in backward: from one moment that both ranks agreed on, one right behind the other.

    So a rank's lateness at one block is not carried to the next, where its peer would have to wait for it again. Where
    blocks wait for collectives (`fixed=False`), each begins when its turn comes.
    """

    def __init__(self, *, fixed: bool) -> None:
        self._fixed, self._free_ns = fixed, 0
        self.block_ns = 0

    def begin(self, at_ns: int) -> None:
        """The next backward pass begins then."""
        self._free_ns = at_ns

    def compute(self) -> None:
        """One block."""
        begin_ns = self._free_ns if self._fixed else time.perf_counter_ns()
        self._free_ns = begin_ns + self.block_ns
        wait_until(self._free_ns)


def wait_until(end_ns: int) -> None:
    while (left_ns := end_ns - time.perf_counter_ns()) > 0:
        time.sleep(max(left_ns - 300_000, 0) / 1e9)


class Computing(torch.autograd.Function):
    """Identity that takes the block's time in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, compute: Callable[[], None]) -> torch.Tensor:
        ctx.compute = compute
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.compute()
        return gradient, None


class Block(nn.Module):
    """Computes first in backward, then its own gradient (if it has a parameter) and that of its input are ready."""

    def __init__(self, compute: Callable[[], None], device: torch.device, *, learns: bool) -> None:
        super().__init__()
        self.compute = compute
        self.weight = nn.Parameter(torch.zeros(VALUES, device=device)) if learns else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Computing.apply(x + self.weight if self.weight is not None else x * 1.0, self.compute)


class Waited(torch.autograd.Function):
    """Identity whose backward all-reduces the gradient and waits; `before` is called in front of the all-reduce."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, before: Callable[[], None]) -> torch.Tensor:
        ctx.before = before
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        reduced = gradient.clone()
        ctx.before()
        dist.all_reduce(reduced)
        return reduced, None


class WaitsAfterEach(nn.Module):
    """The blocks, with a synchronous all-reduce behind each in backward."""

    def __init__(self, blocks: list[Block], before: Callable[[], None]) -> None:
        super().__init__()
        self.blocks, self.before = nn.ModuleList(blocks), before

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(Waited.apply(x, self.before))
        return x


def build(
    case: Any, compute: Callable[[], None], device: torch.device, before: Callable[[], None] = lambda: None
) -> tuple[list[Block], nn.Module]:
    """The blocks of a case, and the model that they make.

    Args:
        case: a `Case`, or one of the simulated device, which has the same `way`, `blocks` and `owner`.
        compute: takes the time of a block.
        before: called in front of each all-reduce that is waited for.
    """
    blocks = [Block(compute, device, learns=case.owner in (None, index)) for index in range(case.blocks)]
    if case.way not in ("ddp", "after", "one"):
        return blocks, WaitsAfterEach(blocks, before)
    devices = None if device.type == "cpu" else [device.index]
    wrapped = DistributedDataParallel(nn.Sequential(*blocks), devices, bucket_cap_mb=VALUES * 4 / 2**20)
    if case.way == "after":
        wrapped.register_comm_hook(None, ReduceAfterBackward(device).keep)
    return blocks, wrapped


@contextmanager
def recording(
    folder: Path,
    device: torch.device,
    mode: InstrumentMode,
    rank: int,
    world_size: int,
    blocks: Iterable[nn.Module],
    model: nn.Module,
    *,
    parallel: str = "ddp",
    **settings: Any,
) -> Iterator[Instrumentation]:
    """Record one rank's steps in `folder`; the record is whole behind the `with` block.

    Args:
        blocks: whose passes are computation; they are called `block0`, `block1` and so on.
        model: whose backward passes are watched.
        parallel: strategy in the header.
        settings: of `Instrumentation`.
    """
    with RecordWriter(folder / f"rank_{rank}_metrics.jsonl", rank) as writer:
        clocks = read_clocks()
        writer.write(header(rank, world_size, parallel=parallel, clock=clocks))
        with Instrumentation(device, mode, rank, world_size, clocks, writer.write, **settings) as instrument:
            instrument.watch((f"block{index}", block) for index, block in enumerate(blocks))
            instrument.watch_backward(model)
            yield instrument
            instrument.recorder.finish()
            groups = {name: list(group.ranks) for name, group in instrument.groups.items()}
            writer.write(Footer("completed", 0, writer.steps_written, read_clocks(), groups))


def run(case: Case, folder: Path, peers: Peers, place: Path | None) -> None:
    """One rank of a case, under the instrument."""
    timetable = Timetable(fixed=case.way != "waited")
    blocks, model = build(case, timetable.compute, CPU)
    fabric = EmulatedNetwork(EmulatedFabric(**case.fabric), peers.rank, peers.world_size, place)
    with recording(folder, CPU, "dedicated", peers.rank, peers.world_size, blocks, model, fabric=fabric) as instrument:

        def train() -> None:
            model(torch.ones(VALUES, requires_grad=True)).sum().backward()

        def phase(name: Phase, body: Callable[[], None], warmup: int = 0) -> None:
            """Steps that both ranks begin at one moment; blocks compute behind the warm-up."""
            for step in range(warmup + case.steps):
                timetable.block_ns = 0 if step < warmup else round(case.compute_ms * 1e6)
                at = f"{case.name}/{name}/{step}"
                start_ns = peers.from_first_rank(at, time.perf_counter_ns() + START_NS)
                timetable.begin(start_ns + FORWARD_NS)
                wait_until(start_ns)
                with instrument.recorder.step(StepFacts(0, step, step, 0.0, step < warmup, name)):
                    body()

        phase("train", train, case.warmup)
        if case.isolated:
            rehearsal = Rehearsal(CPU)
            timetable.block_ns = 0
            with instrument.replaced(rehearsal):
                train()
            with instrument.replaced(StandIn(CPU, instrument.clock, instrument.recorder.on_stall)):
                phase("compute_only", train)
            phase("comm_only", Replay(rehearsal.events).run)


def main() -> None:
    """Every case of the command line, one after another; `run` leaves its folder."""
    torch.set_num_threads(1)
    root, cases = Path(sys.argv[1]), [Case(**case) for case in json.loads(sys.argv[2])]
    dist.init_process_group("gloo")
    peers = Peers(dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size(), 60)
    with shared_folder(peers) as place:
        for case in cases:
            folder = root / case.name
            folder.mkdir(parents=True, exist_ok=True)
            dist.barrier()
            run(case, folder, peers, place)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
