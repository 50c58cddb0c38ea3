"""What the loop of `scenario` works with: a model, process groups, streams, and how long the device takes for what."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from tests.simulated import device as simulated

ELEMENTS = 4096
WIDTH = 16


class Groups(NamedTuple):
    """Of all ranks each: what most parts use, a second one, and one whose handles are all waited for late.

    `streams`: by priority the one that the pool hands out next, when the groups have theirs.
    """

    world: dist.ProcessGroup
    other: dist.ProcessGroup
    late: dist.ProcessGroup
    streams: dict[int, int]

    def begin(self) -> None:
        """Each loop has the same streams of the pool, and none of the groups' own; with the same lengths."""
        for priority, first in self.streams.items():
            while stream_id(priority) != first:
                pass
        lengths()


def groups(device: torch.device) -> Groups:
    """Made once a process, with all their streams."""
    assert dist.group.WORLD is not None
    made = [dist.group.WORLD, dist.new_group(), dist.new_group()]
    x, peer = torch.zeros(1, device=device), 1 - dist.get_rank()
    works = [dist.all_reduce(x, group=group, async_op=True) for group in made]
    works += [dist.isend(x, peer), dist.irecv(torch.zeros(1, device=device), peer)]
    for work in works:
        assert work is not None
        work.wait()
    torch.accelerator.synchronize()
    return Groups(made[0], made[1], made[2], {priority: stream_id(priority) for priority in (0, -1)})


def stream_id(priority: int) -> int:
    """Of one that is new, or comes again."""
    return int(torch.Stream("cuda", priority=priority).stream_id)


class Block(nn.Module):
    """The only computation that takes time, forward and backward."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, WIDTH, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


@dataclass
class Rig:
    """One rank's model, streams and groups; what the parts of the loop work with."""

    device: torch.device
    rank: int
    size: int
    groups: Groups
    model: nn.Sequential = field(init=False)
    comm: torch.cuda.Stream = field(init=False)
    late: list[tuple[dist.Work, torch.Tensor]] = field(default_factory=list)
    futures: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.comm = torch.cuda.Stream(self.device, priority=-1)  # type: ignore[no-untyped-call]
        self.model = nn.Sequential(Block(self.device), Block(self.device))
        self.state, self.late_state = (torch.empty(ELEMENTS, pin_memory=True) for _ in range(2))
        self.weights = self.tensor(1)
        self.input = torch.full((WIDTH, WIDTH), self.rank + 1.0, device=self.device)
        for parameter in self.model.parameters():
            parameter.register_post_accumulate_grad_hook(self._reduce)  # type: ignore[no-untyped-call]

    def tensor(self, value: float) -> torch.Tensor:
        return torch.full((ELEMENTS,), float(value), device=self.device)

    def work(self) -> None:
        """A kernel of the model."""
        with torch.no_grad():
            self.model[0](self.input)

    def _reduce(self, parameter: torch.Tensor) -> None:
        """As DDP's reducer does: only the future is kept, and waited for behind the last node."""
        if not self.futures:
            torch.autograd.Variable._execution_engine.queue_callback(self._reduced)
        work = dist.all_reduce(parameter.grad, async_op=True)
        assert work is not None
        self.futures.append(work.get_future())

    def _reduced(self) -> None:
        for future in self.futures:
            future.wait()
        self.futures.clear()


def lengths() -> None:
    """Only the model's mathematics and collectives take time, and the host runs ahead of both."""
    simulated.defaults()
    simulated.costs(launch_ns=0)
    classes = dict.fromkeys(simulated.CLASSES, (0, 0.0))
    simulated.lengths(**classes, operators={"aten::mm": (40_000, 0.0)})
    # Another bandwidth in each direction: 16 KiB in 36, 48 and 6 us.
    simulated.lengths(copy_h2d=(4_000, 2_000.0), copy_d2h=(16_000, 2_000.0), copy_d2d=(2_000, 250.0))
    simulated.collective_lengths(default=(90_000, 0.5), send=(60_000, 0.5), recv=(60_000, 0.5))
