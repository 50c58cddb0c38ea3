"""Run on every rank: `untouched.py`, recorded as below `aorta record`, in a process that has torch loaded already.

Arguments: a folder, then those of `untouched.py`. A folder called `plain` is not recorded.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from aorta.recording import meeting, zero_lines
from aorta.recording.injected import sitecustomize
from tests.recording import engine
from tests.recording.untouched import APART
from tests.runs import HANGS_S


def patched(folder: str) -> None:
    """Do what the import hook does while a program imports torch."""
    os.environ[zero_lines.VARIABLE] = folder
    apart = APART.intersection(sys.argv)
    zero_lines._FIRST_STEP_S = 0.0 if apart else HANGS_S  # type: ignore[misc]
    meeting.OTHERS_S = 0.5 if "evaluator" in sys.argv else meeting.OTHERS_S  # type: ignore[misc]
    os.environ["THE_FOLDER"] = folder
    names = {name for name in sitecustomize._WATCHED if name.startswith("torch")}
    if "engine" in sys.argv:
        names.add("deepspeed.runtime.engine")
        engine.__name__, sys.modules["deepspeed.runtime.engine"] = "deepspeed.runtime.engine", engine
    for name in names:
        zero_lines.patch(module := importlib.import_module(name))
        for copied in ("barrier", "destroy_process_group") if "c10d" in name else ():
            setattr(dist, copied, getattr(module, copied))
    torch.save = torch.serialization.save


if __name__ == "__main__":
    folder, *sys.argv[1:] = sys.argv[1:]
    if Path(folder).name != "plain":
        patched(folder)
    runpy.run_path(str(Path(__file__).with_name("untouched.py")), run_name="__main__")
