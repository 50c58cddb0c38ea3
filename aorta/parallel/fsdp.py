"""FSDP2: `fully_shard` on every block and on the root, with prefetching or, for comparison, without any overlap.

Must not shard by anything but the workload's blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from aorta.config.schema import FSDP, Precision
from aorta.parallel.plan import DTYPES, Blocks, Spread

# torch 2.13 renamed it; both take the same arguments.
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

STREAMS = 3
"""Streams that FSDP2 opens on an accelerator: copying into an all-gather, the all-gather, the reduce-scatter; its
all-reduce between copies has one more (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, FSDPCommContext)."""


def spread(
    model: nn.Module,
    blocks: Blocks,
    settings: FSDP,
    precision: Precision,
    device: torch.device,
    mesh: DeviceMesh,
    facts: Mapping[str, object],
) -> Spread:
    """Shard `model` over the last dimension of `mesh`; with two dimensions, the first one holds replicas.

    With `overlap=false` nothing is prefetched, all-gathers are waited for where they are needed, and each
    reduce-scatter is waited for before the next block computes.
    """
    param_dtype = None if precision is Precision.none else DTYPES[precision.value]
    reduce_dtype = None if settings.reduce_dtype is None else DTYPES[settings.reduce_dtype.value]
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    for _, block in blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=settings.reshard_after_forward, mp_policy=policy)
    root = fully_shard(model, mesh=mesh, reshard_after_forward=settings.reshard_after_forward, mp_policy=policy)
    sharded = [block for _, block in blocks if isinstance(block, FSDPModule)]  # all: fully_shard changed their class
    if settings.overlap:
        prefetch(sharded, settings.forward_prefetch, settings.backward_prefetch)
        # On an accelerator FSDP overlaps through its own streams. A CPU has none, and only an asynchronous all-gather
        # can overlap with compute.
        root._set_unshard_async_op(device.type == "cpu")
    else:
        prefetch(sharded, 0, 0)
        for module in (*sharded, root):
            module.set_custom_reduce_scatter(WaitedReduceScatter(device))  # type: ignore[arg-type]  # same shape
            if mesh.ndim > 1 and device.type != "cpu":
                module.set_all_reduce_hook(_wait_for_all_reduce(device))
    return Spread(
        model,
        micro_batch=lambda last: _sync_gradients(root, last),
        data_rank=_data_rank(mesh),
        data_size=mesh.size(),
        streams=STREAMS + mesh.ndim - 1,
        facts={
            **facts,
            "overlap": settings.overlap,
            "sharded_blocks": [name for name, _ in blocks],
            "param_dtype": None if param_dtype is None else str(param_dtype),
            "reduce_dtype": None if reduce_dtype is None else str(reduce_dtype),
        },
    )


def prefetch(sharded: Sequence[FSDPModule], forward: int, backward: int) -> None:
    """Gather the next `forward` (`backward`) blocks while one computes; 0 gathers each only when it is needed."""
    for index, block in enumerate(sharded):
        block.set_modules_to_forward_prefetch(list(sharded[index + 1 : index + 1 + forward]))
        before = list(reversed(sharded[max(index - backward, 0) : index]))
        # By default FSDP prefetches one block; given the current block, which is already gathered, none.
        block.set_modules_to_backward_prefetch(before or [block])


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
    """A hook that FSDP calls on the all-reduce stream after each all-reduce."""
    compute = torch.accelerator.current_stream(device)
    return lambda _gradients: compute.wait_stream(torch.accelerator.current_stream())


def _data_rank(mesh: DeviceMesh) -> int:
    """This rank's index among those of the mesh, in its order."""
    return int((mesh.mesh.flatten() == dist.get_rank()).nonzero().item())


@contextmanager
def _sync_gradients(root: FSDPModule, last: bool) -> Iterator[None]:
    root.set_requires_gradient_sync(last)
    yield
