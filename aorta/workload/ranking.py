"""A ranking transformer: dense and categorical features of a slate of items, an encoder over the slate, a scorer.

`dense` [batch, items, dense_features] float32 and `categorical` [batch, items, categorical_features] int -> `scores`
[batch, items]. The loss is ListNet's: cross-entropy between the softmax of the scores and of the relevances (Cao et
al., "Learning to Rank: From Pairwise Approach to Listwise Approach", ICML 2007). Must not know how the model is
distributed over ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from aorta.config.schema import Config, Ranking
from aorta.workload.tasks import InMemory, Model, layers_of


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


class EncoderAttention(nn.Module):
    """Multi-head self-attention over a slate.

    The four projections are separate layers, so that each can be sharded by itself; attention uses as many heads as the
    projections yield on this rank.
    """

    def __init__(self, shape: Ranking) -> None:
        super().__init__()
        self.query = nn.Linear(shape.model_dim, shape.model_dim)
        self.key = nn.Linear(shape.model_dim, shape.model_dim)
        self.value = nn.Linear(shape.model_dim, shape.model_dim)
        self.out = nn.Linear(shape.model_dim, shape.model_dim)
        self._head_dim = shape.model_dim // shape.num_heads
        self._dropout = shape.dropout

    def forward(self, items_BSD: torch.Tensor) -> torch.Tensor:  # noqa: N803
        query, key, value = (
            project(items_BSD).unflatten(-1, (-1, self._head_dim)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        dropout = self._dropout if self.training else 0.0
        heads_BHSE = scaled_dot_product_attention(query, key, value, dropout_p=dropout)  # noqa: N806
        out: torch.Tensor = self.out(heads_BHSE.transpose(1, 2).flatten(2))
        return out


class EncoderFeedForward(nn.Module):
    def __init__(self, shape: Ranking) -> None:
        super().__init__()
        self.up = nn.Linear(shape.model_dim, shape.mlp_hidden_dim)
        self.dropout = nn.Dropout(shape.dropout)
        self.down = nn.Linear(shape.mlp_hidden_dim, shape.model_dim)

    def forward(self, items_BSD: torch.Tensor) -> torch.Tensor:  # noqa: N803
        out: torch.Tensor = self.down(self.dropout(nn.functional.gelu(self.up(items_BSD))))
        return out


class EncoderLayer(nn.Module):
    """Pre-norm attention and feed-forward, each on a residual path (Xiong et al., "On Layer Normalization in the
    Transformer Architecture", ICML 2020).
    """

    def __init__(self, shape: Ranking) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.model_dim)
        self.attention = EncoderAttention(shape)
        self.feed_forward_norm = nn.LayerNorm(shape.model_dim)
        self.feed_forward = EncoderFeedForward(shape)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, items_BSD: torch.Tensor) -> torch.Tensor:  # noqa: N803
        items_BSD = items_BSD + self.dropout(self.attention(self.attention_norm(items_BSD)))  # noqa: N806
        out: torch.Tensor = items_BSD + self.dropout(self.feed_forward(self.feed_forward_norm(items_BSD)))
        return out


class Scorer(nn.Module):
    def __init__(self, shape: Ranking) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(shape.model_dim)
        self.score = nn.Linear(shape.model_dim, 1)

    def forward(self, items_BSD: torch.Tensor) -> torch.Tensor:  # noqa: N803
        # A copy, not a view: FSDP warns about modules that return views, since it hooks what they return.
        out: torch.Tensor = torch.squeeze_copy(self.score(self.norm(items_BSD)), -1)
        return out


class RankingTransformer(Model):
    def __init__(self, shape: Ranking) -> None:
        super().__init__()
        self.embedding: Embedding | None = Embedding(shape)
        self.encoder = nn.ModuleDict({str(index): EncoderLayer(shape) for index in range(shape.num_layers)})
        self.scorer: Scorer | None = Scorer(shape)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Score `dense` and `categorical`; as a stage of a pipeline, whatever the stage before it gave."""
        items_BSD = inputs[0] if self.embedding is None else self.embedding(*inputs)  # noqa: N806
        for layer in self.encoder.values():
            items_BSD = layer(items_BSD)  # noqa: N806
        scores: torch.Tensor = items_BSD if self.scorer is None else self.scorer(items_BSD)
        return scores

    def pipeline_stage(self, index: int, count: int) -> RankingTransformer:
        stage = RankingTransformer.__new__(RankingTransformer)
        Model.__init__(stage)
        stage.embedding = self.embedding if index == 0 else None
        kept = layers_of(index, count, len(self.encoder))
        stage.encoder = nn.ModuleDict({str(layer): self.encoder[str(layer)] for layer in kept})
        stage.scorer = self.scorer if index == count - 1 else None
        return stage

    def tensor_parallel_parts(self) -> Iterator[tuple[nn.Module, dict[str, str]]]:
        for layer in self.encoder.values():
            assert isinstance(layer, EncoderLayer)
            yield layer.attention, {"query": "columns", "key": "columns", "value": "columns", "out": "rows"}
            yield layer.feed_forward, {"up": "columns", "down": "rows"}

    def blocks(self) -> Iterator[tuple[str, nn.Module]]:
        if self.embedding is not None:
            yield "embedding", self.embedding
        for index, layer in self.encoder.items():
            yield f"encoder.{index}", layer
        if self.scorer is not None:
            yield "scorer", self.scorer


class ListwiseLoss(nn.Module):
    """ListNet's top-one loss, a scalar in float32."""

    def forward(self, scores_BS: torch.Tensor, relevance_BS: torch.Tensor) -> torch.Tensor:  # noqa: N803
        target_BS = relevance_BS.float().softmax(dim=-1)  # noqa: N806
        return -(target_BS * scores_BS.float().log_softmax(dim=-1)).sum(dim=-1).mean()


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


class SyntheticRanking(InMemory[TensorBatch]):
    """Slates of items, whose relevance is a hidden function of the features, so there is something to learn."""

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
