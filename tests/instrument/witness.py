"""A witness of the lines that are made of rows: each step by itself, row by row, by the algebra on pairs.

It shares with the line maker what says a thing of one row or one step, and none of what is done to many at once.
"""

from __future__ import annotations

import struct
from collections import defaultdict, namedtuple
from collections.abc import Iterable
from typing import Any

from msgspec import UNSET

from aorta.records import ring_file as rf
from aorta.records.device_steps import ROUND_A_COLLECTIVE, Communication, DevicePace, Stretch, lead_ms, nearly_all
from aorta.records.ring_file import RingFile
from aorta.records.schema import AuxRange, Collective, ComputeRange, Copy, Stall, Step, Wait
from aorta.records.step_line import Coverages, GlooWorkers, Name, StepFacts, step_line, tail_waits, user_ranges
from aorta.timeline.arrays import Interval
from aorta.timeline.overlap import Unseen
from tests.pair_algebra import clip, intersect, merge, subtract
from tests.windows import Certain, measure_window

Row = namedtuple("Row", rf.ROW.names)


def witnessed(ring: RingFile) -> list[Step]:
    """The lines of all steps that have ended, of a ring that has all rows."""
    witness = Witness(ring)
    return [witness.line(row) for row in witness.rows if row.kind == rf.STEP and row.b and row.y]


class Witness:
    """The steps of one rank, in their order: a collective may reach into the next one, and queues outlive steps."""

    def __init__(self, ring: RingFile) -> None:
        facts = self.facts = ring.facts
        rows, first = ring.rows_since(0)
        assert first == 0
        self.rows, self.names = [Row(*row) for row in rows.tolist()], ring.names()
        self.coverages, self.workers = Coverages(), dict[str, GlooWorkers]()
        self.pace = DevicePace(facts.bound_ns or 0)
        self.launched: dict[str, list[tuple[int | None, list[int]]]] = defaultdict(list)  # by communicator: ends
        self.late: set[str] = set()
        self.last_batch: int | None = None
        self.spilling: list[Communication] = []
        self.copying: list[Interval] = []

    def line(self, step: Any) -> Step:
        """Of one step's row."""
        own, window = self.rows[step.a2 : step.y], (step.a, step.b)
        told = [row for row in self.rows if row.b2 == step.stamp - 1]
        notes = {row.flags: row for row in told if row.kind == rf.NOTE}
        (summary,) = (row for row in self.rows if row.kind == rf.SUMMARY and row.b == step.stamp - 1)
        values = {row.flags: bits(row.x) for row in own if row.kind == rf.VALUE}
        values |= {which: bits(row.x) for which, row in notes.items() if which < rf.CAPTURED}
        captured = notes[rf.CAPTURED].a if rf.CAPTURED in notes else 0
        unseen = Unseen(self.names[step.name], bool(step.flags & rf.BLIND)) if step.name else None
        if rf.UNSEEN in notes:
            unseen = Unseen(self.names[notes[rf.UNSEEN].name], compute=True)

        def of(kind: int, flags: int = 0) -> list[Any]:
            """Rows that have happened, as far as one can tell, and have one of these flags, if any are asked for."""
            found = [row for row in own if row.kind == kind and (row.flags & flags or not flags)]
            return [row for row in found if row.b and (row.a or self.facts.bound_ns is None)]

        kinds = (rf.PASS, rf.COMPUTE, rf.WAIT, rf.GAP, rf.TAIL, rf.STALL)
        computing = [row for row in own if row.kind in kinds or (row.kind == rf.COPY and row.flags & rf.COMPUTES)]
        marks = [mark for row in computing for mark in ((row.a, row.a2), (row.b, row.b2)) if all(mark)]
        pace = self.pace = self.pace.of_next_step(marks)
        rows, buckets, counted, untimed, communicated = self._collectives(own, step.a)
        communicated = [*self.spilling, *communicated]
        self.spilling = [one for one in communicated if one.possible[1] > step.b]
        comm = by_kind((one.kind, [one.possible]) for one in communicated)
        everywhere = merge(span for spans in comm.values() for span in clip(spans, window))

        blocks = [*of(rf.COMPUTE), *of(rf.PASS)]
        stages, waits, gaps, tails = of(rf.PIPELINE), of(rf.WAIT), of(rf.GAP), of(rf.TAIL)
        blocked = [*of(rf.STALL), *of(rf.WAIT, rf.BLOCKED)]
        possibly = [tail for tail in tails if not any(tail.a <= gap.a <= tail.b for gap in gaps)] + gaps
        in_calls = [(row.a, row.a2) for row in own if row.kind == rf.COLLECTIVE]
        handing = merge(clip([one for one in in_calls if one[1] - one[0] > self.facts.stall_cutoff_ns], window))

        def stalled(certainly: Iterable[Interval], as_far: Iterable[Interval], comm: list[Interval]) -> list[Interval]:
            return merge([*clip(certainly, window), *intersect(merge(clip(as_far, window)), comm)])

        waiting = stalled(spans(blocked), spans(possibly), everywhere)
        found = [(self._name(row), stretch(row)) for row in of(rf.WAIT, rf.OVER)]
        ended = {gap.stamp - 1: stretch(gap) for gap in gaps}
        found += [(self._name(row), ended[row.x]) for row in own if row.kind == rf.JOINED and row.x in ended]
        named = [(name, wait.span) for name, wait in found]
        named += tail_waits(spans(tails), buckets, {name for name, _ in named})
        groups = {self.names[row.name] for row in stages}
        copies, copied, no_copies = self._copies(own, window, unseen, notes, captured)

        # What certainly ran: all that is possible where the host is ahead, and on a CPU.
        certain: Certain | None = None
        stretched = [stretch(row) for row in blocks]
        computed = [span for block in stretched for span in pace.block(block)]
        stopped, may_have = (
            [span for row in some for span in pace.certain_span(stretch(row))] for some in (blocked, possibly)
        )
        possible = [one.span for one in stretched], [one.possible for one in communicated], spans(blocked + possibly)
        uncertain = any(one.sent_ns for one in stretched) or any(one.certain != [one.possible] for one in communicated)
        if uncertain and not nearly_all(
            possible, (computed, [span for one in communicated for span in one.certain], stopped + may_have)
        ):
            kinds = by_kind((one.kind, one.certain) for one in communicated)
            at_once = merge(span for spans in kinds.values() for span in clip(spans, window))
            paused = spans([*gaps, *waits, *of(rf.COPY, rf.COMPUTES)])
            certain = Certain(
                subtract(merge(clip(computed, window)), merge(clip(paused, window))),
                kinds,
                stalled(stopped, may_have, at_once),
                [span for name, wait in found if name.group in groups for span in pace.certain_span(wait)],
            )
        overlap = measure_window(
            window,
            compute=spans(blocks),
            comm=comm,
            stalls=merge([*waiting, *handing]),
            aux=spans(of(rf.AUX)),
            copy=copied,
            pipeline=spans(stages) if stages else None,
            bubbles=[span for name, span in named if name.group in groups] if stages else None,
            certain=certain,
        )
        pace_of: dict[str, float | None] = {"aorta_ms": summary.a / 1e6} if summary.flags & rf.OWN_COUNTED else {}
        if (lead := lead_ms(stretched)) is not None and not (unseen is not None and unseen.compute):
            least, most = overlap.bounds.get("compute_ms", (0.0, 0.0))
            pace_of |= {"host_lead_ms": lead, "undecided_share": (most - least) / most if most else 0.0}
        coverage = self.coverages.of(
            unseen,
            seen=sum(counted),
            issued=None if summary.x == rf.NOT_COUNTED else summary.x,
            unfinished=sum(row.end_ns is None for row in rows),
            total=len(rows),
            continues=bool(step.flags & rf.CONTINUES),
            ahead_before=divmod(summary.a2, 1 << 32),
            ahead_after=divmod(summary.b2, 1 << 32),
            outside=summary.y,
            unwatched=sum(bool(row.flags & rf.UNWATCHED) for row in own if row.kind == rf.COLLECTIVE),
            captured=captured,
            untimed=untimed,
        )
        causes = (("wait", subtract(waiting, handing)), ("hand_over", handing))
        stall_rows = [Stall(low - step.a, high - step.a, why) for why, of_why in causes for low, high in of_why]
        ranges = [(self.names[r.name], r.x, r.y, r.a, r.b, self.names[r.a2]) for r in told if r.kind == rf.RANGE]
        waited = [
            Wait(name.group, name.seq, low - step.a, high - step.a, name.kind)
            for name, (low, high) in sorted(named, key=lambda wait: wait[1])
        ]
        left = next(((row.a, row.b) for row in told if row.kind == rf.LEFT_OUT), (0, 0))
        of_caller, left_out = user_ranges(ranges, step.a, *left)
        phase = rf.STEP_PHASES[step.flags >> rf.PHASE_SHIFT]
        return step_line(
            self.facts,
            StepFacts(*divmod(step.b2, 1 << 32), step.x, values.get(rf.LR), bool(step.flags & rf.WARMUP), phase),
            window,
            overlap,
            unseen,
            coverage,
            collectives=rows,
            compute=[
                ComputeRange(self.names[row.name], self._phase(row), row.a - step.a, row.b - step.a) for row in blocks
            ],
            stalls=sorted(stall_rows, key=lambda stall: stall.start_ns),
            aux=[AuxRange(self.names[row.name], row.a - step.a, row.b - step.a) for row in of(rf.AUX)],
            waits=UNSET if unseen is not None else waited,
            loss=values.get(rf.LOSS),
            grad_norm=values.get(rf.GRAD_NORM),
            pace=pace_of,
            stages=bool(stages),
            no_copies=no_copies,
            copies=copies,
            boundary=self.names[summary.name],
            ranges=of_caller or UNSET,
            left_out=left_out,
        )

    def _collectives(
        self, own: list[Any], begin_ns: int
    ) -> tuple[list[Collective], list[tuple[Name, int, int]], list[bool], list[str], list[Communication]]:
        """The rows of collectives, those as buckets, which the backends count, why some have no time, when they ran."""
        found: Any = ([], [], [], [], [])
        beside = {(row.kind, row.x): row for row in own if row.kind in (rf.LINK, rf.SPAN)}
        for row in (row for row in own if row.kind == rf.COLLECTIVE):
            (group, lanes, counts_sends, _), name = self.names[row.group], self._name(row)
            kind, point_to_point = self.facts.operators[row.op]
            counted, start_ns, backend_ns = counts_sends or not point_to_point, 0, 0
            end_ns, source, sent_ns = row.b >> 1, ("future", "wait")[row.b & 1], None
            link, span = beside.get((rf.LINK, row.stamp - 1)), beside.get((rf.SPAN, row.stamp - 1))
            if link is not None and link.a and end_ns:
                start_ns, backend_ns = min(link.a, end_ns), link.b
                source = "emulated" if link.flags & rf.BY_FABRIC else source
            if span is not None:
                start_ns, end_ns, sent_ns, source = span.a, span.b, span.b2 or None, "event" if span.b2 else None
                found[3].extend([rf.UNTIMED[span.flags]] if span.flags else [])
                launch = (span.y >> 32) - 1 if span.y >> 32 else None
                if launch is not None and not point_to_point:  # a batch is launched, and counted, once
                    counted = counted and launch != self.last_batch
                    self.last_batch = launch
            if end_ns:
                by_queue = not start_ns
                if by_queue:
                    start_ns = self.workers.setdefault(group, GlooWorkers(lanes)).start_ns(row.a, end_ns)
                first_ns, which = start_ns, 0 if span is None or by_queue else span.y & 0xFFFFFFFF
                if which:
                    communicator = group if which == 1 else f"{group} {which - 2}"
                    before = self.launched[communicator]
                    if launch is None or not before or before[-1][0] != launch:
                        before.append((launch, []))
                    free_ns = [end for _, ends in before[:-1] for end in ends]
                    marked_ns, start_ns = start_ns, min(max([start_ns, *free_ns]), end_ns)
                    before[-1][1].append(end_ns)
                    if communicator not in self.late:
                        first_ns = max(marked_ns, start_ns - self.pace.marks_ns(ROUND_A_COLLECTIVE[1]))
                    self.late.discard(communicator)
                    if not self.pace.reached_after_recording(Stretch(start_ns, end_ns, sent_ns)):
                        self.late.add(communicator)
                certain = self.pace.certain_span(Stretch(start_ns, end_ns, sent_ns), *ROUND_A_COLLECTIVE)
                found[4].append(Communication(kind, (first_ns, end_ns), certain, sent_ns is not None))
            dtype = None if row.dtype == rf.NO_DTYPE else self.facts.dtypes[row.dtype]
            start, end, backend = (at_ns - begin_ns if at_ns else None for at_ns in (start_ns, end_ns, backend_ns))
            times = row.a - begin_ns, start, end, source if end_ns else None, backend
            found[0].append(Collective(kind, group, row.y, row.x, dtype, *times))
            found[1].extend([(name, row.a, end_ns)] if row.flags & rf.BY_FUTURE and end_ns else [])
            found[2].append(counted)
        return found

    def _copies(
        self, own: list[Any], window: Interval, unseen: Unseen | None, notes: dict[int, Any], captured: int
    ) -> tuple[list[Copy] | None, list[Interval] | None, str | None]:
        """The rows of copies, when those ran that touch the step, and why that is not known, if so."""
        why = self.facts.no_copies if rf.NO_COPIES not in notes else self.names[notes[rf.NO_COPIES].name]
        if (why := why if unseen is None else unseen.reason) is not None:
            self.copying = []
            return None, None, why
        copies, timed = [], []
        for row in (row for row in own if row.kind == rf.COPY):
            known = (row.a and row.b) or not row.flags & rf.COMPUTES
            times = (at_ns - window[0] if at_ns and known else None for at_ns in (row.a, row.b))
            copies.append(Copy(rf.DIRECTIONS[row.flags & rf.DIRECTION], row.x, *times))
            timed += [(row.a, row.b)] if row.a and row.b else []
        touching = [*self.copying, *timed]
        self.copying = [span for span in touching if span[1] > window[1]]
        if captured:
            return copies, None, "a CUDA graph was captured, whose replays do not show their copies"
        if untimed := len(copies) - len(timed):
            why = f"{untimed} of {len(copies)} copies were issued on another device's stream, or had not ended"
            return copies, None, f"{why} when their step was written"
        return copies, touching, None

    def _name(self, row: Any) -> Name:
        kind, point_to_point = self.facts.operators[row.op]
        return Name(self.names[row.group][0], row.y, kind if point_to_point else None)

    def _phase(self, row: Any) -> str:
        if row.kind == rf.COMPUTE:
            return str(self.names[row.x])
        return "backward" if row.flags & rf.BACKWARD else "forward"


def stretch(row: Any) -> Stretch:
    """When a row was, and when the host had recorded its end."""
    return Stretch(row.a, row.b, row.b2 or None)


def spans(rows: Iterable[Any]) -> list[Interval]:
    """When rows were."""
    return [(row.a, row.b) for row in rows]


def by_kind(found: Iterable[tuple[str, list[Interval]]]) -> dict[str, list[Interval]]:
    """Intervals by kind of collective."""
    kinds: dict[str, list[Interval]] = {}
    for kind, of_one in found:
        kinds.setdefault(kind, []).extend(of_one)
    return kinds


def bits(number: int) -> float:
    """The float whose bits these are."""
    return float(struct.unpack("<d", struct.pack("<q", number))[0])
