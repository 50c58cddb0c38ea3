"""Where AORTA's own code lies: in a checkout, beside `train.py`, or in a package that pip installed.

Must not import anything that takes time.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from aorta.errors import InputError

PACKAGE: Final = "aorta-bench"
SAME_IMPORT_NAME: Final = ("amd-aorta", "aorta")
"""Other projects' distributions that install an import package `aorta`."""
_TIMEOUT_S: Final = 30
FILE_SYSTEMS: Final = {
    **dict.fromkeys(("file", "memory"), ""),
    **dict.fromkeys(("s3", "s3a"), "s3fs"),
    **dict.fromkeys(("gs", "gcs"), "gcsfs"),
    **dict.fromkeys(("az", "abfs", "abfss"), "adlfs"),
    "oci": "ocifs",
    **dict.fromkeys(("sftp", "ssh"), "paramiko"),
    "hdfs": "pyarrow",
    "hf": "huggingface_hub",
    **dict.fromkeys(("http", "https"), "aiohttp requests"),
}
"""Schemes of URLs that AORTA opens -> the packages that fsspec needs for it. fsspec knows more, some of which take a
file for a list of other files, or for a program (`reference://`, https://filesystem-spec.readthedocs.io).
"""
CACHED: Final = "simplecache::"
"""The only chain of file systems that is opened: a local copy of the file behind it."""


def scheme_of(location: str) -> str:
    """Return the scheme of a URL; `file` for a path.

    Raises:
        ValueError: it is not in `FILE_SYSTEMS`, or file systems are chained in another way than by `CACHED`.
    """
    address = location.removeprefix(CACHED)
    scheme, url, _ = address.partition("://")
    if "::" in address or (url and scheme not in FILE_SYSTEMS):
        raise ValueError(
            f"{location}: no address that AORTA opens; its scheme is one of {', '.join(FILE_SYSTEMS)}, and nothing "
            f"but {CACHED} stands before it"
        )
    return scheme if url else "file"


def checkout() -> Path | None:
    """Return the checkout of this package; None where it is installed without one."""
    root = Path(__file__).resolve().parents[1]
    return root if (root / "train.py").is_file() else None


def with_path(folder: Path, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return an environment with one folder more, the first of PYTHONPATH. Entries that are there stay as they are: an
    empty one is the current folder.
    """
    entries = environment.get("PYTHONPATH")
    return {**environment, "PYTHONPATH": f"{folder}{os.pathsep}{entries}" if entries else str(folder)}


def own_program(module: str, *words: str) -> list[str]:
    """Return the command that runs a module of this very package in `own_environment`, whatever else is called `aorta`
    in the folder where it starts.
    """
    return [sys.executable, "-P", "-m", module, *words]


def own_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment of `own_program`."""
    return with_path(Path(__file__).resolve().parents[1], environment)


def training_program(tree: Path | None) -> list[str]:
    """Return what follows an interpreter or `torchrun` to train, before the overrides: the checkout's program, or the
    installed package's where `tree` is None.
    """
    return ["-m", "aorta", "train"] if tree is None else [str(tree / "train.py")]


def install_command(*extras: str) -> str:
    """Return the command that installs AORTA with these extras, from a checkout: no package index has it, and a
    stranger may register its name there.
    """
    chosen = f"[{','.join(extras)}]" if extras else ""
    return f'pip install "PATH/TO/CHECKOUT{chosen}"'


def what_to_install(module: str | None) -> str | None:
    """Return what to do about a package that is not installed; None for a module of AORTA's own."""
    name = (module or "").partition(".")[0]
    if name in {"", "aorta"}:
        return None
    tree = checkout()
    if tree is None:
        return f"{name} is not installed for {sys.executable}: {sys.executable} -m {install_command()}"
    inside = Path.cwd() == tree
    setup, activate = (
        str(Path(path) if inside else tree / path) for path in ("scripts/setup.sh", ".venv/bin/activate")
    )
    return (
        f"{name} is not installed for {sys.executable}: run `bash {setup}`, then `source {activate}`, and the same "
        "command again"
    )


def check_alone() -> None:
    """Raise InputError where another distribution has written into this package's folder: pip lets the later one win
    file by file, and what runs is neither.
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
    """Return the commit of a checkout, with `-dirty-` and eight digits of the SHA-256 of changes to tracked files; None
    without a checkout, history or git.
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


def commit_around(folder: Path) -> str | None:
    """Return the commit of the repository that a folder is part of, as `commit_of` does; None outside of any."""
    top = _git(folder, "rev-parse", "--show-toplevel")
    return None if top is None else commit_of(Path(os.fsdecode(top.rstrip(b"\n"))))


def _git(tree: Path, *words: str) -> bytes | None:
    """Return what git says; None where it fails or is not there."""
    try:
        done = subprocess.run(["git", "-C", str(tree), *words], capture_output=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if done.returncode else done.stdout
