"""`native/*.cpp` -> one shared library: `python -m tests.simulated.build`, once for a set of sources, torch and Python.

The library stands in `$XDG_CACHE_HOME/aorta` (`~/.cache/aorta`), named after all it was made from. It has to be loaded
before torch is imported, so whoever only wants its path does not import torch either. Must not: build unless asked to.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Final

NATIVE: Final = Path(__file__).with_name("native")
MODULE: Final = "aorta_simulated_device"
BUILD_COMMAND: Final = "python -m tests.simulated.build"
TORCH: Final = "2.13.0"
"""The one whose private names this was written against; another one may have moved them."""
FLAGS: Final = ("-std=c++20", "-O1", "-g0", "-fPIC", "-Wall", "-Werror", "-DUSE_C10D_GLOO", "-DUSE_DISTRIBUTED")
LIBRARIES: Final = ("torch", "torch_cpu", "torch_python", "c10")


def _torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    return Path(spec.origin).resolve().parent  # one library for all checkouts that share an environment


def sources() -> list[Path]:
    """What is compiled."""
    return sorted(NATIVE.glob("*.cpp"))


def library() -> Path:
    """Where the library for these sources, this torch and this Python is, or would be."""
    made_from = [path.read_text() for path in (*sources(), *sorted(NATIVE.glob("*.hpp")))]
    made_from += [importlib.metadata.version("torch"), str(_torch_folder()), sys.version, *FLAGS]
    digest = hashlib.sha256("\0".join(made_from).encode()).hexdigest()[:16]
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "aorta" / f"{MODULE}_{digest}{sysconfig.get_config_var('EXT_SUFFIX')}"


def why_not() -> str | None:
    """Why this machine cannot have the device, in words; None where it can.

    Known without torch, and without building anything.
    """
    version = importlib.metadata.version("torch")
    if version.split("+")[0] != TORCH:
        return f"the simulated device is written for torch {TORCH}, this is {version}"
    if any((_torch_folder() / "lib" / f"libtorch_{kind}.so").exists() for kind in ("cuda", "hip")):
        return "the simulated device needs a CPU build of torch: this one brings devices of its own"
    if library().exists():
        return None
    compiler = os.environ.get("CXX", "c++")
    return None if shutil.which(compiler) else f"no C++ compiler ({compiler}) to build the simulated device with"


def build() -> Path:
    """Compile it, all sources as one, because torch's headers take longer than they; nothing where it is built already.

    Returns:
        Where it is.

    Raises:
        RuntimeError: it cannot be built here, or the compiler refused; with its words.
    """
    path = library()
    if path.exists():
        return path
    reason = why_not()
    if reason is not None:
        raise RuntimeError(reason)
    torch = _torch_folder()
    folders = (torch / "include", torch / "include/torch/csrc/api/include", sysconfig.get_paths()["include"])
    flags = [*FLAGS, *(word for folder in folders for word in ("-isystem", str(folder)))]
    libraries = ["-L", str(torch / "lib"), f"-Wl,-rpath,{torch / 'lib'}", *map("-l{}".format, LIBRARIES)]
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        whole, made = Path(folder, "whole.cpp"), Path(folder, path.name)
        whole.write_text("".join(f'#include "{source}"\n' for source in sources()))
        compiler = [os.environ.get("CXX", "c++"), *flags, "-shared", str(whole), "-o", str(made)]
        done = subprocess.run([*compiler, *libraries], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"the compiler failed:\n{done.stderr}")
        made.replace(path)  # in one step: another process may be loading
    return path


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what is half built is removed
    # The library's path; or, without building it, why it cannot be had: nothing if it can.
    print((why_not() or "") if sys.argv[1:] == ["--why-not"] else build())  # noqa: T201
