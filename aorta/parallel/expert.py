"""Expert parallelism: every rank has some experts of each layer, and tokens travel to them and back by all-to-all.

Must not know which model it is, or how tokens are assigned: it splits modules called with [experts, capacity, width].
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from aorta.config.schema import EP, Precision
from aorta.parallel import ddp
from aorta.parallel.plan import ParallelizedModel


def parallelize(
    model: nn.Module, experts: Iterable[nn.Module], settings: EP, precision: Precision, device: torch.device
) -> ParallelizedModel:
    """Split `experts` over all ranks; the rest of `model` is replicated."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh(device.type, (ranks,), mesh_dim_names=("expert",))
    for module in experts:
        split(module, mesh)
        for parameter in module.parameters():
            # The sum over all tokens of every rank; the loss is the mean over ranks, whose gradients DDP averages.
            parameter.register_hook(lambda gradient: gradient / ranks)  # type: ignore[no-untyped-call]
    whole = ddp.parallelize(model, settings, precision, device)
    return replace(whole, facts={**whole.facts, "mesh": {"expert": ranks}})


def split(module: nn.Module, mesh: DeviceMesh) -> None:
    """Keep this rank's part of the experts in `module`, and exchange tokens round it over the 1-D `mesh`: first of all
    experts here for all tokens of the experts here, then back. Each part of a rank has the same number of rows, so no
    rank has to be asked for its own.
    """
    parts = mesh.size()
    for name, parameter in list(module.named_parameters(recurse=False)):
        # Every rank has made all of them from one seed: nothing is sent.
        part = distribute_tensor(parameter.data, mesh, [Shard(0)], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(part))

    def to_experts(_module: nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        (rows_ECD,) = inputs  # noqa: N806
        arrived = all_to_all_single_autograd(rows_ECD.contiguous(), None, None, mesh)
        return (arrived.view(parts, -1, *rows_ECD.shape[1:]).transpose(0, 1).flatten(1, 2),)

    def from_experts(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        by_origin = output.view(len(output), parts, -1, output.shape[-1]).transpose(0, 1).flatten(0, 1)
        back: torch.Tensor = all_to_all_single_autograd(by_origin.contiguous(), None, None, mesh)
        return back

    module.register_forward_pre_hook(to_experts)
    module.register_forward_hook(from_experts)
