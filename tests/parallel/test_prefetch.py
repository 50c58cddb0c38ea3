"""Which blocks FSDP is told to gather ahead, and how DDP's buckets are sized."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from aorta.parallel.ddp import default_bucket_mb
from aorta.parallel.fsdp import prefetch


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
    prefetch([[block] for block in blocks], ahead, behind)  # type: ignore[list-item]
    assert [[blocks.index(b) for b in block.forward] for block in blocks] == forward
    assert [[blocks.index(b) for b in block.backward] for block in blocks] == backward


def test_what_is_sharded_apart_inside_a_block_is_gathered_with_it() -> None:
    first, second, experts, third = (Noted() for _ in range(4))
    prefetch([[first], [second, experts], [third]], 1, 1)  # type: ignore[list-item]
    assert first.forward == [second, experts]
    assert third.backward == [second, experts]
    assert (experts.forward, experts.backward) == ([], [experts])


def test_bucket_size_follows_the_model_up_to_torchs_own() -> None:
    assert default_bucket_mb(nn.Linear(1024, 1024, bias=False)) == pytest.approx(4 / 8)
    assert default_bucket_mb(nn.Linear(2, 2)) == 1 / 16
    with torch.device("meta"):
        assert default_bucket_mb(nn.Linear(32768, 32768)) == 25.0
