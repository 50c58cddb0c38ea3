"""The files of one node's output folder, wherever it is: a path, an fsspec URL, or `HOST:/path` (sftp).

Must not look at other folders than the run's own; history, checkpoints and other runs below it stay where they are.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import IO, Any, Final

from aorta.errors import InputError
from aorta.records.clock_offsets import CLOCK_SYNC_FILE
from aorta.records.rpc_files import RPC_FILE
from aorta.records.run_files import MANIFEST_FILE, RANK_FILE_GLOB
from aorta.records.untrusted_files import open_regular

FILES: Final = (RANK_FILE_GLOB, MANIFEST_FILE, CLOCK_SYNC_FILE, RPC_FILE)
FOLDERS: Final = ("logs", "torch_profiler")
"""What a run writes and a report or `merge_traces.py` reads (artifacts/README.md)."""
_HOST: Final = re.compile(r"(?:[\w.-]+@)?[\w.-]+:/")


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
    """`HOST:/path` as an sftp URL; paths and URLs as they are. A file of that very name is a path."""
    # A word too long to be a name is no file, not an error as with Path.exists.
    if "://" in word or os.path.exists(word) or not _HOST.match(word):  # noqa: PTH110
        return word
    host, _, path = word.partition(":")
    return f"sftp://{host}{path}"


def files_of(word: str, also: Sequence[str] = ()) -> list[NodeFile]:
    """Everything of a run in one folder, in order of name.

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
            name = _below(root, str(entry["name"]))
            if name is None or "/" in name:
                continue
            if entry["type"] == "directory" and name in (*FOLDERS, *also):
                found += _within(word, system, root, str(entry["name"]))
            elif entry["type"] == "file" and (name in also or any(fnmatchcase(name, mark) for mark in FILES)):
                found.append(NodeFile(word, name, str(entry["name"]), system))
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
    """The name below the root; None for anything that is not there, whatever a server lists."""
    if not path.startswith(f"{root}/"):
        return None
    name = PurePosixPath(path[len(root) + 1 :])
    return None if name.is_absolute() or ".." in name.parts or not name.parts else str(name)


@contextmanager
def reading(place: str) -> Iterator[None]:
    """Whatever a file system raises, with the place: each has errors of its own, which share no base."""
    try:
        yield
    except InputError:
        raise
    except ImportError as error:
        raise InputError(f"{place}: {error}. HOST:/path and sftp:// need paramiko; or copy with rsync first") from error
    except Exception as error:
        reason = getattr(error, "strerror", None) or error or type(error).__name__
        raise InputError(f"{place}: cannot be read: {reason}") from error
