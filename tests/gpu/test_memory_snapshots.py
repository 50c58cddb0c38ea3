"""A snapshot of a real allocator where memory runs out; that of the simulated device keeps no history, and says so."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

import aorta
from aorta.distributed import cuda
from tests.gpu.device import needs_gpu
from tests.simulated import load

pytestmark = [pytest.mark.gpu, needs_gpu]
MORE_BYTES = 1 << 46
"""64 TiB: more than any device has."""


def test_where_a_device_runs_out_the_snapshot_says_what_was_asked_for(tmp_path: Path) -> None:
    if load.loaded():
        assert not cuda.has_memory_history()
        return
    kept = torch.ones(1 << 20, device="cuda")

    def loop() -> None:
        with aorta.Profiler(tmp_path, 4, 1, 1, None, with_stack=False, oom_snapshot=True) as profiler:
            profiler.step()
            torch.empty(MORE_BYTES, dtype=torch.uint8, device="cuda")

    with pytest.raises(torch.OutOfMemoryError):
        loop()
    content = pickle.loads((tmp_path / "memory_snapshots" / "oom-rank-0.snapshot.pickle").read_bytes())
    assert any(block["size"] >= kept.nbytes for segment in content["segments"] for block in segment["blocks"])
    assert any(event["action"] == "oom" for trace in content["device_traces"] for event in trace)
