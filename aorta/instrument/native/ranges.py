"""The compiled block ranges: passes of blocks and ends of backward passes, marked without Python.

Enters: `build.load`'s module and the compiled tap. Leaves: a step's passes and endings, in the order in which they
began; on a device they are marks.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from aorta.instrument.clock import Mark
from aorta.instrument.reading import Pass


class NativeRanges:
    """What `compute.BlockRanges` is.

    Args:
        module: of `build.load`. tap: its `Tap`, told when a backward pass has ended.
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
            block.register_forward_pre_hook(self.compiled.before_forward(number), with_kwargs=True),
            block.register_forward_hook(self.compiled.after_forward(number), prepend=True),
        ]
        self.compiled.look()

    def begin(self) -> None:
        """Note down what happens from here on."""
        self.compiled.begin()

    def end(self) -> Any:
        """What happened since `begin`, for `told`; note down nothing more."""
        return self.compiled.end()

    def told(self, noted: Any) -> tuple[list[Pass], list[tuple[Mark, Mark]]]:
        """The passes that ended, and the endings of backward passes."""
        rows, tails = noted.rows()
        names = self._names
        return [(names[block], "backward" if back else "forward", low, high) for block, back, low, high in rows], tails

    def forget(self) -> None:
        """Note down nothing more, and forget what happened since `begin`."""
        self.compiled.begin()
        self.compiled.end()

    def close(self) -> None:
        """Take the hooks off; what is in a graph already looks at nothing."""
        self.compiled.ignore()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class NativeEnds:
    """What `backward.BackwardEnds` is, of the same compiled half as `ranges`."""

    def __init__(self, ranges: NativeRanges) -> None:
        self._compiled: Any = ranges.compiled
        self._handles: list[Any] = []

    def watch(self, module: nn.Module) -> None:
        """Look at the gradients of `module`'s outputs; of those watched the first to get one counts."""
        self._handles.append(module.register_forward_hook(self._compiled.after_watched_forward(), prepend=True))
        self._compiled.look()

    def close(self) -> None:
        """Take the hooks off; what is in a graph already looks at nothing."""
        self._compiled.ignore()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
