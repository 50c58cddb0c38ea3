"""Synthetic data: generated once from a seed, the same on every rank, never the bottleneck.

Batches come in an order that depends only on the seed, so a run resumed at step k gets what the uninterrupted run would
have got. Must not use global random state.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from aorta.config.schema import Config, Ranking

B = TypeVar("B", bound=tuple[Any, ...])
"""A named tuple of tensors, whose first dimension counts samples."""


class TensorBatch(NamedTuple):
    """Some samples: dense [B, S, F] float32, categorical [B, S, K] int32, relevance [B, S] float32."""

    dense: torch.Tensor
    categorical: torch.Tensor
    relevance: torch.Tensor

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        """Positional arguments of the model."""
        return self.dense, self.categorical

    @property
    def target(self) -> torch.Tensor:
        """The relevances that scores are compared with."""
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
        """Return a batch of the same kind with every tensor changed."""
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
        """Positional arguments of the model."""
        return (self.tokens[:, :-1],)

    @property
    def target(self) -> torch.Tensor:
        """Return the tokens that follow."""
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


def home_of(config: Config, device: torch.device) -> torch.device:
    """Return where the data of a training on `device` is kept."""
    return device if config.dataset.on_device else torch.device("cpu")


class TensorBatches(Generic[B]):
    """A rank's batches, epoch by epoch; a last part that does not fill a step is left out.

    Args:
        config: sizes and seeds.
        data: all samples, on the device that `home_of` says.
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
        mine = [self._indices(order, step, micro) for step, micro in self._places(first_step)]
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
        """Yield micro-batches of one epoch after the other, from the very first on."""
        for epoch in itertools.count():
            yield from self.epoch(epoch, 0)

    def _places(self, first_step: int) -> Iterator[tuple[int, int]]:
        for step in range(first_step, self.steps_per_epoch):
            for micro in range(self._training.gradient_accumulation):
                yield step, micro

    def _indices(self, order: torch.Tensor, step: int, micro: int) -> torch.Tensor:
        size = self._training.batch_size
        begin = step * self._per_step + (micro * self._world_size + self._rank) * size
        return order[begin : begin + size]
