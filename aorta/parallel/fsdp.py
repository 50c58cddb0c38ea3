"""Strategies on a device mesh: FSDP2 (`fully_shard` on every block and on the root) alone, as hybrid sharding, and
beside tensor, expert, pipeline and context parallelism; and FSDP1 (`FullyShardedDataParallel`). With prefetching or,
for comparison, without any overlap.

On a CPU FSDP1 has no asynchronous form: each collective is waited for where it is issued, so `overlap` and prefetching
only affect its runs on accelerators. Must not shard by anything but the workload's blocks.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from aorta.config.schema import FSDP, FSDP1, FSDPCP, FSDPEP, FSDPPP, FSDPTP, HSDP, TP, Precision
from aorta.config.schema import BackwardPrefetch as When
from aorta.parallel import context
from aorta.parallel.plan import Blocks, ParallelizedModel, Parts, autocast, local_part, sharding_dtypes, sharding_facts

# torch 2.13 renamed it; both take the same arguments.
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

STREAMS = 3
PRIORITY = -1
"""Streams that FSDP2 opens on an accelerator, with that priority: copying into an all-gather, the all-gather, the
reduce-scatter; its all-reduce between copies has one more, of priority 0
(torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, FSDPCommContext)."""


@dataclass(frozen=True)
class SeparatelySharded:
    """Submodules of blocks that are sharded over a mesh of their own, e.g. experts.

    Attributes:
        modules: each within one block.
        mesh: 1-D, over which they are sharded.
        summed: gradients of how many ranks are added up in the end, of which they have to be the mean.
    """

    modules: Sequence[nn.Module]
    mesh: DeviceMesh
    summed: int


def shard(
    model: nn.Module,
    blocks: Blocks,
    settings: FSDP,
    precision: Precision,
    device: torch.device,
    mesh: DeviceMesh,
    separate: SeparatelySharded | None = None,
) -> FSDPModule:
    """Shard `blocks` one by one, and with the root what is left of `model`, over the last dimension of `mesh`; of two,
    the first one holds replicas. Returns the root.

    With `overlap=false` nothing is prefetched, all-gathers are waited for where they are needed, and each
    reduce-scatter is waited for before the next block computes.
    """
    param_dtype, reduce_dtype = sharding_dtypes(settings, precision)
    policy, reshard = MixedPrecisionPolicy(param_dtype, reduce_dtype), settings.reshard_after_forward
    units: list[list[FSDPModule]] = []
    for _, block in blocks:
        apart = [] if separate is None else [module for module in block.modules() if module in separate.modules]
        inner = [_shard_separately(module, cast(Any, separate), reshard, policy) for module in apart]
        units.append([fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy), *inner])
    root = fully_shard(model, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    if settings.overlap:
        prefetch(units, settings.forward_prefetch, settings.backward_prefetch)
        # On an accelerator FSDP overlaps through its own streams. A CPU has none, and only an asynchronous all-gather
        # can overlap with compute.
        root._set_unshard_async_op(device.type == "cpu")
    else:
        prefetch(units, 0, 0)
        compute: Any = None if device.type == "cpu" else torch.accelerator.current_stream(device)
        for module in (*(module for unit in units for module in unit), root):
            module.set_custom_reduce_scatter(WaitedReduceScatter(device))  # type: ignore[arg-type]  # same shape
            if mesh.ndim > 1 and compute is not None:  # called on the all-reduce stream after each all-reduce
                module.set_all_reduce_hook(lambda _: compute.wait_stream(torch.accelerator.current_stream()))
    return root


def _shard_separately(
    module: nn.Module, separate: SeparatelySharded, reshard: bool, policy: MixedPrecisionPolicy
) -> FSDPModule:
    ranks = separate.mesh.size()

    def placement(parameter: nn.Parameter) -> Shard:
        # By whole experts; where there are too few of them, or they do not divide, each one is cut.
        part = local_part(parameter)
        return Shard(1 if part.shape[0] % ranks and part.shape[1] % ranks == 0 else 0)

    if ranks == 1 and policy.reduce_dtype is torch.float16:
        # Nothing is reduced, but for fp16 FSDP would divide before and after that, and once more where it copies.
        policy = replace(policy, reduce_dtype=torch.float32)
    sharded = fully_shard(
        module, mesh=separate.mesh, reshard_after_forward=reshard, mp_policy=policy, shard_placement_fn=placement
    )
    sharded.set_gradient_divide_factor(float(separate.summed))
    # Otherwise FSDP asks for a reduction that multiplies first, which only NCCL and RCCL have. With one rank, where
    # nothing is reduced, it divides anyway, and with this would do so twice.
    sharded.set_force_sum_reduction_for_comms(ranks > 1)
    return sharded


def prefetch(units: Sequence[Sequence[FSDPModule]], forward: int, backward: int) -> None:
    """Gather the next `forward` (`backward`) units while one computes; 0 gathers each only when it is needed. A unit is
    a block and what is sharded separately inside it: these are gathered with it.
    """
    for index, (block, *inner) in enumerate(units):
        after = [module for unit in units[index + 1 : index + 1 + forward] for module in unit]
        block.set_modules_to_forward_prefetch(after)
        before = [module for unit in reversed(units[max(index - backward, 0) : index]) for module in unit]
        # By default FSDP prefetches one module; given the current one, which is already gathered, none.
        block.set_modules_to_backward_prefetch(before or [block])
        for module in inner:
            module.set_modules_to_backward_prefetch([module])


class WaitedReduceScatter:
    """A reduce-scatter that the compute stream waits for, for a run without overlap.

    FSDP issues it on its own stream and continues computing; on a CPU it is synchronous anyway.
    """

    def __init__(self, device: torch.device) -> None:
        self._compute = None if device.type == "cpu" else torch.accelerator.current_stream(device)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> dist.Work | None:
        work: dist.Work | None = _reduce_scatter(output_tensor, input_tensor, op, group, async_op)
        if self._compute is not None:
            self._compute.wait_stream(torch.accelerator.current_stream())
        return work


@contextmanager
def _sync_gradients(root: FSDPModule, last: bool) -> Iterator[None]:
    root.set_requires_gradient_sync(last)
    yield


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
        blocks, parts, experts, attentions: as of `aorta.parallel.parallelize`.
    """
    ranks = dist.get_world_size()
    if isinstance(settings, TP):  # every rank computes what is not split
        mesh = _mesh(device, tensor=ranks)
        split_layers(parts, mesh)
        return ParallelizedModel(
            model, arithmetic=autocast(precision, device), data_rank=0, data_size=1, facts=_facts(mesh)
        )

    def sharded(over: DeviceMesh, whole: DeviceMesh, separate: SeparatelySharded | None = None) -> ParallelizedModel:
        root = shard(model, blocks, settings, precision, device, over, separate)
        return ParallelizedModel(
            model,
            micro_batch=lambda last: _sync_gradients(root, last),
            data_rank=int((over.mesh.flatten() == dist.get_rank()).nonzero().item()),
            data_size=over.size(),
            streams={PRIORITY: STREAMS, 0: over.ndim - 1},
            facts={**_facts(whole), **sharding_facts(blocks, settings, precision)},
        )

    match settings:
        case HSDP():  # a copy of the model is sharded over the ranks that share it
            mesh = _mesh(device, replicate=settings.replicas, shard=ranks // settings.replicas)
            return sharded(mesh, mesh)
        case FSDPTP():  # layers are split over some ranks, each rank's part is sharded over the others
            mesh = _mesh(device, shard=ranks // settings.tp_size, tensor=settings.tp_size)
            split_layers(parts, mesh["tensor"])
            return sharded(mesh["shard"], mesh)
        case FSDPCP():  # sequences are split over some ranks, the model over all: each has gradients of its own
            mesh = _mesh(device, shard=ranks // settings.cp_size, context=settings.cp_size)
            context.split(attentions, mesh["context"])
            data_rank, data_size = mesh.get_local_rank("shard"), mesh["shard"].size()
            whole = sharded(mesh._flatten("shard_context"), mesh)
            return replace(whole, data_rank=data_rank, data_size=data_size, cut=context.cut(mesh["context"]))
        case FSDPEP():  # experts are split over some ranks and sharded over the others, the rest is sharded over all
            mesh, separate = _mesh(device, data=ranks // settings.ep_size, expert=settings.ep_size), list(experts)
            for module in separate:
                context.split_experts(module, mesh["expert"])
            return sharded(mesh._flatten("shard"), mesh, SeparatelySharded(separate, mesh["data"], summed=ranks))
        case FSDPPP():
            return _sharded_pipelines(model, blocks, settings, precision, device)
        case _:
            mesh = _mesh(device, shard=ranks)
            return sharded(mesh, mesh)


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
        shard(stage, own, settings, precision, device, mesh["data"])
    # FSDP casts by itself: no autocast.
    whole = pipeline.parallelize(model, settings, nullcontext, device, mesh.get_group("pipeline"))
    return replace(
        whole,
        data_rank=mesh.get_local_rank("data"),
        data_size=mesh["data"].size(),
        streams={PRIORITY: STREAMS * settings.stages_per_rank},  # each stage is a root of its own
        facts={**_facts(mesh), **whole.facts, **sharding_facts(blocks, settings, precision)},
    )


def _mesh(device: torch.device, **sizes: int) -> DeviceMesh:
    return init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def _facts(mesh: DeviceMesh) -> dict[str, object]:
    assert mesh.mesh_dim_names is not None  # set by _mesh
    return {"mesh": dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))}


FSDP1_STREAMS = 4
"""Streams that FSDP1 opens on an accelerator: unshard, post-backward, pre-unshard and all-reduce
(torch/distributed/fsdp/_runtime_utils.py, _init_streams)."""


def parallelize_fsdp1(
    model: nn.Module, blocks: Blocks, settings: FSDP1, precision: Precision, device: torch.device
) -> ParallelizedModel:
    """Shard `model` over all ranks.

    With `overlap=false` nothing is prefetched and each reduce-scatter is waited for before the next block computes.
    """
    param_dtype, reduce_dtype = sharding_dtypes(settings, precision)
    prefetch = settings.backward_prefetch if settings.overlap else When.none
    for _, block in blocks:
        block.register_forward_pre_hook(_views)
    own = {id(block) for _, block in blocks}
    with warnings.catch_warnings():
        # torch warns about FSDP1 on a CPU, which is intended, and 2.13 advises FSDP2, which is parallel=fsdp.
        warnings.simplefilter("ignore")
        wrapped = FullyShardedDataParallel(
            model,
            sharding_strategy=ShardingStrategy[settings.sharding_strategy.name.upper()],
            auto_wrap_policy=CustomPolicy(lambda module: id(module) in own),
            backward_prefetch=None if prefetch is When.none else BackwardPrefetch[prefetch.name.upper()],
            forward_prefetch=settings.overlap and settings.forward_prefetch,
            limit_all_gathers=settings.limit_all_gathers,
            use_orig_params=settings.use_orig_params,
            mixed_precision=MixedPrecision(param_dtype=param_dtype, reduce_dtype=reduce_dtype),
            device_id=device,
        )
    if not settings.overlap and device.type != "cpu":
        assert wrapped.process_group is not None  # the default group
        compute = torch.accelerator.current_stream(device)

        def reduce(state: default_hooks.DefaultState, gradient: torch.Tensor, part: torch.Tensor) -> None:
            default_hooks.reduce_scatter_hook(state, gradient, part)  # on FSDP's stream
            compute.wait_stream(torch.accelerator.current_stream())

        wrapped.register_comm_hook(default_hooks.DefaultState(wrapped.process_group), cast(Any, reduce))
    return ParallelizedModel(
        wrapped,
        micro_batch=lambda last: nullcontext() if last else wrapped.no_sync(),
        clip=wrapped.clip_grad_norm_,  # its shards look like unsharded gradients
        scaler=ShardedGradScaler,  # for the same reason: only this one checks the other ranks for overflow
        streams={0: FSDP1_STREAMS},
        facts=sharding_facts(blocks, settings, precision),
    )


def _views(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Give a block views of its inputs, so that the end of its backward is marked before FSDP gathers the previous
    block: both would otherwise hook one tensor, whose hooks run in the order of registration. (FSDP2 does this itself.)
    """
    return tuple(a.view_as(a) if isinstance(a, torch.Tensor) and a.requires_grad else a for a in args)
