"""Finds trace files, groups those that one process wrote into units, and reads a unit.

`READERS` is the one list of formats. `find_units` lists the units of a directory, glob or URL; `read_unit` yields the
traces of one. Must not: read a whole file for its format, judge a format by the file's name, or take two files of one
process and run for two ranks.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from aorta.errors import InputError
from aorta.read.traces.interval_table import NameClassifier, Trace
from aorta.read.traces.kineto.trace import read_kineto
from aorta.read.traces.nsys import NSYS
from aorta.read.traces.open import (
    DEEPEST,
    MOST_NAMES,
    SQLITE_MAGIC,
    Database,
    is_tar,
    is_url,
    local_copy,
    members,
    opened,
    reading,
)
from aorta.read.traces.reader import FileHead, Reader, TraceInput
from aorta.read.traces.rocprof.rocpd import ROCPD, RPD
from aorta.read.traces.rocprof.text_files import ROCPROF_CSV, ROCPROF_JSON
from aorta.records.files import remote_files
from aorta.records.schema import Header

_CHROME: Final = re.compile(
    rb'"(traceEvents|schemaVersion|deviceProperties|distributedInfo|baseTimeNanoseconds|displayTimeUnit)"\s*:'
)
_BARE_EVENTS: Final = re.compile(rb'\[\s*\{[^{}]{0,2000}"ph"\s*:')
_RECORD: Final = re.compile(rb'[^\n]{0,4096}"record"\s*:\s*"header"')
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
    (
        rb'"/device:[GT]PU|"hlo_op"|"hlo_module"|"XLA Ops"|"PjitFunction',
        "a JAX/XLA trace, which is not read: record with nsys or rocprofv3",
    ),
    (
        rb'"Ascend Hardware"|"AI_CORE"|"hcom_',
        "an Ascend trace (torch_npu), whose devices are not read: AORTA reads those of NVIDIA and AMD",
    ),
    (rb'"BeginNs"', "of rocprof (v1), which is not read: record with rocprofv3 --output-format rocpd"),
)
"""Chrome traces of other tools, by what their first bytes hold and Kineto's never do."""


def _is_kineto(head: FileHead) -> bool:
    text = head.text
    if text[:1] not in (b"{", b"[") or _RECORD.match(text) or b'"rocprofiler-sdk-tool"' in text[:4096]:
        return False
    return bool(_CHROME.search(text) or _BARE_EVENTS.match(text)) and not hint(text)


KINETO: Final = Reader("kineto", "Kineto .json, .json.gz, .tar.gz", _is_kineto, read_kineto)
READERS: Final = (KINETO, ROCPD, ROCPROF_JSON, ROCPROF_CSV, RPD, NSYS)
"""Every format that is read. Of files with the same content (`Reader.process`) the format that comes first is read."""
TAR: Final = "tar"
"""Format of a unit that is an archive."""
_NAMES: Final = [*(reader.name for reader in READERS), TAR]
KNOWN: Final = f"an AORTA run folder, or traces: {'; '.join(reader.files for reader in READERS)}"


class NoTraces(InputError):
    """There are files, but none of them is a trace."""


def is_record(head: bytes) -> bool:
    """Return whether these are the first bytes of a record of AORTA."""
    return bool(_RECORD.match(head.removeprefix(b"\xef\xbb\xbf").lstrip()))


def reader_of(head: FileHead) -> Reader | None:
    """Return the reader of a file that begins so; None for what is not read."""
    head = head._replace(text=head.text.removeprefix(b"\xef\xbb\xbf").lstrip())
    return next((reader for reader in READERS if reader.matches(head)), None)


def hint(head: bytes) -> str:
    """Return what an unknown file seems to be, and what to do about it; empty where nothing is known."""
    if head.startswith(b"\n") and b"\x00" in head:
        return "; it is binary, such as Perfetto's protobufs: export a Kineto trace as JSON, or use nsys or rocprofv3"
    if b'"schemaVersion"' not in head:
        for pattern, words in _OTHERS:
            if re.search(pattern, head):
                return f"; it is {words}"
    return next((f"; it is {words}" for magic, words in _HINTS if head.startswith(magic)), "")


@dataclass(frozen=True)
class TraceFiles:
    """The files written by one process."""

    files: tuple[str, ...]
    format: str
    comm_patterns: tuple[str, ...] = ()
    headers: tuple[Header, ...] = ()

    def stat(self) -> os.stat_result:
        """Return that of its first file."""
        return Path(self.files[0]).stat()

    def absolute(self) -> TraceFiles:
        files = tuple(file if is_url(file) else str(Path(file).absolute()) for file in self.files)
        return replace(self, files=files)


def find_units(
    location: str, comm_patterns: Sequence[str] = (), headers: Sequence[Header] = ()
) -> tuple[list[TraceFiles], list[str]]:
    """Return the units of a location in the order of their names, and notes about files that were left out. Where
    nothing is there, or nothing that is a trace, it is an `InputError`.
    """
    named, folder = _files(location)
    units: dict[str, TraceFiles] = {}
    notes: list[str] = []
    unknown: list[str] = []
    records = False
    for file in named:
        try:
            with opened(file) as stream, reading(file):
                head = FileHead(stream.head())
            if head.text.startswith(SQLITE_MAGIC):
                with local_copy(file) as path, closing(Database(path, file)) as database:
                    head = head._replace(tables=frozenset(database.tables))
        except InputError as error:
            if not folder:
                raise
            notes.append(str(error))
            continue
        reader = reader_of(head)
        if reader is None and not is_tar(head.text):
            records = records or is_record(head.text)
            unknown.append(f"{file}{hint(head.text)}")
            continue
        files = (file,) if reader is None or reader.together is None else reader.together(file)
        unit = TraceFiles(files, reader.name if reader else TAR, tuple(comm_patterns), tuple(headers))
        process = reader.process(file) if reader else file
        used, other = sorted((units.get(process, unit), unit), key=lambda known: _NAMES.index(known.format))
        if other is not used:
            notes.append(f"{other.files[0]}: the same process as {used.files[0]}, which is used")
        units[process] = used
    if not units:
        if records:
            raise NoTraces(
                f"{location}: a run without profiler traces; record them with aorta train profiling.enabled=true, or "
                'in your own script with aorta.record(..., profiling="aorta")'
            )
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
    classifier, origin = NameClassifier(unit.comm_patterns), unit.files[0]
    with ExitStack() as stack, reading(origin):
        streams = {file: stack.enter_context(opened(file)) for file in unit.files}
        if unit.format == TAR:  # no formats that need more than one file, or a file on a disk
            seen = 0
            for where, content in members(streams[origin], origin):
                if is_record(content.head()):
                    raise InputError(f"{origin}: holds the record of a run; unpack it (tar xf), and give its folder")
                reader = reader_of(FileHead(content.head()))
                if reader is not None and reader.together is None:
                    seen += 1
                    yield from reader.read(TraceInput({where: content}, classifier, unit.headers))
            if not seen:
                raise InputError(f"{origin}: an archive without a trace in it; expected Kineto traces")
            return
        database = None
        if streams[origin].head().startswith(SQLITE_MAGIC):
            path = stack.enter_context(local_copy(origin))
            database = stack.enter_context(closing(Database(path, origin)))
        yield from READERS[_NAMES.index(unit.format)].read(TraceInput(streams, classifier, unit.headers, database))


def _files(location: str) -> tuple[list[str], bool]:
    """Return files of a location, and whether they were searched for; unrelated files beside them are then no error."""
    if is_url(location):
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
    path = Path(location)
    if path.is_dir():
        return _walk(path), True
    if path.exists():
        return [location], False
    if any(mark in location for mark in "*?["):
        matched = map(Path, sorted(glob.glob(location, recursive=True)))  # noqa: PTH207
        files = [file for match in matched for file in (_walk(match) if match.is_dir() else [str(match)])]
        if files:
            return files, True
        raise InputError(f"{location}: no file matches")
    raise InputError(f"{location}: No such file or directory; expected {KNOWN}")


def _walk(folder: Path) -> list[str]:
    paths: list[str] = []
    names = 0
    for parent, folders, files in os.walk(folder):
        names += len(folders) + len(files)
        if names > MOST_NAMES or len(Path(parent).relative_to(folder).parts) > DEEPEST:
            raise InputError(
                f"{folder}: more than {MOST_NAMES} files and folders, or {DEEPEST} folders in each other; give the "
                "folder of one run"
            )
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        paths += [str(Path(parent, name)) for name in sorted(files) if not name.startswith(".")]
    return paths
