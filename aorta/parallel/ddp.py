"""DistributedDataParallel, which all-reduces its buckets during backward or, for comparison, after it.

Must not change the gradients.
"""

# No `from __future__ import annotations`: DDP compares the hook's annotation with the type itself.
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from aorta.config.schema import DDP, Precision
from aorta.parallel.plan import ParallelizedModel, autocast, mesh_of

MIB = 1 << 20
_TORCH_BUCKET_MB = 25.0
_BUCKETS_WANTED = 8


def parallelize(model: nn.Module, settings: DDP, precision: Precision, device: torch.device) -> ParallelizedModel:
    """Wrap `model`; with `overlap=false` the same buckets are reduced after backward has computed everything.

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
        notify_ready=None if late is None else late.tell,
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
        self._on_ready: Callable[[int], None] = lambda _bytes: None
        self._waiting: list[tuple[torch.Tensor, torch.futures.Future[torch.Tensor]]] = []

    def tell(self, on_ready: Callable[[int], None]) -> None:
        """Call `on_ready` with the bytes of each bucket when it becomes ready."""
        self._on_ready = on_ready

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
        self._on_ready(gradients.numel() * gradients.element_size())
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
