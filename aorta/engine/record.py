"""A rank's record from its header to a footer that says why it ended.

Must not: lose what was measured: whatever ends the loop, the steps that were under way are read and written first.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from aorta.errors import AortaError, RecordWriteError
from aorta.instrument.instrument import Instrument
from aorta.telemetry.clock import read_clocks
from aorta.telemetry.schema import Footer, Header
from aorta.telemetry.writer import RecordWriter

_log = logging.getLogger(__name__)


@dataclass
class Ending:
    """Why the loop ended; filled in by the loop."""

    signal: signal.Signals | None = None
    reason: Literal["completed", "signal", "error"] = "completed"


class Record:
    """One open record: the writer, and the header it begins with."""

    def __init__(self, writer: RecordWriter, header: Header) -> None:
        self.writer, self.header = writer, header
        writer.write(header)

    @contextmanager
    def closed_by(self, instrument: Instrument, explain: Callable[[Exception], AortaError]) -> Iterator[Ending]:
        """Around the loop: on the way out, the last steps and the footer are written, and the file is closed.

        A footer that cannot be written (the disk is full, which then is the error itself) is logged, not raised over
        the error that ended the loop.
        """
        ending = Ending()
        try:
            yield ending
            instrument.recorder.finish()
        except Exception as error:
            # Explained before the footer is written, so that the record names the peer that is to blame.
            explained = explain(error)
            self._foot_quietly(instrument, ending, explained.exit_code, str(explained))
            if explained is error:
                raise
            raise explained from error
        except KeyboardInterrupt:
            self._foot_quietly(instrument, ending, 128 + signal.SIGINT, "interrupted at once by a second SIGINT")
            raise
        else:
            if ending.signal is not None:
                ending.reason = "signal"
            self._foot(instrument, ending, 0 if ending.signal is None else 128 + ending.signal, None)
        finally:
            self.writer.close()

    def _foot_quietly(self, instrument: Instrument, ending: Ending, code: int, error: str) -> None:
        ending.reason = "error"
        try:
            instrument.recorder.salvage()
            self._foot(instrument, ending, code, error)
        except RecordWriteError as problem:
            _log.error("the record ends without a footer: %s", problem)

    def _foot(self, instrument: Instrument, ending: Ending, code: int, error: str | None) -> None:
        self.writer.write(
            Footer(
                reason=ending.reason,
                exit_code=code,
                steps_written=instrument.recorder.steps_written,
                clock=read_clocks(),
                groups={name: list(group.ranks) for name, group in instrument.groups.items()},
                signal=None if ending.signal is None else ending.signal.name,
                error=error,
            )
        )
