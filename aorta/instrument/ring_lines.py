"""Makes lines of the steps in this rank's ring, many at once, unless another process does.

Must not wait for anything before the last step.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Final

from aorta.errors import RecordWriteError
from aorta.records.progress import GIVEN_UP
from aorta.records.record_file import RecordWriter
from aorta.records.ring_file import RingFile
from aorta.records.ring_steps import MOST, RingSteps
from aorta.records.schema import Step

FINISH_GRACE_S = 2.0
"""How long to wait for the last steps once the device is idle."""
LOOK_AFTER_S = 5.0
"""After so long lines are made of the steps that there are. Of many together each costs a fraction of one alone, and a
kill loses none."""
ELSEWHERE_WITHIN_S = 10.0
"""A process that has read none of the rows for so long does not make lines of them."""
_TRIES, _TRY_S = 5000, 0.001
"""How often the end of a run asks for its record: tries and not time, which passes while a host is suspended."""
LOOK_EVERY_NS: Final = 1_000_000_000
"""So often it is looked at who makes lines, and whether it is time to, where the ring does not fill before."""
_log = logging.getLogger(__name__)


class LentRecord:
    """Lends a record to the process that makes the lines of the rank's ring (`aorta.records.ring_record`).

    Args:
        anchor_interval: training steps from one reading of the clocks to the next in the record.
        shown: follows the record meanwhile.
    """

    def __init__(self, writer: RecordWriter, anchor_interval: int, shown: AbstractContextManager[None]) -> None:
        self.anchor_interval, self._writer, self._shown = anchor_interval, writer, shown
        self._ring: RingFile | None = None

    def lend(self, ring: RingFile) -> None:
        """Write nothing until it is taken back: the lines follow from a ring that is not read here."""
        self._ring, self._writer.is_lent = ring, True
        self._shown.__enter__()

    def take_back(self, *, wait: bool) -> bool:
        """Return whether the record is this process's again, which goes on behind its last line.

        Args:
            wait: some seconds at most, until the other process has written the lines that it is at.

        Raises:
            RecordWriteError: it cannot be read or cut.
        """
        ring, writer = self._ring, self._writer
        if ring is None:
            return True
        try:
            for _ in range(_TRIES if wait else 1):
                with suppress(OSError):  # without locks nobody else writes
                    if not writer.lock():
                        time.sleep(_TRY_S if wait else 0)
                        continue
                break
            else:
                if wait:
                    _log.error("process %d has not finished its lines of %s", ring.owner, writer.path)
                return False
            ring.owner = os.getpid()
            writer.resume(*ring.written)
            writer.is_lent, self._ring = False, None
            ring.note_written(ring.read, writer.steps_written, writer.last_start_ns)
        except OSError as error:
            raise RecordWriteError(f"{writer.path}: cannot be continued: {error.strerror or error}") from error
        finally:
            with suppress(OSError):
                writer.unlock()
        self._shown.__exit__(None, None, None)
        return True


class RingLines:
    """The lines of one rank.

    Args:
        sink: receives finished steps in order.
        elsewhere: the record, where another process may make the lines; None: this one does.
    """

    def __init__(self, ring: RingFile, sink: Callable[[Step], None], elsewhere: LentRecord | None) -> None:
        self._ring, self._sink, self._elsewhere = ring, sink, elsewhere
        self._lines, self._read = deque[Step](), RingSteps(ring)
        self._unread, self._looked_s = 0, time.monotonic()
        self._next_row, self._next_ns = ring.slots // 8, time.perf_counter_ns() + LOOK_EVERY_NS
        self._seen_read = -1
        self._lines_ns, self._shares = 0, 1
        self._has_stopped = False
        if elsewhere is None:
            ring.owner = os.getpid()

    def _step_ended(self, now_ns: int, behind: int) -> None:
        """Make lines, or see to it that another process does, where it is time to; seldom, as it costs a step.

        Args:
            behind: index of the row behind the step's.
        """
        self._unread += 1
        is_soon = now_ns < self._next_ns and behind < self._next_row
        if is_soon and (self._elsewhere is not None or self._unread < MOST):
            return
        self._next_ns, self._next_row = now_ns + LOOK_EVERY_NS, behind + self._ring.slots // 8
        if self._elsewhere is not None:
            if self._must_go_on():
                self._go_on(wait=False)
        elif (
            self._unread >= MOST
            or time.monotonic() - self._looked_s > LOOK_AFTER_S
            or self._ring.count - self._read.next_row > self._ring.slots // 2
        ):
            self.catch_up()

    def _share_ns(self) -> int:
        """Return what a step takes of the time in which lines were made of several."""
        share_ns = self._lines_ns // self._shares
        self._lines_ns, self._shares = self._lines_ns - share_ns, max(self._shares - 1, 1)
        return share_ns

    def _must_go_on(self) -> bool:
        """Return whether the process that should make lines does not: it gave up, or is dead, stopped or too slow."""
        ring, now_s = self._ring, time.monotonic()
        if ring.owner == GIVEN_UP or ring.count - ring.read > ring.slots // 2:
            return True
        if now_s - self._looked_s < ELSEWHERE_WITHIN_S:
            return False
        self._looked_s, before, self._seen_read = now_s, self._seen_read, ring.read
        return before == ring.read

    def _go_on(self, *, wait: bool) -> None:
        """Make lines here from now on, if the other process is not at it."""
        elsewhere, ring = self._elsewhere, self._ring
        if elsewhere is None or self._has_stopped:
            return
        try:
            if not elsewhere.take_back(wait=wait):
                return
        except RecordWriteError as error:  # the program goes on, and what was recorded stays in the ring
            self._has_stopped = True
            _log.error("no further step is in the record: %s", error)
            return
        self._elsewhere = None
        self._unread -= ring.written[0]
        self._read = RingSteps(ring, behind_ns=ring.written[1])
        _log.debug("lines are made in this process from row %d on: %d steps", ring.read, self._unread)

    def finish(self) -> None:
        """Wait for the device and write every remaining step. Only after the last step."""
        self._go_on(wait=True)
        # A backend wakes waiting threads before it runs callbacks, so the last ends may still be pending.
        deadline = time.monotonic() + FINISH_GRACE_S
        while self._unread and time.monotonic() < deadline:
            self._write(late=False)
            if self._unread:
                time.sleep(0.001)
        self.salvage()

    def salvage(self) -> None:
        """Write the remaining steps that can be read; after an error, when the device may never answer."""
        self._go_on(wait=True)
        self._write(late=True)
        if self._unread and not self._has_stopped and self._elsewhere is None:
            _log.warning(
                "steps that are not in the record: %d; their rows were overwritten before they were read, or a device "
                "never reached their end",
                self._unread,
            )
            self._unread = 0

    @property
    def steps_ended(self) -> int:
        """How many steps have ended."""
        return self._ring.steps_ended

    @property
    def is_whole(self) -> bool:
        """Whether every step that has ended was written."""
        return not (self._unread or self._lines or self._has_stopped or self._elsewhere)

    def _stop(self) -> None:
        self._has_stopped = True
        self._sink = lambda _step: None
        self._lines.clear()

    def catch_up(self) -> None:
        """Write the steps that are complete. Nothing while a graph is being captured: to ask for an event would end the
        capture with an error.
        """
        self._looked_s = time.monotonic()
        self._write(late=False)

    def _settle(self) -> None:
        """Store in rows what was not known when they were appended."""

    def _write(self, *, late: bool) -> None:
        if self._has_stopped or self._elsewhere is not None:
            return
        self._settle()
        began_ns = time.perf_counter_ns()
        try:
            lines = self._read.take(late=late)
        except Exception:  # noqa: BLE001  the program goes on, and what was recorded stays in the ring
            self._has_stopped = True
            _log.exception("%d steps are not in the record: no lines can be made of their rows", self._unread)
            return
        self._lines += lines
        self._unread -= len(lines)
        try:
            while self._lines:
                self._sink(self._lines.popleft())
        finally:
            self._lines_ns += time.perf_counter_ns() - began_ns
            self._shares = max(len(lines), 1)
        self._ring.note_written(self._read.next_row)
