"""What docs/dev/devices.md says of `experiment=full`, computed without a byte of memory or a step: it is not for a
CPU."""

from __future__ import annotations

import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from aorta.config.schema import Ranking
from aorta.workload.ranking import ListwiseLoss, RankingTransformer
from tests.docs.pages import ROOT
from tests.loop import resolved

PEAK_TFLOPS = {"A100": 312, "H100": 989, "MI300X": 1307}
"""Dense bf16, from the vendors' data sheets."""


@pytest.fixture(scope="module")
def full():
    return resolved("experiment=full", "parallel=ddp", "training.device=cuda")


@pytest.fixture(scope="module")
def tflop(full) -> float:
    """Of a step, by torch's own counter."""
    shape, items = full.config.workload, full.config.dataset.sequence_length
    batch = full.config.training.batch_size * full.config.training.gradient_accumulation
    # By products of matrices, which the counter knows; the fused kernels recompute in backward.
    with FakeTensorMode(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        dense = torch.zeros(batch, items, shape.dense_features)
        categorical = torch.zeros(batch, items, shape.categorical_features, dtype=torch.int32)
        ListwiseLoss()(RankingTransformer(shape)(dense, categorical), torch.zeros(batch, items)).backward()
    return counter.get_total_flops() / 1e12


def test_a_step_keeps_a_recent_card_busy_for_a_tenth_of_a_second(tflop):
    assert 1000 * tflop / (0.6 * PEAK_TFLOPS["H100"]) > 100  # six tenths of the peak is more than training reaches


def test_every_rank_has_steps_for_a_whole_run_and_for_the_check(full):
    config = full.config
    per_step = config.training.batch_size * 64  # ranks
    assert config.training.epochs * (config.dataset.num_samples // per_step) >= config.training.max_steps


def test_the_page_s_table_is_what_torch_counts(tflop):
    page = (ROOT / "docs" / "dev" / "devices.md").read_text()
    assert f"**{tflop:.1f} TFLOP**" in page
    for card, peak in PEAK_TFLOPS.items():
        row = re.search(rf"\| {card}[^|]*\|(.+)\|", page)
        assert row is not None
        told = [float(cell) for cell in re.findall(r"[\d.]+", row[1].replace(",", ""))]
        assert told == [peak, *(round(1000 * tflop / (share * peak)) for share in (0.6, 0.4))], card


def test_it_fits_into_40_gb(full):
    """Parameters, gradients and AdamW's two moments in float32; what backward needs, by storage; the data."""
    config, shape = full.config, full.config.workload
    assert isinstance(shape, Ranking)
    batch, items = config.training.batch_size, config.dataset.sequence_length
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
