"""Where AORTA's own code lies: in a checkout, beside `train.py`, or in a package that pip installed.

Must not import anything that takes time.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Final

from aorta.errors import InputError

PACKAGE: Final = "aorta-bench"
SAME_IMPORT_NAME: Final = ("amd-aorta", "aorta")
"""Distributions of other projects that also install an import package `aorta`."""
_TIMEOUT_S: Final = 30


def checkout() -> Path | None:
    """Return the checkout that this package is part of; None where it is installed without one."""
    root = Path(__file__).resolve().parents[1]
    return root if (root / "train.py").is_file() else None


def training_program(tree: Path | None) -> list[str]:
    """Return what follows an interpreter or `torchrun` in order to train, in front of the overrides.

    Args:
        tree: the checkout whose code runs; None: the package that the interpreter has installed.
    """
    return ["-m", "aorta", "train"] if tree is None else [str(tree / "train.py")]


def install_command(*extras: str) -> str:
    """Return the command that installs AORTA with these extras. From a checkout: no package index has it, and whoever
    registered its name there would be installed in its place.
    """
    chosen = f"[{','.join(extras)}]" if extras else ""
    return f'pip install "PATH/TO/CHECKOUT{chosen}"'


def what_to_install(module: str | None) -> str | None:
    """Return what to do where a package that AORTA needs is not installed; None for a module of AORTA's own."""
    name = (module or "").partition(".")[0]
    if name in {"", "aorta"}:
        return None
    tree = checkout()
    if tree is None:
        return f"{name} is not installed for {sys.executable}: {sys.executable} -m {install_command()}"
    inside = Path.cwd() == tree
    setup, activate = (
        str(Path(place) if inside else tree / place) for place in ("scripts/setup.sh", ".venv/bin/activate")
    )
    return (
        f"{name} is not installed for {sys.executable}: run `bash {setup}`, then `source {activate}`, and the same "
        "command again"
    )


def check_alone() -> None:
    """Refuse an environment in which another distribution has written into this package's folder.

    Raises:
        InputError: names it and the way out. pip lets two distributions write the same files, and the later one wins
            file by file: what runs then is neither.
    """
    from importlib import metadata  # 6 MB with the parser of mail headers, in every process that reads a record

    folder = Path(__file__).resolve().parent
    for name in SAME_IMPORT_NAME:
        try:
            other = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        if Path(str(other.locate_file("aorta"))).resolve() == folder:
            raise InputError(
                f"{PACKAGE} and {name} are installed in one environment, and both write the package 'aorta' in "
                f"{folder.parent}: its files are a mixture of the two. Give each an environment of its own, or: pip "
                f'uninstall {name}; pip install --force-reinstall --no-deps "PATH/TO/CHECKOUT"'
            )


def commit_of(tree: Path | None) -> str | None:
    """Return the commit of a checkout, after local changes with `-dirty-` and eight digits of their SHA-256 (files that
    git does not know are left out); None without a checkout, history or git.
    """
    if tree is None or not (tree / ".git").exists():
        return None
    description = _git(tree, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    if not description:
        return None
    commit = description.decode(errors="replace").strip()
    if not commit.endswith("-dirty"):
        return commit
    changes = _git(tree, "diff", "HEAD", "--binary", "--no-color", "--no-ext-diff", "--no-textconv")
    return commit if changes is None else f"{commit}-{hashlib.sha256(changes).hexdigest()[:8]}"


def _git(tree: Path, *words: str) -> bytes | None:
    """Return what git says; None where it fails or is not there."""
    try:
        done = subprocess.run(["git", "-C", str(tree), *words], capture_output=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if done.returncode else done.stdout
