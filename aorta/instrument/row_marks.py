"""Rows whose spans lie between marks of a device, from Python: what `native/marks.hpp` does, where nothing is compiled.

Then nothing is looked at, and the few spans of a step are the loop's own. Must not wait for the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from aorta.instrument.event_clock import DeviceClock, Mark
from aorta.records.ring_rows import RingRows


class RowMarks:
    """The marks of one device that are not in their rows yet, all of the stream that computes."""

    def __init__(self, rows: RingRows, clock: DeviceClock) -> None:
        self._rows, self._clock = rows, clock
        self._pending = deque[tuple[Mark, Callable[[int, int], None], int]]()

    def begin_span(self, kind: int, name: int, x: int = 0) -> int:
        """Append a row that begins with a mark, and is open; returns its index."""
        index = self._rows.append(kind, 0, name, x=x)
        self._add(index, self._clock.mark(), ends=False)
        return index

    def end_span(self, index: int) -> None:
        """End a row with a mark."""
        self._add(index, self._clock.mark(), ends=True)

    def append(self, kind: int, begin: Mark, end: Mark) -> int:
        """Append a row between two marks; returns its index."""
        index = self._rows.append(kind)
        self._add(index, begin, ends=False)
        self._add(index, end, ends=True)
        return index

    def settle(self) -> None:
        """Store what the device has passed. Not while a graph is being captured."""
        while self._pending:
            mark, store, index = self._pending[0]
            if (at_ns := self._clock.read_ns(mark)) is None:
                break
            store(index, at_ns)
            self._clock.release(mark)
            self._pending.popleft()

    def _add(self, index: int, mark: Mark, *, ends: bool) -> None:
        sent_ns = self._clock.sent_ns(mark) if mark else None
        if sent_ns is None:  # none could be taken
            return
        self._rows.sent(index, sent_ns, ends=ends)
        self._pending.append((mark, self._rows.end if ends else self._rows.begin, index))
