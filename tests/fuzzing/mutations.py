"""Changes a tree of files at random: bytes, values of JSON and other text, packed content, and the files themselves.

    tree, told = mutated(random.Random(7), tree)

`told` names each change. Must not: know what a file is for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from random import Random
from typing import Any, Final

from tests.fuzzing import packed
from tests.fuzzing.tree import Special, Tree

TEXT_LIMIT: Final = 1 << 20
"""Longer content is changed as bytes only, which is fast."""
_NUMBER: Final = re.compile(rb"(?<![\w.])-?\d+(\.\d+)?")
_STRING: Final = re.compile(rb'"[^"\\\n]{0,200}"')

TOKENS: Final = (
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
    *(b"[" * 100_000, b'{"a":' * 50_000, b"[" * 2000 + b"]" * 2000, b'"' + b"x" * 300_000 + b'"', b" " * 100_000),
)
"""Values at which readers break: edges of number formats, other types, broken Unicode, depth, length, paths."""
_WEIGHTY: Final = 10_000
"""A token of this many bytes is drawn less often: it only slows the search down."""
_LIGHT: Final = tuple(token for token in TOKENS if len(token) < _WEIGHTY)
_HEAVY: Final = tuple(token for token in TOKENS if len(token) >= _WEIGHTY)
_SPECIAL: Final = (
    *(Special("folder"), Special("fifo")),
    *(Special("link", target) for target in ["nowhere", ".", "..", "/dev/zero", "/dev/null", "/proc/self/mem", "/"]),
)
_NAMES: Final = (
    *("rank{n}", "rank_{n}_metrics.jsonl", "-", "*", "a::b", "\u0661", "\u00b2", "\udcff\udcfe", "a\nb", "x" * 240),
)


def mutated(random: Random, tree: Tree) -> tuple[Tree, list[str]]:
    """A changed copy, and what was changed. Now and then nothing is: seeds have to be answered too."""
    changed, told = dict(tree), list[str]()
    for _ in range(random.choice((0, 1, 1, 1, 1, 2, 2, 3, 5))):
        names = sorted(changed)
        if not names:
            break
        name = random.choice(names)
        if random.random() < 0.06:
            told.append(_files(random, changed, name))
            continue
        content = changed[name]
        if isinstance(content, bytes):
            changed[name], what = content_changed(random, content)
            told.append(f"{name}: {what}")
    return changed, told


def content_changed(random: Random, content: bytes, depth: int = 0) -> tuple[bytes, str]:
    """One file's content with one change, inside what it is packed in more often than outside."""
    if depth < 3 and random.random() < 0.85:
        for suits, change in packed.KINDS:
            if suits(content):
                return change(random, content, lambda inner: content_changed(random, inner, depth + 1))
    if content[:1] in (b"{", b"[") and len(content) < TEXT_LIMIT and random.random() < 0.6:
        found = _json_changed(random, content)
        if found is not None:
            return found
    change = random.choice(_CHANGES)
    return change(random, content), change.__name__.strip("_")


def token(random: Random) -> bytes:
    """One of `TOKENS`."""
    return random.choice(_HEAVY if random.random() < 0.02 else _LIGHT)


def _flip(random: Random, content: bytes) -> bytes:
    changed = bytearray(content)
    for _ in range(random.choice((1, 1, 4, 16)) if changed else 0):
        changed[random.randrange(len(changed))] = random.randrange(256)
    return bytes(changed)


def _cut(random: Random, content: bytes) -> bytes:
    return content[: random.randrange(len(content) + 1)]


def _insert(random: Random, content: bytes) -> bytes:
    at = random.randrange(len(content) + 1)
    return content[:at] + token(random) + content[at + random.choice((0, 0, 1, 5, 40)) :]


def _number(random: Random, content: bytes) -> bytes:
    return _replaced(random, content, _NUMBER)


def _string(random: Random, content: bytes) -> bytes:
    return _replaced(random, content, _STRING)


def _replaced(random: Random, content: bytes, what: re.Pattern[bytes]) -> bytes:
    """One match, or all that are equal to it, replaced by a token. Searched from a random place on."""
    match = what.search(content, random.randrange(len(content) + 1)) or what.search(content)
    if match is None:
        return _insert(random, content)
    new = token(random)
    if random.random() < 0.1 and len(new) < 50:
        return content.replace(match[0], new)
    return content[: match.start()] + new + content[match.end() :]


def _lines(random: Random, content: bytes) -> bytes:
    """Lines doubled, dropped or exchanged."""
    lines = content.splitlines(keepends=True)
    if not lines:
        return content
    at, other = random.randrange(len(lines)), random.randrange(len(lines))
    match random.randrange(4):
        case 0:
            lines.insert(other, lines[at])
        case 1:
            del lines[at]
        case 2:
            lines[at], lines[other] = lines[other], lines[at]
        case _:
            lines[at] = lines[at] * random.choice((2, 50, 1000)) if len(lines[at]) < 1000 else lines[at] * 2
    return b"".join(lines)


def _doubled(random: Random, content: bytes) -> bytes:
    """A stretch of it once more."""
    at = random.randrange(len(content) + 1)
    end = min(len(content), at + random.choice((1, 10, 100, 10_000)))
    return content[:end] + content[at:end] + content[end:]


def _dropped(random: Random, content: bytes) -> bytes:
    at = random.randrange(len(content) + 1)
    return content[:at] + content[at + random.choice((1, 2, 10, 100, 1000)) :]


def _nothing(random: Random, content: bytes) -> bytes:
    return random.choice((b"", b"\x00" * 512, b"\n", b"{}", b"[]", b"null"))


_CHANGES: Final[tuple[Callable[[Random, bytes], bytes], ...]] = (
    *(_flip, _cut, _insert, _insert, _number, _number, _number, _string, _string, _lines, _lines, _doubled, _dropped),
    _nothing,
)


def _json_changed(random: Random, content: bytes) -> tuple[bytes, str] | None:
    """JSON, or one line of JSON Lines, with one value or key changed; None where it is neither."""
    lines = content.splitlines(keepends=True)
    at = random.randrange(len(lines))
    for text, before, behind in ((content, b"", b""), (lines[at], b"".join(lines[:at]), b"".join(lines[at + 1 :]))):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict | list) and value:
            try:
                changed, what = _value_changed(random, value)
            except RecursionError:  # what an earlier change nested too deeply can be read, and not written
                continue
            end = b"\n" if text.endswith(b"\n") else b""
            return before + changed + end + behind, what
    return None


_PLACE: Final = "@put-here@"


def _value_changed(random: Random, value: Any) -> tuple[bytes, str]:
    """Text of the value with one place in it changed: a mark is put there first, because no value is as odd as the
    text that shall stand there.
    """
    holder, key = _place_in(random, value)
    put = token(random)
    match random.randrange(6):
        case 0:
            del holder[key]
            return _text(value), f"without {key!r}"
        case 1 if isinstance(holder, dict):
            holder[_PLACE] = holder.pop(key)
            return _text(value).replace(b'"' + _PLACE.encode() + b'"', _as_key(random, key)), f"key {key!r}"
        case 2:
            old = _text(holder[key])
            put = random.choice(
                (b"[" + old + b"]", b'{"x": ' + old + b"}", b",".join([old] * 3), b'"' + old[:50] + b'"')
            )
    holder[key] = _PLACE
    what = f"{key!r} becomes {put[:40]!r}"
    return _text(value).replace(b'"' + _PLACE.encode() + b'"', put), what


def _as_key(random: Random, key: object) -> bytes:
    """A key twice (its own name and another's), or of odd characters."""
    names = ("\\ud800", "", "rank", "__proto__", "k" * 10_000, str(random.randrange(9)), f"{key} ", str(key).upper())
    return b'"%s"' % random.choice(names).encode("utf-8", "surrogatepass")


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


def _files(random: Random, tree: Tree, name: str) -> str:
    """Change which files there are, in place."""
    folder, _, last = name.rpartition("/")
    match random.randrange(5):
        case 0:
            del tree[name]
            return f"{name}: gone"
        case 1 | 2:
            tree[name] = special = random.choice(_SPECIAL)
            return f"{name}: {special.kind} {special.target}"
        case 3:
            other = random.choice(sorted(tree))
            tree[name] = tree[other]
            return f"{name}: as {other}"
    new = random.choice(_NAMES).format(n=random.choice((0, 1, 7, 10**25)))
    new = random.choice((new, new + last, re.sub(r"\d+", lambda _: str(random.choice((0, 1, 9, 2**31, 10**25))), last)))
    place = f"{folder}/{new}" if folder else new
    tree[place] = tree[name] if random.random() < 0.5 else tree.pop(name)
    return f"{name}: also, or only, {place!r}"
