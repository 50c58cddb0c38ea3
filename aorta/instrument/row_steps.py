"""Rows that Python appends to a ring, as `native/ring.hpp` does in compiled code; and the rows of steps and of spans
within them, as `native/loop.hpp` does: what the recorder asks of an interceptor at every step.

    rows = RingRows(ring)
    index = rows.begin_span(AUX, ring.text("optimizer"))  # open: its end is 0
    rows.end_span(index)
    rows.append(VALUE, flags=LR, a=now_ns, x=bits)

Rows are appended from any thread, and also where a row is being appended already: a signal's handler, or what is freed
meanwhile, may come in between. Nothing happens to a row that has been overwritten. Steps and spans are of the training
thread, at every step and several times in it. Must not import torch, or wait for anything but the rows' lock.
"""

from __future__ import annotations

import itertools
import struct
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple, Protocol

from aorta.records import ring_file as rf
from aorta.records.progress import COUNT_WORD, MOVED_WORD, ROWS_AT, WORD
from aorta.records.ring_file import COLLECTIVE, ROW, RingFile

NOWHERE: Final = -1
"""In place of the index of a row that was not appended."""
_WORDS_OF_A_ROW: Final = ROW.itemsize // WORD
_FIRST: Final = ROWS_AT // WORD
_pack_behind_stamp = struct.Struct("<BBBBHHqqqqqq").pack_into
assert struct.calcsize("<qBBBBHHqqqqqq") == ROW.itemsize
_A, _B, _Y, _A2 = (ROW.fields[name][1] // WORD for name in ("a", "b", "y", "a2"))  # type: ignore[index]
_FLAGS: Final = ROW.fields["flags"][1]  # type: ignore[index]
_double: Final = struct.Struct("<d")
_signed: Final = struct.Struct("<q")


def bits_of(value: float) -> int:
    """Return the bits of a float, as rows have them."""
    (bits,) = _signed.unpack(_double.pack(value))
    return int(bits)


class RingRows:
    """The rows of a ring that this process has made."""

    def __init__(self, ring: RingFile) -> None:
        self._bytes, self._words = ring.memory, ring.memory.cast("q")
        self._mask = ring.slots - 1
        # One lock, and a number that is taken at once: whoever comes in between has another row.
        self._lock, self._indices = threading.RLock(), itertools.count(ring.count)

    def append(
        self,
        kind: int,
        flags: int = 0,
        name: int = 0,
        a: int = 0,
        b: int = 0,
        x: int = 0,
        y: int = 0,
        a2: int = 0,
        b2: int = 0,
        *,
        op: int = 0,
        dtype: int = 0,
        group: int = 0,
    ) -> int:
        """Append a row, whose fields `ring_file` explains; returns its index."""
        with self._lock:
            index, words = next(self._indices), self._words
            word = _FIRST + (index & self._mask) * _WORDS_OF_A_ROW
            if words[COUNT_WORD] <= index:
                words[COUNT_WORD] = index + 1
            words[word] = 0
            _pack_behind_stamp(self._bytes, (word + 1) * WORD, kind, flags, op, dtype, group, name, a, b, x, y, a2, b2)
            words[word] = index + 1
            return index

    def issue(self, flags: int, op: int, dtype: int, group: int, size: int, number: int, pair: int) -> tuple[int, int]:
        """Append the row of a collective, which is issued now; returns its index, and when that is."""
        now_ns = time.perf_counter_ns()
        index = self.append(COLLECTIVE, flags, 0, now_ns, 0, size, number, 0, pair, op=op, dtype=dtype, group=group)
        self._words[MOVED_WORD] = now_ns
        return index, now_ns

    def complete(self, index: int, at_ns: int, *, by_wait: bool) -> None:
        """Note that a collective has ended."""
        self.end(index, at_ns * 2 + by_wait)
        self._words[MOVED_WORD] = max(self._words[MOVED_WORD], at_ns)

    def returned(self, index: int, at_ns: int) -> None:
        """Note when the call that issued a collective returned."""
        with self._lock:
            if (word := self._found(index)) is not None:
                self._words[word + _A2] = at_ns

    def time_step(self, index: int, a: int, b: int) -> None:
        """Note when a step began and ended on a device."""
        with self._lock:
            if (word := self._found(index)) is not None:
                self._words[word + _A], self._words[word + _B] = a, b

    def begin_span(self, kind: int, name: int, x: int = 0) -> int:
        """Append a row that begins now, and is open; returns its index."""
        return self.append(kind, 0, name, time.perf_counter_ns(), 0, x)

    def end_span(self, index: int) -> None:
        """End a row now."""
        self.end(index, time.perf_counter_ns())

    def end(self, index: int, b: int, y: int = 0) -> None:
        """End a row; `y`: of a step, the index behind its last row."""
        with self._lock:
            if (word := self._found(index)) is not None:
                if y:
                    self._words[word + _Y] = y
                self._words[word + _B] = b

    def linked(self, index: int, flags: int, start_ns: int, backend_end_ns: int) -> None:
        """Note when a collective began on an emulated link, when its backend was done, and what set its end."""
        with self._lock:
            if (word := self._found(index)) is not None:
                self._bytes[word * WORD + _FLAGS] = flags
                self._words[word + _A], self._words[word + _B] = start_ns, backend_end_ns

    def add_flags(self, index: int, flags: int) -> None:
        """Set flags of a row beside those that it has."""
        with self._lock:
            if (word := self._found(index)) is not None:
                self._bytes[word * WORD + _FLAGS] |= flags

    def _found(self, index: int) -> int | None:
        """Return where a row is; None where it has been overwritten, or there was none."""
        word = _FIRST + (index & self._mask) * _WORDS_OF_A_ROW
        return word if index != NOWHERE and self._words[word] == index + 1 else None

    def count(self) -> int:
        """Return how many rows were appended."""
        return self._words[COUNT_WORD]

    def leave(self) -> None:
        """In a forked child: append nothing to the parent's ring. A thread that the child does not have may have held
        the lock.
        """
        self._lock = threading.RLock()
        self._bytes = memoryview(bytearray(len(self._bytes)))
        self._words = self._bytes.cast("q")


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
        *counted, more_ns = counts
        self.progress.end_step()
        own_ns, self.own_ns = self.own_ns + more_ns + time.perf_counter_ns() - self._ended_ns, 0
        self._rows.append(rf.SUMMARY, flags, why, own_ns, index, *counted)
        self._rows.end(index, 0 if self._on_device else self._ended_ns, self._behind)
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
