"""Gradients of separately sharded modules are the mean over all ranks, also where each part is on one rank only."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from aorta.config.schema import FSDPEP, DType, Precision
from aorta.parallel import fsdp

RANKS = 4
"""Whose gradients have arrived by all-to-all, added up."""


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3, 5))

    def forward(self, tokens_ECD: torch.Tensor) -> torch.Tensor:  # noqa: N803
        return torch.bmm(tokens_ECD, self.weight)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts()

    def forward(self, tokens_ECD: torch.Tensor) -> torch.Tensor:  # noqa: N803
        out: torch.Tensor = self.experts(tokens_ECD)
        return out


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """One rank, alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("reduce_dtype", ["null", "bf16", "fp16"])
def test_a_gradient_is_divided_once(mesh: DeviceMesh, reduce_dtype: str) -> None:
    layer = Layer()
    model = nn.Sequential(layer)
    settings = FSDPEP(reduce_dtype=None if reduce_dtype == "null" else DType(reduce_dtype))
    separate = fsdp.SeparatelySharded([layer.experts], mesh, summed=RANKS)
    fsdp.shard(model, [("layer", layer)], settings, Precision.none, torch.device("cpu"), mesh, separate)
    model(torch.ones(2, 2, 3)).sum().backward()
    gradient = layer.experts.weight.grad
    assert isinstance(gradient, torch.distributed.tensor.DTensor)
    assert torch.equal(gradient.to_local(), torch.full((2, 3, 5), 2 / RANKS))
