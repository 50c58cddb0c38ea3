"""Builds a `Trace` from what all outputs of rocprofv3 have in common: kernels, copies, RCCL calls, markers of a
process.

Times are nanoseconds of CLOCK_BOOTTIME (rocprofiler-sdk: `default_clock_id`), not comparable between machines. Records
come in buffer order, not in time order.

RCCL launches one kernel for every collective (`ncclDevKernel_Generic`), so the name says nothing (W12). A call and its
kernel share a correlation id where the tracer kept it. Otherwise the n-th launching call of a thread is the n-th kernel
of that thread, but only if there are equally many and no kernel started before its call.

Must not: know how a file stores records, or guess: a count that does not match leaves every kernel of that thread
unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from aorta.analysis.load.interval_table import (
    NULL,
    CounterValues,
    IntervalClass,
    Intervals,
    Trace,
    concatenate,
    intervals,
    look_up,
    step_of,
)
from aorta.analysis.load.kernel_classifier import NameClassifier, kind_of, step_windows
from aorta.analysis.load.microseconds import check_devices, check_instants
from aorta.analysis.load.rank_inference import InferredRank
from aorta.timeline.arrays import Int64

_GROUP_START: Final = "ncclGroupStart"
_GROUP_END: Final = "ncclGroupEnd"
_COLLECTIVE: Final = (
    "ncclAllReduce",
    "ncclReduceScatter",
    "ncclAllGather",
    "ncclBroadcast",
    "ncclBcast",
    "ncclReduce",
    "ncclAllToAll",
    "ncclAllToAllv",
    "ncclGather",
    "ncclScatter",
    "ncclSend",
    "ncclRecv",
    "ncclAllReduceWithBias",
)
"""RCCL's calls that launch work (rccl.h); the others (communicators, queries) launch none."""
_KIND: Final = {name: kind_of(name) for name in _COLLECTIVE}


@dataclass(frozen=True)
class _Launch:
    start_ns: int
    kind: int
    correlations: tuple[int, ...]


def _kinds_from_calls(calls: Calls, kernels: Kernels, rows: Int64) -> tuple[NDArray[np.int8], tuple[str, ...]]:
    """Infer the kinds of communication kernels whose names do not tell it.

    Returns:
        The kind of each of `rows` (`NULL` where it stays unknown), and the reasons why some stay unknown.
    """
    kinds = np.full(len(rows), NULL, np.int8)
    if not len(kinds):
        return kinds, ()
    launches = _launches(calls)
    if not any(launches.values()):
        return kinds, ("no RCCL call was traced: record with --rccl-trace to learn which kernel ran which collective",)
    of_id = {ident: each.kind for some in launches.values() for each in some for ident in each.correlations}
    linked = np.zeros(len(kinds), np.bool_)
    for ids in kernels.correlations:
        for at, ident in enumerate(ids[rows].tolist()):
            if not linked[at] and ident in of_id:
                kinds[at], linked[at] = of_id[ident], True
    if linked.any():
        notes = []
        if lost := int((~linked).sum()):
            notes.append(f"{lost} RCCL kernel(s) have no RCCL call in the trace: kind not known")
        if mixed := int((linked & (kinds == NULL)).sum()):
            notes.append(f"{mixed} RCCL kernel(s) ran a group of different collectives: kind not known")
        return kinds, tuple(notes)
    threads, dispatch, start_ns = kernels.thread[rows], kernels.dispatch[rows], kernels.start_ns[rows]
    notes = []
    for thread in np.unique(threads).tolist():
        own = np.flatnonzero(threads == thread)
        order = dispatch[own]
        unique = len(np.unique(order)) == len(own) and NULL not in order
        own = own[np.argsort(order if unique else start_ns[own], kind="stable")]
        launched = launches.get(thread, [])
        if len(launched) != len(own):
            notes.append(
                f"thread {thread}: {len(own)} RCCL kernels for {len(launched)} launching RCCL calls: which is which "
                "is ambiguous, kind not known"
            )
        elif any(int(start_ns[at]) < call.start_ns for at, call in zip(own, launched, strict=True)):
            notes.append(f"thread {thread}: an RCCL kernel started before its call: order not usable, kind not known")
        else:
            kinds[own] = [call.kind for call in launched]
    return kinds, tuple(notes)


def _launches(calls: Calls) -> dict[int, list[_Launch]]:
    """Return launches by thread, in order. A group launches once, at its end; of nested calls the outer counts."""
    found: dict[int, list[_Launch]] = {}
    order = np.lexsort((-calls.end_ns, calls.start_ns, calls.thread))
    depth: dict[int, int] = {}
    inside: dict[int, list[tuple[int, int]]] = {}
    busy_until: dict[int, int] = {}
    for row in order.tolist():
        thread, name = int(calls.thread[row]), calls.texts[row]
        start, end, ident = int(calls.start_ns[row]), int(calls.end_ns[row]), int(calls.correlation[row])
        if end <= busy_until.get(thread, end - 1):
            continue  # nested inside another call, which counts instead
        if name == _GROUP_START:
            depth[thread] = depth.get(thread, 0) + 1
        elif name == _GROUP_END:
            depth[thread] = max(depth.get(thread, 0) - 1, 0)
            grouped = inside.pop(thread, []) if not depth[thread] else []
            if grouped:
                kinds = {kind for kind, _ in grouped}
                kind = kinds.pop() if len(kinds) == 1 else NULL
                ids = (*(each for _, each in grouped), ident)
                found.setdefault(thread, []).append(_Launch(start, kind, ids))
        elif name in _KIND:
            busy_until[thread] = end
            if depth.get(thread, 0):
                inside.setdefault(thread, []).append((_KIND[name], ident))
            else:
                found.setdefault(thread, []).append(_Launch(start, _KIND[name], (ident,)))
    return found


NO_KERNELS: Final = "no kernel dispatches: record with --kernel-trace"
RCCL_API: Final = "RCCL_API"
HIP_API: Final = "HIP_RUNTIME_API"
"""Begin of the domain of HIP calls, which launch kernels; what follows (`_EXT`) differs between versions."""
SERIALISED: Final = (
    "hardware counters were collected, for which kernels run one after the other: times and overlap are not those of a "
    "run without counters"
)
MARKERS: Final = ("MARKER_CORE_API", "MARKER_CORE_RANGE_API")
"""Domains of ROCTx ranges: the first up to ROCm 6.4, the second since 7."""
NO_BYTES: Final = (
    "rocprofv3 does not record the size, the group or the data type of a collective: "
    "bytes and bandwidths are not available"
)


@dataclass(frozen=True)
class Kernels:
    """Kernel dispatches by column. `correlations` are the ids of the call that launched each, then of those around it;
    `name` is an index into `names`, `NULL` where a kernel has none.
    """

    thread: Int64
    device: Int64
    queue: Int64
    stream: Int64
    dispatch: Int64
    correlations: tuple[Int64, ...]
    start_ns: Int64
    end_ns: Int64
    name: Int64
    names: Sequence[str]


@dataclass(frozen=True)
class Copies:
    """Memory copies by column; `bytes` is `NULL` for CSV files, which have no such column."""

    device: Int64
    stream: Int64
    start_ns: Int64
    end_ns: Int64
    name: Int64
    names: Sequence[str]
    bytes: ArrayLike = NULL


@dataclass(frozen=True)
class Calls:
    """API calls or ROCTx ranges of the host by column; `texts` are the functions or the names of the ranges. A mark is
    a range of length 0.
    """

    thread: Int64
    correlation: Int64
    start_ns: Int64
    end_ns: Int64
    texts: Sequence[str]


def trace_of(
    format: str,  # noqa: A002 - the field's name
    path: str,
    placed: InferredRank,
    kernels: Kernels,
    copies: Copies,
    calls: Calls,
    launches: tuple[Int64, Int64],
    marks: Calls,
    classifier: NameClassifier,
    *,
    counters: CounterValues | None = None,
    host: str | None = None,
    copies_observed: bool = True,
    notes: Sequence[str] = (),
) -> Trace:
    """Assemble the trace of one process: classes from names, kinds from names or RCCL calls, steps from markers.

    Args:
        calls: of RCCL.
        launches: correlation ids and starts of the calls of HIP: a kernel has the id of the call that launched it.
        marks: ROCTx ranges.
    """
    for what, times in (("kernel", kernels), ("memory copy", copies), ("RCCL call", calls), ("marker", marks)):
        check_instants(path, what, times.start_ns, times.end_ns)
    check_instants(path, "HIP call", launches[1], launches[1])
    check_devices(path, "kernel", kernels.device)
    check_devices(path, "memory copy", copies.device)
    table, kind_notes, unlinked = _kernel_rows(kernels, calls, launches, classifier)
    rows = concatenate(
        [
            table,
            intervals(
                start_ns=copies.start_ns,
                end_ns=copies.end_ns,
                device=copies.device,
                stream=copies.stream,
                bytes=copies.bytes,
                cls=np.int8(IntervalClass.COPY),
                name=copies.name,
                names=copies.names,
            ),
        ]
    )
    steps, step_notes = step_windows(marks.texts, marks.start_ns, marks.end_ns, placed.rank)
    rank = np.full(len(rows), placed.rank, np.int32)
    rows = replace(rows, rank=rank, step=step_of(rank, rows.start_ns, steps))
    has_comm = bool((rows.cls == IntervalClass.COMM).any())
    return Trace(
        path=path,
        format=format,
        clock="BOOTTIME",
        intervals=rows,
        windows=steps,
        ranks=(placed.rank,),
        world_size=placed.world_size,
        platform="rocm",
        backend="nccl" if has_comm else None,
        host=host,
        counters={"comm_unlinked": unlinked},
        notes=(
            *placed.notes,
            *notes,
            *kind_notes,
            *step_notes,
            *((NO_BYTES,) if has_comm else ()),
            *((SERIALISED,) if counters is not None else ()),
        ),
        copies_observed=copies_observed,
        hardware_counters=counters,
    )


def _kernel_rows(
    kernels: Kernels, calls: Calls, launches: tuple[Int64, Int64], classifier: NameClassifier
) -> tuple[Intervals, tuple[str, ...], int]:
    classes, kinds = classifier.kernels(kernels.names)
    # A kernel whose symbol is missing has no name: its code is NULL, the last entry, and its class is not known.
    classes, kinds = np.append(classes, np.int8(IntervalClass.UNKNOWN)), np.append(kinds, np.int8(NULL))
    cls, kind = classes[kernels.name], kinds[kernels.name]
    unnamed = np.flatnonzero((cls == IntervalClass.COMM) & (kind == NULL))
    inferred, notes = _kinds_from_calls(calls, kernels, unnamed)
    kind[unnamed] = inferred
    # Handle 0 means "no stream known" (rocprofv3 before streams were traced, and null streams): use the queue then.
    stream = kernels.stream if (kernels.stream > 0).any() else kernels.queue
    launched = np.full(len(kernels.start_ns), NULL, np.int64)
    for ids in kernels.correlations:  # 0: of no call
        of_call = look_up(ids, *launches)
        launched = np.where((launched == NULL) & (ids > 0), of_call, launched)
    table = intervals(
        start_ns=kernels.start_ns,
        end_ns=kernels.end_ns,
        device=kernels.device,
        stream=stream,
        cls=cls,
        kind=kind,
        name=kernels.name,
        launch_ns=launched,
        origin=kernels.dispatch,
        names=kernels.names,
    )
    return table, notes, int((inferred == NULL).sum())
