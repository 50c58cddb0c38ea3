"""Builds the distributed model and its optimizer, and runs one step: forward and backward of every micro-batch, loss
scaling, clipping, update.

Each part has its own range. What differs between strategies is in their `ParallelizedModel`. Must not read anything
from the device: the recorder does, later.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from aorta.config.parallel import pipeline_ranks, pipeline_stages
from aorta.config.schema import PP, Compile, Config, Precision
from aorta.instrument.instrumentation import Instrumentation
from aorta.instrument.open_step import Scalar, StepFacts
from aorta.parallel.plan import Blocks, ParallelizedModel, global_norm, mesh_of, parallelize
from aorta.workload.tasks import Batch, Model, Stages, Task


def make_optimizer(parameters: Iterable[nn.Parameter], task: Task) -> torch.optim.Optimizer:
    """Return the workload's optimizer for parameters that may be distributed over ranks."""
    # One group per mesh: the multi-tensor update of accelerators accepts no list that mixes them.
    groups: list[dict[str, Any]] = [{"params": group} for group in by_mesh(parameters)]
    return task.optimizer(groups)


def make_schedule(optimizer: torch.optim.Optimizer, config: Config) -> torch.optim.lr_scheduler.LambdaLR:
    """Return a schedule: linear warm-up to the peak over `warmup_steps`, then linear decay that reaches 0 at
    `total_steps`; no decay where that is null.
    """
    warmup, total = config.scheduler.warmup_steps, config.scheduler.total_steps

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if total is None:
            return 1.0
        return max(0.0, (total - step) / max(total - warmup, 1))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def make_scaler(model: ParallelizedModel, config: Config, device: torch.device) -> torch.amp.GradScaler:
    """Return loss scaling for fp16; a no-op for the other precisions."""
    return model.scaler(device.type, enabled=config.training.mixed_precision is Precision.fp16)


def by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Return the parameters grouped for multi-tensor operations: one group per mesh, and one for those on no mesh."""
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(mesh_of(parameter), []).append(parameter)
    return list(groups.values())


def clip(module: nn.Module, max_norm: float) -> torch.Tensor:
    """Scale the gradients of `module` to a global norm of at most `max_norm`; returns the norm before.

    Gradients that are sharded on a mesh add one all-reduce over each of its dimensions; those on no mesh are whole on
    every rank. The global norm is the root of the sum of squares over meshes.
    """
    groups = by_mesh(p for p in module.parameters() if p.grad is not None)
    norms = [global_norm(nn.utils.get_total_norm([p.grad for p in group if p.grad is not None])) for group in groups]
    norm = nn.utils.get_total_norm(norms) if len(norms) > 1 else norms[0]
    for group in groups:
        nn.utils.clip_grads_with_norm_(group, max_norm, norm)
    return norm


@dataclass(frozen=True)
class SpreadModel:
    """A workload's model, distributed over ranks, before training.

    Attributes:
        whole: as the workload built it, on the device; of a pipeline this rank's stages.
        blocks: its parts that are bracketed, in the order they run.
        parallelized: distributed over the ranks by the strategy.
    """

    whole: Model
    blocks: Blocks
    parallelized: ParallelizedModel

    @classmethod
    def build(cls, task: Task, config: Config, device: torch.device) -> SpreadModel:
        """Build the model on its device, compile it if configured, and distribute it; collective.

        Its parameters are the same on every rank. torch's random state afterwards differs, so that dropout differs
        between ranks, except where they compute a layer together.
        """
        torch.manual_seed(config.training.seed)
        whole = _own_part(task.model(), config).to(device)
        blocks = list(whole.blocks())
        if config.compile.enabled:
            for _, block in blocks:
                _compile(block, config.compile)
        over_ranks = parallelize(
            whole,
            blocks,
            whole.tensor_parallel_parts(),
            whole.experts(),
            whole.causal_attentions(),
            config,
            device,
        )
        torch.manual_seed(config.training.seed + 1 + over_ranks.data_rank)
        return cls(whole, blocks, over_ranks)


@dataclass
class TrainStep:
    """One step of training.

    Attributes:
        model: distributed over ranks.
        loss: of the model's output and a batch's target.
        config: of the run.
        device: of this rank.
    """

    model: ParallelizedModel
    loss: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LambdaLR
    scaler: torch.amp.GradScaler
    instrument: Instrumentation
    config: Config
    device: torch.device

    @classmethod
    def build(
        cls, model: SpreadModel, task: Task, instrument: Instrumentation, config: Config, device: torch.device
    ) -> TrainStep:
        """Build loss, optimizer, schedule and scaler of `task`, and instrument the model's blocks."""
        loss = task.loss()
        instrument.watch([*model.blocks, ("loss", loss)])
        instrument.watch_backward(loss)
        if model.parallelized.pipeline is not None:
            model.parallelized.pipeline.around_weights = instrument.recorder.computes
            for stage in model.parallelized.pipeline.modules:
                instrument.watch_backward(stage)  # where the loss is another rank's
        instrument.watch_gradients(model.parallelized.module)
        if model.parallelized.notify_ready is not None:
            model.parallelized.notify_ready(instrument.recorder.on_bucket_ready)
        optimizer = make_optimizer(model.whole.parameters(), task)
        schedule, scaler = make_schedule(optimizer, config), make_scaler(model.parallelized, config, device)
        return cls(model.parallelized, loss, optimizer, schedule, scaler, instrument, config, device)

    def run(self, batches: Iterator[Batch], facts: StepFacts) -> None:
        """Train on the next `gradient_accumulation` micro-batches, as one recorded step."""
        with self.instrument.recorder.step(facts):
            self._update(batches, facts.global_step)
        # After the step: it is host bookkeeping, and skipped updates (fp16 overflow) must not cause a warning.
        self.schedule.step()

    def unrecorded(self, batches: Iterator[Batch]) -> None:
        """Train on the next micro-batches without recording the step."""
        with self.instrument.recorder.progress.phase("step"):
            self._update(batches, 0)
        self.schedule.step()

    def _update(self, batches: Iterator[Batch], global_step: int) -> None:
        """Train on the step's micro-batches and update the weights. A phase lasts until another begins."""
        recorder = self.instrument.recorder
        losses = self._gradients(batches) if self.model.pipeline is None else self._pipelined(batches)
        grad_norm = None
        max_norm = self.config.training.grad_clip_norm
        if max_norm is not None:
            with recorder.aux("clip", restores=False):
                self.scaler.unscale_(self.optimizer)
                own = self.model.clip
                # The stages that are done wait for the others where the norm is exchanged.
                pipeline = self.model.pipeline
                with nullcontext() if pipeline is None else recorder.pipeline(pipeline.group_name):
                    grad_norm = clip(self.model.module, max_norm) if own is None else own(max_norm)
        with recorder.aux("optimizer", restores=False):
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad(set_to_none=True)
        if self.device.type == "cpu" or (global_step + 1) % self.config.training.log_interval == 0:
            with recorder.aux("loss_read", restores=False):
                loss = Scalar(torch.stack(losses).sum()) if losses else None
                recorder.note(loss, None if grad_norm is None else Scalar(grad_norm))

    def _pipelined(self, batches: Iterator[Batch]) -> list[torch.Tensor]:
        """Return the loss of the step, on the rank that has it."""
        recorder, pipeline = self.instrument.recorder, self.model.pipeline
        assert pipeline is not None
        with recorder.aux("data", restores=False):
            batch = next(batches)
        recorder.progress.enter("pipeline")
        with recorder.pipeline(pipeline.group_name):
            loss = pipeline.step(batch.inputs, batch.target, self.loss)
        return [] if loss is None else [loss]

    def _gradients(self, batches: Iterator[Batch]) -> list[torch.Tensor]:
        recorder, count = self.instrument.recorder, self.config.training.gradient_accumulation
        losses = []
        for micro in range(count):
            with recorder.aux("data", restores=False):
                batch = next(batches)
                inputs, target = self.model.cut(batch.inputs, batch.target)
            recorder.progress.enter("forward")
            with self.model.micro_batch(micro == count - 1):
                with self.model.arithmetic():
                    output = self.model.module(*inputs)
                    # A view, so that the end of the loss's backward is marked before FSDP gathers the last block again:
                    # both hook this tensor, and hooks of one tensor run in the order of registration.
                    loss = self.loss(output.view_as(output), target) / count
                scaled = self.scaler.scale(loss)
                recorder.progress.enter("backward")
                scaled.backward()
            losses.append(loss.detach())
        return losses


def _own_part(whole: Model, config: Config) -> Model:
    """Return the stages of `whole` that this rank computes; all of it where it is no pipeline."""
    if not isinstance(config.parallel, PP):
        return whole
    ranks = dist.get_world_size()
    mine = pipeline_stages(config.parallel, dist.get_rank(), ranks)
    count = pipeline_ranks(config.parallel, ranks) * config.parallel.stages_per_rank
    return Stages({index: whole.pipeline_stage(index, count) for index in mine})


def _compile(block: nn.Module, settings: Compile) -> None:
    """Compile a block's forward in place; its hooks stay outside, so ranges and sharding are not traced."""
    # Dynamo would split graphs at DDP's buckets; blocks are already smaller.
    torch._dynamo.config.optimize_ddp = False
    block.forward = torch.compile(
        block.forward,
        backend=settings.backend,
        mode=settings.mode,
        fullgraph=settings.fullgraph,
        dynamic=settings.dynamic,
    )
