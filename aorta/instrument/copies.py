"""The copies of a step: between host and device, between devices, and within one (docs/measuring.md, R1).

They are timed by the compiled interceptor alone (`native/copies.hpp`), which brackets `aten::copy_` and
`aten::_local_scalar_dense` with marks at the dispatcher. A kernel in Python there has been tried: threads of a backend,
which copy as well, then wait for the interpreter, and a thread that holds it may wait for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from aorta.instrument.event_clock import Mark
from aorta.records.schema import CopyDirection

DIRECTIONS: Final[tuple[CopyDirection, ...]] = ("h2d", "d2h", "d2d", "p2p")
"""In the order of the compiled part's numbers (`native/step.hpp`)."""
ON_A_CPU: Final = "on a CPU a copy is made by the threads that compute: it is part of computation"
FROM_PYTHON: Final = "copies are looked at by the compiled interceptor only"
INSTEAD: Final = "copies are not looked at in an isolated baseline"


@dataclass(slots=True)
class Copied:
    """One copy between two marks; None where none could be taken: it was issued on a stream of another device.
    `computes`: it was issued on the stream that computes.
    """

    direction: CopyDirection
    bytes: int
    start: Mark | None
    end: Mark | None
    computes: bool = False
