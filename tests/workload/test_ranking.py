"""The ranking transformer: sizes by hand, that it learns, and its data, in an order that only the seed decides."""

from __future__ import annotations

import pytest
import torch

from aorta.config.schema import Config, Dataset, Ranking, Training
from aorta.workload.ranking import ListwiseLoss, RankingTransformer, SyntheticRanking, TensorBatch
from aorta.workload.tasks import TensorBatches

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


CPU = torch.device("cpu")
FEATURES = Ranking(vocab_size=50, categorical_features=3, dense_features=5)


def config(**training: int) -> Config:
    return Config(
        training=Training(**{"batch_size": 4, **training}),  # type: ignore[arg-type]
        dataset=Dataset(num_samples=100, sequence_length=6),
        workload=FEATURES,
    )


def batches(rank: int, world_size: int, settings: Config) -> TensorBatches[TensorBatch]:
    return TensorBatches(settings, SyntheticRanking(settings, FEATURES, CPU), rank, world_size, CPU)


def test_shapes_types_and_ranges() -> None:
    (dense, categorical, relevance) = SyntheticRanking(config(), FEATURES, CPU).samples
    assert dense.shape == (100, 6, 5)
    assert categorical.shape == (100, 6, 3)
    assert relevance.shape == (100, 6)
    assert dense.dtype == relevance.dtype == torch.float32
    assert 0 <= int(categorical.min()) <= int(categorical.max()) < 50


def test_ranks_share_an_epoch_without_overlap() -> None:
    settings = config(gradient_accumulation=2)
    seen = [torch.cat([b.dense.flatten(1) for b in batches(rank, 3, settings).epoch(0, 0)]) for rank in range(3)]
    together = torch.cat(seen)
    # 4 samples x 2 micro-batches x 3 ranks = 24 a step: 4 whole steps of 100 samples.
    assert len(together) == 96
    assert len(torch.unique(together, dim=0)) == 96


def test_a_later_start_sees_the_same_batches() -> None:
    settings = config(gradient_accumulation=2)
    whole = list(batches(1, 2, settings).epoch(3, 0))
    resumed = list(batches(1, 2, settings).epoch(3, 2))
    assert len(resumed) == len(whole) - 2 * 2
    for early, late in zip(whole[4:], resumed, strict=True):
        assert torch.equal(early.dense, late.dense)


def test_epochs_differ_and_global_random_state_is_left_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    first = next(iter(batches(0, 1, config()).epoch(0, 0)))
    second = next(iter(batches(0, 1, config()).epoch(1, 0)))
    assert not torch.equal(first.dense, second.dense)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("workers", [0, 1])
def test_loaded_batches_equal_those_in_memory(workers: int) -> None:
    loaded = config()
    loaded.dataset.on_device, loaded.dataloader.num_workers = False, workers
    for one, other in zip(batches(0, 2, config()).epoch(0, 5), batches(0, 2, loaded).epoch(0, 5), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
