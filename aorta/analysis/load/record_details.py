"""What ran inside one step of a record: read from its line again, because for all steps it would be too much to hold.

Must not: take another line for the step's, should the file have changed since its columns were read.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import BinaryIO, Final

from aorta.analysis.step_intervals import LaneSegment, StepIntervals, UserMarksOfStep
from aorta.analysis.tables import Ints
from aorta.errors import InputError
from aorta.records.device_values import read_words
from aorta.records.reader import LINE_LIMIT
from aorta.records.schema import DeviceSample, Header
from aorta.records.step_line import StepLine, decode_line
from aorta.records.untrusted_files import open_regular

_ANOTHER_LINE: Final = "another line stands there now"
WORDS: Final = "rocm-smi"
"""Source of the samples that are read from `rocm_smi_output`."""


def words_are_samples(header: Header) -> bool:
    """Whether what rocm-smi printed is read as samples: in records that have no others."""
    return header.device_telemetry is None or header.device_telemetry.source is None


def mono_ns(t_ns: int, t_start_ns: int, start_mono_ns: int) -> int:
    """A wall-clock time on the clock of the steps, by the start of a step on both.

    Raises:
        ValueError: a column cannot hold it.
    """
    at_ns = t_ns - t_start_ns + start_mono_ns
    if not -(2**62) < at_ns < 2**62:
        raise ValueError(f"rocm_smi_t_ns is {t_ns}: centuries from its step")
    return at_ns


@dataclass(frozen=True)
class RecordDetails:
    """`step_intervals.Details` of a record: reads the lines of its file again, by their offsets."""

    path: Path
    lanes: tuple[str, ...]
    global_step: Ints
    length_ns: Ints
    line_offset: Ints
    sample_lines: array[int]
    local_rank_of: tuple[int, int]
    """The local rank, and the ranks of the run."""
    mark_lines: array[int]

    def step(self, place: int) -> StepIntervals:
        """One step, from its line."""
        with self._open(f"global step {self.global_step[place]}, at byte {self.line_offset[place]}, ") as file:
            return self._step(file, place)

    def steps(self) -> Iterator[StepIntervals]:
        """Yield every step, line by line."""
        with self._open("") as file:
            for place in range(len(self.global_step)):
                yield self._step(file, place)

    def device_samples(self) -> Iterator[tuple[DeviceSample, str | None]]:
        """Yield the device samples, from the lines that hold any."""
        if not self.sample_lines:
            return
        with self._open("its device samples ") as file:
            for offset in self.sample_lines:
                line = _line_at(file, offset)
                samples = line.device
                for sample in samples:
                    yield sample, line.reasons.get("device")
                if not samples and line.rocm_smi_t_ns is not None:
                    yield self._of_words(line, line.rocm_smi_t_ns)

    def user_marks(self) -> Iterator[UserMarksOfStep]:
        """Yield the caller's ranges and counters, from the lines that hold any."""
        if not self.mark_lines:
            return
        with self._open("its ranges and counters ") as file:
            for offset in self.mark_lines:
                line = _line_at(file, offset)
                yield UserMarksOfStep(line.global_step, line.start_mono_ns, line.ranges, line.counters)

    def _of_words(self, line: StepLine, t_ns: int) -> tuple[DeviceSample, str | None]:
        at_ns = mono_ns(t_ns, line.t_start_ns, line.start_mono_ns)
        values, reason = read_words(
            line.rocm_smi_output,
            *self.local_rank_of,
            exit_code=line.rocm_smi_exit_code,
            stderr=line.rocm_smi_stderr,
            error=line.rocm_smi_error,
        )
        return DeviceSample(at_ns, at_ns, **asdict(values)), reason

    def size_bytes(self) -> int:
        """Size of the file; 0 where it no longer exists, which reading it will report."""
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    def absolute(self) -> RecordDetails:
        """The same with an absolute path, for workers with another working directory."""
        return replace(self, path=self.path.absolute())

    def _step(self, file: BinaryIO, place: int) -> StepIntervals:
        line = _line_at(file, int(self.line_offset[place]))
        if line.global_step != self.global_step[place]:
            raise ValueError(_ANOTHER_LINE)
        segments = [LaneSegment(part.start_ns, part.end_ns, part.lanes) for part in line.active_segments]
        length_ns = int(self.length_ns[place])
        return StepIntervals(
            length_ns,
            self.lanes,
            segments,
            line.compute,
            line.stalls,
            line.aux,
            line.ranges,
            line.waits,
            line.ready,
        )

    @contextmanager
    def _open(self, what: str) -> Iterator[BinaryIO]:
        try:
            with open_regular(self.path, 1 << 20) as file:
                yield file
        except (OSError, ValueError) as error:
            raise InputError(
                f"{self.path.name}: {what}cannot be read again ({error}) (in {self.path.parent})"
            ) from error


def _line_at(file: BinaryIO, offset: int) -> StepLine:
    """The step whose line begins at `offset`.

    Raises:
        ValueError: there is no step now.
    """
    file.seek(offset)
    line = decode_line(file.readline(LINE_LIMIT))
    if not isinstance(line, StepLine):
        raise ValueError(_ANOTHER_LINE)
    return line
