"""Changes a tree of files at random: bytes, values of JSON, packed content, and the files themselves.

    tree, changes = mutated(random.Random(7), tree)

`changes` names each change. Must not: know what a file is for.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import sqlite3
import tarfile
import zlib
from collections.abc import Callable
from functools import cache
from random import Random
from typing import Any, Final

from tests.fuzzing.tree import Special, Tree

_NUMBER: Final = re.compile(rb"(?<![\w.])-?\d+(\.\d+)?")
_STRING: Final = re.compile(rb'"[^"\\\n]{0,200}"')
_LONGEST: Final = 1 << 20
"""Longer content is changed as bytes only, which is fast."""
_TOKENS: Final = (
    *b"0 -1 1 -0.0 1.5 1e-400 1e308 -1e308 1e999 NaN -Infinity nan inf 0x10 1_000 00012".split(),
    *b"2147483648 -2147483649 9007199254740993 9223372036854775807 -9223372036854775808 9223372036854775808".split(),
    *b"18446744073709551615 18446744073709551616 -99999999999999999999".split(),
    *(b"1" + b"0" * 30, b"1" + b"0" * 400, b"7" * 5000, "\u0664\u0662".encode(), "\u00b2".encode()),
    *(b"null", b"true", b"false", b'""', b'"x"', b"[]", b"{}", b"[1]", b'{"handle": "x"}', b"[[]]", b'{"": null}'),
    *(b'"\\ud800"', b'"\\u0000"', b'"\xff\xfe"', b'"\xed\xa0\x80"', '"\u202e\u0301\U0001f469\u200d"'.encode()),
    *(b'"../../../../etc/passwd"', b'"/dev/zero"', b'"rank99999999999999999999"', b'"{rank:>999999999}"', b'"%s%n"'),
    *(bytes([byte]) for byte in b"\x00\xff\n\r\",{}[]:\\ '"),
    *(b"\xef\xbb\xbf", b"${a}"),
    *(b"[" * depth + b"]" * depth for depth in (900, 960, 980, 985)),  # near the limit of an interpreter
)
"""Values at which readers break: edges of number formats, other types, broken Unicode, depth, length, paths."""
_HEAVY: Final = (b"[" * 100_000, b'{"a":' * 50_000, b'"' + b"x" * 300_000 + b'"', b" " * 100_000)
"""Drawn less often: they only slow the search down."""
_SQL: Final = ("NULL", "-1", "1.5", "9223372036854775807", "1e308", "'soon'", "x'ff00'", "CAST(x'ff' AS TEXT)")
_SPECIAL: Final = (
    *(Special("folder"), Special("fifo")),
    *(Special("link", target) for target in ["nowhere", ".", "..", "/dev/zero", "/dev/null", "/proc/self/mem", "/"]),
)
_NAMES: Final = ("rank7", "rank_1_metrics.jsonl", "-", "*", "a::b", "\u0661", "\udcff\udcfe", "a\nb", "x" * 240)


def mutated(random: Random, tree: Tree) -> tuple[Tree, list[str]]:
    """A changed copy, and what was changed. Now and then nothing is: seeds have to be answered too."""
    changed, changes = dict(tree), list[str]()
    for _ in range(random.choice((0, 1, 1, 1, 1, 2, 2, 3, 5))):
        names = sorted(changed)
        if not names:
            break
        name = random.choice(names)
        content = changed[name]
        if random.random() < 0.06:
            what = _files(random, changed, name)
        elif isinstance(content, bytes):
            changed[name], what = _content(random, content)
        else:
            continue
        changes.append(f"{name}: {what}")
    return changed, changes


def _files(random: Random, tree: Tree, name: str) -> str:
    """Change which files there are, in place."""
    match random.randrange(4):
        case 0:
            del tree[name]
            return "gone"
        case 1:
            tree[name] = special = random.choice(_SPECIAL)
            return f"{special.kind} {special.target}"
        case 2:
            other = random.choice(sorted(tree))
            tree[name] = tree[other]
            return f"as {other}"
    folder, slash, last = name.rpartition("/")
    other_number = re.sub(r"\d+", lambda _: str(random.choice((0, 1, 9, 2**31, 10**25))), last)
    new = folder + slash + random.choice((random.choice(_NAMES), other_number))
    tree[new] = tree[name] if random.random() < 0.5 else tree.pop(name)
    return f"also, or only, {new!r}"


def _content(random: Random, content: bytes) -> tuple[bytes, str]:
    """One file's content with one change, inside what it is packed in more often than outside."""
    if len(content) < _LONGEST and random.random() < 0.85:
        for begins, at, change in _PACKED:
            if content[at : at + len(begins)] == begins:
                try:
                    return change(random, content)
                except _DAMAGED:
                    break
        if content[:1] in (b"{", b"[") and random.random() < 0.7:
            changed = _json(random, content)
            if changed is not None:
                return changed
    return _bytes(random, content)


def _token(random: Random) -> bytes:
    return random.choice(_HEAVY if random.random() < 0.02 else _TOKENS)


def _bytes(random: Random, content: bytes) -> tuple[bytes, str]:
    at = random.randrange(len(content) + 1)
    end = at + random.choice((1, 1, 2, 10, 100, 10_000))
    lines = content.splitlines(keepends=True)
    match random.randrange(8):
        case 0:
            return content[:at] + bytes([random.randrange(256)]) + content[at + 1 :], f"another byte at {at}"
        case 1:
            return content[:at], f"cut at {at}"
        case 2:
            return content[:at] + content[end:], f"without {at} to {end}"
        case 3:
            return content[:end] + content[at:], f"{at} to {end} twice"
        case 4 if lines:
            chosen = random.randrange(len(lines))
            lines[chosen] = lines[chosen] * random.choice((0, 2, 50))
            return b"".join(lines), f"line {chosen} dropped or repeated"
        case 5 | 6:
            pattern = random.choice((_NUMBER, _STRING))
            match = pattern.search(content, at) or pattern.search(content)
            if match is not None:
                new = _token(random)
                return content[: match.start()] + new + content[match.end() :], f"{match[0]!r} becomes {new[:40]!r}"
    new = _token(random)
    return content[:at] + new + content[at:], f"{new[:40]!r} at {at}"


_MARK: Final = "@put-here@"


def _json(random: Random, content: bytes) -> tuple[bytes, str] | None:
    """JSON, or one line of JSON Lines, with one value changed; None where it is neither.

    A mark is put there first, because no value is as odd as the text that shall stand there.
    """
    lines = content.splitlines(keepends=True)
    at = random.randrange(len(lines))
    for before, text, behind in ((b"", content, b""), (b"".join(lines[:at]), lines[at], b"".join(lines[at + 1 :]))):
        try:
            value = json.loads(text)
            if not isinstance(value, dict | list) or not value:
                continue
            holder, key = _place_in(random, value)
            old = _text(holder[key])
            new = random.choice((_token(random), b"[" + old + b"]", b'{"x": ' + old + b"}", b'"' + old[:50] + b'"'))
            what = f"{key!r} becomes {new[:40]!r}"
            if random.random() < 0.2:
                del holder[key]
                what = f"without {key!r}"
            else:
                holder[key] = _MARK
            changed = _text(value).replace(f'"{_MARK}"'.encode(), new)
        except (ValueError, RecursionError):
            continue
        return before + changed + (b"\n" if text.endswith(b"\n") else b"") + behind, what
    return None


def _place_in(random: Random, value: Any) -> tuple[Any, Any]:
    """A random member of a random container, small ones near the top as likely as long lists far below."""
    while True:
        key = random.choice(sorted(value)) if isinstance(value, dict) else random.randrange(len(value))
        below = value[key]
        if not isinstance(below, dict | list) or not below or random.random() < 0.15:
            return value, key
        value = below


def _text(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


@cache
def bomb() -> bytes:
    """1 GiB of blanks in a megabyte: members of a gzip file count as one after the other."""
    return gzip.compress(b" " * (16 << 20), 9, mtime=0) * 64


def _gzip(random: Random, content: bytes) -> tuple[bytes, str]:
    with gzip.open(io.BytesIO(content)) as file:
        plain = file.read(8 * _LONGEST)
    if len(plain) == 8 * _LONGEST:
        raise ValueError("a bomb already")
    if random.random() < 0.02:
        at = random.randrange(len(plain) + 1)
        return gzip.compress(plain[:at]) + bomb() + gzip.compress(plain[at:]), "a bomb of 1 GiB inside"
    changed, what = _content(random, plain)
    return gzip.compress(changed, 1, mtime=0), f"gzip of: {what}"


def _tar(random: Random, content: bytes) -> tuple[bytes, str]:
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        members = [(one, archive.extractfile(one).read()) for one in archive if one.isreg()]  # type: ignore[union-attr]
    at = random.randrange(len(members))
    member, data = members[at]
    what = f"member {member.name}"
    match random.randrange(4):
        case 0:
            member.name = random.choice(("../../../up.json", "/tmp/absolute.json", "", ".", "x" * 300, "\udcff.json"))
        case 1:
            member.type = random.choice((tarfile.SYMTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, tarfile.GNUTYPE_SPARSE))
            member.linkname, data = "/etc/passwd", b""
        case _:
            data, inside = _content(random, data)
            what += f": {inside}"
    members[at] = member, data
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for one, text in members:
            one.size = len(text)
            archive.addfile(one, io.BytesIO(text))
    return out.getvalue(), what


def _sqlite(random: Random, content: bytes) -> tuple[bytes, str]:
    database = sqlite3.connect(":memory:", isolation_level=None)
    database.deserialize(content)
    tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")]
    table = random.choice(tables)
    column = random.choice([row[1] for row in database.execute(f'PRAGMA table_info("{table}")')])
    statement = random.choice(
        (
            *[f'UPDATE OR REPLACE "{table}" SET "{column}" = {random.choice(_SQL)}'] * 3,
            f'DELETE FROM "{table}" WHERE rowid = {random.randrange(9)}',
            f'DROP TABLE "{table}"',
            f'ALTER TABLE "{table}" DROP COLUMN "{column}"',
            f'INSERT OR REPLACE INTO "{table}" SELECT * FROM "{table}" LIMIT 1000',
        )
    )
    database.executescript(statement)
    return bytes(database.serialize()), f"SQL: {statement}"


_PACKED: Final[tuple[tuple[bytes, int, Callable[[Random, bytes], tuple[bytes, str]]], ...]] = (
    (b"\x1f\x8b", 0, _gzip),
    (b"ustar", 257, _tar),
    (b"SQLite format 3\x00", 0, _sqlite),
)
"""What packed content has, where, and what changes it inside."""
_DAMAGED: Final = (
    *(OSError, EOFError, ValueError, IndexError, KeyError, OverflowError),
    *(zlib.error, tarfile.TarError, sqlite3.Error),
)
