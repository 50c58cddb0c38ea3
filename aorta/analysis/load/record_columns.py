"""Reads one record into the tables of its rank; this is what each process, or each Dask worker, runs on one file.

`read_tables(path)` decodes the lines of a record block by block into columns, so that memory grows by the columns
alone. Steps come out in order of `global_step`, each once; those of the isolated baselines appear only in `isolated`.
Must not: keep a step as Python objects for longer than its block, or know anything about other ranks.
"""

from __future__ import annotations

import gc
from array import array
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from aorta.analysis.host_bound import HOST_BOUND
from aorta.analysis.load.run_facts import WORDS, RecordDetails, coverage_facts, mono_ns, samples_from_text, source_of
from aorta.analysis.step_intervals import StepColumns, contents_of
from aorta.analysis.tables import (
    KIND_METRICS,
    KINDS_KNOWN,
    LOSSES,
    NO_TIME,
    PHASES,
    CollectiveName,
    Collectives,
    Floats,
    Ints,
    IsolatedSteps,
    RankTables,
    Steps,
    of_unused_kind,
)
from aorta.errors import InputError
from aorta.records.reader import Problems, no_footer, raw_lines, read_header, second_header
from aorta.records.schema import Calibration, Coverage, DeviceTelemetry, Footer, Gradient, Header
from aorta.records.step_line import CollectiveRow, StepLine, decode_line

_SCALARS: Final = (
    "epoch",
    "step",
    "global_step",
    "warmup",
    "start_mono_ns",
    "end_mono_ns",
    "t_start_ns",
    "t_end_ns",
)
_INTEGERS: Final = (*_SCALARS, "line_offset", "reason", "coverage", "rows_end")
_ROW: Final = ("name", "seq", "issue_ns", "start_ns", "end_ns", "backend_end_ns")
_ISOLATED: Final = ("phase", "warmup", "wall_ns", "reason", "coverage")
BLOCK_STEPS: Final = 256
"""Steps held as Python objects before they become columns."""
METRIC_LIMIT: Final = 512
"""Metrics a record may name. This AORTA writes 54 at most; a record that names a new one in each step would exhaust
memory.
"""
Value = TypeVar("Value")
_scalars_of = attrgetter(*_SCALARS)
_losses_of = attrgetter(*LOSSES)


def read_tables(path: Path, *, contents: bool = False) -> RankTables:
    """Read one record. Memory: its columns and one block of lines.

    Args:
        contents: keep what ran inside each step as well (`RankTables.contents`), as a replay needs it.

    Raises:
        InputError: as `records.reader.header_of`; a line is longer than `LINE_LIMIT`, or the record names more than
            `METRIC_LIMIT` metrics, or has a second header.
    """
    collecting = gc.isenabled()
    gc.disable()  # nothing here is cyclic, and each collection would traverse the million objects of a block
    try:
        return _read(path, StepColumns() if contents else None)
    finally:
        if collecting:
            gc.enable()


def _read(path: Path, contents: StepColumns | None) -> RankTables:
    problems = Problems(path.name)
    lines = raw_lines(path, problems)
    header = read_header(path, lines, problems)
    footer: Footer | None = None
    columns = _Columns(path, header, contents)
    for number, offset, text in lines:
        try:
            line = decode_line(text)
            if isinstance(line, StepLine):
                columns.add(number, offset, line)
                continue
        except ValueError as error:
            problems.add(number, str(error))
            continue
        if isinstance(line, Footer):
            footer = line
        elif isinstance(line, Header):
            raise second_header(path, number, line)
        elif isinstance(line, Calibration):
            columns.calibrations.append(line)
    return columns.finish(footer, problems)


@dataclass
class _Columns:
    """Collects the steps of one file until they become columns."""

    path: Path
    header: Header
    contents: StepColumns | None = None
    scalars: list[tuple[Any, ...]] = field(default_factory=list)
    losses: list[tuple[Any, ...]] = field(default_factory=list)
    rows: list[CollectiveRow] = field(default_factory=list)
    metrics_by_names: dict[tuple[str, ...], tuple[list[int], list[tuple[float | None, ...]]]] = field(
        default_factory=dict
    )
    metric_names: dict[str, None] = field(default_factory=dict)
    names: _Names = field(default_factory=lambda: _Names())
    reasons: _Decoded[dict[str, str]] = field(default_factory=lambda: _Decoded(dict[str, str]))
    coverages: _Decoded[Coverage] = field(default_factory=lambda: _Decoded(Coverage))
    isolated: array[int] = field(default_factory=lambda: array("q"))
    isolated_compute_ms: array[float] = field(default_factory=lambda: array("d"))
    sample_lines: array[int] = field(default_factory=lambda: array("q"))
    mark_lines: array[int] = field(default_factory=lambda: array("q"))
    gradient_order: tuple[Gradient, ...] = ()
    calibrations: list[Calibration] = field(default_factory=list)
    by_kernels: array[int] = field(default_factory=lambda: array("b"))
    open_metrics: dict[str, array[float]] = field(default_factory=dict)
    """Metric -> step as it was added, at least and at most, one after another."""
    row_total: int = 0
    blocks: list[tuple[Ints, Floats, Ints, list[tuple[tuple[str, ...], list[int], Floats]]]] = field(
        default_factory=list
    )

    def add(self, number: int, offset: int, line: StepLine) -> None:
        """Add one step.

        Raises:
            ValueError: it does not belong here, or one of its fields violates the schema; nothing was added.
        """
        rank, world_size = self.header.rank, self.header.world_size
        if line.rank != rank or line.world_size != world_size:
            raise ValueError(
                f"a step of rank {line.rank} of {line.world_size} in the record of rank {rank} of {world_size}"
            )
        open_metrics = line.open_bounds() if line.bounds else {}
        reason = self.reasons[_reasons(line, open_metrics) if open_metrics else bytes(line.reasons_json)]
        coverage = self.coverages[bytes(line.coverage_json)]
        has_ranges = bool(line.ranges_json)
        if has_ranges:
            _check_times(line)
        if line.waits_json or line.ready_json:
            _ = line.waits, line.ready
        gradient_order = tuple(line.gradient_order) if line.gradient_order_json else ()
        if line.device_json:
            _ = line.device
            self.sample_lines.append(offset)
        elif line.rocm_smi_t_ns is not None and samples_from_text(self.header):
            mono_ns(line.rocm_smi_t_ns, line.t_start_ns, line.start_mono_ns)
            self.sample_lines.append(offset)
        if line.phase != "train":
            wall_ns = line.end_mono_ns - line.start_mono_ns
            self.isolated.extend((PHASES.index(line.phase), line.warmup, wall_ns, reason, coverage))
            compute_ms = line.overlap.get("compute_ms")
            self.isolated_compute_ms.append(float("nan") if compute_ms is None else compute_ms)
            return
        if self.contents is not None:
            self.contents.add(contents_of(line.compute, line.aux, line.stalls, line.waits, line.ready))
        if has_ranges:
            self.mark_lines.append(offset)
        self.gradient_order = self.gradient_order or gradient_order
        names = tuple(line.overlap)
        places, values = self.metrics_by_names.get(names) or self._new_names(number, names)
        places.append(len(self.scalars))
        values.append(tuple(line.overlap.values()))
        for name, ends in open_metrics.items():
            self.open_metrics.setdefault(name, array("d")).extend((len(self.by_kernels), *ends))
        self.by_kernels.append(line.measured_by is not None)
        self.row_total += len(line.collective_rows)
        self.scalars.append((*_scalars_of(line), offset, reason, coverage, self.row_total))
        self.losses.append(_losses_of(line))
        self.rows += line.collective_rows
        if len(self.scalars) >= BLOCK_STEPS or len(self.rows) >= 100 * BLOCK_STEPS:
            self.flush()

    def _new_names(self, number: int, names: tuple[str, ...]) -> tuple[list[int], list[tuple[float | None, ...]]]:
        self.metric_names.update(dict.fromkeys(names))
        if len(self.metric_names) > METRIC_LIMIT:
            raise InputError(
                f"{self.path.name}:{number}: more than {METRIC_LIMIT} different metrics in one record: this is not a "
                f"record of AORTA (in {self.path.parent})"
            )
        return self.metrics_by_names.setdefault(names, ([], []))

    def flush(self) -> None:
        """Turn the steps added since the last call into arrays."""
        if not self.scalars:
            return
        of_names = self.metrics_by_names.items()
        metrics = [(names, places, np.array(values, np.float64)) for names, (places, values) in of_names]
        integers = np.array(self.scalars, np.int64).T
        self.blocks.append((integers, np.array(self.losses, np.float64).T, self._rows(), metrics))
        self.scalars, self.losses, self.rows, self.metrics_by_names = [], [], [], {}

    def _rows(self) -> Ints:
        table = np.empty((len(_ROW), len(self.rows)), np.int64)
        if self.rows:
            kind, group, seq, size, dtype, issue, start, end, source, backend_end = zip(*self.rows, strict=True)
            table[0] = list(map(self.names.__getitem__, zip(kind, group, size, dtype, source, strict=True)))
            for place, column in enumerate((seq, issue, start, end, backend_end), start=1):
                try:
                    table[place] = column
                except TypeError:  # a null among them
                    table[place] = [NO_TIME if value is None else value for value in column]
        return table

    def finish(self, footer: Footer | None, problems: Problems) -> RankTables:
        """Return the tables of everything added, in order of global step, each step once."""
        self.flush()
        integers: Ints = _side_by_side([block[0] for block in self.blocks], np.empty((len(_INTEGERS), 0), np.int64))
        losses: Floats = _side_by_side([block[1] for block in self.blocks], np.empty((len(LOSSES), 0)))
        rows: Ints = _side_by_side([block[2] for block in self.blocks], np.empty((len(_ROW), 0), np.int64))
        trained = integers.shape[1]
        bounds = {name: _ends(found, trained) for name, found in self.open_metrics.items()}
        metrics = self._metrics(trained, bounds)
        self.blocks = []
        read = trained + len(self.isolated_compute_ms)
        by_kernels = np.array(self.by_kernels, bool)
        number = integers[_INTEGERS.index("global_step")]
        if np.any(number[1:] <= number[:-1]):
            _, chosen = np.unique(number, return_index=True)  # the first of equals
            integers, rows = _reordered(integers, rows, chosen)
            losses, metrics = losses[:, chosen], metrics[:, chosen]
            bounds, by_kernels = {name: ends[:, chosen] for name, ends in bounds.items()}, by_kernels[chosen]
            if self.contents is not None:
                self.contents.take(chosen)
        texts = problems.as_sentences()
        name = self.path.name
        if footer is None:
            texts.append(no_footer(self.path))
        if (repeated := trained - integers.shape[1]) > 0:
            texts.append(f"{name}: {repeated} step(s) repeat a global step; the first of each is used")
        if footer is not None and footer.steps_written != read:
            texts.append(f"{name}: its footer counts {footer.steps_written} steps, {read} could be read")
        columns = dict(zip(_INTEGERS, integers, strict=True))
        line_offset = columns.pop("line_offset")
        names = tuple(CollectiveName(*name) for name in self.names)
        collectives = Collectives(names, rows[0].astype(np.int32), *rows[1:])
        steps = Steps(
            **{**columns, "warmup": columns["warmup"] != 0},
            reasons=tuple(self.reasons.values_),
            coverages=tuple(self.coverages.values_),
            metrics=dict(zip(self.metric_names, metrics, strict=True)),
            losses=dict(zip(LOSSES, losses, strict=True)),
            bounds={name: (low, high) for name, (low, high) in bounds.items()},
            by_kernels=by_kernels if by_kernels.any() else None,
        )
        source = source_of(self.path, self.header, footer)
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
                line_offset,
                self.sample_lines,
                (self.header.local_rank, self.header.world_size),
                self.mark_lines,
            ),
            contents=self.contents,
            isolated=self._isolated(),
            gradient_order=self.gradient_order,
            covered=coverage_facts(steps, collectives, footer),
            problems=tuple(texts),
            calibrations=tuple(self.calibrations),
            calibration_plan=self.header.calibration,
        )

    def _isolated(self) -> IsolatedSteps | None:
        if not self.isolated:
            return None
        phase, warmup, wall_ns, reason, coverage = np.array(self.isolated, np.int64).reshape(-1, len(_ISOLATED)).T
        compute_ms = np.array(self.isolated_compute_ms, np.float64)
        return IsolatedSteps(phase, warmup != 0, wall_ns, reason, coverage, compute_ms)

    def _metrics(self, steps: int, bounds: Mapping[str, Floats]) -> Floats:
        """Return one row per name. A kind that a step does not mention was not used in it and is 0, unless kinds are
        null for another reason than that their times are open.
        """
        place = {name: index for index, name in enumerate(self.metric_names)}
        table = np.full((len(place), steps), np.nan)
        start = 0
        for integers, _, _, buckets in self.blocks:
            for names, places, values in buckets:
                at = np.array(places) + start
                if "comm_ms" in names:
                    seen = []
                    for witness in KINDS_KNOWN:
                        if witness in names:
                            known = values[:, names.index(witness)]
                            least = bounds[witness][0, at] if witness in bounds else known
                            seen.append(np.where(np.isnan(known), least, known))
                    unused = of_unused_kind(seen)
                    for name in place.keys() & KIND_METRICS - set(names):
                        table[place[name], at] = unused
                for column, name in enumerate(names):
                    table[place[name], at] = values[:, column]
            start += integers.shape[1]
        return table


class _Decoded(dict[bytes, int], Generic[Value]):
    """Numbers the distinct texts of a field and decodes each once: `values_[number]` is the value. Most steps have the
    same text as the one before.

    Raises:
        ValueError: on looking up a text that is not of the type.
    """

    def __init__(self, type_: type[Value]) -> None:
        super().__init__()
        self._decoder = msgspec.json.Decoder(type_)
        self.values_: list[Value] = []

    def __missing__(self, text: bytes) -> int:
        try:
            self.values_.append(self._decoder.decode(text))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"not a line of this schema ({error})") from error
        self[text] = number = len(self)
        return number


def _reasons(line: StepLine, names: Collection[str]) -> bytes:
    """Return the `reasons` of a step with one reason for all these metrics, whose own have the numbers of the step: so
    that distinct texts stay few.
    """
    return msgspec.json.encode(line.reasons | dict.fromkeys(names, HOST_BOUND))


def _check_times(line: StepLine) -> None:
    """Check the ranges of a step.

    Raises:
        ValueError: they violate the schema, or a number exceeds what a column holds.
    """
    numbers = [number for row in line.ranges for number in (row.thread, row.depth, row.start_ns, row.end_ns)]
    if any(not -(2**61) < number < 2**61 for number in numbers):
        raise ValueError("a number in its ranges exceeds what a column holds")


class _Names(dict[tuple[Any, ...], int]):
    """Numbers the distinct names of collectives in order of appearance."""

    def __missing__(self, name: tuple[Any, ...]) -> int:
        self[name] = number = len(self)
        return number


def _ends(values: array[float], steps: int) -> Floats:
    """Return at least and at most in each step; NaN where marks leave nothing open."""
    place, low, high = np.array(values, np.float64).reshape(-1, 3).T
    ends = np.full((2, steps), np.nan)
    ends[:, place.astype(np.int64)] = low, high
    return ends


def _side_by_side(blocks: list[npt.NDArray[Any]], none: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.concatenate([none, *blocks], axis=1)


def _reordered(steps: Ints, rows: Ints, chosen: npt.NDArray[np.intp]) -> tuple[Ints, Ints]:
    """Return the chosen steps (columns of `steps`), in that order, and their rows."""
    rows_end = _INTEGERS.index("rows_end")
    starts = np.concatenate([[0], steps[rows_end, :-1]])
    parts = [rows[:, starts[at] : steps[rows_end, at]] for at in chosen]
    steps = steps[:, chosen].copy()
    steps[rows_end] = np.cumsum([part.shape[1] for part in parts])
    return steps, np.concatenate([rows[:, :0], *parts], axis=1)
