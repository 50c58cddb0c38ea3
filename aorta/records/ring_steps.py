"""Makes the record's lines of the rows of a ring, many steps at once.

    steps = RingSteps(ring)
    steps.take()            # lines of the steps that are complete, in order
    steps.take(late=True)   # also of those whose collectives have not ended

All steps that are taken together lie on one time line, and are measured at once (`timeline.arrays`). A step is complete
when its collectives have ended, or many newer ones are over. A collective may reach into the next steps, and queues
outlive steps, so they are taken in order. Must not define a metric, wait, or import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aorta.records import ring_file as rf
from aorta.records.ring_file import RingFile
from aorta.records.schema import AuxRange, Collective, ComputeRange, EndSource, Stall, StallCause, Step
from aorta.records.step_line import (
    Bucket,
    Counted,
    Coverages,
    GlooWorkers,
    MeasuredStep,
    Name,
    StepFacts,
    StepLines,
    tail_waits,
    user_ranges,
    wait_rows,
)
from aorta.timeline.arrays import (
    Int64,
    IntervalArray,
    intersect,
    interval_array,
    measure_windows,
    merge,
    subtract,
    union,
)
from aorta.timeline.intervals import Interval
from aorta.timeline.overlap import Unseen

MOST_STEPS_LATE: Final = 8
"""How many steps may stay unread because a collective has not ended; after that, coverage reports it as missing."""
MOST: Final = 64
"""Steps that are measured at once."""
_AGAIN: Final = 16
"""Steps whose lines are made again by who goes on: a collective queued behind more of them is not known to gloo."""
_SOURCES: Final[tuple[EndSource, EndSource]] = ("future", "wait")
_NO_LINK: Final = (0, 0, 0)


class _Part:
    """The rows of one kind in the steps that are taken, and the steps that they belong to, both in order."""

    def __init__(self, rows: NDArray[Any], step: Int64, begin: Int64) -> None:
        self.rows, self.step, self._begin = rows, step, begin
        self._cut = np.searchsorted(step, np.arange(len(begin) + 1)).tolist()

    def where(self, chosen: NDArray[np.bool_]) -> _Part:
        return _Part(self.rows[chosen], self.step[chosen], self._begin)

    def columns(self, *names: str) -> zip[tuple[Any, ...]]:
        return zip(*(self.rows[name].tolist() for name in names), strict=True)

    def offsets(self, name: str) -> list[int]:
        """Return a column of times as nanoseconds from the begin of its step."""
        return (self.rows[name] - self._begin[self.step]).tolist()  # type: ignore[no-any-return]

    def spans(self) -> zip[tuple[int, int]]:
        return zip(self.offsets("a"), self.offsets("b"), strict=True)

    def of(self, step: int) -> slice:
        """Return where the rows of a step are."""
        return slice(self._cut[step], self._cut[step + 1])


class _Issued(NamedTuple):
    """The collectives of the steps that are taken: rows, and what else is asked of each.

    Attributes:
        counted: whether the backend's own counter includes it.
        starts, ends: in nanoseconds of the clock; as far as they have ended.
    """

    rows: list[Collective]
    buckets: list[Bucket]
    counted: list[bool]
    unended: list[bool]
    kinds: NDArray[np.int64]
    starts: Int64
    ends: Int64


class RingSteps:
    """Reads one rank's ring from its oldest row on.

    Args:
        behind_ns: another process has made lines of the steps that began by then, and there are none of these here. The
            last few are read all the same: when a collective began follows from those before it.

    Attributes:
        lost: how many rows were overwritten before they were read.
        next_row: the first row that the lines of steps to come may need.
    """

    def __init__(self, ring: RingFile, behind_ns: int = -1) -> None:
        facts = ring.facts
        self.ring, self.lost, self.next_row = ring, 0, 0
        self._behind_ns = behind_ns
        if behind_ns >= 0:
            rows, first = ring.rows_since(0)
            begun = rows["a2"][(rows["kind"] == rf.STEP) & (rows["a"] <= behind_ns) & (rows["a2"] >= first)]
            self.next_row = int(begun[-_AGAIN:][0]) if len(begun) else first
        self._facts = facts
        self._lines = StepLines(facts.rank, facts.world_size, facts.anchor, facts.no_values)
        self._coverages, self._workers = Coverages(), dict[str, GlooWorkers]()
        nothing = np.zeros(0, np.int64)
        self._spilling = nothing, nothing, nothing  # kind, start and end of collectives that reach into later steps

    def take(self, *, late: bool = False) -> list[Step]:
        """Return the lines of the steps that are complete; `late`: of all that have ended."""
        lines: list[Step] = []
        while taken := self._take(late=late):
            lines += taken
        return [line for line in lines if line.start_mono_ns > self._behind_ns]

    def _take(self, *, late: bool) -> list[Step]:
        rows, first = self.ring.rows_since(self.next_row)
        self.lost += first - self.next_row
        self.next_row = first
        kind = rows["kind"]
        # A step that has not ended is open, or was abandoned.
        at = np.flatnonzero((kind == rf.STEP) & (rows["b"] != 0) & (rows["a2"] >= first))
        since, until = rows["a2"][at] - first, rows["y"][at] - first
        open_ends = np.flatnonzero(((kind == rf.COLLECTIVE) & (rows["b"] == 0)) | (kind == 0))
        complete = np.searchsorted(open_ends, since) == np.searchsorted(open_ends, until)
        complete |= np.arange(len(at))[::-1] >= MOST_STEPS_LATE
        count = len(at) if late or complete.all() else int(np.argmin(complete))
        count = min(count, MOST)
        if count == 0:
            return []
        # Rows that name a step stand before the next one.
        rows = rows[: at[count] if count < len(at) else len(rows)]
        lines = self._measured(rows, at[:count], since[:count], until[:count], first)
        self.next_row += int(until[count - 1])
        return lines

    def _measured(self, rows: NDArray[Any], at: Int64, since: Int64, until: Int64, first: int) -> list[Step]:
        steps, index = rows[at], np.arange(len(rows))
        begin, end = steps["a"], steps["b"]
        windows = IntervalArray(begin, end)
        step_of = np.searchsorted(since, index, side="right") - 1
        inside = (step_of >= 0) & (index < until[np.maximum(step_of, 0)])

        def part(kind: int, *, ended: bool = True) -> _Part:
            chosen = inside & (rows["kind"] == kind)
            if ended:
                chosen &= rows["b"] != 0
            return _Part(rows[chosen], step_of[chosen], begin)

        def naming(kind: int, field: str) -> _Part:
            """Return rows that name their step."""
            found = rows[rows["kind"] == kind]
            step = np.searchsorted(at, found[field] - first)
            ours = (step < len(at)) & (at[np.minimum(step, len(at) - 1)] == found[field] - first)
            return _Part(found[ours], step[ours], begin)

        def clipped(*parts: _Part) -> IntervalArray:
            """Return the merged spans of rows, each clipped to the window of its step."""
            low = np.concatenate([np.maximum(one.rows["a"], begin[one.step]) for one in parts])
            high = np.concatenate([np.minimum(one.rows["b"], end[one.step]) for one in parts])
            return merge(IntervalArray(low, np.maximum(low, high)))

        names = self.ring.names()
        texts = [one if isinstance(one, str) else "" for one in names]
        called, waits, stages = part(rf.COLLECTIVE, ended=False), part(rf.WAIT), part(rf.PIPELINE)
        issued = self._issued(called, part(rf.LINK, ended=False), names)
        found = self._waits(waits, part(rf.TAIL), called, issued, names, len(at))
        comm = self._communication(issued, int(end[-1]))
        blocked = union(
            [
                clipped(part(rf.STALL), waits.where((waits.rows["flags"] & rf.BLOCKED) != 0)),
                intersect(clipped(part(rf.TAIL)), union([*comm.values()])),
            ]
        )
        # Inside a long call the thread hands over, whatever is waited for round it.
        long = called.where(called.rows["a2"] - called.rows["a"] > self._facts.stall_cutoff_ns)
        long.rows["b"] = long.rows["a2"]
        handing = clipped(long)
        passes, computed, aux = part(rf.PASS), part(rf.COMPUTE), part(rf.AUX)
        measured = measure_windows(
            windows,
            compute=clipped(passes, computed),
            comm=comm,
            stalls=union([blocked, handing]),
            aux=clipped(aux),
            pipeline=clipped(stages) if len(stages.rows) else None,
            bubbles=_bubbles(stages, found, windows, texts) if len(stages.rows) else None,
            tiled=True,
        )
        stalls = _by_window(windows, {"wait": subtract(blocked, handing), "hand_over": handing})
        aux_rows = [
            AuxRange(texts[name], *span) for (name,), span in zip(aux.columns("name"), aux.spans(), strict=True)
        ]
        compute_rows = [
            ComputeRange(texts[name], texts[phase], *span)
            for (name, phase), span in zip(computed.columns("name", "x"), computed.spans(), strict=True)
        ]
        pass_rows = [
            ComputeRange(texts[name], "backward" if flags & rf.BACKWARD else "forward", *span)
            for (name, flags), span in zip(passes.columns("name", "flags"), passes.spans(), strict=True)
        ]
        values: list[dict[int, float]] = [{} for _ in at]
        value_rows = part(rf.VALUE, ended=False)
        read = value_rows.rows["x"].copy().view(np.float64).tolist()
        for step, (which,), value in zip(value_rows.step.tolist(), value_rows.columns("flags"), read, strict=True):
            values[step][which] = value
        summaries, ranges, left_out = naming(rf.SUMMARY, "b"), naming(rf.RANGE, "b2"), naming(rf.LEFT_OUT, "b2")
        range_rows = [
            (texts[name], thread, depth, low, high, texts[error] if error else None)
            for name, thread, depth, low, high, error in ranges.columns("name", "x", "y", "a", "b", "a2")
        ]
        unwatched = (called.rows["flags"] & rf.UNWATCHED) != 0
        facts = _Part(steps, np.arange(len(at)), begin).columns("flags", "name", "a", "b", "x", "b2")
        counts = summaries.columns("flags", "name", "a", "x", "y", "a2", "b2")

        lines = []
        for number, (row, summary) in enumerate(zip(facts, counts, strict=True)):
            flags, why, start_ns, end_ns, global_step, in_epoch = row
            own_counted, boundary, own_ns, count, outside, before, after = summary
            unseen = Unseen(texts[why], bool(flags & rf.BLIND)) if why else None
            own, caller = called.of(number), left_out.rows[left_out.of(number)]
            unended = issued.unended[own]
            coverage = self._coverages.of(
                Counted(
                    seen=sum(issued.counted[own]),
                    issued=None if count == rf.NOT_COUNTED else count,
                    unfinished=sum(unended),
                    total=len(unended),
                    continues=bool(flags & rf.CONTINUES),
                    ahead_before=_pair(before),
                    ahead_after=_pair(after),
                    outside=outside,
                    unwatched=int(unwatched[own].sum()),
                ),
                unseen,
            )
            left = (int(caller["a"][0]), int(caller["b"][0])) if len(caller) else (0, 0)
            of_caller, reasons = user_ranges(range_rows[ranges.of(number)], start_ns, *left)
            lines.append(
                self._lines.line(
                    MeasuredStep(
                        StepFacts(
                            in_epoch >> 32,
                            in_epoch & 0xFFFFFFFF,
                            global_step,
                            values[number].get(rf.LR),
                            bool(flags & rf.WARMUP),
                            rf.STEP_PHASES[flags >> rf.PHASE_SHIFT],
                        ),
                        (start_ns, end_ns),
                        measured[number],
                        unseen,
                        coverage,
                        issued.rows[own],
                        compute_rows[computed.of(number)] + pass_rows[passes.of(number)],
                        stalls[number],
                        aux_rows[aux.of(number)],
                        None if unseen is not None else wait_rows(found[number], start_ns),
                        loss=values[number].get(rf.LOSS),
                        grad_norm=values[number].get(rf.GRAD_NORM),
                        pace={"aorta_ms": own_ns / 1e6} if own_counted & rf.OWN_COUNTED else {},
                        stages=len(stages.rows[stages.of(number)]) > 0,
                        no_copies=self._facts.no_copies if unseen is None else unseen.reason,
                        boundary=texts[boundary] if boundary else None,
                        ranges=of_caller,
                        left_out=reasons,
                    )
                )
            )
        return lines

    def _issued(self, called: _Part, links: _Part, names: list[Any]) -> _Issued:
        """Return the collectives in order of issue. gloo tells when one ended; when it began follows from its queue, or
        an emulated link says so.
        """
        facts, rows, buckets, counted = self._facts, [], [], []
        starts, ends, kinds, unended = [], [], [], []
        linked = {at: link for at, *link in links.columns("x", "a", "b", "flags")}
        origins = (called.rows["a"] - called.offsets("a")).tolist()
        columns = called.columns("stamp", "flags", "op", "dtype", "group", "a", "b", "x", "y")
        for origin_ns, (stamp, flags, op, dtype, number, issue_ns, both, size, seq) in zip(
            origins, columns, strict=True
        ):
            group, lanes, counts_point_to_point = names[number]
            kind, point_to_point = facts.operators[op]
            start_ns: int | None = None
            end_ns: int | None = None
            backend_end_ns: int | None = None
            source: EndSource | None = None
            if both:
                end_ns, source = both >> 1, _SOURCES[both & 1]
                link_start_ns, link_backend_ns, by_fabric = linked.get(stamp - 1, _NO_LINK)
                if link_start_ns:
                    start_ns, backend_end_ns = min(link_start_ns, end_ns), link_backend_ns or None
                    source = "emulated" if by_fabric else source
                else:
                    if group not in self._workers:
                        self._workers[group] = GlooWorkers(lanes)
                    start_ns = self._workers[group].start_ns(issue_ns, end_ns)
                starts.append(start_ns)
                ends.append(end_ns)
                kinds.append(op)
            rows.append(
                Collective(
                    kind,
                    group,
                    seq,
                    size,
                    None if dtype == rf.NO_DTYPE else facts.dtypes[dtype],
                    issue_ns - origin_ns,
                    None if start_ns is None else start_ns - origin_ns,
                    None if end_ns is None else end_ns - origin_ns,
                    source,
                    None if backend_end_ns is None else backend_end_ns - origin_ns,
                )
            )
            name = Name(group, seq, kind if point_to_point else None)
            buckets.append(Bucket(name, bool(flags & rf.BY_FUTURE), issue_ns, end_ns))
            counted.append(not point_to_point or counts_point_to_point)
            unended.append(not both)
        whole = [np.array(values, np.int64) for values in (kinds, starts, ends)]
        return _Issued(rows, buckets, counted, unended, *whole)

    def _communication(self, issued: _Issued, until_ns: int) -> dict[str, IntervalArray]:
        """Return when collectives of each kind ran, those of earlier steps that reach into these included."""
        parts = zip(self._spilling, (issued.kinds, issued.starts, issued.ends), strict=True)
        ops, starts, ends = (np.concatenate(part) for part in parts)
        later = ends > until_ns
        self._spilling = ops[later], starts[later], ends[later]
        comm: dict[str, list[NDArray[np.bool_]]] = {}
        for op in np.unique(ops).tolist():
            comm.setdefault(self._facts.operators[op].kind, []).append(ops == op)
        return {
            kind: merge(IntervalArray(starts[chosen], ends[chosen]))
            for kind, found in comm.items()
            for chosen in [np.logical_or.reduce(found)]
        }

    def _waits(
        self, waits: _Part, tails: _Part, called: _Part, issued: _Issued, names: list[Any], count: int
    ) -> list[list[tuple[Name, Interval]]]:
        """Return the waits of each step that returned, those at the ends of backward passes included."""
        found: list[list[tuple[Name, Interval]]] = [[] for _ in range(count)]
        columns = waits.columns("flags", "op", "group", "y", "a", "b")
        for step, (flags, op, number, seq, begin_ns, end_ns) in zip(waits.step.tolist(), columns, strict=True):
            if flags & rf.OVER:
                kind, point_to_point = self._facts.operators[op]
                name = Name(names[number][0], seq, kind if point_to_point else None)
                found[step].append((name, (begin_ns, end_ns)))
        spans = list(tails.columns("a", "b"))
        for step, waited in enumerate(found):
            if of_step := spans[tails.of(step)]:
                buckets = issued.buckets[called.of(step)]
                waited += tail_waits([(low, high) for low, high in of_step], buckets, {name for name, _ in waited})
        return found


def _pair(packed: int) -> tuple[int, int]:
    return packed >> 32, packed & 0xFFFFFFFF


def _bubbles(
    stages: _Part, found: Sequence[Sequence[tuple[Name, Interval]]], windows: IntervalArray, texts: list[str]
) -> IntervalArray:
    """Return when steps waited in the process group of their pipeline's stages."""
    groups = [texts[name] for (name,) in stages.columns("name")]
    spans = []
    for step, (begin_ns, end_ns) in enumerate(zip(windows.start.tolist(), windows.end.tolist(), strict=True)):
        ours = groups[stages.of(step)]
        spans += [
            (max(low, begin_ns), min(high, end_ns))
            for name, (low, high) in found[step]
            if name.group in ours and max(low, begin_ns) < min(high, end_ns)
        ]
    return merge(interval_array(spans))


def _by_window(windows: IntervalArray, causes: dict[StallCause, IntervalArray]) -> list[list[Stall]]:
    """Return the stalls of each window, in order."""
    rows: list[list[Stall]] = [[] for _ in windows.start]
    for cause, merged in causes.items():
        spans = intersect(windows, merged)
        window = np.searchsorted(windows.start, spans.start, side="right") - 1
        offsets = (spans.start - windows.start[window]).tolist(), (spans.end - windows.start[window]).tolist()
        for at, low, high in zip(window.tolist(), *offsets, strict=True):
            rows[at].append(Stall(low, high, cause))
    for stalls in rows:
        stalls.sort(key=lambda stall: stall.start_ns)
    return rows
