"""What the loop of `scenario` and the scenes work with: process groups, a model, streams, an instrument, and how long
the device takes for what. All in virtual time. Must not: wait for the device where its callers would not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from aorta.instrument.instrumentation import Instrumentation
from aorta.records.clocks import read_clocks
from aorta.records.schema import InstrumentMode, Step
from aorta.records.step_line import StepFacts
from tests.simulated import device as simulated

ELEMENTS = 4096
WIDTH = 16
MODES: dict[str, InstrumentMode] = {"dedicated": "dedicated", "observe": "observe", "all_dedicated": "dedicated"}
"""By the way that an instrument looks; the last one has `instrument.dedicated_async`."""


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


def unbound_group() -> dist.ProcessGroup:
    """A group of all ranks that is bound to no device, as all are where `init_process_group` is given none."""
    world = dist.group.WORLD
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        group = dist.new_group()
    finally:
        world.bound_device_id = bound
    assert group.bound_device_id is None
    return group


@cache
def groups(device: torch.device) -> Groups:
    """Made once a process, with all their streams."""
    made = [dist.group.WORLD, dist.new_group(), dist.new_group(), unbound_group()]
    made += [dist.new_group() for _ in range(2)]
    x = torch.zeros(1, device=device)
    works = [dist.all_reduce(x, group=group, async_op=True) for group in made]
    for group in (made[0], made[3], made[4]):
        works += exchanged(x, torch.zeros_like(x), group)
    for work in works:
        work.wait()
    torch.accelerator.synchronize()
    return Groups(*made, {priority: stream_id(priority) for priority in (0, -1)})


def exchanged(there: torch.Tensor, back: torch.Tensor, group: dist.ProcessGroup | None = None) -> list[Any]:
    """A send to the other one of two ranks and a receive, by themselves, in an order in which both end."""
    rank = dist.get_rank()
    transfers = [(dist.isend, there), (dist.irecv, back)]
    return [call(tensor, 1 - rank, group=group) for call, tensor in (reversed(transfers) if rank else transfers)]


def stream_id(priority: int) -> int:
    """Of one that is new, or comes again."""
    return int(torch.Stream("cuda", priority=priority).stream_id)


def lengths() -> None:
    """Only the model's mathematics and collectives take time, and the host runs ahead of both."""
    simulated.defaults()
    simulated.costs(launch_ns=0)
    classes = dict.fromkeys(simulated.CLASSES, (0, 0.0))
    simulated.lengths(**classes, operators={"aten::mm": (40_000, 0.0)})
    # Another bandwidth in each direction: 16 KiB in 36, 48 and 6 us.
    simulated.lengths(copy_h2d=(4_000, 2_000.0), copy_d2h=(16_000, 2_000.0), copy_d2d=(2_000, 250.0))
    simulated.collective_lengths(default=(90_000, 0.5), send=(60_000, 0.5), recv=(60_000, 0.5))


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
    groups: Groups
    late: list[tuple[dist.Work, torch.Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.comm = torch.cuda.Stream(self.device, priority=-1)
        self.another, self.held_up = (torch.cuda.Stream(self.device) for _ in range(2))
        self.block = Block(self.device)
        self.state, self.late_state = (torch.empty(ELEMENTS, pin_memory=True) for _ in range(2))
        self.weights = self.tensor(1)
        self.input = torch.full((WIDTH, WIDTH), self.rank + 1.0, device=self.device)

    def tensor(self, value: float | None = None) -> torch.Tensor:
        """Of one value; of the rank's number, counted from 1, if none is given."""
        return torch.full((ELEMENTS,), self.rank + 1.0 if value is None else float(value), device=self.device)

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

    @contextmanager
    def communicating(self) -> Iterator[None]:
        """The strategy's own stream is the current one, behind the computing stream."""
        self.comm.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.comm):
            yield

    def work(self) -> None:
        """A kernel of the model."""
        with torch.no_grad():
            self.block(self.input)


@dataclass
class Scene:
    """A device, and an instrument that looks at it: `way` is one of `MODES`, or off."""

    device: torch.device
    groups: Groups
    way: str
    lines: list[Step] = field(default_factory=list)
    number: int = 0

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def mode(self) -> InstrumentMode:
        return MODES.get(self.way, "off")

    @contextmanager
    def looking(self, *, native: bool = True, begin: bool = True) -> Iterator[Instrumentation]:
        """Everything is read at the end. Without `begin`, streams and the device's account stay as they are."""
        if begin:
            self.groups.begin()
            torch.accelerator.synchronize(self.device)
            simulated.reset()
        given = (self.device, self.mode, self.rank, dist.get_world_size(), read_clocks(), self.lines.append)
        with Instrumentation(*given, native=native, dedicated_async=self.way == "all_dedicated") as instrument:
            yield instrument
            instrument.recorder.finish()

    def step(self, instrument: Instrumentation) -> Any:
        """The next one."""
        self.number += 1
        return instrument.recorder.step(StepFacts(0, self.number, self.number, 0.0, warmup=False))

    @contextmanager
    def one_step(self) -> Iterator[Instrumentation]:
        with self.looking() as instrument, self.step(instrument):
            yield instrument

    def tensor(self, value: float = 1.0) -> torch.Tensor:
        return torch.full((ELEMENTS,), value, device=self.device)

    def square(self, **words: Any) -> torch.Tensor:
        """What a `Block` takes."""
        return torch.ones(WIDTH, WIDTH, device=self.device, **words)

    def rows(self) -> list[tuple[str, int | None, int | None, str | None]]:
        """Kind, start and end on the host's clock, and who noticed the end, of all collectives in the record."""
        return [
            (
                row.kind,
                None if row.start_ns is None else row.start_ns + line.start_mono_ns,
                None if row.end_ns is None else row.end_ns + line.start_mono_ns,
                row.end_source,
            )
            for line in self.lines
            for row in line.collectives
        ]

    def spans(self) -> list[tuple[int | None, int | None]]:
        """Starts and ends in the record, in order."""
        return sorted(row[1:3] for row in self.rows())

    def kernels(self, **chosen: Any) -> list[tuple[str, int, int]]:
        """Name, start and end on the device, of collectives unless others are asked for."""
        rows = simulated.timeline(self.device.index, **(chosen or {"kind": "collective"}))
        return [(row.name, row.start_ns, row.end_ns) for row in rows]

    def kernel_spans(self, **chosen: Any) -> list[tuple[int, int]]:
        """Their starts and ends, in order."""
        return sorted(row[1:] for row in self.kernels(**chosen))
