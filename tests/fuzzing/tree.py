"""A folder of files as a value: names with contents, or with what else stands there."""

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
    """Everything below a folder but the folders that hold something."""
    tree: Tree = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            tree[name] = Special("link", str(path.readlink()))
        elif path.is_fifo():
            tree[name] = Special("fifo")
        elif path.is_file():
            tree[name] = path.read_bytes()
        elif not any(path.iterdir()):
            tree[name] = Special("folder")
    return tree


def write_tree(tree: Tree, folder: Path) -> None:
    """Write it below a new folder. What this file system cannot name or place is left out."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, content in tree.items():
        path = folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            match content:
                case bytes():
                    path.write_bytes(content)
                case Special("folder"):
                    path.mkdir()
                case Special("fifo"):
                    os.mkfifo(path)
                case Special("link", target):
                    path.symlink_to(target)
        except (OSError, ValueError):
            continue
