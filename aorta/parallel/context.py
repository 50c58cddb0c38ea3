"""Context parallelism: every rank has a part of each sequence, and attention gathers the keys and values of all parts.

A sequence is cut into twice as many chunks as there are ranks, and rank r has the r-th from either end, so that causal
attention is the same work for every rank. Gathering, rather than passing keys round a ring: Llama Team, "The Llama 3
Herd of Models", arXiv 2407.21783, section 3.3.2. torch's own context parallelism replaces kernels that a CPU has not
got (torch/distributed/tensor/experimental/_context_parallel/_attention.py, `custom_ops`); this is the same everywhere.
Must not know which model it is: it splits modules called with queries, keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from aorta.config.schema import CP, Precision
from aorta.parallel import ddp
from aorta.parallel.plan import Cut, Inputs, ParallelizedModel

# torch 2.13 renamed it; both take the same arguments, and reduce-scatter the sum of the gradients in backward.
_all_gather = getattr(functional, "all_gather_single_autograd", None) or functional.all_gather_tensor_autograd


def parallelize(
    model: nn.Module, attentions: Iterable[nn.Module], settings: CP, precision: Precision, device: torch.device
) -> ParallelizedModel:
    """Split sequences over all ranks; `model` is replicated."""
    # A group of its own: on an accelerator what attention waits for would otherwise queue behind DDP's all-reduces.
    group = dist.new_group(group_desc="mesh_context")
    mesh = DeviceMesh.from_group(group, device.type, mesh_dim_names=("context",))
    split(attentions, mesh)
    whole = ddp.parallelize(model, settings, precision, device)
    facts = {**whole.facts, "mesh": {"context": mesh.size()}}
    return replace(whole, data_rank=0, data_size=1, cut=cut(mesh), facts=facts)


def cut(mesh: DeviceMesh) -> Cut:
    """Return a function that cuts this rank's part of the 1-D `mesh` from inputs and target [batch, positions], and
    appends its positions to the inputs.

    Each rank's loss is the mean over its positions. They are equally many, so the mean of the ranks' gradients is the
    gradient of the mean over all.
    """
    rank, ranks = mesh.get_local_rank(), mesh.size()

    def of_this_rank(inputs: Inputs, target: torch.Tensor) -> tuple[Inputs, torch.Tensor]:
        positions_S = torch.arange(target.shape[1], device=target.device)  # noqa: N806
        own = tuple(own_chunks(each, 1, rank, ranks) for each in inputs)
        return (*own, own_chunks(positions_S, 0, rank, ranks)), own_chunks(target, 1, rank, ranks)

    return of_this_rank


def split(attentions: Iterable[nn.Module], mesh: DeviceMesh) -> None:
    """Let each module attend from this rank's chunks to those of the whole sequence before them: an all-gather over the
    1-D `mesh` in forward, a reduce-scatter in backward, each waited for at once.
    """
    rank, ranks = mesh.get_local_rank(), mesh.size()
    for module in attentions:
        module.forward = _over_ranks(module, mesh, rank, ranks)


def own_chunks(tensor: torch.Tensor, dim: int, rank: int, ranks: int) -> torch.Tensor:
    """Return the two chunks of a rank along `dim`, whose length is a multiple of 2 x ranks."""
    chunks = tensor.chunk(2 * ranks, dim)
    return torch.cat((chunks[rank], chunks[-1 - rank]), dim)


def in_order(gathered: torch.Tensor, dim: int) -> torch.Tensor:
    """Join [ranks, ...], each with its chunks along `dim`, to [...] with those of the whole sequence."""
    early, late = gathered.chunk(2, dim)
    return torch.cat((*early, *reversed(late.unbind())), dim - 1)


def _over_ranks(module: nn.Module, mesh: DeviceMesh, rank: int, ranks: int) -> Callable[..., torch.Tensor]:
    """Return the forward pass of `module`, called with this rank's chunks."""
    alone = module.forward

    def forward(query_BHSE: torch.Tensor, key_BGSE: torch.Tensor, value_BGSE: torch.Tensor) -> torch.Tensor:  # noqa: N803
        own = torch.stack((key_BGSE, value_BGSE))
        gathered = _all_gather(own, 0, mesh).view(ranks, *own.shape)
        key_BGTE, value_BGTE = in_order(gathered, 4)  # noqa: N806
        chunks = query_BHSE.chunk(2, dim=2)
        ends = [(index + 1) * chunks[0].shape[2] for index in (rank, 2 * ranks - 1 - rank)]
        seen = [
            alone(chunk, key_BGTE[:, :, :end], value_BGTE[:, :, :end]) for chunk, end in zip(chunks, ends, strict=True)
        ]
        return torch.cat(seen, dim=2)

    return forward
