"""Measures steps by a profiler's kernels, beside their marks (docs/dev/measuring.md, W28).

Steps of a window share one `WindowKernels`; they are read once its profiler has stopped. Its clock may be off by more
than a short collective lasts, and is set so that kernels lie between their collectives' marks. Their communication is
the kernels that communicate, each of the kind of the collective whose marks it lies between; their computation is the
other kernels of the stream that computes, inside the ranges of the blocks. Must not start a profiler, or know a metric.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from aorta.records.device_steps import Communication
from aorta.timeline.arrays import (
    Int64,
    Interval,
    IntervalArray,
    covered_ns,
    intersect,
    interval_array,
    merge,
    offset,
    subtract,
    union,
)
from aorta.timeline.classes import DeviceKernel, communicates
from aorta.timeline.overlap import Overlap

CLOCK_NOISE_NS = 5_000
"""What single times of a profiler are off by (ends of 384 collectives on an H200: 5.6 us)."""
Pass: TypeAlias = tuple[str, str, int, int]
"""A pass of a block: (block, phase, start_ns, end_ns), in nanoseconds of the clock."""


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
        self._compute = self._comm = interval_array()
        self._streams: Int64 = np.zeros(0, np.int64)
        self._stream: int | None = None
        self._set = False

    def arrived(self, kernels: Iterable[DeviceKernel]) -> None:
        """Take all kernels of the window."""
        comm, compute = list[Interval](), list[DeviceKernel]()
        for kernel in kernels:
            if communicates(kernel.name):
                comm.append((kernel.start_ns, kernel.end_ns))
            else:
                compute.append(kernel)
        self._comm = interval_array(comm)
        self._compute = interval_array((kernel.start_ns, kernel.end_ns) for kernel in compute)
        self._streams = np.array([kernel.stream for kernel in compute], np.int64)
        self.known = True

    def failed(self, problem: str) -> None:
        """Give up kernels: the steps are measured by their marks alone."""
        self.known, self.problem = True, problem

    def within(
        self, passes: Sequence[Pass], communication: Sequence[Communication], window: Interval
    ) -> tuple[IntervalArray, dict[str, IntervalArray], IntervalArray] | None:
        """Return when kernels of a step computed, when they communicated by kind, and when of unknown kind, all merged;
        None, with a `problem`, where some are missing.

        Args:
            communication: the collectives that touch the step.
        """
        if self.problem is not None and not len(self._compute.start) and not len(self._comm.start):
            return None
        of_device = [op for op in communication if op.on_device and op.possible[0] < op.possible[1]]
        of_device.sort(key=lambda op: op.kind, reverse=True)  # of equal ones the last kind by name is taken
        possible = interval_array(op.possible for op in of_device)
        if not self._set and (later_ns := offset(self._comm, possible, CLOCK_NOISE_NS)) is not None:
            # All kernels move to the clock of the marks, by the collectives of the first step that is read.
            self._set = True
            self._comm, self._compute = (
                IntervalArray(kernels.start - later_ns, kernels.end - later_ns)
                for kernels in (self._comm, self._compute)
            )
        ranges = intersect(merge(interval_array((low, high) for _, _, low, high in passes)), interval_array([window]))
        compute = self._computing(ranges)
        touching = (self._comm.start < window[1]) & (self._comm.end > window[0])
        comm = _chosen(self._comm, touching)
        missing = int((covered_ns(possible, merge(comm)) == 0).sum())
        if missing:
            self.problem = f"the profiler saw no kernel of {missing} of {len(of_device)} collectives of a step"
            return None
        if len(ranges.start) and not len(compute.start):
            self.problem = "the profiler saw no kernel inside the blocks of a step"
            return None
        shared = np.minimum(comm.end[:, None], possible.end) - np.maximum(comm.start[:, None], possible.start)
        nearest = np.hstack((np.zeros((len(comm.start), 1), np.int64), shared)).argmax(axis=1) - 1  # -1: it meets none
        kind_of = np.array([*(op.kind for op in of_device), ""])[nearest]
        kinds = {}
        for kind in sorted({op.kind for op in communication}):
            on_host = interval_array(op.possible for op in communication if op.kind == kind and not op.on_device)
            kinds[kind] = union([on_host, _chosen(comm, kind_of == kind)])
        return compute, kinds, merge(_chosen(comm, nearest < 0))

    def compare(
        self,
        by_marks: Overlap,
        by_kernels: Overlap,
        passes: Sequence[Pass],
        stalls: IntervalArray,
        compute: IntervalArray,
    ) -> None:
        """Compare a step that was measured both ways.

        Args:
            stalls: of the step; `compute`: when kernels computed in it; both merged.
        """
        compared = self.compared
        compared.steps += 1
        compared.comm_ns += by_kernels.comm_ns
        compared.hidden_ns += by_kernels.hidden_ns
        compared.marked_hidden_ns += by_marks.hidden_ns
        compared.marked_exposed_ns += by_marks.bounds.get("exposed_comm_ms", (by_marks.exposed_ns / 1e6,))[0] * 1e6
        rows = interval_array((low, high) for _, _, low, high in passes)
        lengths = rows.end - rows.start - covered_ns(rows, stalls)
        shares = covered_ns(rows, subtract(compute, stalls))
        for (block, phase, *_), length_ns, share_ns in zip(passes, lengths.tolist(), shares.tolist(), strict=True):
            length, share = compared.blocks.get((block, phase), (0, 0))
            compared.blocks[block, phase] = length + length_ns, share + share_ns

    def _computing(self, ranges: IntervalArray) -> IntervalArray:
        """Return when kernels of the stream that computes ran inside the ranges: the stream with most of what does not
        communicate there. A profiler's numbers of streams are not torch's.
        """
        if self._stream is None:
            inside = covered_ns(self._compute, ranges)
            if not inside.any():
                return interval_array()
            streams, number = np.unique(self._streams, return_inverse=True)
            self._stream = int(streams[np.bincount(number, inside).argmax()])
        return intersect(merge(_chosen(self._compute, self._streams == self._stream)), ranges)


def _chosen(rows: IntervalArray, which: NDArray[np.bool_]) -> IntervalArray:
    return IntervalArray(rows.start[which], rows.end[which])
