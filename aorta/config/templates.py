"""Fills name templates with variables in braces: `rank{rank}.{batch:06d}.json` -> `rank3.000120.json`.

A variable whose value is not known yet stays as it is written, and so does `{}`; an unknown variable name is an error.
Must not touch the disk.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from string import Formatter
from typing import Any

RANK_FIELDS = ("run_name", "rank", "local_rank", "world_size", "local_world_size", "node_rank")
"""Variables known before the run."""
TIME_FIELDS = (
    *("epoch", "batch", "batch_in_epoch", "sample", "sample_in_epoch", "token", "token_in_epoch"),
    *("total_wct", "epoch_wct", "batch_wct"),
)
"""Variables known when a window is saved: finished counts, and wall-clock seconds (float)."""
FILE_FIELDS = (*RANK_FIELDS, *TIME_FIELDS)
REMOTE_FIELDS = (*FILE_FIELDS, "file")
"""`file`: the path of a saved file below its trace folder."""
_WIDE = re.compile(r"\d{4,}")
_SAMPLES: dict[str, Any] = {name: 1.5 if name.endswith("_wct") else 1 for name in FILE_FIELDS}
_SAMPLES |= {"run_name": "run", "file": "file"}


def fields_of(template: str) -> set[str]:
    """Return the names of the variables in a template.

    Raises:
        ValueError: its braces do not match.
    """
    return {name for _, name, _, _ in Formatter().parse(template) if name}


def problem_of(template: str, known: Collection[str] = FILE_FIELDS) -> str | None:
    """Return what is wrong with a template, as text; None when it can be used."""
    try:
        unknown = sorted(fields_of(template) - set(known))
        if unknown:
            return f"{{{unknown[0]}}} is no variable; there are {', '.join(known)}"
        fill(template, {name: _SAMPLES[name] for name in known})
    except (ValueError, KeyError, IndexError) as error:
        return f"not a template: {error}"
    return None


def fill(template: str, values: Mapping[str, Any]) -> str:
    """Return the template with every variable in `values` replaced, format included; others stay as they are written.

    Raises:
        ValueError: a format does not suit its value, or the braces do not match.
    """
    parts: list[str] = []
    for text, name, form, conversion in Formatter().parse(template):
        parts.append(text)
        if name is None:
            continue
        if name in values:
            if form and _WIDE.search(form):
                raise ValueError(f"{{{name}:{form}}}: a width or precision has at most three digits")
            value = values[name]
            if conversion:
                value = Formatter().convert_field(value, conversion)
            parts.append(format(value, form or ""))
        else:
            parts.append(f"{{{name}{f'!{conversion}' if conversion else ''}{f':{form}' if form else ''}}}")
    return "".join(parts)


def distinguishes_ranks(*templates: str) -> bool:
    """Return whether two ranks always get different names."""
    names = set().union(*map(fields_of, templates))
    return "rank" in names or {"local_rank", "node_rank"} <= names
