"""A step while it runs, or has not been read yet: what the loop knows of it, and its marks.

Must not read a mark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from aorta.instrument.compute_ranges import Range
from aorta.instrument.copies import Copied
from aorta.instrument.event_clock import Mark
from aorta.instrument.gradient_order import ReadyGradient
from aorta.instrument.in_flight import InFlight
from aorta.instrument.loss_scalars import Counts, Scalar
from aorta.instrument.user_marks import MarksOfStep
from aorta.instrument.waits import Name, Waited
from aorta.instrument.window_kernels import WindowKernels
from aorta.records.schema import Phase
from aorta.timeline.intervals import Interval
from aorta.timeline.overlap import NO_COPIES, Unseen

Pass: TypeAlias = tuple[str, str, int, int]
"""A range whose marks have been read: (block, phase, start_ns, end_ns), in nanoseconds of the clock."""
NativeEvents: TypeAlias = Callable[["OpenStep"], None]
"""Adds to a step what compiled code recorded of it."""


@dataclass(frozen=True)
class StepFacts:
    """What the loop knows about a step before it begins."""

    epoch: int
    step: int
    global_step: int
    lr: float | None
    warmup: bool
    phase: Phase = "train"


@dataclass(slots=True)
class OpenStep:
    """The marks of one step, while it runs or has not been read yet.

    `unseen` says why the step is not observed, if it is not. `native_events` adds those recorded by compiled code, if
    any. `stalls`: those that no wait for a collective made. `stream_waits`: of the compute stream for another one, and
    the collectives that this one had joined. `ready`: of buckets that are reduced later, with their bytes. `calls`:
    times round the calls of backends that may have been stalls. `pipeline`: time among the stages of a pipeline, each
    range with the name of their process group as its block. `no_copies`: why copies are not looked at, if they are not.
    `kernels`: those of a window that the step is part of, if of any.
    """

    facts: StepFacts
    start: Mark
    issued_before: dict[int, int | None]
    unseen: Unseen | None = None
    no_copies: str | None = NO_COPIES
    end: Mark | None = None
    captured: int = 0
    issued_after: dict[int, int | None] = field(default_factory=dict)
    collectives: list[InFlight] = field(default_factory=list)
    stalls: list[tuple[Mark, Mark]] = field(default_factory=list)
    tails: list[tuple[Mark, Mark]] = field(default_factory=list)
    waits: list[Waited] = field(default_factory=list)
    stream_waits: list[tuple[Mark, Mark, tuple[Name, ...]]] = field(default_factory=list)
    calls: list[Interval] = field(default_factory=list)
    ready: list[tuple[Mark, int]] = field(default_factory=list)
    gradients: list[ReadyGradient] = field(default_factory=list)
    compute: list[Range] = field(default_factory=list)
    passes: list[Pass] = field(default_factory=list)
    aux: list[Range] = field(default_factory=list)
    pipeline: list[Range] = field(default_factory=list)
    copies: list[Copied] = field(default_factory=list)
    loss: Scalar | None = None
    grad_norm: Scalar | None = None
    experts: list[tuple[str, Counts]] = field(default_factory=list)
    native_events: NativeEvents | None = None
    user_marks: MarksOfStep | None = None
    kernels: WindowKernels | None = None

    def marks(self) -> Iterator[Mark | None]:
        """All marks recorded by Python code."""
        yield from (self.start, self.end)
        for issued in self.collectives:
            yield from (issued.start, issued.end)
        for begin, end in (*self.stalls, *self.tails):
            yield from (begin, end)
        for wait in self.waits:
            yield from (wait.begin, wait.end)
        for begin, end, _ in self.stream_waits:
            yield from (begin, end)
        yield from (mark for mark, _ in self.ready)
        for span in (*self.compute, *self.aux, *self.pipeline):
            yield from (span.start, span.end)
        for copied in self.copies:
            yield from (copied.start, copied.end)

    def add_native_events(self) -> None:
        """Add the events that compiled code recorded, once."""
        if self.native_events is not None:
            add, self.native_events = self.native_events, None
            add(self)
