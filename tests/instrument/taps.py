"""Interceptors of collectives of CPU tensors, in Python and compiled, with what they have seen; backends of our own."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from aorta.instrument.emulation.emulated_link import HostLinks
from aorta.instrument.in_flight import Group
from aorta.instrument.native.build import load
from aorta.records.schema import STALL_CUTOFF_NS
from tests.instrument.steps import Rows, SeenCollective

CPU = torch.device("cpu")


def compiled_part() -> Any:
    """The module; the test is skipped where it has not been built."""
    module, why_not = load()
    if module is None:
        pytest.skip(f"the compiled part is {why_not}")
    return module


class Tap:
    """An interceptor that is open; its rows, waits and calls, once `hand_over` was called."""

    def __init__(
        self, *, compiled: bool, shortest_call_ns: int = STALL_CUTOFF_NS, links: HostLinks | None = None
    ) -> None:
        self.rows: list[SeenCollective] = []
        self.waits: list[tuple[int, int, bool]] = []
        self.calls: list[tuple[int, int]] = []
        self.groups = dict[str, Group]()
        module = compiled_part() if compiled else None
        self.recorded = Rows(module, self.groups, shortest_call_ns, links)
        self.interceptor = self.recorded.interceptor
        self.interception = self.interceptor.open(CPU, lambda: None)
        self.recorded.begin()

    @property
    def stalls(self) -> list[tuple[int, int]]:
        """The waits that blocked their caller."""
        return [(begin, end) for begin, end, blocked in self.waits if blocked]

    def hand_over(self) -> list[SeenCollective]:
        """Take what was recorded since the last time; returns all rows."""
        told = self.recorded.end()
        self.rows += told.collectives
        self.waits += told.waits
        self.calls += told.calls
        self.recorded.begin()
        return self.rows

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
