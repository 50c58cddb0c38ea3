"""Makes the record's lines of the rows of a ring, many steps at once.

    steps = RingSteps(ring)
    steps.take()            # lines of the steps that are complete, in order
    steps.take(late=True)   # also of those whose collectives have not ended

All steps that are taken together lie on one time line, and are measured at once (`timeline.overlap`). A step is
complete when its collectives have ended, or many newer ones are over. A collective may reach into the next steps, and
queues outlive steps, so they are taken in order. Must not define a metric, wait, or import torch.
"""

from __future__ import annotations

from functools import partial
from itertools import repeat, starmap
from operator import attrgetter
from typing import Any, Final, NamedTuple

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from aorta.records import ring_file as rf
from aorta.records.device_steps import Communication, DeviceSteps, Stretch, clip, holding, marks_of, stretches
from aorta.records.ring_file import Part, RingFile
from aorta.records.schema import AuxRange, Collective, ComputeRange, EndSource, Stall, StallCause, Step, Wait
from aorta.records.step_line import Coverages, GlooWorkers, Name, StepFacts, step_line, tail_waits, user_ranges
from aorta.records.window_kernels import WindowKernels
from aorta.timeline.arrays import (
    Int64,
    Interval,
    IntervalArray,
    intersect,
    interval_array,
    merge,
    pairs,
    subtract,
    union,
)
from aorta.timeline.overlap import Unseen, measure_windows

MOST_STEPS_LATE: Final = 8
"""How many steps may stay unread because a collective has not ended; after that, coverage reports it as missing."""
MOST: Final = 64
"""Steps that are measured at once."""
_AGAIN: Final = 16
"""Steps whose lines are made again by who goes on: a collective queued behind more of them is not known to gloo."""
_SOURCES: Final[tuple[EndSource, EndSource]] = ("future", "wait")


class _Issued(NamedTuple):
    """The collectives of the steps that are taken: rows, and what else is asked of each.

    Attributes:
        counted: whether the backend's own counter includes it.
        untimed: why it can have no end, if so.
        starts, ends: in nanoseconds of the clock; 0 where it has not ended.
    """

    rows: list[Collective]
    counted: NDArray[np.bool_]
    untimed: list[str | None]
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
        kernels: by the row of a step, the kernels of the profiler's window that it is part of. Until these are known it
            is not taken, and no step behind it.
    """

    def __init__(self, ring: RingFile, behind_ns: int = -1) -> None:
        facts = ring.facts
        self.ring, self.lost, self.next_row = ring, 0, 0
        self._behind_ns = behind_ns
        if behind_ns >= 0:
            rows, first = ring.rows_since(0)
            begun = rows["a2"][(rows["kind"] == rf.STEP) & (rows["a"] <= behind_ns) & (rows["a2"] >= first)]
            self.next_row = int(begun[-_AGAIN:][0]) if len(begun) else first
        self._facts, self.kernels = facts, dict[int, WindowKernels]()
        self._kinds = [kind if of_a_pair else None for kind, of_a_pair in facts.operators]  # that names have
        self._device = None if facts.bound_ns is None else DeviceSteps(facts.bound_ns)
        self._coverages, self._workers = Coverages(), dict[str, GlooWorkers]()
        nothing = np.zeros(0, np.int64)
        self._spilling = nothing, nothing, nothing  # kind, start and end of collectives that reach into later steps

    def take(self, *, late: bool = False) -> list[Step]:
        """Return the lines of the steps that are complete; `late`: of all that have ended."""
        rows, first = self.ring.rows_since(self.next_row)
        self.lost += first - self.next_row
        self.next_row = first
        step_rows, since, until = self._complete(rows, first, late=late)
        # What is measured at once lies on one time line, and a step may have been timed by another clock than the last.
        apart = np.flatnonzero(rows["a"][step_rows[1:]] < rows["b"][step_rows[:-1]]) + 1
        lines: list[Step] = []
        begin = 0
        while begin < len(step_rows):
            following = apart[np.searchsorted(apart, begin, side="right") :]
            end = min([begin + MOST, len(step_rows), *following[:1].tolist()])
            batch, low = slice(begin, end), self.next_row - first
            # On the host rows that name a step stand before the next one.
            high = int(step_rows[end]) if self._device is None and end < len(step_rows) else len(rows)
            lines += self._measured(
                rows[low:high], step_rows[batch] - low, since[batch] - low, until[batch] - low, first + low
            )
            self.next_row = first + int(until[end - 1])
            begin = end
        return [line for line in lines if line.start_mono_ns > self._behind_ns]

    def _complete(self, rows: NDArray[Any], first: int, *, late: bool) -> tuple[Int64, Int64, Int64]:
        """Return where the first steps are that are complete, and their first row and the one behind their last."""
        kind = rows["kind"]
        # A step that has not ended is open, or was abandoned; the host may have ended one that the device has not.
        step_rows = np.flatnonzero((kind == rf.STEP) & (rows["y"] != 0) & (rows["a2"] >= first))
        since, until = rows["a2"][step_rows] - first, rows["y"][step_rows] - first
        unended = (rows["b"] == 0) & (
            (kind == rf.COLLECTIVE) | ((kind == rf.COPY) & (rows["flags"] & rf.ELSEWHERE == 0))
        )
        open_ends = np.flatnonzero(unended | (kind == 0))
        complete = np.searchsorted(open_ends, since) == np.searchsorted(open_ends, until)
        complete |= np.arange(len(step_rows))[::-1] >= MOST_STEPS_LATE
        if self._device is not None:  # nobody asks when their collectives end
            complete |= (rows["flags"][step_rows] & rf.PASSED_OVER) != 0
        complete |= late
        complete &= rows["b"][step_rows] != 0
        for step in np.flatnonzero(np.isin(step_rows + first, [*self.kernels])).tolist():
            complete[step] &= self.kernels[first + int(step_rows[step])].known
        count = len(step_rows) if complete.all() else int(np.argmin(complete))
        return step_rows[:count], since[:count], until[:count]

    def _measured(self, rows: NDArray[Any], step_rows: Int64, since: Int64, until: Int64, first: int) -> list[Step]:
        steps, index = rows[step_rows], np.arange(len(rows))
        begin, end = steps["a"], steps["b"]
        windows = IntervalArray(begin, end)
        step_of = np.searchsorted(since, index, side="right") - 1
        step_of[index >= until[np.maximum(step_of, 0)]] = -1
        by_kind = np.argsort(rows["kind"], kind="stable")
        sorted_rows, sorted_steps = rows[by_kind], step_of[by_kind]
        cut = np.searchsorted(sorted_rows["kind"], np.arange(rf.NOTE + 2)).tolist()

        def part(kind: int, *, ended: bool = True) -> Part:
            of_kind = slice(cut[kind], cut[kind + 1])
            chosen, step = sorted_rows[of_kind], sorted_steps[of_kind]
            ours = step >= 0
            if ended:
                ours &= chosen["b"] != 0
                if self._device is not None:  # which may not have passed a begin, or nobody marked it
                    ours &= chosen["a"] != 0
            return Part(chosen[ours], step[ours], begin)

        def naming(kind: int, field: str) -> Part:
            """Return rows that name their step."""
            named = sorted_rows[cut[kind] : cut[kind + 1]]
            step = np.searchsorted(step_rows, named[field] - first)
            ours = (step < len(step_rows)) & (step_rows[np.minimum(step, len(step_rows) - 1)] == named[field] - first)
            return Part(named[ours], step[ours], begin)

        def clipped(*parts: Part) -> IntervalArray:
            """Return the merged spans of rows, each clipped to the window of its step."""
            low = np.concatenate([np.maximum(part.rows["a"], begin[part.step]) for part in parts])
            high = np.concatenate([np.minimum(part.rows["b"], end[part.step]) for part in parts])
            return merge(IntervalArray(low, np.maximum(low, high)))

        names = self.ring.names()
        texts = [name if isinstance(name, str) else "" for name in names]
        passed_over = (steps["flags"] & rf.PASSED_OVER) != 0
        called, waits, stages = part(rf.COLLECTIVE, ended=False), part(rf.WAIT), part(rf.PIPELINE)
        stalled, tails, gaps, device = part(rf.STALL), part(rf.TAIL), part(rf.GAP), self._device
        if device is not None:
            called = called.where(~passed_over[called.step])
            device.begin(windows, marks_of(rows, step_of, len(step_rows)))
        issued = self._issued(called, part(rf.LINK, ended=False), part(rf.SPAN, ended=False), names)
        # The collectives that waits for other streams were for.
        between = dict(zip(gaps.rows["stamp"].tolist(), stretches(gaps.rows), strict=True))
        joined = part(rf.JOINED, ended=False)
        gaps_of = zip(joined.step.tolist(), self._names(joined, names), joined.rows["x"].tolist(), strict=True)
        awaited = [(step, name, between[gap + 1]) for step, name, gap in gaps_of if gap + 1 in between]
        over = waits.where((waits.rows["flags"] & rf.OVER) != 0)
        waited = self._waits(over, awaited, tails, called, issued, names, begin.tolist())
        comm = self._communication(called, issued, int(end[-1]))
        # A strategy that waits in intercepted calls after the backward pass does other work between them.
        possible = tails.where(~holding(tails, gaps))
        blocking = waits.where((waits.rows["flags"] & rf.BLOCKED) != 0)
        blocked = union([clipped(stalled, blocking), intersect(clipped(possible, gaps), union([*comm.values()]))])
        # Inside a long call the thread hands over, whatever is waited for round it.
        long = called.where(called.rows["a2"] - called.rows["a"] > self._facts.stall_cutoff_ns)
        long.rows["b"] = long.rows["a2"]
        handing = clipped(long)
        passes, computed, aux = part(rf.PASS), part(rf.COMPUTE), part(rf.AUX)
        notes: list[dict[int, Any]] = [{} for _ in step_rows]
        for noted in (part(rf.VALUE, ended=False), naming(rf.NOTE, "b2")):
            values = noted.rows["x"].copy().view(np.float64).tolist()
            of_rows = noted.columns("flags", "name", "a")
            for step, (about, text, many), value in zip(noted.step.tolist(), of_rows, values, strict=True):
                if about in (rf.UNSEEN, rf.NO_COPIES):
                    notes[step][about] = texts[text]
                else:
                    notes[step][about] = many if about in (rf.CAPTURED, rf.DRAWN) else value
        unseens = [
            Unseen(of_step[rf.UNSEEN], compute=True)
            if rf.UNSEEN in of_step
            else Unseen(texts[why], bool(flags & rf.BLIND))
            if why
            else None
            for flags, why, of_step in zip(steps["flags"].tolist(), steps["name"].tolist(), notes, strict=True)
        ]
        no_copies = [
            of_step.get(rf.NO_COPIES, self._facts.no_copies) if unseen is None else unseen.reason
            for of_step, unseen in zip(notes, unseens, strict=True)
        ]
        groups: list[set[str]] = [set() for _ in step_rows]
        for step, text in zip(stages.step.tolist(), stages.named("name", texts), strict=True):
            groups[step].add(text)
        stalls_of_all = union([blocked, handing])
        measure = partial(
            measure_windows,
            stalls=stalls_of_all,
            aux=clipped(aux) if self._facts.times_spans else None,
            pipeline=clipped(stages) if len(stages.rows) else None,
            bubbles=_bubbles(groups, waited, windows) if len(stages.rows) else None,
            tiled=True,
        )
        compute = clipped(passes, computed)
        if device is not None:
            copies = part(rf.COPY, ended=False)
            device.read_copies(copies, no_copies, [of_step.get(rf.CAPTURED, 0) for of_step in notes])
            bubbles: list[list[Stretch]] = [[] for _ in step_rows]
            if len(stages.rows):
                of_waits = zip(over.step.tolist(), self._names(over, names), stretches(over.rows), strict=True)
                for step, name, stretch in (*of_waits, *awaited):
                    if name.group in groups[step]:
                        bubbles[step].append(stretch)
            certain = device.read_certain(
                (computed, passes), (stalled, blocking), (possible, gaps), (gaps, waits), copies, bubbles
            )
            measure = partial(measure, copy=device.copying)
            measured = measure(windows, compute=compute, comm=comm, certain=certain)
            measured = list(starmap(device.without_copies, enumerate(measured)))
        else:
            measured = measure(windows, compute=compute, comm=comm)
        stalls = _by_window(windows, {"wait": subtract(blocked, handing), "hand_over": handing})
        aux_rows = list(map(AuxRange, aux.named("name", texts), aux.offsets("a"), aux.offsets("b")))
        compute_rows, pass_rows = (
            list(map(ComputeRange, part.named("name", texts), phases, part.offsets("a"), part.offsets("b")))
            for part, phases in (
                (computed, computed.named("x", texts)),
                (passes, np.where(passes.rows["flags"] & rf.BACKWARD, "backward", "forward").tolist()),
            )
        )
        summaries, ranges, left_out = naming(rf.SUMMARY, "b"), naming(rf.RANGE, "b2"), naming(rf.LEFT_OUT, "b2")
        range_rows = [
            (texts[name], thread, depth, low, high, texts[error] if error else None)
            for name, thread, depth, low, high, error in ranges.columns("name", "x", "y", "a", "b", "a2")
        ]
        # Of a step that was passed over they only tell what queues and reaches into the next ones.
        ours = ~passed_over[called.step]
        caller_left = list(left_out.columns("a", "b"))
        counted = [
            np.bincount(called.step[ours & chosen], minlength=len(step_rows)).tolist()
            for chosen in (issued.counted, issued.ends == 0, (called.rows["flags"] & rf.UNWATCHED) != 0)
        ]
        facts = Part(steps, np.arange(len(step_rows)), begin).columns("flags", "a", "b", "x", "b2")
        counts = summaries.columns("flags", "name", "a", "x", "y", "a2", "b2")

        lines = []
        for number, (row, summary) in enumerate(zip(facts, counts, strict=True)):
            flags, start_ns, end_ns, global_step, numbers = row
            epoch, in_epoch = divmod(numbers, 1 << 32)
            own_counted, boundary, own_ns, count, outside, before, after = summary
            unseen, overlap, of_step = unseens[number], measured[number], notes[number]
            compute_of_step = compute_rows[computed.of(number)] + pass_rows[passes.of(number)]
            own = slice(0, 0) if passed_over[number] else called.of(number)
            seen, unfinished, unwatched = (counts_of[number] for counts_of in counted)
            left = caller_left[left_out.of(number)]
            coverage = self._coverages.of(
                unseen,
                seen=seen,
                issued=None if count == rf.NOT_COUNTED else count,
                unfinished=unfinished,
                total=own.stop - own.start,
                continues=bool(flags & rf.CONTINUES),
                ahead_before=divmod(before, 1 << 32),
                ahead_after=divmod(after, 1 << 32),
                outside=outside,
                unwatched=unwatched,
                captured=of_step.get(rf.CAPTURED, 0),
                untimed=[why for why in issued.untimed[own] if why is not None],
            )
            pace: dict[str, float | None] = {"aorta_ms": own_ns / 1e6} if own_counted & rf.OWN_COUNTED else {}
            by_kernels = None
            copies_of_step, no_copies_of_step = (None, no_copies[number]) if device is None else device.copies[number]
            if device is not None:
                lead = device.leads_ms[number]
                if lead is not None and not (unseen is not None and unseen.compute):
                    least, most = overlap.bounds.get("compute_ms", (0.0, 0.0))
                    pace |= {"host_lead_ms": lead, "undecided_share": (most - least) / most if most else 0.0}
                kernels = self.kernels.pop(first + int(step_rows[number]), None)
                if kernels is not None and unseen is None and coverage.complete:
                    by_kernels = device.by_kernels(number, kernels, overlap, compute_of_step, stalls_of_all, measure)
            of_caller, reasons = user_ranges(range_rows[ranges.of(number)], start_ns, *(left[0] if left else (0, 0)))
            lines.append(
                step_line(
                    self._facts,
                    StepFacts(
                        epoch,
                        in_epoch,
                        global_step,
                        of_step.get(rf.LR),
                        bool(flags & rf.WARMUP),
                        rf.STEP_PHASES[flags >> rf.PHASE_SHIFT & 3],
                    ),
                    (start_ns, end_ns),
                    overlap if by_kernels is None else by_kernels,
                    unseen,
                    coverage,
                    collectives=issued.rows[own],
                    compute=compute_of_step,
                    stalls=stalls[number],
                    aux=aux_rows[aux.of(number)],
                    waits=UNSET if unseen is not None else waited[number],
                    loss=of_step.get(rf.LOSS),
                    grad_norm=of_step.get(rf.GRAD_NORM),
                    pace=pace,
                    stages=bool(groups[number]),
                    no_copies=no_copies_of_step,
                    copies=copies_of_step,
                    boundary=texts[boundary] if boundary else None,
                    ranges=of_caller or UNSET,
                    left_out=reasons,
                    by_kernels=by_kernels is not None,
                    drawn=of_step.get(rf.DRAWN, UNSET),
                )
            )
        return lines

    def _issued(self, called: Part, links: Part, spans: Part, names: list[Any]) -> _Issued:
        """Return the collectives in order of issue. gloo tells when one ended; when it began follows from its queue, or
        an emulated link says so. `spans`: of those on a device, between marks.
        """
        facts, device, rows = self._facts, self._device, called.rows
        both, count = rows["b"].tolist(), len(rows)
        groups = [names[number] for number in rows["group"].tolist()]
        operators = [facts.operators[op] for op in rows["op"].tolist()]
        counted = [not of_a_pair or counts for (_, of_a_pair), (_, _, counts, _) in zip(operators, groups, strict=True)]
        ends: list[int | None] = [end >> 1 if end else None for end in both]
        sources: list[EndSource | None] = [_SOURCES[end & 1] if end else None for end in both]
        starts, backend_ends = list[int | None]([None] * count), list[int | None]([None] * count)
        firsts, untimed = [0] * count, list[str | None]([None] * count)
        linked = {at: link for at, *link in links.columns("x", "a", "b", "flags")}
        marked = {at: span for at, *span in spans.columns("x", "a", "b", "b2", "y", "flags")}
        for at, (step, stamp, issue_ns, (group, lanes, _, _)) in enumerate(
            zip(called.step.tolist(), rows["stamp"].tolist(), rows["a"].tolist(), groups, strict=True)
        ):
            end_ns, span = ends[at], marked.get(stamp - 1) if device is not None else None
            if end_ns is not None and (link := linked.get(stamp - 1)) is not None and link[0]:
                starts[at], backend_ends[at] = min(link[0], end_ns), link[1] or None
                sources[at] = "emulated" if link[2] else sources[at]
            if span is not None and device is not None:
                begin_ns, end_of_span_ns, sent_ns, packed, reason = span
                starts[at], ends[at] = begin_ns or None, (end_ns := end_of_span_ns or None)
                sources[at] = "event" if sent_ns else None
                untimed[at], launch = rf.UNTIMED.get(reason), (packed >> 32) - 1 if packed >> 32 else None
                counted[at] = counted[at] and device.counts(operators[at].kind, launch)
            if end_ns is None:
                continue
            start_ns = starts[at]
            by_queue = start_ns is None
            if start_ns is None:
                if group not in self._workers:
                    self._workers[group] = GlooWorkers(lanes)
                start_ns = self._workers[group].start_ns(issue_ns, end_ns)
            starts[at] = firsts[at] = start_ns
            if device is None:
                continue
            ran = Communication(operators[at].kind, (start_ns, end_ns), [(start_ns, end_ns)], on_device=False)
            if span is not None:
                which = packed & 0xFFFFFFFF
                communicator = group if which == rf.OF_THE_GROUP else f"{group} {which - rf.OF_A_PEER}"
                if by_queue or which == rf.UNKNOWN_COMMUNICATOR:
                    communicator = None
                stretch = Stretch(start_ns, end_ns, sent_ns or None)
                starts[at], ran = device.ran(operators[at].kind, communicator, launch, stretch, device.paces[step])
                firsts[at] = ran.possible[0]
            device.own[step].append(ran)
        origins = called.begins().tolist()

        def offsets(times: list[int | None]) -> list[int | None]:
            return [None if at is None else at - origin for at, origin in zip(times, origins, strict=True)]

        issued = map(
            Collective,
            [kind for kind, _ in operators],
            [group for group, *_ in groups],
            rows["y"].tolist(),
            rows["x"].tolist(),
            [None if number == rf.NO_DTYPE else facts.dtypes[number] for number in rows["dtype"].tolist()],
            called.offsets("a"),
            offsets(starts),
            offsets(ends),
            sources,
            offsets(backend_ends),
        )
        over = np.array([end or 0 for end in ends], np.int64)
        return _Issued(
            list(issued),
            np.array(counted, bool),
            untimed,
            np.array(firsts, np.int64),
            over,
        )

    def _communication(self, called: Part, issued: _Issued, until_ns: int) -> dict[str, IntervalArray]:
        """Return when collectives of each kind ran, those of earlier steps that reach into these included. One that
        began before its own step is of no earlier one.
        """
        starts_here = np.minimum(np.maximum(issued.starts, called.begins()), issued.ends)
        columns = (called.rows["op"].astype(np.int64), starts_here, issued.ends)
        parts = [(before, column[issued.ends != 0]) for before, column in zip(self._spilling, columns, strict=True)]
        ops, starts, ends = (np.concatenate(part) for part in parts)
        later = ends > until_ns
        self._spilling = ops[later], starts[later], ends[later]
        comm: dict[str, list[NDArray[np.bool_]]] = {}
        for op in np.unique(ops).tolist():
            comm.setdefault(self._facts.operators[op].kind, []).append(ops == op)
        of_kinds = {kind: np.logical_or.reduce(of_ops) for kind, of_ops in comm.items()}
        return {kind: merge(IntervalArray(starts[chosen], ends[chosen])) for kind, chosen in of_kinds.items()}

    def _names(self, part: Part, names: list[Any]) -> list[Name]:
        """Return what collectives are called that rows are about."""
        return [
            Name(names[group][0], number, self._kinds[op]) for op, group, number in part.columns("op", "group", "y")
        ]

    def _waits(
        self,
        over: Part,
        awaited: list[tuple[int, Name, Stretch]],
        tails: Part,
        called: Part,
        issued: _Issued,
        names: list[Any],
        begins: list[int],
    ) -> list[list[Wait]]:
        """Return the waits of each step that returned, those at the ends of backward passes included, in order."""
        over = over.where(np.lexsort((over.rows["b"], over.rows["a"], over.step)))
        groups = [names[number][0] for number in over.rows["group"].tolist()]
        kinds = [self._kinds[op] for op in over.rows["op"].tolist()]
        rows = list(map(Wait, groups, over.rows["y"].tolist(), over.offsets("a"), over.offsets("b"), kinds))
        waits_of = [rows[over.of(step)] for step in range(len(begins))]
        more: list[tuple[int, Name, Interval]] = [(step, name, stretch.span) for step, name, stretch in awaited]
        if len(tails.rows):
            chosen = (issued.ends != 0) & ((called.rows["flags"] & rf.BY_FUTURE) != 0)
            reduced, ends = called.where(chosen), issued.ends[chosen].tolist()
            buckets = list(zip(self._names(reduced, names), reduced.rows["a"].tolist(), ends, strict=True))
            in_tails = list(tails.columns("a", "b"))
            for step in np.unique(reduced.step).tolist():
                waited = {Name(wait.group, wait.seq, wait.kind) for wait in waits_of[step]}
                waited.update(name for of_step, name, _ in more if of_step == step)
                in_tail = tail_waits(in_tails[tails.of(step)], buckets[reduced.of(step)], waited)
                more += [(step, name, span) for name, span in in_tail]
        for step, name, (low, high) in more:
            waits_of[step].append(Wait(name.group, name.seq, low - begins[step], high - begins[step], name.kind))
        for step in {step for step, _, _ in more}:
            waits_of[step].sort(key=attrgetter("enter_ns", "leave_ns"))
        return waits_of


def _bubbles(groups: list[set[str]], waited: list[list[Wait]], windows: IntervalArray) -> IntervalArray:
    """Return when steps waited in the process groups of their pipelines' stages."""
    spans = []
    for window, ours, waits in zip(pairs(windows), groups, waited, strict=True):
        in_pipeline = (wait for wait in waits if wait.group in ours)
        spans += clip([(window[0] + wait.enter_ns, window[0] + wait.leave_ns) for wait in in_pipeline], window)
    return merge(interval_array(spans))


def _by_window(windows: IntervalArray, causes: dict[StallCause, IntervalArray]) -> list[list[Stall]]:
    """Return the stalls of each window, in order."""
    rows: list[list[Stall]] = [[] for _ in windows.start]
    for cause, merged in causes.items():
        spans = intersect(windows, merged)
        window = np.searchsorted(windows.start, spans.start, side="right") - 1
        offsets = (spans.start - windows.start[window]).tolist(), (spans.end - windows.start[window]).tolist()
        for index, stall in zip(window.tolist(), map(Stall, *offsets, repeat(cause)), strict=False):
            rows[index].append(stall)
    for stalls in rows:
        stalls.sort(key=attrgetter("start_ns"))
    return rows
