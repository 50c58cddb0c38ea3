"""The callbacks, called as the frameworks' loops call them; the frameworks are not installed here.

`python -m benchmarks.frameworks` runs the same callbacks in the frameworks themselves.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.runs import record

STEPS, MICRO_BATCHES = 6, 2


def backward(model: nn.Module) -> torch.Tensor:
    loss = model(torch.ones(2, 4)).square().mean() / MICRO_BATCHES
    loss.backward()
    return loss.detach()


class NoEvents:
    """Base class of callbacks: every event is there and does nothing."""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("on_"):
            raise AttributeError(name)
        return lambda *_, **__: None


class Trainer:
    """`fails_at`: the step that ends with an error."""

    def __init__(self, callbacks: list[Any], *, fails_at: int = 0) -> None:
        torch.manual_seed(0)
        self.module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        self.model = self.model_wrapped = nn.Sequential(self.module)
        self.optimizers = [torch.optim.SGD(self.module.parameters(), 0.125)]
        self.callbacks, self.fails_at = callbacks, fails_at
        self.losses: list[float] = []

    def optimize(self) -> None:
        self.optimizers[0].step()
        self.optimizers[0].param_groups[0]["lr"] /= 2


class TransformersTrainer(Trainer):
    """The order of events in `transformers.Trainer`: a step's end, logging, evaluation, saving."""

    def __init__(self, callbacks: list[Any], *, logging_steps: int = 1, fails_at: int = 0) -> None:
        super().__init__(callbacks, fails_at=fails_at)
        self.callback_handler = SimpleNamespace(callbacks=callbacks)
        self.state = SimpleNamespace(global_step=3, logging_steps=logging_steps)
        self.control = SimpleNamespace(should_log=False)
        self.event("on_init_end")

    def event(self, name: str, **more: Any) -> None:
        if name == "on_log":
            self.control.should_log = False
        for callback in self.callbacks:
            found = getattr(callback, name)
            found(None, self.state, self.control, model=self.module, optimizer=self.optimizers[0], **more)

    def train(self) -> str:
        self.event("on_train_begin")
        for step in range(1, STEPS + 1):
            self.event("on_step_begin")
            if step == self.fails_at:
                raise ValueError("in the middle")
            loss = sum(backward(self.model_wrapped) for _ in range(MICRO_BATCHES))
            self.event("on_pre_optimizer_step")
            self.optimize()
            self.state.global_step += 1
            self.control.should_log = self.state.global_step % self.state.logging_steps == 0
            self.losses.append(loss.item())
            self.event("on_step_end")
            if self.control.should_log:
                self.event("on_log", logs={"loss": loss.item(), "grad_norm": 2.0})
            if step % 4 == 0:
                backward(self.model_wrapped)  # computes where the evaluation would: it must be in no step
                self.event("on_log", logs={"eval_loss": 1.0})
                self.event("on_evaluate", metrics={})
                backward(self.model_wrapped)
                self.event("on_save")
        self.event("on_train_end")
        return "trained"


class LightningTrainer(Trainer):
    """The order of events in `lightning.Trainer`: a checkpoint is announced before it is written."""

    global_step = 3

    def event(self, name: str, *more: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, name)(self, self.module, *more)

    def train(self) -> str:
        self.event("on_validation_end")  # the sanity check
        try:
            self.event("on_train_start")
            for index in range(STEPS * MICRO_BATCHES):
                self.event("on_train_batch_start", None, index)
                if self.fails_at and index == (self.fails_at - 1) * MICRO_BATCHES:
                    raise ValueError("in the middle")
                loss = backward(self.model)
                if index % MICRO_BATCHES == 0:
                    self.losses.append(0.0)
                self.losses[-1] = (loss + self.losses[-1]).item()
                if index % MICRO_BATCHES == MICRO_BATCHES - 1:
                    self.event("on_before_optimizer_step", self.optimizers[0])
                    self.optimize()
                    self.global_step += 1
                self.event("on_train_batch_end", {"loss": loss}, None, index)
                if index == 3:
                    backward(self.model)  # computes where the validation would: it must be in no step
                    self.event("on_validation_end")
                if index == 7:
                    self.event("on_save_checkpoint", {})
                    backward(self.model)
                if index == 8:  # between the micro-batches of a step
                    self.event("on_validation_end")
            self.event("on_train_end")
        except BaseException as error:
            self.event("on_exception", error)
            raise
        return "trained"


@pytest.fixture(params=["transformers", "lightning"])
def framework(request, monkeypatch):
    """The framework's trainer, and AORTA's callback for it."""
    trainer_of = {"transformers": TransformersTrainer, "lightning": LightningTrainer}[request.param]
    package = ModuleType(request.param)
    package.__dict__.update(Trainer=trainer_of, TrainerCallback=NoEvents, Callback=NoEvents)
    for name in (request.param, "lightning.pytorch"):
        monkeypatch.setitem(sys.modules, name, package)
    name = f"aorta.integrations.{request.param}"
    yield trainer_of, getattr(importlib.import_module(name), f"{request.param.title()}Callback")
    del sys.modules[name]


def test_steps_values_and_what_is_left_out(tmp_path, framework):
    trainer_of, callback_of = framework
    plain, trainer = trainer_of([]), trainer_of([callback_of(tmp_path, label="mine", warmup_steps=0)])
    assert plain.train() == trainer.train() == "trained"
    seen = record(tmp_path)
    assert (seen.header.label, seen.header.start_step) == ("mine", 3)
    assert [step.global_step for step in seen.steps] == [3 + step for step in range(STEPS)]
    assert [step.lr for step in seen.steps] == [0.125 / 2**step for step in range(STEPS)]
    forwards = [sum(found.phase == "forward" and found.block == "0.0" for found in s.compute) for s in seen.steps]
    assert forwards == [MICRO_BATCHES] * STEPS
    assert [step.loss for step in seen.steps] == trainer.losses
    if isinstance(trainer, TransformersTrainer):
        assert [step.grad_norm for step in seen.steps] == [2.0] * STEPS
    assert seen.footer.reason == "completed"
    for one, other in zip(plain.model.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_an_exception_is_in_the_footer_and_goes_on(tmp_path, framework):
    trainer_of, callback_of = framework
    trainer = trainer_of([callback_of(tmp_path)], fails_at=4)
    with pytest.raises(ValueError, match="in the middle"):
        trainer.train()
    seen = record(tmp_path)
    assert len(seen.steps) == 3
    assert (seen.footer.reason, seen.footer.error) == ("error", "rank 0: ValueError: in the middle")
    trainer.fails_at = 0
    assert trainer.train() == "trained"  # and the same callback records again
    assert len(record(tmp_path).steps) == STEPS


@pytest.mark.parametrize("framework", ["transformers"], indirect=True)
def test_a_mean_over_several_steps_is_no_loss_of_a_step(tmp_path, framework):
    trainer_of, callback_of = framework
    trainer_of([callback_of(tmp_path)], logging_steps=2).train()
    steps = record(tmp_path).steps
    assert [step.loss for step in steps] == [None] * STEPS
    assert [step.grad_norm for step in steps] == [2.0, None] * (STEPS // 2)  # the first one is the fourth


@pytest.mark.parametrize("framework", ["transformers"], indirect=True)
def test_training_that_begins_again_is_a_record_of_its_own(tmp_path, framework):
    trainer_of, callback_of = framework
    trainer = trainer_of([callback_of(tmp_path)])
    trainer.event("on_train_begin")  # and has not enough memory
    trainer.train()
    assert len(record(tmp_path).steps) == STEPS
    (earlier,) = (tmp_path / "history").iterdir()
    met = record(earlier).footer
    assert met.error == "rank 0: RunIncomplete: the Trainer began to train again"
