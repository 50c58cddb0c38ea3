"""Rows that Python appends to a ring, as `native/ring.hpp` does in compiled code.

    rows = RingRows(ring)
    index = rows.begin_span(AUX, ring.text("optimizer"))  # open: its end is 0
    rows.end_span(index)
    rows.append(VALUE, flags=LR, a=now_ns, x=bits)

Rows are appended from any thread, and also where a row is being appended already: a signal's handler, or what is freed
meanwhile, may come in between. Nothing happens to a row that has been overwritten. Must not import torch, or wait for
anything but the rows' lock.
"""

from __future__ import annotations

import itertools
import struct
import threading
import time
from typing import Final

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
