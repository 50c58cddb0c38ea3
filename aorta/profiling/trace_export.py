"""Exports a trace to a file, whole or not at all, and says why where it fails.

torch's exporter reports no error: on a full disk it leaves half a trace beside the name that was asked for, and
returns. Must not leave that half, or replace the reason by its consequence.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

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
    """An error in one line; where there was no room, with what to do."""
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
    """Why a trace is not whole: found by writing on where the exporter stopped, since it does not say."""
    try:
        with written.open("ab", buffering=0) as stream:
            stream.write(_PROBE)
            os.fsync(stream.fileno())
            if stream.write(_PROBE) < len(_PROBE):  # a full disk may take a part, and refuse the next byte
                stream.write(_PROBE)
    except OSError as error:
        return OSError(error.errno, error.strerror, str(target))
    return OSError(errno.EIO, "torch.profiler left no whole trace, and the disk takes more", str(target))
