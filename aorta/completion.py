"""Completion of the command line in bash, zsh and fish, by argcomplete: commands, options, and keys of a configuration.

    eval "$(register-python-argcomplete aorta)"        # docs/running.md has the lines for each shell

Only the parser of the command that stands on the line is loaded. Must not import torch: people wait for it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from types import UnionType
from typing import Any, Final, get_args, get_type_hints

import argcomplete

from aorta.config import CONFIG_DIR
from aorta.config.schema import GROUPS, NAMES, Config

_BOOLEANS: Final = ("true", "false")
_TRAIN: Final = (
    ("--nproc_per_node", "ranks on this machine"),
    ("--config", "a YAML file to build on"),
    ("--multirun", "a sweep"),
    ("--cfg", "print the configuration: job, hydra or all"),
    ("--info", "what Hydra knows"),
    ("--version", "AORTA's version"),
)


def complete(parsers: Mapping[str, Callable[[], argparse.ArgumentParser] | None], line: str) -> None:
    """Write the completions that the shell has asked for, and end the process.

    Args:
        parsers: command -> what makes its parser; None where it takes keys of a configuration.
        line: the command line up to now.
    """
    whole = argparse.ArgumentParser(prog="aorta")
    whole.add_argument("--version", action="store_true")
    commands = whole.add_subparsers()
    words = line.split()[1:]
    chosen = dict(word.split("=", 1) for word in words if "=" in word)
    for name, make in parsers.items():
        if name not in words:
            commands.add_parser(name)
        elif make is None:
            training = commands.add_parser(name)
            for option, purpose in _TRAIN:
                training.add_argument(option, help=purpose)
            keys = training.add_argument("overrides", nargs="*")
            keys.completer = lambda **_: list(overrides(chosen))  # type: ignore[attr-defined]  # for argcomplete
        else:
            commands.add_parser(name, parents=[make()], add_help=False, conflict_handler="resolve")
    argcomplete.autocomplete(whole, always_complete_options=False)


def overrides(chosen: Mapping[str, str]) -> Iterator[str]:
    """Yield `key=` of every key, and `key=value` where the values are known.

    Args:
        chosen: options of groups that stand on the line; keys of a group's other options are left out.
    """
    yield from (f"experiment={path.stem}" for path in sorted((CONFIG_DIR / "experiment").glob("*.yaml")))
    for group, options in GROUPS.items():
        yield from (f"{group}={option}" for option in options)
        kinds = [options[chosen[group]]] if chosen.get(group) in options else list(options.values())
        for kind in dict.fromkeys(kinds):
            yield from _keys(kind, f"{group}.")
    yield from _keys(Config, "")


def _keys(kind: type[Any], prefix: str) -> Iterator[str]:
    hints = get_type_hints(kind)
    for field in fields(kind):
        key, hint = f"{prefix}{field.name}", hints[field.name]
        parts = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        types = [part for part in parts if isinstance(part, type)]
        if key in GROUPS or key in NAMES:
            continue
        section: Any = field.default_factory
        if isinstance(section, type) and is_dataclass(section):
            yield from _keys(section, f"{key}.")
            continue
        values = [member.name for one in types if issubclass(one, Enum) for member in one]
        values += _BOOLEANS if bool in types else ()
        yield from (f"{key}={value}" for value in values)
        if not values:
            yield f"{key}="
