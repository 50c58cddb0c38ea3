"""The critical path of a step over all ranks: what, on which rank, made the step as long as it was.

Walks back from the end of the rank on which the step took longest, along what each moment waited for, to the moment at
which that rank began: own time, going on behind a wait, transfers, the backend, and from a collective to the rank that
came last. The segments follow each other without a gap, so their lengths sum up to the step exactly. Must not change a
program: what a segment's absence would gain is another question (`gains.marginals`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from aorta.analysis.step_intervals import HAND_OVER
from aorta.analysis.whatif.program import Issued, RunProgram, What
from aorta.analysis.whatif.replay import StepTimes, Times, replay, span_edges

Part: TypeAlias = Literal["compute", "aux", "hand_over", "own", "wake", "transfer", "backend", "before"]
WORDS: Final[dict[Part, str]] = {
    "compute": "computes",
    "aux": "other work",
    "hand_over": "hands a collective over",
    "own": "does what no range names",
    "wake": "goes on behind a wait",
    "transfer": "transfers",
    "backend": "waits for the backend, which took longer than the network",
    "before": "does what belongs to the step before",
}


@dataclass(frozen=True)
class PathSegment:
    """A stretch of the path. `rank` is where it happened; `position` is the collective's place in its step.

    Of a transfer, and of what the backend took: `last_rank` came last to it, `behind_ns` after the rank before it.
    """

    part: Part
    rank: int
    name: str
    begin_ns: int
    end_ns: int
    position: int | None = None
    last_rank: int | None = None
    behind_ns: int | None = None

    @property
    def length_ns(self) -> int:
        """What it adds to the step."""
        return self.end_ns - self.begin_ns


@dataclass(frozen=True)
class CriticalPath:
    """The path of one step, in order of time; `rank` is the one on which the step took longest."""

    global_step: int
    rank: int
    begin_ns: int
    end_ns: int
    segments: tuple[PathSegment, ...]

    def totals_ns(self) -> dict[tuple[Part, int, str], int]:
        """Return what each cause adds, the largest first: (part, rank, name) -> nanoseconds."""
        found: dict[tuple[Part, int, str], int] = {}
        for segment in self.segments:
            key = (segment.part, segment.rank, segment.name)
            found[key] = found.get(key, 0) + segment.length_ns
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON values; times count from the beginning of the step."""
        return {
            "global_step": self.global_step,
            "rank": self.rank,
            "step_ns": self.end_ns - self.begin_ns,
            "segments": [
                {**asdict(each), "begin_ns": each.begin_ns - self.begin_ns, "end_ns": each.end_ns - self.begin_ns}
                for each in self.segments
            ],
        }


def typical_step(times: Times) -> int:
    """Return the index of the step whose duration is nearest the median."""
    lengths = times.job_step_ms()
    return int(np.argmin(np.abs(lengths - np.median(lengths))))


def critical_path(program: RunProgram, index: int) -> CriticalPath:
    """Replay a program, and find the critical path of the step with this index."""
    times = replay(program, {index})
    lengths = times.end_ns[index, :, 0] - times.begin_ns[index, :, 0]
    column = int(np.argmax(lengths))
    begin, end = int(times.begin_ns[index, column, 0]), int(times.end_ns[index, column, 0])
    walk = _Walk(program, index, times.kept[index], begin)
    walk.back_from(column, end)
    return CriticalPath(
        program.steps[index].global_step, program.ranks[column], begin, end, tuple(reversed(walk.segments))
    )


class _Walk:
    """Goes back in time; `segments` are found last first."""

    def __init__(self, program: RunProgram, index: int, times: StepTimes, begin_ns: int) -> None:
        self._program, self._times, self._begin_ns = program, times, begin_ns
        self._step = program.steps[index]
        self._layouts = [program.layouts[layout] for layout in self._step.layouts]
        self._spans: dict[int, list[tuple[int, tuple[int, int]]]] = {}
        self._carried: set[tuple[int, int]] = set()
        self.segments: list[PathSegment] = []

    def back_from(self, column: int, now_ns: int) -> None:
        """Walk from a moment on a rank, behind all its operations, to the beginning."""
        operation = len(self._layouts[column].operations) - 2  # the last is END, at `now_ns`
        while True:
            left = int(self._times.leave_ns[operation, column, 0])
            self._own(column, left, now_ns)
            now_ns = min(left, now_ns)
            if now_ns <= self._begin_ns:
                return
            what = self._layouts[column].operations[operation]
            if what.what is What.BEGIN:
                self._add("before", column, "", self._begin_ns, now_ns)
                return
            if what.what is What.WAIT:
                entered = int(self._times.enter_ns[operation, column, 0])
                if what.back:  # its times are those of another step
                    self._add("before", column, "a collective of the step before", entered, now_ns)
                elif (until := int(self._times.end_ns[what.place, column, 0])) > entered:
                    self._add("wake", column, self._name(column, what.place), until, now_ns)
                    arrived = self._collective(column, what.place, min(until, now_ns))
                    if arrived is None:
                        return
                    column, operation, now_ns = arrived
                    operation -= 1
                    continue
                else:
                    self._add("wake", column, self._name(column, what.place), entered, now_ns)
                now_ns = min(entered, now_ns)
            operation -= 1

    def _collective(self, column: int, place: int, now_ns: int) -> tuple[int, int, int] | None:
        """Return from the end of a collective on a rank to the arrival it waited for: rank, index of the issue, and
        when. None: that is before the beginning.
        """
        while now_ns > self._begin_ns:
            times, step = self._times, self._step
            last, free = int(times.last_ns[place, column, 0]), int(times.free_ns[place, column, 0])
            cost = int(step.cost_ns[place, min(column, step.cost_ns.shape[1] - 1)])
            issued = self._layouts[column].issued[place]
            came = self._arrivals(issued, column, place)
            late, (last_column, issue) = came[0][0], came[0][1:]
            behind = late - came[1][0] if len(came) > 1 else None
            more = (place, self._program.ranks[last_column], behind)
            by_backend = now_ns > max(last, free) + cost
            if by_backend or free <= last:
                part: Part = "backend" if by_backend else "transfer"
                self._add(part, column, self._name(column, place), last, now_ns, *more)
                return (last_column, issue, min(last, now_ns)) if last > self._begin_ns else None
            self._add("transfer", column, self._name(column, place), free, now_ns, *more)
            # A collective that costs nothing ends when its link was free for it: each is followed once, or the walk
            # would find it, and not the one before it, for ever.
            self._carried |= {
                (arrived_column, self._layouts[arrived_column].operations[operation].place)
                for _, arrived_column, operation in came
            }
            before = self._carried_before(issued, column, place, free)
            if before is None:
                self._add("before", column, "the link is busy with the step before", self._begin_ns, min(free, now_ns))
                return None
            (column, place), now_ns = before, min(free, now_ns)
        return None

    def _arrivals(self, issued: Issued, column: int, place: int) -> list[tuple[int, int, int]]:
        """Return arrival, column and index of the issue of each rank of a collective, the last first; this rank before
        others that came at the same moment.
        """
        group = (issued.group, issued.ranks)
        before = sum((each.group, each.ranks) == group for each in self._layouts[column].issued[:place])
        found = []
        for rank in issued.ranks:
            other = self._program.ranks.index(rank)
            layout = self._layouts[other]
            own = [at for at, each in enumerate(layout.issued) if (each.group, each.ranks) == group]
            at = own[before]
            operation = next(
                index for index, each in enumerate(layout.operations) if each.what is What.ISSUE and each.place == at
            )
            found.append((int(self._times.enter_ns[operation, other, 0]), other, operation))
        return sorted(found, key=lambda each: (-each[0], each[1] != column, each[1]))

    def _carried_before(self, issued: Issued, column: int, place: int, free_ns: int) -> tuple[int, int] | None:
        """Return column and place of the collective that kept the link busy until `free_ns`; None: not of this step."""
        if not self._program.shared_links:
            others = [
                at
                for at, each in enumerate(self._layouts[column].issued[:place])
                if each.link == issued.link and int(self._times.end_ns[at, column, 0]) == free_ns
            ]
            return (column, others[-1]) if others else None
        for rank in issued.ranks:
            other = self._program.ranks.index(rank)
            for at, each in enumerate(self._layouts[other].issued):
                if (other, at) in self._carried or each.link != issued.link:
                    continue
                if int(self._times.end_ns[at, other, 0]) == free_ns:
                    return other, at
        return None

    def _own(self, column: int, begin_ns: int, end_ns: int) -> None:
        """Divide own time of a rank by what its spans say; of nested ones the inner."""
        begin_ns = max(begin_ns, self._begin_ns)
        if begin_ns >= end_ns:
            return
        if column not in self._spans:
            self._spans[column] = span_edges(self._step, self._times, column)
        inside = [
            (name, max(low, begin_ns), min(high, end_ns))
            for name, (low, high) in self._spans[column]
            if low < end_ns and high > begin_ns
        ]
        edges = sorted({begin_ns, end_ns, *(edge for _, *span in inside for edge in span)}, reverse=True)
        for high, low in pairwise(edges):
            over = [(name, span) for name, *span in inside if span[0] <= low and span[1] >= high]
            if not over:
                self._add("own", column, "", low, high)
                continue
            names = self._program.names
            name = names[max(over, key=lambda each: (names[each[0]].lane == HAND_OVER, each[1][0]))[0]]
            part: Part = "compute" if name.lane == "compute" else "aux" if name.lane == "aux" else "hand_over"
            self._add(part, column, str(name), low, high)

    def _add(
        self,
        part: Part,
        column: int,
        name: str,
        begin_ns: int,
        end_ns: int,
        position: int | None = None,
        last_rank: int | None = None,
        behind_ns: int | None = None,
    ) -> None:
        begin_ns = max(begin_ns, self._begin_ns)
        if begin_ns >= end_ns:
            return
        rank = self._program.ranks[column]
        after = self.segments[-1] if self.segments else None
        if after and position is None and (after.part, after.rank, after.name) == (part, rank, name):
            self.segments[-1] = PathSegment(part, rank, name, begin_ns, after.end_ns)
        else:
            self.segments.append(PathSegment(part, rank, name, begin_ns, end_ns, position, last_rank, behind_ns))

    def _name(self, column: int, place: int) -> str:
        return f"{self._layouts[column].issued[place].kind} #{place}"
