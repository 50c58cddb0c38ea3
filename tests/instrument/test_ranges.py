"""Passes of blocks and ends of backward passes, as rows of Python and of compiled code: order, what is inside, what is
left behind.
"""

from __future__ import annotations

import copy
import time
import weakref
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from aorta.instrument.dispatcher import when_backward_ends
from tests.instrument.taps import Tap

FORWARD_NS, BACKWARD_NS = 20_000_000, 30_000_000


def work(length_ns: int) -> None:
    time.sleep(length_ns / 1e9)


class _Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        work(FORWARD_NS)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        work(BACKWARD_NS)
        return gradient


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, skip: torch.Tensor | None = None) -> Any:
        out: torch.Tensor = _Work.apply(x * self.weight)
        return out if skip is None else {"out": [out + skip]}


class Late(nn.Module):
    """The gradient of what comes by keyword is the last."""

    def forward(self, x: torch.Tensor, skip: dict[str, torch.Tensor]) -> Any:
        return {"out": [x + _Work.apply(skip["tensor"])]}


class Watched(Tap):
    """What the hooks that append rows notice, on the host's clock."""

    def __init__(self, *, compiled: bool) -> None:
        super().__init__(compiled=compiled, looks=False)
        self.ranges = self.interceptor.ranges

    def watch(self, name: str, module: nn.Module) -> None:
        """Its passes, and the ends of backward passes that reach it."""
        self.ranges.watch(name, module)
        self.ranges.watch_backward(module)

    def noticed(self) -> tuple[list[tuple[str, str, int, int]], list[tuple[int, int]]]:
        step = self.end()
        self.begin()
        return step.passes, step.tails


@pytest.fixture(params=["python", "compiled"])
def watched(request: pytest.FixtureRequest) -> Iterator[Watched]:
    watched = Watched(compiled=request.param == "compiled")
    yield watched
    watched.ranges.close()
    watched.interceptor.close()


def test_every_pass_of_every_block_in_order(watched: Watched) -> None:
    blocks = [Block(), Block()]
    for index, block in enumerate(blocks):
        watched.ranges.watch(f"b{index}", block)
    watched.ranges.watch_backward(blocks[-1])  # b0's input needs no gradient: it ends with the pass
    before = time.perf_counter_ns()
    blocks[1](blocks[0](torch.ones(3))).sum().backward()
    passes, _ = watched.noticed()
    assert [(block, phase) for block, phase, _, _ in passes] == [
        ("b0", "forward"),
        ("b1", "forward"),
        ("b1", "backward"),
        ("b0", "backward"),
    ]
    moments = [before, *(moment for *_, low, high in passes for moment in (low, high)), time.perf_counter_ns()]
    assert moments == sorted(moments)  # one after the other: b1 ended before b0 began
    for _, phase, low, high in passes:
        assert high - low >= (FORWARD_NS if phase == "forward" else BACKWARD_NS)


@pytest.mark.parametrize("leaves", [False, True], ids=["computed", "leaves"])  # a leaf has its gradient at once
@pytest.mark.parametrize("by_keyword", [False, True], ids=["skip first", "skip last"])
def test_a_block_ends_with_the_last_of_its_input_gradients(watched: Watched, by_keyword: bool, leaves: bool) -> None:
    block = Late() if by_keyword else Block()
    watched.ranges.watch("b", block)
    inputs = [torch.ones(3, requires_grad=True) for _ in range(2)]
    x, skip = inputs if leaves else [leaf * 1 for leaf in inputs]
    block(x, skip={"tensor": skip} if by_keyword else skip)["out"][0].sum().backward()
    ((_, _, low, high),) = [found for found in watched.noticed()[0] if found[1] == "backward"]
    assert high - low >= BACKWARD_NS


def test_a_leaf_that_a_block_hands_on_opens_its_backward_pass(watched: Watched) -> None:
    identity, leaf = nn.Identity(), torch.ones(3, requires_grad=True)
    watched.watch("same", identity)
    (identity(leaf) * 2).sum().backward()
    assert [phase for _, phase, _, _ in watched.noticed()[0]] == ["forward", "backward"]
    assert leaf.grad is not None


def test_between_two_steps_and_behind_the_end_nothing_is_noted_down_and_left_behind(watched: Watched) -> None:
    block = Block()
    watched.watch("b", block)
    watched.end()
    block(torch.ones(3)).sum().backward()
    watched.begin()
    assert watched.noticed() == ([], [])
    output = block(torch.ones(3))
    watched.ranges.close()
    output.sum().backward()  # its hooks are in the graph
    block(torch.ones(3)).sum().backward()
    passes, tails = watched.noticed()
    assert [phase for _, phase, _, _ in passes] == ["forward"]
    assert tails == []
    assert not block._forward_hooks
    assert not block._forward_pre_hooks


def test_a_pass_that_fails_does_not_hide_the_next(watched: Watched) -> None:
    model = nn.Linear(3, 3)
    watched.watch("b", model)
    x = torch.ones(2, 3, requires_grad=True)
    broken = x * 1
    broken.register_hook(Mock(side_effect=ValueError("no gradient")))
    with pytest.raises(ValueError, match="no gradient"):
        model(broken).sum().backward()
    assert watched.noticed()[1] == []
    model(x).sum().backward()
    passes, tails = watched.noticed()
    assert len(tails) == 1
    assert [phase for _, phase, _, _ in passes] == ["forward", "backward"]


def test_the_nodes_end_before_the_strategys_ending_and_the_tail_behind(watched: Watched) -> None:
    endings: list[tuple[str, int]] = []

    def ended(event: str) -> None:
        work(1)
        endings.append((event, time.perf_counter_ns()))
        work(1)

    def after(_module: nn.Module, _args: object, output: torch.Tensor) -> None:
        output.register_hook(lambda _gradient: when_backward_ends(lambda: ended("FSDP's ending")))

    model = nn.Linear(3, 3)
    model.weight.register_post_accumulate_grad_hook(lambda _: when_backward_ends(lambda: ended("DDP's ending")))
    model.register_forward_hook(after)
    watched.ranges.watch_backward(model)
    model(torch.ones(2, 3)).sum().backward()
    ((begin, end),) = watched.noticed()[1]
    assert [event for event, _ in endings] == ["FSDP's ending", "DDP's ending"]
    assert all(begin < moment < end for _, moment in endings)


def test_once_a_pass_however_many_modules_are_watched_and_never_where_no_gradient_reaches_one(watched: Watched) -> None:
    model, other = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), nn.Linear(3, 3)
    for module in (*model.modules(), other):
        watched.ranges.watch_backward(module)
    for _ in range(3):
        model(torch.ones(2, 3)).sum().backward()
    assert len(watched.noticed()[1]) == 3
    nn.Linear(3, 3)(torch.ones(2, 3)).sum().backward()
    with torch.no_grad():
        other(torch.ones(2, 3))
    assert watched.noticed()[1] == []


def test_a_module_without_hooks_gets_none_and_is_left_as_it_was(watched: Watched) -> None:
    plain, hooked = Block(), Block()
    seen: list[str] = []
    hooked.register_forward_pre_hook(lambda *_: seen.append("before"))
    hooked.register_forward_hook(lambda *_: seen.append("after"))
    before = [set(vars(block)) for block in (plain, hooked)]
    watched.watch("plain", plain)
    watched.watch("hooked", hooked)
    assert not plain._forward_hooks
    assert not plain._forward_pre_hooks
    hooked(plain(torch.ones(3, requires_grad=True))).sum().backward()
    passes, tails = watched.noticed()
    assert [(block, phase) for block, phase, _, _ in passes] == [
        ("plain", "forward"),
        ("hooked", "forward"),
        ("hooked", "backward"),
        ("plain", "backward"),
    ]
    assert (len(tails), seen) == (1, ["before", "after"])
    watched.ranges.close()
    assert [set(vars(block)) for block in (plain, hooked)] == before
    assert (len(hooked._forward_pre_hooks), len(hooked._forward_hooks)) == (1, 1)


def test_what_a_program_makes_of_a_watched_module_is_not_observed(watched, monkeypatch):
    block = Block()
    watched.ranges.watch("block", block)
    for other in (copy.copy(block), copy.deepcopy(block), block._replicate_for_data_parallel()):
        assert set(vars(other)) - set(vars(Block())) <= {"_is_replica", "_former_parameters"}
        other.weight = block.weight  # replicas are given theirs
        other(torch.ones(3, requires_grad=True)).sum().backward()
    assert watched.noticed()[0] == []
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    block.compile()  # takes the same place
    compiled = block._compiled_call_impl
    watched.ranges.close()
    assert block._compiled_call_impl is compiled


def test_a_watched_module_is_freed_at_once(watched: Watched) -> None:
    block = Block()
    watched.ranges.watch("block", block)
    freed = weakref.ref(block)
    del block
    assert freed() is None
