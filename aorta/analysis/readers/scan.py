"""One record -> compact columns: the map that every process, or every Dask worker, runs on one file at a time.

Enters: a path. Leaves: a `Scan`, picklable: a few facts, and `blob`, the bytes of all its columns. Must not: keep a
step as Python objects for longer than a block of them, or know anything about other ranks.

The blob holds arrays of 8-byte numbers, one behind the other: the integers of the steps (a row a name of `INTEGERS`, a
column a step), their floats (a row a name of `Scan.floats`), the collectives (a row a collective, the columns of
`ROW`), and the steps of the isolated baselines (`readers.isolated`), which are in nothing else. Steps are in order of
`global_step`, each once; collectives in order of issue.
"""

from __future__ import annotations

import gc
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from aorta.analysis.readers.blocks import joined, reordered
from aorta.analysis.readers.coverage import coverage_facts, end_sources
from aorta.analysis.readers.isolated import IsolatedSteps
from aorta.analysis.readers.lean import CollectiveRow, Decoded, LeanStep, check_samples, decode
from aorta.errors import InputError
from aorta.telemetry.reader import Problems, no_footer, raw_lines, read_header, second_header
from aorta.telemetry.schema import Anchor, Coverage, Footer, Header
from aorta.timeline.classes import KINDS

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]

INTEGERS: Final = (
    "epoch",
    "step",
    "global_step",
    "warmup",
    "start_mono_ns",
    "end_mono_ns",
    "t_start_ns",
    "t_end_ns",
    "line_offset",  # bytes from the start of the file to the step's line
    "reasons",  # index into Scan.reasons
    "coverage",  # index into Scan.coverages
    "rows_end",  # collectives of this step and of all before it
)
LOSSES: Final = ("loss", "lr", "grad_norm")
ROW: Final = ("what", "seq", "issue_ns", "start_ns", "end_ns")  # what: index into Scan.whats
NULL: Final = -(2**63)
"""A time that was not seen."""
UNNUMBERED: Final = -2
"""Sequence numbers from here down are of collectives that a source does not number: they match no other rank's."""
What: TypeAlias = tuple[str, str, int, "str | None", "str | None"]
"""Kind, group, bytes, dtype, end source."""

BLOCK_STEPS: Final = 256
"""Steps held as Python objects before they become columns."""
METRIC_LIMIT: Final = 512
"""Metrics a record may name. This AORTA writes 45 at most; a record that names a new one each step would not fit."""
KIND_METRICS: Final = frozenset(
    name for kind in KINDS for name in (f"{kind}_ms", f"compute_{kind}_ms", f"exposed_{kind}_ms")
)
KINDS_KNOWN: Final = ("comm_ms", "allreduce_ms")
"""Where one of these is null, so is a kind that a step does not mention: the second stands in every step."""
_SCALARS: Final = attrgetter(*INTEGERS[:8])
_LOSSES: Final = attrgetter(*LOSSES)


@dataclass(frozen=True)
class Scan:
    """What one file holds. `problems` are sentences with `file:line`; `footer` is None after a kill."""

    path: Path
    header: Header
    footer: Footer | None
    problems: tuple[str, ...]
    step_count: int
    row_count: int
    read_count: int
    """Steps read, with those that repeat another and those of other phases."""
    metrics: tuple[str, ...]
    whats: tuple[What, ...]
    reasons: tuple[Mapping[str, str], ...]
    coverages: tuple[Coverage, ...]
    isolated: Mapping[str, int]
    """Phase other than `train` -> its steps."""
    end_sources: Mapping[str | None, int]
    """How ends were learnt -> collectives whose end was seen, warm-up left out."""
    uncovered: int
    coverage_reasons: Mapping[str, int]
    first_missed: int | None
    """First global step in which fewer or more collectives were seen than issued (R8)."""
    sample_lines: array[int] = field(default_factory=lambda: array("q"))
    """Where the lines begin that hold device samples, in bytes."""
    blob: bytes = b""

    @property
    def floats(self) -> tuple[str, ...]:
        """Names of the float columns."""
        return (*LOSSES, *self.metrics)


def scan(path: Path) -> Scan:
    """Read one record. Memory: the columns and a block of lines.

    Raises:
        InputError: as `telemetry.reader.read_rank`, or the record names more than `METRIC_LIMIT` metrics.
    """
    collecting = gc.isenabled()
    gc.disable()  # nothing here is cyclic, and a block is a million objects to look through again and again
    try:
        return _scan(path)
    finally:
        if collecting:
            gc.enable()


def _scan(path: Path) -> Scan:
    problems = Problems(path.name)
    lines = raw_lines(path, problems)
    header = read_header(path, lines, problems)
    footer: Footer | None = None
    columns = _Columns(path, header.rank, header.world_size)
    for number, offset, text in lines:
        try:
            line = decode(text)
            if isinstance(line, LeanStep):
                columns.add(number, offset, line)
                continue
        except ValueError as error:
            problems.add(number, str(error))
            continue
        if isinstance(line, Footer):
            footer = line
        elif isinstance(line, Header):
            raise second_header(path, number, line)
        else:
            assert isinstance(line, Anchor)
    return columns.finish(header, footer, problems)


@dataclass
class _Columns:
    """Steps of one file on their way to columns."""

    path: Path
    rank: int
    world_size: int
    scalars: list[tuple[Any, ...]] = field(default_factory=list)
    losses: list[tuple[Any, ...]] = field(default_factory=list)
    rows: list[CollectiveRow] = field(default_factory=list)
    named: dict[tuple[str, ...], tuple[list[int], list[tuple[float | None, ...]]]] = field(default_factory=dict)
    names: dict[str, None] = field(default_factory=dict)
    whats: _Whats = field(default_factory=lambda: _Whats())
    reasons: Decoded[dict[str, str]] = field(default_factory=lambda: Decoded(dict[str, str]))
    coverages: Decoded[Coverage] = field(default_factory=lambda: Decoded(Coverage))
    isolated: IsolatedSteps = field(default_factory=IsolatedSteps)
    sample_lines: array[int] = field(default_factory=lambda: array("q"))
    row_total: int = 0
    blocks: list[tuple[Ints, Floats, Ints, list[tuple[tuple[str, ...], list[int], Floats]]]] = field(
        default_factory=list
    )

    def add(self, number: int, offset: int, line: LeanStep) -> None:
        """Take one step in.

        Raises:
            ValueError: it does not belong here, or one of its fields is not of the schema; nothing was taken in.
        """
        if line.rank != self.rank or line.world_size != self.world_size:
            raise ValueError(
                f"a step of rank {line.rank} of {line.world_size} in the record of rank {self.rank} of "
                f"{self.world_size}"
            )
        reason, coverage = self.reasons[bytes(line.reasons)], self.coverages[bytes(line.coverage)]
        if line.device:
            check_samples(bytes(line.device))
            self.sample_lines.append(offset)
        if line.phase != "train":
            self.isolated.add(line, reason, coverage)
            return
        names = tuple(line.overlap)
        places, values = self.named.get(names) or self._new_names(number, names)
        places.append(len(self.scalars))
        values.append(tuple(line.overlap.values()))
        self.row_total += len(line.collectives)
        self.scalars.append((*_SCALARS(line), offset, reason, coverage, self.row_total))
        self.losses.append(_LOSSES(line))
        self.rows += line.collectives
        if len(self.scalars) >= BLOCK_STEPS or len(self.rows) >= 100 * BLOCK_STEPS:
            self.flush()

    def _new_names(self, number: int, names: tuple[str, ...]) -> tuple[list[int], list[tuple[float | None, ...]]]:
        self.names.update(dict.fromkeys(names))
        if len(self.names) > METRIC_LIMIT:
            raise InputError(
                f"{self.path.name}:{number}: more than {METRIC_LIMIT} different metrics in one record: this is not a "
                f"record of AORTA (in {self.path.parent})"
            )
        return self.named.setdefault(names, ([], []))

    def flush(self) -> None:
        """Turn what was taken in into arrays."""
        if not self.scalars:
            return
        metrics = [(names, places, np.array(values, np.float64)) for names, (places, values) in self.named.items()]
        integers = np.array(self.scalars, np.int64).T
        self.blocks.append((integers, np.array(self.losses, np.float64).T, self._rows(), metrics))
        self.scalars, self.losses, self.rows, self.named = [], [], [], {}

    def _rows(self) -> Ints:
        table = np.empty((len(self.rows), len(ROW)), np.int64)
        if self.rows:
            kind, group, seq, size, dtype, *times, source = zip(*self.rows, strict=True)
            table[:, 0] = list(map(self.whats.__getitem__, zip(kind, group, size, dtype, source, strict=True)))
            for place, column in enumerate((seq, *times), start=1):
                try:
                    table[:, place] = column
                except TypeError:  # a null among them
                    table[:, place] = [NULL if value is None else value for value in column]
        return table

    def finish(self, header: Header, footer: Footer | None, problems: Problems) -> Scan:
        """Everything taken in, in order of global step, each once."""
        self.flush()
        integers = joined((block[0] for block in self.blocks), len(INTEGERS))
        losses = joined((block[1] for block in self.blocks), len(LOSSES))
        metrics = self._metrics(integers.shape[1])
        rows = np.concatenate([np.empty((0, len(ROW)), np.int64), *(block[2] for block in self.blocks)])
        trained = integers.shape[1]
        read = trained + len(self.isolated)
        steps = integers[INTEGERS.index("global_step")]
        if np.any(steps[1:] <= steps[:-1]):
            _, chosen = np.unique(steps, return_index=True)  # the first of equals
            integers, rows = reordered(integers, rows, chosen, INTEGERS.index("rows_end"))
            losses, metrics = losses[:, chosen], metrics[:, chosen]
        said = problems.said()
        name = self.path.name
        if footer is None:
            said.append(no_footer(self.path))
        if (repeated := trained - integers.shape[1]) > 0:
            said.append(f"{name}: {repeated} step(s) repeat a global step; the first of each is used")
        if footer is not None and footer.steps_written != read:
            said.append(f"{name}: its footer counts {footer.steps_written} steps, {read} could be read")
        blob = b"".join(part.tobytes() for part in (integers, losses, metrics, rows, *self.isolated.columns()))
        told = dict(zip(INTEGERS, integers, strict=True))
        ended = np.repeat(told["warmup"] == 0, np.diff(told["rows_end"], prepend=0)) & (rows[:, 4] != NULL)
        return Scan(
            path=self.path,
            header=header,
            footer=footer,
            problems=tuple(said),
            step_count=integers.shape[1],
            row_count=len(rows),
            read_count=read,
            metrics=tuple(self.names),
            whats=tuple(self.whats),
            reasons=tuple(self.reasons.values_),
            coverages=tuple(self.coverages.values_),
            isolated=self.isolated.counts(),
            end_sources=end_sources([what[4] for what in self.whats], rows[ended, 0]),
            **coverage_facts(self.coverages.values_, told["coverage"], told["global_step"]),
            sample_lines=self.sample_lines,
            blob=blob,
        )

    def _metrics(self, steps: int) -> Floats:
        """A row a name. A kind that a step does not mention was not used in it: 0, unless kinds are null."""
        place = {name: index for index, name in enumerate(self.names)}
        table = np.full((len(place), steps), np.nan)
        start = 0
        for integers, _, _, buckets in self.blocks:
            for names, places, values in buckets:
                at = np.array(places) + start
                if "comm_ms" in names:
                    known = at[
                        ~np.isnan(values[:, [names.index(name) for name in KINDS_KNOWN if name in names]]).any(1)
                    ]
                    for name in place.keys() & KIND_METRICS - set(names):
                        table[place[name], known] = 0.0
                for column, name in enumerate(names):
                    table[place[name], at] = values[:, column]
            start += integers.shape[1]
        return table


class _Whats(dict[What, int]):
    """Numbers in order of appearance."""

    def __missing__(self, what: What) -> int:
        self[what] = number = len(self)
        return number
