"""Compresses an exported trace into its file, atomically.

Must not delete the source before the compressed file exists under its name.
"""

from __future__ import annotations

import gzip
import os
import shutil
import tarfile
from pathlib import Path

PART = ".part"
_CHUNK_BYTES = 1 << 20


def pack(source: Path, target: Path) -> None:
    """Write `source` to `target`, compressed as its suffix says. `source` stays.

    `.tar.gz` holds one regular file with the archive's bare name and `.json`, `.gz` the bytes alone.

    Raises:
        OSError: it cannot be written; `target` is unchanged.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + PART)
    try:
        if target.name.endswith(".tar.gz"):
            _archive(source, part, target.name.removesuffix(".tar.gz") + ".json")
        else:
            with source.open("rb") as plain, gzip.open(part, "wb") if target.suffix == ".gz" else part.open("wb") as to:
                shutil.copyfileobj(plain, to, _CHUNK_BYTES)
        os.replace(part, target)  # noqa: PTH105  the same as Path.replace, but easier to make fail in a test
    finally:
        part.unlink(missing_ok=True)


def _archive(source: Path, target: Path, member: str) -> None:
    with tarfile.open(target, "w:gz") as archive:
        info = tarfile.TarInfo(member)
        info.size, info.mtime, info.mode = source.stat().st_size, int(source.stat().st_mtime), 0o644
        with source.open("rb") as content:
            archive.addfile(info, content)


def free_name(target: Path) -> Path:
    """`target`, or the same with `-2`, `-3`, ... before its suffixes if it exists."""
    stem, dot, suffixes = target.name.partition(".")
    candidate, number = target, 1
    while candidate.exists():
        number += 1
        candidate = target.with_name(f"{stem}-{number}{dot}{suffixes}")
    return candidate
