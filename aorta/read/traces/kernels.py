"""What a report shows of the kernels of traces: totals by name, slowdowns, and gaps on a stream.

`kernel_facts(trace)` gives one trace's, small enough to be sent between processes; `entries` joins those of all traces.
All rows are per rank and device (W15: devices are never merged). What a trace does not hold is an empty list with a
reason, or None inside a row.

*Slowdowns* compare kernels of one name, alone and while communication runs. That is fair only where kernels of one name
do the same work; matrix products of two shapes may share a name.

Must not: leave a row out without saying how many, or state a slowdown that rests on a few kernels.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple, cast

import msgspec
import numpy as np

from aorta.documents.kernels import KernelClass, KernelEntries, KernelTotalEntry, SlowdownEntry, StreamGapsEntry
from aorta.read.frames import Groups
from aorta.read.traces.interval_table import NULL, IntervalClass, Intervals, Trace, by_device, operations
from aorta.timeline.arrays import IntervalArray, covered_ns, measure, merge, subtract
from aorta.timeline.classes import COMPUTE

SHOWN_ROWS: Final = 500
"""Rows of a kind that are kept of one trace."""
NO_STREAMS: Final = "none: the work of a CPU runs on threads, which nothing launches"


class KeptRows(NamedTuple):
    """Rows of one kind. `reason`: what the trace lacks of them. `left_out`: how many there are beyond `SHOWN_ROWS`."""

    rows: Sequence[Any]
    reason: str | None = None
    left_out: int = 0


class KernelFacts(NamedTuple):
    """The kernels of one trace: entries of `documents.kernels`, by the fields of `KernelEntries` and `TraceEntries`.
    `total_ms`: of all kernels, those that are not kept too.
    """

    totals: KeptRows
    gaps: KeptRows
    slowdowns: KeptRows
    total_ms: float = 0.0


def kernel_facts(trace: Trace) -> KernelFacts:
    """Sum up the kernels of a trace of `health.check_rows`."""
    unobserved = (gap.why for gap in trace.gaps if gap.lane == COMPUTE and not gap.seen and gap.step is None)
    unseen = next(unobserved, None)
    if unseen is not None and (trace.intervals.device == NULL).all():  # rows of the host, none of the device
        nothing = KeptRows((), unseen)
        return KernelFacts(nothing, nothing, KeptRows(()))
    totals = kernel_totals(trace)
    return KernelFacts(
        totals=_kept(totals),
        gaps=_kept(*stream_gaps(trace)),
        # Without computation in the table, hidden communication and slowdowns cannot be computed.
        slowdowns=_kept([] if unseen is not None else slowdowns(trace)),
        total_ms=sum(row.total_ms for row in totals),
    )


def _kept(rows: Sequence[Any], reason: str | None = None) -> KeptRows:
    """Select the rows that are kept, in their order: those of most time on all devices; without times, the first."""
    kept = rows
    if len(rows) > SHOWN_ROWS and hasattr(rows[0], "total_ms"):
        least = sorted((row.total_ms for row in rows), reverse=True)[SHOWN_ROWS - 1]
        kept = [row for row in rows if row.total_ms >= least]
    return KeptRows(kept[:SHOWN_ROWS], reason, max(len(rows) - SHOWN_ROWS, 0))


def entries(facts: Iterable[KernelFacts]) -> KernelEntries:
    """Return the kernels of all traces. `by_name` is `totals` of all devices together, without rank and device.
    `reasons`: kind of rows -> what traces lack of them.
    """
    facts = list(facts)
    kept = {kind: [cast(KeptRows, getattr(device, kind)) for device in facts] for kind in KernelFacts._fields[:-1]}
    totals = _of_devices([device.totals.rows for device in facts])
    reasons = {kind: list(dict.fromkeys(part.reason for part in parts if part.reason)) for kind, parts in kept.items()}
    left_out = {kind: sum(part.left_out for part in parts) for kind, parts in kept.items()}
    return KernelEntries(
        by_name=by_name(totals, sum(device.total_ms for device in facts)),
        totals=totals,
        gaps=[row for device in facts for row in device.gaps.rows],
        reasons={kind: stated for kind, stated in reasons.items() if stated},
        left_out={kind: count for kind, count in left_out.items() if count},
    )


def _of_devices(parts: Sequence[Sequence[KernelTotalEntry]]) -> list[KernelTotalEntry]:
    """Return the totals of each device, over the windows of a rank; a trace of unknown rank is a device of its own."""
    alike: dict[tuple[object, ...], list[KernelTotalEntry]] = defaultdict(list)
    whole_ms: dict[tuple[object, ...], dict[int, float]] = defaultdict(dict)
    for index, rows in enumerate(parts):
        for row in rows:
            device = (row.rank, row.device, index if row.rank is None else None)
            alike[*device, row.name, row.cls].append(row)
            if row.share:
                whole_ms[device].setdefault(index, row.total_ms / row.share)
    totals = []
    for key, own in alike.items():
        windows_ms = whole_ms[key[:3]].values()
        totals.append(own[0] if len(windows_ms) < 2 else _summed(own, sum(windows_ms)))
    return totals


def by_name(rows: Iterable[KernelTotalEntry], total_ms: float) -> list[KernelTotalEntry]:
    """Return kernels of one name and class on all devices as one row, the largest total first; `total_ms` is of all
    kernels of all traces, which shares are of.
    """
    alike: dict[tuple[str, str], list[KernelTotalEntry]] = defaultdict(list)
    for row in rows:
        alike[row.name, row.cls].append(row)
    totals = [_summed(own, total_ms, rank=None, device=None) for own in alike.values()]
    return sorted(totals, key=lambda row: (-row.total_ms, row.name))


def _summed(rows: Sequence[KernelTotalEntry], whole_ms: float, **changed: Any) -> KernelTotalEntry:
    """Return rows of one name as one; its share is of `whole_ms`."""
    count, total_ms = sum(row.count for row in rows), sum(row.total_ms for row in rows)
    mean_ms = total_ms / count
    # Squares about the common mean are those about each mean, and those of the means.
    squares = sum((row.count - 1) * (row.std_ms or 0.0) ** 2 + row.count * (row.mean_ms - mean_ms) ** 2 for row in rows)
    return msgspec.structs.replace(
        rows[0],
        count=count,
        total_ms=total_ms,
        mean_ms=mean_ms,
        std_ms=(squares / (count - 1)) ** 0.5 if count > 1 else None,
        min_ms=min(row.min_ms for row in rows),
        max_ms=max(row.max_ms for row in rows),
        share=total_ms / whole_ms if whole_ms else 0.0,
        **changed,
    )


def _devices(trace: Trace) -> Iterator[tuple[int | None, int | None, Intervals]]:
    """Yield the rank, number and rows of each device."""
    rank = None if trace.rank == NULL else trace.rank
    for device, rows in by_device(trace.intervals):
        yield rank, None if device == NULL else device, rows


def kernel_totals(trace: Trace) -> list[KernelTotalEntry]:
    """Return all kernels, copies and communication, those of unknown class too, the largest total of a device first; on
    a CPU the self time of operators. `std_ms` is the sample standard deviation, None of a single one. `share` is of the
    summed time of all kernels on the device, which may run at the same time: shares add up to 1.
    """
    totals = []
    for rank, device, here in _devices(trace):
        whole, names = operations(here), (*here.names, "")  # the last of rows without a name
        length = whole.reduce(np.add, here.end_ns - here.start_ns)
        name, cls, total = here.name[whole.first], here.cls[whole.first], float(length.sum())
        rows = [
            KernelTotalEntry(
                rank=rank,
                device=device,
                name=names[name[own[0]]],
                cls=cast(KernelClass, IntervalClass(cls[own[0]]).name.lower()),
                count=len(own),
                total_ms=float(length[own].sum()) / 1e6,
                mean_ms=float(length[own].mean()) / 1e6,
                std_ms=float(length[own].std(ddof=1)) / 1e6 if len(own) > 1 else None,
                min_ms=float(length[own].min()) / 1e6,
                max_ms=float(length[own].max()) / 1e6,
                share=float(length[own].sum()) / total if total else 0.0,
            )
            for own in Groups(name, cls).rows
        ]
        totals += sorted(rows, key=lambda row: (-row.total_ms, row.name))
    return totals


def stream_gaps(trace: Trace) -> tuple[list[StreamGapsEntry], str | None]:
    """Return the gaps of every stream, the busiest stream of a device first; and why there are none. Copies count as
    kernels. `gaps_known` of the `gaps` end with a kernel whose launch is known; of those `launch_bound` ended with a
    kernel whose launch call began after the kernel before it had ended. `launch_bound_ms` is for how long nothing else
    ran on the device in these gaps: it waited for the host. `host_wait_ms` is the part of it in gaps before which the
    host was still waiting for the device when that kernel ended, and launched after (None where such calls are not
    read): no more than it waited, for without that it would have launched so much sooner.
    """
    waits = trace.host_waits
    if waits is not None:
        order = np.argsort(waits.end, kind="stable")
        never = np.iinfo(np.int64).max  # behind the last wait
        waits = IntervalArray(np.append(waits.start[order], never), np.append(waits.end[order], never))
    if trace.platform == "cpu":
        return [], NO_STREAMS
    gaps_of_streams: list[StreamGapsEntry] = []
    for rank, device, here in _devices(trace):
        work, computing = merge(here.spans), merge(here.take(here.cls == IntervalClass.COMPUTE).spans)
        on_stream = here.take((here.stream != NULL) & (here.end_ns > here.start_ns))
        on_stream = on_stream.take(np.argsort(on_stream.start_ns, kind="stable"))
        of_device = []
        for own in Groups(on_stream.stream).rows:
            rows = on_stream.take(own)
            before = np.maximum.accumulate(rows.end_ns)[:-1]  # rows of one queue may overlap
            gap, launch = np.maximum(rows.start_ns[1:] - before, 0), rows.launch_ns[1:]
            between = gap > 0
            known = between & (launch != NULL)
            bound = known & (launch > before)
            known_all = bool(known.any()) or not between.any()
            idle = gap - covered_ns(IntervalArray(before, before + gap), work)
            waited = np.zeros(len(gap), np.int64)
            if waits is not None:
                first = np.searchsorted(waits.end, before)  # the first wait that ends at or after the kernel's end
                held = bound & (waits.start[first] < before) & (waits.end[first] <= launch)
                waited = np.where(held, np.minimum(idle, waits.end[first] - waits.start[first]), 0)
            compute, comm = (
                merge(rows.take(rows.cls == cls).spans) for cls in (IntervalClass.COMPUTE, IntervalClass.COMM)
            )
            of_device.append(
                StreamGapsEntry(
                    rank=rank,
                    device=device,
                    stream=int(rows.stream[0]),
                    kernels=len(rows),
                    busy_ms=float(rows.end_ns.max() - rows.start_ns[0] - gap.sum()) / 1e6,
                    compute_ms=measure(compute) / 1e6,
                    comm_ms=measure(comm) / 1e6,
                    exposed_ms=measure(subtract(comm, computing)) / 1e6,
                    gaps=int(between.sum()),
                    gap_ms=float(gap.sum()) / 1e6,
                    gaps_known=int(known.sum()),
                    launch_bound=int(bound.sum()) if known_all else None,
                    launch_bound_ms=float(idle[bound].sum()) / 1e6 if known_all else None,
                    host_wait_ms=float(waited.sum()) / 1e6 if known_all and waits is not None else None,
                    reason=None if known_all else "no launch of its kernels is known",
                )
            )
        gaps_of_streams += sorted(of_device, key=lambda row: (-row.busy_ms, row.stream))
    return gaps_of_streams, None if gaps_of_streams else "none: the trace names no streams"


FEWEST: Final = 6
"""Fewest kernels on either side. From 6 on, the range of a sample contains the true median with 95 % confidence (1 -
2^(1-n), the sign test).
"""
_HALF: Final = 2
"""A kernel is `overlapped` if communication covers at least half of it, `alone` if it covers none, else neither."""


def slowdowns(trace: Trace) -> list[SlowdownEntry]:
    """Return all kernels of class compute, in the order of `largest_first`. `slowdown` is overlapped median / alone
    median - 1; `excess_ms` is the difference of the medians times the overlapped kernels: their sum is larger where a
    name has shapes of several sizes. Where they are None, `reason` says why.
    """
    compared: list[SlowdownEntry] = []
    for rank, device, here in _devices(trace):
        comm = merge(here.take(here.cls == IntervalClass.COMM).spans)
        kernels = here.take(here.cls == IntervalClass.COMPUTE)
        whole, names = operations(kernels), (*kernels.names, "")
        name = kernels.name[whole.first]
        length = whole.reduce(np.add, kernels.end_ns - kernels.start_ns)
        hidden = whole.reduce(np.add, covered_ns(kernels.spans, comm))
        alone, overlapped = hidden == 0, (hidden > 0) & (hidden * _HALF >= length)
        for rows in Groups(name).rows:
            free, busy = length[rows[alone[rows]]], length[rows[overlapped[rows]]]
            medians = [float(np.median(side)) / 1e6 if len(side) else None for side in (free, busy)]
            slower = excess_ms = reason = None
            if not len(comm.start):
                reason = "no communication on this device"
            elif len(free) < FEWEST or len(busy) < FEWEST:
                reason = f"{len(free)} alone and {len(busy)} overlapped; at least {FEWEST} of each are needed"
            elif not medians[0]:
                reason = "kernels alone have no length"
            elif medians[1] is not None:
                slower = medians[1] / medians[0] - 1
                excess_ms = len(busy) * (medians[1] - medians[0])
            compared.append(
                SlowdownEntry(
                    rank=rank,
                    device=device,
                    name=names[name[rows[0]]],
                    alone_count=len(free),
                    overlapped_count=len(busy),
                    partly_count=len(rows) - len(free) - len(busy),
                    alone_median_ms=medians[0],
                    overlapped_median_ms=medians[1],
                    slowdown=slower,
                    excess_ms=excess_ms,
                    reason=reason,
                )
            )
    return sorted(compared, key=largest_first)


def largest_first(entry: SlowdownEntry) -> tuple[bool, float, str]:
    """Sort key: the largest excess first. Kernels that were faster under communication follow; those that cannot be
    compared come last, by name.
    """
    return entry.slowdown is None, -(entry.excess_ms or 0.0), entry.name
