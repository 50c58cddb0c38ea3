"""Reads what ran inside the steps of a record: while its lines are read, or from some of them again, as all steps would
be too much to hold. Must not: take another line for a step's, should the file have changed since.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain, repeat
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt
from msgspec import UNSET

from aorta.errors import InputError
from aorta.read.frames import COPY_TO_HOST, UNKNOWN, Ints, Lane, SpanName, SpanRows, Spans
from aorta.read.run import Details, StepIntervals
from aorta.records.device_values import read_words
from aorta.records.files import open_regular
from aorta.records.record_file import LINE_LIMIT, StepLine, decode_field, decode_line
from aorta.records.schema import ActiveSegment, AuxRange, ComputeRange, Copy, DeviceSample, Header, UserRange
from aorta.timeline.arrays import interval_array, merge, pairs
from aorta.timeline.classes import BUBBLE

_NAMES: Final = {
    Lane.STALL: SpanName("stall", ""),
    Lane.HAND_OVER: SpanName("hand_over", "hand-over"),
    Lane.BUBBLE: SpanName("bubble", ""),
    Lane.COPY_TO_HOST: SpanName("copy", COPY_TO_HOST),
    Lane.COPY: SpanName("copy", ""),
}
TRAINING_THREAD: Final = 0
"""Number of the thread that records, among those of named ranges."""
_ANOTHER_LINE: Final = "another line stands there now"
WORDS: Final = "rocm-smi"
"""Source of the samples that are read from `rocm_smi_output`."""


def add_spans(spans: SpanRows, lines: Sequence[Any], first: int, lanes: Sequence[str]) -> None:
    """Add what ran when in some steps, the first of which is row `first`.

    Raises:
        ValueError: a field violates the schema.
    """

    def rows(name: str) -> Iterator[Any]:
        """Yield the step of each row, then the columns of a field whose rows are tuples."""
        lists = [getattr(line, name) for line in lines]
        every = list(chain.from_iterable(lists))
        yield np.repeat(np.arange(first, first + len(lines)), list(map(len, lists)))
        yield from zip(*every, strict=True) if every else [()] * 4

    step, block, phase, start, end, *_ = rows("compute")
    spans.add(Lane.COMPUTE, step, zip(repeat("compute"), block, phase, strict=False), start, end)
    step, work, start, end, *_ = rows("aux")
    spans.add(Lane.AUX, step, zip(repeat("aux"), work, repeat(""), strict=False), start, end)
    names: dict[Lane, Any] = {**_NAMES, Lane.RANGE: [], Lane.WAIT: []}
    others: dict[Lane, list[tuple[int, int, int, int]]] = defaultdict(list, {Lane.RANGE: [], Lane.WAIT: []})
    for index, line in enumerate(lines, start=first):
        for stall in line.stalls:
            lane = Lane.HAND_OVER if stall.cause == "hand_over" else Lane.STALL
            others[lane].append((index, stall.start_ns, stall.end_ns, UNKNOWN))
        for row in decode_field(line, "ranges") if line.ranges else ():
            if row.thread == TRAINING_THREAD:
                others[Lane.RANGE].append((index, row.start_ns, row.end_ns, UNKNOWN))
                names[Lane.RANGE].append(("range", row.name, ""))
        for wait in line.waits or ():
            others[Lane.WAIT].append((index, wait.enter_ns, wait.leave_ns, wait.seq))
            names[Lane.WAIT].append(("wait", wait.group, ""))
        if has_copies(line):
            copies: list[Copy] = decode_field(line, "copies") or []
            for copy in copies:
                if copy.start_ns is not None and copy.end_ns is not None:
                    lane = Lane.COPY_TO_HOST if copy.direction == "d2h" else Lane.COPY
                    others[lane].append((index, copy.start_ns, copy.end_ns, UNKNOWN))
        if has_bubbles(line) and BUBBLE in lanes:
            bit = 1 << lanes.index(BUBBLE)
            segments: list[ActiveSegment] = decode_field(line, "active_segments")
            waited = merge(interval_array((part.start_ns, part.end_ns) for part in segments if part.lanes & bit))
            others[Lane.BUBBLE] += [(index, begin, finish, UNKNOWN) for begin, finish in pairs(waited)]
    for lane, rows_of_lane in others.items():
        step, start, end, ref = np.array(rows_of_lane, np.int64).reshape(-1, 4).T
        spans.add(lane, step, names[lane], start, end, ref)


def has_copies(line: Any) -> bool:
    """Return whether a step copied between host and device."""
    return bool(line.overlap.get("copy_ms") or "d2h_gb_per_s" in line.overlap)


def has_bubbles(line: Any) -> bool:
    """Return whether a step of a pipeline has bubbles."""
    return bool(line.overlap.get("bubble_ms", 0.0) != 0.0)


def samples_from_text(header: Header) -> bool:
    """Return whether what rocm-smi printed is read as samples: in records that have no others."""
    return header.device_telemetry is None or header.device_telemetry.source is None


def mono_ns(t_ns: int, t_start_ns: int, start_mono_ns: int) -> int:
    """Return a wall-clock time on the clock of the steps, by the start of a step on both.

    Raises:
        ValueError: a column cannot hold it.
    """
    at_ns = t_ns - t_start_ns + start_mono_ns
    if not -(2**62) < at_ns < 2**62:
        raise ValueError(f"rocm_smi_t_ns is {t_ns}: centuries from its step")
    return at_ns


@dataclass(frozen=True)
class RecordDetails(Details):
    """Reads the lines of a record again, by offset. `local_rank_of`: the local rank, and the ranks of the run."""

    path: Path
    lanes: tuple[str, ...]
    global_step: Ints
    length_ns: Ints
    line_offset: Ints
    sample_lines: array[int]
    local_rank_of: tuple[int, int]
    mark_lines: array[int]

    def step(self, index: int) -> StepIntervals:
        with self._open(f"global step {self.global_step[index]}, at byte {self.line_offset[index]}, ") as file:
            line = self._line(file, index)
            return StepIntervals(
                int(self.length_ns[index]),
                self.lanes,
                decode_field(line, "active_segments"),
                [ComputeRange(*row) for row in line.compute],
                line.stalls,
                [AuxRange(*row) for row in line.aux],
                decode_field(line, "ranges") or (),
            )

    def spans(self, indices: npt.NDArray[np.intp]) -> Spans:
        with self._open("") as file:
            lines = [self._line(file, index) for index in indices.tolist()]
            rows = SpanRows()
            add_spans(rows, lines, 0, self.lanes)
        return rows.frame(np.array([line.waits is not UNSET for line in lines], bool))

    def device_samples(self) -> Iterator[tuple[DeviceSample, str | None]]:
        if not self.sample_lines:
            return
        with self._open("its device samples ") as file:
            for offset in self.sample_lines:
                line = _line_at(file, offset)
                samples = decode_field(line, "device")
                for sample in samples or ():
                    yield sample, decode_field(line, "reasons").get("device")
                if not samples and line.rocm_smi_t_ns is not UNSET:
                    at_ns = mono_ns(line.rocm_smi_t_ns, line.t_start_ns, line.start_mono_ns)
                    values, reason = read_words(
                        line.rocm_smi_output or "",
                        *self.local_rank_of,
                        exit_code=line.rocm_smi_exit_code or 0,
                        stderr=line.rocm_smi_stderr or "",
                        error=line.rocm_smi_error or None,
                    )
                    yield DeviceSample(at_ns, at_ns, **asdict(values)), reason

    def user_ranges(self) -> Iterator[tuple[int, int, Sequence[UserRange]]]:
        if not self.mark_lines:
            return
        with self._open("its ranges ") as file:
            for offset in self.mark_lines:
                line = _line_at(file, offset)
                yield line.global_step, line.start_mono_ns, decode_field(line, "ranges")

    def _line(self, file: BinaryIO, index: int) -> Any:
        line = _line_at(file, int(self.line_offset[index]))
        if line.global_step != self.global_step[index]:
            raise ValueError(_ANOTHER_LINE)
        return line

    @contextmanager
    def _open(self, what: str) -> Iterator[BinaryIO]:
        try:
            with open_regular(self.path, 1 << 20) as file:
                yield file
        except (OSError, ValueError) as error:
            raise InputError(
                f"{self.path.name}: {what}cannot be read again ({error}) (in {self.path.parent})"
            ) from error


def _line_at(file: BinaryIO, offset: int) -> Any:
    """Return the step whose line begins at `offset`, or raise a `ValueError` where there is none now."""
    file.seek(offset)
    line = decode_line(file.readline(LINE_LIMIT))
    if not isinstance(line, StepLine):
        raise ValueError(_ANOTHER_LINE)
    return line
