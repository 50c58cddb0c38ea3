"""FSDP1: `FullyShardedDataParallel` around every block and the root, with prefetching or, for comparison, without.

On a CPU it has no asynchronous form: each collective is waited for where it is issued, so `overlap` and prefetching
only affect runs on accelerators. Must not shard by anything but the workload's blocks.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.fsdp import (
    BackwardPrefetch,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import CustomPolicy

from aorta.config.schema import FSDP1, Precision
from aorta.config.schema import BackwardPrefetch as When
from aorta.parallel.plan import Blocks, ParallelizedModel, sharding_dtypes, sharding_facts

STREAMS = 4
"""Streams that FSDP1 opens on an accelerator: unshard, post-backward, pre-unshard and all-reduce
(torch/distributed/fsdp/_runtime_utils.py, _init_streams)."""


def parallelize(
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
        wrapped.register_comm_hook(default_hooks.DefaultState(wrapped.process_group), _waited_reduce_scatter(device))
    return ParallelizedModel(
        wrapped,
        micro_batch=lambda last: nullcontext() if last else wrapped.no_sync(),
        clip=wrapped.clip_grad_norm_,  # its shards look like unsharded gradients
        scaler=ShardedGradScaler,  # for the same reason: only this one checks the other ranks for overflow
        streams={0: STREAMS},
        facts=sharding_facts(blocks, settings, precision),
    )


def _views(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Give a block views of its inputs, so that the end of its backward is marked before FSDP gathers the previous
    block: both would otherwise hook one tensor, whose hooks run in the order of registration. (FSDP2 does this itself.)
    """
    return tuple(a.view_as(a) if isinstance(a, torch.Tensor) and a.requires_grad else a for a in args)


def _waited_reduce_scatter(device: torch.device) -> Any:
    """Return a hook that issues FSDP's reduce-scatter on FSDP's stream and makes the compute stream wait for it."""
    compute = torch.accelerator.current_stream(device)

    def reduce(state: default_hooks.DefaultState, gradient: torch.Tensor, shard: torch.Tensor) -> None:
        default_hooks.reduce_scatter_hook(state, gradient, shard)
        compute.wait_stream(torch.accelerator.current_stream())

    return reduce
