"""Two ranks, DDP and FSDP2, real gloo collectives under torch.profiler: of 64 MiB beside blocks that sleep, and of
blocks that compute (attention, layer norm, matrix products).

Enters: a folder. Leaves: `<case>_<rank>.trace.json` of the profiler and `<case>/` with the record of each rank, of the
same steps; a case is a strategy, with `_computing` behind it for the other blocks. Nothing here is compared.

A block sleeps rather than multiplies: it leaves the cores to gloo, whose threads otherwise wait for one, and then the
two records differ by what a busy machine did between an issue and its worker's waking up. Its sleep is marked with
`record_function`, so that the profiler knows when it computed without a word from AORTA's hooks. What a block that
computes leaves in a trace is nested: a matrix product has operators inside of it. Collectives of DDP are
timed from Python, those of FSDP2 by the compiled tap where it has been built.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from aorta.config.schema import DDP, FSDP, Precision
from aorta.distributed.topology import process_group, read_topology
from aorta.parallel import fsdp, plan
from aorta.parallel.plan import ParallelizedModel
from aorta.records.step_line import StepFacts
from tests.known_answers.program import recording

CPU = torch.device("cpu")
MARK = "compute"
STRATEGIES = ("ddp", "fsdp")
COMPUTING = "_computing"
WIDTH, HEADS, TOKENS = 256, 4, 256
BLOCKS, VALUES = 3, 16 << 20
FORWARD_S, BACKWARD_S = 0.1, 0.2
WARMUP, PROFILED = 2, 3


class Computing(torch.autograd.Function):
    """Identity that takes its time in both directions, and has a gradient for the block's weight."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.shape = weight.shape
        with record_function(MARK):
            time.sleep(FORWARD_S)
        return x.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with record_function(MARK):
            time.sleep(BACKWARD_S)
            own = torch.ones(ctx.shape)
        return gradient, own


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(VALUES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Computing.apply(x, self.weight)


class ComputingBlock(nn.Module):
    """A block of a transformer, and an `autograd.Function` that waits for a collective of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.wide, self.back = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.mix(self.norm(x)).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2)
        x = x + seen
        return AllReduced.apply(x + self.back(nn.functional.gelu(self.wide(x))))


class AllReduced(torch.autograd.Function):
    """The mean over ranks in both directions, waited for where it is called."""

    @staticmethod
    def forward(_: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        return mean(x)

    @staticmethod
    def backward(_: torch.autograd.function.FunctionCtx, gradient: torch.Tensor) -> torch.Tensor:
        return mean(gradient)


def mean(x: torch.Tensor) -> torch.Tensor:
    x = x / dist.get_world_size()
    dist.all_reduce(x)
    return x


def parallelize(strategy: str, model: nn.Sequential) -> ParallelizedModel:
    if strategy == "ddp":  # a bucket a block
        values = sum(parameter.numel() for parameter in model[0].parameters())
        return plan.replicate(model, DDP(bucket_cap_mb=values * 4 / 2**20), Precision.none, CPU)
    blocks = [(f"block{index}", block) for index, block in enumerate(model)]
    return fsdp.parallelize(model, blocks, (), (), (), FSDP(), Precision.none, CPU)


def run(case: str, folder: Path, rank: int, world_size: int) -> None:
    strategy, computes = case.removesuffix(COMPUTING), case.endswith(COMPUTING)
    model = nn.Sequential(*(ComputingBlock() if computes else Block() for _ in range(BLOCKS)))
    module = parallelize(strategy, model).module
    (folder / case).mkdir(exist_ok=True)
    settings = {"parallel": strategy, "native": strategy == "fsdp"}
    with recording(folder / case, CPU, "observe", rank, world_size, model, module, **settings) as instrument:

        def step(number: int) -> None:
            with instrument.recorder.step(StepFacts(0, number, number, None, number < WARMUP)):
                module(torch.ones((4, TOKENS, WIDTH) if computes else 8)).sum().backward()
            for parameter in module.parameters():
                parameter.grad = None

        for number in range(WARMUP):
            step(number)
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
            for number in range(WARMUP, WARMUP + PROFILED):
                step(number)
    profiler.export_chrome_trace(str(folder / f"{case}_{rank}.trace.json"))


def main() -> None:
    torch.set_num_threads(1)
    topology = read_topology()
    with process_group(topology, CPU, 60):
        for case in (*STRATEGIES, *(strategy + COMPUTING for strategy in STRATEGIES)):
            run(case, Path(sys.argv[1]), topology.rank, topology.world_size)
            dist.barrier()


if __name__ == "__main__":
    main()
