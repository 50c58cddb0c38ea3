"""What can be trained: the interface of a workload (a model in blocks, batches, a loss, an optimizer), and batches of
synthetic data.

Data are generated once from a seed, the same on every rank, never the bottleneck. Batches come in an order that depends
only on the seed, so a run resumed at step k gets what the uninterrupted run would have got. Must not know how a model
is distributed over ranks, or use global random state for data.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from aorta.config.schema import Config

B = TypeVar("B", bound=tuple[Any, ...])
"""A named tuple of tensors, whose first dimension counts samples."""
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

    def epoch(self, epoch: int, first_step: int) -> Iterator[Batch]:
        """Return micro-batches of one epoch from its `first_step` on, whether or not earlier ones were drawn."""

    def for_ever(self) -> Iterator[Batch]:
        """Return micro-batches of one epoch after another, without end, from the very first on."""


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


class InMemory(TorchDataset[B]):
    """All samples in memory; indexed by a tensor of sample numbers."""

    def __init__(self, samples: B) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples[0])

    def __getitem__(self, indices: torch.Tensor) -> B:
        return self.map(self.samples, lambda tensor: tensor[indices])

    @staticmethod
    def map(batch: B, change: Callable[[torch.Tensor], torch.Tensor]) -> B:
        return type(batch)(*(change(tensor) for tensor in batch))


class TensorBatches(Generic[B]):
    """A rank's batches, epoch by epoch; a last part that does not fill a step is left out.

    Args:
        config: sizes and seeds.
        data: all samples, on the device that trains or on the host (`dataset.on_device`).
        device: of the training.
        rank, world_size: which part of every batch is wanted, and of how many.
    """

    def __init__(self, config: Config, data: InMemory[B], rank: int, world_size: int, device: torch.device) -> None:
        self._training, self._loader = config.training, config.dataloader
        self._on_device = config.dataset.on_device
        self._rank, self._world_size, self._device = rank, world_size, device
        self._data = data
        self._per_step = self._training.batch_size * self._training.gradient_accumulation * world_size
        self.steps_per_epoch = len(self._data) // self._per_step

    def epoch(self, epoch: int, first_step: int) -> Iterator[B]:
        """Yield micro-batches of one epoch from its `first_step` on; `gradient_accumulation` of them make a step."""
        generator = torch.Generator().manual_seed(self._training.seed + epoch)
        order = torch.randperm(len(self._data), generator=generator).to(self._data.samples[0].device)
        batches, size = list[torch.Tensor](), self._training.batch_size
        for step in range(first_step, self.steps_per_epoch):
            for micro in range(self._training.gradient_accumulation):
                begin = step * self._per_step + (micro * self._world_size + self._rank) * size
                batches.append(order[begin : begin + size])
        if self._on_device:
            yield from (self._data[indices] for indices in batches)
            return
        loader = DataLoader(
            self._data,
            batch_size=None,
            sampler=batches,
            num_workers=self._loader.num_workers,
            pin_memory=self._loader.pin_memory,
        )
        for batch in loader:
            yield self._data.map(batch, lambda tensor: tensor.to(self._device, non_blocking=True))

    def for_ever(self) -> Iterator[B]:
        for epoch in itertools.count():
            yield from self.epoch(epoch, 0)
