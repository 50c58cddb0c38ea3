"""Every kind of collective on one card through the seam: values, and what was recorded."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from aorta.instrument.instrumentation import Instrumentation
from aorta.instrument.open_step import StepFacts
from aorta.records.clocks import read_clocks
from aorta.records.schema import Step
from tests.gpu.device import MODES, needs_gpu

pytestmark = [
    pytest.mark.gpu,
    needs_gpu,
    # torch 2.13 renamed these functions, and says so; 2.11 knows the old names only.
    pytest.mark.filterwarnings("ignore:.*is deprecated. Please use:FutureWarning"),
]
Call = Callable[[torch.Tensor, torch.Tensor, bool], "dist.Work | None"]
CALLS: dict[str, tuple[Call, str]] = {
    "all_reduce": (lambda x, out, a: dist.all_reduce(out.copy_(x), async_op=a), "allreduce"),
    "all_gather_into_tensor": (lambda x, out, a: dist.all_gather_into_tensor(out, x, async_op=a), "allgather"),
    "all_gather": (lambda x, out, a: dist.all_gather([out], x, async_op=a), "allgather"),
    "reduce_scatter_tensor": (lambda x, out, a: dist.reduce_scatter_tensor(out, x, async_op=a), "reducescatter"),
    "reduce_scatter": (lambda x, out, a: dist.reduce_scatter(out, [x], async_op=a), "reducescatter"),
    "broadcast": (lambda x, out, a: dist.broadcast(out.copy_(x), 0, async_op=a), "broadcast"),
    "all_to_all_single": (lambda x, out, a: dist.all_to_all_single(out, x, async_op=a), "alltoall"),
    "all_to_all": (lambda x, out, a: dist.all_to_all([out], [x], async_op=a), "alltoall"),
    "reduce": (lambda x, out, a: dist.reduce(out.copy_(x), 0, async_op=a), "reduce"),
    "gather": (lambda x, out, a: dist.gather(x, [out], 0, async_op=a), "gather"),
    "scatter": (lambda x, out, a: dist.scatter(out, [x], 0, async_op=a), "scatter"),
}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CALLS)
def test_values_and_rows(device: torch.device, name: str, mode: str, asynchronous: bool) -> None:
    call, kind = CALLS[name]
    lines: list[Step] = []
    with Instrumentation(device, mode, 0, 1, read_clocks(), lines.append) as instrument:
        x = torch.arange(1024.0, device=device)
        out = torch.full_like(x, -1)
        with instrument.recorder.step(StepFacts(0, 0, 0, 0.0, warmup=False)):
            work = call(x, out, asynchronous)
            if asynchronous:
                work.wait()
            twice = out * 2
        instrument.recorder.finish()
    assert torch.equal(twice, x * 2)
    (line,) = lines
    if mode == "off":
        assert line.collectives == []
        return
    assert [(row.kind, row.bytes, row.dtype, row.end_source) for row in line.collectives] == [
        (kind, 4096, "float32", "event")
    ]
    assert line.coverage.complete, line.coverage.reason
    # The device has nothing else to do and may wait for the host: then the time of the collective is a bound.
    assert line.overlap["comm_ms"] is not None or line.bounds["comm_ms"][1] > 0


def test_a_barrier_and_cpu_tensors_go_beside_the_device(device: torch.device) -> None:
    lines: list[Step] = []
    with Instrumentation(device, "dedicated", 0, 1, read_clocks(), lines.append) as instrument:
        with instrument.recorder.step(StepFacts(0, 0, 0, 0.0, warmup=False)):
            dist.all_reduce(torch.ones(4))
            dist.barrier()
        instrument.recorder.finish()
    assert [row.kind for row in lines[0].collectives] == ["allreduce", "barrier"]
    assert lines[0].collectives[0].end_source in {"future", "wait"}
