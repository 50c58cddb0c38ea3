"""The ranking transformer: sizes by hand, its data; what docs/dev/devices.md says of the memory of its full size."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from aorta.config.schema import Config, Dataset, Ranking, Training
from aorta.workload.ranking import ListwiseLoss, RankingTransformer, SyntheticRanking, TensorBatch
from aorta.workload.tasks import TensorBatches
from tests.docs.pages import ROOT
from tests.loop import resolved

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


def test_parameters_counted_by_hand_are_in_the_blocks_once_in_order() -> None:
    d, h, e, v, f = 32, 48, 8, 70, 5
    embedding = v * e + (e * d + d) + (f * d + d)
    attention = 3 * (d * d + d) + (d * d + d)
    layer = attention + (d * h + h) + (h * d + d) + 2 * 2 * d
    scorer = 2 * d + (d + 1)
    model = RankingTransformer(SHAPE)
    sizes = {name: sum(p.numel() for p in block.parameters()) for name, block in model.blocks()}
    assert sizes == {"embedding": embedding, "encoder.0": layer, "encoder.1": layer, "scorer": scorer}
    assert [id(p) for _, block in model.blocks() for p in block.parameters()] == [id(p) for p in model.parameters()]


def test_loss_is_listnets_by_hand() -> None:
    scores, relevance = torch.tensor([[1.0, 2.0, 0.0]]), torch.tensor([[0.0, 1.0, 0.0]])
    p = torch.exp(relevance) / torch.exp(relevance).sum()
    q = torch.exp(scores) / torch.exp(scores).sum()
    assert torch.isclose(ListwiseLoss()(scores, relevance), -(p * q.log()).sum())


CPU = torch.device("cpu")
FEATURES = Ranking(vocab_size=50, categorical_features=3, dense_features=5)


def config(**training: int) -> Config:
    return Config(
        training=Training(**{"batch_size": 4, **training}),
        dataset=Dataset(num_samples=100, sequence_length=6),
        workload=FEATURES,
    )


def batches(rank: int, world_size: int, settings: Config) -> TensorBatches[TensorBatch]:
    return TensorBatches(settings, SyntheticRanking(settings, FEATURES, CPU), rank, world_size, CPU)


def test_shapes_types_and_ranges() -> None:
    (dense, categorical, relevance) = SyntheticRanking(config(), FEATURES, CPU).samples
    assert [part.shape for part in (dense, categorical, relevance)] == [(100, 6, 5), (100, 6, 3), (100, 6)]
    assert dense.dtype == relevance.dtype == torch.float32
    assert 0 <= int(categorical.min()) <= int(categorical.max()) < 50


def test_ranks_share_an_epoch_without_overlap() -> None:
    settings = config(gradient_accumulation=2)
    seen = [torch.cat([b.dense.flatten(1) for b in batches(rank, 3, settings).epoch(0, 0)]) for rank in range(3)]
    together = torch.cat(seen)
    # 4 samples x 2 micro-batches x 3 ranks = 24 a step: 4 whole steps of 100 samples.
    assert len(together) == 96
    assert len(torch.unique(together, dim=0)) == 96


def test_epochs_differ_and_global_random_state_is_left_alone() -> None:
    before = torch.get_rng_state()
    first, second = (next(iter(batches(0, 1, config()).epoch(epoch, 0))) for epoch in (0, 1))
    assert not torch.equal(first.dense, second.dense)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("workers", [0, 1])
def test_loaded_batches_equal_those_in_memory(workers: int) -> None:
    loaded = config()
    loaded.dataset.on_device, loaded.dataloader.num_workers = False, workers
    for one, other in zip(batches(0, 2, config()).epoch(0, 5), batches(0, 2, loaded).epoch(0, 5), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_the_full_size_fits_into_40_gb_and_every_rank_has_steps_for_a_whole_run_and_for_the_check() -> None:
    """Parameters, gradients and AdamW's two moments in float32; what backward needs, by storage; the data."""
    config = resolved("experiment=full", "parallel=ddp", "training.device=cuda").config
    batch, items, shape = config.training.batch_size, config.dataset.sequence_length, config.workload
    assert config.training.epochs * (config.dataset.num_samples // (batch * 64)) >= config.training.max_steps
    with FakeTensorMode():
        model = RankingTransformer(shape)
        for layer in model.encoder.values():
            layer.attention._dropout = 0.0  # a CPU's fused attention knows none; a card's keeps no scores with it
        kept: dict[int, torch.Tensor] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            kept[tensor.untyped_storage()._cdata] = tensor
            return tensor

        inputs = (torch.zeros(batch, items, shape.dense_features),)
        inputs += (torch.zeros(batch, items, shape.categorical_features, dtype=torch.int32),)
        keeping = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        with keeping, torch.autocast("cpu", dtype=torch.bfloat16):
            loss = ListwiseLoss()(model(*inputs), torch.zeros(batch, items))
        own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        saved = sum(t.untyped_storage().nbytes() for storage, t in kept.items() if storage not in own)
        states = 4 * sum(4 * parameter.numel() for parameter in model.parameters())
        assert loss.requires_grad
    data = config.dataset.num_samples * items * 4 * (shape.dense_features + shape.categorical_features + 1)
    page = (ROOT / "docs" / "dev" / "devices.md").read_text()
    for part in (states, saved, data):
        assert f"{part / 1e9:.1f} GB" in page
    assert saved + states + data < 30e9
