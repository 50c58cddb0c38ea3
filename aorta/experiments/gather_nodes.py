"""The command `analysis/gather.py`: the folders of several nodes become one run folder, all or nothing.

A node's folder is a path, an fsspec URL, or `HOST:/path` (sftp). History, checkpoints and other runs below it stay
where they are. Must not overwrite anything, mix two runs, choose between two files of one name, or load torch.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import IO, Any, Final

from aorta.command_line import command, number_ranges
from aorta.errors import EXIT_OK, InputError, RunIncomplete
from aorta.records.clocks import CLOCK_SYNC_FILE
from aorta.records.files import open_regular
from aorta.records.reader import header_of
from aorta.records.run_files import MANIFEST_FILE, RANK_FILE_GLOB, RANK_FILE_NAME, RPC_FILE, read_manifest
from aorta.records.schema import WORLD_LIMIT, Header

FILES: Final = (RANK_FILE_GLOB, MANIFEST_FILE, CLOCK_SYNC_FILE, RPC_FILE)
FOLDERS: Final = ("logs", "torch_profiler")
"""What a run writes and a report or `merge_traces.py` reads (artifacts/README.md)."""
_HOST: Final = re.compile(r"(?:[\w.-]+@)?[\w.-]+:/")
_CHUNK: Final = 1 << 20


@dataclass(frozen=True)
class Gathered:
    """What came together.

    Attributes:
        folder: the new run folder.
        missing: ranks without a readable record.
        files: source -> how many files came from it.
        notes: what a person should know.
    """

    folder: Path
    run_id: str
    world_size: int
    ranks: tuple[int, ...]
    missing: tuple[int, ...]
    files: dict[str, int]
    size_bytes: int
    notes: tuple[str, ...]


@dataclass
class _Copies:
    """What was copied so far: name -> digest and the source it came from."""

    seen: dict[str, tuple[str, str]] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)
    size_bytes: int = 0


def gather(sources: Sequence[str], into: Path, also: Sequence[str] = ()) -> Gathered:
    """Collect the folders of all nodes of one run into a new folder.

    Args:
        sources: paths, fsspec URLs or `HOST:/path`.
        into: must not be there, or be empty.
        also: more files or folders to take from each source.

    Raises:
        InputError: a folder cannot be read, holds nothing of a run or files of another, or two files of one name
            differ. Nothing is left behind.
    """
    _check_free(into)
    found = [file for word in dict.fromkeys(sources) for file in files_of(word, also)]
    try:
        into.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f".{into.name}.part-", dir=into.parent))
    except OSError as error:
        raise InputError(f"{into}: cannot be written: {error.strerror or error}") from error
    try:
        copies = _Copies()
        for file in found:
            _copy(file, part, copies)
        gathered = _examine(part, into, copies)
        part.chmod(0o777 & ~_umask())
        part.rename(into)  # refused by the system where something stands there meanwhile
    except OSError as error:
        raise InputError(f"{into}: cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return gathered


def _check_free(into: Path) -> None:
    if into.exists() and (not into.is_dir() or any(into.iterdir())):
        raise InputError(
            f"{into}: is there already and nothing is overwritten; name a new folder (this can be among the sources)"
        )


def _copy(file: NodeFile, part: Path, copies: _Copies) -> None:
    """Copy a file, or hold it against the one of its name that is there.

    Raises:
        InputError: they differ; or the file cannot be read.
    """
    digest, before = hashlib.sha256(), copies.seen.get(file.name)
    target = part / (file.name if before is None else ".again")
    target.parent.mkdir(parents=True, exist_ok=True)
    with file.opened() as stream, target.open("wb") as out:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
            out.write(chunk)
    if before is None:
        copies.seen[file.name] = (digest.hexdigest(), file.source)
        copies.files[file.source] = copies.files.get(file.source, 0) + 1
        copies.size_bytes += target.stat().st_size
        return
    target.unlink()
    if before[0] != digest.hexdigest():
        raise InputError(
            f"{file.name} is in {before[1]} and, with other content, in {file.source}: the same rank twice, or two "
            "runs. Give each node's folder of one run"
        )
    copies.files.setdefault(file.source, 0)


def _examine(part: Path, into: Path, copies: _Copies) -> Gathered:
    """Raises:
    InputError: no record can be read, or the records are of two runs or disagree about their number.
    """
    headers: dict[str, Header] = {}
    notes: list[str] = []
    for name in sorted(name for name in copies.seen if RANK_FILE_NAME.match(name)):
        header = _header(part / name)
        if header is None:
            notes.append(f"{name} ({copies.seen[name][1]}): no header that can be read; kept, not counted")
        else:
            headers[name] = header
    if not headers:
        raise InputError("no record of any rank can be read: " + ("; ".join(notes) or "none of the folders holds one"))
    first_name, first = next(iter(headers.items()))
    runs = {name: header.run_id for name, header in headers.items()}
    manifest_run = _manifest_run(part)
    if MANIFEST_FILE in copies.seen and manifest_run is not None:
        runs[MANIFEST_FILE] = manifest_run
    for name, run_id in runs.items():
        if run_id != first.run_id:
            raise InputError(
                f"two runs: {first_name} ({copies.seen[first_name][1]}) is of run {first.run_id!r}, {name} "
                f"({copies.seen[name][1]}) of {run_id!r}"
            )
    for name, header in headers.items():
        if header.world_size != first.world_size or not 0 < header.world_size <= WORLD_LIMIT:
            raise InputError(
                f"{name} says a world of {header.world_size} ranks, {first_name} of {first.world_size}: these ranks "
                "did not train together"
            )
    ranks = {header.rank for header in headers.values()}
    missing = [rank for rank in range(first.world_size) if rank not in ranks]
    if MANIFEST_FILE not in copies.seen:
        notes.append(f"{MANIFEST_FILE} is in none of the folders: the node of rank 0 has it")
    return Gathered(
        into,
        first.run_id,
        first.world_size,
        tuple(sorted(ranks)),
        tuple(missing),
        copies.files,
        copies.size_bytes,
        tuple(notes),
    )


def _header(path: Path) -> Header | None:
    try:
        return header_of(path)
    except InputError:
        return None


def _manifest_run(part: Path) -> str | None:
    try:
        found = read_manifest(part).get("run_id")
    except (OSError, ValueError):
        return None  # reading the run reports it
    return found if isinstance(found, str) else None


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@command()
def main(arguments: Sequence[str]) -> int:
    """Run `analysis/gather.py`; returns its exit code (argparse itself ends with 0 or 2)."""
    options = parser().parse_args(arguments)
    gathered = gather(options.sources, Path(options.into), options.also)
    for source, count in gathered.files.items():
        sys.stdout.write(f"{source}: {count} files\n")
    for note in gathered.notes:
        sys.stdout.write(f"  ! {note}\n")
    sys.stdout.write(
        f"{gathered.folder}: run {gathered.run_id}, {len(gathered.ranks)} of {gathered.world_size} ranks, "
        f"{sum(gathered.files.values())} files, {gathered.size_bytes} bytes\n"
    )
    if gathered.missing:
        raise RunIncomplete(
            f"no record of rank {number_ranges(gathered.missing)} of {gathered.world_size}; what is there is in "
            f"{gathered.folder}. Gather it with the missing folders into a new one"
        )
    return EXIT_OK


def parser() -> argparse.ArgumentParser:
    """Return the arguments of the command."""
    words = argparse.ArgumentParser(
        description="The output folders of several nodes without a shared disk -> one run folder.",
        epilog="Taken: records, run.json, clock_sync.json, rpc.json, logs/, torch_profiler/. History, checkpoints and "
        "other runs stay. A file that is in two folders must be the same in both. Nothing is overwritten, and after an "
        "error nothing is left. Exit codes: 0 done, 2 bad input, 5 ranks are missing (what is there is kept).",
    )
    words.add_argument(
        "sources", nargs="+", metavar="SOURCE", help="a node's folder: a path, an fsspec URL, or HOST:/path (by sftp)"
    )
    words.add_argument("--into", required=True, metavar="DIR", help="a new folder")
    words.add_argument(
        "--also", action="append", default=[], metavar="NAME", help="a file or folder more in each source; repeatable"
    )
    return words


@dataclass(frozen=True)
class NodeFile:
    """One file of a node. `name` is its place below the run folder, with `/`."""

    source: str
    name: str
    path: str
    system: Any

    @contextmanager
    def opened(self) -> Iterator[IO[bytes]]:
        """Open it for reading its bytes.

        Raises:
            InputError: it cannot be read, also while it is.
        """
        with reading(f"{self.source}: {self.name}"), self._open() as stream:
            yield stream

    def _open(self) -> Any:
        from fsspec.implementations.local import LocalFileSystem

        local = isinstance(self.system, LocalFileSystem)
        return open_regular(Path(self.path)) if local else self.system.open(self.path, "rb")


def url_of(word: str) -> str:
    """Return `HOST:/path` as an sftp URL; paths and URLs as they are. A file of that very name is a path."""
    # A word too long to be a name is no file, not an error as with Path.exists.
    if "://" in word or os.path.exists(word) or not _HOST.match(word):  # noqa: PTH110
        return word
    host, _, path = word.partition(":")
    return f"sftp://{host}{path}"


def files_of(word: str, also: Sequence[str] = ()) -> list[NodeFile]:
    """Return everything of a run in one folder, in order of name.

    Args:
        word: the folder, as a user gives it.
        also: more files or folders directly in it.

    Raises:
        InputError: it cannot be listed, or holds nothing of a run.
    """
    with reading(word):
        import fsspec

        system, root = fsspec.core.url_to_fs(url_of(word))
        root = str(root).rstrip("/")
        found: list[NodeFile] = []
        for entry in system.ls(root, detail=True):
            path, kind = str(entry["name"]), entry["type"]
            name = _below(root, path)
            if name is None or "/" in name:
                continue
            if kind == "directory" and name in (*FOLDERS, *also):
                found += _within(word, system, root, path)
            elif kind == "file" and (name in also or any(fnmatchcase(name, mark) for mark in FILES)):
                found.append(NodeFile(word, name, path, system))
    if not found:
        raise InputError(
            f"{word}: nothing of a run here ({', '.join((*FILES, *(f'{name}/' for name in FOLDERS)))}); give the "
            "folder that the ranks of one node wrote to (training.output_dir, and label below it)"
        )
    return sorted(found, key=lambda file: file.name)


def _within(word: str, system: Any, root: str, folder: str) -> Iterator[NodeFile]:
    for path in system.find(folder):
        name = _below(root, str(path))
        if name is not None:
            yield NodeFile(word, name, str(path), system)


def _below(root: str, path: str) -> str | None:
    """Return the name below the root; None for anything that is not there, whatever a server lists."""
    if not path.startswith(f"{root}/"):
        return None
    name = PurePosixPath(path[len(root) + 1 :])
    return None if name.is_absolute() or ".." in name.parts or not name.parts else str(name)


@contextmanager
def reading(place: str) -> Iterator[None]:
    """Convert whatever a file system raises, and name the place: each has errors of its own, without a common base."""
    try:
        yield
    except InputError:
        raise
    except ImportError as error:
        raise InputError(f"{place}: {error}. HOST:/path and sftp:// need paramiko; or copy with rsync first") from error
    except Exception as error:
        reason = getattr(error, "strerror", None) or error or type(error).__name__
        raise InputError(f"{place}: cannot be read: {reason}") from error
