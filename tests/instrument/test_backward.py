"""The end of a backward pass, noticed without anybody calling anything."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from aorta.instrument.compute_ranges import BackwardEnds
from aorta.instrument.dispatcher import when_backward_ends
from aorta.instrument.event_clock import HostClock, Mark


class Witness:
    """What happened, in order."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.tails: list[tuple[Mark, Mark]] = []
        self.ends = BackwardEnds(HostClock(), lambda: self.events.append("nodes ran"), self.on_tail)

    def on_tail(self, begin: Mark, end: Mark) -> None:
        self.events.append("tail")
        self.tails.append((begin, end))


@pytest.fixture
def seen() -> Witness:
    return Witness()


def ending_of_a_strategy(model: nn.Module, event: str, seen: Witness, *, prepend: bool = False) -> None:
    """Ask for a word at the end of the pass with the first gradient of the outputs, as FSDP does."""

    def after(_module: nn.Module, _args: object, output: torch.Tensor) -> None:
        output.register_hook(lambda _gradient: when_backward_ends(lambda: seen.events.append(event)))

    model.register_forward_hook(after, prepend=prepend)


def test_it_comes_before_the_strategys_ending_and_the_tail_behind(seen: Witness) -> None:
    model = nn.Linear(3, 3)
    model.weight.register_post_accumulate_grad_hook(
        lambda _: when_backward_ends(lambda: seen.events.append("DDP's ending"))
    )
    ending_of_a_strategy(model, "FSDP's ending", seen)
    seen.ends.watch(model)
    model(torch.ones(2, 3)).sum().backward()
    assert seen.events == ["nodes ran", "FSDP's ending", "DDP's ending", "tail"]
    assert all(begin <= end for begin, end in seen.tails)


def test_once_a_pass_however_many_modules_are_watched(seen: Witness) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    for module in model.modules():
        seen.ends.watch(module)
    for _ in range(3):
        model(torch.ones(2, 3)).sum().backward()
    assert seen.events == ["nodes ran", "tail"] * 3


def test_a_module_that_no_gradient_reaches_is_not_waited_for(seen: Witness) -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    seen.ends.watch(second)
    first(torch.ones(2, 3)).sum().backward()
    with torch.no_grad():
        second(torch.ones(2, 3))
    assert seen.events == []


def test_a_pass_that_fails_does_not_hide_the_next(seen: Witness) -> None:
    model = nn.Linear(3, 3)
    seen.ends.watch(model)

    def fail(_gradient: torch.Tensor) -> None:
        raise ValueError("no gradient")

    x = torch.ones(2, 3, requires_grad=True)
    broken = x * 1
    broken.register_hook(fail)
    with pytest.raises(ValueError, match="no gradient"):
        model(broken).sum().backward()
    assert seen.events == []
    model(x).sum().backward()
    assert seen.events == ["nodes ran", "tail"]


def test_nothing_is_left_behind(seen: Witness) -> None:
    model = nn.Linear(3, 3)
    seen.ends.watch(model)
    output = model(torch.ones(2, 3))
    seen.ends.close()
    output.sum().backward()
    model(torch.ones(2, 3)).sum().backward()
    assert seen.events == []
    assert not model._forward_hooks
