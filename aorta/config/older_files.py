"""Translates configuration files of AORTA 2025 (YAML or JSON) into words of the command line.

    words, notes = expand(["--config", "old.yaml", "label=x"], Path.cwd(), root)

A file is one of AORTA 2025's if it is JSON, or has a section that only those had and no `defaults`. Its keys become
words in the place of `--config`, which are then translated like words of a person; a key that the command line sets as
well is left to it, and a key without a meaning is left out with its reason. Must not drop a key without saying so.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from omegaconf import OmegaConf

from aorta.config.override_words import DEAD, config_path, key_of_today, quoted
from aorta.config.yaml_files import load_yaml, read_text
from aorta.errors import ConfigError

SECTIONS: Final = frozenset({"model", "fsdp", "distributed", "logging"})
"""Sections that no configuration of today has."""
_STRATEGIES: Final = {"no_shard": "ddp", "hybrid_shard": "hsdp"}
"""`fsdp.sharding_strategy` -> what is a strategy of its own today."""
_UNUSED: Final = "the file trains with {mode}, which does not use it"


def expand(words: Sequence[str], caller: Path, root: Path) -> tuple[list[str], list[str]]:
    """The command line with the content of older files in place of their `--config`, and what was left out of them.

    Args:
        caller, root: as in `override_words.translate`.

    Raises:
        ConfigError: a file is missing, cannot be read, or is no configuration.
    """
    expanded: list[str] = []
    notes: list[str] = []
    queue = list(words)
    while queue:
        word = queue.pop(0)
        name, equals, value = word.partition("=")
        if name != "--config" or not (equals or queue):
            expanded.append(word)
            continue
        value = value if equals else queue.pop(0)
        content = _older(value, caller, root)
        if content is None:
            expanded.append(f"--config={value}")
            continue
        given = {key_of_today(other.removeprefix("--override=")) for other in [*expanded, *queue]}
        kept, left_out = _words(content, given)
        expanded += kept
        notes += [f"--config {value}: {note}" for note in left_out]
    return expanded, notes


def _older(value: str, caller: Path, root: Path) -> Mapping[str, Any] | None:
    """The content of a file of AORTA 2025; None for a file of today."""
    path = config_path(value, caller, root)
    try:
        if path.suffix == ".json":
            content = json.loads(read_text(path))
        elif path.suffix in {".yaml", ".yml"}:
            content = OmegaConf.to_container(load_yaml(path), resolve=True)
        else:
            return None
    except Exception as error:
        if path.suffix != ".json":
            return None  # where it is composed, the error is said
        raise ConfigError(f"--config {value}: cannot be read as JSON: {error}") from error
    if path.suffix == ".json" and not (isinstance(content, dict) and content and "defaults" not in content):
        raise ConfigError(f"--config {value}: not a configuration of AORTA 2025; configurations of today are YAML")
    if not isinstance(content, dict) or "defaults" in content:
        return None
    return content if path.suffix == ".json" or SECTIONS & content.keys() else None


def _words(content: Mapping[str, Any], given: set[str]) -> tuple[list[str], list[str]]:
    """Words of a file without the keys that are `given`, and what was left out of it."""
    leaves = dict(_leaves(content))
    sharding = str(leaves.get("fsdp.sharding_strategy")).lower()
    mode = str(leaves.pop("distributed.mode", "fsdp" if "fsdp" in content else "ddp")).lower()
    if mode == "fsdp" and sharding in _STRATEGIES:
        mode = _STRATEGIES[sharding]
        del leaves["fsdp.sharding_strategy"]
    words = [f"parallel={mode}"]
    notes = []
    for key, value in leaves.items():
        why = DEAD.get(key)
        if why is None and key.startswith("fsdp.") and mode not in ("fsdp", "hsdp"):
            why = _UNUSED.format(mode=mode)
        if why is not None:
            notes.append(f"{key} is left out: {why}")
        else:
            words.append(_word(key, value))
    if leaves.get("dataloader.num_workers") and "dataset.on_device" not in leaves:
        words.append("dataset.on_device=false")  # AORTA 2025 always fetched batches through its loader
    kept = []
    for word in words:
        key = key_of_today(word)
        if "parallel" in given and key.startswith("parallel.") and key not in given:
            notes.append(f"{word} is left out: the command line chooses the strategy; give {key} there as well")
        elif key not in given:
            kept.append(word)
    return kept, notes


def _leaves(node: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in node.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def _word(key: str, value: object) -> str:
    if isinstance(value, str):
        return quoted(key, value)
    return f"{key}={json.dumps(value)}"  # of numbers, null, true and lists, JSON's notation is Hydra's too
