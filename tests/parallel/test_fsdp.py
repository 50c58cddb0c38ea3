"""FSDP2: gradients of separately sharded modules are the mean over all ranks, also where each part is on one rank only;
which blocks are gathered ahead. DDP: which device it is told, and how its buckets are sized. Context parallelism: which
chunks of a sequence each rank has, and what they attend to.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from aorta.config.schema import DDP, FSDPEP, DType, Precision
from aorta.parallel import context, fsdp, plan
from aorta.parallel.context import in_order, own_chunks
from aorta.parallel.fsdp import prefetch
from aorta.parallel.plan import default_bucket_mb
from aorta.workload.gpt import CausalAttention

RANKS = 4
"""Whose gradients have arrived by all-to-all, added up."""


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3, 5))

    def forward(self, tokens_ECD: torch.Tensor) -> torch.Tensor:  # noqa: N803
        return torch.bmm(tokens_ECD, self.weight)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """One rank, alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("reduce_dtype", ["null", "bf16", "fp16"])
def test_a_gradient_is_divided_once(mesh: DeviceMesh, reduce_dtype: str) -> None:
    layer = nn.Sequential(experts := Experts())
    model = nn.Sequential(layer)
    settings = FSDPEP(reduce_dtype=None if reduce_dtype == "null" else DType(reduce_dtype))
    separate = fsdp.SeparatelySharded([experts], mesh, summed=RANKS)
    fsdp.shard(model, [("layer", layer)], settings, Precision.none, torch.device("cpu"), mesh, separate)
    model(torch.ones(2, 2, 3)).sum().backward()
    gradient = experts.weight.grad
    assert isinstance(gradient, torch.distributed.tensor.DTensor)
    assert torch.equal(gradient.to_local(), torch.full((2, 3, 5), 2 / RANKS))


class Noted:
    def __init__(self) -> None:
        self.forward: list[Noted] = []
        self.backward: list[Noted] = []

    def set_modules_to_forward_prefetch(self, modules: list[Noted]) -> None:
        self.forward = modules

    def set_modules_to_backward_prefetch(self, modules: list[Noted]) -> None:
        self.backward = modules


@pytest.mark.parametrize(
    ("ahead", "behind", "forward", "backward"),
    [
        (1, 1, [[1], [2], [3], []], [[0], [0], [1], [2]]),
        (2, 2, [[1, 2], [2, 3], [3], []], [[0], [0], [1, 0], [2, 1]]),
        # Told about itself, a block that is there already, FSDP gathers nothing ahead.
        (0, 0, [[], [], [], []], [[0], [1], [2], [3]]),
    ],
)
def test_prefetch(ahead: int, behind: int, forward: list[list[int]], backward: list[list[int]]) -> None:
    blocks = [Noted() for _ in range(4)]
    prefetch([[block] for block in blocks], ahead, behind)
    assert [[blocks.index(b) for b in block.forward] for block in blocks] == forward
    assert [[blocks.index(b) for b in block.backward] for block in blocks] == backward


def test_what_is_sharded_apart_inside_a_block_is_gathered_with_it() -> None:
    first, second, experts, third = (Noted() for _ in range(4))
    prefetch([[first], [second, experts], [third]], 1, 1)
    assert first.forward == [second, experts]
    assert third.backward == [second, experts]
    assert (experts.forward, experts.backward) == ([], [experts])


@pytest.mark.parametrize(("device", "told"), [("cuda:1", [1]), ("cpu", None)])
@pytest.mark.spec("B11")
def test_ddp_is_told_the_device_of_the_local_rank(monkeypatch, device, told):
    monkeypatch.setenv("RANK", "9")
    asked = {}

    def wrapped(module, **settings):
        asked.update(settings)
        return module

    monkeypatch.setattr(plan, "DistributedDataParallel", wrapped)
    monkeypatch.setattr(plan, "ParallelizedModel", lambda module, **_: module)
    plan.replicate(nn.Linear(2, 2), DDP(), Precision.none, torch.device(device))
    assert asked["device_ids"] == told


def test_bucket_size_follows_the_model_up_to_torchs_own() -> None:
    assert default_bucket_mb(nn.Linear(1024, 1024, bias=False)) == pytest.approx(4 / 8)
    assert default_bucket_mb(nn.Linear(2, 2)) == 1 / 16
    with torch.device("meta"):
        assert default_bucket_mb(nn.Linear(32768, 32768)) == 25.0


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_chunks_of_all_ranks_are_the_sequence_and_as_many_pairs_of_a_query_and_a_key(ranks: int) -> None:
    whole = torch.arange(2 * 2 * ranks * 3).view(2, 2 * ranks * 3)
    parts = [own_chunks(whole, 1, rank, ranks) for rank in range(ranks)]
    assert {part.shape for part in parts} == {(2, 6)}
    assert torch.equal(in_order(torch.stack(parts), 2), whole)
    pairs = [int((own_chunks(torch.arange(2 * ranks * 5), 0, rank, ranks) + 1).sum()) for rank in range(ranks)]
    assert pairs == [pairs[0]] * ranks


@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("ranks", [2, 4])
def test_attention_over_ranks_is_that_to_the_whole_sequence(monkeypatch, ranks: int, kv_heads: int) -> None:
    """That they train like one rank, gradients and all: `tests/recording/test_decoders.py`."""
    torch.manual_seed(0)
    shapes = (2, 4, 2 * ranks * 3, 8), (2, kv_heads, 2 * ranks * 3, 8)
    whole = query, key, value = (*(torch.randn(shape, dtype=torch.float64) for shape in (*shapes, shapes[1])),)
    of_ranks = [[own_chunks(tensor, 2, rank, ranks) for tensor in whole] for rank in range(ranks)]
    monkeypatch.setattr(context, "_all_gather", lambda *_: torch.cat([torch.stack(own[1:]) for own in of_ranks]))
    expected = CausalAttention()(query, key, value)
    for rank, own in enumerate(of_ranks):
        mesh: Any = SimpleNamespace(get_local_rank=lambda rank=rank: rank, size=lambda: ranks)
        context.split([attention := CausalAttention()], mesh)
        torch.testing.assert_close(attention(*own), own_chunks(expected, 2, rank, ranks))
