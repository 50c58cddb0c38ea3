"""Defines what all parallel strategies result in (a distributed model that the training step can run without knowing
which it is), and has DistributedDataParallel, which all-reduces its buckets
during backward or, for comparison, after it.

Must not change a gradient, or know the workload beyond its named blocks, or the instrumentation.
"""

# No `from __future__ import annotations`: DDP compares the hook's annotation with the type itself.
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from aorta.config.schema import DDP, FSDP, FSDP1, Precision

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from aorta.parallel.pipeline import Pipeline

MIB = 1 << 20
_TORCH_BUCKET_MB = 25.0
_BUCKETS_WANTED = 8
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Blocks = Sequence[tuple[str, nn.Module]]
Parts: TypeAlias = tuple[nn.Module, Mapping[str, str]]
"""A module and how each of its layers is split: `columns` (by output) or `rows` (by input; the outputs are summed)."""
Inputs: TypeAlias = tuple[torch.Tensor, ...]
"""Positional arguments of a model."""
Cut: TypeAlias = Callable[[Inputs, torch.Tensor], tuple[Inputs, torch.Tensor]]
"""The inputs and the target of a batch -> those that this rank computes with."""


@dataclass(frozen=True)
class ParallelizedModel:
    """A model, distributed over ranks.

    Attributes:
        module: what to call in the forward pass.
        micro_batch: context of one micro-batch; its argument says whether it is the step's last, the only one after
            which gradients are reduced.
        arithmetic: context of forward and loss (autocast, where the strategy does not cast by itself).
        data_rank, data_size: which part of every batch this rank trains on, and of how many; ranks that compute a layer
            together train on the same part. By default every rank has its own.
        cut: where ranks share each sample: what this one has of that part.
        clip: scales gradients to a maximum global norm, and returns the norm before; None: `global_norm`, which counts
            gradients on a mesh once, and assumes all others to be whole on every rank.
        scaler: of the loss, for fp16.
        streams: how many accelerator streams the strategy itself opens, by priority.
        facts: effective settings, for the manifest.
        pipeline: where ranks compute different layers: runs all micro-batches of a step, in place of calling `module`.
    """

    module: nn.Module
    micro_batch: Callable[[bool], AbstractContextManager[Any]] = lambda _last: nullcontext()
    arithmetic: Callable[[], AbstractContextManager[Any]] = nullcontext
    data_rank: int = field(default_factory=dist.get_rank)
    data_size: int = field(default_factory=dist.get_world_size)
    cut: Cut = lambda inputs, target: (inputs, target)
    clip: Callable[[float], torch.Tensor] | None = None
    scaler: type[torch.amp.GradScaler] = torch.amp.GradScaler
    streams: Mapping[int, int] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    pipeline: "Pipeline | None" = None


def autocast(precision: Precision, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    if precision is Precision.none:
        return nullcontext
    return lambda: torch.autocast(device.type, dtype=DTYPES[precision.value])


def sharding_dtypes(settings: FSDP | FSDP1, precision: Precision) -> tuple[torch.dtype | None, torch.dtype | None]:
    """Return the types in which sharded parameters are gathered, and gradients reduced; None: as they are."""
    return (
        None if precision is Precision.none else DTYPES[precision.value],
        None if settings.reduce_dtype is None else DTYPES[settings.reduce_dtype.value],
    )


def sharding_facts(blocks: Blocks, settings: FSDP | FSDP1, precision: Precision) -> dict[str, object]:
    names = ("param_dtype", "reduce_dtype")
    dtypes = (None if dtype is None else str(dtype) for dtype in sharding_dtypes(settings, precision))
    return {
        "overlap": settings.overlap,
        "sharded_blocks": [name for name, _ in blocks],
        **dict(zip(names, dtypes, strict=True)),
    }


def mesh_of(tensor: torch.Tensor) -> "DeviceMesh | None":
    """Return the mesh over which a tensor is distributed; None for an ordinary one. Asks the tensor, since importing
    DTensor only to compare types costs a run without a mesh a second.
    """
    mesh: DeviceMesh | None = getattr(tensor, "device_mesh", None)
    return mesh


def global_norm(norm: torch.Tensor) -> torch.Tensor:
    """Return a norm of gradients over all ranks of their mesh, reduced over one dimension after another, which a
    DTensor does not do without a warning; that of ordinary gradients as it is.
    """
    if mesh_of(norm) is None:
        return norm
    from torch.distributed.tensor import DTensor, Replicate

    assert isinstance(norm, DTensor)
    placements = list(norm.placements)
    for dimension in reversed(range(len(placements))):
        placements[dimension] = Replicate()
        norm = norm.redistribute(placements=placements)
    return norm.to_local()


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor that may be distributed over ranks; shares its memory."""
    if mesh_of(tensor) is None:
        return tensor
    from torch.distributed.tensor import DTensor

    assert isinstance(tensor, DTensor)
    return tensor.to_local()


def replicate(model: nn.Module, settings: DDP, precision: Precision, device: torch.device) -> ParallelizedModel:
    """Wrap `model` in DDP; with `overlap=false` the same buckets are reduced after backward has computed everything.

    Parameters that are distributed over a mesh already are left alone.
    """
    own = [name for name, parameter in model.named_parameters() if mesh_of(parameter) is not None]
    if own:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, own)  # type: ignore[no-untyped-call]
    bucket_cap_mb = settings.bucket_cap_mb or default_bucket_mb(model)
    wrapped = DistributedDataParallel(
        model,
        device_ids=None if device.type == "cpu" else [device.index],
        bucket_cap_mb=bucket_cap_mb,
        gradient_as_bucket_view=settings.gradient_as_bucket_view,
        find_unused_parameters=settings.find_unused_parameters,
    )
    late = None if settings.overlap else ReduceAfterBackward(device)
    if late is not None:
        wrapped.register_comm_hook(None, late.keep)
    return ParallelizedModel(
        wrapped,
        micro_batch=lambda last: nullcontext() if last else wrapped.no_sync(),
        arithmetic=autocast(precision, device),
        facts={"bucket_cap_mb": bucket_cap_mb, "overlap": settings.overlap},
    )


def default_bucket_mb(model: nn.Module) -> float:
    """Return an eighth of the gradients' size in MiB, at most torch's own default of 25.

    A single bucket could not overlap with anything, and a small model fills only one of torch's size.
    """
    reduced = (p for p in model.parameters() if p.requires_grad and mesh_of(p) is None)
    size = sum(p.numel() * p.element_size() for p in reduced)
    return min(_TORCH_BUCKET_MB, max(size / MIB / _BUCKETS_WANTED, 1 / 16))


class ReduceAfterBackward:
    """A DDP communication hook that keeps every bucket until the whole backward pass has run, then reduces them all.

    The buckets, their order and the arithmetic are DDP's own; only the time of the all-reduce moves, so a run with
    this hook is the reference for what overlapping hides.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._waiting: list[tuple[torch.Tensor, torch.futures.Future[torch.Tensor]]] = []

    def keep(self, _state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Hold a bucket back: DDP's communication hook, called with each as it becomes ready; returns the future that
        DDP waits for.
        """
        # DDP multiplies by 1/n rather than dividing; doing the same keeps the gradients bit-identical.
        gradients = bucket.buffer().mul_(1.0 / dist.get_world_size())
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=None if self._device.type == "cpu" else [self._device]
        )
        self._waiting.append((gradients, future))
        if bucket.is_last():
            # Runs after the last node, before DDP's own callback, which is queued after this hook returns.
            torch.autograd.Variable._execution_engine.queue_callback(self._reduce)
        return future

    def _reduce(self) -> None:
        waiting, self._waiting = self._waiting, []
        works = [dist.all_reduce(gradients, async_op=True) for gradients, _ in waiting]
        for work, (gradients, future) in zip(works, waiting, strict=True):
            work.wait()
            future.set_result(gradients)
