"""FSDP2: `fully_shard` on every block and on the root, with prefetching or, for comparison, without any overlap.

Must not shard by anything but the workload's blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from aorta.config.schema import FSDP, Precision
from aorta.parallel.plan import Blocks, ParallelizedModel, local_part, sharding_dtypes, sharding_facts

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

    def within(self, block: nn.Module) -> list[nn.Module]:
        inside = {id(module) for module in block.modules()}
        return [module for module in self.modules if id(module) in inside]


def parallelize(
    model: nn.Module,
    blocks: Blocks,
    settings: FSDP,
    precision: Precision,
    device: torch.device,
    mesh: DeviceMesh,
    facts: Mapping[str, object],
    separate: SeparatelySharded | None = None,
) -> ParallelizedModel:
    """Shard `model` over the last dimension of `mesh`; with two dimensions, the first one holds replicas.

    With `overlap=false` nothing is prefetched, all-gathers are waited for where they are needed, and each
    reduce-scatter is waited for before the next block computes.
    """
    root = shard(model, blocks, settings, precision, device, mesh, separate)
    return ParallelizedModel(
        model,
        micro_batch=lambda last: _sync_gradients(root, last),
        data_rank=_data_rank(mesh),
        data_size=mesh.size(),
        streams={PRIORITY: STREAMS, 0: mesh.ndim - 1},
        facts={**facts, **sharding_facts(blocks, settings, precision)},
    )


def shard(
    model: nn.Module,
    blocks: Blocks,
    settings: FSDP,
    precision: Precision,
    device: torch.device,
    mesh: DeviceMesh,
    separate: SeparatelySharded | None = None,
) -> FSDPModule:
    """Shard `blocks` one by one and with the root what is left of `model`, as `parallelize` says; returns the root."""
    param_dtype, reduce_dtype = sharding_dtypes(settings, precision)
    policy, reshard = MixedPrecisionPolicy(param_dtype, reduce_dtype), settings.reshard_after_forward
    units: list[list[FSDPModule]] = []
    for _, block in blocks:
        inner = (
            []
            if separate is None
            else [_shard_separately(each, separate, reshard, policy) for each in separate.within(block)]
        )
        units.append([fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy), *inner])
    root = fully_shard(model, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    if settings.overlap:
        prefetch(units, settings.forward_prefetch, settings.backward_prefetch)
        # On an accelerator FSDP overlaps through its own streams. A CPU has none, and only an asynchronous all-gather
        # can overlap with compute.
        root._set_unshard_async_op(device.type == "cpu")
    else:
        prefetch(units, 0, 0)
        for module in (*(each for unit in units for each in unit), root):
            module.set_custom_reduce_scatter(WaitedReduceScatter(device))  # type: ignore[arg-type]  # same shape
            if mesh.ndim > 1 and device.type != "cpu":
                module.set_all_reduce_hook(_wait_for_all_reduce(device))
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
        after = [each for unit in units[index + 1 : index + 1 + forward] for each in unit]
        block.set_modules_to_forward_prefetch(after)
        before = [each for unit in reversed(units[max(index - backward, 0) : index]) for each in unit]
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
        """Allocate its input or output."""
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


def _wait_for_all_reduce(device: torch.device) -> Callable[[torch.Tensor], None]:
    """Return a hook that FSDP calls on the all-reduce stream after each all-reduce."""
    compute = torch.accelerator.current_stream(device)
    return lambda _gradients: compute.wait_stream(torch.accelerator.current_stream())


def _data_rank(mesh: DeviceMesh) -> int:
    return int((mesh.mesh.flatten() == dist.get_rank()).nonzero().item())


@contextmanager
def _sync_gradients(root: FSDPModule, last: bool) -> Iterator[None]:
    root.set_requires_gradient_sync(last)
    yield
