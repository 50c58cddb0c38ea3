"""The compiled block ranges and ends of backward passes: what they notice is what those in Python notice."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from aorta.instrument.dispatcher import when_backward_ends
from aorta.instrument.native.build import load
from aorta.instrument.native.native_interceptor import NativeCpuInterceptor
from aorta.instrument.native.ranges import NativeEnds
from aorta.instrument.open_step import NativeEvents

FORWARD_S, BACKWARD_S = 0.02, 0.03


class _Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(FORWARD_S)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        time.sleep(BACKWARD_S)
        return gradient


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, skip: torch.Tensor | None = None) -> Any:
        out: torch.Tensor = _Work.apply(x * self.weight)
        return out if skip is None else {"out": [out + skip]}


class Watched:
    """Blocks and their ends, of a step that is under way."""

    def __init__(self, module: Any) -> None:
        self.tap = NativeCpuInterceptor(module, {})
        self.ranges, self.ends = self.tap.ranges, NativeEnds(self.tap.ranges)
        self.tap.begin()

    def told(self) -> NativeEvents:
        told = self.tap.end()()
        self.tap.begin()
        return told


@pytest.fixture
def watched() -> Iterator[Watched]:
    module, why_not = load()
    if module is None:
        pytest.skip(f"the compiled part is {why_not}")
    watched = Watched(module)
    yield watched
    watched.ranges.close()
    watched.ends.close()
    watched.tap.close()


def test_every_pass_of_every_block_in_order_on_the_clock_of_python(watched: Watched) -> None:
    blocks = [Block(), Block()]
    for index, block in enumerate(blocks):
        watched.ranges.watch(f"b{index}", block)
    watched.ends.watch(blocks[-1])  # b0's input needs no gradient: it ends with the pass
    before = time.perf_counter_ns()
    blocks[1](blocks[0](torch.ones(3))).sum().backward()
    passes = watched.told().passes
    assert [(block, phase) for block, phase, _, _ in passes] == [
        ("b0", "forward"),
        ("b1", "forward"),
        ("b1", "backward"),
        ("b0", "backward"),
    ]
    moments = [before, *(moment for *_, low, high in passes for moment in (low, high)), time.perf_counter_ns()]
    assert moments == sorted(moments)  # one after the other: b1 ended before b0 began
    for _, phase, low, high in passes:
        assert high - low >= (FORWARD_S if phase == "forward" else BACKWARD_S) * 1e9


def test_a_block_ends_with_the_last_of_its_input_gradients_wherever_its_tensors_stand(watched: Watched) -> None:
    block = Block()
    watched.ranges.watch("b", block)
    x, skip = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    block(x * 1, skip=skip)["out"][0].sum().backward()  # `skip`, a leaf, has its gradient at once
    ((_, _, low, high),) = [found for found in watched.told().passes if found[1] == "backward"]
    assert high - low >= BACKWARD_S * 1e9


def test_a_leaf_that_a_block_hands_on_opens_its_backward_pass(watched: Watched) -> None:
    identity, leaf = nn.Identity(), torch.ones(3, requires_grad=True)
    watched.ranges.watch("same", identity)
    watched.ends.watch(identity)
    (identity(leaf) * 2).sum().backward()
    assert [phase for _, phase, _, _ in watched.told().passes] == ["forward", "backward"]
    assert leaf.grad is not None


def test_gradients_are_not_touched(watched: Watched) -> None:
    plain, looked_at = nn.Linear(4, 4), nn.Linear(4, 4)
    looked_at.load_state_dict(plain.state_dict())
    watched.ranges.watch("b", looked_at)
    watched.ends.watch(looked_at)
    x = torch.randn(2, 4)
    for layer in (plain, looked_at):
        layer(x).square().sum().backward()
    assert plain.weight.grad is not None
    assert looked_at.weight.grad is not None
    assert torch.equal(plain.weight.grad, looked_at.weight.grad)


def test_between_two_steps_and_behind_the_end_nothing_is_noted_down(watched: Watched) -> None:
    block = Block()
    watched.ranges.watch("b", block)
    watched.ends.watch(block)
    watched.tap.end()
    block(torch.ones(3)).sum().backward()
    watched.tap.begin()
    output = block(torch.ones(3))
    watched.ranges.close()
    watched.ends.close()
    output.sum().backward()  # its hooks are in the graph
    block(torch.ones(3)).sum().backward()
    told = watched.told()
    assert [(block, phase) for block, phase, _, _ in told.passes] == [("b", "forward")]
    assert told.tails == []
    assert not block._forward_hooks
    assert not block._forward_pre_hooks


def test_a_pass_that_fails_does_not_hide_the_next(watched: Watched) -> None:
    model = nn.Linear(3, 3)
    watched.ranges.watch("b", model)
    watched.ends.watch(model)

    def fail(_gradient: torch.Tensor) -> None:
        raise ValueError("no gradient")

    x = torch.ones(2, 3, requires_grad=True)
    broken = x * 1
    broken.register_hook(fail)
    with pytest.raises(ValueError, match="no gradient"):
        model(broken).sum().backward()
    assert watched.told().tails == []
    model(x).sum().backward()
    told = watched.told()
    assert len(told.tails) == 1
    assert [phase for _, phase, _, _ in told.passes] == ["forward", "backward"]


def test_the_word_comes_before_the_strategys_ending_and_the_tail_behind(watched: Watched) -> None:
    class Seen:
        events: list[tuple[str, int]] = []

    def ended(event: str) -> None:
        Seen.events.append((event, time.perf_counter_ns()))

    model = nn.Linear(3, 3)
    model.weight.register_post_accumulate_grad_hook(lambda _: when_backward_ends(lambda: ended("DDP's ending")))

    def after(_module: nn.Module, _args: object, output: torch.Tensor) -> None:
        output.register_hook(lambda _gradient: when_backward_ends(lambda: ended("FSDP's ending")))

    model.register_forward_hook(after)
    watched.ends.watch(model)
    model(torch.ones(2, 3)).sum().backward()
    ((begin, end),) = watched.told().tails
    assert [event for event, _ in Seen.events] == ["FSDP's ending", "DDP's ending"]
    assert all(begin < moment < end for _, moment in Seen.events)


def test_once_a_pass_however_many_modules_are_watched(watched: Watched) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    for module in model.modules():
        watched.ends.watch(module)
    for _ in range(3):
        model(torch.ones(2, 3)).sum().backward()
    assert len(watched.told().tails) == 3
