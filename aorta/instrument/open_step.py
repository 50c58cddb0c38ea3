"""A step while it runs, or has not been read yet: what the loop knows of it, its marks, its copies, values that live on
the device and are recorded without waiting for them (R4), and ranges that the caller names.

Such ranges are read on the host's clock, from any thread, and go with the step that ends first after them; while
torch.profiler records the calling thread, a range is in its trace too, as `range <name>`. A range that fails is
recorded with the type of the error, which goes on. Must not read a mark, synchronise with the device, or grow without
bound.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, TypeAlias

import torch

from aorta.errors import ConfigError
from aorta.instrument.compute_ranges import Range
from aorta.instrument.event_clock import Mark
from aorta.instrument.in_flight import InFlight, Waited
from aorta.records.schema import CopyDirection, UserRange
from aorta.records.step_line import Name, StepFacts, user_ranges
from aorta.records.window_kernels import WindowKernels
from aorta.redaction import redact
from aorta.timeline.intervals import Interval
from aorta.timeline.overlap import NO_COPIES, Unseen

TRACE_NAME: Final = "range {name}"
"""In torch's traces. The word in front keeps a name such as `ProfilerStep#3` from being taken for a step."""
MOST_NAME_CHARS: Final = 120
MOST_NAMES: Final = 1_000
"""Distinct names of a recording; all further ones are recorded as `OTHER_NAMES`."""
OTHER_NAMES: Final = "(more names)"
MOST_PER_STEP: Final = 10_000
"""Ranges of a step; more are left out, and counted in the step's `reasons`."""
MOST_THREADS: Final = 64
"""Threads that are told apart; all further ones are recorded as the last."""


@dataclass
class MarksOfStep:
    """Ranges (name, thread, depth, start_ns, end_ns, error); `left_out` counts those beyond `MOST_PER_STEP`."""

    ranges: list[tuple[str, int, int, int, int, str | None]] = field(default_factory=list)
    left_out: int = 0

    def rows(self, origin_ns: int) -> tuple[list[UserRange], dict[str, str]]:
        return user_ranges(self.ranges, origin_ns, self.left_out, MOST_PER_STEP)


class UserMarks:
    """Collects the caller's ranges until a step takes them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._marks = MarksOfStep()
        self._names: dict[str, str] = {}
        self._thread = _Thread()
        self._threads = 0
        self._enter_thread()  # the one that records is number 0

    def range(self, name: str) -> AbstractContextManager[None]:
        """Record a `with` block when it ends.

        Raises:
            ConfigError: `name` is no string, or empty.
        """
        return _OpenRange(self, self._name(name))

    def take(self) -> MarksOfStep | None:
        """Return what was recorded since the last call; None where nothing was."""
        if not self._marks.ranges:
            return None
        with self._lock:
            taken, self._marks = self._marks, MarksOfStep()
        return taken

    def ended(self, row: tuple[str, int, int, int, int, str | None]) -> None:
        with self._lock:
            if len(self._marks.ranges) < MOST_PER_STEP:
                self._marks.ranges.append(row)
            else:
                self._marks.left_out += 1

    def thread(self) -> _Thread:
        """Return the number of the caller's thread, and how many of its ranges are open."""
        if self._thread.number < 0:
            self._enter_thread()
        return self._thread

    def _enter_thread(self) -> None:
        with self._lock:
            self._thread.number = min(self._threads, MOST_THREADS - 1)
            self._threads += 1

    def _name(self, name: object) -> str:
        if not isinstance(name, str) or not name:
            raise ConfigError(f"recording.range({name!r}): a name must be a string that is not empty")
        key = name[: MOST_NAME_CHARS + 1]
        known = self._names.get(key)
        if known is not None:
            return known
        if len(self._names) >= MOST_NAMES:
            return OTHER_NAMES
        # A lone surrogate is no character of any encoding, so JSON cannot hold it.
        clean = redact(name)[:MOST_NAME_CHARS].encode("utf-8", "replace").decode("utf-8")
        return self._names.setdefault(key, clean + ("..." if len(key) > MOST_NAME_CHARS else ""))


class _Thread(threading.local):
    number = -1
    depth = 0


class _OpenRange:
    """A range between its begin and its end, which are on one thread."""

    __slots__ = ("_depth", "_marks", "_name", "_seen", "_start_ns", "_thread")

    def __init__(self, marks: UserMarks, name: str) -> None:
        self._marks, self._name = marks, name

    def __enter__(self) -> None:
        thread = self._marks.thread()
        self._thread, self._depth = thread.number, thread.depth
        thread.depth += 1
        self._seen: Any = None
        if torch.autograd._profiler_enabled():
            self._seen = torch.profiler.record_function(TRACE_NAME.format(name=self._name))
            self._seen.__enter__()
        self._start_ns = time.perf_counter_ns()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end_ns = time.perf_counter_ns()
        if self._seen is not None:
            self._seen.__exit__(kind, error, trace)
        thread = self._marks.thread()
        thread.depth = max(0, thread.depth - 1)  # it may have been entered on another thread
        why = None if kind is None else kind.__name__[:MOST_NAME_CHARS]
        self._marks.ended((self._name, self._thread, self._depth, self._start_ns, end_ns, why))


ON_A_CPU: Final = "on a CPU a copy is made by the threads that compute: it is part of computation"
INSTEAD: Final = "copies are not looked at in an isolated baseline"


@dataclass(slots=True)
class Copied:
    """One copy between two marks (docs/dev/measuring.md, R1); None where none could be taken: it was issued on a stream
    of another device. `computes`: it was issued on the stream that computes.

    Copies are timed by the compiled interceptor alone (`native/copies.hpp`), which brackets `aten::copy_` and
    `aten::_local_scalar_dense` with marks at the dispatcher. A kernel in Python there has been tried: threads of a
    backend, which copy as well, then wait for the interpreter, and a thread that holds it may wait for them.
    """

    direction: CopyDirection
    bytes: int
    start: Mark | None
    end: Mark | None
    computes: bool = False


class Scalar:
    """The value of a one-element tensor, as it is now.

    On CUDA/HIP it is copied to page-locked memory in the current stream; `read` must be called only once the stream is
    known to have passed that point (the recorder reads a step only after its end mark).
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._copy: torch.Tensor | None = None
        if tensor.is_cpu:
            self._value = float(tensor.item())
        else:
            self._copy = torch.empty_like(tensor.detach(), device="cpu", pin_memory=True)
            self._copy.copy_(tensor.detach(), non_blocking=True)

    def read(self) -> float:
        return self._value if self._copy is None else float(self._copy)


COMPILED_PARTS: Final = ("collectives", "waits", "copies", "forward", "backward")
"""Parts of AORTA's own time that compiled code counts, in the order of its numbers (`native/step.hpp`)."""

Pass: TypeAlias = tuple[str, str, int, int]
"""A range whose marks have been read: (block, phase, start_ns, end_ns), in nanoseconds of the clock."""


@dataclass(slots=True)
class OpenStep:
    """The marks of one step, while it runs or has not been read yet.

    Attributes:
        issued_before, issued_after: each backend's own count of its collectives, at the start and at the end.
        unseen: why the step is not observed, if it is not.
        no_copies: why copies are not looked at, if they are not.
        captured: collectives captured into CUDA graphs in the run so far; their replays cannot be observed.
        stalls: marks around each local copy that stands in for a collective in a step that only computes.
        tails: marks around the strategy's work after the last node of each backward pass, where DDP waits for buckets.
        waits: of the compute stream (on a CPU, of the caller's thread) for one collective each.
        stream_waits: marks around waits of the compute stream for another one, with the collectives that this one had
            waited for.
        calls: start and end of backends' calls on the host's clock, in nanoseconds; those longer than the stall cut-off
            become stalls.
        compute: forward and backward ranges of blocks.
        aux: ranges of work that is neither computation nor communication.
        pipeline: ranges in which a pipeline's stages work, with the name of their process group as the block.
        kernels: those of the profiler's window that the step is part of, if of any.
        noted: indices of its collectives in the rank's progress file.
        continues: it has all that was issued since the step before it ended.
        outside: how many collectives were issued since then that are part of no step.
        unwatched: how many collectives were issued in backward passes before, or without, a gradient of what is
            watched.
        ahead_before, ahead_after: how few and how many collectives `issued_before` and `issued_after` may be ahead of
            what was recorded until then, as other threads issue some at that moment.
        boundary: why it is unclear where the step begins or ends; None: it is not.
        own_ns: what AORTA's own work took of the thread that trains, by part, in nanoseconds; None: not counted.
    """

    facts: StepFacts
    start: Mark = None
    issued_before: dict[int, int | None] = field(default_factory=dict)
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
    compute: list[Range] = field(default_factory=list)
    aux: list[Range] = field(default_factory=list)
    pipeline: list[Range] = field(default_factory=list)
    copies: list[Copied] = field(default_factory=list)
    loss: Scalar | None = None
    grad_norm: Scalar | None = None
    user_marks: MarksOfStep | None = None
    kernels: WindowKernels | None = None
    noted: range = range(0)
    continues: bool = False
    outside: int = 0
    unwatched: int = 0
    ahead_before: tuple[int, int] = (0, 0)
    ahead_after: tuple[int, int] = (0, 0)
    boundary: str | None = None
    own_ns: dict[str, int] | None = None

    def marks(self) -> Iterator[Mark | None]:
        yield from (self.start, self.end)
        for issued in self.collectives:
            yield from (issued.start, issued.end)
        for begin, end in (*self.stalls, *self.tails):
            yield from (begin, end)
        for wait in self.waits:
            yield from (wait.begin, wait.end)
        for begin, end, _ in self.stream_waits:
            yield from (begin, end)
        for span in (*self.compute, *self.aux, *self.pipeline):
            yield from (span.start, span.end)
        for copied in self.copies:
            yield from (copied.start, copied.end)
