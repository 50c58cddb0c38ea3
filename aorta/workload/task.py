"""What a workload has to offer so that the runner can train it: a model in blocks, batches, a loss and an optimizer.

Must not: know any workload, or how a model is spread over ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn

Groups: TypeAlias = Iterable[Mapping[str, Any]]
"""Parameter groups as `torch.optim` takes them."""


class Batch(Protocol):
    """One micro-batch, on the device that trains."""

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        """What the model is called with."""
        ...

    @property
    def target(self) -> torch.Tensor:
        """What the loss compares the model's output with."""
        ...


class Batches(Protocol):
    """A rank's micro-batches; `gradient_accumulation` of them make a step."""

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in one epoch; what `aorta.config.resolve.steps_planned` counts with."""
        ...

    def epoch(self, epoch: int, first_step: int) -> Iterator[Batch]:
        """Those of one epoch from its `first_step` on; the same as without what came before."""
        ...

    def for_ever(self) -> Iterator[Batch]:
        """Those of one epoch after the other, from the very first on."""
        ...


class Model(nn.Module, ABC):
    """A model whose parts are known by name."""

    @abstractmethod
    def blocks(self) -> Iterator[tuple[str, nn.Module]]:
        """The parts that are sharded, compiled and timed one by one, in the order they run."""

    def tensor_parallel_parts(self) -> Iterator[tuple[nn.Module, dict[str, str]]]:
        """Modules that can be computed by several ranks together, each with its layers: those that are split by output
        (`columns`) and those that sum over the parts (`rows`). None, unless a model says otherwise.
        """
        yield from ()


class Task(Protocol):
    """A workload, ready to be built."""

    def model(self) -> Model:
        """On the CPU, initialised from torch's global random state."""
        ...

    def loss(self) -> nn.Module:
        """Called with the model's output and a batch's target; returns a scalar."""
        ...

    def optimizer(self, groups: Groups) -> torch.optim.Optimizer:
        """Over the parameters as they are once the model is spread."""
        ...

    def batches(self, rank: int, world_size: int, device: torch.device) -> Batches:
        """For part `rank` of `world_size`: ranks that compute a layer together share a part."""
        ...
