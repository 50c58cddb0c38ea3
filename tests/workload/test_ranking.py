"""The ranking transformer: sizes by hand, and that it learns."""

from __future__ import annotations

import torch

from aorta.config.schema import Config, Dataset, Ranking
from aorta.workload.data import SyntheticRanking
from aorta.workload.ranking import ListwiseLoss, RankingTransformer

SHAPE = Ranking(
    model_dim=32,
    num_heads=4,
    num_layers=2,
    mlp_hidden_dim=48,
    vocab_size=70,
    embedding_dim=8,
    categorical_features=3,
    dense_features=5,
    dropout=0.0,
)


def test_parameters_counted_by_hand() -> None:
    d, h, e, v, f = 32, 48, 8, 70, 5
    embedding = v * e + (e * d + d) + (f * d + d)
    attention = 3 * (d * d + d) + (d * d + d)
    layer = attention + (d * h + h) + (h * d + d) + 2 * 2 * d
    scorer = 2 * d + (d + 1)
    assert sum(p.numel() for p in RankingTransformer(SHAPE).parameters()) == embedding + 2 * layer + scorer


def test_blocks_cover_every_parameter_once_in_order() -> None:
    model = RankingTransformer(SHAPE)
    names = [name for name, _ in model.blocks()]
    assert names == ["embedding", "encoder.0", "encoder.1", "scorer"]
    owned = [id(p) for _, block in model.blocks() for p in block.parameters()]
    assert owned == [id(p) for p in model.parameters()]


def test_loss_is_listnets_by_hand() -> None:
    scores, relevance = torch.tensor([[1.0, 2.0, 0.0]]), torch.tensor([[0.0, 1.0, 0.0]])
    p = torch.exp(relevance) / torch.exp(relevance).sum()
    q = torch.exp(scores) / torch.exp(scores).sum()
    assert torch.isclose(ListwiseLoss()(scores, relevance), -(p * q.log()).sum())


def test_it_learns() -> None:
    torch.manual_seed(0)
    config = Config(dataset=Dataset(num_samples=64, sequence_length=8), workload=SHAPE)
    samples = SyntheticRanking(config, SHAPE, torch.device("cpu")).samples
    model, loss = RankingTransformer(SHAPE), ListwiseLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    values = []
    for _ in range(40):
        optimizer.zero_grad()
        value = loss(model(samples.dense, samples.categorical), samples.relevance)
        value.backward()
        optimizer.step()
        values.append(value.item())
    target = samples.relevance.softmax(-1)
    floor = -(target * target.log()).sum(-1).mean().item()
    assert values[-1] - floor < 0.5 * (values[0] - floor)
