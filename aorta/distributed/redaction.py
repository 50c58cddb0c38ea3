"""Redacts secrets in command lines before they are written down. The only such rule, for run manifests and plans.

    hide(["--env=HF_TOKEN=abc", "--password", "x"])  # ["--env=HF_TOKEN=...", "--password", "..."]

Must not load torch (plans use it), or pass on the value of a name that looks like a secret's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

HIDDEN: Final = "..."
SECRET: Final = re.compile("TOKEN|SECRET|PASSW|KEY|CREDENTIAL|AUTH", re.IGNORECASE)
"""Matches names of variables, options or keys whose value is a secret."""


def hide(words: Sequence[str]) -> list[str]:
    """The arguments with secrets replaced by `...`.

    A secret is what follows `NAME=`, however many `=` come before it (`--env=HF_TOKEN=abc`), or the argument after an
    option (`--password abc`), where the name matches `SECRET`.
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


def shown_values(values: Mapping[str, str]) -> dict[str, str]:
    """Values by name, in their order; those whose names look like secrets are hidden."""
    return {name: HIDDEN if SECRET.search(name) else value for name, value in values.items()}


def shown_variables(environment: Mapping[str, str]) -> list[str]:
    """The same as NAME=VALUE."""
    return [f"{name}={value}" for name, value in shown_values(environment).items()]
