"""A witness of the lines that are made of a device's rows: each step's line by `StepBuilder`, of the same marks, by the
algebra on pairs.

Steps are drawn, written into a ring, and told as marks; both are held to be the same.
"""

from __future__ import annotations

from typing import Any

from aorta.instrument.compute_ranges import Range
from aorta.instrument.event_clock import HostClock
from aorta.instrument.in_flight import Group, InFlight, Waited
from aorta.instrument.instrumentation import ring_facts
from aorta.instrument.open_step import Copied, OpenStep
from aorta.instrument.operators import offered
from aorta.instrument.step_builder import StepBuilder
from aorta.records import ring_file as rf
from aorta.records.ring_file import RingFile, RingGroup
from aorta.records.schema import STALL_CUTOFF_NS, ClockReading, Step
from aorta.records.step_line import Name, StepFacts

ANCHOR = ClockReading(realtime_ns=5_000, boottime_ns=0, monotonic_ns=1_000, uncertainty_ns=1)
BOUND_NS = 3
LANES = 2
Mark = tuple[int, int]
"""When the device passed it, and when the host had recorded it."""


class Clock(HostClock):
    """Marks are pairs that happened; 0 is none."""

    bound_ns = BOUND_NS

    def read_ns(self, mark: Any, /) -> int | None:
        """When it happened."""
        return mark if isinstance(mark, int) else int(mark[0])

    def sent_ns(self, mark: Any, /) -> int | None:
        """When it was recorded."""
        return None if isinstance(mark, int) else int(mark[1])


class Both:
    """One rank's steps as rows of a ring, and as marks."""

    def __init__(self) -> None:
        self.ring = RingFile.create(None, ring_facts(0, 2, ANCHOR, STALL_CUTOFF_NS, bound_ns=BOUND_NS), 4096)
        self.group = self.ring.group(RingGroup("0", LANES, counts_point_to_point=True))
        self.operators = self.ring.facts.operators
        self.op = next(at for at, one in enumerate(self.operators) if one.kind == "allreduce")
        self.steps: list[OpenStep] = []
        assert len(self.operators) == len(offered())

    def append(self, kind: int, **fields: int) -> int:
        """A row; its index."""
        index = self.ring.count
        row = dict.fromkeys(rf.ROW.names or (), 0) | {"kind": kind, "dtype": rf.NO_DTYPE, "stamp": index + 1} | fields
        self.ring._rows[index % self.ring.slots] = tuple(row[name] for name in rf.ROW.names or ())
        self.ring._words[rf.COUNT_AT // 8] = index + 1
        return index

    def between(self, kind: int, begin: Mark | None, end: Mark | None, **fields: int) -> int:
        """A row between two marks, as far as they happened."""
        (a, a2), (b, b2) = begin or (0, 0), end or (0, 0)
        return self.append(kind, a=a, a2=a2, b=b, b2=b2, **fields)

    def add(self, drawn: dict[str, Any]) -> None:
        """One step of what was drawn."""
        number = len(self.steps)
        step = OpenStep(StepFacts(0, number, number, None, warmup=False), start=drawn["window"][0])
        first = self.ring.count
        row = self.append(rf.STEP, a=drawn["window"][0][0], b=drawn["window"][1][0], x=number, a2=first, b2=number)
        step.end = drawn["window"][1]
        block, phase = self.ring.text("block"), self.ring.text("forward")
        for begin, end in drawn["computed"]:
            self.between(rf.COMPUTE, begin, end, name=block, x=phase)
            step.compute.append(Range("block", "forward", begin, end))
        for begin, end in drawn["passes"]:
            self.between(rf.PASS, begin, end, name=block, flags=rf.BACKWARD)
            step.compute.append(Range("block", "backward", begin, end))
        for seq, (communicator, launch, begin, end, by_future) in enumerate(drawn["collectives"]):
            self._collective(step, 100 * number + seq, communicator, launch, begin, end, by_future=by_future)
        for begin, end, over in drawn["waits"]:
            flags = rf.BLOCKED | (rf.OVER if over else 0)
            self.between(rf.WAIT, begin, end, flags=flags, group=self.group, op=self.op, y=100 * number)
            step.waits.append(Waited(Name("0", 100 * number), begin, end, blocked=True, over=over))
        for begin, end in drawn["gaps"]:
            gap = self.between(rf.GAP, begin, end)
            self.append(rf.JOINED, x=gap, group=self.group, op=self.op, y=100 * number + 1)
            step.stream_waits.append((begin, end, (Name("0", 100 * number + 1),)))
        for kind, spans in ((rf.TAIL, step.tails), (rf.STALL, step.stalls)):
            for begin, end in drawn["tails" if kind == rf.TAIL else "stalls"]:
                self.between(kind, begin, end)
                spans.append((begin, end))
        for begin, end, way, computes in drawn["copies"]:
            flags = way | (rf.COMPUTES if computes else 0) | (0 if end else rf.ELSEWHERE)
            self.between(rf.COPY, begin if end else None, end, flags=flags, x=8)
            step.copies.append(Copied(rf.DIRECTIONS[way], 8, begin if end else None, end, computes))
        for name, begin, end in drawn["aux"]:
            self.between(rf.AUX, begin, end, name=self.ring.text(name))
            step.aux.append(Range(name, "aux", begin, end))
        for begin, end in drawn["stages"]:
            self.between(rf.PIPELINE, begin, end, name=self.ring.text("0"))
            step.pipeline.append(Range("0", "pipeline", begin, end))
        self.ring._rows["y"][row] = behind = self.ring.count
        assert behind < self.ring.slots
        seen = sum(one.counted for one in step.collectives)
        self.append(rf.SUMMARY, b=row, x=seen)
        step.issued_before, step.issued_after, step.no_copies = {1: 0}, {1: seen}, None
        if drawn["captured"]:
            self.append(rf.NOTE, flags=rf.CAPTURED, a=drawn["captured"], b2=row)
            step.captured = drawn["captured"]
        self.steps.append(step)

    def _collective(
        self,
        step: OpenStep,
        seq: int,
        communicator: int,
        launch: int | None,
        begin: Mark | None,
        end: Mark | None,
        *,
        by_future: bool,
    ) -> None:
        issue_ns = (begin or (0, 1))[1] or 1
        flags = rf.BY_FUTURE if by_future else 0
        index = self.append(
            rf.COLLECTIVE,
            a=issue_ns,
            b=end[0] * 2 if end else 0,
            x=64,
            y=seq,
            group=self.group,
            op=self.op,
            flags=flags,
        )
        packed = ((-1 if launch is None else launch) + 1) << 32 | communicator
        self.between(rf.SPAN, begin, end, x=index, y=packed, flags=0 if end else 1)
        flight = InFlight("allreduce", "0", seq, 64, None, issue_ns, seq, begin, end, "event" if end else None)
        flight.launch, flight.by_future = launch, by_future
        flight.communicator = [None, "0", "0 0", "0 1"][communicator]
        flight.untimed = None if end else rf.UNTIMED[1]
        last = next((one for one in reversed([*self._all(), *step.collectives]) if one.launch is not None), None)
        flight.counted = launch is None or last is None or last.launch != launch
        step.collectives.append(flight)

    def _all(self) -> list[InFlight]:
        return [one for step in self.steps for one in step.collectives]

    def witnessed(self) -> list[Step]:
        """The lines by marks."""
        builder = StepBuilder(Clock(), 0, 2, {"0": Group((0, 1), LANES)}, ANCHOR)
        return [builder.line(step) for step in self.steps]
