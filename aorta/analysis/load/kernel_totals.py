"""Sums up kernels by name, matrix products by shape, gaps between kernels on a stream, and hardware counters.

Two parts. *Totals*: the interval table of one trace gives rows per rank and device (W15: devices are never merged).
What a trace does not hold is an empty list with a reason, or None inside a row. *Derived counters*: occupancy and CU
utilisation from raw counters of rocprofv3, where it was not asked for them.

    with_derived(counters, agents) -> the same counters and, per kernel, what follows from them; and what is missing

The formulas are those of rocprofiler-sdk, `counter_defs.yaml`, under its names. Its CSV has the sum of a counter over
all its instances (`generateCSV.cpp`); a formula that takes the largest of one instance per XCC can be computed from it
only where there is one XCC.

Must not: invent a shape, a launch or a counter, guess what a device is, or replace a value that rocprofv3 gave.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from aorta.analysis.documents.traces import CounterEntry, GemmEntry, KernelClass, KernelTotalEntry, StreamGapsEntry
from aorta.analysis.load.gemm_shapes import Gemms
from aorta.analysis.load.interval_table import (
    NULL,
    CounterValues,
    IntervalClass,
    Intervals,
    Trace,
    covered_ns,
    operations,
    places,
)
from aorta.timeline import arrays
from aorta.timeline.arrays import Int64

_KERNELS: Final = (IntervalClass.COMPUTE, IntervalClass.COMM, IntervalClass.COPY, IntervalClass.UNKNOWN)
NO_SHAPES: Final = "unknown: {format} does not write shapes: record with torch.profiler and record_shapes=True"
NO_PRODUCTS: Final = "none among the host's operators"
UNSHAPED: Final = "{count} without Input Dims of two factors: record with record_shapes=True"
UNLINKED: Final = "{count} of known shape without a kernel in the trace"
NO_STREAMS: Final = "none: the work of a CPU runs on threads, which nothing launches"
NO_COUNTERS: Final = "none beside the kernels: rocprofv3 --pmc writes <pid>_counter_collection.csv"
COUNTERS_UNJOINED: Final = "no value of a hardware counter has the dispatch id of a kernel"
NO_LAUNCHES: Final = "no launch of its kernels is known"


def kernel_totals(table: Intervals) -> list[KernelTotalEntry]:
    """Return all kernels, copies and communication, those of unknown class too, the largest total of a device first; on
    a CPU the self time of operators. `std_ms` is the sample standard deviation, None of a single one. `share` is of the
    summed time of all kernels on the device, which may run at the same time: shares add up to 1.
    """
    found = []
    for rank, device, here in _devices(table):
        whole = operations(here)
        length = whole.total(here.end_ns - here.start_ns)
        total = float(length.sum())
        rows = [
            KernelTotalEntry(
                rank=rank,
                device=device,
                name=here.names[name] if name != NULL else "",
                cls=cast(KernelClass, IntervalClass(cls).name.lower()),
                count=len(own),
                share=float(length[own].sum()) / total if total else 0.0,
                **_times(length[own]),
                min_ms=float(length[own].min()) / 1e6,
                max_ms=float(length[own].max()) / 1e6,
            )
            for (name, cls), own in _groups(here.name[whole.first], here.cls[whole.first])
        ]
        found += sorted(rows, key=lambda row: (-row.total_ms, row.name))
    return found


def gemm_rates(trace: Trace) -> tuple[list[GemmEntry], str | None]:
    """Return the matrix products by shape, the largest total of a device first; and what is missing of them. A product
    lasts as long as the kernels of its operator together; `tflops` is 2 x batch x m x n x k / `mean_ms`, in 1e12
    operations per second.
    """
    gemms = trace.gemms
    if gemms is None:
        return [], NO_SHAPES.format(format=trace.format)
    if not len(gemms.origin) + gemms.unknown:
        return [], NO_PRODUCTS
    missing = [UNSHAPED.format(count=gemms.unknown)] if gemms.unknown else []
    if gemms.lasted_ns is not None:
        own = trace.ranks[0]
        return _rates(None if own == NULL else own, None, gemms, gemms.shape, gemms.lasted_ns), "; ".join(
            missing
        ) or None
    found: list[GemmEntry] = []
    linked = 0
    for rank, device, here in _devices(trace.intervals):
        rows = here.take((here.cls == IntervalClass.COMPUTE) & np.isin(here.origin, gemms.origin))
        origin, product = np.unique(rows.origin, return_inverse=True)
        lasted = np.zeros(len(origin), np.int64)
        np.add.at(lasted, product, rows.end_ns - rows.start_ns)
        linked += len(origin)
        found += _rates(rank, device, gemms, gemms.shape[np.searchsorted(gemms.origin, origin)], lasted)
    if linked < len(gemms.origin):
        missing.append(UNLINKED.format(count=len(gemms.origin) - linked))
    return found, "; ".join(missing) or None


def _rates(rank: int | None, device: int | None, gemms: Gemms, shape: Int64, lasted: Int64) -> list[GemmEntry]:
    found = []
    for (code,), own in _groups(shape):
        gemm, times = gemms.shapes[code], _times(lasted[own])
        rate = gemm.flops * len(own) / (times["total_ms"] * 1e9) if times["total_ms"] else None
        found.append(GemmEntry(rank, device, *gemm, count=len(own), **times, tflops=rate))
    return sorted(found, key=lambda row: -row.total_ms)


def stream_gaps(trace: Trace) -> tuple[list[StreamGapsEntry], str | None]:
    """Return the gaps of every stream, the busiest stream of a device first; and why there are none. Copies count as
    kernels. `gaps_known` of the `gaps` end with a kernel whose launch is known; of those `launch_bound` ended with a
    kernel whose launch call began after the kernel before it had ended: the device waited for the host.
    `launch_bound_ms` is the whole length of these gaps.
    """
    if trace.platform == "cpu":
        return [], NO_STREAMS
    found: list[StreamGapsEntry] = []
    for rank, device, here in _devices(trace.intervals):
        on_stream = here.take((here.stream != NULL) & (here.end_ns > here.start_ns))
        rows = [_gaps(rank, device, stream, on_stream.take(own)) for (stream,), own in _groups(on_stream.stream)]
        found += sorted(rows, key=lambda row: (-row.busy_ms, row.stream))
    return found, None if found else "none: the trace names no streams"


def counter_means(trace: Trace) -> tuple[list[CounterEntry], str | None]:
    """Return the hardware counters by kernel name, by total time of the kernels; and why there are none, or not all. A
    mean is over the kernels that have the counter, in its own unit. `comm_share` is the share of these kernels' time
    during which communication ran; None of communication itself, and where communication was not fully observed.
    `derived_from`: the raw counters it was derived from (`derived_counters`); None where the tool gave it.
    """
    counters = trace.hardware_counters
    if counters is None:
        return [], NO_COUNTERS
    order = np.argsort(counters.origin, kind="stable")
    origin, counter, value = counters.origin[order], counters.counter[order], counters.value[order]
    found: list[CounterEntry] = []
    for rank, device, here in _devices(trace.intervals):
        comm = arrays.merge(here.take(here.cls == IntervalClass.COMM).spans)
        length, hidden = here.end_ns - here.start_ns, covered_ns(here.spans, comm)
        first, last = np.searchsorted(origin, here.origin), np.searchsorted(origin, here.origin, side="right")
        last = np.where(here.origin == NULL, first, last)
        row = np.repeat(np.arange(len(here)), last - first)
        at = np.concatenate([np.zeros(0, np.int64), *map(np.arange, first[last > first], last[last > first])])
        rows = []
        for (name, code), own in _groups(here.name[row], counter[at]):
            values, kernels = value[at[own]], np.unique(row[own])
            lasted = int(length[kernels].sum())
            of_comm = bool((here.cls[kernels] == IntervalClass.COMM).any())
            made = CounterEntry(
                rank=rank,
                device=device,
                name=here.names[name] if name != NULL else "",
                counter=counters.names[code],
                count=len(values),
                mean=float(values.mean()),
                min=float(values.min()),
                max=float(values.max()),
                comm_share=None if of_comm or not lasted or trace.unseen else float(hidden[kernels].sum()) / lasted,
                derived_from=counters.derived_from.get(counters.names[code]),
            )
            rows.append((-lasted, made))
        found += [made for _, made in sorted(rows, key=lambda each: (each[0], each[1].name, each[1].counter))]
    return found, ("; ".join(counters.missing) or None) if found else COUNTERS_UNJOINED


def _devices(table: Intervals) -> Iterator[tuple[int | None, int | None, Intervals]]:
    """Yield the rank, device and kernels of each device."""
    table = table.take(np.isin(table.cls, _KERNELS))
    for rank, device, rows in places(table):
        yield None if rank == NULL else rank, None if device == NULL else device, table.take(rows)


def _groups(*columns: NDArray[Any]) -> Iterator[tuple[tuple[int, ...], Int64]]:
    """Yield each distinct set of values with the indices of its rows."""
    if not len(columns[0]):
        return
    order = np.lexsort(columns[::-1])
    differs = np.any([np.diff(column[order]) != 0 for column in columns], axis=0)
    for own in np.split(order, np.flatnonzero(differs) + 1):
        yield tuple(int(column[own[0]]) for column in columns), own


def _times(length: Int64) -> dict[str, Any]:
    return {
        "total_ms": float(length.sum()) / 1e6,
        "mean_ms": float(length.mean()) / 1e6,
        "std_ms": float(length.std(ddof=1)) / 1e6 if len(length) > 1 else None,
    }


def _gaps(rank: int | None, device: int | None, stream: int, rows: Intervals) -> StreamGapsEntry:
    order = np.argsort(rows.start_ns, kind="stable")
    start, end, launch = rows.start_ns[order], rows.end_ns[order], rows.launch_ns[order]
    before = np.maximum.accumulate(end)[:-1]  # rows of one queue may overlap
    gap = np.maximum(start[1:] - before, 0)
    between = gap > 0
    known = between & (launch[1:] != NULL)
    bound = known & (launch[1:] > before)
    known_all = bool(known.any()) or not between.any()
    return StreamGapsEntry(
        rank=rank,
        device=device,
        stream=stream,
        kernels=len(start),
        busy_ms=float(end.max() - start[0] - gap.sum()) / 1e6,
        gaps=int(between.sum()),
        gap_ms=float(gap.sum()) / 1e6,
        gaps_known=int(known.sum()),
        launch_bound=int(bound.sum()) if known_all else None,
        launch_bound_ms=float(gap[bound].sum()) / 1e6 if known_all else None,
        reason=None if known_all else NO_LAUNCHES,
    )


_CDNA: Final = ("gfx90a", "gfx940", "gfx941", "gfx942", "gfx950")
_RDNA: Final = ("gfx1010", "gfx1030", "gfx1031", "gfx1032")
_RDNA_3: Final = ("gfx1100", "gfx1101", "gfx1102")
_LARGEST: Final = frozenset({"GRBM_GUI_ACTIVE", "GRBM_COUNT"})
"""Cycles, counted by each XCC; formulas take the largest."""
_SLOTS: Final = 32
"""Waves a CU can hold, in the formulas of `OccupancyPercent`."""


class Formula(NamedTuple):
    """`metric` = `factor` x counter `of` / counter `by`, and by the number of CUs where it is `per_cu`."""

    metric: str
    architectures: tuple[str, ...]
    factor: float
    of: str
    by: str
    per_cu: bool


FORMULAS: Final = (
    # Of the cycles of all CUs the share in which a CU was busy, 0 to 1.
    Formula("SIMD_UTILIZATION", _CDNA, 1, "SQ_BUSY_CU_CYCLES", "GRBM_COUNT", True),
    # Percent; on CDNA SQ_WAVE_CYCLES counts every fourth cycle.
    Formula("OccupancyPercent", _CDNA, 400 / _SLOTS, "SQ_WAVE_CYCLES", "GRBM_GUI_ACTIVE", True),
    Formula("OccupancyPercent", _RDNA + _RDNA_3, 100 / _SLOTS, "SQ_WAVE_CYCLES", "GRBM_GUI_ACTIVE", True),
    # Waves. On CDNA both need SQ_LEVEL_WAVES added up cycle by cycle, which no raw counter in the CSV is.
    Formula("MeanOccupancyPerCU", _RDNA_3, 1, "SQ_WAVE_CYCLES", "GRBM_GUI_ACTIVE", True),
    Formula("MeanOccupancyPerActiveCU", _RDNA_3, 1, "SQ_WAVE_CYCLES", "SQ_BUSY_CYCLES", False),
)


@dataclass(frozen=True)
class Agent:
    """A GPU in rocprofv3's `agent_info`: its architecture, and how many XCCs and CUs it has; None where not stated. The
    number of CUs is SIMDs / SIMDs per CU, as in rocprofiler-sdk (`CU_NUM`).
    """

    name: str
    xccs: int | None
    cus: float | None


def with_derived(counters: CounterValues, agents: Sequence[Agent]) -> CounterValues:
    """Add what `FORMULAS` gives for each kernel that has both counters, except where rocprofv3 gave it.

    Args:
        agents: the GPUs of the machine. Which of them a kernel ran on is not needed while they are alike.
    """
    architectures = {each.name for each in agents}
    wanted = [each for each in FORMULAS if each.of in counters.names and each.metric not in counters.names]
    known = [each for each in wanted if not agents or architectures & {*each.architectures}]
    missing: dict[str, dict[str, None]] = defaultdict(dict)
    for formula in known:
        if (why := _why_not(formula, counters, agents)) is None:
            counters = _added(counters, formula, agents[0])
        else:
            missing[why][formula.metric] = None
    if wanted and not known:
        metrics = dict.fromkeys(each.metric for each in wanted)
        missing[f"rocprofiler-sdk has no formula for {', '.join(sorted(architectures))}"] = metrics
    return replace(
        counters, missing=tuple(f"{', '.join(metrics)} not derived: {why}" for why, metrics in missing.items())
    )


def _why_not(formula: Formula, counters: CounterValues, agents: Sequence[Agent]) -> str | None:
    """Return why a formula cannot be computed; None: it can."""
    if not agents:
        return "no agent_info.csv beside the counters says what device it is"
    agent, *others = dict.fromkeys(agents)
    if others:
        return f"the GPUs of agent_info.csv are not alike ({', '.join(each.name for each in (agent, *others))})"
    if formula.by not in counters.names:
        return f"{formula.by} was not collected with {formula.of}"
    if formula.per_cu and not agent.cus:
        return "agent_info.csv has no number of compute units"
    if formula.by in _LARGEST and agent.xccs != 1:
        count = "an unknown number of" if agent.xccs is None else agent.xccs
        return f"it takes the largest {formula.by} of {count} XCCs, and the CSV has their sum; name it behind --pmc"
    return None


def _column(counters: CounterValues, name: str) -> tuple[Int64, NDArray[np.float64]]:
    """Return kernels that have this counter, each once, and its values."""
    rows = counters.counter == counters.names.index(name)
    return counters.origin[rows], counters.value[rows]


def _added(counters: CounterValues, formula: Formula, agent: Agent) -> CounterValues:
    """Add a value of the metric for each kernel that has both counters and a divisor that is not 0."""
    (of_kernels, of), (by_kernels, by) = (_column(counters, name) for name in (formula.of, formula.by))
    kernels, left, right = np.intersect1d(of_kernels, by_kernels, assume_unique=True, return_indices=True)
    of, by = of[left], by[right]
    divisible = by > 0
    values = formula.factor * of[divisible] / by[divisible] / (agent.cus if formula.per_cu and agent.cus else 1)
    return replace(
        counters,
        origin=np.append(counters.origin, kernels[divisible]),
        counter=np.append(counters.counter, np.full(int(divisible.sum()), len(counters.names))),
        value=np.append(counters.value, values),
        names=(*counters.names, formula.metric),
        derived_from={**counters.derived_from, formula.metric: f"{formula.of}, {formula.by}"},
    )
