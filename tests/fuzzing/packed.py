"""Changes what is packed: gzip, tar archives and SQLite databases, inside or as archives.

`KINDS` lists for each kind how to recognise it, and a function that changes it: it gets a function that changes the
content. Must not: unpack anything to a place that the archive names.
"""

from __future__ import annotations

import gzip
import io
import sqlite3
import tarfile
import tempfile
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Final, TypeAlias

Inner: TypeAlias = Callable[[bytes], tuple[bytes, str]]
Change: TypeAlias = Callable[[Random, bytes, Inner], tuple[bytes, str]]

_LONGEST: Final = 8 << 20
"""What is packed and longer is changed from outside only."""
_JUNK: Final = (
    *("NULL", "-1", "1.5", "9223372036854775807", "-9223372036854775808", "1e308", "'soon'", "''", "x'ff00'", "9e999"),
    *("4294967296", "2147483648", "CAST(x'ff' AS TEXT)", "'a' || char(0) || 'b'"),
    *("zeroblob(1000)", "zeroblob(3000000)"),
)
_TAR_NAMES: Final = (
    *("../../../up.json", "/tmp/absolute.json", "", ".", "x" * 300, "\udcff.json", "a/../../b.json", "n\nl"),
)
_TAR_TYPES: Final = (
    *(tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE, tarfile.GNUTYPE_SPARSE),
)
_ENDLESS: Final = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT {columns} FROM n"


def _is_gzip(content: bytes) -> bool:
    return content[:2] == b"\x1f\x8b"


def _is_tar(content: bytes) -> bool:
    return content[257:262] == b"ustar"


def _is_sqlite(content: bytes) -> bool:
    return content.startswith(b"SQLite format 3\x00")


def _gzip_changed(random: Random, content: bytes, inner: Inner) -> tuple[bytes, str]:
    plain = _inflated(content)
    if plain is None:
        return inner(content)
    match random.randrange(12):
        case 0:
            return content[: random.randrange(len(content))], "gzip cut off"
        case 1:
            return content + random.choice((b"\x00" * 100, b"rubbish", content, b"\x1f\x8b")), "more behind the gzip"
        case 2:
            return content[:-8] + bytes(random.randrange(256) for _ in range(8)), "another checksum"
        case 3 if random.random() < 0.3:
            at = random.randrange(len(plain) + 1)
            return _members(plain[:at]) + bomb() + _members(plain[at:]), "a bomb of 1 GiB inside"
    changed, what = inner(plain)
    return _members(changed), f"gzip of: {what}"


def _inflated(content: bytes) -> bytes | None:
    """None where it is damaged, or longer than is worth changing (a bomb)."""
    try:
        with gzip.open(io.BytesIO(content)) as file:
            plain = file.read(_LONGEST + 1)
    except (OSError, EOFError, zlib.error):
        return None
    return plain if len(plain) <= _LONGEST else None


def _members(plain: bytes) -> bytes:
    return gzip.compress(plain, 1, mtime=0)


@cache
def bomb() -> bytes:
    """1 GiB of blanks in a megabyte: members of a gzip file count as one after the other."""
    return gzip.compress(b" " * (16 << 20), 9, mtime=0) * 64


def _tar_changed(random: Random, content: bytes, inner: Inner) -> tuple[bytes, str]:
    try:
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            members = [
                (one, file.read(_LONGEST))
                for one in archive
                if one.isreg() and (file := archive.extractfile(one)) is not None
            ]
    except (tarfile.TarError, OSError, ValueError, EOFError, KeyError, OverflowError):
        return inner(content)
    if not members:
        return inner(content)
    at = random.randrange(len(members))
    member, data = members[at]
    what = f"member {member.name}"
    match random.randrange(8):
        case 0:
            member.name = random.choice(_TAR_NAMES)
            what += f" named {member.name[:40]!r}"
        case 1:
            member.type = random.choice(_TAR_TYPES)
            member.linkname = random.choice(("/etc/passwd", "../..", member.name, ""))
            what += f" of type {member.type!r}"
        case 2:
            members.insert(0, (member, data))
            what += " twice"
        case 3:
            return content[: random.randrange(len(content))], "tar cut off"
        case 4:
            member.pax_headers = {"size": random.choice(("-1", "x", "9" * 30)), "path": "../p"}
            what += " with odd pax headers"
        case _:
            data, inside = inner(data)
            members[at], what = (member, data), f"{what}: {inside}"
    out = io.BytesIO()
    try:
        with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for one, text in members:
                one.size = len(text) if one.isreg() else 0
                archive.addfile(one, io.BytesIO(text) if one.isreg() else None)
    except (ValueError, OverflowError, UnicodeError, OSError):
        return inner(content)
    packed = bytearray(out.getvalue())
    if random.random() < 0.1:  # the header's own length of the member
        packed[124:136] = random.choice((b"77777777777\0", b"-0000000001\0", b"\x80" + b"\xff" * 11, b"zzzzzzzzzzz\0"))
        what += ", another size in the header"
    return bytes(packed), f"tar: {what}"


def _sqlite_changed(random: Random, content: bytes, inner: Inner) -> tuple[bytes, str]:
    with tempfile.TemporaryDirectory(prefix="aorta-fuzz-") as folder:
        path = Path(folder, "db")
        path.write_bytes(content)
        try:
            database = sqlite3.connect(path, isolation_level=None)
            database.text_factory = lambda raw: raw.decode("utf-8", "replace")
            try:
                what = _statement(random, database)
            finally:
                database.close()
        except (sqlite3.Error, ValueError, IndexError):
            return inner(content)
        if path.stat().st_size > _LONGEST:
            return inner(content)
        return path.read_bytes(), what


def _statement(random: Random, database: sqlite3.Connection) -> str:
    """Change one table, and say how."""
    tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")]
    table = random.choice(tables)
    columns = [row[1] for row in database.execute(f'PRAGMA table_info("{table}")')]
    column = random.choice(columns)
    junk = random.choice(_JUNK)
    where = random.choice(("", "WHERE rowid = 1", f"WHERE rowid = {random.randrange(9)}"))
    named = ", ".join(f'x AS "{name}"' for name in columns)
    statement = random.choice(
        (
            *[f'UPDATE OR REPLACE "{table}" SET "{column}" = {junk} {where}'] * 3,
            f'DELETE FROM "{table}" {where}',
            f'DROP TABLE "{table}"',
            f'ALTER TABLE "{table}" DROP COLUMN "{column}"',
            f'ALTER TABLE "{table}" RENAME COLUMN "{column}" TO "other{random.randrange(99)}"',
            f'ALTER TABLE "{table}" RENAME TO "{random.choice(tables)}2"',
            f'INSERT OR REPLACE INTO "{table}" SELECT * FROM "{table}" LIMIT 1000',
            f'DROP TABLE "{table}"; CREATE VIEW "{table}" AS {_ENDLESS.format(columns=named)}',
            f'DROP TABLE "{table}"; CREATE TABLE "{table}" ("{column}" TEXT)',
            f"PRAGMA user_version = {random.randrange(2**31)}",
        )
    )
    database.executescript(statement)
    return f"SQL: {statement[:120]}"


KINDS: Final[tuple[tuple[Callable[[bytes], bool], Change], ...]] = (
    (_is_gzip, _gzip_changed),
    (_is_tar, _tar_changed),
    (_is_sqlite, _sqlite_changed),
)
