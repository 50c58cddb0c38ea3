"""Everything that looks at a run, switched on and off together.

Enters: a device, a mode, and where finished steps go. Leaves: an `Instrument` whose `recorder` collects steps. Must
not: leave a hook or a kernel behind after `close`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

import torch
from torch import nn

from aorta.instrument.clock import Mark, clock_for
from aorta.instrument.collectives import DeviceTap, Group, HostTap
from aorta.instrument.compute import BlockRanges
from aorta.instrument.operators import OPERATORS
from aorta.instrument.reading import StepReader
from aorta.instrument.recorder import StepRecorder
from aorta.instrument.seam import Seam, all_groups, issued_by, when_backward_ends
from aorta.instrument.streams import DeviceStreams
from aorta.telemetry.schema import ClockReading, InstrumentMode, Step
from aorta.timeline.overlap import Unseen

SWITCH_INTERVAL_S = 1e-4
"""How long a backend's completion callback may wait for the interpreter lock before the training thread must hand it
over; Python's default, 5 ms, would be added to the ends of collectives. It costs only when somebody waits."""


class Instrument:
    """The seam, the block ranges and the recorder of one rank.

    Args:
        device: what the run computes on.
        mode: `dedicated`, `observe` or `off` (docs/measuring.md, R2 and R3).
        rank, world_size: of this process.
        anchor: places MONOTONIC in wall-clock time.
        sink: takes finished steps in order.
        stream_priority: of dedicated streams (CUDA/HIP).

    Raises:
        InstrumentError: this torch lacks what the interception needs.
    """

    def __init__(
        self,
        device: torch.device,
        mode: InstrumentMode,
        rank: int,
        world_size: int,
        anchor: ClockReading,
        sink: Callable[[Step], None],
        stream_priority: int = 0,
    ) -> None:
        clock = clock_for(device)
        self.groups: dict[str, Group] = {}
        unseen = Unseen("instrument.mode=off: nothing was looked at", compute=True) if mode == "off" else None
        self.recorder = StepRecorder(
            clock,
            StepReader(clock, rank, world_size, self.groups, anchor, unseen),
            lambda: {id(group): issued_by(group) for group in all_groups()},
            sink,
        )
        self._clock, self._mode = clock, mode
        self._ranges = BlockRanges(clock, self.recorder.on_range)
        self._seam = None if mode == "off" else Seam(OPERATORS, device, self._tap(device, stream_priority))
        self._switch_interval_s = sys.getswitchinterval()
        if self._seam is not None and device.type == "cpu":
            sys.setswitchinterval(SWITCH_INTERVAL_S)

    def watch(self, blocks: Iterable[tuple[str, nn.Module]]) -> None:
        """Bracket the computation of named blocks; call after the parallel strategy put its own hooks on them."""
        if self._mode != "off":
            for name, block in blocks:
                self._ranges.watch(name, block)

    @contextmanager
    def backward(self, loss: torch.Tensor) -> Iterator[None]:
        """Around `loss.backward()`: notes when the last node had run, and the strategy's ending behind it."""
        if self._mode == "off":
            yield
            return
        last_node: list[Mark] = []

        def nodes_ran() -> None:
            self._ranges.backward_ran()
            last_node.append(self._clock.mark())

        # Asked for with the first gradient, so it runs before the endings of DDP and FSDP, which are asked for later.
        handle = loss.register_hook(lambda _gradient: when_backward_ends(nodes_ran))  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            handle.remove()
        if last_node:
            self.recorder.on_backward_tail(last_node[0], self._clock.mark())

    def close(self) -> None:
        """Take everything off again; a second call does nothing."""
        self._ranges.close()
        if self._seam is not None:
            self._seam.close()
            self._seam = None
            sys.setswitchinterval(self._switch_interval_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _tap(self, device: torch.device, stream_priority: int) -> HostTap:
        clock, recorder = self._clock, self.recorder
        if device.type == "cpu":
            return HostTap(clock, self.groups, recorder.on_issue, recorder.on_stall)
        streams = DeviceStreams(device, stream_priority)
        dedicated = self._mode == "dedicated"
        return DeviceTap(clock, self.groups, recorder.on_issue, recorder.on_stall, streams, dedicated=dedicated)
