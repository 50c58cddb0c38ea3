"""Strategies on a device mesh: FSDP2 alone, as hybrid sharding, and beside tensor, expert, pipeline and context
parallelism.

The facts of the `ParallelizedModel` name the mesh. Must not decide how a block is sharded (`fsdp`, `expert`,
`context`), or how stages are run (`pipeline`).
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from aorta.config.schema import FSDP, FSDPCP, FSDPEP, FSDPPP, FSDPTP, HSDP, TP, Precision
from aorta.parallel import context, fsdp
from aorta.parallel.plan import Blocks, ParallelizedModel, Parts, autocast, sharding_facts


def split_layers(parts: Iterable[Parts], mesh: DeviceMesh) -> None:
    """Split the layers of every part over the 1-D `mesh`.

    A part makes one all-reduce in forward, after its `rows`, and one in backward for each of its `columns` layers:
    Megatron-LM's scheme (Shoeybi et al., 2019), without its fusing of the layers that share an input.
    """
    for module, layers in parts:
        plan: dict[str, ParallelStyle] = {
            name: ColwiseParallel() if how == "columns" else RowwiseParallel() for name, how in layers.items()
        }
        parallelize_module(module, mesh, plan)


def parallelize(
    model: nn.Module,
    blocks: Blocks,
    parts: Iterable[Parts],
    experts: Iterable[nn.Module],
    attentions: Iterable[nn.Module],
    settings: FSDP | TP,
    precision: Precision,
    device: torch.device,
) -> ParallelizedModel:
    """Distribute `model` over a mesh of all ranks; those that do something together follow one another.

    Args:
        model: of a pipeline this rank's stages, by their number, in its `stages`.
        blocks, parts, experts, attentions: as of `strategies.parallelize`.
    """
    ranks = dist.get_world_size()
    match settings:
        case TP():  # every rank computes what is not split
            mesh = _mesh(device, tensor=ranks)
            split_layers(parts, mesh)
            return ParallelizedModel(
                model, arithmetic=autocast(precision, device), data_rank=0, data_size=1, facts=_facts(mesh)
            )
        case HSDP():  # a copy of the model is sharded over the ranks that share it
            mesh = _mesh(device, replicate=settings.replicas, shard=ranks // settings.replicas)
            return fsdp.parallelize(model, blocks, settings, precision, device, mesh, _facts(mesh))
        case FSDPTP():  # layers are split over some ranks, each rank's part is sharded over the others
            mesh = _mesh(device, shard=ranks // settings.tp_size, tensor=settings.tp_size)
            split_layers(parts, mesh["tensor"])
            return fsdp.parallelize(model, blocks, settings, precision, device, mesh["shard"], _facts(mesh))
        case FSDPCP():  # sequences are split over some ranks, the model over all: each has gradients of its own
            mesh = _mesh(device, shard=ranks // settings.cp_size, context=settings.cp_size)
            context.split(attentions, mesh["context"])
            every = mesh._flatten("shard_context")
            sharded = fsdp.parallelize(model, blocks, settings, precision, device, every, _facts(mesh))
            data_rank, data_size = mesh.get_local_rank("shard"), mesh["shard"].size()
            return replace(sharded, data_rank=data_rank, data_size=data_size, cut=context.cut(mesh["context"]))
        case FSDPEP():  # experts are split over some ranks and sharded over the others, the rest is sharded over all
            mesh, separate = _mesh(device, data=ranks // settings.ep_size, expert=settings.ep_size), list(experts)
            for module in separate:
                context.split_experts(module, mesh["expert"])
            sharded_apart = fsdp.SeparatelySharded(separate, mesh["data"], summed=ranks)
            everyone = mesh._flatten("shard")
            return fsdp.parallelize(model, blocks, settings, precision, device, everyone, _facts(mesh), sharded_apart)
        case FSDPPP():
            return _sharded_pipelines(model, blocks, settings, precision, device)
        case _:
            mesh = _mesh(device, shard=ranks)
            return fsdp.parallelize(model, blocks, settings, precision, device, mesh, _facts(mesh))


def _sharded_pipelines(
    model: nn.Module, blocks: Blocks, settings: FSDPPP, precision: Precision, device: torch.device
) -> ParallelizedModel:
    """Run pipelines of `pp_size` ranks beside each other, each on batches of its own, and shard every stage over the
    ranks that have it.
    """
    from aorta.parallel import pipeline  # no other strategy here needs torch's schedules

    mesh = _mesh(device, pipeline=settings.pp_size, data=dist.get_world_size() // settings.pp_size)
    for stage in pipeline.stages_of(model).values():
        within = {id(module) for module in stage.modules()}
        own = [(name, block) for name, block in blocks if id(block) in within]
        fsdp.shard(stage, own, settings, precision, device, mesh["data"])
    # FSDP casts by itself: no autocast.
    whole = pipeline.parallelize(model, settings, nullcontext, device, mesh.get_group("pipeline"))
    return replace(
        whole,
        data_rank=mesh.get_local_rank("data"),
        data_size=mesh["data"].size(),
        streams={fsdp.PRIORITY: fsdp.STREAMS * settings.stages_per_rank},  # each stage is a root of its own
        facts={**_facts(mesh), **whole.facts, **sharding_facts(blocks, settings, precision)},
    )


def _mesh(device: torch.device, **sizes: int) -> DeviceMesh:
    return init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def _facts(mesh: DeviceMesh) -> dict[str, object]:
    assert mesh.mesh_dim_names is not None  # set by _mesh
    return {"mesh": dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))}
