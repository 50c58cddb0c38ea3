"""Two gloo ranks on one card (a torchrun program): values of device tensors through the seam, in each mode.

Prints `unsupported: WHY` where this torch's gloo does not take device tensors, else `right` from rank 0.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from aorta.distributed import cuda
from aorta.instrument.instrumentation import Instrumentation
from aorta.records.clocks import read_clocks
from aorta.records.schema import Step
from aorta.records.step_line import StepFacts

DEVICE = torch.device("cuda", 0)


def main() -> int:
    """Check every mode."""
    torch.cuda.set_device(DEVICE)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    try:
        dist.all_reduce(torch.ones(1, device=DEVICE))
    except RuntimeError as error:
        print(f"unsupported: {str(error).splitlines()[0]}")  # noqa: T201
        return 0
    for mode in ("dedicated", "observe", "off"):
        lines: list[Step] = []
        with Instrumentation(DEVICE, mode, rank, size, read_clocks(), lines.append, native=True) as instrument:
            for number in range(5):
                with instrument.recorder.step(StepFacts(0, number, number, 0.0, warmup=False)):
                    tensor = torch.zeros(1 << 20, device=DEVICE)
                    cuda.spin(20_000_000)
                    tensor.fill_(rank + 1)
                    work = dist.all_reduce(tensor, async_op=True)
                    work.wait()
                    copy = tensor.clone()
                    root = torch.full((8,), float(rank), device=DEVICE)
                    dist.broadcast(root, 1)
                assert bool((copy == size * (size + 1) / 2).all()), f"{mode}: wrong sum"
                assert bool((root == 1).all()), f"{mode}: wrong broadcast"
            instrument.recorder.finish()
        kinds = [[row.kind for row in line.collectives] for line in lines]
        assert kinds == [[] if mode == "off" else ["allreduce", "broadcast"]] * 5, (mode, kinds)
    dist.destroy_process_group()
    if rank == 0:
        print("right")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
