"""Steps: collect marks while one runs, and hand on its line once everything in it has happened.

Enters: issued collectives, stalls, block ranges and auxiliary ranges, as marks. Leaves: `records.schema.Step`, in
order, some steps late (R4). Must not: wait for anything inside the loop.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Protocol

from aorta.instrument.clock import Clock, Mark, on_host
from aorta.instrument.compute import Range
from aorta.instrument.issued import Issued
from aorta.instrument.reading import OpenStep, StepFacts, StepReader, Told
from aorta.instrument.scalars import Scalar
from aorta.records.schema import Step
from aorta.timeline.overlap import Unseen

MAX_STEPS_LATE = 8
"""Steps that may stay unread for a collective that does not end; then coverage says what is missing."""

TOGETHER = 8
"""Steps read at once where the engine runs the loop, which writes what is left when a signal ends it. The model empties
the processor's caches, so that most of what reading one step costs is fetching the code that reads it
(docs/measurements.md)."""

LOOK_AFTER_S = 1.0
"""A run that is killed loses no more than the steps of about this long; a step that takes longer is read at once."""

FINISH_GRACE_S = 2.0
"""How long the last steps are waited for once the device has nothing left to do."""


class QuietTap(Protocol):
    """Notices collectives, stalls and passes while a step runs, and tells of them behind it (`native.tap`)."""

    def begin(self) -> None:
        """Note down what happens from here on."""

    def end(self) -> Callable[[], Told]:
        """Note down nothing more; the answer tells what happened since `begin`."""

    def abandon(self) -> None:
        """Note down nothing more, and forget what happened since `begin`."""


class _Aux:
    """A range of work that is neither compute nor communication, in the step that was under way when it began."""

    __slots__ = ("_clock", "_name", "_span", "_step")

    def __init__(self, clock: Clock, step: OpenStep | None, name: str) -> None:
        self._clock, self._step, self._name = clock, step, name

    def __enter__(self) -> None:
        if self._step is not None:
            self._span = Range(self._name, "aux", self._clock.mark())
            self._step.aux.append(self._span)

    def __exit__(self, *_how: object) -> None:
        if self._step is not None:
            self._span.end = self._clock.mark()


class StepRecorder:
    """One rank's steps.

    Args:
        clock: of the device.
        reader: makes a line of a step's marks.
        issued_by_backends: identity of each process group -> how many collectives its backend counted (R8).
        sink: takes finished steps in order.
        together: so many steps are read at once, or what there is when the last look is `LOOK_AFTER_S` ago.

    Attributes:
        unseen: why the steps that begin now are not looked at; None when they are.
        on_begin: called when a step begins, on the thread and the stream that train.
        quiet_tap: if any, notices collectives and blocks without Python; it tells of them when it is asked.
        steps_written: how many the sink has got.
    """

    def __init__(
        self,
        clock: Clock,
        reader: StepReader,
        issued_by_backends: Callable[[], dict[int, int | None]],
        sink: Callable[[Step], None],
        together: int = 1,
    ) -> None:
        self._clock, self._reader = clock, reader
        self._issued_by_backends, self._sink = issued_by_backends, sink
        self._current: OpenStep | None = None
        self._unread: deque[OpenStep] = deque()
        self.unseen: Unseen | None = None
        self.quiet_tap: QuietTap | None = None
        self.on_begin: Callable[[], None] = lambda: None
        self._captured, self._together, self._looked_s = 0, together, time.monotonic()
        self.steps_written = 0

    # --- while a step runs -------------------------------------------------------------------------------------------

    @contextmanager
    def step(self, facts: StepFacts) -> Iterator[None]:
        """One iteration. A step that fails is not recorded."""
        self.begin(facts)
        try:
            yield
            self.end()
        finally:
            self.abandon()

    def begin(self, facts: StepFacts) -> None:
        """A step begins here; one that was under way is not recorded."""
        self.abandon()
        self._clock.new_epoch()
        self.on_begin()
        begun = OpenStep(facts, self._clock.mark(), self._issued_by_backends(), self.unseen)
        if self.quiet_tap is not None:
            self.quiet_tap.begin()
        self._current = begun

    def end(self) -> None:
        """The step that is under way ends here."""
        done = self._current
        assert done is not None  # begin comes before end
        done.end, done.issued_after = self._clock.mark(), self._issued_by_backends()
        if self.quiet_tap is not None:
            done.tell = self.quiet_tap.end()  # and says how many collectives were captured
        done.captured = self._captured
        self._unread.append(done)
        self._current = None
        if len(self._unread) >= self._together or time.monotonic() - self._looked_s > LOOK_AFTER_S:
            self.catch_up()

    def abandon(self) -> None:
        """The step that is under way, if any, is not recorded."""
        abandoned, self._current = self._current, None
        if abandoned is None:
            return
        self._forget(*abandoned.marks())
        if self.quiet_tap is not None:
            self.quiet_tap.abandon()

    def aux(self, name: str) -> AbstractContextManager[None]:
        """Work that is neither compute nor communication."""
        return _Aux(self._clock, self._current, name)

    def on_issue(self, issued: Issued) -> None:
        """A collective is about to be issued."""
        if self._current is not None:
            self._current.collectives.append(issued)

    def on_stall(self, begin: Mark, end: Mark) -> None:
        """The caller stood between these marks, waiting for a collective."""
        if self._current is not None:
            self._current.stalls.append((begin, end))
        else:
            self._forget(begin, end)

    def on_wait(self, begin: Mark, end: Mark) -> None:
        """Between these marks the stream that computes may have stood waiting for one of the strategy's: what of it
        coincides with communication is a stall.
        """
        if self._current is not None:
            self._current.waits.append((begin, end))
        else:
            self._forget(begin, end)

    def on_captured(self) -> None:
        """A collective became part of a CUDA graph; from now on it may run whenever that graph is replayed."""
        self._captured += 1

    def on_range(self, opened: Range) -> None:
        """A block began to compute."""
        if self._current is not None:
            self._current.compute.append(opened)

    def on_backward_tail(self, begin: Mark, end: Mark) -> None:
        """Between the last node of a backward pass and its return: a strategy's ending, which waits for collectives.

        DDP waits on futures in C++, where no handle of ours is asked; what of this stretch coincides with
        communication is a stall.
        """
        if self._current is None:
            self._forget(begin, end)
            return
        self._current.tails.append((begin, end))
        for issued in self._current.collectives:
            # The training thread goes on because they are done; their callbacks may still wait for the interpreter.
            if issued.has_completed is not None and issued.has_completed():
                issued.stamp("future")

    def note(self, loss: Scalar | None, grad_norm: Scalar | None, lr: float | None = None) -> None:
        """Scalars of the current step, read when the step is, and its learning rate; None leaves one as it was."""
        step = self._current
        if step is None:
            return
        step.loss, step.grad_norm = loss or step.loss, grad_norm or step.grad_norm
        if lr is not None:
            step.facts = replace(step.facts, lr=lr)

    def _forget(self, *marks: Mark | None) -> None:
        """Taken outside of a step, or in one that is not recorded."""
        for mark in marks:
            self._clock.forget(mark)

    # --- afterwards --------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Wait for the device and write every remaining step. Only after the last step."""
        self._clock.drain()
        # A backend wakes those who wait before it calls back, so the last ends may still be on their way.
        deadline = time.monotonic() + FINISH_GRACE_S
        while self._unread:
            if self._readable(self._unread[0], late=time.monotonic() > deadline):
                self._write(self._unread.popleft())
            else:
                time.sleep(0.001)

    def salvage(self) -> None:
        """Write the remaining steps that can be read; after an error, when the device may never answer."""
        while self._unread and self._readable(self._unread[0], late=True):
            self._write(self._unread.popleft())

    def catch_up(self) -> None:
        """Write the steps that have happened."""
        self._looked_s = time.monotonic()
        while self._unread and self._readable(self._unread[0], late=len(self._unread) > MAX_STEPS_LATE):
            self._write(self._unread.popleft())

    def _readable(self, step: OpenStep, *, late: bool) -> bool:
        """The step has ended on the device, and so have its collectives, unless it is too late to wait for those."""
        step.hear()
        if not self._happened(step.end):
            return False
        ended = True
        for issued in step.collectives:  # all are asked, so that an end is known as soon as it can be
            ended &= issued.look() and self._happened(issued.end)
        return ended or late

    def _happened(self, mark: Mark | None) -> bool:
        return mark is not None and (on_host(mark) or self._clock.read_ns(mark) is not None)

    def _write(self, step: OpenStep) -> None:
        self._sink(self._reader.line(step))
        self.steps_written += 1
