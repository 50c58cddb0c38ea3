"""Learning rate and clipping by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from aorta.config.schema import Config, Optimizer, Ranking, Scheduler
from aorta.runner.train_step import clip, make_optimizer, make_schedule
from aorta.workload.tasks import task_of


def test_warm_up_is_linear_to_the_peak_and_decay_linear_to_zero() -> None:
    config = Config(
        optimizer=Optimizer(lr=1.0), workload=Ranking(), scheduler=Scheduler(warmup_steps=4, total_steps=10)
    )
    optimizer = make_optimizer([nn.Parameter(torch.zeros(1))], task_of(config))
    schedule = make_schedule(optimizer, config)
    rates = []
    for _ in range(12):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0, 0])


def test_no_warm_up_starts_at_the_peak() -> None:
    config = Config(optimizer=Optimizer(lr=2.0), workload=Ranking(), scheduler=Scheduler(warmup_steps=0, total_steps=2))
    schedule = make_schedule(make_optimizer([nn.Parameter(torch.zeros(1))], task_of(config)), config)
    assert schedule.get_last_lr() == [2.0]


def test_without_an_end_the_peak_lasts() -> None:
    config = Config(
        workload=Ranking(), optimizer=Optimizer(lr=1.0), scheduler=Scheduler(warmup_steps=2, total_steps=None)
    )
    optimizer = make_optimizer([nn.Parameter(torch.zeros(1))], task_of(config))
    schedule = make_schedule(optimizer, config)
    rates = []
    for _ in range(5):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert rates == [0.5, 1.0, 1.0, 1.0, 1.0]


def test_clipping_scales_to_the_norm_and_returns_the_one_before() -> None:
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0, 0.0]), torch.tensor([4.0])
    assert clip(nn.ParameterList(parameters), 1.0).item() == pytest.approx(5.0)
    assert parameters[0].grad.tolist() == pytest.approx([0.6, 0.0], abs=1e-5)
    assert parameters[2].grad is None
