"""Block ranges: order, what is inside, and what a backward pass without input gradients does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from aorta.instrument.compute_ranges import BlockRanges, Range
from aorta.instrument.event_clock import HostClock

FORWARD_NS, BACKWARD_NS = 20_000_000, 30_000_000


class _Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        Worked.now_ns += FORWARD_NS
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        Worked.now_ns += BACKWARD_NS
        return gradient


class Worked(HostClock):
    """A clock that only the blocks' own work moves, so that ranges are exact on a busy machine."""

    now_ns = 0

    def mark(self) -> int:
        return Worked.now_ns


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, skip: torch.Tensor | None = None) -> torch.Tensor:
        out: torch.Tensor = _Work.apply(x * self.weight)
        return out if skip is None else out + skip


@pytest.fixture
def seen() -> list[Range]:
    return []


@pytest.fixture
def ranges(seen: list[Range]) -> BlockRanges:
    return BlockRanges(Worked(), seen.append)


def test_every_pass_of_every_block_in_order(ranges: BlockRanges, seen: list[Range]) -> None:
    blocks = [Block(), Block()]
    for index, block in enumerate(blocks):
        ranges.watch(f"b{index}", block)
    x = torch.ones(3)
    for block in blocks:
        x = block(x)
    x.sum().backward()
    ranges.backward_ran()
    assert [(s.block, s.phase) for s in seen] == [
        ("b0", "forward"),
        ("b1", "forward"),
        ("b1", "backward"),
        ("b0", "backward"),
    ]
    for span in seen:
        assert span.end is not None
        assert span.end - span.start == (FORWARD_NS if span.phase == "forward" else BACKWARD_NS)
    # b0's input needs no gradient: it ends with the pass. b1 ended where b0 began, not later.
    assert seen[2].end == seen[3].start


def test_a_block_ends_with_the_last_of_its_input_gradients(ranges: BlockRanges, seen: list[Range]) -> None:
    block = Block()
    ranges.watch("b", block)
    x, skip = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    block(x * 1, skip=skip * 1).sum().backward()
    # `skip`'s gradient is there at once, `x`'s only after the sleep.
    (backward,) = [s for s in seen if s.phase == "backward"]
    assert backward.end is not None
    assert backward.end - backward.start == BACKWARD_NS


def test_the_gradient_that_comes_at_once_does_not_end_the_block(ranges: BlockRanges, seen: list[Range]) -> None:
    """Those of leaves arrive as soon as they are known: of `skip` before the work, of `x` behind it."""
    block = Block()
    ranges.watch("b", block)
    block(torch.ones(3, requires_grad=True), skip=torch.ones(3, requires_grad=True)).sum().backward()
    (backward,) = [s for s in seen if s.phase == "backward"]
    assert backward.end is not None
    assert backward.end - backward.start == BACKWARD_NS


class Late(nn.Module):
    """The gradient of what comes by keyword is the last."""

    def forward(self, x: torch.Tensor, late: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
        assert late is not None
        out: torch.Tensor = x + _Work.apply(late["tensor"])
        return out


def test_inputs_by_keyword_count_too(ranges: BlockRanges, seen: list[Range]) -> None:
    block = Late()
    ranges.watch("b", block)
    block(torch.ones(3, requires_grad=True), late={"tensor": torch.ones(3, requires_grad=True)}).sum().backward()
    (backward,) = [s for s in seen if s.phase == "backward"]
    assert backward.end is not None
    assert backward.end - backward.start == BACKWARD_NS


def test_nothing_is_left_behind(ranges: BlockRanges, seen: list[Range]) -> None:
    block = Block()
    ranges.watch("b", block)
    ranges.close()
    block(torch.ones(3)).sum().backward()
    assert seen == []
    assert not block._forward_hooks
    assert not block._forward_pre_hooks


def test_gradients_are_not_touched(ranges: BlockRanges) -> None:
    plain, watched = nn.Linear(4, 4), nn.Linear(4, 4)
    watched.load_state_dict(plain.state_dict())
    ranges.watch("b", watched)
    x = torch.randn(2, 4)
    for layer in (plain, watched):
        layer(x).square().sum().backward()
    assert plain.weight.grad is not None
    assert watched.weight.grad is not None
    assert torch.equal(plain.weight.grad, watched.weight.grad)


def test_every_range_has_marks_of_its_own(seen: list[Range]) -> None:
    taken: list[object] = []

    class Clock(HostClock):
        def mark(self) -> object:
            taken.append(object())
            return taken[-1]

    ranges = BlockRanges(Clock(), seen.append)
    tables = [nn.Embedding(4, 3), nn.Embedding(4, 3)]  # two blocks whose inputs need no gradient
    for index, table in enumerate(tables):
        ranges.watch(f"t{index}", table)
    sum(table(torch.tensor([1])) for table in tables).sum().backward()
    ranges.backward_ran()
    marks = [mark for span in seen for mark in (span.start, span.end)]
    assert len(marks) == len({id(mark) for mark in marks}) == 8
