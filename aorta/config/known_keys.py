"""Which keys a configuration may have: lists the alternatives to one that does not exist, and finds such keys.

Must not compose or change a configuration.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from aorta.config.schema import GROUPS, Config


def unknown_keys(node: DictConfig, prefix: str = "") -> Iterator[str]:
    """Keys that the schema does not have, each with its value and what may stand there. Hydra adds such a key where it
    is written `+key=value`, and nothing would ever read it.
    """
    kind = OmegaConf.get_type(node)
    if kind is None or not is_dataclass(kind):
        return
    known = {field.name for field in fields(kind)}
    for name in map(str, node):
        key, value = prefix + name, node._get_node(name)
        if name not in known:
            yield "\n  ".join([f"{key}={value}: Key '{name}' not in '{kind.__name__}'", *choices(key)])
        elif isinstance(value, DictConfig) and not value._is_none():
            yield from unknown_keys(value, f"{key}.")


def choices(key: str) -> Iterator[str]:
    """Lines that list the alternatives to the last part of `key`; none where the key itself is right."""
    *parents, last = key.split(".")
    if not last:
        return
    nodes: dict[str, Any] = {"": Config}
    for part in parents:
        if part in GROUPS and nodes == {"": Config}:
            nodes = {f"{part}={option}": node for option, node in GROUPS[part].items()}
        else:
            nodes = {
                where: f.default_factory
                for where, node in nodes.items()
                for f in fields(node)
                if f.name == part and is_dataclass(f.default_factory)
            }
    names = {where: [f.name for f in fields(node)] for where, node in nodes.items()}
    elsewhere = [where for where, known in names.items() if last in known and where]
    if len(elsewhere) < len(names) and elsewhere:
        yield f"  {key} belongs to {' and '.join(elsewhere)}"
    if any(last in known for known in names.values()):
        return
    shared = [key for key in next(iter(names.values()), ()) if all(key in known for known in names.values())]
    if shared:
        yield f"  keys of {'.'.join(parents) or 'the root'}: {', '.join(shared)}"
    for where, known in names.items():
        if own := [key for key in known if key not in shared]:
            yield f"  also of {where}: {', '.join(own)}"
    close = difflib.get_close_matches(last, {name for known in names.values() for name in known}, n=1)
    if close:
        yield f"  did you mean {close[0]}?"
