"""Learning rate and clipping by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from aorta.config.schema import Config, Optimizer, Ranking, Scheduler
from aorta.recording.train_step import clip, make_optimizer, make_schedule
from aorta.workload.workloads import task_of


@pytest.mark.parametrize(
    ("warmup", "total", "rates"),
    [
        (4, 10, [0.25, 0.5, 0.75, 1.0, 1.0, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0, 0]),
        (0, 2, [1.0, 0.5, 0]),
        (2, None, [0.5, 1.0, 1.0, 1.0, 1.0]),
    ],
    ids=["to the peak and to zero", "from the peak", "without an end"],
)
def test_warm_up_is_linear_to_the_peak_and_decay_linear_to_zero(
    warmup: int, total: int | None, rates: list[float]
) -> None:
    scheduler = Scheduler(warmup_steps=warmup, total_steps=total)
    config = Config(optimizer=Optimizer(lr=1.0), workload=Ranking(), scheduler=scheduler)
    optimizer = make_optimizer([nn.Parameter(torch.zeros(1))], task_of(config))
    schedule = make_schedule(optimizer, config)
    for rate in rates:
        assert schedule.get_last_lr() == [pytest.approx(rate)]
        optimizer.step()
        schedule.step()


def test_clipping_scales_to_the_norm_and_returns_the_one_before() -> None:
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0, 0.0]), torch.tensor([4.0])
    assert clip(nn.ParameterList(parameters), 1.0).item() == pytest.approx(5.0)
    assert parameters[0].grad.tolist() == pytest.approx([0.6, 0.0], abs=1e-5)
    assert parameters[2].grad is None
