"""The ranking transformer as a trainable workload: synthetic slates, ListNet's loss, AdamW.

Must not know how the model is distributed over ranks.
"""

from __future__ import annotations

import torch

from aorta.config.schema import Config, Ranking
from aorta.workload.data import TensorBatches
from aorta.workload.ranking import ListwiseLoss, RankingTransformer
from aorta.workload.task import Groups


class RankingTask:
    """`workload=ranking`. `config` is that of the run, `shape` its workload section."""

    def __init__(self, config: Config, shape: Ranking) -> None:
        self._config, self._shape = config, shape

    def model(self) -> RankingTransformer:
        """A new model on the CPU, initialised from torch's global random state."""
        return RankingTransformer(self._shape)

    def loss(self) -> ListwiseLoss:
        """Called with scores and relevances."""
        return ListwiseLoss()

    def optimizer(self, groups: Groups) -> torch.optim.AdamW:
        """AdamW with the configured rates."""
        settings = self._config.optimizer
        return torch.optim.AdamW(
            (dict(group) for group in groups),
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )

    def batches(self, rank: int, world_size: int, device: torch.device) -> TensorBatches:
        """Parts of one data set, shuffled alike on every rank."""
        return TensorBatches(self._config, self._shape, rank, world_size, device)
