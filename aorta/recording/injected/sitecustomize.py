"""Imported by every Python process below `aorta record`, as its folder is first in PYTHONPATH there.

Runs the sitecustomize that it hides, and waits for a program that imports torch. Must not import anything that takes
time, or let an error of its own reach the program.
"""

from __future__ import annotations

import os
import sys
from importlib import util
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_HERE = os.path.dirname(os.path.realpath(__file__))  # noqa: PTH120  pathlib takes longer to import than all of this
_WATCHED = {
    "torch.serialization",
    "torch.nn.modules.module",
    "torch.optim.optimizer",
    "torch.amp.grad_scaler",
    "torch.distributed.distributed_c10d",
    "torch.distributed.checkpoint.state_dict_saver",
}


class _AfterImport:
    """A finder that finds as the others do, and has the watched modules patched once they are executed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in _WATCHED:
            return None
        _WATCHED.discard(name)
        found = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((one for one in found if one is not None), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                del loader.exec_module
                execute(module)
                _patch(module)

            loader.exec_module = exec_module
        return spec


def _patch(module: ModuleType) -> None:
    try:
        from aorta.recording import zero_lines

        zero_lines.patch(module)
    except Exception as error:  # noqa: BLE001  the program goes on as it would have without
        _WATCHED.clear()
        sys.stderr.write(f"aorta record: nothing is recorded: {type(error).__name__}: {error}\n")


try:
    _hidden = PathFinder.find_spec("sitecustomize", [one for one in sys.path if os.path.realpath(one or ".") != _HERE])
    if _hidden is not None and _hidden.loader is not None:
        sys.modules["sitecustomize"] = _module = util.module_from_spec(_hidden)
        _hidden.loader.exec_module(_module)
finally:
    if "AORTA_RECORD" in os.environ:
        sys.meta_path.insert(0, _AfterImport())
