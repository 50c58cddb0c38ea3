"""The device allocator's own history of a window, for `python -m torch.cuda._memory_viz`.

Leaves: `<name>.snapshot.pickle` beside the memory timeline, on a CUDA or HIP build with a device; nothing elsewhere.
Must not: call what torch has deprecated (`export_memory_timeline`).
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import torch

from aorta.capture.packing import PART

MAX_ENTRIES = 100_000
"""Allocations and frees kept; some hundred bytes each, with their stacks."""


class MemoryHistory:
    """Recording of one window at a time; does nothing where there is no device or it was not asked for."""

    def __init__(self, wanted: bool) -> None:
        self._on = wanted and torch.cuda.is_available() and hasattr(torch.cuda.memory, "_record_memory_history")
        self.running = False

    def start(self) -> None:
        """Begin with a window."""
        if self._on:
            torch.cuda.memory._record_memory_history(max_entries=MAX_ENTRIES)
            self.running = True

    def dump(self, target: Path) -> None:
        """Write what was recorded, whole or not at all, and stop, also when it cannot be written.

        Raises:
            OSError: nothing stands under `target` that was not there before.
        """
        part = target.with_name(target.name + PART)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(part))  # type: ignore[no-untyped-call]
            part.replace(target)
        finally:
            self.stop()
            with suppress(OSError):
                part.unlink(missing_ok=True)

    def stop(self) -> None:
        """Record no longer."""
        if self.running:
            self.running = False
            torch.cuda.memory._record_memory_history(enabled=None)
