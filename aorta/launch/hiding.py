"""Words of a command line -> the same words as they may be written down. The one rule for run manifests and plans.

Enters: words. Leaves: words. Must not: load torch (plans use it), or let the value of a name that looks like a secret's
through.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

HIDDEN: Final = "..."
SECRET: Final = re.compile("TOKEN|SECRET|PASSW|KEY|CREDENTIAL|AUTH", re.IGNORECASE)
"""What the name of a variable, option or key holds whose value is a secret."""


def hide(words: Sequence[str]) -> list[str]:
    """Words with secrets replaced by `...`: what follows `NAME=`, however many `=` stand before it
    (`--env=HF_TOKEN=abc`), and the word behind an option (`--password abc`), where the name looks like a secret's.
    """
    shown: list[str] = []
    before = ""
    for word in words:
        of_option = before.startswith("-") and "=" not in before and not word.startswith("-")
        shown.append(HIDDEN if of_option and SECRET.search(before) else _hidden(word))
        before = word
    return shown


def _hidden(word: str) -> str:
    parts = word.split("=")
    for at, name in enumerate(parts[:-1]):
        if SECRET.search(name):
            return "=".join([*parts[: at + 1], HIDDEN])
    return word
