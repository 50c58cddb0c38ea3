"""The workloads as trainable tasks: data, model, loss and optimizer of each, and which one a configuration names.

Data are synthetic: generated once from a seed, the same on every rank, never the bottleneck. Batches come in an order
that depends only on the seed, so a run resumed at step k gets what the uninterrupted run would have got. Must not know
how a model is distributed over ranks, or use global random state for data.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from aorta.config.groups.workload import dimensions_of
from aorta.config.schema import Config, DType, Gpt, Moe, Ranking, Resnet18
from aorta.errors import ConfigError
from aorta.workload.gpt import GptModel, MoeModel, NextTokenLoss
from aorta.workload.ranking import ListwiseLoss, RankingTransformer
from aorta.workload.resnet18 import CHANNELS, CLASSES, ResNet18
from aorta.workload.task import Batches, Groups, Task

B = TypeVar("B", bound=tuple[Any, ...])
"""A named tuple of tensors, whose first dimension counts samples."""


class TensorBatch(NamedTuple):
    """Some samples: dense [B, S, F] float32, categorical [B, S, K] int32, relevance [B, S] float32."""

    dense: torch.Tensor
    categorical: torch.Tensor
    relevance: torch.Tensor

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        return self.dense, self.categorical

    @property
    def target(self) -> torch.Tensor:
        return self.relevance


class InMemory(TorchDataset[B]):
    """All samples in memory; indexed by a tensor of sample numbers."""

    def __init__(self, samples: B) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples[0])

    def __getitem__(self, indices: torch.Tensor) -> B:
        return self.map(self.samples, lambda tensor: tensor[indices])

    @staticmethod
    def map(batch: B, change: Callable[[torch.Tensor], torch.Tensor]) -> B:
        return type(batch)(*(change(tensor) for tensor in batch))


class SyntheticRanking(InMemory[TensorBatch]):
    """Slates of items; indexed by a tensor of sample numbers. Relevance is a hidden function of the features,
    so there is something to learn.
    """

    def __init__(self, config: Config, shape: Ranking, device: torch.device) -> None:
        samples, items = config.dataset.num_samples, config.dataset.sequence_length
        generator = torch.Generator().manual_seed(config.dataset.seed)
        dense = torch.randn(samples, items, shape.dense_features, generator=generator)
        categorical = torch.randint(
            shape.vocab_size,
            (samples, items, shape.categorical_features),
            generator=generator,
            dtype=torch.int32,
        )
        teacher = torch.randn(shape.dense_features, generator=generator)
        popularity = torch.randn(shape.vocab_size, generator=generator)
        relevance = dense @ teacher + popularity[categorical.long()].mean(dim=-1)
        super().__init__(TensorBatch(dense.to(device), categorical.to(device), relevance.to(device)))


REPEATED = 0.75
"""How often a token is followed by its own successor, rather than by any token."""


class Tokens(NamedTuple):
    """Some samples: tokens [B, S + 1] int32; the model sees all but the last and predicts all but the first."""

    tokens: torch.Tensor

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        return (self.tokens[:, :-1],)

    @property
    def target(self) -> torch.Tensor:
        return self.tokens[:, 1:]


class SyntheticText(InMemory[Tokens]):
    """Sequences in which each token has one successor that mostly follows it, so there is something to learn."""

    def __init__(self, config: Config, vocab_size: int, device: torch.device) -> None:
        samples, length = config.dataset.num_samples, config.dataset.sequence_length + 1
        generator = torch.Generator().manual_seed(config.dataset.seed)
        successor = torch.randperm(vocab_size, generator=generator, dtype=torch.int32)
        tokens = torch.randint(vocab_size, (samples, length), generator=generator, dtype=torch.int32)
        follows = torch.rand(samples, length, generator=generator) < REPEATED
        for place in range(1, length):
            before = tokens[:, place - 1].long()
            tokens[:, place] = torch.where(follows[:, place], successor[before], tokens[:, place])
        super().__init__(Tokens(tokens.to(device)))


class TensorBatches(Generic[B]):
    """A rank's batches, epoch by epoch; a last part that does not fill a step is left out.

    Args:
        config: sizes and seeds.
        data: all samples, on the device that trains or on the host (`dataset.on_device`).
        device: of the training.
        rank, world_size: which part of every batch is wanted, and of how many.
    """

    def __init__(self, config: Config, data: InMemory[B], rank: int, world_size: int, device: torch.device) -> None:
        self._training, self._loader = config.training, config.dataloader
        self._on_device = config.dataset.on_device
        self._rank, self._world_size, self._device = rank, world_size, device
        self._data = data
        self._per_step = self._training.batch_size * self._training.gradient_accumulation * world_size
        self.steps_per_epoch = len(self._data) // self._per_step

    def epoch(self, epoch: int, first_step: int) -> Iterator[B]:
        """Yield micro-batches of one epoch from its `first_step` on; `gradient_accumulation` of them make a step."""
        generator = torch.Generator().manual_seed(self._training.seed + epoch)
        order = torch.randperm(len(self._data), generator=generator).to(self._data.samples[0].device)
        mine, size = list[torch.Tensor](), self._training.batch_size
        for step in range(first_step, self.steps_per_epoch):
            for micro in range(self._training.gradient_accumulation):
                begin = step * self._per_step + (micro * self._world_size + self._rank) * size
                mine.append(order[begin : begin + size])
        if self._on_device:
            yield from (self._data[indices] for indices in mine)
            return
        loader = DataLoader(
            self._data,
            batch_size=None,
            sampler=mine,
            num_workers=self._loader.num_workers,
            pin_memory=self._loader.pin_memory,
        )
        for batch in loader:
            yield self._data.map(batch, lambda tensor: tensor.to(self._device, non_blocking=True))

    def for_ever(self) -> Iterator[B]:
        for epoch in itertools.count():
            yield from self.epoch(epoch, 0)


DTYPES = {DType.fp32: torch.float32, DType.bf16: torch.bfloat16}


@dataclass(frozen=True)
class Images:
    """Images [B, 3, H, W] and targets [B, 1000], both standard normal."""

    images: torch.Tensor
    target: torch.Tensor

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        return (self.images,)


class FixedBatch:
    """The same micro-batch again and again; it differs between ranks and depends only on seed and rank."""

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
        for _ in range((self.steps_per_epoch - first_step) * self._micro_batches):
            yield self._batch

    def for_ever(self) -> Iterator[Images]:
        while True:
            yield self._batch


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
            data = partial(batches, partial(SyntheticRanking, config, shape))
            return Task(lambda: RankingTransformer(shape), ListwiseLoss, adamw, data)
        case Resnet18() as images:
            fixed = partial(FixedBatch, config, images)
            return Task(lambda: ResNet18().to(DTYPES[images.dtype]), nn.MSELoss, sgd, fixed)  # with its buffers
        case Moe() as moe:
            dims = dimensions_of(moe)
            text = partial(batches, partial(SyntheticText, config, dims.vocab_size))
            micro_batches = config.training.gradient_accumulation
            return Task(lambda: MoeModel(dims, moe, micro_batches), NextTokenLoss, adamw, text)
        case Gpt() as gpt:
            dims = dimensions_of(gpt)
            text = partial(batches, partial(SyntheticText, config, dims.vocab_size))
            return Task(lambda: GptModel(dims), NextTokenLoss, adamw, text)
        case other:
            raise ConfigError(f"workload={other.name!r}: nothing that can be trained")
