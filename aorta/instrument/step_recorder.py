"""Collects the marks of a step while it runs, and emits its record line once everything in it has happened.

Issued collectives, stalls, block ranges and auxiliary ranges come in as marks; `records.schema.Step` objects go to
a sink, in order, some steps late (R4). Must not wait for anything inside the loop.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from aorta.distributed.cuda import is_capturing
from aorta.instrument.compute_ranges import Range
from aorta.instrument.event_clock import EventClock, Mark, on_host
from aorta.instrument.gradient_order import GradientOrder
from aorta.instrument.in_flight import InFlight, Name, Waited
from aorta.instrument.open_step import Counts, OpenStep, Scalar, StepFacts
from aorta.instrument.step_builder import StepBuilder
from aorta.instrument.user_marks import UserMarks
from aorta.instrument.window_kernels import WindowKernels
from aorta.records.progress_file import WHEN_UNKNOWN, Progress
from aorta.records.schema import Step
from aorta.timeline.overlap import NO_COPIES, Unseen

if TYPE_CHECKING:  # it records into a recorder
    from aorta.instrument.native.native_interceptor import NativeCpuInterceptor

MAX_STEPS_LATE = 8
"""How many steps may stay unread because a collective has not ended; after that, coverage reports it as missing."""

TOGETHER = 8
"""Steps read at once where AORTA owns the loop, which writes the rest when a signal ends it. The model evicts
the processor's caches, so most of the cost of reading one step is fetching the code that reads it
(docs/dev/measurements.md)."""

LOOK_AFTER_S = 1.0
"""A killed run loses at most the steps of about this long; a longer step is read at once."""

FINISH_GRACE_S = 2.0
"""How long to wait for the last steps once the device is idle."""


_CAPTURED = "a CUDA graph was being captured when the step began or ended: only the host's clock says when that was"


_UNNOTED = Progress()


class _Bracket:
    """A range that is noted in `rows` of the step that was running when it began; None: there was none. In `progress`
    it is a phase, where it has the name of one; `restores`: the phase before it continues afterwards.
    """

    __slots__ = ("_before", "_clock", "_name", "_phase", "_progress", "_restores", "_rows", "_span")

    def __init__(
        self,
        clock: EventClock,
        rows: list[Range] | None,
        name: str,
        phase: str,
        progress: Progress = _UNNOTED,
        *,
        restores: bool = True,
    ) -> None:
        self._clock, self._rows, self._name, self._phase = clock, rows, name, phase
        self._progress, self._restores = progress, restores

    def __enter__(self) -> None:
        self._before = self._progress.enter(self._name)
        if self._rows is not None:
            self._span = Range(self._name, self._phase, self._clock.mark())
            self._rows.append(self._span)

    def __exit__(self, kind: type[BaseException] | None, *_how: object) -> None:
        if self._rows is not None:
            self._span.end = self._clock.mark()
        if kind is None and self._restores:  # after an error the phase stays, for whoever asks where it happened
            self._progress.enter(self._before)


class StepRecorder:
    """Records the steps of one rank.

    Args:
        clock: of the device.
        builder: builds a line from a step's marks.
        issued_by_backends: identity of each process group -> how many collectives its backend counted (R8).
        sink: receives finished steps in order.
        together: number of steps read at once, or fewer when the last read is `LOOK_AFTER_S` ago.
        progress: of the rank, in which steps and phases are noted; None: nowhere.

    Attributes:
        unseen: why steps that begin now are not observed; None when they are.
        no_copies: why the copies of steps that begin now are not looked at; None when they are.
        on_begin: called when a step begins, on the training thread and stream.
        compiled_interceptor: None without one; its events are fetched when the step is read.
        gradients: notes the order of a DDP model's gradients until a step has it; then None.
        user_marks: ranges and counters of the caller, from any thread.
        kernels: of the window that steps which begin now are part of; None: of none. Its steps are read once it knows
            them, and so are those behind them.
        steps_written: how many steps the sink has received.
    """

    def __init__(
        self,
        clock: EventClock,
        builder: StepBuilder,
        issued_by_backends: Callable[[], dict[int, int | None]],
        sink: Callable[[Step], None],
        together: int = 1,
        progress: Progress | None = None,
    ) -> None:
        self.progress = progress or Progress()
        self._clock, self._builder = clock, builder
        self._issued_by_backends, self._sink = issued_by_backends, sink
        self._current: OpenStep | None = None
        self._unread: deque[OpenStep] = deque()
        self.unseen: Unseen | None = None
        self.no_copies: str | None = NO_COPIES
        self.compiled_interceptor: NativeCpuInterceptor | None = None
        self.on_begin: Callable[[], None] = lambda: None
        self.gradients: GradientOrder | None = None
        self.user_marks = UserMarks()
        self.kernels: WindowKernels | None = None
        self._captured, self._together, self._looked_s = 0, together, time.monotonic()
        self.steps_written = 0

    # --- while a step runs -------------------------------------------------------------------------------------------

    @contextmanager
    def step(self, facts: StepFacts) -> Iterator[None]:
        """Record one iteration, a `with` block. A step that fails is not recorded."""
        self.begin(facts)
        try:
            yield
            self.end()
        finally:
            self.abandon()

    def begin(self, facts: StepFacts) -> None:
        """Begin a step; one that was open is discarded."""
        self.abandon()
        self._clock.new_epoch()
        self.progress.begin_step(facts.global_step)
        self.on_begin()
        # A mark would become part of a graph that is being captured: then only the host's clock tells.
        start = self._clock.mark() or time.perf_counter_ns()
        begun = OpenStep(facts, start, self._issued_by_backends(), self.unseen, self.no_copies)
        begun.kernels, begun.noted = self.kernels, range(issued := self.progress.issued, issued)
        if self.compiled_interceptor is not None:
            self.compiled_interceptor.begin()
        self._current = begun

    def end(self) -> None:
        """End the open step."""
        done = self._current
        assert done is not None  # begin comes before end
        done.end, done.issued_after = self._clock.mark(), self._issued_by_backends()
        if done.end is None or on_host(done.start) != on_host(done.end):
            done.start, done.end = self._on_host(done.start), self._on_host(done.end)
            done.unseen = Unseen(_CAPTURED, compute=True)
        if self.compiled_interceptor is not None:
            done.native_events = self.compiled_interceptor.end()  # also reports how many collectives were captured
        done.captured, done.noted = self._captured, range(done.noted.start, self.progress.issued)
        self.progress.end_step()
        done.user_marks = self.user_marks.take()
        if self.gradients is not None:
            if done.facts.warmup:  # slower than others, and not in the same way everywhere
                self.gradients.forget()
            elif noted := self.gradients.take():
                done.gradients, self.gradients = noted, None
        self._unread.append(done)
        self._current = None
        if len(self._unread) >= self._together or time.monotonic() - self._looked_s > LOOK_AFTER_S:
            self.catch_up()

    def abandon(self) -> None:
        """Discard the open step, if any."""
        abandoned, self._current = self._current, None
        if abandoned is None:
            return
        self._forget(*abandoned.marks())
        self.user_marks.take()
        if self.gradients is not None:
            self.gradients.forget()
        if self.compiled_interceptor is not None:
            self.compiled_interceptor.abandon()

    def aux(self, name: str, *, restores: bool = True) -> AbstractContextManager[None]:
        """Return a `with` block of work that is neither compute nor communication.

        Args:
            name: of the range; in the progress file a phase, where it is one of `PHASES`.
            restores: the phase before it continues afterwards; False where another begins at once, which saves a note.
        """
        rows = None if self._current is None else self._current.aux
        return _Bracket(self._clock, rows, name, "aux", self.progress, restores=restores)

    def pipeline(self, group: str) -> AbstractContextManager[None]:
        """Return a `with` block in which the stages of a pipeline work on a step; what is waited for in their process
        group is a bubble.
        """
        return _Bracket(self._clock, None if self._current is None else self._current.pipeline, group, "pipeline")

    def computes(self, block: str, phase: str) -> AbstractContextManager[None]:
        """Return a `with` block of computation that no hook of a module brackets."""
        # Unobserved steps have no such ranges: with the instrument off nothing is recorded.
        rows = None if self._current is None or self.unseen is not None else self._current.compute
        return _Bracket(self._clock, rows, block, phase)

    def on_issue(self, issued: InFlight) -> None:
        """Note that a collective is about to be issued."""
        if self._current is not None:
            self._current.collectives.append(issued)

    def on_stall(self, begin: Mark, end: Mark) -> None:
        """Note that the caller was waiting for a collective between these marks."""
        if self._current is not None:
            self._current.stalls.append((begin, end))
        else:
            self._forget(begin, end)

    def on_call(self, begin_ns: int, end_ns: int) -> None:
        """Note a backend's call, on the host's clock; whether it is a stall depends on the cut-off."""
        if self._current is not None:
            self._current.calls.append((begin_ns, end_ns))

    def on_wait(self, wait: Waited) -> None:
        """Note that what computes waited for a collective."""
        if self._current is not None:
            self._current.waits.append(wait)
        else:
            self._forget(wait.begin, wait.end)

    def on_stream_wait(self, begin: Mark, end: Mark, joined: tuple[Name, ...]) -> None:
        """Note that between these marks the compute stream may have waited for a stream of the strategy, and so for the
        collectives that this one had `joined`; the part that coincides with communication is a stall.
        """
        if self._current is not None:
            self._current.stream_waits.append((begin, end, joined))
        else:
            self._forget(begin, end)

    def on_bucket_ready(self, size_bytes: int) -> None:
        """Note that the gradients of a bucket are ready, which is reduced later."""
        if self._current is not None and self.unseen is None:
            self._current.ready.append((self._clock.mark(), size_bytes))

    def on_captured(self) -> None:
        """Note that a collective became part of a CUDA graph: from now on it may run whenever that is replayed."""
        self._captured += 1

    def on_range(self, opened: Range) -> None:
        """Record that a block began to compute."""
        if self._current is not None:
            self._current.compute.append(opened)

    def on_backward_tail(self, begin: Mark, end: Mark) -> None:
        """Note marks around the strategy's work between a backward pass's last node and its return.

        DDP waits there on futures in C++, bypassing our work handles; the part that coincides with communication is a
        stall.
        """
        if self._current is None:
            self._forget(begin, end)
            return
        self._current.tails.append((begin, end))
        for issued in self._current.collectives:
            # The training thread continues because they are done; their callbacks may still wait for the GIL.
            if issued.has_completed is not None and issued.has_completed():
                issued.stamp("future", int(end) if on_host(end) else None)

    def note(self, loss: Scalar | None, grad_norm: Scalar | None, lr: float | None = None) -> None:
        """Record scalars of the current step, read when the step is, and its learning rate; None keeps the previous
        value.
        """
        step = self._current
        if step is None:
            return
        step.loss, step.grad_norm = loss or step.loss, grad_norm or step.grad_norm
        if lr is not None:
            step.facts = replace(step.facts, lr=lr)

    def note_experts(self, tokens: Iterable[tuple[str, Counts]]) -> None:
        """Record, for each block with experts, the tokens sent to each one and behind them those dropped; read when the
        step is.
        """
        if self._current is not None:
            self._current.experts += tokens

    def _on_host(self, mark: Mark | None) -> int:
        """Return when the host reached a mark, or now where none could be taken."""
        if mark is None or on_host(mark):
            return time.perf_counter_ns() if mark is None else int(mark)
        sent_ns = self._clock.sent_ns(mark)
        self._clock.forget(mark)
        assert sent_ns is not None  # only readings of the host's clock have none
        return sent_ns

    def _forget(self, *marks: Mark | None) -> None:
        """Drop marks taken outside a step, or in one that is not recorded."""
        for mark in marks:
            self._clock.forget(mark)

    # --- afterwards --------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Wait for the device and write every remaining step. Only after the last step."""
        self._give_up_kernels()
        self._clock.drain()
        # A backend wakes waiting threads before it runs callbacks, so the last ends may still be pending.
        deadline = time.monotonic() + FINISH_GRACE_S
        while self._unread:
            if self._readable(self._unread[0], late=time.monotonic() > deadline):
                self._write(self._unread.popleft())
            else:
                time.sleep(0.001)

    def salvage(self) -> None:
        """Write the remaining steps that can be read; after an error, when the device may never answer."""
        self._give_up_kernels()
        while self._unread and self._readable(self._unread[0], late=True):
            self._write(self._unread.popleft())

    def _give_up_kernels(self) -> None:
        for step in self._unread:
            if step.kernels is not None and not step.kernels.known:
                step.kernels.failed("the run ended in the window")

    def catch_up(self) -> None:
        """Write the steps that are complete. Nothing while a graph is being captured: to ask for an event would end the
        capture with an error.
        """
        if is_capturing():
            return
        self._looked_s = time.monotonic()
        while self._unread and self._readable(self._unread[0], late=len(self._unread) > MAX_STEPS_LATE):
            self._write(self._unread.popleft())

    def _readable(self, step: OpenStep, *, late: bool) -> bool:
        """Return whether step, collectives and copies have ended on the device; `late`: without waiting for these."""
        step.add_native_events()
        if (step.kernels is not None and not step.kernels.known) or not self._happened(step.end):
            return False
        ended = True
        for issued in step.collectives:  # query all, so that each end is known as early as possible
            ended &= issued.look() and self._happened(issued.end)
        if ended and not on_host(step.end):  # the interceptors have noted those on the host already
            for index in step.noted:
                self.progress.completed(index, WHEN_UNKNOWN)
        ended &= all(copied.end is None or self._happened(copied.end) for copied in step.copies)
        return ended or late

    def _happened(self, mark: Mark | None) -> bool:
        return mark is not None and (on_host(mark) or self._clock.read_ns(mark) is not None)

    def _write(self, step: OpenStep) -> None:
        self._sink(self._builder.line(step))
        self.steps_written += 1
