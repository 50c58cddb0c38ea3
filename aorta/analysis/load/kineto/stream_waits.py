"""Reads which streams of a device waited for which, from a Kineto trace recorded with `enable_cuda_sync_events`.

Each row of a stream has the number of the call that launched it (`correlation`; later calls have higher ones). A
"Stream Wait Event" names its stream, the stream that its event was recorded on, and the call that recorded it: what
came next on the one waited for what came last on the other (HolisticTraceAnalysis, critical path analysis, reads them
so). Must not guess a wait that the trace does not hold.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec
import numpy as np

from aorta.analysis.load import microseconds
from aorta.analysis.load.chrome_json import EventArray
from aorta.analysis.load.interval_table import NULL
from aorta.analysis.load.kineto.event_structs import DEVICE, DIGIT_EVENTS, DigitEvent, Number, integer, metadata_of
from aorta.analysis.load.open import opened, reading

_SYNC: Final = "cuda_sync"
_WAITS: Final = "Stream Wait Event"


class StreamRow(NamedTuple):
    """A kernel or copy: the call that launched it, and when it ran."""

    call: int
    start_ns: int
    end_ns: int


class StreamWait(NamedTuple):
    """A stream waits, from the call `call` on, for what was launched on stream `on` before the call `recorded`."""

    call: int
    on: int
    recorded: int


@dataclass(frozen=True)
class RecordedStreams:
    """Rows and waits of each stream of one device, in the order of their calls."""

    rows: Mapping[int, Sequence[StreamRow]]
    waits: Mapping[int, Sequence[StreamWait]]

    def waited_for(self, wait: StreamWait) -> StreamRow | None:
        """Return the last row that a wait is for; None: the trace does not hold it."""
        rows = self.rows.get(wait.on, ())
        place = bisect_left(rows, wait.recorded, key=_call) - 1
        return rows[place] if place >= 0 else None

    def behind(self, stream: int, wait: StreamWait) -> int:
        """Return the place of the first row of a stream that a wait of it holds back."""
        return bisect_left(self.rows.get(stream, ()), wait.call, key=_call)

    def before(self, stream: int, place: int) -> Sequence[StreamWait]:
        """Return the waits that held back a row of a stream, and not already the row before it."""
        rows, waits = self.rows[stream], self.waits.get(stream, ())
        first = bisect_left(waits, rows[place - 1].call, key=_call) if place else 0
        return waits[first : bisect_left(waits, rows[place].call, key=_call)]


class _Arguments(msgspec.Struct, gc=False):
    correlation: Number = None
    wait_on_stream: Number = None
    recorded: Number = msgspec.field(default=None, name="wait_on_cuda_event_record_corr_id")


_ARGUMENTS: Final = msgspec.json.Decoder(_Arguments | None)


def read_order(file: str, device: int) -> RecordedStreams | None:
    """Read one trace again for its waits; None: it holds none.

    Args:
        device: whose rows; `NULL`: of any.

    Raises:
        InputError: it cannot be read.
    """
    rows: defaultdict[int, list[StreamRow]] = defaultdict(list)
    waits: defaultdict[int, list[StreamWait]] = defaultdict(list)
    with opened(file) as stream, reading(file):
        array = EventArray(stream, DIGIT_EVENTS.decode, file)
        for piece in array.pieces():
            here = [each for each in piece if each.ph == "X" and device in (NULL, integer(each.pid))]
            _take_rows([each for each in here if each.cat in DEVICE], rows)
            for each in here:
                if each.cat == _SYNC and each.name == _WAITS:
                    found = _arguments(each)
                    wait = StreamWait(*map(integer, (found.correlation, found.wait_on_stream, found.recorded)))
                    if min(wait) >= 0:
                        waits[integer(each.tid)].append(wait)
        base_ns = metadata_of(array.head, array.tail, file).base_ns or 0
    if not waits:
        return None
    return RecordedStreams(
        {
            number: sorted(StreamRow(row.call, row.start_ns + base_ns, row.end_ns + base_ns) for row in found)
            for number, found in rows.items()
        },
        {number: sorted(found) for number, found in waits.items()},
    )


def _take_rows(events: Sequence[DigitEvent], rows: defaultdict[int, list[StreamRow]]) -> None:
    start, starts = microseconds.of_texts([each.ts for each in events])
    length, lengths = microseconds.of_texts([each.dur for each in events])
    for at in np.flatnonzero(starts & lengths & (length >= 0)).tolist():
        call = integer(_arguments(events[at]).correlation)
        if call >= 0:
            rows[integer(events[at].tid)].append(StreamRow(call, int(start[at]), int(start[at] + length[at])))


def _arguments(event: DigitEvent) -> _Arguments:
    try:
        return _ARGUMENTS.decode(event.args) or _Arguments()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _Arguments()


def _call(each: StreamRow | StreamWait) -> int:
    return each.call
