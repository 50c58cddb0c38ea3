"""Record what Lightning's `Trainer` fits.

    from aorta.integrations.lightning import LightningCallback

    trainer = lightning.Trainer(..., callbacks=[LightningCallback("artifacts/mine")])

A step has all its micro-batches. Validation and saving are no part of a step, unless they come between its
micro-batches; the step after a checkpoint begins with its batch, without the wait for data. Must not change what is
trained.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback  # the same, by its older name

import aorta


class LightningCallback(Callback):
    """Takes the arguments of `aorta.record` but `model` and `start_step`."""

    def __init__(self, folder: str | os.PathLike[str], **arguments: Any) -> None:
        self._folder, self._arguments = folder, arguments
        self._recording: aorta.Recording | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._steps, self._loss, self._has_saved, self._is_training = trainer.global_step, None, False, False
        self._recording = aorta.start(
            self._folder, model=trainer.model, start_step=trainer.global_step, **self._arguments
        )

    def on_train_batch_start(self, *_: Any) -> None:
        if self._has_saved:  # there is no event behind a checkpoint
            self._restart()
        self._has_saved, self._is_training = False, True

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        rate = optimizer.param_groups[0]["lr"]
        if self._recording is not None and len(trainer.optimizers) == 1 and isinstance(rate, float):
            self._recording.note(lr=rate)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
        if loss is not None:  # Lightning has divided it by the number of micro-batches
            self._loss = loss if self._loss is None else self._loss + loss
        if self._recording is not None and trainer.global_step > self._steps:
            self._recording.note(loss=self._loss)
            self._recording.step()
            self._steps, self._loss, self._is_training = trainer.global_step, None, False

    def on_validation_end(self, *_: Any) -> None:
        self._restart()

    def on_save_checkpoint(self, *_: Any) -> None:
        self._has_saved = True

    def on_train_end(self, *_: Any) -> None:
        self._close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._close(exception)

    def _restart(self) -> None:
        if self._recording is not None and not self._is_training:
            self._recording.restart()

    def _close(self, error: BaseException | None = None) -> None:
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.close(error)
