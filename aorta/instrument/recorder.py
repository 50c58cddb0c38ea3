"""What the loop and the instrument call to record the steps of one rank, whichever way they are recorded."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from aorta.instrument.event_clock import Mark
from aorta.instrument.open_step import Scalar, UserMarks
from aorta.records.progress_file import Progress
from aorta.records.step_line import StepFacts
from aorta.records.window_kernels import WindowKernels
from aorta.timeline.overlap import NO_COPIES, Unseen

FINISH_GRACE_S = 2.0
"""How long to wait for the last steps once the device is idle."""


@dataclass(slots=True)
class OwnTime:
    """Wall-clock time of the thread that trains, in nanoseconds, in which AORTA did its own work outside compiled code.

    Attributes:
        marks_ns: since the step began: marks, phases, counts of the backends.
        lines_ns: since the last line was made: reading the marks of steps, encoding and writing lines, and whoever gets
            them.
        counted: compiled code counts its part as well, or there is nothing to count.
    """

    marks_ns: int = 0
    lines_ns: int = 0
    counted: bool = False


class Recorder(ABC):
    """Records the steps of one rank: what the loop and the instrument call.

    Attributes:
        unseen: why steps that begin now are not observed; None when they are.
        no_copies: why the copies of steps that begin now are not looked at; None when they are.
        kernels: of the window that steps which begin now are part of; None: of none. Its steps are read once it knows
            them, and so are those behind them.
        boundary: why it is unclear where the step that ends next begins or ends; None: it is not.
        outside: how many collectives were issued since the last step ended that are part of none.
        own: AORTA's own time, until a step takes it.
    """

    def __init__(self, progress: Progress | None) -> None:
        self.progress = progress or Progress()
        self.unseen: Unseen | None = None
        self.no_copies: str | None = NO_COPIES
        self.user_marks = UserMarks()
        self.kernels: WindowKernels | None = None
        self.own = OwnTime()
        self.steps_written = self.outside = 0
        self.boundary: str | None = None
        self._captured, self._thread = 0, threading.get_ident()

    @property
    def is_whole(self) -> bool:
        """Whether every step that has ended was written."""
        return True

    @contextmanager
    def step(self, facts: StepFacts) -> Iterator[None]:
        """Record one iteration, a `with` block. A step that fails is not recorded."""
        self.begin(facts)
        try:
            yield
        except BaseException:
            self.abandon()
            raise
        self.end()

    def on_captured(self) -> None:
        """Note that a collective became part of a CUDA graph: from now on it may run whenever that is replayed."""
        self._captured += 1

    @abstractmethod
    def begin(self, facts: StepFacts, *, continues: bool = False) -> None:
        """Begin a step on the calling thread; one that was open is discarded.

        Args:
            continues: what was issued since the last step ended is part of this one, although it began before it.
                Otherwise it is part of none, and only counted.
        """

    @abstractmethod
    def end(self) -> None:
        """End the open step. What is issued from now on is part of the next one, where that continues it."""

    @abstractmethod
    def abandon(self) -> None:
        """Discard the open step, if any, and record nothing until the next one begins."""

    @abstractmethod
    def leave(self) -> None:
        """In a forked child: record nothing. Locks may have been held by threads that the child does not have."""

    @abstractmethod
    def aux(self, name: str, *, restores: bool = True) -> AbstractContextManager[None]:
        """Return a `with` block of work that is neither compute nor communication.

        Args:
            name: of the range; in the progress file a phase, where it is one of `PHASES`.
            restores: the phase before it continues afterwards; False where another begins at once, which saves a note.
        """

    @abstractmethod
    def lacks(self, name: str) -> bool:
        """Return whether the calling thread is the one that trains, within a step, and in no auxiliary range `name`."""

    @abstractmethod
    def pipeline(self, group: str) -> AbstractContextManager[None]:
        """Return a `with` block in which the stages of a pipeline work on a step; what is waited for in their process
        group is a bubble.
        """

    @abstractmethod
    def computes(self, block: str, phase: str) -> AbstractContextManager[None]:
        """Return a `with` block in which a block computes. Steps that are not observed have no such ranges."""

    @abstractmethod
    def on_stall(self, begin: Mark, end: Mark) -> None:
        """Note that the caller was waiting for a collective between these marks."""

    @abstractmethod
    def note(self, loss: Scalar | None, grad_norm: Scalar | None, lr: float | None = None) -> None:
        """Record scalars of the current step, read when the step is, and its learning rate; None keeps the previous
        value.
        """

    @abstractmethod
    def finish(self) -> None:
        """Wait for the device and write every remaining step. Only after the last step."""

    @abstractmethod
    def salvage(self) -> None:
        """Write the remaining steps that can be read; after an error, when the device may never answer."""

    @abstractmethod
    def catch_up(self) -> None:
        """Write the steps that are complete. Nothing while a graph is being captured: to ask for an event would end the
        capture with an error.
        """
