"""Compiled block ranges, marked without Python, and compiled interval arithmetic for the window of a live step.

A step's passes come in the order in which they began; on a device their times are marks. Must not run Python code in a
backward pass, or define a metric.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from aorta.instrument.event_clock import Mark
from aorta.instrument.open_step import Pass
from aorta.timeline.intervals import Interval
from aorta.timeline.overlap import Algebra


def compiled_algebra(module: Any) -> Algebra[Iterable[Interval], Any]:
    """Return the operations of `module`, which give what `overlap.PAIRS` gives for nanoseconds that fit in int64.

    Their results are opaque, except those of `pairs`.
    """
    return Algebra(
        module.lane,
        module.unite,
        module.intersect,
        module.subtract,
        module.measure,
        module.tile,
        module.pairs,
    )


class NativeRanges:
    """Compiled counterpart of `compute_ranges.BlockRanges`.

    Args:
        module: of `build.load`.
        tap: its `Tap`, notified when a backward pass has ended.
    """

    def __init__(self, module: Any, tap: Any) -> None:
        self.compiled: Any = module.Ranges(tap)
        self._names: list[str] = []
        self._handles: list[Any] = []

    def watch(self, name: str, block: nn.Module) -> None:
        """Bracket `block`, as `BlockRanges.watch` does."""
        number = self.compiled.add_block()
        self._names.append(name)
        self._handles += [
            block.register_forward_pre_hook(self.compiled.before_forward(block, number), with_kwargs=True),
            block.register_forward_hook(self.compiled.after_forward(block, number), prepend=True),
        ]
        self.compiled.look()

    def watch_backward(self, module: nn.Module) -> None:
        """Mark the ends of backward passes, as `BlockRanges.watch_backward` does."""
        hook = self.compiled.after_watched_forward(module)
        self._handles.append(module.register_forward_hook(hook, prepend=True))
        self.compiled.look()

    def begin(self) -> None:
        """Start recording events."""
        self.compiled.begin()

    def end(self) -> Any:
        """Stop recording; returns the events since `begin`, for `read`."""
        return self.compiled.end()

    def read(self, noted: Any) -> tuple[list[Pass], list[tuple[Mark, Mark]]]:
        """Return the passes that ended, and the marks around the strategy's end-of-backward work."""
        rows, tails = noted.rows()
        names = self._names
        return [(names[block], "backward" if back else "forward", low, high) for block, back, low, high in rows], tails

    def forget(self) -> None:
        """Stop recording, and discard the events since `begin`."""
        self.compiled.begin()
        self.compiled.end()

    def close(self) -> None:
        """Remove the hooks; those already in a graph become no-ops."""
        self.compiled.ignore()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
