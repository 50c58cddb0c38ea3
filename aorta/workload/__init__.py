"""Workloads: models, their losses and their synthetic data. Makes the task of the one that a configuration names, which
is loaded when it is chosen. Must not know ranks or the instrumentation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from aorta.config.schema import Config, Gpt, Moe, Ranking, Resnet18
from aorta.config.workload import dimensions_of
from aorta.errors import ConfigError
from aorta.workload.tasks import Batches, Groups, InMemory, Task, TensorBatches


def task_of(config: Config) -> Task:
    """Return the workload that `config` trains.

    Raises:
        ConfigError: its workload is not one that is trained.
    """

    def adamw(groups: Groups) -> torch.optim.AdamW:
        own = config.optimizer
        return torch.optim.AdamW(
            (dict(group) for group in groups), own.lr, own.betas, own.eps, weight_decay=own.weight_decay
        )

    def sgd(groups: Groups) -> torch.optim.SGD:
        own = config.optimizer
        return torch.optim.SGD((dict(group) for group in groups), lr=own.lr, weight_decay=own.weight_decay)

    def batches(
        made: Callable[[torch.device], InMemory[Any]], rank: int, world_size: int, device: torch.device
    ) -> Batches:
        data = made(device if config.dataset.on_device else torch.device("cpu"))
        return TensorBatches(config, data, rank, world_size, device)

    match config.workload:
        case Ranking() as shape:
            from aorta.workload.ranking import ListwiseLoss, RankingTransformer, SyntheticRanking

            data = partial(batches, partial(SyntheticRanking, config, shape))
            return Task(lambda: RankingTransformer(shape), ListwiseLoss, adamw, data)
        case Resnet18() as images:
            from aorta.workload.resnet18 import DTYPES, FixedBatch, ResNet18

            fixed = partial(FixedBatch, config, images)
            return Task(lambda: ResNet18().to(DTYPES[images.dtype]), nn.MSELoss, sgd, fixed)  # with its buffers
        case Gpt() as gpt:
            from aorta.workload.gpt import GptModel, MoeModel, NextTokenLoss, SyntheticText

            dims, micro_batches = dimensions_of(gpt), config.training.gradient_accumulation
            text = partial(batches, partial(SyntheticText, config, dims.vocab_size))
            if isinstance(gpt, Moe):
                return Task(partial(MoeModel, dims, gpt, micro_batches), NextTokenLoss, adamw, text)
            return Task(partial(GptModel, dims), NextTokenLoss, adamw, text)
        case other:
            raise ConfigError(f"workload={other.name!r}: nothing that can be trained")
