"""Record what Transformers' `Trainer` trains.

    from aorta.integrations.transformers import TransformersCallback

    trainer = Trainer(..., callbacks=[TransformersCallback("artifacts/mine")])

A step has all its micro-batches and, where the Trainer logs, the gathering of the loss; no evaluation, no saving. Must
not change what is trained.
"""

from __future__ import annotations

import functools
import gc
import os
from typing import Any

from transformers import Trainer, TrainerCallback

import aorta
from aorta.errors import RunIncomplete


class TransformersCallback(TrainerCallback):
    """Takes the arguments of `aorta.record` but `model` and `start_step`. Give it in `callbacks=[...]`: `add_callback`
    is too late to see the exception that ends `train`.
    """

    def __init__(self, folder: str | os.PathLike[str], **arguments: Any) -> None:
        self._folder, self._arguments = folder, arguments
        self._recording: aorta.Recording | None = None
        self._ends_when_logged = False

    def on_init_end(self, *_: Any, **__: Any) -> None:
        """Wrap `train`: the Trainer has no event for an exception."""
        train = (trainer := self._trainer()).train

        @functools.wraps(train)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            try:
                return train(*args, **kwargs)
            except BaseException as error:
                self._close(error)
                raise

        trainer.train = recorded

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._close(RunIncomplete("the Trainer began to train again"))  # auto_find_batch_size, after out of memory
        self._arguments |= {"model": self._trainer().model_wrapped, "start_step": state.global_step}
        self._recording = aorta.start(self._folder, **self._arguments)

    def on_pre_optimizer_step(self, *_: Any, optimizer: Any, **__: Any) -> None:
        if isinstance(rate := optimizer.param_groups[0]["lr"], float) and self._recording:
            self._recording.note(lr=rate)  # a log may have the next one

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._ends_when_logged = control.should_log
        if self._recording and not self._ends_when_logged:
            self._recording.step()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if self._recording and self._ends_when_logged:
            loss = logs.get("loss") if state.logging_steps == 1 else None  # else it is a mean over several steps
            self._recording.note(loss=loss, grad_norm=logs.get("grad_norm"))
            self._recording.step()
            self._ends_when_logged = False

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        if self._recording:
            self._recording.restart()

    on_save = on_evaluate

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._close()

    def _close(self, error: BaseException | None = None) -> None:
        recording, self._recording, self._ends_when_logged = self._recording, None, False
        if recording is not None:
            recording.close(error)

    def _trainer(self) -> Any:
        """Return the Trainer: callbacks are not given it, and it alone knows the wrapped model."""
        trainers = (thing for thing in gc.get_objects() if issubclass(type(thing), Trainer))
        return next(trainer for trainer in trainers if self in trainer.callback_handler.callbacks)
