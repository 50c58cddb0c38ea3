"""Put the simulated device into this process: afterwards `torch.device("cuda")` is it.

Torch reads the hooks of its accelerators while it is imported, so the library has to be loaded before; then the names
of `torch.cuda` that a CPU build leaves empty are filled in. Whether a process wants the device is said by the variable
AORTA_SIMULATED_DEVICE (`virtual`: its time is), its number of devices by AORTA_SIMULATED_DEVICES (2). Nothing is
started before the device is first used: a process that has loaded it can be forked. Must not: build the library.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from tests.simulated.build import BUILD_COMMAND, MODULE, library, why_not

VARIABLE: Final = "AORTA_SIMULATED_DEVICE"
VIRTUAL: Final = "virtual"
COMPILED_PART: Final = "aorta.instrument.native.build"
WATCHDOG: Final = "aorta.recording.rank_record"
SITE: Final = Path(__file__).with_name("site")
_loaded: list[Any] = []


def wanted() -> bool:
    """Whether the variable asks for the device.

    Raises:
        RuntimeError: it asks for one that there is not.
    """
    said = os.environ.get(VARIABLE, "")
    if said not in ("", VIRTUAL):
        raise RuntimeError(f"{VARIABLE}={said}: it is {VIRTUAL} or not set")
    return bool(said)


def loaded() -> bool:
    """Whether this process has the device."""
    return bool(_loaded)


def native() -> Any:
    """The compiled module.

    Raises:
        RuntimeError: this process has no simulated device.
    """
    if not _loaded:
        raise RuntimeError(f"no simulated device in this process: {VARIABLE} has to be set when it starts")
    return _loaded[0]


def load() -> None:
    """Load the library, import torch, fill in its names. Does nothing the second time.

    Raises:
        RuntimeError: the device cannot be had here, is not built, or torch was imported before.
    """
    if _loaded:
        return
    _load_library()
    import torch  # noqa: F401 read its hooks

    _finish()


def load_with_torch() -> None:
    """The same as soon as somebody imports torch: a process that never does pays nothing."""
    sys.meta_path.insert(0, _Behind("torch", lambda _torch: _finish(), before=_load_library))


def for_children() -> None:
    """Every Python that this process starts with its own environment gets the device too."""
    folders = [str(SITE), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(folder for folder in folders if folder))
    if str(SITE) not in sys.path:
        sys.path.insert(0, str(SITE))  # Debian's Python has a sitecustomize of its own


@cache
def _load_library() -> Path:
    if "torch" in sys.modules:
        raise RuntimeError("the simulated device has to be loaded before torch is imported")
    reason = why_not()
    if reason is not None:
        raise RuntimeError(reason)
    path = library()
    if not path.exists():
        raise RuntimeError(f"the simulated device is not built ({path}); {BUILD_COMMAND} does it")
    ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    return path


def _finish() -> None:
    import torch

    path = _load_library()
    spec = importlib.util.spec_from_file_location(
        MODULE, path, loader=importlib.machinery.ExtensionFileLoader(MODULE, str(path))
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if str(torch._C._get_accelerator()) != "cuda":
        raise RuntimeError("torch was asked for its accelerator before the simulated device was there")
    from tests.simulated import kineto
    from tests.simulated.names import fill_in

    fill_in(module)
    _loaded.append(module)
    kineto.install()
    sys.meta_path.insert(0, _Behind(COMPILED_PART, partial(_one_clock, module.host_clock_address())))
    sys.meta_path.insert(0, _Behind(WATCHDOG, _unwatched))


def _one_clock(address: int, build: Any) -> None:
    """AORTA's compiled part reads the virtual host's clock, as its Python does (`names`)."""
    load_compiled = build.load

    @cache
    def load() -> tuple[Any | None, str | None]:
        module, why_not = load_compiled()
        if module is not None:
            module.use_clock(address)
        return module, why_not

    build.load = load


def _unwatched(watchdog: Any) -> None:
    """No watchdog: a process of its own is not in virtual time, and would take all ranks for stuck."""
    watchdog._start_watchdog = lambda *_: None


class _Behind(importlib.abc.MetaPathFinder):
    """Calls `before` when a module is about to be imported, and `then` with the module when it has been."""

    def __init__(self, name: str, then: Callable[[Any], None], before: Callable[[], object] = lambda: None) -> None:
        self._name, self._then, self._before = name, then, before

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        self._before()
        spec = importlib.util.find_spec(fullname)
        execute = spec.loader.exec_module

        def then_finish(module: ModuleType) -> None:
            execute(module)
            self._then(module)

        spec.loader.exec_module = then_finish
        return spec
