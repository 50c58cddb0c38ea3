"""Measures steps by a profiler's kernels, beside their marks (docs/dev/measuring.md, W28).

Steps of a window share one `WindowKernels`; they are read once its profiler has stopped. Its clock may be off by more
than a short collective lasts, and is set so that kernels lie between their collectives' marks. Their communication is
the kernels that communicate, each of the kind of the collective whose marks it lies between; their computation is the
other kernels of the stream that computes, inside the ranges of the blocks. Must not start a profiler, or know a metric.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from aorta.records.device_rows import Communication
from aorta.timeline import intervals
from aorta.timeline.classes import DeviceKernel, communicates
from aorta.timeline.intervals import Interval
from aorta.timeline.overlap import Overlap

CLOCK_NOISE_NS = 5_000
"""What single times of a profiler are off by (ends of 384 collectives on an H200: 5.6 us)."""
Pass: TypeAlias = tuple[str, str, int, int]
"""A pass of a block: (block, phase, start_ns, end_ns), in nanoseconds of the clock."""


class RunningKernels(NamedTuple):
    """When kernels computed and communicated in one step; collectives of unknown kind stand apart."""

    compute: list[Interval]
    comm: dict[str, list[Interval]]
    of_unknown_kind: list[Interval]


@dataclass
class MeasuredTwice:
    """Steps that were measured by marks and by kernels, in nanoseconds of all of them together."""

    steps: int = 0
    comm_ns: int = 0
    hidden_ns: int = 0
    marked_hidden_ns: float = 0
    marked_exposed_ns: float = 0
    blocks: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    """(block, phase) -> length of its ranges without stalls, and of the part in which kernels ran."""


class WindowKernels:
    """The kernels of a window of steps.

    Attributes:
        known: whether the profiler has stopped; until then the window's steps are not read.
        problem: why some step, or every one, is not measured by kernels.
        compared: those that are.
    """

    def __init__(self) -> None:
        self.known = False
        self.problem: str | None = None
        self.compared = MeasuredTwice()
        self._compute: list[DeviceKernel] = []
        self._comm: list[DeviceKernel] = []
        self._stream: int | None = None
        self._set = False

    def arrived(self, kernels: Iterable[DeviceKernel]) -> None:
        for kernel in kernels:
            (self._comm if communicates(kernel.name) else self._compute).append(kernel)
        self.known = True

    def failed(self, problem: str) -> None:
        """Give up kernels: the steps are measured by their marks alone."""
        self.known, self.problem = True, problem

    def within(
        self, passes: Sequence[Pass], communication: Sequence[Communication], window: Interval
    ) -> RunningKernels | None:
        """Return the kernels of a step; None, with a `problem`, where some are missing.

        Args:
            communication: the collectives that touch the step.
        """
        if self.problem is not None and not self._compute and not self._comm:
            return None
        of_device = [op for op in communication if op.on_device and op.possible[0] < op.possible[1]]
        if not self._set:
            self._set_clock([op.possible for op in of_device])
        ranges = intervals.merge(intervals.clip([(low, high) for _, _, low, high in passes], window))
        compute = self._computing(ranges)
        comm = [kernel for kernel in self._comm if kernel.start_ns < window[1] and kernel.end_ns > window[0]]
        spans = [(kernel.start_ns, kernel.end_ns) for kernel in comm]
        seen = intervals.merge(spans)
        missing = sum(not intervals.intersect([op.possible], seen) for op in of_device)
        if missing:
            self.problem = f"the profiler saw no kernel of {missing} of {len(of_device)} collectives of a step"
            return None
        if ranges and not compute:
            self.problem = "the profiler saw no kernel inside the blocks of a step"
            return None
        kinds: dict[str, list[Interval]] = {op.kind: [] for op in communication}
        for op in communication:
            if not op.on_device:
                kinds[op.kind].append(op.possible)
        unknown: list[Interval] = []
        for span in spans:
            shared = [(intervals.measure(intervals.intersect([span], [op.possible])), op.kind) for op in of_device]
            most, kind = max(shared, default=(0, ""))
            (kinds[kind] if most else unknown).append(span)
        return RunningKernels(compute, kinds, unknown)

    def compare(
        self,
        by_marks: Overlap,
        by_kernels: Overlap,
        passes: Sequence[Pass],
        stalls: Sequence[Interval],
        compute: list[Interval],
    ) -> None:
        """Compare a step that was measured both ways.

        Args:
            stalls: of the step, merged; `compute`: when kernels computed in it.
        """
        compared = self.compared
        compared.steps += 1
        compared.comm_ns += by_kernels.comm_ns
        compared.hidden_ns += by_kernels.hidden_ns
        compared.marked_hidden_ns += by_marks.hidden_ns
        compared.marked_exposed_ns += by_marks.bounds.get("exposed_comm_ms", (by_marks.exposed_ns / 1e6,))[0] * 1e6
        busy = intervals.merge(compute)
        for block, phase, low, high in passes:
            ran = intervals.subtract(intervals.merge([(low, high)]), stalls)
            length, share = compared.blocks.get((block, phase), (0, 0))
            length += intervals.measure(ran)
            compared.blocks[block, phase] = length, share + intervals.measure(intervals.intersect(ran, busy))

    def _set_clock(self, collectives: Sequence[Interval]) -> None:
        """Move all kernels to the clock of the marks, by the collectives of the first step that is read."""
        spans = [(kernel.start_ns, kernel.end_ns) for kernel in self._comm]
        later_ns = intervals.offset(spans, collectives, CLOCK_NOISE_NS)
        if later_ns is None:
            return
        self._set = True
        for kernels in (self._comm, self._compute):
            kernels[:] = [
                kernel._replace(start_ns=kernel.start_ns - later_ns, end_ns=kernel.end_ns - later_ns)
                for kernel in kernels
            ]

    def _computing(self, ranges: Sequence[Interval]) -> list[Interval]:
        """Return when kernels of the stream that computes ran inside the ranges: the stream with most of what does not
        communicate there. A profiler's numbers of streams are not torch's.
        """
        if self._stream is None:
            lengths: Counter[int] = Counter()
            for kernel in self._compute:
                lengths[kernel.stream] += intervals.measure(intervals.clip(ranges, (kernel.start_ns, kernel.end_ns)))
            if not lengths.total():
                return []
            self._stream = lengths.most_common(1)[0][0]
        spans = [(kernel.start_ns, kernel.end_ns) for kernel in self._compute if kernel.stream == self._stream]
        return intervals.intersect(intervals.merge(spans), ranges)
