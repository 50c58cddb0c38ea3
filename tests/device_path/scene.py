"""One scene of the device path: two ranks, a device, and an instrument that looks at it.

Must not: depend on how fast a machine is; it runs in virtual time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from aorta.instrument.instrumentation import Instrumentation
from aorta.records.clocks import read_clocks
from aorta.records.schema import InstrumentMode, Step
from aorta.records.step_line import StepFacts
from tests.device_path.rig import ELEMENTS, Groups
from tests.simulated import device as simulated


@dataclass
class Scene:
    """A device, and an instrument that looks at it."""

    device: torch.device
    groups: Groups
    mode: InstrumentMode
    dedicated_async: bool = False
    lines: list[Step] = field(default_factory=list)
    number: int = 0

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @contextmanager
    def looking(self, *, native: bool = True) -> Iterator[Instrumentation]:
        """Everything is read at the end."""
        self.groups.begin()
        torch.accelerator.synchronize(self.device)
        simulated.reset()
        with Instrumentation(
            self.device,
            self.mode,
            self.rank,
            dist.get_world_size(),
            read_clocks(),
            self.lines.append,
            native=native,
            dedicated_async=self.dedicated_async,
        ) as instrument:
            yield instrument
            instrument.recorder.finish()

    def step(self, instrument: Instrumentation) -> Any:
        """The next one."""
        self.number += 1
        return instrument.recorder.step(StepFacts(0, self.number, self.number, 0.0, warmup=False))

    def tensor(self, value: float = 1.0) -> torch.Tensor:
        return torch.full((ELEMENTS,), value, device=self.device)

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

    def kernels(self) -> list[tuple[str, int, int]]:
        """The same of the device."""
        rows = simulated.timeline(self.device.index, kind="collective")
        return [(row.name, row.start_ns, row.end_ns) for row in rows]
