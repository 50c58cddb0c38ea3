"""Reads a YAML file that a user wrote, or that came from elsewhere.

    settings = load_yaml(Path("mine.yaml"))

Must not: know what a file is for, or build what a few aliases of aliases unfold to.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, Final

import yaml
from omegaconf import OmegaConf

_LONGEST_BYTES: Final = 1 << 20
_MOST_VALUES: Final = 100_000
"""Of a file with its aliases unfolded; the whole configuration has some 200."""


def load_yaml(path: Path) -> Any:
    """Return the configuration in a file, as `OmegaConf.load` gives it.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no plain file, longer than a configuration, not YAML, or unfolds to more values than one has.
    """
    if path.exists() and not path.is_file():
        raise ValueError("a folder, a pipe or a device, not a file")
    with path.open("rb") as file:
        content = file.read(_LONGEST_BYTES + 1)
    if len(content) > _LONGEST_BYTES:
        raise ValueError(f"longer than {_LONGEST_BYTES >> 20} MiB, which no configuration is")
    text = content.decode("utf-8")
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is not None and _unfolded(node, {}) > _MOST_VALUES:
            raise ValueError(f"its aliases unfold to more than {_MOST_VALUES} values")
        return OmegaConf.load(io.StringIO(text))
    except RecursionError:
        raise ValueError("nested too deeply, or in itself") from None
    except (ValueError, OSError):
        raise
    except Exception as error:  # nothing of ours runs in there: whatever it raises is about the file
        raise ValueError(f"not YAML: {' '.join(str(error).split())}") from error


def _unfolded(node: yaml.Node, known: dict[int, int]) -> int:
    """Return the number of values in a node with its aliases unfolded, each node counted once."""
    if id(node) not in known:
        inner = node.value if isinstance(node, yaml.CollectionNode) else []
        parts = [part for each in inner for part in (each if isinstance(each, tuple) else (each,))]
        known[id(node)] = 1 + sum(_unfolded(part, known) for part in parts)
    return known[id(node)]
