"""The ranking transformer as a trainable workload: synthetic slates, ListNet's loss, AdamW.

Must not know how the model is distributed over ranks.
"""

from __future__ import annotations

import torch

from aorta.config.schema import Config, Ranking
from aorta.workload.data import SyntheticRanking, TensorBatch, TensorBatches, home_of
from aorta.workload.ranking import ListwiseLoss, RankingTransformer
from aorta.workload.task import Groups, adamw


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
        return adamw(groups, self._config.optimizer)

    def batches(self, rank: int, world_size: int, device: torch.device) -> TensorBatches[TensorBatch]:
        """Parts of one data set, shuffled alike on every rank."""
        data = SyntheticRanking(self._config, self._shape, home_of(self._config, device))
        return TensorBatches(self._config, data, rank, world_size, device)
