"""The interface of a workload that the runner can train: a model in blocks, batches, a loss and an optimizer.

Must not know any workload, or how a model is distributed over ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn

Groups: TypeAlias = Iterable[Mapping[str, Any]]
"""Parameter groups as `torch.optim` takes them."""


class Batch(Protocol):
    @property
    def inputs(self) -> tuple[torch.Tensor, ...]: ...

    @property
    def target(self) -> torch.Tensor: ...


class Batches(Protocol):
    """A rank's micro-batches; `gradient_accumulation` of them make a step."""

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in one epoch, as used by `aorta.config.resolve.steps_planned`."""
        ...

    def epoch(self, epoch: int, first_step: int) -> Iterator[Batch]:
        """Return micro-batches of one epoch from its `first_step` on; they do not depend on whether earlier ones were
        drawn.
        """
        ...

    def for_ever(self) -> Iterator[Batch]:
        """Return micro-batches of one epoch after another, without end, from the very first on."""
        ...


class Model(nn.Module, ABC):
    @abstractmethod
    def blocks(self) -> Iterator[tuple[str, nn.Module]]:
        """Return the blocks that are sharded, compiled and timed one by one, in the order they run."""

    def tensor_parallel_parts(self) -> Iterator[tuple[nn.Module, dict[str, str]]]:
        """Yield the modules that several ranks can compute together, each with its layers: `columns` are split by
        output, `rows` sum over the parts. Empty by default.
        """
        yield from ()

    def causal_attentions(self) -> Iterator[nn.Module]:
        """Yield the modules called with queries, keys and values [batch, heads, positions, width], the only ones that
        look at positions other than their own; where there are more keys than queries, the queries are those of the
        last ones. A model that has any takes inputs [batch, positions], and behind them the positions themselves:
        several ranks can have a part of each sequence. Empty by default.
        """
        yield from ()

    def experts(self) -> Iterator[nn.Module]:
        """Yield the modules called with [experts, capacity, width] whose every parameter counts experts in its first
        dimension: several ranks can have some each. Empty by default.
        """
        yield from ()

    def pipeline_stage(self, index: int, count: int) -> Model:
        """Return the part of this model that stage `index` of `count` computes, made of its modules: an even share of
        the layers (`layers_of`), after what takes the inputs in the first, before what gives the output in the last.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot be cut into stages")


class Stages(Model):
    """Some stages of a model, by their number: what one rank of a pipeline has of it. Not called as a whole."""

    def __init__(self, stages: Mapping[int, Model]) -> None:
        super().__init__()
        self.stages = nn.ModuleDict({str(index): stage for index, stage in stages.items()})

    def blocks(self) -> Iterator[tuple[str, nn.Module]]:
        for stage in self.stages.values():
            assert isinstance(stage, Model)
            yield from stage.blocks()


def layers_of(stage: int, stages: int, layers: int) -> range:
    """Return the layers of one stage: an even share, the earlier stages having one less where it does not come out."""
    return range(layers * stage // stages, layers * (stage + 1) // stages)


@dataclass(frozen=True)
class Task:
    """A workload, ready to be built.

    Attributes:
        model: makes a new model on the CPU, initialised from torch's global random state.
        loss: makes a module called with the model's output and a batch's target; it returns a scalar.
        optimizer: of the parameters as they are after the model has been distributed.
        batches: of part `rank` of `world_size` on a device: ranks that compute a layer together share a part.
    """

    model: Callable[[], Model]
    loss: Callable[[], nn.Module]
    optimizer: Callable[[Groups], torch.optim.Optimizer]
    batches: Callable[[int, int, torch.device], Batches]
