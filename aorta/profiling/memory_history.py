"""Records the device allocator's own history, for `python -m torch.cuda._memory_viz`.

Of a window: `<name>.snapshot.pickle` beside the memory timeline. Of the whole loop: a snapshot where memory runs out,
or when the loop asks for one. On a CUDA or HIP build with a device, and nothing elsewhere. `by_category` divides what a
window of torch.profiler allocated, on any device. Must not call what torch has deprecated (`export_memory_timeline`),
or turn an error of memory into another one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aorta.distributed import cuda
from aorta.profiling.trace_files import error_line, free_name
from aorta.records.files import whole_file

_log = logging.getLogger(__name__)
MAX_ENTRIES = 100_000
"""Allocations and frees kept; a few hundred bytes each, with their stacks."""
OUT_OF_MEMORY = "oom"
"""Tag of the snapshot of that moment."""


class MemoryHistory:
    """The history of one loop, and of one window at a time in it; a no-op without a device.

    Args:
        of_windows: record each window.
        of_loop: record the whole loop, and write a snapshot the first time that memory runs out.
        named: tag -> file of a snapshot.
    """

    def __init__(self, of_windows: bool, of_loop: bool, named: Callable[[str], Path]) -> None:
        self.available = cuda.has_memory_history()
        self._of_windows, self._of_loop, self._named = of_windows, of_loop, named
        self._writing = threading.Lock()
        self._unhook: Callable[[], None] = lambda: None
        self._loop_runs = self.running = False

    def begin(self) -> None:
        if not self._of_loop:
            return
        if not self.available:
            _warn_unavailable("profiling.oom_snapshot")
            return
        cuda.begin_memory_history(MAX_ENTRIES)
        self._unhook, self._loop_runs = cuda.on_out_of_memory(self._out_of_memory), True

    def end(self) -> None:
        self.stop()
        self._unhook()
        if self._loop_runs:
            self._loop_runs = False
            cuda.end_memory_history()

    def start(self) -> None:
        if self._of_windows and self.available:
            if not self._loop_runs:
                cuda.begin_memory_history(MAX_ENTRIES)
            self.running = True

    def stop(self) -> None:
        if self.running:
            self.running = False
            if not self._loop_runs:
                cuda.end_memory_history()

    def dump(self, target: Path) -> None:
        """Write the recorded history atomically and end the window, even if writing fails.

        Raises:
            OSError: it could not be written; `target` is unchanged.
        """
        try:
            _write(target)
        finally:
            self.stop()

    def snapshot(self, tag: str) -> Path | None:
        """Write what is allocated now, with the history where one is recorded; None where there is nothing to write."""
        if not self.available:
            _warn_unavailable("memory snapshots")
            return None
        with self._writing:
            target = free_name(self._named(tag))
            try:
                _write(target)
            except Exception as error:  # noqa: BLE001  a snapshot must not end the loop; it is logged
                _log.error("profiling: the memory snapshot %s could not be written: %s", target, error_line(error))
                return None
        return target

    def _out_of_memory(self) -> None:
        self._unhook()  # the first time is the one to look at; a loop that goes on may run out again and again
        if path := self.snapshot(OUT_OF_MEMORY):
            _log.error("profiling: memory ran out; what was allocated, and by which lines, is in %s", path)


def _warn_unavailable(what: str) -> None:
    _log.warning(
        "%s: not available here: only the allocators of CUDA and HIP keep a history, and torch sees no such device",
        what,
    )


def _write(target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(target) as part:
        cuda.write_memory_history(part)


NAMES = {
    "PARAMETER": "parameters",
    "GRADIENT": "gradients",
    "OPTIMIZER_STATE": "optimizer state",
    "ACTIVATION": "activations",
    "INPUT": "inputs",
    "TEMPORARY": "temporary",
    "AUTOGRAD_DETAIL": "autograd's own",
    None: "unknown",
}
"""torch's category -> what pages call it, in the order in which they are stacked."""


def by_category(results: Any) -> dict[str, dict[str, Any]]:
    """Return device (`cpu`, `cuda:0`) -> `times_us`, and `bytes`: category -> bytes allocated at each of these times.

    torch infers a tensor's category from the window itself, which needs shapes, stacks, allocations and at least one
    whole step. It reads every event in Python: never on the training thread.

    Raises:
        Exception: this torch does not offer it, or cannot make it of this window.
    """
    from torch.profiler import _memory_profiler as of_torch

    timeline = of_torch.MemoryProfileTimeline(of_torch.MemoryProfile(results))
    # Column 0 of each row is torch's own, for stacking.
    columns = {index + 1: category for category, index in of_torch._CATEGORY_TO_INDEX.items()}
    found: dict[str, dict[str, Any]] = {}
    for device in sorted({str(key.device) for _, _, (key, _), _ in timeline.timeline}):
        times, rows = timeline._coalesce_timeline(device)  # type: ignore[no-untyped-call]
        sizes = {
            NAMES[category and category.name]: [row[column] for row in rows] for column, category in columns.items()
        }
        found[device] = {"times_us": times, "bytes": {name: sizes[name] for name in NAMES.values()}}
    return found
