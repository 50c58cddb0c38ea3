"""A recorder over a clock that is set by hand: marks happen when the test says so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from aorta.instrument.compute_ranges import Range
from aorta.instrument.emulation.emulated_link import HostLinks
from aorta.instrument.event_clock import HostClock
from aorta.instrument.in_flight import Group, InFlight
from aorta.instrument.instrumentation import ring_facts
from aorta.instrument.native.native_interceptor import NativeCpuInterceptor
from aorta.instrument.open_step import COMPILED_PARTS, OpenStep
from aorta.instrument.python_interceptor import PythonInterceptor
from aorta.instrument.step_builder import StepBuilder
from aorta.instrument.step_recorder import StepRecorder
from aorta.records.progress_file import Progress
from aorta.records.ring_file import RingFile
from aorta.records.schema import STALL_CUTOFF_NS, ClockReading, Step
from aorta.records.step_line import StepFacts
from tests.instrument.rows_as_marks import marks_of

MS = 1_000_000
ANCHOR = ClockReading(realtime_ns=5_000 * MS, boottime_ns=0, monotonic_ns=1_000 * MS, uncertainty_ns=1)


def ring_in_memory(stall_cutoff_ns: int = STALL_CUTOFF_NS) -> RingFile:
    """A ring of rank 0."""
    return RingFile.create(None, ring_facts(0, 2, ANCHOR, stall_cutoff_ns))


class Recorded(NamedTuple):
    """What an interceptor recorded of a step: its rows as marks, and AORTA's own time by part, if that was counted."""

    step: OpenStep
    own_ns: dict[str, int]


class Rows:
    """An interceptor, compiled if there is a `module`, and what it has recorded."""

    def __init__(
        self,
        module: Any | None,
        groups: dict[str, Group] | None = None,
        stall_cutoff_ns: int = STALL_CUTOFF_NS,
        links: HostLinks | None = None,
        progress: Progress | None = None,
    ) -> None:
        groups = {} if groups is None else groups
        self.ring = ring_in_memory(stall_cutoff_ns)
        self.interceptor: NativeCpuInterceptor | PythonInterceptor = (
            PythonInterceptor(groups, self.ring, links, stall_cutoff_ns, progress)
            if module is None
            else NativeCpuInterceptor(module, groups, self.ring, stall_cutoff_ns, progress)
        )
        self._first = 0

    def begin(self) -> None:
        """Begin a step."""
        _, self._first = self.interceptor.begin()

    def end(self) -> Recorded:
        """End it."""
        behind, own_ns = self.interceptor.end()
        return Recorded(marks_of(self.ring, self._first, behind), dict(zip(COMPILED_PARTS, own_ns, strict=False)))


class Pending:
    """A mark that happens when the test says so; `sent_ns`: when the host recorded it, None: on a clock of its own."""

    def __init__(self, at_ns: int | None, sent_ns: int | None = None) -> None:
        self.at_ns, self.sent_ns = at_ns, sent_ns


class SetClock(HostClock):
    """Marks happen at `now_ns`, or not until the test lets them; counts what is given back."""

    def __init__(self) -> None:
        self.now_ns, self.running = 0, True
        self.taken: list[Pending] = []
        self.released: list[Pending] = []
        self.drained = 0

    def mark(self) -> Pending:
        self.taken.append(Pending(self.now_ns if self.running else None))
        return self.taken[-1]

    def at(self, ms: float) -> Pending:
        self.now_ns = round(ms * MS)
        return self.mark()

    def read_ns(self, mark: Pending | int) -> int | None:
        return mark if isinstance(mark, int) else mark.at_ns

    def sent_ns(self, mark: Pending | int) -> int | None:
        return None if isinstance(mark, int) else mark.sent_ns

    def release(self, mark: Pending | int) -> None:
        if isinstance(mark, Pending):
            self.released.append(mark)

    def drain(self) -> None:
        self.drained += 1


class Rig:
    """A recorder over a clock that is set by hand. Collectives count as issued by the backend, too."""

    def __init__(self, stall_cutoff_ns: int | None = None) -> None:
        self.clock, self.lines = SetClock(), list[Step]()
        self.counted: dict[int, int | None] = {1: 0}
        self.recorder = StepRecorder(
            self.clock,
            StepBuilder(self.clock, 0, 2, {"0": Group((0, 1), 1)}, ANCHOR, stall_cutoff_ns=stall_cutoff_ns),
            lambda: dict(self.counted),
            self.lines.append,
        )
        self.steps_begun = 0

    @contextmanager
    def step(self, begin_ms: float, end_ms: float) -> Iterator[None]:
        self.clock.now_ns = round(begin_ms * MS)
        number, self.steps_begun = self.steps_begun, self.steps_begun + 1
        with self.recorder.step(StepFacts(0, number, number, 1e-3, warmup=False)):
            yield
            self.clock.now_ns = round(end_ms * MS)

    def collective(self, start: Pending | None, end: Pending | None, issue_ms: float = 0) -> InFlight:
        issued = InFlight(
            "allreduce", "0", 0, 8, "float32", round(issue_ms * MS), start=start, end=end, end_source="event"
        )
        self.recorder.on_issue(issued)
        before = self.counted[1]
        assert before is not None
        self.counted[1] = before + 1
        return issued

    def compute(self, begin_ms: float, end_ms: float) -> None:
        self.recorder.on_range(Range("block", "forward", self.clock.at(begin_ms), self.clock.at(end_ms)))

    @property
    def written(self) -> list[int]:
        return [line.global_step for line in self.lines]
