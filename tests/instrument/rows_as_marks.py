"""A witness of the lines that are made of rows: rows become the marks of `OpenStep`, and each step's line is made of
those alone, by `StepBuilder` and the algebra on pairs.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from aorta.instrument.compute_ranges import Range
from aorta.instrument.event_clock import HostClock
from aorta.instrument.in_flight import Group, InFlight, Waited
from aorta.instrument.open_step import MarksOfStep, OpenStep, Scalar
from aorta.instrument.step_builder import StepBuilder
from aorta.records import ring_file as rf
from aorta.records.ring_file import RingFile, RingOperator
from aorta.records.schema import EndSource, Step
from aorta.records.step_line import Name, StepFacts
from aorta.timeline.overlap import Unseen


class Value(Scalar):
    """A scalar that is known."""

    def __init__(self, value: float) -> None:
        self._copy, self._value = None, value


class Later:
    """The end of a collective that had none when its row was read."""

    def __init__(self, ring: RingFile, index: int) -> None:
        self._ring, self._index = ring, index

    def ended(self) -> tuple[int, EndSource] | None:
        """When it ended and what said so, once it has."""
        rows, first = self._ring.rows_since(0)
        return end_of(int(rows["b"][self._index - first]))


def end_of(both: int) -> tuple[int, EndSource] | None:
    """The end of a collective's row and what said so."""
    return (both >> 1, "wait" if both & 1 else "future") if both else None


def bits(number: int) -> float:
    """The float whose bits these are."""
    return float(np.array(number, np.int64).view(np.float64))


def packed(pair: int) -> tuple[int, int]:
    """Both numbers of a pair."""
    return pair >> 32, pair & 0xFFFFFFFF


def marks_of(ring: RingFile, first: int = 0, stop: int | None = None) -> OpenStep:
    """Rows `first` to `stop` as the marks of a step whose facts are in none of them."""
    step = OpenStep(StepFacts(0, 0, 0, None, warmup=False), start=0)
    rows, _ = ring.rows_since(0)
    # What a pipeline says of its own computation stands before what is seen of blocks.
    for row in sorted(rows[first:stop], key=lambda row: row["kind"] != rf.COMPUTE):
        _add(step, dict(zip(rf.ROW.names or (), row.tolist(), strict=True)), ring)
    return step


def _add(step: OpenStep, row: dict[str, Any], ring: RingFile) -> None:
    names, operators = ring.names(), ring.facts.operators
    name, begin, end = names[row["name"]], row["a"], row["b"] or None
    kind: RingOperator = operators[row["op"]]
    if row["kind"] == rf.COLLECTIVE:
        group, _, counts_point_to_point = names[row["group"]]
        dtype = None if row["dtype"] == rf.NO_DTYPE else ring.facts.dtypes[row["dtype"]]
        flight = InFlight(kind.kind, group, row["y"], row["x"], dtype, begin, row["y"])
        flight.completion = Later(ring, row["stamp"] - 1)
        flight.look()
        step.collectives.append(flight)
        flight.by_future = bool(row["flags"] & rf.BY_FUTURE)
        step.unwatched += bool(row["flags"] & rf.UNWATCHED)
        if kind.point_to_point:
            flight.number, flight.counted = None, counts_point_to_point
        if row["a2"]:
            step.calls.append((begin, row["a2"]))
    elif row["kind"] == rf.LINK and begin:  # follows the collective that it is of
        flight = step.collectives[-1]
        flight.start, flight.backend_end_ns = begin, end
        flight.end_source = "emulated" if row["flags"] & rf.BY_FABRIC else flight.end_source
    elif row["kind"] == rf.WAIT:
        of = Name(names[row["group"]][0], row["y"], kind.kind if kind.point_to_point else None)
        step.waits.append(Waited(of, begin, end, bool(row["flags"] & rf.BLOCKED), bool(row["flags"] & rf.OVER)))
    elif row["kind"] == rf.PASS and end is not None:
        step.compute.append(Range(name, "backward" if row["flags"] & rf.BACKWARD else "forward", begin, end))
    elif row["kind"] == rf.TAIL:
        step.tails.append((begin, end))
    elif row["kind"] == rf.STALL:
        step.stalls.append((begin, end))
    elif row["kind"] == rf.AUX:
        step.aux.append(Range(name, "aux", begin, end))
    elif row["kind"] == rf.PIPELINE:
        step.pipeline.append(Range(name, "pipeline", begin, end))
    elif row["kind"] == rf.COMPUTE:
        step.compute.append(Range(name, names[row["x"]], begin, end))
    elif row["kind"] == rf.VALUE and row["flags"] == rf.LOSS:
        step.loss = Value(bits(row["x"]))
    elif row["kind"] == rf.VALUE and row["flags"] == rf.GRAD_NORM:
        step.grad_norm = Value(bits(row["x"]))


def witnessed(ring: RingFile) -> list[Step]:
    """The lines of all steps whose rows are all there."""
    rows, first = ring.rows_since(0)
    names, facts = ring.names(), ring.facts
    groups = {name[0]: Group((), name[1]) for name in names if isinstance(name, list)}
    builder = StepBuilder(
        HostClock(),
        facts.rank,
        facts.world_size,
        groups,
        facts.anchor,
        stall_cutoff_ns=facts.stall_cutoff_ns,
        no_values=facts.no_values,
    )
    lines = []
    for at in np.flatnonzero((rows["kind"] == rf.STEP) & (rows["b"] != 0)).tolist():
        row = dict(zip(rf.ROW.names or (), rows[at].tolist(), strict=True))
        step = marks_of(ring, row["a2"] - first, row["y"] - first)
        rates = [
            bits(one["x"])
            for one in rows[row["a2"] - first : row["y"] - first]
            if one["kind"] == rf.VALUE and one["flags"] == rf.LR
        ]
        phase = rf.STEP_PHASES[row["flags"] >> rf.PHASE_SHIFT]
        step.facts = StepFacts(
            row["b2"] >> 32,
            row["b2"] & 0xFFFFFFFF,
            row["x"],
            rates[-1] if rates else None,
            bool(row["flags"] & rf.WARMUP),
            phase,
        )
        step.start, step.end = row["a"], row["b"]
        step.no_copies = facts.no_copies
        step.continues = bool(row["flags"] & rf.CONTINUES)
        if row["name"]:
            step.unseen = Unseen(names[row["name"]], bool(row["flags"] & rf.BLIND))
        for other in rows:
            if other["kind"] == rf.SUMMARY and other["b"] == first + at:
                step.own_ns = {"all": int(other["a"])} if other["flags"] & rf.OWN_COUNTED else None
                step.issued_before, step.issued_after = {1: 0}, {1: int(other["x"])}
                if other["x"] == rf.NOT_COUNTED:
                    step.issued_after = {1: None}
                step.outside = int(other["y"])
                step.ahead_before, step.ahead_after = packed(int(other["a2"])), packed(int(other["b2"]))
                step.boundary = names[other["name"]]
            if other["kind"] in (rf.RANGE, rf.LEFT_OUT) and other["b2"] == first + at:
                step.user_marks = step.user_marks or MarksOfStep()
            if other["kind"] == rf.RANGE and other["b2"] == first + at:
                assert step.user_marks is not None
                step.user_marks.ranges.append(
                    (names[other["name"]], *(int(other[field]) for field in ("x", "y", "a", "b")), names[other["a2"]])
                )
        lines.append(builder.line(step))
    return lines
