"""The workloads as trainable tasks: data, model, loss and optimizer of each, and which one a configuration names.

Must not know how a model is distributed over ranks, or use global random state for data.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from aorta.config.groups.workload import dimensions_of
from aorta.config.schema import Config, DType, Gpt, Moe, Optimizer, Ranking, Resnet18
from aorta.errors import ConfigError
from aorta.workload.data import SyntheticRanking, SyntheticText, TensorBatches, home_of
from aorta.workload.gpt import GptModel, NextTokenLoss
from aorta.workload.moe import MoeModel
from aorta.workload.ranking import ListwiseLoss, RankingTransformer
from aorta.workload.resnet18 import CHANNELS, CLASSES, ResNet18
from aorta.workload.task import Batches, Groups, Task

DTYPES = {DType.fp32: torch.float32, DType.bf16: torch.bfloat16}


@dataclass(frozen=True)
class Images:
    """Images [B, 3, H, W] and targets [B, 1000], both standard normal."""

    images: torch.Tensor
    target: torch.Tensor

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        """Positional arguments of the model."""
        return (self.images,)


class FixedBatch:
    """The same micro-batch again and again; it differs between ranks and depends only on seed and rank.

    Args:
        config: of the run.
        shape: its workload section.
        rank, device: as for any batches.
    """

    def __init__(self, config: Config, shape: Resnet18, rank: int, world_size: int, device: torch.device) -> None:
        training = config.training
        generator = torch.Generator().manual_seed(config.dataset.seed + rank)
        images = torch.randn(training.batch_size, CHANNELS, shape.image_size, shape.image_size, generator=generator)
        target = torch.randn(training.batch_size, CLASSES, generator=generator)
        dtype = DTYPES[shape.dtype]
        self._batch = Images(images.to(device, dtype), target.to(device, dtype))
        self._micro_batches = training.gradient_accumulation
        self.steps_per_epoch = config.dataset.num_samples // (training.batch_size * self._micro_batches * world_size)

    def epoch(self, epoch: int, first_step: int) -> Iterator[Images]:  # noqa: ARG002  all are alike
        """Yield the batch, repeated for the epoch's steps from `first_step` on."""
        for _ in range((self.steps_per_epoch - first_step) * self._micro_batches):
            yield self._batch

    def for_ever(self) -> Iterator[Images]:
        """Yield the batch, without end."""
        while True:
            yield self._batch


def _sgd(groups: Groups, settings: Optimizer) -> torch.optim.SGD:
    """Return SGD without momentum."""
    return torch.optim.SGD((dict(group) for group in groups), lr=settings.lr, weight_decay=settings.weight_decay)


def _adamw(groups: Groups, settings: Optimizer) -> torch.optim.AdamW:
    """Return AdamW with the configured rates."""
    return torch.optim.AdamW(
        (dict(group) for group in groups),
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )


def _ranking(config: Config, shape: Ranking) -> Task:
    def batches(rank: int, world_size: int, device: torch.device) -> Batches:
        data = SyntheticRanking(config, shape, home_of(config, device))
        return TensorBatches(config, data, rank, world_size, device)

    return Task(lambda: RankingTransformer(shape), ListwiseLoss, partial(_adamw, settings=config.optimizer), batches)


def _resnet18(config: Config, shape: Resnet18) -> Task:
    return Task(
        lambda: ResNet18().to(DTYPES[shape.dtype]),  # with its buffers
        nn.MSELoss,
        partial(_sgd, settings=config.optimizer),
        partial(FixedBatch, config, shape),
    )


def _gpt(config: Config, shape: Gpt) -> Task:
    dims = dimensions_of(shape)

    def model() -> GptModel:
        if isinstance(shape, Moe):
            return MoeModel(dims, shape, config.training.gradient_accumulation)
        return GptModel(dims)

    def batches(rank: int, world_size: int, device: torch.device) -> Batches:
        data = SyntheticText(config, dims.vocab_size, home_of(config, device))
        return TensorBatches(config, data, rank, world_size, device)

    return Task(model, NextTokenLoss, partial(_adamw, settings=config.optimizer), batches)


def task_of(config: Config) -> Task:
    """Return the workload that `config` trains.

    Raises:
        ConfigError: its workload is not one that is trained.
    """
    match config.workload:
        case Ranking() as shape:
            return _ranking(config, shape)
        case Resnet18() as shape:
            return _resnet18(config, shape)
        case Gpt() as shape:
            return _gpt(config, shape)
        case other:
            raise ConfigError(f"workload={other.name!r}: nothing that can be trained")
