"""The engine's own steps on one card change nothing (that nothing waits and all is seen, `gpu_check` says); and several
gloo ranks on one card, which this is the program of (`python -m`).
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from aorta.distributed import cuda
from aorta.distributed.topology import read_topology
from aorta.instrument.instrumentation import Instrumentation
from aorta.recording.isolated_baselines import Baselines
from aorta.records.clocks import read_clocks
from aorta.records.schema import InstrumentMode, Step
from aorta.records.step_line import StepFacts
from tests.gpu.device import needs_gpu
from tests.loop import Loop
from tests.runs import HANGS_S, finished, succeeded, torchrun

pytestmark = [
    pytest.mark.gpu,
    needs_gpu,
    # FSDP warns that the scorer returns a view; nothing is written into it.
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning"),
]
MODES: tuple[InstrumentMode, ...] = ("dedicated", "observe", "off")
SMALL = ("training.device=cuda", "workload.num_layers=2", "dataset.num_samples=256", "training.log_interval=1")
every_strategy = pytest.mark.parametrize("strategy", ["ddp", "fsdp"])


def loop(device: torch.device, lines: list[Step], strategy: str, mode: str) -> Loop:
    words = (*SMALL, f"parallel={strategy}", f"instrument.mode={mode}")
    return Loop(words, read_topology(), device, lines.append)


@every_strategy
def test_training_is_the_same_in_every_mode(device: torch.device, strategy: str) -> None:
    losses = {}
    for mode in MODES:
        lines: list[Step] = []
        one = loop(device, lines, strategy, mode)
        for _ in range(10):
            one.step()
        one.finish()
        losses[mode] = [line.loss for line in lines]
    assert losses["dedicated"] == losses["observe"] == losses["off"]


@every_strategy
def test_isolated_baselines_leave_training_as_it_was(device: torch.device, strategy: str) -> None:
    lines: list[Step] = []
    one = loop(device, lines, strategy, "dedicated")
    for _ in range(3):
        one.step()
    parts = [getattr(p, "_local_tensor", p).detach() for p in one.model.parameters()]
    before = [part.clone() for part in parts]
    Baselines(one.step_of_training, one.batches, lambda: True, steps=4, warmup=1).run()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(before, parts, strict=True))
    one.finish()
    compute = [line for line in lines if line.phase == "compute_only"]
    comm = [line for line in lines if line.phase == "comm_only"]
    assert len(compute) == 4
    assert all(line.coverage.complete and line.coverage.issued == 0 for line in compute)
    wanted = sorted((row.kind, row.bytes) for row in lines[2].collectives)
    assert len(comm) == (4 if wanted else 0)  # FSDP2 exchanges nothing with itself
    assert all(sorted((row.kind, row.bytes) for row in line.collectives) == wanted for line in comm)


@pytest.mark.dist
@pytest.mark.thorough
def test_two_ranks_on_one_card_get_right_values_in_every_mode() -> None:
    said = succeeded(finished(torchrun(2, "-m", "tests.gpu.test_engine"), HANGS_S)).stdout.strip()
    if said.startswith("unsupported:"):
        pytest.skip(said)
    assert said == "right"


def main() -> str:
    """Of two gloo ranks on one card: values of device tensors through the seam, in each mode. Fails, or says that they
    are right, or why this torch's gloo does not take device tensors.
    """
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    try:
        dist.all_reduce(torch.ones(1, device=device))
    except RuntimeError as error:
        return f"unsupported: {str(error).splitlines()[0]}"
    for mode in MODES:
        lines: list[Step] = []
        with Instrumentation(device, mode, rank, size, read_clocks(), lines.append, native=True) as instrument:
            for number in range(5):
                with instrument.recorder.step(StepFacts(0, number, number, 0.0, warmup=False)):
                    tensor = torch.zeros(1 << 20, device=device)
                    cuda.spin(20_000_000)
                    tensor.fill_(rank + 1)
                    dist.all_reduce(tensor, async_op=True).wait()
                    copy = tensor.clone()
                    root = torch.full((8,), float(rank), device=device)
                    dist.broadcast(root, 1)
                assert bool((copy == size * (size + 1) / 2).all()), f"{mode}: wrong sum"
                assert bool((root == 1).all()), f"{mode}: wrong broadcast"
            instrument.recorder.finish()
        kinds = [[row.kind for row in line.collectives] for line in lines]
        assert kinds == [[] if mode == "off" else ["allreduce", "broadcast"]] * 5, (mode, kinds)
    dist.destroy_process_group()
    return "right" if rank == 0 else ""


if __name__ == "__main__":
    print(main(), end="")  # noqa: T201
