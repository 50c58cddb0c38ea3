r"""Hides passwords, tokens and keys in whatever is printed, logged or written.

    redact("s3://me:pw@host/t?sig=ab HF_TOKEN=ab step=3")     "s3://me:...@host/t?sig=... HF_TOKEN=... step=3"
    hide(["run", "--password", "ab cd"])                      ["run", "--password", "..."]

A secret is known by the name before it (`SECRET`), as the password or the parameter of a URL, by its shape, or because
an environment variable of such a name has that value. Whatever prints, logs or writes text from outside calls `redact`.
Must not touch other values, or turn JSON into text that is none.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Final
from urllib.parse import quote

HIDDEN: Final = "..."
NAMES: Final = {
    "token": r"token(?!s(?![a-z])|iz)",  # not max_tokens, which counts them
    **{word: word for word in ("secret", "credential", "cookie")},
    "auth": r"auth(?!or(?!iz))(?:orization)?",  # not author
    "key": r"key(?:(?<=[._-]key)(?<!full_key)|(?<=apikey)|(?<=accountkey)|(?<=accesskey))(?:_?id)?(?![a-z])",
    "pass": r"pass(?:w(?:or)?d?|phrase|(?<=[?&;_-]pass)(?<!ward.pass)(?![a-z]))",  # not forward_pass
    "pwd": r"pwd(?<=[?&;_-]pwd)(?![a-z])",
    "sig": r"sig(?<=[?&;_-]sig)(?:nature)?(?![a-z])",
}
SECRET: Final = re.compile("|".join(NAMES.values()), re.IGNORECASE)
"""Matches names of variables, options, parameters or keys whose value is a secret."""
_QUOTE: Final = r"""(?:\\(?:\\\\)*)?["']"""
_VALUE: Final = (  # in quotes, which are none of JSON's own where a text is JSON, or up to a blank
    r"""(?:"(?![,}\]:\s])((?:[^"\\\n]|\\.)+)|'((?:[^'"\\\n]|\\[^'"])+)|\\(?:\\\\)*["']([^"\\]+)"""
)
_GIVEN: Final = (
    rf"""(?:[\w.-]{{0,40}}+(?:"\s?:\s*"((?:[^"\\\n]|\\.)+)|{_QUOTE}\s?:\s*{_VALUE}))"""  # "name": "value"
    rf"""|(?:[\w.-]{{0,40}}+(?:{_QUOTE})?\s?={{1,2}}\s?|s?:\s?){_VALUE}|(?:(?:bearer|basic|token)\s+)?"""  # name=value
    # Brackets that close, and a comma before another name, are not of the value.
    r"""((?:[^\s"'<>&\\,)\]}]|\\[^"']|[,)\]}]+(?![\s"'<>&,)\]}]|[\w.]+=|$))+)))"""
)
_RULES: Final = {
    **{word: re.compile(rule + _GIVEN) for word, rule in NAMES.items()},
    **{word: re.compile(rf"{word}(?<![a-z0-9]{word})([\w-]{{20,}})") for word in ("hf_", "ghp_", "github_pat_", "sk-")},
    "eyj": re.compile(r"eyj(?<![a-z0-9]eyj)([\w-]{8,}\.[\w-]{8,}\.[\w-]+)"),  # JSON Web Tokens, RFC 7519
    "private key-----": re.compile(r"private key-----([^-]+)"),  # PEM, RFC 7468
    "bearer": re.compile(r"bearer\s+([\w+/=.~-]{8,})"),
    "--": re.compile(
        rf"""--(?=(?!-)[\w-]{{0,40}}?(?:{"|".join(NAMES.values())}))[\w-]{{1,60}}+"""
        rf"""(?:{_QUOTE},\s*{_QUOTE}([^"'\\-][^"'\\]*)|\s+([^\s"'\\-][^\s"'\\]*))"""
    ),
    "@": re.compile(r"""(?:^|(?<=[\s/'"=(,]))[^\s/@:"'<>\\=]{1,64}:(?!:)([^\s/@"'<>\\]+)@(?!sha256)"""),
    ":/": re.compile(
        r""":/{1,2}[^\s/@:"'<>]*:((?:[^\s/"\\<>]|\\.)+)@"""
        r"""|:/{1,2}(?:(?<=http:/)|(?<=https:/)|(?<=http://)|(?<=https://))([^\s/@:"'<>?]+)@"""
    ),
}
"""What a text in lower case has to hold -> where its secret is: the group that matches. All are linear in the text."""


def redact(text: str) -> str:
    """Return the text with `...` in place of secrets."""
    for value in _values():
        text = text.replace(value, HIDDEN)
    lower = text.lower() if text.isascii() else re.sub("[A-Z]+", lambda found: found[0].lower(), text)
    found = (match for word, rule in _RULES.items() if word in lower for match in rule.finditer(lower))
    shown, after = [], 0
    for begin, end in sorted(match.span(match.lastindex or 0) for match in found):
        if begin >= after:
            shown += [text[after:begin], HIDDEN]
        after = max(after, end)
    return "".join([*shown, text[after:]])


@cache
def _values() -> tuple[str, ...]:
    """Return the secrets of the environment as text, JSON and URLs have them. Fewer than 8 characters may be a word."""
    secrets = [value for name, value in os.environ.items() if SECRET.search(name) and len(value) >= 8]
    written = [
        form
        for value in secrets
        if not (value[0] == "/" and os.path.exists(value))  # noqa: PTH110  SSH_AUTH_SOCK: any text may be there
        for form in (value, json.dumps(value)[1:-1], quote(value, safe=""))
    ]
    return tuple(sorted(written, key=len, reverse=True))


def hide(words: Sequence[str]) -> list[str]:
    """Return arguments without secrets: also what follows `NAME=`, after other `=` too (`--env=HF_TOKEN=a b`), or an
    option (`--password`) whose name `SECRET` matches.
    """
    shown: list[str] = []
    for before, word in zip(["", *words], words, strict=False):
        parts = word.split("=")
        named = next((at for at, name in enumerate(parts[:-1], 1) if SECRET.search(name)), None)
        if before.startswith("-") and "=" not in before and not word.startswith("-") and SECRET.search(before):
            shown.append(HIDDEN)
        else:
            shown.append(redact(word) if named is None or "://" in word else "=".join([*parts[:named], HIDDEN]))
    return shown


def shown_values(values: Mapping[str, str]) -> dict[str, str]:
    """Return values by name, in their order, without secrets."""
    return {name: HIDDEN if SECRET.search(name) else redact(value) for name, value in values.items()}


def shown_variables(environment: Mapping[str, str]) -> list[str]:
    """Return the same as NAME=VALUE."""
    return [f"{name}={value}" for name, value in shown_values(environment).items()]
