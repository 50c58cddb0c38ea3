r"""Hides passwords, tokens and keys in whatever is printed, logged or written.

    redact("s3://me:pw@host/t?sig=ab HF_TOKEN=ab step=3")     "s3://me:...@host/t?sig=... HF_TOKEN=... step=3"
    hide(["run", "--password", "ab cd"])                      ["run", "--password", "..."]
    redacted({"HF_TOKEN": "ab", "sort_key": "ab"})            {"HF_TOKEN": "...", "sort_key": "ab"}

A secret is known by the name before it (`SECRET`), as the password or the parameter of a URL, by its shape, or because
an environment variable of such a name has that value; artifacts/README.md has the table. Whatever prints, logs or
writes text from outside calls `redact`, of a document `redacted`; what is compared is compared before.

Each rule begins with a word, and from there on has repetitions that are bounded, or that nothing follows: so the work
grows with the length of the text alone. Repetitions of more than single characters stand in atomic groups: possessive
ones keep what an iteration that fails has passed, in Python before 3.11.5 (gh-106052). Must not touch keys, numbers or
other values. Of JSON only what stands in its strings is hidden, so that it stays JSON.
"""

from __future__ import annotations

import json
import os
import re
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import accumulate
from typing import Any, Final
from urllib.parse import quote

HIDDEN: Final = "..."
_TAIL: Final = r"(?:[_.-]?(?:\d{1,3}|id|value|b64|base64|read|write|prod|dev|test))?(?![a-z0-9_.-])"
_KEYS: Final = "api|access|account|secret|private|encryption|signing|master|ssh|auth|service|storage|deploy|license"
_PASS: Final = "db|user|root|admin|pg|sql|smtp|mail|ftp|ssh|ldap|proxy|http|login|registry|redis|my"
NAMES: Final = {
    "token": rf"(?:(?:api|access|auth|refresh|bearer|hf)[_.-]?tokens|token){_TAIL}",  # not max_tokens, which counts
    "secret": r"secrets?",
    "credential": r"credentials?",
    "cookie": r"cookies?",
    "auth": rf"auth(?:orization)?{_TAIL}",  # not author
    "key": rf"(?:{_KEYS})[_.-]?keys?{_TAIL}",  # not sort_key
    "pass": rf"(?:pass(?:w(?:or)?ds?|phrases?)|(?:(?<=[?&;])|(?:{_PASS})[_-]?)pass{_TAIL})",  # not forward_pass
    "pwd": rf"(?<=[?&;_-])pwd{_TAIL}",
    "sig": rf"(?<=[?&;-])sig(?:nature)?{_TAIL}",
}
"""A word in lower case -> the names with it whose values are secrets."""
SECRET: Final = re.compile("|".join(f"(?:{name})" for name in NAMES.values()), re.IGNORECASE)
"""Matches names of variables, options, parameters or keys whose value is a secret."""
_QUOTE: Final = r"""\\{0,7}["']"""
_BETWEEN: Final = rf"{_QUOTE}\s{{0,80}},\s{{0,80}}{_QUOTE}"  # two words of a list


def _quoted(mark: str, inside: str, guard: str = "") -> str:
    """Match a text in quotes, or a list of such from the first to the end of the last. `guard`: of an opening quote."""
    between = rf"{mark}\s{{0,80}},\s{{0,80}}{mark}{guard}"
    return rf"(?:{mark}{guard}((?>(?:{inside})+))|\[\s{{0,80}}{mark}{guard}((?>(?:{inside}|{between})+)))"


_JSON: Final = _quoted('"', r'[^"\\\n]++|\\.')
_IN_QUOTES: Final = "|".join(
    (
        _quoted('"', r'[^"\\\n]++|\\.', r"(?![,}\]:\s]|$)"),  # the quotes are none of JSON's own, where a text is JSON
        r'"{3}([^"]++)',  # TOML's
        _quoted("'", r"""[^'"\\\n]++|\\[^'"]"""),
        _quoted(r"""\\{1,7}["']""", r"""[^"'\\]++"""),
    )
)
_VALUE: Final = "|".join(
    (
        _IN_QUOTES,
        # A list or a mapping without quotes, of which numbers alone are no secrets.
        r"""\[(?![\d\s.,e+-]{0,80}\])([^\s"'\[\]{}\\][^"'\[\]{}\\\n]*+)|\{([^"'{}\\\n]++)""",
        # Up to a blank: brackets that close, and a comma before another name, are not of the value.
        r"""(?:(?:bearer|basic|token)\s{1,3})?((?>(?:[^\s"'<>&\\,)\]}\[{]++|(?<=[^=:\s])[\[{]|\\[^"']"""
        r"""|[,)\]}]{1,8}+(?![\s"'<>&,)\]}]|[\w.]{1,40}=|$))+))""",
    )
)
_ITEM: Final = r"(?:[ \t]{1,80}|[ \t]{0,80}-[ \t])"  # a line of a block of YAML begins so
_LINES: Final = (
    rf"""[ \t]?[|>]?[+-]?[ \t]?(?:\n((?>(?:(?<=\n){_ITEM}[^\n]*+(?:\n(?={_ITEM}))?)+))"""
    rf"""|((?>(?:\\n{_ITEM}(?:[^"\\\n]|\\[^n])*+)+)))"""
)
_GIVEN: Final = (
    rf"""(?:"\s?:\s{{0,3}}{_JSON}"""  # "name": "value"
    rf"""|{_QUOTE}\s?:\s?(?:{_IN_QUOTES})|:{_LINES}|(?:(?:{_QUOTE})?\s?={{1,2}}\s?|:\s?)(?:{_VALUE}))"""  # name=value
)
_ANY_TAIL: Final = dict.fromkeys(("secret", "credential", "cookie", "pass"), r"[\w.-]{0,40}+")
_NAMED: Final = {word: re.compile(rf"(?:{rule}){_ANY_TAIL.get(word, '')}{_GIVEN}") for word, rule in NAMES.items()}
_OPTION: Final = rf"(?:\s{{1,3}}|=|{_BETWEEN})"
_RULES: Final = _NAMED | {
    "private key-----": re.compile(r"private key-----([^-]++)"),  # PEM, RFC 7468
    "bearer": re.compile(r"bearer\s{1,3}([\w+/=.~-]{8,}+)"),
    "cookie:": re.compile(r"cookie:\s{0,3}([\w.-]{1,64}=[^\"'\\\n]++)"),  # RFC 6265
    "--": re.compile(
        rf"""(?<![\w-])--(?=(?!-)[\w-]{{0,40}}?(?:{"|".join(NAMES.values())}))[\w-]{{1,60}}+"""
        rf"""(?:{_BETWEEN}([^"'\\-][^"'\\]*+)|\s{{1,3}}([^\s"'\\-][^\s"'\\]*+))"""
    ),
    "-u": re.compile(  # curl -u me:pw; not a user's number
        rf"""(?<![\w-])-(?:u|-(?:proxy-)?user){_OPTION}["']?[^\s"'\\:/]{{1,64}}:(?!\d{{1,9}}(?![^\s"'\\]))([^\s"'\\]++)"""
    ),
    "-p": re.compile(  # not a number, a path, or a word
        rf"""(?<![\w-])-p{_OPTION}["']?(?=[^\s"'\\/.:=,]{{0,64}}\d)(?=[^\s"'\\/.:=,]{{0,64}}[a-z])"""
        r"""([^\s"'\\/.:=,]{4,128}+)(?![/.:=,])"""
    ),
    **{
        word: re.compile(
            rf"{word}\w{{0,6}}(?:{_OPTION}[^\s\"'\\]{{1,80}}+){{0,8}}?{_OPTION}-p{_OPTION}?(?!\d+\b)([^\s\"'\\]++)"
        )
        for word in ("sshpass", "mysql", "login")
    },
    "@": re.compile(r"""(?:^|(?<=[\s/'"=(,]))[^\s/@:"'<>\\=]{1,64}:(?!:)([^\s/@"'<>\\]{1,128})@(?!sha256)"""),
    ":/": re.compile(
        r""":/{1,2}[^\s/@:"'<>]{0,128}:((?:[^\s/"\\<>]|\\.)+)@"""
        r"""|:/{1,2}(?:(?<=http:/)|(?<=https:/)|(?<=http://)|(?<=https://))([^\s/@:"'<>?]+)@"""
    ),
}
"""What a text in lower case has to hold -> where its secret is: the group that matches."""
_SHAPES: Final = {
    "hf_": "[A-Za-z0-9]{30,}+",
    **dict.fromkeys((f"gh{kind}_" for kind in "pousr"), "[A-Za-z0-9]{30,}+"),
    "github_pat_": r"\w{30,}+",
    "glpat-": r"[\w-]{20,}+",
    "nvapi-": r"[\w-]{20,}+",
    "npm_": "[A-Za-z0-9]{30,}+",
    "AIza": r"[\w-]{30,}+",
    **dict.fromkeys((f"xox{kind}-" for kind in "abeoprs"), r"[\w-]{10,}+"),
    "sk-": r"(?=[\w-]{0,40}?[A-Za-z0-9]{16})[\w-]{20,}+",
    "eyJ": r"[\w-]{8,}+\.[\w-]{8,}+\.[\w-]++",  # JSON Web Tokens, RFC 7519
}
"""How a token begins -> what follows. Labels and names may begin so too: they are shorter, or have words in them."""
_BEFORE: Final = r"(?:(?<![\w-])|(?<=\\[nrt])|(?<=%[0-9A-F]{2}))"  # the end of a line in JSON, a character in a URL
_SHAPED: Final = {begin: re.compile(rf"{_BEFORE}{begin}({rest})") for begin, rest in _SHAPES.items()}
_PLAIN: Final = re.compile(r"[A-Za-z_]+|[\d.,:+-]+")


_STRING: Final = re.compile(r'"((?>(?:[^"\\]++|\\.)*))"')
_ESCAPE: Final = re.compile(r"\\u[dD][89abAB][0-9A-Fa-f]{2}\\u[0-9A-Fa-f]{4}|\\u[0-9A-Fa-f]{4}|\\.")


def redact(text: str, *, part_of_json: bool = False) -> str:
    """Return the text with `...` in place of secrets.

    Args:
        part_of_json: it consists of whole tokens of JSON (RFC 8259). Documents and lines of JSON are known as such.
    """
    spans = list(_spans(text))
    return _without(text, _in_strings(text, spans) if spans and (part_of_json or _is_json(text)) else spans)


def _is_json(text: str) -> bool:
    """Return whether a text is a document of JSON, or has one in each line."""
    if text.lstrip()[:1] not in ("{", "[", '"'):
        return False
    for documents in ([text], text.strip().split("\n")):
        with suppress(ValueError, RecursionError):
            for document in documents:
                json.loads(document)
            return True
    return False


def _in_strings(text: str, spans: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield what of the spans is in a string of JSON, with whole escape sequences."""
    waiting = deque(sorted(spans))
    for string in _STRING.finditer(text):
        begin_of_string, end_of_string = string.span(1)
        escapes: list[tuple[int, int]] | None = None
        while waiting and waiting[0][0] < end_of_string:
            begin, end = waiting.popleft()
            if end > end_of_string:  # the rest may be in other strings
                waiting.appendleft((end_of_string, end))
            begin, end = max(begin, begin_of_string), min(end, end_of_string)
            if begin < end:
                if escapes is None:
                    escapes = [escape.span() for escape in _ESCAPE.finditer(text, begin_of_string, end_of_string)]
                yield _edges(escapes, begin)[0], _edges(escapes, end)[1]


def _edges(escapes: list[tuple[int, int]], position: int) -> tuple[int, int]:
    """Return where the escape sequence around a position begins and ends, or the position itself twice."""
    after = bisect_left(escapes, (position, position))
    begin, end = escapes[after - 1] if after else (position, position)
    return (begin, end) if begin < position < end else (position, position)


def _without(text: str, spans: Iterable[tuple[int, int]]) -> str:
    shown, after = [], 0
    for begin, end in sorted(spans):
        if begin >= after:
            shown += [text[after:begin], HIDDEN]
        after = max(after, end)
    return "".join([*shown, text[after:]])


def _spans(text: str) -> Iterator[tuple[int, int]]:
    """Yield where secrets are."""
    lower = text.lower() if text.isascii() else re.sub("[A-Z]+", lambda match: match[0].lower(), text)
    for rules, searched in ((_RULES, lower), (_SHAPED, text)):
        for word, rule in rules.items():
            if word in searched:
                yield from (match.span(match.lastindex or 0) for match in rule.finditer(searched))
    for value in _values():
        begin = text.find(value)
        while begin >= 0:
            yield begin, begin + len(value)
            begin = text.find(value, begin + len(value))


@cache
def _values() -> tuple[str, ...]:
    """Return the secrets of the environment as text, JSON and URLs have them. A word, a number and what has fewer than
    8 characters are none: they may stand anywhere.
    """
    return tuple(
        form
        for name, value in os.environ.items()
        if SECRET.search(name) and len(value) >= 8 and not _PLAIN.fullmatch(value)
        if not (value[0] == "/" and os.path.exists(value))  # noqa: PTH110  SSH_AUTH_SOCK: any text may be there
        for form in {value, json.dumps(value)[1:-1], quote(value, safe="")}
    )


def redacted(document: Any, *, secret: bool = False) -> Any:
    """Return a document of built-in types without secrets in its texts; its keys and numbers are as they were.

    Args:
        secret: every text in it is one, as it stands under the name of a secret.
    """
    if isinstance(document, str):
        return HIDDEN if secret and document else redact(document)
    if isinstance(document, Mapping):
        return {
            key: redacted(value, secret=secret or bool(isinstance(key, str) and SECRET.search(key)))
            for key, value in document.items()
        }
    return [redacted(value, secret=secret) for value in document] if isinstance(document, list | tuple) else document


def hide(words: Sequence[str]) -> list[str]:
    """Return arguments without secrets: also what follows `NAME=`, after other `=` too (`--env=HF_TOKEN=a b`), or an
    option (`--password`) whose name `SECRET` matches.
    """
    spans = list(_spans(" ".join(words)))  # of options whose argument is the next word, too
    begins = accumulate((len(word) + 1 for word in words), initial=0)
    shown: list[str] = []
    for before, word, begin_of_word in zip(["", *words], words, begins, strict=False):
        parts = word.split("=")
        named = next((count for count, name in enumerate(parts[:-1], 1) if SECRET.search(name)), None)
        if before.startswith("-") and "=" not in before and not word.startswith("-") and SECRET.search(before):
            shown.append(HIDDEN)
        elif named is not None and "://" not in word:
            shown.append("=".join([*parts[:named], HIDDEN]))
        else:
            own = [(max(begin - begin_of_word, 0), min(end - begin_of_word, len(word))) for begin, end in spans]
            shown.append(_without(word, [(begin, end) for begin, end in own if begin < end]))
    return shown


def shown_values(values: Mapping[str, str]) -> dict[str, str]:
    """Return values by name, in their order, without secrets."""
    return {name: HIDDEN if SECRET.search(name) else redact(value) for name, value in values.items()}


def shown_variables(environment: Mapping[str, str]) -> list[str]:
    """Return the same as NAME=VALUE."""
    return [f"{name}={value}" for name, value in shown_values(environment).items()]
