"""Loads whatever is at a location as a run; the one module that distinguishes records, launch sets and traces.

Archives of run folders (tar, gzipped or not, and zip) are unpacked, and read like the folders they hold:

    with Archives() as archives:
        run = load_source(archives.folder_of("cuda.tar.gz"))    # read it here: afterwards the copy is gone

Only records and manifests are written, as plain files below one temporary folder. An archive without records of AORTA
stays as it is; traces are read from within theirs (`open.members`). Must not: trust the name of a file or an archive,
read a folder of AORTA's records as anything else, write outside of that folder, or keep it.
"""

from __future__ import annotations

import os
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import IO, Any, Final, TypeAlias

import msgspec

from aorta.documents.comparison import SIDES
from aorta.errors import InputError, meant
from aorta.read.engines import Engine
from aorta.read.record import load_run, nothing_found
from aorta.read.run import Run
from aorta.read.traces.files import KNOWN, NoTraces, is_record
from aorta.read.traces.open import (
    INFLATED_LIMIT,
    RATIO_LIMIT,
    inflated,
    is_tar,
    is_url,
    member_path,
    members,
    opened,
    reading,
)
from aorta.records.run_files import MANIFEST_FILE, RANK_FILE_GLOB, RANK_FILE_NAME, rank_files
from aorta.redaction import redact

Location: TypeAlias = str | Path | tuple[Path, ...]
"""A run folder, a launch set, traces (a file, folder, glob or URL), or several folders with ranks of one run."""
NOT_A_LAUNCH: Final = "history"
"""Holds earlier runs of the same folder."""
_LISTED: Final = 8
_DEEPEST, _MOST_SEARCHED = 4, 2_000
"""Where runs are looked for that an error names: `artifacts/PLAN/SIDE/00` is four folders down."""


def load_source(
    location: Location,
    engine: Engine | None = None,
    comm_patterns: Sequence[str] = (),
    *,
    spans: bool = False,
    exposed: bool = False,
) -> Run:
    """Read a run folder, or the traces of a file, directory, glob or URL. `spans`, `exposed`: of records, keep what ran
    inside each step, give its exposed communication in pieces (`RankTables`). An `InputError` says why nothing can be
    read.
    """
    if isinstance(location, tuple):
        return load_run(location, engine, spans=spans, exposed=exposed)
    text, path = str(location), Path(location)
    if not is_url(text):
        head = b""
        if path.is_file():
            with suppress(InputError), opened(text) as stream:
                head = stream.head()
        if is_record(head):
            raise InputError(f"{path}: one rank's record; give the folder it is in ({path.parent})")
        if path.is_dir() and holds_records(path):
            return load_run(path, engine, spans=spans, exposed=exposed)
        if not path.exists() and not any(mark in text for mark in "*?["):
            there = runs_below(path.parent if path.parent.is_dir() else Path())
            hint = meant(text, map(str, there), "; ")
            raise InputError(f"{text}: No such file or directory{hint or '.'} {runs_here(there)}. Expected {KNOWN}")
    from aorta.read.traces.load import load_traces

    try:
        return load_traces(text, engine, comm_patterns)
    except NoTraces as nothing:
        if is_url(text) or not path.is_dir():
            raise
        if next(path.rglob(RANK_FILE_GLOB), None) is None:
            raise  # nothing of a run is below it either
        raise InputError(nothing_found(path)) from nothing


def launch_folders(location: Location) -> list[Path]:
    """Return the folders of a launch set; empty if `location` is none.

    A launch set has two or more run folders directly below it, or any number of folders numbered as a plan does (`00`,
    `01`, ...); those are included even if they hold no record.

    Raises:
        InputError: it is the folder of a whole plan, with a launch set for each side, or for one.
    """
    if (
        isinstance(location, tuple)
        or is_url(str(location))
        or not Path(location).is_dir()
        or rank_files(Path(location))
    ):
        return []
    path = Path(location)
    try:
        below = [child for child in path.iterdir() if child.is_dir()]
    except OSError:
        return []  # the error appears when it is read as a run
    below.sort(key=lambda child: (int(child.name) if child.name.isdecimal() else -1, child.name))
    runs = {child for child in below if child.name != NOT_A_LAUNCH and holds_records(child)}
    if len(runs) > 1 or any(run.name.isdecimal() for run in runs):
        return [child for child in below if child in runs or child.name.isdecimal()]
    sides = [side for side in SIDES if (path / side).is_dir() and launch_folders(path / side)]
    if len(sides) == 2:
        raise InputError(
            f"{path}: the folder of a plan, which holds two launch sets; compare them with --reference "
            f"{path / SIDES[0]} --candidate {path / SIDES[1]}"
        )
    if sides:
        raise InputError(
            f"{path}: the folder of a plan, which holds one launch set, of the {sides[0]}; give {path / sides[0]}"
        )
    return []


def runs_below(folder: Path) -> list[Path]:
    """Return folders of runs below `folder`; of launches the folder of their set, or of the plan."""
    found: dict[Path, None] = {}
    for parent, below, files in islice(os.walk(folder, followlinks=True), _MOST_SEARCHED):
        path, depth = Path(parent), len(Path(parent).relative_to(folder).parts)
        below[:] = sorted(name for name in below if not name.startswith(".") and name != NOT_A_LAUNCH)
        if depth >= _DEEPEST:
            below.clear()
        if depth and any(map(RANK_FILE_NAME.match, files)):
            while path.parent != folder and (path.name.isdecimal() or path.name.partition("-")[0] in SIDES):
                path = path.parent
            found[path] = None
    return list(found)


def runs_here(found: Sequence[Path]) -> str:
    """Return the first runs that `runs_below` found, for an error."""
    named = [str(path) for path in found[:_LISTED]]
    more = [f"{len(found) - _LISTED} more"] if len(found) > _LISTED else []
    return f"Runs here: {', '.join([*named, *more]) or 'none'}"


def holds_records(folder: Path) -> bool:
    """Return whether AORTA recorded into this folder. Files that are named like records but cannot be read count,
    because reading the folder as a run then says what is wrong.
    """
    return bool(rank_files(folder))


_ZIP_MAGIC: Final = b"PK\x03\x04"
_COPIED: Final = 1 << 20
_LARGEST_BYTES: Final = 256 << 30
"""100,000 steps of 1,024 ranks at 1 to 2 KB a step (docs/dev/measurements.md); whatever is more is no run."""
_MOST_FILES: Final = 100_000


class Archives(ExitStack):
    """Unpacked archives; they are removed when the `with` block ends, or by `close`."""

    def __init__(self) -> None:
        super().__init__()
        self._folders: dict[str, str] = {}

    def folder_of(self, location: str | Path) -> str | Path:
        """Return the folder with the content of an archive of run folders; any other location unchanged.
        `ARCHIVE!FOLDER`, as `as_given` names it, is one folder of an archive.

        Raises:
            InputError: it is damaged, too large, has no such folder, or a member that is a link or lies outside of it.
        """
        archive, inside, name = str(location).rpartition("!")
        if inside and Path(archive).is_file() and not Path(location).exists():
            return self._inside(archive, name)
        if is_url(str(location)) or not Path(location).is_file():
            return location
        with opened(str(location)) as stream:
            head = stream.head()
        if not (is_tar(head) or head.startswith(_ZIP_MAGIC)):
            return location
        with ExitStack() as unpacked:
            folder = Path(unpacked.enter_context(tempfile.TemporaryDirectory(prefix="aorta-"))).resolve()
            folder /= Path(location).name
            _unpack(str(location), folder, zipped=head.startswith(_ZIP_MAGIC))
            if not any(holds_records(path) for path in (folder, *folder.rglob("*")) if path.is_dir()):
                return location
            self.push(unpacked.pop_all())
        self._folders[str(folder)] = str(location)
        while not holds_records(folder):  # packed with the folders above it, which hold nothing else
            below = list(folder.iterdir())
            if len(below) != 1 or not below[0].is_dir() or below[0].name.isdecimal():
                break
            folder = below[0]
        return folder

    def _inside(self, archive: str, name: str) -> Path:
        self.folder_of(archive)
        for folder, location in self._folders.items():
            found = Path(folder, name)
            if location == archive and found.is_dir() and found.resolve().is_relative_to(folder):
                return found
        raise InputError(f"{archive}!{name}: the archive has no folder {name!r}")

    def as_given(self, value: Any) -> Any:
        """Return the same text, list, mapping or struct, without secrets, and with `ARCHIVE!` in place of a temporary
        folder.
        """
        if isinstance(value, str):
            for folder, location in self._folders.items():
                value = value.replace(f"{folder}/", f"{location}!").replace(folder, location)
            return redact(value)
        if isinstance(value, msgspec.Struct):
            return type(value)(**{name: self.as_given(getattr(value, name)) for name in value.__struct_fields__})
        if isinstance(value, dict):
            return {key: self.as_given(entry) for key, entry in value.items()}
        return [self.as_given(entry) for entry in value] if isinstance(value, list) else value

    @contextmanager
    def named(self) -> Iterator[None]:
        """Make errors raised inside the block name the archive, not the folder it was unpacked to."""
        try:
            yield
        except InputError as error:
            if not self._folders:
                raise
            raise InputError(self.as_given(str(error))) from error


def _unpack(place: str, folder: Path, *, zipped: bool) -> None:
    """Write the records and manifests of an archive below a folder.

    Raises:
        InputError: they are more than any run has, or than archives of records hold (`open.RATIO_LIMIT`), or cannot be
            read or written.
    """
    files = size_bytes = 0
    packed_bytes = Path(place).stat().st_size
    for name, content in _zip_members(place) if zipped else _tar_members(place):
        path = PurePosixPath(name)
        if not (RANK_FILE_NAME.match(path.name) or path.name == MANIFEST_FILE) or NOT_A_LAUNCH in path.parts:
            continue
        files += 1
        target = folder.joinpath(*path.parts)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as file:
                while chunk := _chunk(place, name, content):
                    size_bytes += len(chunk)
                    if files > _MOST_FILES or size_bytes > _LARGEST_BYTES:
                        raise InputError(
                            f"{place}: more than {_MOST_FILES} files or {_LARGEST_BYTES >> 30} GiB of records: unpack "
                            "it, and give its folder"
                        )
                    if size_bytes > INFLATED_LIMIT and size_bytes > RATIO_LIMIT * packed_bytes:
                        raise InputError(
                            f"{place}: its {packed_bytes} bytes gave more than {size_bytes}: no record is compressed "
                            "that far, so it is not read on"
                        )
                    file.write(chunk)
        except (OSError, ValueError) as error:  # ValueError: a NUL in its name
            reason = getattr(error, "strerror", None) or error
            raise InputError(
                f"{place}!{name}: cannot be unpacked to {folder.parent}: {reason}. Unpack it where there is room and "
                "give that folder, or set TMPDIR"
            ) from error


def _chunk(place: str, name: str, content: IO[bytes]) -> bytes:
    try:
        return content.read(_COPIED)
    except (OSError, ValueError) as error:
        raise InputError(f"{place}!{name}: cannot be read: {error}") from error


def _tar_members(place: str) -> Iterator[tuple[str, IO[bytes]]]:
    with opened(place) as stream, reading(place):
        for where, content in members(stream, place):
            yield where.removeprefix(f"{place}!"), content


def _zip_members(place: str) -> Iterator[tuple[str, IO[bytes]]]:
    try:
        with reading(place), zipfile.ZipFile(place) as archive:
            for member in archive.infolist():
                path = member_path(place, member.filename)
                if not member.is_dir():
                    with archive.open(member) as raw, inflated(raw, f"{place}!{path}") as content:
                        yield str(path), content
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError) as error:
        # RuntimeError: it is encrypted; NotImplementedError: a compression that zipfile does not know
        raise InputError(f"{place}: not a zip archive that can be read ({error})") from error
