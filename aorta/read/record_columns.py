"""Reads one record into the frames of its rank, in one pass; this is what each process, or each Dask worker, runs on
one file.

`read_tables(path)` decodes the lines of a record block by block into columns, so that memory grows by the columns
alone. Steps come out in order of `global_step`, each once; those of the isolated baselines appear only in `isolated`.
Must not: keep a step as Python objects for longer than its block, or know anything about other ranks.
"""

from __future__ import annotations

import gc
import os
import socket
from array import array
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from aorta.documents.formatting import TEXT
from aorta.documents.metrics import HOST_BOUND
from aorta.errors import InputError
from aorta.read.exposed import exposed_of
from aorta.read.frames import (
    LOSSES,
    NO_TIME,
    PHASES,
    CollectiveName,
    Collectives,
    Floats,
    Ints,
    Numbered,
    SpanRows,
    Steps,
    metric_columns,
)
from aorta.read.ledger import COMM, Gap, nulled, of_steps, resting_on
from aorta.read.record_details import (
    WORDS,
    RecordDetails,
    add_spans,
    has_bubbles,
    has_copies,
    mono_ns,
    samples_from_text,
)
from aorta.read.run import COMPLETED, NO_STEPS, RankTables, Source
from aorta.records.clocks import boot_id
from aorta.records.process import process_facts
from aorta.records.record_file import (
    Problems,
    StepLine,
    decode_field,
    decode_line,
    raw_lines,
    read_header,
)
from aorta.records.schema import Calibration, Coverage, DeviceTelemetry, Footer, Header
from aorta.timeline.arrays import ranges
from aorta.timeline.classes import COMPUTE
from aorta.timeline.overlap import DECIDED, NOT_SAMPLED

FORMAT: Final = "aorta"
"""`Source.format` of AORTA's own records."""
_SCALARS: Final = (
    *("epoch", "step", "global_step", "warmup"),
    *("start_mono_ns", "end_mono_ns", "t_start_ns", "t_end_ns"),
)
_OF_STEPS: Final = (*_SCALARS, "phase", "reason", "coverage", "by_kernels", "drawn", "line_offset", "collectives")
"""Integers kept of each step; the last is how many it has."""
_OF_ROWS: Final = ("name", "seq", "issue_ns", "start_ns", "end_ns", "backend_end_ns")
BLOCK_STEPS: Final = 128
"""Steps held as Python objects before they become columns."""
METRIC_LIMIT: Final = 512
"""Metrics a record may name. This AORTA writes 54 at most; a record that names a new one in each step would exhaust
memory.
"""
_scalars_of = attrgetter(*_SCALARS)
_losses_of = attrgetter(*LOSSES)


def read_tables(path: Path, *, spans: bool = False, exposed: bool = False) -> RankTables:
    """Read one record. Memory: its columns and one block of lines.

    Args:
        spans: keep what ran inside each step (`RankTables.spans`), as a replay needs it.
        exposed: give its exposed communication in pieces (`RankTables.exposed`).

    Raises:
        InputError: as `record_file.header_of`; a line is longer than `LINE_LIMIT`, or the record names more than
            `METRIC_LIMIT` metrics, or has a second header.
    """
    collecting = gc.isenabled()
    gc.disable()  # nothing here is cyclic, and each collection would traverse the million objects of a block
    try:
        problems = Problems(path.name)
        lines = raw_lines(path, problems)
        footer: Footer | None = None
        record = _Record(path, read_header(path, lines, problems), spans or exposed)
        for number, offset, text in lines:
            try:
                line = decode_line(text)
                if isinstance(line, StepLine):
                    record.add(number, offset, line)
            except ValueError as error:
                problems.add(number, str(error))
                continue
            if isinstance(line, Footer):
                footer = line
            elif isinstance(line, Header):
                raise InputError(
                    f"{path.name}:{number}: a second header (run {line.run_id}): two runs are mixed in one file"
                )
            elif isinstance(line, Calibration):
                record.calibrations.append(line)
        tables = record.finish(footer, problems)
        if exposed:
            assert tables.spans is not None
            pieces, sums = exposed_of(tables.steps, tables.collectives, tables.spans)
            tables = replace(tables, exposed=pieces, exposed_sums=sums, spans=tables.spans if spans else None)
        return tables
    finally:
        if collecting:
            gc.enable()


class _Values(dict[bytes, int]):
    """Numbers the distinct texts of a field and decodes each once: `decoded[number]` is the value. Most steps have the
    same text as the one before.
    """

    def __init__(self) -> None:
        self.decoded: list[Any] = []

    def number(self, text: bytes, line: Any, name: str) -> int:
        """Return the number of the text of a field; a `ValueError` where it violates the schema."""
        if text not in self:
            self.decoded.append(decode_field(line, name))
            self[text] = len(self)
        return self[text]


class _Phase:
    """Collects the steps of one frame until they become columns: those of the training, or of its baselines."""

    def __init__(self) -> None:
        self.lines: list[tuple[tuple[int, ...], tuple[str, ...], Any]] = []
        self.integers: list[Ints] = [np.empty((len(_OF_STEPS), 0), np.int64)]
        self.losses: list[Floats] = [np.empty((len(LOSSES), 0))]
        self.metrics: list[tuple[tuple[str, ...], Ints, Floats]] = []
        self.bounds: dict[str, array[float]] = {}
        """Metric -> step as it was added, at least and at most, one after another."""
        self.length = 0

    def flush(self) -> list[Any]:
        """Turn the steps added since the last call into columns; return their lines."""
        lines = [line for *_, line in self.lines]
        if not lines:
            return lines
        self.integers.append(np.array([numbers for numbers, *_ in self.lines], np.int64).T)
        self.losses.append(np.array([_losses_of(line) for line in lines], np.float64).T)
        alike: dict[tuple[str, ...], list[int]] = {}
        for index, (_, names, _) in enumerate(self.lines):
            alike.setdefault(names, []).append(index)
        for names, indices in alike.items():
            values = np.array([tuple(lines[index].overlap.values()) for index in indices], np.float64)
            self.metrics.append((names, np.array(indices) + self.length, values))
        self.lines, self.length = [], self.length + len(lines)
        return lines

    def frame(self, reasons: _Values, coverages: _Values) -> tuple[Steps, Ints, Ints]:
        """Return the steps in the order of the file, the offset of each line, and how many collectives it has."""
        ends = {name: np.full((2, self.length), np.nan) for name in self.bounds}
        for name, bounds in self.bounds.items():
            step, low, high = np.array(bounds, np.float64).reshape(-1, 3).T
            ends[name][:, step.astype(np.int64)] = low, high
        integers: dict[str, Ints] = dict(zip(_OF_STEPS, np.concatenate(self.integers, axis=1), strict=True))
        offsets, counts = integers.pop("line_offset"), integers.pop("collectives")
        passed_over = [coverage.reason == NOT_SAMPLED for coverage in coverages.decoded]
        integers["drawn"] = np.where(np.array(passed_over or [False])[integers["coverage"]], 0, integers["drawn"])
        steps = Steps(
            **{**integers, "warmup": integers["warmup"] != 0, "by_kernels": integers["by_kernels"] != 0},
            reasons=tuple(reasons.decoded),
            coverages=tuple(coverages.decoded),
            metrics=metric_columns(self.length, self.metrics, {name: low for name, (low, _) in ends.items()}),
            losses=dict(zip(LOSSES, np.concatenate(self.losses, axis=1), strict=True)),
            bounds={name: (low, high) for name, (low, high) in ends.items()},
        )
        return steps, offsets, counts


class _Record:
    """Collects the steps of one file. `spans`: keep what ran inside them."""

    def __init__(self, path: Path, header: Header, spans: bool) -> None:
        self.path, self.header, self.spans = path, header, spans
        self.training, self.baselines = _Phase(), _Phase()
        self.rows: list[npt.NDArray[np.int64]] = []
        self.names = Numbered()
        self.metric_names: set[str] = set()
        self.names_seen: set[tuple[str, ...]] = set()
        self.reasons, self.coverages = _Values(), _Values()
        self.span_rows = SpanRows()
        self.waits_known: list[bool] = []
        self.sample_lines, self.mark_lines = array("q"), array("q")
        self.calibrations: list[Calibration] = []
        self.waiting_rows = 0

    def add(self, number: int, offset: int, line: Any) -> None:
        """Add one step.

        Raises:
            ValueError: it does not belong here, or one of its fields violates the schema; nothing was added.
        """
        rank, world_size = self.header.rank, self.header.world_size
        if line.rank != rank or line.world_size != world_size:
            raise ValueError(
                f"a step of rank {line.rank} of {line.world_size} in the record of rank {rank} of {world_size}"
            )
        left_open = {}  # the null metrics that the marks of the step leave open, with their bounds
        for name, (low, high) in (line.bounds or {}).items():
            if line.overlap.get(name, 0.0) is None:
                if low > high:
                    raise ValueError(f"{name} is at least {low:g} and at most {high:g} in its bounds")
                left_open[name] = (low, high)
        if left_open:  # their own reasons have the numbers of the step; with one for all, distinct texts stay few
            reasons = decode_field(line, "reasons") | dict.fromkeys(left_open, HOST_BOUND)
            line.reasons = msgspec.Raw(msgspec.json.encode(reasons))
        reason = self.reasons.number(bytes(line.reasons), line, "reasons")
        coverage = self.coverages.number(bytes(line.coverage), line, "coverage")
        for row in decode_field(line, "ranges") if line.ranges else ():
            if any(not -(2**61) < value < 2**61 for value in (row.thread, row.depth, row.start_ns, row.end_ns)):
                raise ValueError("a number in its ranges exceeds what a column holds")
        for name, is_read in (("active_segments", has_bubbles(line)), ("copies", has_copies(line))):
            if self.spans and is_read:
                decode_field(line, name)
        if line.device:
            decode_field(line, "device")
            self.sample_lines.append(offset)
        elif line.rocm_smi_t_ns is not msgspec.UNSET and samples_from_text(self.header):
            mono_ns(line.rocm_smi_t_ns, line.t_start_ns, line.start_mono_ns)
            self.sample_lines.append(offset)
        names = tuple(line.overlap)
        if names not in self.names_seen:
            self.names_seen.add(names)
            self.metric_names.update(names)
            if len(self.metric_names) > METRIC_LIMIT:
                raise InputError(
                    f"{self.path.name}:{number}: more than {METRIC_LIMIT} different metrics in one record: this is not "
                    f"a record of AORTA (in {self.path.parent})"
                )
        trains = line.phase == "train"
        phase = self.training if trains else self.baselines
        for name, ends in left_open.items():
            phase.bounds.setdefault(name, array("d")).extend((phase.length + len(phase.lines), *ends))
        by_kernels = line.measured_by is not msgspec.UNSET
        drawn = 1 if line.drawn is msgspec.UNSET else line.drawn
        rows = len(line.collectives) if trains else 0
        code = PHASES.index(line.phase)
        numbers = (*_scalars_of(line), code, reason, coverage, by_kernels, drawn, offset, rows)
        phase.lines.append((numbers, names, line))
        if trains and line.ranges:
            self.mark_lines.append(offset)
        self.waiting_rows += rows
        if len(phase.lines) >= BLOCK_STEPS or self.waiting_rows >= 100 * BLOCK_STEPS:
            self.flush()

    def flush(self) -> None:
        self.baselines.flush()
        first = self.training.length
        lines = self.training.flush()
        rows = [row for line in lines for row in line.collectives]
        table = np.empty((len(_OF_ROWS), len(rows)), np.int64)
        if rows:
            kind, group, seq, size, dtype, issue, start, end, source, backend_end = zip(*rows, strict=True)
            table[0] = list(map(self.names.__getitem__, zip(kind, group, size, dtype, source, strict=True)))
            for index, column in enumerate((seq, issue, start, end, backend_end), start=1):
                try:
                    table[index] = column
                except TypeError:  # a null among them
                    table[index] = [NO_TIME if value is None else value for value in column]
        self.rows.append(table)
        if self.spans:
            add_spans(self.span_rows, lines, first, self.header.lanes)
            self.waits_known += [line.waits is not msgspec.UNSET for line in lines]
        self.waiting_rows = 0

    def finish(self, footer: Footer | None, problems: Problems) -> RankTables:
        """Return the frames of everything added, in order of global step, each step once."""
        self.flush()
        steps, offsets, counts = self.training.frame(self.reasons, self.coverages)
        read = self.training.length + self.baselines.length
        rows: npt.NDArray[np.int64] = np.concatenate(self.rows, axis=1)
        waits_known = np.array(self.waits_known, bool)
        spans = self.span_rows.frame(waits_known) if self.spans else None
        chosen = np.arange(len(steps))
        step = np.repeat(chosen, counts)
        if np.any(np.diff(steps.global_step) <= 0):
            _, chosen = np.unique(steps.global_step, return_index=True)  # the first of equals
            starts = np.cumsum(counts) - counts
            step, index = ranges(starts[chosen], (starts + counts)[chosen])
            rows, steps = rows[:, index], steps.take(chosen)
            if spans is not None:
                first, last = (np.searchsorted(spans.step, chosen, side=side) for side in ("left", "right"))
                of_step, index = ranges(first, last)
                spans = replace(spans.take(index), step=of_step, waits_known=waits_known[chosen])
        texts, name = problems.as_sentences(), self.path.name
        if footer is None:
            texts.append(f"{name}: no footer: the process was killed, or still runs")
        if (repeated := self.training.length - len(steps)) > 0:
            texts.append(f"{name}: {repeated} step(s) repeat a global step; the first of each is used")
        if footer is not None and footer.steps_written != read:
            texts.append(f"{name}: its footer counts {footer.steps_written} steps, {read} could be read")
        if footer is not None and footer.steps_lost:
            every_step = footer.steps_written + footer.steps_lost
            texts.append(
                f"{name}: {footer.steps_lost} of {every_step} steps have no line: what was noted of them was "
                "overwritten before lines were made of it, the device never reached their end, or the disk was full"
            )
        columns = dict(zip(_OF_ROWS, rows, strict=True))
        if (columns["backend_end_ns"] == NO_TIME).all():
            del columns["backend_end_ns"]
        collectives = Collectives(step=step, **columns, names=tuple(CollectiveName(*name) for name in self.names))
        source = _source(self.path, self.header, footer)
        steps, gaps = _reconciled(steps, np.bincount(collectives.step, minlength=len(steps)), footer)
        if self.sample_lines and samples_from_text(self.header):
            source = replace(source, device_telemetry=DeviceTelemetry(WORDS, None))
        return RankTables(
            source=source,
            steps=steps,
            collectives=collectives,
            details=RecordDetails(
                self.path,
                source.lanes,
                steps.global_step,
                steps.length_ns,
                offsets[chosen],
                self.sample_lines,
                (self.header.local_rank, self.header.world_size),
                self.mark_lines,
            ),
            isolated=self.baselines.frame(self.reasons, self.coverages)[0] if self.baselines.length else NO_STEPS,
            spans=spans,
            gaps=tuple(gaps),
            problems=tuple(texts),
            calibrations=tuple(self.calibrations),
            calibration_plan=self.header.calibration,
        )


def _source(path: Path, header: Header, footer: Footer | None) -> Source:
    match footer:
        case None:
            # The process that writes it may be alive: on this host since its boot, and not a later one with the same
            # pid. Of another host or pid namespace that is not known.
            ending, process = "killed (no footer)", process_facts(header.pid)
            if process is not None and header.boot_id == boot_id() and header.host == socket.gethostname():
                started_ns = process.start_ticks * 10**9 // os.sysconf("SC_CLK_TCK")
                if process.state not in "ZX" and started_ns <= header.clock.boottime_ns:
                    ending = "still running"
        case Footer(reason="signal"):
            ending = f"stopped by {footer.signal or 'a signal'}, exit code {footer.exit_code}"
        case Footer(reason="error", exit_code=0):
            ending = f"recorded in part: {footer.error or 'not recorded why'}"
        case Footer(reason="error"):
            ending = f"ended by an error, exit code {footer.exit_code}: {footer.error or 'not recorded'}"
        case _:
            ending = COMPLETED
    shared = {name: getattr(header, name) for name in header.__struct_fields__ if name in Source.__dataclass_fields__}
    groups = {} if footer is None else footer.groups
    return Source(path=str(path), format=FORMAT, groups=groups, ending=ending, **shared)


def _reconciled(steps: Steps, rows: Ints, footer: Footer | None) -> tuple[Steps, list[Gap]]:
    """Return the steps without metrics of which the record itself says that evidence is missing, and all that it lacks.
    Where not every collective was seen, the recorder left their metrics out (R8).

    Args:
        rows: of each step how many collectives the record has.
    """
    gaps: list[Gap] = []
    every = [*steps.coverages, Coverage(0, None, complete=True)]  # the last for `UNKNOWN`
    reasons: dict[str, list[int]] = {}
    for code, coverage in enumerate(every):
        if not coverage.complete and coverage.reason != NOT_SAMPLED:
            why = coverage.reason or f"{coverage.seen} collectives seen, {coverage.issued} issued"
            reasons.setdefault(why, []).append(code)
    for why, codes in reasons.items():
        if (chosen := np.isin(steps.coverage, codes)).any():
            gaps.append(of_steps(steps, chosen, COMM, f"coverage not complete: {why}"))
    facts = np.array([(coverage.seen, coverage.unwatched, coverage.outside) for coverage in every], np.int64)
    seen, unwatched, outside = facts[steps.coverage].T
    complete = np.array([coverage.complete for coverage in every])[steps.coverage]
    lost, partly = complete & (rows < seen), unwatched > DECIDED * seen
    if lost.any():
        why = "the record has fewer collectives of the step than it counts"
        gaps.append(of_steps(steps, lost, COMM, why))
        steps = nulled(steps, lost, why, resting_on(COMM))
    if partly.any():
        part = unwatched[partly].sum() / seen[partly].sum()
        why = f"{part:.0%} of the collectives belong to a model that is not recorded; its computation counts as idle: "
        why += "record every model, model=[first, second]"
        gaps.append(of_steps(steps, partly, COMPUTE, why, seen=True))
        steps = nulled(steps, partly, why, resting_on(COMPUTE))
    if between := int(outside.sum()) + (0 if footer is None else footer.outside):
        verb = "is" if between == 1 else "are"
        why = f"{TEXT.count(between, 'collective')} outside of steps (checkpoints, evaluation, after the last step) "
        gaps.append(Gap("", f"{why}{verb} in no metric"))
    return steps, gaps
