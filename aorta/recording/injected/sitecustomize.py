"""Imported by every Python process below `aorta record`, as its folder is first in PYTHONPATH there.

Leaves `sys.path` and `sys.modules` as they are without it, the program's own sitecustomize included, and waits for a
program that imports torch. Must not import anything that takes time, or let an error of its own reach the program.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # to import `typing` takes longer than all of this
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

_HERE = os.path.dirname(__file__)  # noqa: PTH120  pathlib takes long, too
_PACKAGE = os.path.dirname(os.path.dirname(_HERE))  # noqa: PTH120
_WATCHED = {
    "torch.jit._recursive",
    "torch.serialization",
    "torch.nn.modules.module",
    "torch.optim.optimizer",
    "torch.amp.grad_scaler",
    "torch.distributed.distributed_c10d",
    "torch.distributed.checkpoint.state_dict_saver",
    "deepspeed.runtime.engine",
}


class _AfterImport:
    """A finder that finds as the others do, and has the watched modules patched once they are executed. It leaves
    `sys.meta_path` with the last of them.
    """

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        if name not in _WATCHED:
            return None
        _WATCHED.discard(name)
        try:
            if not _WATCHED:
                sys.meta_path.remove(self)
            from importlib.util import find_spec

            spec = find_spec(name)  # asks the other finders, as the import itself does
            if spec is not None and hasattr(spec.loader, "exec_module"):
                spec.loader = _Loader(spec.loader)  # type: ignore[assignment]
            return spec
        except Exception:  # noqa: BLE001  whatever is wrong, the import shows it
            return None


class _Loader:
    """The loader of a watched module until it executes the module: to that it hands its own place back."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        for owner, name in ((module, "__loader__"), (module.__spec__, "loader")):
            if getattr(owner, name, None) is self:  # nobody has put another one around it
                setattr(owner, name, self._loader)
        self._loader.exec_module(module)
        _patch(module)


def _patch(module: ModuleType) -> None:
    try:
        _load_package()
        from aorta.recording import zero_lines

        zero_lines.patch(module)
    except Exception as error:  # noqa: BLE001  the program goes on as it would have without
        _WATCHED.clear()
        if sys.stderr is not None:
            sys.stderr.write(f"aorta: nothing is recorded: {type(error).__name__}: {error}\n")


def _load_package() -> None:
    """Load the package `aorta` that this file belongs to where the program would find none, or a mere folder of that
    name: a clone beside the script hides an installation. Nothing of another project's package of that name is run,
    and nothing is put into one that the program has imported: an editable installation would find our modules in it.
    """
    from importlib import util

    spec = util.find_spec("aorta")  # of the module itself where it is imported
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    if spec is None or (spec.origin is None and folders):
        where = os.path.join(_PACKAGE, "__init__.py")  # noqa: PTH118
        spec = util.spec_from_file_location("aorta", where, submodule_search_locations=[_PACKAGE, *folders])
        if spec is None or spec.loader is None:
            raise ImportError(where)
        sys.modules["aorta"] = module = util.module_from_spec(spec)
        spec.loader.exec_module(module)
    elif not any(os.path.isfile(os.path.join(folder, "recording", "zero_lines.py")) for folder in folders):  # noqa: PTH113, PTH118
        raise ImportError(f"{spec.origin} has the name of AORTA's package")


if __name__ == "sitecustomize":  # not where a test imports it
    if "AORTA_RECORD" in os.environ:
        sys.meta_path.insert(0, _AfterImport())
    sys.path[:] = [one for one in sys.path if one != _HERE]
    sys.path_importer_cache.pop(_HERE, None)
    del sys.modules["sitecustomize"]
    __import__("sitecustomize")  # the program's own; without one the ImportError that `site` expects
