"""One optimizer step: forward and backward of every micro-batch, clipping, update; each part on its own range.

Must not: read anything from the device (the recorder does, later).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from aorta.config.schema import Config
from aorta.instrument.instrument import Instrument
from aorta.instrument.reading import StepFacts
from aorta.instrument.scalars import Scalar
from aorta.parallel.plan import Spread
from aorta.runner.optimization import clip
from aorta.workload.task import Batch


@dataclass
class TrainStep:
    """Everything one step needs.

    Attributes:
        model: spread over ranks. loss: of the model's output and a batch's target. config: of the run.
        device: of this rank.
    """

    model: Spread
    loss: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LambdaLR
    scaler: torch.amp.GradScaler
    instrument: Instrument
    config: Config
    device: torch.device

    def run(self, batches: Iterator[Batch], facts: StepFacts) -> None:
        """Train on the next `gradient_accumulation` micro-batches, as one recorded step."""
        with self.instrument.recorder.step(facts):
            self._update(batches, facts.global_step)
        # Behind the step: it is bookkeeping of the host, and skipped updates (fp16 overflow) must not be complained of.
        self.schedule.step()

    def unrecorded(self, batches: Iterator[Batch]) -> None:
        """The same, but no step of the record."""
        self._update(batches, 0)
        self.schedule.step()

    def _update(self, batches: Iterator[Batch], global_step: int) -> None:
        recorder = self.instrument.recorder
        losses = self._gradients(batches)
        grad_norm = None
        max_norm = self.config.training.grad_clip_norm
        if max_norm is not None:
            with recorder.aux("clip"):
                self.scaler.unscale_(self.optimizer)
                grad_norm = clip(self.model.module, max_norm)
        with recorder.aux("optimizer"):
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad(set_to_none=True)
        if self.device.type == "cpu" or (global_step + 1) % self.config.training.log_interval == 0:
            with recorder.aux("loss_read"):
                recorder.note(Scalar(torch.stack(losses).sum()), None if grad_norm is None else Scalar(grad_norm))

    def _gradients(self, batches: Iterator[Batch]) -> list[torch.Tensor]:
        recorder, count = self.instrument.recorder, self.config.training.gradient_accumulation
        losses = []
        for micro in range(count):
            with recorder.aux("data"):
                batch = next(batches)
            with self.model.micro_batch(micro == count - 1):
                with self.model.arithmetic():
                    output = self.model.module(*batch.inputs)
                    # A view, so that the end of the loss's backward is seen before FSDP gathers the last block again:
                    # both hang on this tensor, and hooks of one tensor run in the order they were put on.
                    loss = self.loss(output.view_as(output), batch.target) / count
                scaled = self.scaler.scale(loss)
                scaled.backward()
            losses.append(loss.detach())
        return losses
