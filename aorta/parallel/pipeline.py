"""Pipeline parallelism: each rank computes some of the layers, and passes activations and gradients to its neighbours.

torch.distributed.pipelining runs the schedules. Must not know which layers a model has: a workload cuts its own model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle, get_schedule_class

from aorta.config.schema import PP
from aorta.parallel.plan import ParallelizedModel, global_norm

TORCH_NAMES: Final = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved_1f1b": "Interleaved1F1B",
    "interleaved_zero_bubble": "InterleavedZeroBubble",
    "zbv_zero_bubble": "ZBVZeroBubble",
}
"""`parallel.schedule` -> its name in torch."""


def parallelize(
    model: nn.Module,
    settings: PP,
    arithmetic: Callable[[], AbstractContextManager[Any]],
    device: torch.device,
    group: dist.ProcessGroup,
) -> ParallelizedModel:
    """Run the stages of the ranks of `group` as one pipeline; all of them are given the same batches.

    Args:
        model: this rank's stages, by their number, in its `stages`.
        arithmetic: context of every forward pass and of the loss.
    """
    pipeline = Pipeline(model, settings, device, arithmetic, group)
    return ParallelizedModel(
        model,
        arithmetic=arithmetic,
        data_rank=0,
        data_size=1,
        clip=pipeline.clip,
        pipeline=pipeline,
        facts={
            "schedule": settings.schedule,
            "stages": pipeline.stages,
            "stages_per_rank": settings.stages_per_rank,
            "microbatches": settings.microbatches,
            "ideal_bubble_share": ideal_bubble_share(settings, group.size()),
        },
    )


def stages_of(model: nn.Module) -> nn.ModuleDict:
    stages = model.get_submodule("stages")
    assert isinstance(stages, nn.ModuleDict)
    return stages


def ideal_bubble_share(settings: PP, ranks: int) -> float | None:
    """Return the part of a step in which a rank waits, were all stages equally long and transfers free.

    (P - 1) / (M + P - 1) with P ranks and M micro-batches (Huang et al., "GPipe", NeurIPS 2019, section 2.3; the same
    for 1F1B); with V stages a rank M counts V times (Narayanan et al., "Efficient Large-Scale Language Model Training
    on GPU Clusters Using Megatron-LM", SC 2021, section 2.2, whose fraction is that of the time without bubbles). None
    for schedules that fill bubbles with gradients of weights: there it depends on how long these take.
    """
    if "zero_bubble" in settings.schedule:
        return None
    return (ranks - 1) / (settings.microbatches * settings.stages_per_rank + ranks - 1)


class Pipeline:
    """Runs a step's micro-batches through the stages.

    Attributes:
        stages: of all its ranks.
        group, group_name: process group between the stages.
        around_weights: called with a name and "backward", gives the context of a pass that computes gradients of
            weights alone: no hook of a module tells when it runs.
    """

    def __init__(
        self, model: nn.Module, settings: PP, device: torch.device, arithmetic: Any, group: dist.ProcessGroup
    ) -> None:
        self._model, self._settings, self._arithmetic = model, settings, arithmetic
        self.group, self.group_name = group, group.group_name
        self.around_weights: Callable[[str, str], AbstractContextManager[None]] = lambda _block, _phase: nullcontext()
        self.stages = group.size() * settings.stages_per_rank
        self._stages = [
            _Stage(self, _cast(stage, arithmetic), int(index), self.stages, device, group=self.group)
            for index, stage in stages_of(model).items()
        ]
        self._schedule: PipelineScheduleSingle | PipelineScheduleMulti | None = None

    @property
    def modules(self) -> Sequence[nn.Module]:
        return [stage.submod for stage in self._stages]

    def step(self, inputs: tuple[torch.Tensor, ...], target: torch.Tensor, loss: nn.Module) -> torch.Tensor | None:
        """Forward and backward of a batch, cut into micro-batches; the mean loss, on the rank with the last stage."""
        if self._schedule is None:
            schedule = get_schedule_class(TORCH_NAMES[self._settings.schedule])
            own: Any = self._stages[0] if issubclass(schedule, PipelineScheduleSingle) else self._stages
            in_precision = _cast(loss, self._arithmetic)
            made: Any = schedule(own, n_microbatches=self._settings.microbatches, loss_fn=in_precision)
            assert isinstance(made, PipelineScheduleSingle | PipelineScheduleMulti)
            self._schedule = made
        first = any(stage.is_first for stage in self._stages)
        last = any(stage.is_last for stage in self._stages)
        losses: list[torch.Tensor] = []
        self._schedule.step(
            # torch 2.11 refuses other strides than those of a dense tensor; views of a batch have them.
            *(tuple(tensor.contiguous() for tensor in inputs) if first else ()),
            target=target if last else None,
            losses=losses if last else None,
            return_outputs=False,
        )
        return torch.stack([loss.detach() for loss in losses]).mean() if last else None

    def clip(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients of all stages to a global norm of at most `max_norm`; returns the norm before.

        Each stage has parameters of its own, so the global norm is the root of the sum of squares over the ranks of the
        pipeline; where ranks share a stage, its norm is that of all of them.
        """
        held = [parameter for parameter in self._model.parameters() if parameter.grad is not None]
        square = global_norm(nn.utils.get_total_norm([p.grad for p in held if p.grad is not None])).square()
        dist.all_reduce(square, group=self.group)
        norm = square.sqrt()
        nn.utils.clip_grads_with_norm_(held, max_norm, norm)
        return norm


class _Stage(PipelineStage):
    """A stage that says when it computes gradients of weights alone."""

    def __init__(self, pipeline: Pipeline, module: nn.Module, *stage: Any, **more: Any) -> None:
        super().__init__(module, *stage, **more)
        self._pipeline = pipeline

    def backward_weight_one_chunk(self, *args: Any, **more: Any) -> None:
        """Run torch's method; the first stage runs a whole backward pass here, which the hooks of its blocks see."""
        if self.is_first:
            super().backward_weight_one_chunk(*args, **more)
            return
        with self._pipeline.around_weights(f"stage.{self.stage_index}, weights", "backward"):
            super().backward_weight_one_chunk(*args, **more)


def _cast(module: nn.Module, arithmetic: Any) -> nn.Module:
    """Return the same module, whose forward pass runs in `arithmetic`: the schedule calls it outside of any context."""
    forward = module.forward

    def in_precision(*args: Any) -> Any:
        with arithmetic():
            return forward(*args)

    module.forward = in_precision
    return module
