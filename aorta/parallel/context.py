"""Context and expert parallelism: ranks that share sequences, or the experts of a layer, beside data parallelism.

Context: every rank has a part of each sequence, and attention gathers the keys and values of all parts. A sequence is
cut into twice as many chunks as there are ranks, and rank r has the r-th from either end, so that causal attention is
the same work for every rank. Gathering, rather than passing keys round a ring: Llama Team, "The Llama 3 Herd of
Models", arXiv 2407.21783, section 3.3.2. torch's own context parallelism replaces kernels that a CPU has not got
(torch/distributed/tensor/experimental/_context_parallel/_attention.py, `custom_ops`); this is the same everywhere.

Experts: every rank has some experts of each layer, and tokens travel to them and back by all-to-all.

Must not know which model it is, or how tokens are assigned: it splits modules called with queries, keys and values, or
with [experts, capacity, width].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from aorta.config.schema import CP, EP, Precision
from aorta.parallel.plan import Cut, Inputs, ParallelizedModel, replicate

# torch 2.13 renamed it; both take the same arguments, and reduce-scatter the sum of the gradients in backward.
_all_gather = getattr(functional, "all_gather_single_autograd", None) or functional.all_gather_tensor_autograd


def parallelize(
    model: nn.Module, attentions: Iterable[nn.Module], settings: CP, precision: Precision, device: torch.device
) -> ParallelizedModel:
    # A group of its own: on an accelerator what attention waits for would otherwise queue behind DDP's all-reduces.
    group = dist.new_group(group_desc="mesh_context")
    mesh = DeviceMesh.from_group(group, device.type, mesh_dim_names=("context",))
    split(attentions, mesh)
    whole = replicate(model, settings, precision, device)
    facts = {**whole.facts, "mesh": {"context": mesh.size()}}
    return replace(whole, data_rank=0, data_size=1, cut=cut(mesh), facts=facts)


def cut(mesh: DeviceMesh) -> Cut:
    """Return a function that cuts this rank's part of the 1-D `mesh` from inputs and target [batch, positions], and
    appends its positions to the inputs. All ranks have equally many, so the mean of their gradients is that of the
    mean loss over all positions.
    """
    rank, ranks = mesh.get_local_rank(), mesh.size()

    def of_this_rank(inputs: Inputs, target: torch.Tensor) -> tuple[Inputs, torch.Tensor]:
        positions_S = torch.arange(target.shape[1], device=target.device)  # noqa: N806
        own = tuple(own_chunks(tensor, 1, rank, ranks) for tensor in inputs)
        return (*own, own_chunks(positions_S, 0, rank, ranks)), own_chunks(target, 1, rank, ranks)

    return of_this_rank


def split(attentions: Iterable[nn.Module], mesh: DeviceMesh) -> None:
    """Let each module attend from this rank's chunks to those of the whole sequence before them: an all-gather over the
    1-D `mesh` in forward, a reduce-scatter in backward, each waited for at once.
    """
    rank, ranks = mesh.get_local_rank(), mesh.size()

    def over_ranks(
        alone: Callable[..., torch.Tensor],
        query_BHSE: torch.Tensor,  # noqa: N803
        key_BGSE: torch.Tensor,  # noqa: N803
        value_BGSE: torch.Tensor,  # noqa: N803
    ) -> torch.Tensor:
        own = torch.stack((key_BGSE, value_BGSE))
        gathered = _all_gather(own, 0, mesh).view(ranks, *own.shape)
        key_BGTE, value_BGTE = in_order(gathered, 4)  # noqa: N806
        chunks = query_BHSE.chunk(2, dim=2)
        ends = [(index + 1) * chunks[0].shape[2] for index in (rank, 2 * ranks - 1 - rank)]
        seen = [
            alone(chunk, key_BGTE[:, :, :end], value_BGTE[:, :, :end]) for chunk, end in zip(chunks, ends, strict=True)
        ]
        return torch.cat(seen, dim=2)

    for module in attentions:
        module.forward = partial(over_ranks, module.forward)


def own_chunks(tensor: torch.Tensor, dim: int, rank: int, ranks: int) -> torch.Tensor:
    chunks = tensor.chunk(2 * ranks, dim)
    return torch.cat((chunks[rank], chunks[-1 - rank]), dim)


def in_order(gathered: torch.Tensor, dim: int) -> torch.Tensor:
    """Join [ranks, ...], each with its chunks along `dim`, to [...] with those of the whole sequence."""
    early, late = gathered.chunk(2, dim)
    return torch.cat((*early, *reversed(late.unbind())), dim - 1)


def parallelize_experts(
    model: nn.Module, experts: Iterable[nn.Module], settings: EP, precision: Precision, device: torch.device
) -> ParallelizedModel:
    ranks = dist.get_world_size()
    mesh = init_device_mesh(device.type, (ranks,), mesh_dim_names=("expert",))
    for module in experts:
        split_experts(module, mesh)
        for parameter in module.parameters():
            # The sum over all tokens of every rank; the loss is the mean over ranks, whose gradients DDP averages.
            parameter.register_hook(lambda gradient: gradient / ranks)  # type: ignore[no-untyped-call]
    whole = replicate(model, settings, precision, device)
    return replace(whole, facts={**whole.facts, "mesh": {"expert": ranks}})


def split_experts(module: nn.Module, mesh: DeviceMesh) -> None:
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
