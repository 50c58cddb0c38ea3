"""The distributed model, its optimizer, and one step: forward and backward of every micro-batch, loss scaling,
clipping, update. `Loop` is a training loop that its caller drives step by step: device checks, benchmarks and tests.

What differs between strategies is in their `ParallelizedModel`. Must not read anything from the device: the recorder
does, later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from hydra import compose, initialize_config_dir
from torch import nn

from aorta.config import CONFIG_DIR
from aorta.config.loop import observed_every
from aorta.config.parallel import pipeline_ranks, pipeline_stages
from aorta.config.resolve import Resolved, resolve
from aorta.config.schema import PP, Config, Precision, register
from aorta.config.schema import Instrument as InstrumentSettings
from aorta.distributed.topology import Topology
from aorta.instrument.instrumentation import Instrumentation
from aorta.instrument.recorder import Scalar
from aorta.instrument.ring_lines import LentRecord
from aorta.instrument.sampling import Sampler
from aorta.parallel import parallelize
from aorta.parallel.plan import Blocks, global_norm, mesh_of
from aorta.recording.calibration import Calibrator, calibration_plan
from aorta.records.clocks import read_clocks
from aorta.records.ring_file import RingFile
from aorta.records.schema import Calibration, Step
from aorta.records.step_line import StepFacts
from aorta.workload import task_of
from aorta.workload.tasks import Batch, Model, Stages, Task


def make_optimizer(parameters: Iterable[nn.Parameter], task: Task) -> torch.optim.Optimizer:
    """Return the workload's optimizer for parameters that may be distributed over ranks."""
    # One group per mesh: the multi-tensor update of accelerators accepts no list that mixes them.
    groups: list[dict[str, Any]] = [{"params": group} for group in by_mesh(parameters)]
    return task.optimizer(groups)


def make_schedule(optimizer: torch.optim.Optimizer, config: Config) -> torch.optim.lr_scheduler.LambdaLR:
    """Return linear warm-up over `warmup_steps`, then linear decay to 0 at `total_steps`; no decay if that is null."""
    warmup, total = config.scheduler.warmup_steps, config.scheduler.total_steps

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if total is None:
            return 1.0
        return max(0.0, (total - step) / max(total - warmup, 1))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Return the parameters grouped for multi-tensor operations: one group per mesh, and one for those on no mesh."""
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(mesh_of(parameter), []).append(parameter)
    return list(groups.values())


def clip(module: nn.Module, max_norm: float) -> torch.Tensor:
    """Scale the gradients of `module` to a global norm of at most `max_norm`; returns the norm before. Gradients
    sharded on a mesh cost one all-reduce for each of its dimensions; those on no mesh are whole on every rank.
    """
    groups = by_mesh(p for p in module.parameters() if p.grad is not None)
    norms = [global_norm(nn.utils.get_total_norm([p.grad for p in group if p.grad is not None])) for group in groups]
    norm = nn.utils.get_total_norm(norms) if len(norms) > 1 else norms[0]
    for group in groups:
        nn.utils.clip_grads_with_norm_(group, max_norm, norm)
    return norm


class SpreadModel:
    """A workload's model before training, on its device, compiled if configured, and distributed; to make it is
    collective.

    Parameters are the same on every rank. torch's random state differs afterwards, so that dropout does, except where
    ranks compute a layer together.

    Attributes:
        whole: as the workload built it; of a pipeline this rank's stages.
        blocks: in the order they run.
        parallelized: distributed over the ranks by the strategy.
    """

    def __init__(self, task: Task, config: Config, device: torch.device) -> None:
        torch.manual_seed(config.training.seed)
        whole = task.model()
        if isinstance(config.parallel, PP):
            ranks = dist.get_world_size()
            count = pipeline_ranks(config.parallel, ranks) * config.parallel.stages_per_rank
            own = pipeline_stages(config.parallel, dist.get_rank(), ranks)
            whole = Stages({index: whole.pipeline_stage(index, count) for index in own})
        self.whole: Model = whole.to(device)
        self.blocks: Blocks = list(self.whole.blocks())
        if config.compile.enabled:
            # Dynamo would split graphs at DDP's buckets; blocks are already smaller.
            torch._dynamo.config.optimize_ddp = False
            how = config.compile
            for _, block in self.blocks:
                # In place: its hooks stay outside, so ranges and sharding are not traced.
                block.forward = torch.compile(
                    block.forward, backend=how.backend, mode=how.mode, fullgraph=how.fullgraph, dynamic=how.dynamic
                )
        self.parallelized = parallelize(
            self.whole,
            self.blocks,
            self.whole.tensor_parallel_parts(),
            self.whole.experts(),
            self.whole.causal_attentions(),
            config,
            device,
        )
        torch.manual_seed(config.training.seed + 1 + self.parallelized.data_rank)


class TrainStep:
    """One step of training, with loss, optimizer, schedule and scaler of `task`; it instruments the model's blocks.
    `loss` takes the model's output and a batch's target.
    """

    def __init__(
        self, model: SpreadModel, task: Task, instrument: Instrumentation, config: Config, device: torch.device
    ) -> None:
        self.model, self.instrument, self.config, self.device = model.parallelized, instrument, config, device
        self.loss = task.loss()
        instrument.watch([*model.blocks, ("loss", self.loss)])
        instrument.watch_backward(self.loss)
        if self.model.pipeline is not None:
            self.model.pipeline.around_weights = instrument.recorder.computes
            for stage in self.model.pipeline.modules:
                instrument.watch_backward(stage)  # where the loss is another rank's
        self.optimizer = make_optimizer(model.whole.parameters(), task)
        self.schedule = make_schedule(self.optimizer, config)
        fp16 = config.training.mixed_precision is Precision.fp16  # a scaler that is not enabled does nothing
        self.scaler = self.model.scaler(device.type, enabled=fp16)

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
        recorder, pipeline = self.instrument.recorder, self.model.pipeline
        if pipeline is None:
            losses = self._gradients(batches)
        else:
            with recorder.aux("data", restores=False):
                batch = next(batches)
            recorder.progress.enter("pipeline")
            with recorder.pipeline(pipeline.group_name):
                loss = pipeline.step(batch.inputs, batch.target, self.loss)
            losses = [] if loss is None else [loss]  # only the rank of the last stage has it
        grad_norm = None
        max_norm = self.config.training.grad_clip_norm
        if max_norm is not None:
            with recorder.aux("clip", restores=False):
                self.scaler.unscale_(self.optimizer)
                own = self.model.clip
                # The stages that are done wait for the others where the norm is exchanged.
                with nullcontext() if pipeline is None else recorder.pipeline(pipeline.group_name):
                    grad_norm = clip(self.model.module, max_norm) if own is None else own(max_norm)
        with recorder.aux("optimizer", restores=False):
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad(set_to_none=True)
        if self.device.type == "cpu" or (global_step + 1) % self.config.training.log_interval == 0:
            with recorder.aux("loss_read", restores=False):
                total = Scalar(torch.stack(losses).sum()) if losses else None
                recorder.note(total, None if grad_norm is None else Scalar(grad_norm))

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


def resolved(*words: str) -> Resolved:
    """Return the configuration that `train.py` would have with these arguments."""
    register()
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        return resolve(compose("default", list(words)))


class Loop:
    """A distributed, instrumented model without a run's folder; `step()` trains once. Needs an open process group, and
    has the real network, whatever `config` says.

    Args:
        config: as `resolved` makes it of arguments.
        sink: receives finished steps.
        ring: of the rank; None: one in memory.
        elsewhere: as `Instrumentation` takes it.

    Attributes:
        calibrations: of the steps after `telemetry.warmup_steps`, where `instrument.calibration` is a number (`auto`
            would profile what is to be measured here).

    Example:
        >>> lines = []
        >>> config = resolved("parallel=ddp", "instrument.mode=observe").config
        >>> loop = Loop(config, topology, device, lines.append)
        >>> loop.step()
        >>> loop.finish()  # now `lines` holds one step
    """

    def __init__(
        self,
        config: Config,
        topology: Topology,
        device: torch.device,
        sink: Callable[[Step], None],
        ring: RingFile | None = None,
        elsewhere: LentRecord | None = None,
    ) -> None:
        task = task_of(config)
        model = SpreadModel(task, config, device)
        settings = config.instrument
        self.calibrations: list[Calibration] = []
        self._calibrator = Calibrator(
            None
            if settings.calibration == InstrumentSettings().calibration
            else calibration_plan(settings.calibration, device, settings.mode.value, 0, config.telemetry.warmup_steps),
            device,
            self.calibrations.append,
        )

        def finished(step: Step) -> None:
            sink(step)
            self._calibrator.take(step)

        self.instrument = Instrumentation(
            device,
            settings.mode.value,
            topology.rank,
            topology.world_size,
            read_clocks(),
            finished,
            settings.stream_priority,
            native=settings.native,
            dedicated_async=settings.dedicated_async,
            ring=ring,
            elsewhere=elsewhere,
        )
        self._calibrator.attach(self.instrument.recorder)
        if (every := observed_every(settings.every)) != 1 and self.instrument.why_off is None:
            self.instrument.recorder.sampler = Sampler(every, 0, 0, config.telemetry.warmup_steps)
        self.step_of_training = TrainStep(model, task, self.instrument, config, device)
        self.batches = task.batches(model.parallelized.data_rank, model.parallelized.data_size, device).for_ever
        self._batches = self.batches()
        self.model, self.steps_done = model.parallelized.module, 0

    def step(self) -> None:
        """Run and record one step."""
        number, self.steps_done = self.steps_done, self.steps_done + 1
        self._calibrator.before(number)
        self.step_of_training.run(self._batches, StepFacts(0, number, number, lr=0.0, warmup=False))
        self._calibrator.after(number)

    def unrecorded(self) -> None:
        """Run one training step that is not recorded."""
        self.step_of_training.unrecorded(self._batches)

    def finish(self) -> None:
        """Write the last steps and remove the instrumentation."""
        self._calibrator.close()
        self.instrument.recorder.finish()
        self._calibrator.finish()
        self.instrument.close()
