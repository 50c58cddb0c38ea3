"""The decoder as a trainable workload: synthetic tokens, cross-entropy of the next one, AdamW.

Must not know how the model is distributed over ranks, or use global random state for the data.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from aorta.config.groups.workload import dimensions_of
from aorta.config.schema import Config, Gpt
from aorta.workload.data import InMemory, TensorBatches, home_of
from aorta.workload.gpt import GptModel, NextTokenLoss
from aorta.workload.task import Groups, adamw

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


class GptTask:
    """`workload=gpt`. `config` is that of the run, `shape` its workload section."""

    def __init__(self, config: Config, shape: Gpt) -> None:
        self._config, self._dims = config, dimensions_of(shape)

    def model(self) -> GptModel:
        """A new model on the CPU, initialised from torch's global random state."""
        return GptModel(self._dims)

    def loss(self) -> NextTokenLoss:
        """Called with logits and the tokens that follow."""
        return NextTokenLoss()

    def optimizer(self, groups: Groups) -> torch.optim.AdamW:
        """AdamW with the configured rates."""
        return adamw(groups, self._config.optimizer)

    def batches(self, rank: int, world_size: int, device: torch.device) -> TensorBatches[Tokens]:
        """Parts of one data set, shuffled alike on every rank."""
        data = SyntheticText(self._config, self._dims.vocab_size, home_of(self._config, device))
        return TensorBatches(self._config, data, rank, world_size, device)
