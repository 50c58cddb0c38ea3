"""Detects the format of trace files, and groups those that one process wrote into units, to be read together.

Two parts. *Units*: `find_units` lists those of a directory, glob or URL; `read_unit` yields the traces of one, one
after the other. *Formats*: the first inflated bytes, for SQLite the path, give the name of a format or None.

Must not: read a whole file for its format, or any only to find out that it is not wanted, judge a format by the file's
name, or take two files of one process and run for two ranks.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from aorta.analysis.load.interval_table import Trace
from aorta.analysis.load.kernel_classifier import NameClassifier
from aorta.analysis.load.kineto.kineto_reader import read_kineto
from aorta.analysis.load.nsys import read_nsys
from aorta.analysis.load.open import Peekable, is_tar, is_url, local_copy, members, opened, reading
from aorta.analysis.load.rocpd import read_rocpd, read_rpd
from aorta.analysis.load.rocprof_csv import read_csv, siblings
from aorta.analysis.load.rocprof_json import read_json
from aorta.analysis.load.sqlite import Database
from aorta.errors import InputError
from aorta.records.files import remote_files
from aorta.records.schema import Header

AORTA: Final = "aorta"
TAR: Final = "tar"
KINETO: Final = "kineto"
KNOWN: Final = (
    "an AORTA run folder, Kineto traces (.json, .json.gz, .tar.gz), rocprofv3 output (JSON, CSV, rocpd database), RPD, "
    "or an nsys SQLite export"
)
_SQLITE: Final = b"SQLite format 3\x00"
_CHROME: Final = re.compile(
    rb'"(traceEvents|schemaVersion|deviceProperties|distributedInfo|baseTimeNanoseconds|displayTimeUnit)"\s*:'
)
_BARE_EVENTS: Final = re.compile(rb'\[\s*\{[^{}]{0,2000}"ph"\s*:')
_HINTS: Final = (
    (b"PK\x03\x04", "a zip archive: unpack it"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd: unpack it"),
    (b"\xfd7zXZ", "compressed by xz: unpack it"),
    (b"BZh", "compressed by bzip2: unpack it"),
    (b"QDSTRM", "nsys' own format: convert it with `nsys export --type sqlite`"),
    (b"NVIDIA Tegra", "nsys' own format: convert it with `nsys export --type sqlite`"),
    (b"OTF2", "OTF2: record with `rocprofv3 --output-format rocpd` or convert the rocpd database"),
)


_OTHERS: Final = (
    (
        rb'"CommHash"|"cat": ?"(?:COLL|PROXY|GROUP)"',
        "of NCCL's profiler plugin, which has the host's times of collectives and no kernels: record with "
        "torch.profiler or nsys",
    ),
    (rb'"/device:GPU|"hlo_op"|"hlo_module"', "a JAX/XLA trace, which is not read: record with nsys or rocprofv3"),
    (
        rb'"Ascend Hardware"|"AI_CORE"|"hcom_',
        "an Ascend trace (torch_npu), whose devices are not read: AORTA reads those of NVIDIA and AMD",
    ),
    (rb'"BeginNs"', "of rocprof (v1), whose JSON is not read: record with rocprofv3 --output-format rocpd"),
)
"""Chrome traces of other tools, by what their first bytes hold and Kineto's never do."""


def detect(head: bytes) -> str | None:
    """Detect the format of a file that begins with `head`.

    Returns:
        `aorta`, `tar`, `sqlite`, `kineto`, `rocprofv3-json` or `rocprofv3-csv`; None for anything else.
    """
    if head.startswith(_SQLITE):
        return "sqlite"
    if is_tar(head):
        return TAR
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text[:1] in (b"{", b"["):
        return _json(text)
    first = text.split(b"\n", 1)[0].lower()
    names = (b"start_timestamp", b"end_timestamp", b"kernel_name")
    # Counter collection serialises kernels (W17): its times say nothing about overlap.
    return "rocprofv3-csv" if all(name in first for name in names) and b"counter_name" not in first else None


def _json(text: bytes) -> str | None:
    first = text.split(b"\n", 1)[0]
    if re.search(rb'"record"\s*:\s*"header"', first[:4096]):
        return AORTA
    if b'"rocprofiler-sdk-tool"' in text[:4096]:
        return "rocprofv3-json"
    if _CHROME.search(text) or _BARE_EVENTS.match(text):
        return KINETO
    return None


def detect_database(path: Path, place: str) -> str | None:
    """Return `rpd`, `rocpd` or `nsys` for a SQLite file; None for any other.

    Raises:
        InputError: it cannot be read.
    """
    with closing(Database(path, place)) as found:
        if "rocpd_op" in found.tables:
            return "rpd"
        if any(name.startswith("rocpd_") for name in found.tables):
            return "rocpd"
        if "StringIds" in found.tables or any(name.startswith("CUPTI_") for name in found.tables):
            return "nsys"
    return None


def hint(head: bytes) -> str:
    """Return what an unknown file seems to be, and what to do about it; empty where nothing is known."""
    if head.startswith(b"\n") and b"\x00" in head:
        return "; it is binary, such as Perfetto's protobufs: export a Kineto trace as JSON, or use nsys or rocprofv3"
    if b'"schemaVersion"' not in head:
        for pattern, words in _OTHERS:
            if re.search(pattern, head):
                return f"; it is {words}"
    return next((f"; it is {words}" for magic, words in _HINTS if head.startswith(magic)), "")


_SAME_PROCESS: Final = re.compile(r"_(results\.(json|db)|kernel_trace\.csv)(\.gz)?$")
"""Files in which rocprofv3 writes the same kernels of one process in several formats."""
_PREFERRED: Final = ("rocpd", "rocprofv3-json", "rocprofv3-csv")
LARGEST_FOLDER: Final = 100_000

StreamReader: TypeAlias = Callable[[Peekable, str, NameClassifier, Sequence[Header]], Iterable[Trace]]
"""Inflated text, where it stands, how kernels are named, and headers of AORTA's records near it -> its traces."""
_OF_STREAMS: Final[Mapping[str, StreamReader]] = {
    KINETO: lambda stream, place, classifier, _headers: [read_kineto(stream, place, classifier)],
    "rocprofv3-json": read_json,
}
"""Format -> its reader: a new one is registered here, and `detect`."""
_OF_DATABASES: Final = {"rpd": read_rpd, "rocpd": read_rocpd, "nsys": read_nsys}


class NoTraces(InputError):
    """There are files, but none of them is a trace."""


@dataclass(frozen=True)
class TraceFiles:
    """The files written by one process."""

    files: tuple[str, ...]
    format: str
    comm_patterns: tuple[str, ...] = ()
    headers: tuple[Header, ...] = ()

    def size_bytes(self) -> int:
        """Return the size of its first file; 0 where that is not a local file."""
        try:
            return Path(self.files[0]).stat().st_size
        except OSError:
            return 0

    def absolute(self) -> TraceFiles:
        """Return the same with absolute paths, for workers with another working directory."""
        files = tuple(file if is_url(file) else str(Path(file).absolute()) for file in self.files)
        return TraceFiles(files, self.format, self.comm_patterns, self.headers)


def find_units(
    location: str, comm_patterns: Sequence[str] = (), headers: Sequence[Header] = ()
) -> tuple[list[TraceFiles], list[str]]:
    """Return the units of a location in the order of their names, and notes about files that were left out.

    Raises:
        InputError: nothing is there, or nothing that is a trace.
    """
    named, folder = _files(location)
    units: dict[str, TraceFiles] = {}
    notes: list[str] = []
    unknown: list[str] = []
    records = False
    for file in named:
        try:
            found, words = _format(file)
        except InputError as error:
            if not folder:
                raise
            notes.append(str(error))
            continue
        if found is None or found == AORTA:
            records = records or found == AORTA
            unknown.append(f"{file}{words}")
            continue
        unit = TraceFiles(_together(file, found), found, tuple(comm_patterns), tuple(headers))
        process = _SAME_PROCESS.sub("", file) if found in _PREFERRED else file
        rival = units.get(process)
        if rival is not None and _PREFERRED.index(rival.format) <= _PREFERRED.index(found):
            notes.append(f"{file}: the same process as {rival.files[0]}, which is used")
        else:
            if rival is not None:
                notes.append(f"{rival.files[0]}: the same process as {file}, which is used")
            units[process] = unit
    if not units:
        if records:
            raise NoTraces(f"{location}: a run without profiler traces; record them with profiling.enabled=true")
        seen = "; ".join([*notes, *unknown][:5]) or "no files"
        raise NoTraces(f"{location}: nothing that can be read as a trace ({seen}). Expected {KNOWN}")
    if not folder:
        notes += [f"{file}: not a trace" for file in unknown]
    return list(units.values()), notes


def read_unit(unit: TraceFiles) -> Iterator[Trace]:
    """Yield every trace of a unit, one in memory at a time.

    Raises:
        InputError: a file cannot be read, is damaged, or holds nothing.
    """
    classifier = NameClassifier(unit.comm_patterns)
    place = unit.files[0]
    if unit.format in _OF_DATABASES:
        with local_copy(place) as path:
            yield from _OF_DATABASES[unit.format](path, place, classifier, unit.headers)
        return
    with ExitStack() as stack:
        streams = {file: stack.enter_context(opened(file)) for file in unit.files}
        with reading(place):
            if unit.format == "rocprofv3-csv":
                yield from read_csv(streams, classifier, unit.headers)
            else:
                yield from _read_stream(streams[place], unit.format, place, classifier, unit.headers)


def _read_stream(
    stream: Peekable, form: str, place: str, classifier: NameClassifier, headers: Sequence[Header]
) -> Iterator[Trace]:
    if form == TAR:
        seen = 0
        for where, content in members(stream, place):
            inner = detect(content.head())
            if inner is not None and inner in _OF_STREAMS:
                seen += 1
                yield from _read_stream(content, inner, where, classifier, headers)
        if not seen:
            raise InputError(f"{place}: an archive without a trace in it; expected Kineto traces")
    else:
        yield from _OF_STREAMS[form](stream, place, classifier, headers)


def _files(location: str) -> tuple[list[str], bool]:
    """Return files of a location, and whether they were searched for; unrelated files beside them are then no error."""
    if is_url(location):
        return _remote(location)
    path = Path(location)
    if path.is_dir():
        return _walk(path), True
    if path.exists():
        return [location], False
    if any(mark in location for mark in "*?["):
        matched = sorted(glob.glob(location, recursive=True))  # noqa: PTH207
        files = [file for match in matched for file in (_walk(Path(match)) if Path(match).is_dir() else [match])]
        if files:
            return files, True
        raise InputError(f"{location}: no file matches")
    raise InputError(f"{location}: No such file or directory; expected {KNOWN}")


def _walk(folder: Path) -> list[str]:
    found: list[str] = []
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [str(Path(parent, name)) for name in sorted(files) if not name.startswith(".")]
        if len(found) > LARGEST_FOLDER:
            raise InputError(f"{folder}: more than {LARGEST_FOLDER} files; give the folder of one run")
    return found


def _remote(location: str) -> tuple[list[str], bool]:
    try:
        system, path = remote_files(location).core.url_to_fs(location)
        if any(mark in path for mark in "*?["):
            names = sorted(system.glob(path))
        elif system.isdir(path):
            names = sorted(system.find(path))
        else:
            return [location], False
    except (ImportError, ValueError, OSError) as error:
        raise InputError(f"{location}: cannot be listed: {error}") from error
    if not names:
        raise InputError(f"{location}: no file there")
    return [system.unstrip_protocol(name) for name in names], True


def _format(file: str) -> tuple[str | None, str]:
    with opened(file) as stream, reading(file):
        head = stream.head()
    found = detect(head)
    if found == "sqlite":
        with local_copy(file) as path:
            found = detect_database(path, file)
    if found == KINETO and (words := hint(head)):
        return None, words
    return found, "" if found else hint(head)


def _together(file: str, form: str) -> tuple[str, ...]:
    """Return the file and those that belong to it: rocprofv3 writes one CSV per kind of record, each of which may be
    compressed.
    """
    if form != "rocprofv3-csv" or is_url(file):
        return (file,)
    own = file.removesuffix(".gz")
    beside = ((name, f"{name}.gz") for name in siblings(own) if name != own)
    # `gzip -k` leaves both files; their rows are the same and must be read once.
    return (file, *(there for pair in beside if (there := next((n for n in pair if Path(n).is_file()), None))))
