"""What a reader of traces is given and gives, and what is done with it once for every format.

A `Reader` (they are listed in `trace_files.READERS`) recognises its files by their first bytes, and gives what each
process recorded: rows of kernels and copies, and the ranges of its code. `trace_of` finds rank and steps of them.

    def read(source: Source) -> Iterator[Trace]:
        rows = kernels(source.place, source.classifier, names, start_ns=start, end_ns=end, stream=stream)
        yield trace_of(source, "mine", Process(source.place), [rows], Ranges(from_ns, to_ns, texts))

What a source does not tell is left out: it is `NULL`. Must not: know a format, or guess.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from aorta.analysis.load.interval_table import (
    NULL,
    Interner,
    IntervalClass,
    Intervals,
    Trace,
    concatenate,
    intervals,
    step_of,
)
from aorta.analysis.load.kernel_classifier import NameClassifier, step_windows
from aorta.analysis.load.microseconds import LARGEST_NS
from aorta.analysis.load.rank_inference import Process, place
from aorta.analysis.load.sqlite import Database
from aorta.errors import InputError
from aorta.records.schema import Header
from aorta.timeline.arrays import Int64

_LIMITS: Final = {"start_ns": (0, LARGEST_NS), "end_ns": (0, LARGEST_NS), "device": (NULL, 2**31 - 1)}


class Head(NamedTuple):
    """What tells the format of a file: its first bytes, inflated, without white space before them; of a SQLite database
    the names of its tables too.
    """

    text: bytes
    tables: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Source:
    """The files of one process (or of several, where one file holds them), open.

    Attributes:
        streams: place of a file -> its content, inflated. The first is the one that `Reader.matches` saw.
        headers: of AORTA's records near it, which may tell the rank of a process.
        database: the file, where it is a SQLite database.
    """

    streams: Mapping[str, io.BufferedReader]
    classifier: NameClassifier = field(default_factory=NameClassifier)
    headers: Sequence[Header] = ()
    database: Database | None = None

    @property
    def place(self) -> str:
        """Where the first file stands; used in messages and as `Trace.path`."""
        return next(iter(self.streams))


class Reader(NamedTuple):
    """A format of traces.

    Attributes:
        name: `Trace.format`.
        files: what messages and docs/traces.md call its files.
        matches: whether a file that begins so is of this format; of no other in `trace_files.READERS`.
        read: gives the traces in the files. Raises `InputError` with the place where one is damaged.
        together: file -> the files that the same process wrote, itself first; None where a file is whole by itself.
        process: file -> what is the same for all files of one process: of those, the format that comes first is read.
    """

    name: str
    files: str
    matches: Callable[[Head], bool]
    read: Callable[[Source], Iterable[Trace]]
    together: Callable[[str], tuple[str, ...]] | None = None
    process: Callable[[str], str] = str


class Ranges(NamedTuple):
    """Ranges of the code of a process (NVTX, ROCTx), some of which mark steps; a mark is a range of length 0."""

    start_ns: Int64
    end_ns: Int64
    texts: Sequence[str]


NO_RANGES: Final = Ranges(np.zeros(0, np.int64), np.zeros(0, np.int64), ())


def checked(where: str, what: str, columns: Mapping[str, ArrayLike]) -> None:
    """Refuse instants (`start_ns`, `end_ns`) that no clock shows, and numbers that do not fit into the interval table.

    Args:
        where: the file, and what the rows are, both for the message.

    Raises:
        InputError: an instant is missing (negative) or beyond `LARGEST_NS`, a device has more than 31 bits, or another
            number more than 64.
    """
    for name, values in columns.items():
        least, most = _LIMITS.get(name, (-(2**63), 2**63 - 1))
        column = np.atleast_1d(np.asarray(values))
        wrong = np.flatnonzero((column < least) | (column > most))
        if len(wrong):
            row = int(wrong[0])
            unit = " ns" if name.endswith("_ns") else ""
            raise InputError(
                f"{where}: {what} {row + 1}: its {name.removesuffix('_ns')} is {int(column[row])}{unit}; from "
                f"{max(least, 0)} to {most} is possible ({len(wrong)} such row(s)). Is the file damaged?"
            )


def kernels(
    where: str, classifier: NameClassifier, name: Int64 | Sequence[str], names: Sequence[str] = (), **columns: ArrayLike
) -> Intervals:
    """Return rows of kernels: classes, and kinds of collectives, by their names.

    Args:
        name: the name of each row, "" where it has none: its class is unknown. Or an index into `names`, or `NULL`.
        columns: of `interval_table.intervals`.

    Raises:
        InputError: as `checked`.
    """
    checked(where, "kernel", columns)
    codes, names = _coded(name, names)
    classes, kinds = classifier.kernels(names)
    cls, kind = np.append(classes, np.int8(IntervalClass.UNKNOWN)), np.append(kinds, np.int8(NULL))
    return intervals(cls=cls[codes], kind=kind[codes], name=codes, names=names, **columns)  # type: ignore[arg-type]


def copies(where: str, name: Int64 | Sequence[str], names: Sequence[str] = (), **columns: ArrayLike) -> Intervals:
    """Return rows of memory copies; arguments and errors as `kernels`."""
    checked(where, "memory copy", columns)
    codes, names = _coded(name, names)
    return intervals(cls=np.int8(IntervalClass.COPY), name=codes, names=names, **columns)  # type: ignore[arg-type]


def _coded(name: Int64 | Sequence[str], names: Sequence[str]) -> tuple[Int64, Sequence[str]]:
    if isinstance(name, np.ndarray):
        return name, names
    found = Interner()
    return np.array([found(text) if text else NULL for text in name], np.int64), found.strings


def trace_of(
    source: Source,
    format: str,  # noqa: A002 - the field's name
    process: Process,
    rows: Sequence[Intervals],
    ranges: Ranges = NO_RANGES,
    *,
    notes: Sequence[str] = (),
    unsized: str | None = None,
    since_ns: int = 0,
    **facts: Any,
) -> Trace:
    """Return the trace of one process, with its rank, and the steps that its ranges mark.

    Args:
        notes: of the reader, beside those about rank and steps.
        unsized: the tool, where it does not write sizes of collectives.
        since_ns: zero of the times in rows and ranges, on the clock of the trace.
        facts: further fields of `Trace`.

    Raises:
        InputError: as `checked`, of the ranges.
    """
    checked(source.place, "range", {"start_ns": ranges.start_ns, "end_ns": ranges.end_ns})
    placed = place(process, source.headers)
    steps, of_steps = step_windows(ranges.texts, ranges.start_ns + since_ns, ranges.end_ns + since_ns)
    table = concatenate(rows)
    start_ns = table.start_ns + since_ns
    table = replace(
        table,
        start_ns=start_ns,
        end_ns=table.end_ns + since_ns,
        launch_ns=np.where(table.launch_ns == NULL, NULL, table.launch_ns + since_ns),
        step=step_of(start_ns, steps),
    )
    communicates = bool((table.cls == IntervalClass.COMM).any())
    no_sizes = (
        f"{unsized} does not record the size, the group or the data type of a collective: bytes and bandwidths are not "
        "available"
    )
    fields: dict[str, Any] = {
        "clock": "unknown",
        "windows": steps,
        "rank": placed.rank,
        "world_size": placed.world_size,
        "host": process.host,
        "backend": "nccl" if communicates else None,
        "notes": (*placed.notes, *notes, *of_steps, *((no_sizes,) if communicates and unsized else ())),
    }
    return Trace(process.path, format, intervals=table, **(fields | facts))
