"""Records the device allocator's own history of a window, for `python -m torch.cuda._memory_viz`.

It writes `<name>.snapshot.pickle` beside the memory timeline on a CUDA or HIP build with a device, and nothing
elsewhere. Must not call what torch has deprecated (`export_memory_timeline`).
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from aorta.distributed import cuda
from aorta.profiling.trace_archive import PART

MAX_ENTRIES = 100_000
"""Allocations and frees kept; a few hundred bytes each, with their stacks."""


class MemoryHistory:
    """Recording of one window at a time; a no-op without a device, or if it was not requested."""

    def __init__(self, wanted: bool) -> None:
        self._on = wanted and cuda.has_memory_history()
        self.running = False

    def start(self) -> None:
        """Start recording with a window."""
        if self._on:
            cuda.begin_memory_history(MAX_ENTRIES)
            self.running = True

    def dump(self, target: Path) -> None:
        """Write the recorded history atomically and stop recording, even if writing fails.

        Raises:
            OSError: it could not be written; `target` is unchanged.
        """
        part = target.with_name(target.name + PART)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            cuda.write_memory_history(part)
            part.replace(target)
        finally:
            self.stop()
            with suppress(OSError):
                part.unlink(missing_ok=True)

    def stop(self) -> None:
        """Stop recording."""
        if self.running:
            self.running = False
            cuda.end_memory_history()
