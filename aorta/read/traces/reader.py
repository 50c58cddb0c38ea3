"""What a reader of traces is given and gives, and what is done with it once for every format: rank and steps are found.

A `Reader` (they are listed in `files.READERS`) recognises its files by their first bytes, and gives what each
process recorded: rows of kernels and copies, and the ranges of its code. `trace_of` finds rank and steps of them.

    def read(source: TraceInput) -> Iterator[Trace]:
        rows = kernels(source.origin, source.classifier, names, start_ns=start, end_ns=end, stream=stream)
        yield trace_of(source, "mine", Process(source.origin), [rows], Ranges(from_ns, to_ns, texts))

What a source does not tell is left out: it is `NULL`. The rank comes from the most reliable evidence there is
(docs/dev/trace-readers.md); evidence that allows two ranks gives none. Must not: know a format, guess, take ranks from
the order of process ids or of files, or a step from anything but a marker.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from aorta.errors import InputError
from aorta.read.frames import Numbered
from aorta.read.ledger import COMM, LANES, Gap, lacking
from aorta.read.traces.chrome_json import LARGEST_NS
from aorta.read.traces.interval_table import (
    NO_WINDOWS,
    NULL,
    IntervalClass,
    Intervals,
    NameClassifier,
    Trace,
    Windows,
    concatenate,
    kind_of,
    look_up,
    step_of,
    windows,
)
from aorta.read.traces.open import Database
from aorta.records.record_file import header_of
from aorta.records.run_files import rank_files
from aorta.records.schema import Header
from aorta.redaction import redact
from aorta.timeline.arrays import Int64
from aorta.timeline.classes import COMPUTE

SERIALISED: Final = lacking(
    "hardware counters were collected, for which kernels run one after the other: times and overlap are not those of a "
    "run without counters",
    COMPUTE,
    COMM,
    seen=False,
)
_LIMITS: Final = {"start_ns": (0, LARGEST_NS), "end_ns": (0, LARGEST_NS), "device": (NULL, 2**31 - 1)}


class FileHead(NamedTuple):
    """What tells the format of a file: its first bytes, inflated, without white space before them; of a SQLite database
    the names of its tables too.
    """

    text: bytes
    tables: frozenset[str] = frozenset()


@dataclass(frozen=True)
class TraceInput:
    """The files of one process (or of several, where one file holds them), open.

    Attributes:
        streams: name of a file -> its content, inflated. The first is the one that `Reader.matches` saw.
        headers: of AORTA's records near it, which may tell the rank of a process.
        database: the file, where it is a SQLite database.
    """

    streams: Mapping[str, io.BufferedReader]
    classifier: NameClassifier = field(default_factory=NameClassifier)
    headers: Sequence[Header] = ()
    database: Database | None = None

    @property
    def origin(self) -> str:
        """Where the first file stands; used in messages and as `Trace.path`."""
        return next(iter(self.streams))


class Reader(NamedTuple):
    """A format of traces.

    Attributes:
        name: `Trace.format`.
        files: what messages and docs/traces.md call its files.
        matches: whether a file that begins so is of this format; of no other in `files.READERS`.
        read: gives the traces in the files. Raises `InputError` that names one that is damaged.
        together: file -> the files that the same process wrote, itself first; None where a file is whole by itself.
        process: file -> what is the same for all files of one process: of those, the format that comes first is read.
    """

    name: str
    files: str
    matches: Callable[[FileHead], bool]
    read: Callable[[TraceInput], Iterable[Trace]]
    together: Callable[[str], tuple[str, ...]] | None = None
    process: Callable[[str], str] = str


@dataclass(frozen=True)
class Process:
    """What a trace says about one process; None is unknown.

    Attributes:
        path: of its file, used in messages. Where `shared`, the file holds several, so its path names no rank.
        gpus: the GPUs it used, numbered over all GPUs of the machine (rocprofv3's `logical_node_type_id`).
        all_gpus_visible: no `*_VISIBLE_DEVICES` renumbered them for this process, as far as the trace says.
    """

    path: str
    pid: int | None = None
    host: str | None = None
    environment_rank: int | None = None
    environment_world: int | None = None
    gpus: tuple[int, ...] = ()
    all_gpus_visible: bool | None = None
    shared: bool = False


class Ranges(NamedTuple):
    """Ranges of the code of a process (NVTX, ROCTx), some of which mark steps; a mark is a range of length 0."""

    start_ns: Int64
    end_ns: Int64
    texts: Sequence[str]


def checked(where: str, what: str, columns: Mapping[str, ArrayLike]) -> None:
    """Refuse numbers that do not fit into the interval table. `where` and `what` (the rows) are for the message.

    Raises:
        InputError: an instant (`start_ns`, `end_ns`) is missing (negative) or beyond `LARGEST_NS`, which no clock
            shows, a device has more than 31 bits, or another number more than 64.
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
        columns: of `Intervals`.

    Raises:
        InputError: as `checked`.
    """
    rows = _named(where, "kernel", name, names, columns)
    classes = [classifier.class_of(text) for text in rows.names]
    kinds = [kind_of(text) if classifier.class_of(text) == IntervalClass.COMM else NULL for text in rows.names]
    cls, kind = np.array([*classes, IntervalClass.UNKNOWN]), np.array([*kinds, NULL])  # the last of rows without a name
    return replace(rows, cls=cls[rows.name], kind=kind[rows.name])


def copies(where: str, name: Int64 | Sequence[str], names: Sequence[str] = (), **columns: ArrayLike) -> Intervals:
    """Return rows of memory copies; arguments and errors as `kernels`."""
    return _named(where, "memory copy", name, names, {**columns, "cls": int(IntervalClass.COPY)})


def _named(
    where: str, what: str, name: Int64 | Sequence[str], names: Sequence[str], columns: Mapping[str, ArrayLike]
) -> Intervals:
    checked(where, what, columns)
    if not isinstance(name, np.ndarray):
        codes = Numbered()
        name = np.array([codes[text] if text else NULL for text in name], np.int64)
        names = tuple(codes)
    return Intervals(name=name, names=tuple(names), **columns)  # type: ignore[arg-type]


def trace_of(
    source: TraceInput,
    format: str,  # noqa: A002 - the field's name
    process: Process,
    rows: Sequence[Intervals],
    ranges: Ranges,
    *,
    notes: Sequence[str] = (),
    gaps: Sequence[Gap] = (),
    unsized: str | None = None,
    since_ns: int = 0,
    **facts: Any,
) -> Trace:
    """Return the trace of one process, with its rank, and the steps that its ranges mark.

    Args:
        notes, gaps: of the reader, beside those about rank and steps.
        unsized: the tool, where it does not write sizes of collectives.
        since_ns: zero of the times in rows and ranges, on the clock of the trace.
        facts: further fields of `Trace`.

    Raises:
        InputError: as `checked`, of the ranges.
    """
    checked(source.origin, "range", {"start_ns": ranges.start_ns, "end_ns": ranges.end_ns})
    rank, world_size, of_rank = place(process, source.headers)
    steps, of_steps, gaps_of_steps = step_windows(ranges.texts, ranges.start_ns + since_ns, ranges.end_ns + since_ns)
    table = concatenate(rows)
    start_ns = table.start_ns + since_ns
    table = replace(
        table,
        start_ns=start_ns,
        end_ns=table.end_ns + since_ns,
        launch_ns=np.where(table.launch_ns == NULL, NULL, table.launch_ns + since_ns),
        step=step_of(start_ns, steps),
        names=tuple(map(redact, table.names)),
    )
    communicates = bool((table.cls == IntervalClass.COMM).any())
    no_sizes = (
        f"{unsized} does not record the size, the group or the data type of a collective: bytes and bandwidths are not "
        "available"
    )
    fields: dict[str, Any] = {
        "clock": "unknown",
        "windows": steps,
        "rank": rank,
        "world_size": world_size,
        "host": process.host,
        "backend": "nccl" if communicates else None,
        "gaps": (*gaps_of_steps, *gaps),
        "notes": (*of_rank, *notes, *of_steps, *((no_sizes,) if communicates and unsized else ())),
    }
    return Trace(process.path, format, intervals=table, **(fields | facts))


_MARKS: Final = ("aorta.step=", "iteration#", "ProfilerStep#")
"""What stands before the number, best first: AORTA's own two carry the global step, the third is `torch.profiler`'s
`step()`.
"""
MARK: Final = re.compile(rf"(?P<kind>{'|'.join(map(re.escape, _MARKS))})(?P<step>\d{{1,18}})$")
_FAMILIES: Final = (
    *((mark, re.compile(rf"^{re.escape(mark)}(\d{{1,18}})$")) for mark in _MARKS),
    ("step", re.compile(r"^(?:train(?:ing)?[ _.]?)?(?:step|iter(?:ation)?)[ _:=#]{1,2}(\d{1,18})$", re.IGNORECASE)),
)
"""Families of step markers; where a trace holds several, the first one here is used."""


def step_windows(
    texts: Sequence[str], start_ns: Int64, end_ns: Int64
) -> tuple[Windows, tuple[str, ...], tuple[Gap, ...]]:
    """Return the windows of the steps that ranges mark, notes about them, and gaps where most run twice at once. Ranges
    of length 0 are no windows (a mark, or a range still open when the recording ended). Of several ranges of one step
    the earliest counts.
    """
    family, pattern = next(
        (family_pattern for family_pattern in _FAMILIES if any(map(family_pattern[1].match, texts))), _FAMILIES[0]
    )
    matches = [pattern.match(text) for text in texts]
    numbers = np.array([int(match[1]) if match else NULL for match in matches], np.int64)
    used = np.flatnonzero((numbers != NULL) & (end_ns > start_ns))
    if not len(used):
        return NO_WINDOWS, ("no step markers: one window from the first to the last record",), ()
    used = used[np.argsort(start_ns[used], kind="stable")]
    first = used[np.unique(numbers[used], return_index=True)[1]]
    repeated = len(used) - len(first)
    notes = (f"{repeated} marker(s) {family}N repeat a step; the first of each is used",) if repeated else ()
    again = np.setdiff1d(used, first)
    at_once = start_ns[again] < look_up(numbers[again], numbers[first], end_ns[first])
    why = "steps run at the same time as others of their number, so several processes are in one trace"
    gaps = lacking(why, *LANES, seen=False) if 2 * np.count_nonzero(at_once) > len(first) else ()
    return windows(numbers[first], start_ns[first], end_ns[first]), notes, gaps


RANK_IN_PATH: Final = re.compile(r"(?<![a-z])rank[_-]?(\d{1,7})(?!\d)", re.IGNORECASE)
LARGEST_RANK: Final = 2**31 - 1


def headers_in(folders: Iterable[Path]) -> tuple[Header, ...]:
    """Return headers of the records directly in some folders; files that cannot be read are left out."""
    headers = []
    for path in (path for folder in folders for path in rank_files(folder)):
        with suppress(InputError):
            headers.append(header_of(path))
    return tuple(headers)


def headers_near(location: str) -> tuple[Header, ...]:
    """Return the headers of the records in the folder of a local file (or the folder itself) and the two above it: a
    trace is often kept below the run it belongs to. A URL or a glob has none.
    """
    path = Path(location)
    if "://" in location or not path.exists():
        return ()
    own = path.absolute() if path.is_dir() else path.absolute().parent
    return headers_in([own, *own.parents[:2]])


def place(process: Process, headers: Sequence[Header] = ()) -> tuple[int, int | None, tuple[str, ...]]:
    """Return the rank of one process: from its environment, then `rank<k>` in its path, then the record with its
    process id, then the one GPU it used where local ranks and GPUs correspond.

    Returns:
        The rank, `NULL` where it is unknown; the world size; and notes: why, or which evidence was overruled.
    """
    pid, gpus, host = process.pid, process.gpus, process.host and process.host.split(".")[0]
    # Process ids and GPUs repeat on other machines: the host must agree where both know it.
    here = [header for header in headers if not host or not header.host or header.host.split(".")[0] == host]
    by_pid = [header for header in here if pid is not None and header.pid == pid]
    by_gpu = [header for header in here if header.host and len(gpus) == 1 and header.local_rank == gpus[0]]
    stated, gpu = process.environment_rank, f"GPU {', '.join(map(str, gpus))}"
    evidence = (
        ("its environment says RANK", {stated} if stated is not None and 0 <= stated <= LARGEST_RANK else set[int]()),
        ("its path says rank", set() if process.shared else ranks_in_path(process.path)),
        (f"the record with process id {pid} says rank", {header.rank for header in by_pid}),
        (
            f"{gpu} belongs to local rank of rank",
            {header.rank for header in by_gpu} if process.all_gpus_visible and host else set(),
        ),
    )
    usable = [(words, ranks) for words, ranks in evidence if ranks]
    world = process.environment_world or next((header.world_size for header in by_pid), None)
    if not usable:
        seen = [f"process {pid}" if pid is not None else "no process id", *([gpu] if gpus else [])]
        path = "a path that several processes share" if process.shared else "no rank<k> in its path"
        give = "" if process.shared else ", or put rank<k> into the path"
        why = (
            f"{process.path}: rank not known ({', '.join(seen)}): no RANK in its environment, {path}, no record with "
            f"its process id. Give the folder of the records{give}"
        )
        return NULL, world, (why,)
    words, ranks = usable[0]
    if len(ranks) > 1:
        why = f"{process.path}: rank not known: {words} {', '.join(map(str, sorted(ranks)))}: ambiguous"
        return NULL, world, (why,)
    (rank,) = ranks
    against = [f"{other} {', '.join(map(str, sorted(ranks)))}" for other, ranks in usable[1:] if rank not in ranks]
    notes = tuple(f"{process.path}: taken as rank {rank} ({words} {rank}), although {doubt}" for doubt in against)
    return rank, world, notes


def ranks_in_path(path: str) -> set[int]:
    """Return the ranks that folder and file names state as `rank<k>`. The component nearest to the file decides;
    several different ranks in that one component are all returned.
    """
    for part in reversed(PurePath(path).parts):
        if ranks := {rank for text in RANK_IN_PATH.findall(part) if (rank := int(text)) <= LARGEST_RANK}:
            return ranks
    return set()
