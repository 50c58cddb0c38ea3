"""Writes trace files, whole or not at all: exports, compresses, and says why where it fails.

torch's exporter reports no error: on a full disk it leaves half a trace beside the name that was asked for, and
returns. Must not leave that half, replace the reason by its consequence, or delete a source before its compressed file
exists under its name.
"""

from __future__ import annotations

import errno
import gzip
import os
import shutil
import tarfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from aorta.records.files import whole_file

_HALF = ".tmp"
"""What Kineto appends to the name of a trace that it has not finished."""
_TAIL_BYTES = 64
_PROBE = b" " * (1 << 16)
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def export(write: Callable[[Path], Any], target: Path) -> None:
    """Have `write` write a trace, as JSON, to `target`.

    Raises:
        OSError: it could not; with the reason of the disk (full, over quota, ...) where it gives one. Nothing is left.
    """
    half = target.with_name(target.name + _HALF)
    try:
        write(target)
        if not _whole(target):
            raise _reason(half if half.exists() else target, target)
    except BaseException:
        for path in (half, target):
            with suppress(OSError):
                path.unlink(missing_ok=True)
        raise


def error_line(error: BaseException) -> str:
    """Return an error in one line; where there was no room, with what to do."""
    text = f"{type(error).__name__}: {error}".rstrip(": ")
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        text += "; make room there, or choose another folder for traces"
    return text


def _whole(path: Path) -> bool:
    try:
        with path.open("rb") as stream:
            stream.seek(max(path.stat().st_size - _TAIL_BYTES, 0))
            return stream.read().rstrip().endswith(b"}")
    except FileNotFoundError:
        return False


def _reason(written: Path, target: Path) -> OSError:
    """Return why a trace is not whole: found by writing on where the exporter stopped, since it does not say."""
    try:
        with written.open("ab", buffering=0) as stream:
            stream.write(_PROBE)
            os.fsync(stream.fileno())
            if stream.write(_PROBE) < len(_PROBE):  # a full disk may take a part, and refuse the next byte
                stream.write(_PROBE)
    except OSError as error:
        return OSError(error.errno, error.strerror, str(target))
    return OSError(errno.EIO, "torch.profiler left no whole trace, and the disk takes more", str(target))


PART = ".part"
_CHUNK_BYTES = 1 << 20


def pack(source: Path, target: Path) -> None:
    """Write `source` to `target`, compressed as its suffix says. `source` stays.

    `.tar.gz` holds one regular file with the archive's bare name and `.json`, `.gz` the bytes alone.

    Raises:
        OSError: it cannot be written; `target` is unchanged.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(target) as part:
        if target.name.endswith(".tar.gz"):
            _archive(source, part, target.name.removesuffix(".tar.gz") + ".json")
        else:
            with source.open("rb") as plain, gzip.open(part, "wb") if target.suffix == ".gz" else part.open("wb") as to:
                shutil.copyfileobj(plain, to, _CHUNK_BYTES)


def _archive(source: Path, target: Path, member: str) -> None:
    with tarfile.open(target, "w:gz") as archive:
        info = tarfile.TarInfo(member)
        info.size, info.mtime, info.mode = source.stat().st_size, int(source.stat().st_mtime), 0o644
        with source.open("rb") as content:
            archive.addfile(info, content)


def free_name(target: Path) -> Path:
    """Return `target`, or the same with `-2`, `-3`, ... before its suffixes if it exists."""
    stem, dot, suffixes = target.name.partition(".")
    candidate, number = target, 1
    while candidate.exists():
        number += 1
        candidate = target.with_name(f"{stem}-{number}{dot}{suffixes}")
    return candidate
