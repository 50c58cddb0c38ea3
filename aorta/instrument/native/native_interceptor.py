"""Compiled interceptor for collectives of CPU tensors: timed without the interpreter, fetched once per step.

Its events become `InFlight` rows, stalls and passes of blocks (`ranges`), in the order in which they happened. Must not
be on the path of a collective (except once for each process group).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist

from aorta.instrument.cpu_interceptor import dtype_name, group_seen
from aorta.instrument.dispatcher import Interception, check_torch, counts_point_to_point
from aorta.instrument.in_flight import Group, InFlight
from aorta.instrument.native.ranges import NativeRanges
from aorta.instrument.open_step import DIRECTIONS, Copied, NativeEvents
from aorta.instrument.operators import offered, position_of_async_op, position_of_group, position_of_peer
from aorta.instrument.waits import Name, Waited
from aorta.records.schema import STALL_CUTOFF_NS

_CPU = torch.device("cpu")


class NativeCpuInterceptor:
    """Compiled counterpart of `cpu_interceptor.CpuInterceptor`; does not support an emulated fabric.

    Args:
        module: of `build.load`.
        groups: filled with every process group when first seen, by name.
        device: the compiled module's device object, for a run on an accelerator.
        shortest_call_ns: a backend's call that takes longer is told, as one that may have been a stall.

    Raises:
        InstrumentError: see `dispatcher.check_torch`.
    """

    def __init__(
        self,
        module: Any,
        groups: dict[str, Group],
        device: Any | None = None,
        shortest_call_ns: int = STALL_CUTOFF_NS // 2,
    ) -> None:
        check_torch()
        self._groups = groups
        self._counts_point_to_point: dict[str, bool] = {}
        here = offered()
        self._operators = tuple(here.values())
        operators = [
            (
                name,
                module.Operator(
                    kind=operator.kind,
                    group_at=position_of_group(name),
                    argument=operator.argument,
                    one_part=operator.one_part,
                    coalesced=operator.coalesced,
                    point_to_point=operator.point_to_point,
                    stacks=operator.stacks,
                    async_at=position_of_async_op(name),
                    peer_at=position_of_peer(name),
                ),
            )
            for name, operator in here.items()
        ]
        self._tap: Any = module.Tap(operators, shortest_call_ns, self._saw, device)
        self.ranges = NativeRanges(module, self._tap)

    def open(self, _device: torch.device, _on_captured: Callable[[], None]) -> Interception:
        """Start intercepting; `close` of the returned object ends it. There is no graph capture on a CPU."""
        self._tap.open()
        return cast(Interception, self._tap)

    def begin(self) -> None:
        """Start recording events."""
        if self._tap is not None:
            self._tap.begin()
            self.ranges.begin()

    def end(self) -> Callable[[], NativeEvents]:
        """Stop recording; the returned callable gives the events since `begin`, and none after `close`."""
        if self._tap is None:
            return NativeEvents
        return partial(self._events, self._tap.end(), self.ranges.end())

    def abandon(self) -> None:
        """Stop recording, and discard the events since `begin`."""
        self.end()

    def _events(self, noted: Any, passes: Any) -> NativeEvents:
        rows, calls, waits, copies = noted.rows()
        collectives, operators = [], self._operators
        for number, group, seq, size, dtype, issue_ns, waiters, end_ns, source, by_future in rows:
            operator = operators[number]
            name = None if dtype is None else dtype_name(dtype)
            if end_ns is None:
                issued = InFlight(operator.kind, group, seq, size, name, issue_ns, seq, None, None, None, waiters)
                self._attach_end(issued, source)
            else:
                issued = InFlight(operator.kind, group, seq, size, name, issue_ns, seq, None, end_ns, source, waiters)
            issued.by_future = by_future
            if operator.point_to_point:
                issued.number, issued.counted = None, self._counts_point_to_point[group]
            collectives.append(issued)
        waited = [Waited(self._name(*wait[:3]), *wait[3:]) for wait in waits]
        return self._with_passes(NativeEvents(collectives, waited, calls=calls, copies=self._copied(copies)), passes)

    def _name(self, operator: int, group: str, seq: int) -> Name:
        kind = self._operators[operator]
        return Name(group, seq, kind.kind if kind.point_to_point else None)

    @staticmethod
    def _copied(copies: list[tuple[int, int, int, int, bool]]) -> list[Copied]:
        return [
            Copied(DIRECTIONS[number], size, start or None, end or None, computes)
            for number, size, start, end, computes in copies
        ]

    def _with_passes(self, events: NativeEvents, noted: Any) -> NativeEvents:
        passes, tails = self.ranges.read(noted)
        return replace(events, passes=passes, tails=tails)

    def _attach_end(self, issued: InFlight, source: Any) -> None:
        """Attach what will report the end of a collective that has not ended yet."""
        issued.completion = source

    def close(self) -> None:
        """No further collective will arrive: release the compiled object, which references this one."""
        self._tap = None

    def _saw(self, process_group: dist.ProcessGroup) -> tuple[bool, bool, bool | None]:
        """Register a new group; returns `on_device`, `early` and `shared` of `cpu_interceptor.Member`."""
        name = process_group.group_name
        self._groups[name] = group_seen(process_group)
        self._counts_point_to_point[name] = counts_point_to_point(process_group, _CPU)
        return False, False, None
