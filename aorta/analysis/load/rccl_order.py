"""Finds out which collective each of RCCL's generic kernels ran, from the RCCL calls of the host.

RCCL launches one kernel for every collective (`ncclDevKernel_Generic`), so the name says nothing (W12). A call and its
kernel share a correlation id where the tracer kept it. Otherwise the n-th launching call of a thread is the n-th kernel
of that thread, but only if there are equally many and no kernel started before its call. Must not: guess: a count that
does not match leaves every kernel of that thread unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from aorta.analysis.load.interval_table import NULL
from aorta.analysis.load.kernel_classifier import kind_of
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
class Calls:
    """RCCL API calls by column; `function` is the name of each."""

    thread: Int64
    correlation: Int64
    start_ns: Int64
    end_ns: Int64
    function: Sequence[str]


@dataclass(frozen=True)
class Unnamed:
    """Communication kernels of unknown kind, by column. `ids` are all correlation ids that a kernel carries."""

    thread: Int64
    ids: tuple[Int64, ...]
    dispatch: Int64
    start_ns: Int64


@dataclass(frozen=True)
class _Launch:
    start_ns: int
    kind: int
    correlations: tuple[int, ...]


def kinds_from_calls(calls: Calls, kernels: Unnamed) -> tuple[NDArray[np.int8], tuple[str, ...]]:
    """Kind of each kernel (`NULL` where it stays unknown), and the reasons why some stay unknown."""
    kinds = np.full(len(kernels.start_ns), NULL, np.int8)
    if not len(kinds):
        return kinds, ()
    launches = _launches(calls)
    if not any(launches.values()):
        return kinds, ("no RCCL call was traced: record with --rccl-trace to learn which kernel ran which collective",)
    of_id = {ident: each.kind for some in launches.values() for each in some for ident in each.correlations}
    linked = np.zeros(len(kinds), np.bool_)
    for ids in kernels.ids:
        for row, ident in enumerate(ids.tolist()):
            if not linked[row] and ident in of_id:
                kinds[row], linked[row] = of_id[ident], True
    if linked.any():
        notes = []
        if lost := int((~linked).sum()):
            notes.append(f"{lost} RCCL kernel(s) have no RCCL call in the trace: kind not known")
        if mixed := int((linked & (kinds == NULL)).sum()):
            notes.append(f"{mixed} RCCL kernel(s) ran a group of different collectives: kind not known")
        return kinds, tuple(notes)
    return _by_order(launches, kernels, kinds)


def _by_order(
    launches: dict[int, list[_Launch]], kernels: Unnamed, kinds: NDArray[np.int8]
) -> tuple[NDArray[np.int8], tuple[str, ...]]:
    notes = []
    for thread in np.unique(kernels.thread).tolist():
        rows = np.flatnonzero(kernels.thread == thread)
        order = kernels.dispatch[rows]
        unique = len(np.unique(order)) == len(rows) and NULL not in order
        rows = rows[np.argsort(order if unique else kernels.start_ns[rows], kind="stable")]
        calls = launches.get(thread, [])
        if len(calls) != len(rows):
            notes.append(
                f"thread {thread}: {len(rows)} RCCL kernels for {len(calls)} launching RCCL calls: which is which is "
                "ambiguous, kind not known"
            )
        elif any(int(kernels.start_ns[row]) < call.start_ns for row, call in zip(rows, calls, strict=True)):
            notes.append(f"thread {thread}: an RCCL kernel started before its call: order not usable, kind not known")
        else:
            kinds[rows] = [call.kind for call in calls]
    return kinds, tuple(notes)


def _launches(calls: Calls) -> dict[int, list[_Launch]]:
    """Thread -> what it launched, in order. A group launches once, at its end; of nested calls the outer one counts."""
    found: dict[int, list[_Launch]] = {}
    order = np.lexsort((-calls.end_ns, calls.start_ns, calls.thread))
    depth: dict[int, int] = {}
    inside: dict[int, list[tuple[int, int]]] = {}
    busy_until: dict[int, int] = {}
    for row in order.tolist():
        thread, name = int(calls.thread[row]), calls.function[row]
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
