"""A folder that is made once for all of pytest's processes, by whichever of their tests asks first.

The processes share the tests of one file where one of them has none left: without this, each would launch again what
those tests look at. Must not: be changed by a test, which another process may be reading.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """The folder of a name, which says all that `make` rests on. `make` fills it; others wait for it meanwhile.

    Where `make` fails, whoever asks next tries again.
    """
    own = factory.getbasetemp()
    shared = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "once"
    shared.mkdir(exist_ok=True)
    folder, made = shared / name, shared / f"{name}.made"
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            made.touch()
    return folder
