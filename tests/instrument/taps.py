"""Interceptors of collectives of CPU tensors, in Python and compiled, what their rows tell, and backends of our own."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from aorta.instrument.emulation.emulated_link import HostLinks
from aorta.instrument.instrumentation import ring_facts
from aorta.instrument.native.build import load
from aorta.instrument.native.native_interceptor import NativeInterceptor
from aorta.instrument.python_interceptor import PythonInterceptor
from aorta.instrument.ring_rows import NOWHERE
from aorta.records import ring_file as rf
from aorta.records import ring_steps
from aorta.records.progress import SLOTS
from aorta.records.ring_file import RingFile, RingGroup
from aorta.records.schema import STALL_CUTOFF_NS, ClockReading, Step

CPU = torch.device("cpu")
MS = 1_000_000
ANCHOR = ClockReading(realtime_ns=5_000 * MS, boottime_ns=0, monotonic_ns=1_000 * MS, uncertainty_ns=1)


def ring_in_memory(stall_cutoff_ns: int = STALL_CUTOFF_NS, slots: int = SLOTS, **more: Any) -> RingFile:
    """A ring of rank 0; `more`: as of `ring_facts`."""
    ring = RingFile.create(None, slots=slots)
    ring.describe(ring_facts(0, 2, ANCHOR, stall_cutoff_ns, **more))
    return ring


def lines_at_once(ring: RingFile, most: int, *, late: bool = False) -> list[Step]:
    """The lines of all steps of a ring, of which so many are measured at once."""
    with patch.object(ring_steps, "MOST", most):
        return ring_steps.RingSteps(ring).take(late=late)


class SeenCollective:
    """A collective as its row and that of its link tell, and its end, once that is there."""

    def __init__(self, ring: RingFile, row: Any, link: Any | None) -> None:
        self._ring, self._index = ring, int(row["stamp"]) - 1
        kind = ring.facts.operators[row["op"]]
        self.kind, self.group, self.seq, self.bytes = kind.kind, ring.names()[row["group"]][0], row["y"], row["x"]
        self.number = None if kind.point_to_point else self.seq
        self.dtype = None if row["dtype"] == rf.NO_DTYPE else ring.facts.dtypes[row["dtype"]]
        self.issue_ns, self.start = int(row["a"]), None if link is None else int(link["a"])
        self._by_fabric = link is not None and bool(link["flags"] & rf.BY_FABRIC)
        self.end: int | None = None
        self.end_source: str | None = None
        self.look()

    def look(self) -> bool:
        """Whether its end is known by now."""
        rows, first = self._ring.rows_since(0)
        if self.end is None and (both := int(rows["b"][self._index - first])):
            self.end, self.end_source = both >> 1, "wait" if both & 1 else "future"
            self.end_source = "emulated" if self._by_fabric else self.end_source
        return self.end is not None


@dataclass
class SeenStep:
    """The rows of one step. Waits: between which times, and whether the caller was blocked; calls that were long;
    passes: of which block, which phase, and when.
    """

    collectives: list[SeenCollective] = field(default_factory=list)
    unwatched: int = 0
    calls: list[tuple[int, int]] = field(default_factory=list)
    waits: list[tuple[int, int, bool]] = field(default_factory=list)
    passes: list[tuple[str, str, int, int]] = field(default_factory=list)
    tails: list[tuple[int, int]] = field(default_factory=list)


def seen_in(ring: RingFile, first: int, stop: int) -> SeenStep:
    """What rows `first` to `stop` tell."""
    step, names = SeenStep(), ring.names()
    rows = ring.rows_since(0)[0][first:stop]
    links = {int(row["x"]): row for row in rows if row["kind"] == rf.LINK and row["a"]}
    for row in rows:
        begin, end = int(row["a"]), int(row["b"])
        if row["kind"] == rf.COLLECTIVE:
            step.collectives.append(SeenCollective(ring, row, links.get(int(row["stamp"]) - 1)))
            step.unwatched += bool(row["flags"] & rf.UNWATCHED)
            step.calls += [(begin, int(row["a2"]))] if row["a2"] else []
        elif row["kind"] == rf.WAIT:
            step.waits.append((begin, end, bool(row["flags"] & rf.BLOCKED)))
        elif row["kind"] == rf.PASS and end:
            phase = "backward" if row["flags"] & rf.BACKWARD else "forward"
            step.passes.append((names[row["name"]], phase, begin, end))
        elif row["kind"] == rf.TAIL:
            step.tails.append((begin, end))
    return step


def compiled_part() -> Any:
    """The module; the test is skipped where it has not been built."""
    module, why_not = load()
    if module is None:
        pytest.skip(f"the compiled part is {why_not}")
    return module


class Tap:
    """An interceptor, open if it `looks`; its rows, waits and calls, once `hand_over` was called.

    Attributes:
        meanwhile: is called while backends are asked for their counts.
        clock_ns: says when AORTA's own work at the end of a step began.
    """

    def __init__(
        self,
        *,
        compiled: bool,
        stall_cutoff_ns: int = STALL_CUTOFF_NS,
        links: HostLinks | None = None,
        looks: bool = True,
    ) -> None:
        self.taken, self.groups, self.ring = SeenStep(), dict[str, RingGroup](), ring_in_memory(stall_cutoff_ns)
        self.interceptor: NativeInterceptor | PythonInterceptor = (
            NativeInterceptor(compiled_part(), self.groups, self.ring, stall_cutoff_ns)
            if compiled
            else PythonInterceptor(self.groups, self.ring, links, stall_cutoff_ns)
        )
        self._functions = self.interceptor.functions(self._counts)
        self.interception = self.interceptor.open(CPU, lambda: None) if looks else None
        self.meanwhile: Callable[[], None] = lambda: None
        self.clock_ns = time.perf_counter_ns
        self.begin()

    def begin(self, flags: int = 0) -> int:
        """Begin a step; returns how many collectives since the last one are part of none."""
        self._first, dropped = self._functions.begin(0, flags, 0, 0, 0, NOWHERE, None, None)
        return dropped

    def _counts(self) -> dict[int, int | None]:
        self.meanwhile()
        return {}

    def end(self) -> SeenStep:
        self._own_ns, _, behind = self._functions.end(self.clock_ns(), 0, 0, 0, 0, None)
        return seen_in(self.ring, self._first, behind)

    def own_ns(self) -> int:
        """AORTA's own time in the step that ended last."""
        return self._own_ns

    def hand_over(self) -> list[SeenCollective]:
        """Take what was recorded since the last time; returns all rows."""
        told = self.end()
        self.taken.collectives += told.collectives
        self.taken.waits += told.waits
        self.taken.calls += told.calls
        self.begin()
        return self.rows

    @property
    def rows(self) -> list[SeenCollective]:
        return self.taken.collectives

    @property
    def stalls(self) -> list[tuple[int, int]]:
        """The waits that blocked their caller."""
        return [(begin, end) for begin, end, blocked in self.taken.waits if blocked]

    def close(self) -> None:
        if self.interception is not None:
            self.interception.close()


class Answer(dist._Work):  # torch's own class for handles made in Python
    """A backend's handle without a future, whose first waits fail."""

    def __init__(self, *, fails: int = 0) -> None:
        super().__init__()
        self.fails, self.waits = fails, 0

    def wait(self, timeout: Any = None) -> bool:
        self.waits += 1
        if self.waits <= self.fails:
            raise RuntimeError("timed out")
        return True

    def get_future(self) -> Any:
        raise RuntimeError("has none")


@contextmanager
def answering(work: Answer, call: Callable[[], None] = lambda: None) -> Iterator[None]:
    """All-reduces of a backend of our own, under the dispatcher's CPU key: each is `call`, and gives `work` back."""

    def all_reduce(tensors: Any, *_: Any) -> Any:
        call()
        return tensors, work.boxed()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library = torch.library.Library("c10d", "IMPL")
        library.impl("allreduce_", all_reduce, "CPU", allow_override=True)
    try:
        yield
    finally:
        library._destroy()
