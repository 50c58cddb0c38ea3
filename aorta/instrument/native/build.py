"""Builds and loads the compiled part: `interceptor.cpp` -> an extension module for this Python and torch.

Set-up builds it where there is a compiler, using torch's headers and build tool; elsewhere the first run that wants it
does, once (`ensure_built`). The shared library is in `$XDG_CACHE_HOME/aorta` (`~/.cache/aorta`), with a name derived
from everything it was built from. Must not fail a run: without it collectives are timed from Python on a CPU, and
on a device not at all.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.machinery
import importlib.util
import logging
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from functools import cache
from pathlib import Path
from typing import IO, Any, Final

import torch

from aorta.errors import ToolMissing
from aorta.installation import own_environment, own_program
from aorta.records.files import open_own, write_whole
from aorta.records.schema import InstrumentMode

SOURCE: Final = Path(__file__).with_name("interceptor.cpp")
HEADERS: Final = tuple(sorted(SOURCE.parent.glob("*.hpp")))
FLAGS: Final = ("-std=c++20", "-O2", "-fvisibility=hidden", "-fno-plt", "-fno-semantic-interposition")
"""The last standard named is the one that counts; torch 2.11 itself asks for C++17. The last three keep calls within
the library out of its tables, which are in no cache of the processor behind a kernel of the model."""
BUILD_COMMAND: Final = "python -m aorta.instrument.native"
FIRST_USE: Final = "AORTA_BUILD"
"""The variable that, set to 0, keeps runs from building it."""
BUILD_LIMIT_S: Final = 200.0
"""Of a build at first use; below the 300 s that ranks wait for one another. It takes about 40 s of one core."""
_BUILD: tuple[str, ...] = tuple(own_program(BUILD_COMMAND.split()[-1]))
_OF_A_RANK: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_log = logging.getLogger(__name__)


def library() -> Path:
    """Return the path of the module for this source, torch and Python, whether or not it has been built.

    Raises:
        OSError: the source cannot be read.
        RuntimeError: no home folder can be determined.
    """
    torch_build = (
        torch.__version__,
        str(torch.version.git_version),
        str(getattr(torch._C, "_GLIBCXX_USE_CXX11_ABI", None)),
    )
    made_from = (*(source.read_text() for source in (SOURCE, *HEADERS)), *FLAGS, *torch_build, sys.version)
    digest = hashlib.sha256("\0".join(made_from).encode()).hexdigest()[:16]
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "aorta" / f"interceptor_{digest}{sysconfig.get_config_var('EXT_SUFFIX')}"


@cache
def load() -> tuple[Any | None, str | None]:
    """Return the module and None, or None and the reason why it is not used."""
    try:
        path = library()
        path.stat()
    except FileNotFoundError:
        try:
            return None, f"could not be built: {_failure(path).read_text().strip()}; {BUILD_COMMAND} tries again"
        except OSError:
            missing = "" if _has_compiler() else f": {_compiler()} not found, which g++ brings"
            return None, f"not built{missing}; {BUILD_COMMAND} does it"
    except (OSError, RuntimeError) as error:  # the home folder is inaccessible, or unknown
        return None, f"cannot be looked for: {error}"
    name = path.name.split(".")[0]
    try:
        spec = importlib.util.spec_from_file_location(
            name, path, loader=importlib.machinery.ExtensionFileLoader(name, str(path))
        )
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except (ImportError, OSError) as error:  # e.g. built against another torch build of the same version
        return None, f"{path} cannot be loaded: {error}"
    return module, None


def ensure_built(mode: InstrumentMode, *, wanted: bool, emulated: bool) -> None:
    """Build the module if a run would use it and a compiler is there, once: the ranks of a host wait for the first of
    them. A build that failed is not tried again by runs. Never raises: `compiled` says what is used, and why.

    Args:
        mode: nothing is built for "off".
        wanted, emulated: as of `compiled`.
    """
    if mode == "off" or not wanted or emulated or os.environ.get(FIRST_USE) == "0" or not _has_compiler():
        return
    try:
        path = library()
        if path.exists() or _failure(path).exists():
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with open_own(path.with_suffix(".lock")) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (path.exists() or _failure(path).exists()):
                _build_in_child(path, lock)
    except (OSError, RuntimeError) as error:
        _log.warning("the compiled interceptor cannot be built: %s; XDG_CACHE_HOME may name a folder for it", error)
    load.cache_clear()


def _build_in_child(path: Path, lock: IO[bytes]) -> None:
    """Run the build in a process of its own, so that nothing of it is left in this one; note why it failed. It goes on
    where the run ends before it, with the lock, for the runs that follow.
    """
    _log.warning("compiling the interceptor into %s, once for this torch: about a minute", path.parent)
    variables = {name: value for name, value in os.environ.items() if name not in _OF_A_RANK}
    with tempfile.TemporaryFile() as output:
        build = subprocess.Popen(
            _BUILD,
            env=own_environment(variables),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=[lock.fileno()],
            start_new_session=True,  # torchrun ends the sessions of its ranks
        )
        try:
            code = build.wait(BUILD_LIMIT_S)
            output.seek(0)
            why = f"exit code {code}: {' '.join(output.read().decode(errors='replace').split())[-400:]}" if code else ""
        except subprocess.TimeoutExpired:
            os.killpg(build.pid, signal.SIGKILL)
            build.wait()
            why = f"not done after {BUILD_LIMIT_S:g} s"
    if why:
        write_whole(_failure(path), why.encode())


def _failure(path: Path) -> Path:
    return path.with_suffix(".failed")


def _compiler() -> str:
    return os.environ.get("CXX", "c++")


def _has_compiler() -> bool:
    return shutil.which(_compiler()) is not None


def compiled(device: torch.device, *, wanted: bool, emulated: bool) -> tuple[Any | None, str]:
    """Return what times the collectives of a run: the module and "native", or None and, with the reason, "python" on a
    CPU, "none" on a device, where there is nothing else.

    Args:
        device: the run's.
        wanted: whether the configuration asks for compiled code.
        emulated: whether the fabric is emulated, which only Python supports.
    """
    otherwise = "python" if device.type == "cpu" else "none"
    if not wanted:
        return None, f"{otherwise}: instrument.native=false"
    if emulated:
        return None, f"{otherwise}: the fabric is emulated"
    module, why_not = load()
    if module is not None and device.type != "cpu":
        why_not = module.why_not_served(device)
        if why_not is not None:
            return None, f"{otherwise}: torch {torch.__version__} on {device}: {why_not}"
    return module, "native" if why_not is None else f"{otherwise}: {why_not}"


def interceptor_for(device: torch.device, mode: InstrumentMode, *, wanted: bool, emulated: bool) -> dict[str, str]:
    """Return a rank's manifest entry: what times its collectives; empty if nothing does."""
    if mode == "off":
        return {}
    return {"interceptor": compiled(device, wanted=wanted, emulated=emulated)[1]}


def build() -> Path:
    """Compile the module unless it has been built; returns its path.

    Raises:
        ToolMissing: no C++ compiler.
        RuntimeError: torch's build tool failed (its output is in the message), or no home folder can be determined.
        OSError: the target folder cannot be written.
    """
    path = library()
    if path.exists():
        return path
    if not _has_compiler():
        raise ToolMissing(
            f"{_compiler()} not found: needed to build {SOURCE.name}. Install g++, or go without: collectives are then "
            "timed from Python on a CPU, which costs more, and not at all on a device"
        )
    # torch's build tool looks for ninja on the PATH, which lacks a virtual environment that is not activated.
    os.environ["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
    from torch.utils import cpp_extension

    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        cpp_extension.load(
            path.name.split(".")[0],
            [str(SOURCE)],
            build_directory=folder,
            extra_cflags=[*FLAGS],
            is_python_module=False,
        )
        (made,) = Path(folder).glob("*.so")
        made.replace(path)  # atomic: another process may be loading it
    _failure(path).unlink(missing_ok=True)
    return path
