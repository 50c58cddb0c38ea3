"""Holds the rows of a trace against one another and against the calls of its host, for every format.

Whether its times are possible (`refuse_other_units`, `wrong_clocks`, `too_fast`), which rows the numbers of others
leave out (`skipped`), and which steps lack what others have (`unrecorded`); what is missing are gaps
(`aorta.read.ledger`). Must not: know a format, mend a time, ask what the host's side says was issued (`claims`), or
take a step of another sort for one that was cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from aorta.errors import InputError
from aorta.read.frames import Groups
from aorta.read.ledger import COMM, LANES, WHOLE, Gap, lacking, lost
from aorta.read.traces.interval_table import (
    KIND_CODE,
    LANE_CLASSES,
    NO_WINDOWS,
    NULL,
    IntervalClass,
    Intervals,
    Trace,
    by_device,
    look_up,
    operations,
    windows,
)
from aorta.timeline.arrays import Int64
from aorta.timeline.classes import COMPUTE
from aorta.timeline.overlap import DECIDED, NS_PER_MS

ORDER_NS: Final = NS_PER_MS
"""By so much a thread may begin a call before another thread's, whose row precedes on the stream."""
OTHERS: Final = 2
"""So many rows may be early by what clocks are wrong by."""
_QUEUED_NS: Final = 1000 * NS_PER_MS
"""No queue is so long that every row, the first too, waits a second in it: a device's queue holds about 1000 launches.
"""
_ENOUGH: Final = 20
"""Rows or calls, of which some are always short."""
_SHORT: Final = 0.05
"""So many launches and operators last less than a millisecond in any trace. A choice."""
_COLLECTIVES: Final = 10
"""Fewest collectives that are judged. A choice."""
_MOST: Final = 0.8
"""Share of the collectives that has to be too fast: the others may be copies, in groups of one rank. A choice."""
_SOONEST_NS: Final = 2000
"""No collective of several ranks ends so soon: NCCL's model adds at least 3.6 us (`baseLat` of the ring with LL,
NCCL's `tuning`)."""
_FASTEST: Final = 10_000
"""Bytes of the full array in a nanosecond, of which about half or more cross a link: NVLink 6 moves 3600
(NVIDIA's page on NVLink, 2026-04)."""
_FASTEST_OF_HOSTS: Final = 100
"""As `_FASTEST`, of gloo: 800 Gbit/s."""
_SHORTEST_NS: Final = 200
"""No device runs a kernel, and no host an operator or a call that launches one, in so little."""
_PAUSE_NS: Final = 100_000
"""No device takes so long from one kernel to the next that waits for it. A choice."""
_COARSE: Final = 100
"""Where starts are this many times as coarse as lengths, or the other way, they were rounded. A choice, far above a
microsecond beside the 32 ns in which some devices count.
"""
FEWEST: Final = 3
"""Steps, of which one can be told to be unlike the others."""
_MUCH: Final = 10
"""A step that is so many times as long as all that was recorded, in it alone, is not of that clock. A choice."""
EDGES: Final = 0.1
"""Part of the collectives issued that may run before or behind the recording."""
PAUSE_NS: Final = 1000 * NS_PER_MS
"""Rows whose numbers follow one another, and that start farther apart, have a pause of the recording between them, in
which others ran unrecorded on purpose. A choice: where a step is longer, rows lost from it are not missed by their
numbers, and no number is doubted for it.
"""


def refuse_other_units(path: str, what: str, lengths_ns: Int64, *, some_short: bool) -> None:
    """Refuse a trace whose lengths are a thousand times as long or as short as any can be.

    Args:
        what: whose lengths these are; those below 1 are not known.
        some_short: some last less than a millisecond, as launches that find room in the queue, and views of tensors.

    Raises:
        InputError: half are shorter than any device or host can be, or none is short.
    """
    own = lengths_ns[lengths_ns > 0]
    if len(own) < _ENOUGH:
        return
    middle, least = float(np.median(own)), float(np.quantile(own, _SHORT))
    if middle < _SHORTEST_NS:
        seen = f"half of {len(own)} {what} last {middle:.4g} ns or less, but they take a microsecond or more"
    elif some_short and least >= NS_PER_MS:
        seen = f"of {len(own)} {what} {1 - _SHORT:.0%} last {least / 1e6:.4g} ms or more, but many take microseconds"
    else:
        return
    raise InputError(f"{path}: {seen}: its times are in another unit. Convert them to that of the format")


def wrong_clocks(trace: Trace) -> tuple[Gap, ...]:
    """Return all lanes as unobserved where rows ran at times that those of the host make impossible."""
    table = trace.intervals.take((trace.intervals.device != NULL) & (trace.intervals.launch_ns != NULL))
    if not len(table):
        return ()
    wrong = [*_past_waits(trace, table), *_not_starts(table), *_idle_with_work(trace)]
    return (*_off_the_host(trace, table), *(gap for why in wrong for gap in lacking(why, *LANES, seen=False)))


def too_fast(trace: Trace) -> Iterator[Gap]:
    """Yield communication where most collectives are faster than any link. A send may end as soon as it is buffered."""
    rows = trace.intervals
    paired = np.isin(rows.kind, (KIND_CODE["send"], KIND_CODE["recv"]))
    rows = rows.take((rows.cls == IntervalClass.COMM) & (rows.kind != NULL) & ~paired & (rows.end_ns > rows.start_ns))
    if trace.world_size == 1 or len(rows) < _COLLECTIVES:
        return
    length_ns = rows.end_ns - rows.start_ns
    longest_ns, rate = float(np.quantile(length_ns, _MOST)), float(np.quantile(rows.bytes / length_ns, 1 - _MOST))
    if longest_ns < _SOONEST_NS:
        why = f"{_MOST:.0%} of {len(rows)} collectives last {longest_ns:.4g} ns or less"
        yield from lacking(why, COMM, seen=False)
    elif rate > (_FASTEST_OF_HOSTS if trace.platform == "cpu" else _FASTEST):
        why = f"{_MOST:.0%} of {len(rows)} collectives move {rate / 1e3:.4g} TB/s or more"
        yield from lacking(why, COMM, seen=False)


def _off_the_host(trace: Trace, table: Intervals) -> Iterator[Gap]:
    """Yield the steps, and the whole unless all rows are off by the same, where rows start before their launches, or
    all of them long after.
    """
    marks = trace.windows
    if not len(marks):
        return
    delay = np.sort(table.start_ns - table.launch_ns)
    early_ns, least_ns = -int(delay[int(DECIDED * len(delay))]), int(delay[0])
    recorded_ns = int(max(marks.end_ns.max(), table.launch_ns.max()) - min(marks.start_ns.min(), table.launch_ns.min()))
    if early_ns > DECIDED * np.median(marks.end_ns - marks.start_ns):
        off_ns, why = early_ns, f"rows start up to {early_ns / 1e6:.4g} ms before their launches"
    elif least_ns > max(_QUEUED_NS, recorded_ns):
        off_ns, why = least_ns, f"every row starts {least_ns / 1e6:.4g} ms or more after its launch"
    else:
        return
    windows_of = marks.step.tolist()
    # Clocks of one pace, apart by the same everywhere, leave lengths and what overlaps as they are.
    behind = table.launch_ns > np.median(table.launch_ns)
    least_ns_of = Groups(table.device, table.stream, behind).reduce(np.minimum, table.start_ns - table.launch_ns)
    if np.ptp(least_ns_of) > off_ns / 2:
        windows_of.append(WHOLE)
    why += ", so clocks or launches are wrong"
    yield from (Gap(lane, why, step, seen=False) for step in windows_of for lane in LANES)


def _past_waits(trace: Trace, rows: Intervals) -> Iterator[str]:
    """Yield what to say where rows end after a call has returned that waited for them: the device's clock is not the
    one of the host, or jumped. Calls of other threads may have been under way, each with one row.
    """
    waits = trace.device_waits
    if waits is None or not len(waits.start) or len(np.unique(rows.device)) != 1:  # whose device it was is not known
        return
    order = np.argsort(waits.start, kind="stable")
    first = np.searchsorted(waits.start[order], rows.launch_ns)
    end = np.append(waits.end[order], np.iinfo(np.int64).max)[first]
    late_ns = np.maximum(rows.end_ns - end, 0)[rows.end_ns > end]
    if np.count_nonzero(late_ns > ORDER_NS) > OTHERS:
        yield f"rows end up to {late_ns.max() / 1e6:.4g} ms after a call that waited for them, so clocks are wrong"


def _idle_with_work(trace: Trace) -> Iterator[str]:
    """Yield what to say where launches wait ever longer for a device that does nothing meanwhile: its clock goes faster
    than the host's, or jumped. A device that lags behind its host is busy.
    """
    for _, rows in by_device(trace.intervals.take(trace.intervals.device != NULL)):
        rows = rows.take(np.argsort(rows.start_ns, kind="stable"))
        delay_ns = np.maximum(rows.start_ns - rows.launch_ns, 0)
        idle_ns = np.append(0, rows.start_ns[1:] - np.maximum.accumulate(rows.end_ns)[:-1])
        linked = np.flatnonzero(rows.launch_ns != NULL)
        if not (part := len(linked) // 3):
            continue
        first, last = linked[:part], linked[-part:]
        later_ns = delay_ns[last].min() - delay_ns[first].min()  # more of them are of other places in a step
        apart_ns = np.median(rows.launch_ns[last]) - np.median(rows.launch_ns[first])
        queued_ns = np.minimum(idle_ns, delay_ns)[linked]
        waited_ns = queued_ns[queued_ns > _PAUSE_NS].sum()
        if later_ns > DECIDED * apart_ns and waited_ns > later_ns:
            why = f"the device does nothing for {waited_ns / 1e6:.4g} ms in which launches wait for it, and these wait "
            yield f"{why}{later_ns / 1e6:.4g} ms longer at the end: its clock is wrong"


def _not_starts(table: Intervals) -> Iterator[str]:
    """Yield what to say where starts are not when rows began: they are when the calls were made, or rounded."""
    starts, lengths = table.start_ns, np.maximum(table.end_ns - table.start_ns, 0)
    if len(table) < _ENOUGH:
        return
    if 2 * np.count_nonzero(starts == table.launch_ns) > len(table):
        yield "rows start when their launches do, so starts are those of the queue"
    elif why := rounded(starts, lengths):
        yield why


def rounded(starts_ns: Int64, lengths_ns: Int64) -> str | None:
    """Return whether starts or lengths, and not both, are multiples of what is much coarser than the others, and no
    matter of rounding beside the mean length.
    """
    starts_ns = starts_ns - starts_ns[0]
    of_starts, of_lengths = int(np.gcd.reduce(starts_ns)), int(np.gcd.reduce(lengths_ns))
    least = DECIDED * float(lengths_ns.mean())
    if of_lengths and of_starts >= max(_COARSE * of_lengths, least) and (lengths_ns % of_starts).any():
        return f"starts are multiples of {of_starts / 1e6:.4g} ms and lengths are not, so starts were rounded"
    if of_starts and of_lengths >= max(_COARSE * of_starts, least) and (starts_ns % of_lengths).any():
        return f"lengths are multiples of {of_lengths / 1e6:.4g} ms and starts are not, so lengths were rounded"
    return None


def by_step(rows: Intervals, chosen: NDArray[np.bool_], *, in_time: bool = False) -> dict[int, float]:
    """Return how many of some rows each step has, or how many ns they lasted, and all together (`WHOLE`)."""
    steps, of_step = np.unique(rows.step[chosen], return_inverse=True)
    sums = np.bincount(of_step, np.maximum(rows.end_ns - rows.start_ns, 0)[chosen] if in_time else None)
    return dict(zip(steps.tolist(), sums.tolist(), strict=True)) | {WHOLE: sums.sum()}


def skipped(trace: Trace, counted: Int64 | None) -> Iterator[Gap]:
    """Yield rows that the numbers of others leave out, where most follow one another: those of a group's collectives,
    and of dispatches, count. They are of a step between their neighbours that has fewer rows than others; rows without
    a number may be them. Neighbours farther apart than `PAUSE_NS` have a pause of the recording between them.
    """
    rows, marks = trace.intervals, trace.windows
    window = np.maximum(np.searchsorted(marks.start_ns, rows.start_ns, side="right") - 1, 0)
    sends = (rows.cls == IntervalClass.COMM) & ~np.isin(rows.kind, (KIND_CODE["send"], KIND_CODE["recv"]))
    series: list[tuple[NDArray[np.bool_], Int64, NDArray[np.int32], tuple[str, ...], str]] = [
        (sends, rows.seq, rows.group, LANES, "collectives of a group")
    ]
    if counted is not None:
        kernels = counted != NULL
        series.append((kernels, counted, np.zeros_like(rows.group), (COMPUTE, COMM), "dispatches"))
    for chosen, number, group, lanes, what in series:
        numbered = np.flatnonzero(chosen & (number != NULL))
        counts = look_up(marks.step, *np.unique(rows.step[chosen], return_counts=True)).clip(0)
        steps, weight, missing = list[int](), list[float](), 0
        for own in Groups(group[numbered]).parts(numbered):
            own = own[np.unique(number[own], return_index=True)[1]]
            apart_ns = np.abs(np.diff(rows.start_ns[own]))
            holes = np.flatnonzero((np.diff(number[own]) > 1) & (apart_ns < PAUSE_NS))
            if len(holes) > len(own) / 2:  # most do not follow one another, so these numbers do not count the rows
                continue
            for before, behind in zip(own[holes].tolist(), own[holes + 1].tolist(), strict=True):
                first, last = sorted((int(window[before]), int(window[behind])))
                among = np.arange(first, min(last + 1, len(marks)))
                short = among[counts[among] < counts.max(initial=0)]
                if not len(short) and len(among) and np.ptp(marks.step[among]) <= 1:  # beside each other, not a pause
                    short = among
                steps += marks.step[short].tolist() or [NULL]
                between = int(number[behind] - number[before]) - 1
                weight += [float(between)] * max(len(short), 1)
                missing += between
        if missing > np.count_nonzero(chosen) - len(numbered):
            why = f"numbers of {what} leave some out, which have no row"
            yield from lost(why, lanes, np.array(steps), np.array(weight), by_step(rows, chosen))


def incomplete(trace: Trace, why: str) -> tuple[Gap, ...]:
    """Return what a trace lacks that says so itself, or is cut off: of each lane the windows that have fewer of its
    rows than another, and the whole.
    """
    gaps = list[Gap]()
    for lane, cls in LANE_CLASSES.items():
        own = by_step(trace.intervals, trace.intervals.cls == cls)
        most = max((own.get(step, 0) for step in trace.windows.step.tolist()), default=0)
        short = [step for step in trace.windows.step.tolist() if own.get(step, 0) < most]
        gaps += [Gap(lane, why, step) for step in (WHOLE, *short)]
    return tuple(gaps)


def unrecorded(trace: Trace) -> Trace:
    """Return the trace with gaps of steps in which nothing was recorded, and of those beside them, in which the
    recording began or ended.
    """
    trace = _without_pieces(trace)
    rows, marks = trace.intervals, trace.windows
    if not len(marks) or not len(rows):
        return trace
    steps = np.argsort(marks.start_ns, kind="stable")
    order = np.argsort(rows.start_ns, kind="stable")
    reach = np.maximum.accumulate(rows.end_ns[order])
    before = np.searchsorted(rows.start_ns[order], marks.end_ns[steps])  # rows that start before a step ends
    ran = (before > 0) & (reach[np.maximum(before - 1, 0)] > marks.start_ns[steps])
    recorded = (ran & (not trace.of_launch)) | np.isin(marks.step[steps], rows.step)
    within = rows.start_ns.max() - rows.start_ns.min()
    (only,) = np.flatnonzero(recorded) if recorded.sum() == 1 else (0,)
    if len(marks) >= FEWEST and recorded.sum() == 1 and _MUCH * within < (marks.end_ns - marks.start_ns)[steps[only]]:
        why = f"all rows lie in a small part of one of {len(marks)} steps: their times or those of the steps are wrong"
        return replace(trace, windows=NO_WINDOWS, gaps=(*trace.gaps, *lacking(why, *LANES)))
    if not recorded.any() and {gap.lane for gap in trace.gaps if gap.step in marks.step and not gap.seen} == {*LANES}:
        return trace  # the device's clock is not the host's: which steps its rows are of is not known, but how long
    if not recorded.any():
        note = f"{trace.path}: nothing was recorded in any step: the whole trace is measured"
        return replace(trace, windows=NO_WINDOWS, notes=(*trace.notes, note))
    beside = recorded & ~(np.append(True, recorded[:-1]) & np.append(recorded[1:], True))
    lacking_in = dict(_lacking(trace, steps, recorded)) if not trace.of_launch else {}
    missing = int((~recorded).sum())
    ended, begun = marks.end_ns[steps][:-1], marks.start_ns[steps][1:]
    unmarked = (np.diff(marks.step[steps]) > 1) & (begun - ended < PAUSE_NS)
    unmarked &= np.searchsorted(rows.start_ns[order], ended) == np.searchsorted(rows.start_ns[order], begun)
    missing += int((np.diff(marks.step[steps]) - 1)[unmarked].sum())
    gaps = [Gap(lane, f"nothing was recorded in {missing} steps", WHOLE) for lane in LANES if missing]
    gaps += [Gap(lane, "some steps lack rows that others have", WHOLE) for lane in lacking_in]
    for lane, lacks in lacking_in.items():
        why = "this step lacks rows that others have: it did less, or some were lost"
        gaps += [Gap(lane, why, number) for number in marks.step[steps[lacks]].tolist()]
    for chosen, why, seen in (
        (~recorded, "nothing was recorded in this step", False),
        (beside, "the recording began or ended in this step", True),
    ):
        numbers = marks.step[steps[chosen]].tolist()
        gaps += [Gap(lane, why, number, seen=seen) for number in numbers for lane in LANES]
    return replace(trace, gaps=(*trace.gaps, *gaps))


def _without_pieces(trace: Trace) -> Trace:
    """Return the trace without its first and last step where the recording, and the mark with it, began or ended within
    them: all others have about as many rows, and these fewer, and are shorter than any.
    """
    marks, rows = trace.windows, trace.intervals
    if len(marks) < FEWEST or trace.of_launch:
        return trace
    counts = look_up(marks.step, *np.unique(rows.step, return_counts=True)).clip(0)
    length, pieces = marks.end_ns - marks.start_ns, np.zeros(len(marks), bool)
    for edge, others in ((0, slice(1, None)), (-1, slice(-1)), (0, slice(1, -1)), (-1, slice(1, -1))):
        alike = len(own := counts[others]) > 1 and own.min() >= (1 - EDGES) * own.max()
        shorter = length[edge] < (1 - EDGES) * length[others].min()
        pieces[edge] |= alike and shorter and 0 < counts[edge] < (1 - EDGES) * own.min()
    if not pieces.any():
        return trace
    gone = marks.step[pieces].tolist()
    note = f"{trace.path}: the recording began or ended within step {', '.join(map(str, gone))}, which is left out"
    table = replace(rows, step=np.where(np.isin(rows.step, gone), NULL, rows.step))
    kept = windows(marks.step[~pieces], marks.start_ns[~pieces], marks.end_ns[~pieces])
    return replace(trace, intervals=table, windows=kept, notes=(*trace.notes, note))


def _lacking(trace: Trace, steps: Int64, recorded: NDArray[np.bool_]) -> Iterator[tuple[str, NDArray[np.bool_]]]:
    """Yield the lanes in which some of the steps, in order, lack rows that two or more have, all equally: by their
    names, and the time that these take. A step that has as much instead in some lane is of another sort, and so are
    several that lack the same between others, as where gradients are accumulated. Where half lack some names, and none
    lacks others, of which as large a loss would have left some out, the work varies: experts get unlike many tokens.
    Nothing is said of communication where NCCL's kernels and gloo's calls were recorded: a step may use either.
    """
    rows = trace.intervals.take(operations(trace.intervals).first)
    index = look_up(rows.step, trace.windows.step[steps], np.arange(len(steps)))
    rows, index = rows.take((index != NULL) & (rows.name != NULL)), index[(index != NULL) & (rows.name != NULL)]
    if not len(rows) or np.count_nonzero(recorded) < FEWEST:
        return
    work = Groups(rows.cls, rows.name)
    length = np.maximum(rows.end_ns - rows.start_ns, 0)
    by_length = np.lexsort((length, work.of_row))
    usual_ns = length[by_length][work.starts + work.sizes // 2]
    pairs = Groups(work.of_row, index)
    code, step, count = work.of_row[pairs.first], index[pairs.first], pairs.sizes
    by_count = np.lexsort((count, code))
    last = np.cumsum(np.bincount(code, minlength=len(work))) - 1
    twice = np.append(False, np.diff(code[by_count]) == 0)[last]
    usual = np.where(twice, count[by_count][last - 1], 0)  # two steps have so many, or more
    had = np.minimum(count, usual[code])
    had_ns = np.bincount(step, had * usual_ns[code] * (1.0 + code), len(steps))  # weighted by name, to tell steps apart
    of_host = rows.stream[rows.cls == IntervalClass.COMM] == NULL
    two_backends = of_host.any() and not of_host.all()
    lanes, of_sort = list[tuple[str, NDArray[np.bool_], NDArray[np.bool_]]](), recorded.copy()
    in_all = np.bincount(code, count >= usual[code], len(work)) >= np.count_nonzero(recorded)
    for lane, cls in LANE_CLASSES.items():
        weight_ns = np.where(rows.cls[work.first] == cls, usual_ns, 0)
        total = float((usual * weight_ns).sum())
        kept_ns, more_ns = (np.bincount(step, each * weight_ns[code], len(steps)) for each in (had, count - had))
        lacks = total - kept_ns > DECIDED * total
        vary = (rows.cls[work.first] == cls) & (usual > 0) & ~in_all
        kept = had[vary[code]].sum() / max(usual[vary].sum() * np.count_nonzero(recorded), 1)
        steady = usual[in_all & (rows.cls[work.first] == cls)].sum() * np.count_nonzero(recorded)
        if 2 * np.count_nonzero(lacks & recorded) >= np.count_nonzero(recorded) and kept**steady < DECIDED:
            continue
        of_sort &= ~(lacks & (more_ns >= total - kept_ns))  # what was lost has nothing in its place
        if not (two_backends and cls == IntervalClass.COMM):
            lanes.append((lane, lacks, more_ns <= DECIDED * total))
    for lane, lacks, no_more in lanes:
        lacks &= of_sort
        few, full = np.flatnonzero(lacks), recorded & ~lacks & no_more
        known = lacks[recorded]
        together = (known[0] or known[-1]) and np.count_nonzero(np.diff(known)) == 1
        alike = len(few) and np.ptp(had_ns[few]) <= DECIDED * had_ns.max()
        if full.sum() > 1 and len(few) and (together or (full.sum() >= FEWEST if len(few) == 1 else not alike)):
            yield lane, lacks
