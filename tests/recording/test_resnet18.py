"""ResNet-18 in real runs: the tutorial's lines, windows and losses, and what AORTA sees of them."""

from __future__ import annotations

import re

import pytest
import torch
from torch.nn.functional import mse_loss

from aorta.workload.resnet18 import ResNet18
from tests.profiling.windows import files_below, numbers, read
from tests.runs import job, losses, record, succeeded

pytestmark = pytest.mark.thorough

SMALL = ("workload.batch_size=1", "workload.image_size=48", "training.max_steps=20", "training.device=cpu")
BLOCKS = ["stem", *(f"layer{stage}.{block}" for stage in (1, 2, 3, 4) for block in (0, 1)), "fc"]


@pytest.mark.dist
@pytest.mark.spec("B9", "B12")
def test_B9_B12_the_tutorial_s_lines_window_and_blocks_and_a_clean_end(tmp_path):
    words = (*SMALL, f"training.output_dir={tmp_path}", "experiment=tutorial")
    said = succeeded(job(*words, launcher="torchrun")).stderr  # a clean end is the real one
    # Anywhere in a line: what C++ writes at the same time, piece by piece, may stand before it.
    assert sorted(re.findall(r"\[rank \d+\] \w+ worker", said)) == [
        f"[rank {rank}] {what} worker" for rank in (0, 1) for what in ("finished", "starting")
    ]
    loss, other = (losses(tmp_path, rank) for rank in (0, 1))
    assert loss != other  # each rank has its own batch
    assert re.findall(r"\[rank \d+\] step \d+/\d+ loss=\S+", said) == [
        f"[rank 0] step {step}/20 loss={loss[step - 1]:.4f}" for step in (10, 20)
    ]
    assert "destroy_process_group" not in said
    assert files_below(tmp_path / "torch_profiler") == [f"rank{rank}_iter16_18.json" for rank in (0, 1)]
    for rank in (0, 1):
        assert numbers(read(tmp_path / "torch_profiler" / f"rank{rank}_iter16_18.json")) == [15, 16, 17]
        steps = record(tmp_path, rank).steps
        assert len(steps) == 20
        for step in steps:
            passes = {phase: [s.block for s in step.compute if s.phase == phase] for phase in ("forward", "backward")}
            assert passes == {"forward": [*BLOCKS, "loss"], "backward": ["loss", *reversed(BLOCKS)]}
            assert step.coverage.complete
            reduced = [row for row in step.collectives if row.kind == "allreduce"]
            assert {row.dtype for row in reduced} == {"bfloat16"}
            assert sum(row.bytes for row in reduced) == 2 * 11_689_512
    assert any(step.overlap["overlap_ratio"] > 0 for step in steps)


@pytest.mark.spec("B9")
def test_B9_the_losses_are_those_of_the_step_written_out(tmp_path):
    words = ("workload=resnet18", "parallel=none", "workload.dtype=fp32", "training.max_steps=8")
    succeeded(job(*SMALL, f"training.output_dir={tmp_path}", *words, ranks=1))
    torch.manual_seed(42)
    model = ResNet18()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(42)
    images, target = (torch.randn(*size, generator=generator) for size in ((1, 3, 48, 48), (1, 1000)))
    expected = []
    for _ in range(8):
        optimizer.zero_grad(set_to_none=True)
        loss = mse_loss(model(images), target)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert losses(tmp_path) == pytest.approx(expected, rel=1e-5)
    assert abs(expected[-1] / expected[0] - 1) > 1e-3  # so a step that did nothing would be seen
