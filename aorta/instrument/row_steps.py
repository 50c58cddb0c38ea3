"""The rows of steps and of spans within them: what the recorder asks of an interceptor at every step, and the same in
Python as `native/loop.hpp` is in compiled code.

Called by the training thread, at every step and several times in it. Must not wait for anything.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple, Protocol

from aorta.records import ring_file as rf
from aorta.records.ring_file import RingFile
from aorta.records.ring_rows import NOWHERE, RingRows

_double: Final = struct.Struct("<d")
_signed: Final = struct.Struct("<q")


def bits_of(value: float) -> int:
    """Return the bits of a float, as rows have them."""
    (bits,) = _signed.unpack(_double.pack(value))
    return int(bits)


class StepSpan(AbstractContextManager[None], Protocol):
    """A row that opens and ends with a `with` block in steps that are observed, and the phase of the rank, where it has
    the name of one.
    """

    name: str
    is_open: bool


class StepFunctions(NamedTuple):
    """What is called at every step, and in it; of compiled code C functions.

    Attributes:
        begin: takes when AORTA's own work began, flags of the row, the number of why it is not observed, the global
            step, epoch << 32 | step, the first row of the step or `NOWHERE`, its learning rate or None, and as one of
            how many it was drawn, or None. Returns the index of its row, and how many collectives since the last step
            are part of none.
        finish: returns the index behind the rows of a step that ends now. What is recorded from now on is part of the
            next one, where that continues it.
        close: takes the fields of the SUMMARY of a step behind `finish`: the index of its row, flags, why its boundary
            is unclear, collectives issued and outside of steps, by how many backends may be ahead before and after, and
            AORTA's own time beside what is counted. Returns all of that time, and when the step ended.
        span: takes a kind, the number of a name, the name, `x`, and whether the phase before continues afterwards.
        append: takes the fields of any row; returns its index.
        issued_so_far: takes a function; returns what it returns, how many collectives backends have counted, and by how
            few and how many that may be ahead of the rows, in one word: as many calls of backends less as have not
            returned, in the upper half, and as many more as were recorded since the last step ended.
    """

    begin: Callable[..., tuple[int, int]]
    finish: Callable[[], int]
    close: Callable[..., tuple[int, int]]
    span: Callable[..., StepSpan]
    append: Callable[..., int]
    issued_so_far: Callable[[Callable[[], dict[int, int | None]]], tuple[dict[int, int | None], int]]


class RowSteps:
    """Appends them. `on_device`: its clock tells later when steps ended, and nothing when spans did: they have no rows.

    Attributes:
        is_open: spans have rows.
        own_ns: AORTA's own time since the step began.
    """

    def __init__(self, ring: RingFile, rows: RingRows, *, on_device: bool) -> None:
        self.progress, self._rows, self._on_device = ring.progress, rows, on_device
        self.begin_span, self.end_span = rows.begin_span, rows.end_span
        self.is_open, self.own_ns = False, 0
        self._behind = self._ended_ns = 0

    def begin(
        self,
        began_ns: int,
        flags: int,
        why: int,
        step: int,
        numbers: int,
        first: int,
        lr: float | None,
        drawn: int | None,
    ) -> int:
        """As `StepFunctions.begin`; returns the index of its row."""
        self.is_open = not (flags & rf.PASSED_OVER or self._on_device)
        self.progress.begin_step(step)
        now_ns, append = time.perf_counter_ns(), self._rows.append
        first = self._rows.count() if first == NOWHERE else first
        index = append(rf.STEP, flags, why, now_ns, 0, step, 0, first, numbers)
        if lr is not None:
            append(rf.VALUE, rf.LR, a=now_ns, x=bits_of(lr))
        if drawn is not None:
            append(rf.NOTE, rf.DRAWN, a=drawn, b2=index)
        self.own_ns = (self.own_ns if flags & rf.CONTINUES else 0) + time.perf_counter_ns() - began_ns
        return index

    def finish(self) -> int:
        """As `StepFunctions.finish`."""
        self._ended_ns, self._behind = time.perf_counter_ns(), self._rows.count()
        return self._behind

    def close(self, index: int, flags: int, why: int, *counts: int) -> tuple[int, int]:
        """As `StepFunctions.close`."""
        *counts_, more_ns = counts
        issued, outside, ahead_before, ahead = counts_
        self.progress.end_step()
        own_ns, self.own_ns = self.own_ns + more_ns + time.perf_counter_ns() - self._ended_ns, 0
        self._rows.append(rf.SUMMARY, flags, why, own_ns, index, issued, outside, ahead_before, ahead)
        self._rows.end_step(index, 0 if self._on_device else self._ended_ns, self._behind)
        return own_ns, self._ended_ns

    def span(self, *arguments: Any) -> StepSpan:
        """As `StepFunctions.span`."""
        return _RowSpan(self, *arguments)


class _RowSpan(AbstractContextManager[None]):
    __slots__ = ("_before", "_index", "_kind", "_number", "_restores", "_steps", "_x", "is_open", "name")

    def __init__(self, steps: RowSteps, kind: int, number: int, name: str, x: int, restores: bool) -> None:
        self._steps, self._kind, self._number, self._x, self._restores = steps, kind, number, x, restores
        self.name, self.is_open, self._index, self._before = name, False, NOWHERE, name

    def __enter__(self) -> None:
        steps, began_ns = self._steps, time.perf_counter_ns()
        self.is_open, self._before = True, steps.progress.enter(self.name)
        if steps.is_open:
            self._index = steps.begin_span(self._kind, self._number, self._x)
        steps.own_ns += time.perf_counter_ns() - began_ns

    def __exit__(self, kind: type[BaseException] | None, *_how: object) -> None:
        steps, began_ns = self._steps, time.perf_counter_ns()
        self.is_open = False
        if self._index != NOWHERE:
            steps.end_span(self._index)
        if kind is None and self._restores:  # after an error the phase stays, for whoever asks where it happened
            steps.progress.enter(self._before)
        steps.own_ns += time.perf_counter_ns() - began_ns
