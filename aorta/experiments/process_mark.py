"""A variable that marks all processes of a launch, by which they are found whatever sessions and parents they have.

Must not end a process without that very mark.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Final

import psutil

MARK: Final = "AORTA_LAUNCH"
"""Environment variable with the id of the launch that a process belongs to."""
GRACE_S: Final = 45.0
"""From the request to stop to SIGKILL: torchrun kills its ranks 30 s after its own signal (docs/running.md)."""
_SETTLE_S: Final = 2.0
"""Helpers of multiprocessing end by themselves a moment after their parent."""


def end_marked(id_: str, grace_s: float = GRACE_S) -> int:
    """End every process that still carries the mark of a launch: SIGTERM, and SIGKILL `grace_s` later.

    Returns:
        How many processes had to be told.
    """
    left = _marked(id_)
    if left:
        _, left = psutil.wait_procs(left, _SETTLE_S)
    for process in left:
        with suppress(psutil.Error):
            process.terminate()
    _, stubborn = psutil.wait_procs(left, grace_s)
    for process in stubborn:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(stubborn, _SETTLE_S)
    return len(left)


def _marked(id_: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # another user's, or gone by now
            if process.environ().get(MARK) == id_ and process.pid != os.getpid():
                found.append(process)
    return found
