"""The compiled tap: collectives of CPU tensors, timed without the interpreter, and handed over once a step.

Enters: `build.load`'s module. Leaves: `Issued` rows and stalls, in the order in which they happened. Must not: be on
the path of a collective (but once for each process group).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist

from aorta.instrument.clock import Mark
from aorta.instrument.collectives import ENQUEUE_NS, Looking, dtype_name, group_seen
from aorta.instrument.issued import Group, Issued
from aorta.instrument.operators import offered, position_of_async_op, position_of_group, position_of_peer
from aorta.instrument.seam import check_torch, counts_point_to_point
from aorta.telemetry.schema import EndSource

_CPU = torch.device("cpu")


def ended(both: int) -> tuple[int, EndSource]:
    """When a collective ended, and who noticed, of the number in which the compiled tap keeps the two."""
    return both >> 1, "wait" if both & 1 else "future"


class Completion:
    """Of a collective that was under way when it was handed over."""

    def __init__(self, end: Any) -> None:
        self._end = end

    def ended(self) -> tuple[int, EndSource] | None:
        return ended(both) if (both := self._end.both()) else None


class NativeTap:
    """What `collectives.HostTap` is, without an emulated fabric.

    Args:
        module: of `build.load`.
        groups: filled with every process group as it is first seen, by name.
        on_issue: given each collective, in issue order. on_stall: given two marks between which the caller waited.
            Both are called from `end` only.
        device: the module's, for a run on an accelerator.

    Raises:
        InstrumentError: see `seam.check_torch`.
    """

    def __init__(
        self,
        module: Any,
        groups: dict[str, Group],
        on_issue: Callable[[Issued], None],
        on_stall: Callable[[Mark, Mark], None],
        device: Any | None = None,
    ) -> None:
        check_torch()
        self._groups, self._on_issue, self._on_stall = groups, on_issue, on_stall
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
                    async_at=position_of_async_op(name),
                    peer_at=position_of_peer(name),
                ),
            )
            for name, operator in here.items()
        ]
        self._tap: Any = module.Tap(operators, ENQUEUE_NS, self._saw, device)

    def open(self, _device: torch.device, _on_captured: Callable[[], None]) -> Looking:
        """Look at every collective until the answer is closed. There is no capture on a CPU."""
        self._tap.open()
        return cast(Looking, self._tap)

    def begin(self) -> None:
        """Note down what happens from here on."""
        if self._tap is not None:
            self._tap.begin()

    def settle(self) -> None:
        """The caller goes on because collectives are over: those that are end here at the latest."""
        if self._tap is not None:
            self._tap.settle()

    def end(self) -> None:
        """Give what happened since `begin` to the callbacks, and note down nothing more; nothing once it is closed."""
        if self._tap is None:
            return
        rows, stalls = self._tap.end()
        for number, group, seq, size, dtype, issue_ns, waiters, end in rows:
            operator = self._operators[number]
            alone = operator.point_to_point
            named = None if dtype is None else dtype_name(dtype)
            issued = Issued(operator.kind, group, seq, size, named, issue_ns, None if alone else seq, waiters=waiters)
            if alone:
                issued.counted = self._counts_point_to_point[group]
            if isinstance(end, int):
                issued.end, issued.end_source = ended(end)
            else:
                self._tell_end(issued, end)
            self._on_issue(issued)
        for begin_ns, end_ns in stalls:
            self._on_stall(begin_ns, end_ns)

    def _tell_end(self, issued: Issued, end: Any) -> None:
        """Of a collective that has not ended yet, as far as is known."""
        issued.completion = Completion(end)

    def close(self) -> None:
        """No collective will pass any more: let go of the compiled half, which knows this one."""
        self._tap = None

    def _saw(self, process_group: dist.ProcessGroup) -> bool:
        """A new group; returns whether streams order its collectives."""
        name = process_group.group_name
        self._groups[name] = group_seen(process_group)
        self._counts_point_to_point[name] = counts_point_to_point(process_group, _CPU)
        return False
