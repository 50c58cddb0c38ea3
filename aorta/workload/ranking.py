"""A ranking transformer: dense and categorical features of a slate of items, an encoder over the slate, a scorer.

Enters: `dense` [batch, items, dense_features] float32 and `categorical` [batch, items, categorical_features] int.
Leaves: `scores` [batch, items]. The loss is ListNet's: cross-entropy between the softmax of the scores and of the
relevances (Cao et al., "Learning to Rank: From Pairwise Approach to Listwise Approach", ICML 2007). Must not: know how
the model is spread over ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from aorta.config.schema import Ranking


class Embedding(nn.Module):
    """One vector per item: its categorical embeddings, summed and projected, plus its projected dense features."""

    def __init__(self, shape: Ranking) -> None:
        super().__init__()
        self.table = nn.Embedding(shape.vocab_size, shape.embedding_dim)
        self.project = nn.Linear(shape.embedding_dim, shape.model_dim)
        self.dense = nn.Linear(shape.dense_features, shape.model_dim)

    def forward(self, dense_BSF: torch.Tensor, categorical_BSK: torch.Tensor) -> torch.Tensor:  # noqa: N803
        summed_BSE = self.table(categorical_BSK).sum(dim=2)  # noqa: N806
        out: torch.Tensor = self.project(summed_BSE) + self.dense(dense_BSF)
        return out


class Scorer(nn.Module):
    """One score per item."""

    def __init__(self, shape: Ranking) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(shape.model_dim)
        self.score = nn.Linear(shape.model_dim, 1)

    def forward(self, items_BSD: torch.Tensor) -> torch.Tensor:  # noqa: N803
        out: torch.Tensor = self.score(self.norm(items_BSD)).squeeze(-1)
        return out


class RankingTransformer(nn.Module):
    """Embedding, `num_layers` pre-norm encoder layers, scorer."""

    def __init__(self, shape: Ranking) -> None:
        super().__init__()
        self.embedding = Embedding(shape)
        self.encoder = nn.ModuleList(
            nn.TransformerEncoderLayer(
                shape.model_dim,
                shape.num_heads,
                shape.mlp_hidden_dim,
                shape.dropout,
                activation="gelu",
                batch_first=True,
                norm_first=True,
            )
            for _ in range(shape.num_layers)
        )
        self.scorer = Scorer(shape)

    def forward(self, dense_BSF: torch.Tensor, categorical_BSK: torch.Tensor) -> torch.Tensor:  # noqa: N803
        items_BSD = self.embedding(dense_BSF, categorical_BSK)  # noqa: N806
        for layer in self.encoder:
            items_BSD = layer(items_BSD)  # noqa: N806
        scores: torch.Tensor = self.scorer(items_BSD)
        return scores

    def blocks(self) -> Iterator[tuple[str, nn.Module]]:
        """The parts that are sharded, compiled and timed one by one, in the order they run."""
        yield "embedding", self.embedding
        for index, layer in enumerate(self.encoder):
            yield f"encoder.{index}", layer
        yield "scorer", self.scorer


class ListwiseLoss(nn.Module):
    """ListNet's top-one loss, a scalar in float32."""

    def forward(self, scores_BS: torch.Tensor, relevance_BS: torch.Tensor) -> torch.Tensor:  # noqa: N803
        target_BS = relevance_BS.float().softmax(dim=-1)  # noqa: N806
        return -(target_BS * scores_BS.float().log_softmax(dim=-1)).sum(dim=-1).mean()
