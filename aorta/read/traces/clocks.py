"""Whether the times of a trace are possible: its rows against its calls, and lengths against what devices and hosts
can do.

`wrong_clocks` says for all formats why the times of a device are not on the clock of its host; `refuse_other_units`
raises where all times are in another unit. Must not: mend a time, or know a format.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from aorta.errors import InputError
from aorta.read.frames import Groups
from aorta.read.ledger import COMM, LANES, WHOLE, Gap, lacking
from aorta.read.traces.interval_table import KIND_CODE, NULL, IntervalClass, Intervals, Trace, by_device
from aorta.timeline.arrays import Int64
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
    return (*_off_the_host(trace, table), *_past_waits(trace, table), *_not_starts(table), *_idle_with_work(trace))


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
    if _least_delays_apart_ns(table) > off_ns / 2:  # not by the same everywhere
        windows_of.append(WHOLE)
    why += ", so clocks or launches are wrong"
    yield from (Gap(lane, why, step, seen=False) for step in windows_of for lane in LANES)


def _least_delays_apart_ns(table: Intervals) -> int:
    """Return how much the least time from a launch to its start differs between streams and halves of the recording:
    clocks of one pace, apart by the same everywhere, leave lengths and what overlaps as they are.
    """
    behind = table.launch_ns > np.median(table.launch_ns)
    return int(np.ptp(Groups(table.device, table.stream, behind).reduce(np.minimum, table.start_ns - table.launch_ns)))


def _past_waits(trace: Trace, rows: Intervals) -> Iterator[Gap]:
    """Yield all lanes where rows end after a call has returned that waited for them: the device's clock is not the one
    of the host, or jumped. Calls of other threads may have been under way, each with one row.
    """
    waits = trace.device_waits
    if waits is None or not len(waits.start) or len(np.unique(rows.device)) != 1:  # whose device it was is not known
        return
    order = np.argsort(waits.start, kind="stable")
    first = np.searchsorted(waits.start[order], rows.launch_ns)
    end = np.append(waits.end[order], np.iinfo(np.int64).max)[first]
    late_ns = np.maximum(rows.end_ns - end, 0)[rows.end_ns > end]
    if np.count_nonzero(late_ns > ORDER_NS) > OTHERS:
        why = f"rows end up to {late_ns.max() / 1e6:.4g} ms after a call that waited for them, so clocks are wrong"
        yield from lacking(why, *LANES, seen=False)


def _idle_with_work(trace: Trace) -> Iterator[Gap]:
    """Yield all lanes where launches wait ever longer for a device that does nothing meanwhile: its clock goes faster
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
            yield from lacking(
                f"{why}{later_ns / 1e6:.4g} ms longer at the end: its clock is wrong", *LANES, seen=False
            )


def _not_starts(table: Intervals) -> Iterator[Gap]:
    """Yield all lanes where starts are not when rows began: they are when the calls were made, or rounded."""
    starts, lengths = table.start_ns, np.maximum(table.end_ns - table.start_ns, 0)
    if len(table) < _ENOUGH:
        return
    if 2 * np.count_nonzero(starts == table.launch_ns) > len(table):
        yield from lacking("rows start when their launches do, so starts are those of the queue", *LANES, seen=False)
    elif why := rounded(starts, lengths):
        yield from lacking(why, *LANES, seen=False)


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
