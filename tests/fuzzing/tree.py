"""A folder as a value: relative path -> content, small enough to be copied and changed thousands of times a minute."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import NamedTuple, TypeAlias


class Special(NamedTuple):
    """What stands where a file is expected: `folder`, `fifo`, or `link` to a target."""

    kind: str
    target: str = ""


Tree: TypeAlias = dict[str, bytes | Special]


def read_tree(folder: Path) -> Tree:
    """Every regular file below a folder."""
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def write_tree(tree: Tree, folder: Path) -> None:
    """Write it below a new folder. What this file system cannot name or place is left out."""
    folder.mkdir(parents=True)
    for name, content in tree.items():
        path = folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _put(path, content)
        except (OSError, ValueError):
            continue


def _put(path: Path, content: bytes | Special) -> None:
    match content:
        case bytes():
            path.write_bytes(content)
        case Special("folder"):
            path.mkdir()
        case Special("fifo"):
            os.mkfifo(path)
        case Special("link", target):
            path.symlink_to(target)


def remove(folder: Path) -> None:
    """Delete a folder, whatever is in it."""
    shutil.rmtree(folder, ignore_errors=True)
