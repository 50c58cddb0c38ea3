"""Detects the format of a file from its first bytes; its name is never used.

Takes the first inflated bytes, for SQLite the path, and returns the name of a format or None. Must not: read a whole
file.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from aorta.analysis.load.open import is_tar
from aorta.analysis.load.sqlite_files import database

AORTA: Final = "aorta"
TAR: Final = "tar"
KINETO: Final = "kineto"
KNOWN: Final = (
    "an AORTA run folder, Kineto traces (.json, .json.gz, .tar.gz), rocprofv3 output (JSON, CSV, rocpd database), an "
    "nsys SQLite export, or records of AORTA 2025"
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


def detect(head: bytes) -> str | None:
    """Format of a file that begins with `head`.

    Returns:
        `aorta`, `tar`, `sqlite`, `kineto`, `rocprofv3-json`, `rocprofv3-csv` or `aorta-2025`; None for anything else.
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
    if b'"profile"' in first and b'"rank"' in first and re.search(rb'"(ranges|overlap)"\s*:', first):
        return "aorta-2025"
    return None


def detect_database(path: Path, place: str) -> str | None:
    """`rocpd` or `nsys` for a SQLite file; None for any other.

    Raises:
        InputError: it cannot be read.
    """
    with database(path, place) as found:
        if any(name.startswith("rocpd_") for name in found.tables):
            return "rocpd"
        if "StringIds" in found.tables or any(name.startswith("CUPTI_") for name in found.tables):
            return "nsys"
    return None


def hint(head: bytes) -> str:
    """What an unknown file seems to be, and what to do about it; empty where nothing is known."""
    return next((f"; it is {words}" for magic, words in _HINTS if head.startswith(magic)), "")
