"""What the loop of `scenario` works with: a model, process groups, streams, and how long the device takes for what."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from tests.simulated import device as simulated
from tests.simulated.scenarios import unbound_group

ELEMENTS = 4096
WIDTH = 16
COPY_D2D = (2_000, 250.0)


class Groups(NamedTuple):
    """Of all ranks each: what most parts use, a second one, one whose handles are all waited for late, one that is not
    bound to a device, as the others are, and two for what is in no step of the record: issued between steps, or in a
    step that failed.

    `streams`: by priority the one that the pool hands out next, when the groups have theirs.
    """

    world: dist.ProcessGroup
    other: dist.ProcessGroup
    late: dist.ProcessGroup
    unbound: dist.ProcessGroup
    between: dist.ProcessGroup
    failed: dist.ProcessGroup
    streams: dict[int, int]

    def begin(self) -> None:
        """Each loop has the same streams of the pool, and none of the groups' own; with the same lengths."""
        for priority, first in self.streams.items():
            while stream_id(priority) != first:
                pass
        lengths()


def groups(device: torch.device) -> Groups:
    """Made once a process, with all their streams."""
    made = [dist.group.WORLD, dist.new_group(), dist.new_group(), unbound_group()]
    made += [dist.new_group() for _ in range(2)]
    x, peer = torch.zeros(1, device=device), 1 - dist.get_rank()
    works = [dist.all_reduce(x, group=group, async_op=True) for group in made]
    for group in (made[0], made[3], made[4]):
        other = torch.zeros(1, device=device)
        if peer:
            works += [dist.isend(x, peer, group=group), dist.irecv(other, peer, group=group)]
        else:
            works += [dist.irecv(other, peer, group=group), dist.isend(x, peer, group=group)]
    for work in works:
        work.wait()
    torch.accelerator.synchronize()
    return Groups(*made, {priority: stream_id(priority) for priority in (0, -1)})


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
    another: torch.cuda.Stream = field(init=False)
    held_up: torch.cuda.Stream = field(init=False)
    late: list[tuple[dist.Work, torch.Tensor]] = field(default_factory=list)
    futures: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.comm = torch.cuda.Stream(self.device, priority=-1)
        self.another, self.held_up = (torch.cuda.Stream(self.device) for _ in range(2))
        self.model = nn.Sequential(Block(self.device), Block(self.device))
        self.state, self.late_state = (torch.empty(ELEMENTS, pin_memory=True) for _ in range(2))
        self.weights = self.tensor(1)
        self.input = torch.full((WIDTH, WIDTH), self.rank + 1.0, device=self.device)
        for parameter in self.model.parameters():
            parameter.register_post_accumulate_grad_hook(self._reduce)

    def tensor(self, value: float) -> torch.Tensor:
        return torch.full((ELEMENTS,), float(value), device=self.device)

    @contextmanager
    def computing(self, step: int) -> Iterator[int]:
        """Make a step's compute stream the current one, behind that of the step before; its id. It alternates between
        the stream on which the instrument was made and another one.
        """
        streams = (torch.cuda.default_stream(self.device), self.another)
        stream, before = streams[step % 2], streams[1 - step % 2]
        with torch.cuda.stream(stream):
            stream.wait_stream(before)
            yield stream.stream_id

    def work(self) -> None:
        """A kernel of the model."""
        with torch.no_grad():
            self.model[0](self.input)

    def _reduce(self, parameter: torch.Tensor) -> None:
        """As DDP's reducer does: only the future is kept, and waited for behind the last node."""
        if not self.futures:
            torch.autograd.Variable._execution_engine.queue_callback(self._reduced)
        work = dist.all_reduce(parameter.grad, async_op=True)
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
    simulated.lengths(copy_h2d=(4_000, 2_000.0), copy_d2h=(16_000, 2_000.0), copy_d2d=COPY_D2D)
    simulated.collective_lengths(default=(90_000, 0.5), send=(60_000, 0.5), recv=(60_000, 0.5))
