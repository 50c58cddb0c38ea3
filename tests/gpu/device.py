"""What the GPU tests share: the skip, a world of one with NCCL/RCCL, and kernels that take a known time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from aorta.launch.process_group import process_group
from aorta.launch.topology import read_topology

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA or HIP device")
MODES = ("dedicated", "observe", "off")


@contextmanager
def world_of_one() -> Iterator[torch.device]:
    """The process group a run on one card has, as `train.py` opens it."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    with process_group(read_topology(), device, 120):
        yield device


def cycles_per_ms() -> float:
    """How many cycles of `torch.cuda._sleep` last a millisecond, by the host's clock round a long sleep."""
    cycles = 200_000_000
    torch.cuda._sleep(cycles)  # the clock of the device comes up
    torch.cuda.synchronize()
    begin = time.perf_counter_ns()
    torch.cuda._sleep(cycles)
    torch.cuda.synchronize()
    return cycles / ((time.perf_counter_ns() - begin) / 1e6)


def default_group() -> str:
    """Name of the default process group, as the record has it."""
    group = dist.group.WORLD
    assert group is not None
    return str(group.group_name)
