"""Interceptors of collectives of CPU tensors, in Python and compiled, with what they have seen; backends of our own."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from aorta.instrument.cpu_interceptor import CpuInterceptor
from aorta.instrument.emulation.emulated_link import HostLinks
from aorta.instrument.event_clock import HostClock
from aorta.instrument.in_flight import Group, InFlight, Waited
from aorta.instrument.native.build import load
from aorta.instrument.native.native_interceptor import NativeCpuInterceptor
from aorta.records.progress_file import Progress
from aorta.records.schema import STALL_CUTOFF_NS
from tests.instrument.steps import Rows

CPU = torch.device("cpu")


def compiled_part() -> Any:
    """The module; the test is skipped where it has not been built."""
    module, why_not = load()
    if module is None:
        pytest.skip(f"the compiled part is {why_not}")
    return module


class Seen:
    """In the place of a step recorder: what an interceptor in Python has told it."""

    def __init__(self) -> None:
        self.rows: list[InFlight] = []
        self.waits: list[Waited] = []
        self.calls: list[tuple[int, int]] = []
        self.on_issue, self.on_wait, self.progress = self.rows.append, self.waits.append, Progress()
        self.add_underway = lambda _calls: None

    def on_call(self, begin_ns: int, end_ns: int) -> None:
        self.calls.append((begin_ns, end_ns))


class Tap(Seen):
    """An interceptor that is open, its rows, waits and calls; those of compiled code once `hand_over` was called."""

    def __init__(
        self, *, compiled: bool, shortest_call_ns: int = STALL_CUTOFF_NS, links: HostLinks | None = None
    ) -> None:
        super().__init__()
        self.groups: dict[str, Group] = {}
        self.compiled = Rows(compiled_part(), self.groups, shortest_call_ns) if compiled else None
        self.interceptor: CpuInterceptor | NativeCpuInterceptor = (
            self.compiled.interceptor
            if self.compiled is not None
            else CpuInterceptor(HostClock(), self.groups, self, links, shortest_call_ns=shortest_call_ns)  # type: ignore[arg-type]
        )
        self.interception = self.interceptor.open(CPU, lambda: None)
        (self.interceptor if self.compiled is None else self.compiled).begin()

    @property
    def stalls(self) -> list[tuple[int, int]]:
        """The waits that blocked their caller."""
        return [(wait.begin, wait.end) for wait in self.waits if wait.blocked]

    def hand_over(self) -> None:
        """Take what compiled code has recorded since the last time."""
        if self.compiled is not None:
            told = self.compiled.end().step
            self.rows += told.collectives
            self.waits += told.waits
            self.calls += told.calls
            self.compiled.begin()

    def close(self) -> None:
        self.interception.close()


class Answer(dist._Work):  # type: ignore[misc]  # torch's own class for handles made in Python
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
