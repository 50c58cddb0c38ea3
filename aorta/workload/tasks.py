"""The workloads as trainable tasks: data, model, loss and optimizer of each, and which one a configuration names.

Must not know how a model is distributed over ranks, or use global random state for data.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from aorta.config.groups.workload import dimensions_of
from aorta.config.schema import Config, DType, Gpt, Moe, Ranking, Resnet18
from aorta.errors import ConfigError
from aorta.workload.data import SyntheticRanking, SyntheticText, TensorBatch, TensorBatches, Tokens, home_of
from aorta.workload.gpt import GptModel, NextTokenLoss
from aorta.workload.moe import MoeModel
from aorta.workload.ranking import ListwiseLoss, RankingTransformer
from aorta.workload.resnet18 import CHANNELS, CLASSES, ResNet18
from aorta.workload.task import Groups, Task, adamw

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


class Resnet18Task:
    """`workload=resnet18`. `config` is that of the run, `shape` its workload section."""

    def __init__(self, config: Config, shape: Resnet18) -> None:
        self._config, self._shape = config, shape

    def model(self) -> ResNet18:
        """Return a new model on the CPU in the configured type, including buffers; initialised from torch's global
        random state.
        """
        return ResNet18().to(DTYPES[self._shape.dtype])

    def loss(self) -> nn.MSELoss:
        """Return the mean squared error, in the type of the model's output."""
        return nn.MSELoss()

    def optimizer(self, groups: Groups) -> torch.optim.SGD:
        """Return SGD without momentum, in the type of the parameters."""
        settings = self._config.optimizer
        return torch.optim.SGD((dict(group) for group in groups), lr=settings.lr, weight_decay=settings.weight_decay)

    def batches(self, rank: int, world_size: int, device: torch.device) -> FixedBatch:
        """Return one batch per rank."""
        return FixedBatch(self._config, self._shape, rank, world_size, device)


class RankingTask:
    """`workload=ranking`. `config` is that of the run, `shape` its workload section."""

    def __init__(self, config: Config, shape: Ranking) -> None:
        self._config, self._shape = config, shape

    def model(self) -> RankingTransformer:
        """Return a new model on the CPU, initialised from torch's global random state."""
        return RankingTransformer(self._shape)

    def loss(self) -> ListwiseLoss:
        """Return the loss of scores and relevances."""
        return ListwiseLoss()

    def optimizer(self, groups: Groups) -> torch.optim.AdamW:
        """Return AdamW with the configured rates."""
        return adamw(groups, self._config.optimizer)

    def batches(self, rank: int, world_size: int, device: torch.device) -> TensorBatches[TensorBatch]:
        """Return parts of one data set, shuffled alike on every rank."""
        data = SyntheticRanking(self._config, self._shape, home_of(self._config, device))
        return TensorBatches(self._config, data, rank, world_size, device)


class GptTask:
    """`workload=gpt`. `config` is that of the run, `shape` its workload section."""

    def __init__(self, config: Config, shape: Gpt) -> None:
        self._config, self._dims = config, dimensions_of(shape)

    def model(self) -> GptModel:
        """Return a new model on the CPU, initialised from torch's global random state."""
        return GptModel(self._dims)

    def loss(self) -> NextTokenLoss:
        """Return the loss of logits and the tokens that follow."""
        return NextTokenLoss()

    def optimizer(self, groups: Groups) -> torch.optim.AdamW:
        """Return AdamW with the configured rates."""
        return adamw(groups, self._config.optimizer)

    def batches(self, rank: int, world_size: int, device: torch.device) -> TensorBatches[Tokens]:
        """Return parts of one data set, shuffled alike on every rank."""
        data = SyntheticText(self._config, self._dims.vocab_size, home_of(self._config, device))
        return TensorBatches(self._config, data, rank, world_size, device)


class MoeTask(GptTask):
    """`workload=moe`. `config` is that of the run, `shape` its workload section."""

    def __init__(self, config: Config, shape: Moe) -> None:
        super().__init__(config, shape)
        self._experts, self._micro_batches = shape, config.training.gradient_accumulation

    def model(self) -> MoeModel:
        """Return a new model on the CPU, initialised from torch's global random state."""
        return MoeModel(self._dims, self._experts, self._micro_batches)


def task_of(config: Config) -> Task:
    """Return the workload that `config` trains.

    Raises:
        ConfigError: its workload is not one that is trained.
    """
    match config.workload:
        case Ranking() as shape:
            return RankingTask(config, shape)
        case Resnet18() as shape:
            return Resnet18Task(config, shape)
        case Moe() as shape:
            return MoeTask(config, shape)
        case Gpt() as shape:
            return GptTask(config, shape)
        case other:
            raise ConfigError(f"workload={other.name!r}: nothing that can be trained")
