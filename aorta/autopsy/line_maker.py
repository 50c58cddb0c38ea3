"""Makes the lines of the records of one host's ranks, beside the ranks: the thread that trains appends rows alone.

    lines = LineMaker(folder)
    lines.add(rank)
    lines.make()            # now and then; less often than `EVERY_S` it does nothing

What goes wrong with one rank's lines is that rank's business, which then makes them itself. Must not import torch, or
numpy before there is a ring.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from aorta.command_line import to_stderr
from aorta.errors import InputError
from aorta.records.progress import PROGRESS_DIR, PROGRESS_FILE

if TYPE_CHECKING:  # loads numpy
    from aorta.records.ring_record import RingRecord

EVERY_S: Final = 2.0
"""Lines of many steps together cost a fraction of those of one. A kill loses none; a progress line waits for them."""
STEPS: Final = 64
"""They are made of so many steps, if there are before. `ring_steps.MOST`, which loads numpy."""
_SHARE: Final = 8
"""They are made at once where a ring is fuller than one in so many."""


class LineMaker:
    """The lines of ranks whose records are in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._awaited: set[int] = set()
        self._records: dict[int, RingRecord] = {}
        self._made_s, self._made = time.monotonic(), 0

    def add(self, rank: int) -> None:
        """Make this rank's lines, once its ring has rows."""
        self._awaited.add(rank)

    def make(self) -> None:
        """Append the lines of steps that are complete. Never raises."""
        for rank in sorted(self._awaited):
            self._open(rank)
        rings = [record.ring for record in self._records.values()]
        full = any(ring.count - ring.read > ring.slots // _SHARE for ring in rings)
        ended = max((ring.steps_ended for ring in rings), default=0)
        if full or ended - self._made >= STEPS or time.monotonic() - self._made_s >= EVERY_S:
            self._made_s, self._made = time.monotonic(), ended
            for rank in list(self._records):
                self._append(rank)

    def _open(self, rank: int) -> None:
        path = self._folder / PROGRESS_DIR / PROGRESS_FILE.format(rank=rank)
        if not path.exists():
            return
        from aorta.records.ring_record import RingRecord

        with suppress(OSError, InputError, ValueError):  # an earlier run's, or it says nothing of rows yet
            self._records[rank] = RingRecord(self._folder, path)
            self._awaited.discard(rank)

    def _append(self, rank: int) -> None:
        record = self._records[rank]
        try:
            if not record.is_there or not record.claim():
                record.close()
                del self._records[rank]
                return
            record.append()
        except BlockingIOError:  # the rank is taking it back
            return
        except Exception as error:  # noqa: BLE001  the rank goes on without this process
            record.give_up()
            record.close()
            del self._records[rank]
            to_stderr(f"aorta: watchdog: rank {rank} makes the lines of its record itself: {error}")
