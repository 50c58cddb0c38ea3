"""Reads the outputs of rocprofv3: JSON and CSV (`text_files`), and databases (`rocpd`). Here a `Trace` is built from
what all have of a process: kernels, copies, calls of HIP and RCCL, markers.

Times are nanoseconds of CLOCK_BOOTTIME (rocprofiler-sdk: `default_clock_id`), not comparable between machines. Records
come in buffer order, not in time order.

RCCL launches one kernel for every collective (`ncclDevKernel_Generic`), so the name says nothing (W12). A call and its
kernel share a correlation id where the tracer kept it. Otherwise the n-th launching call of a thread is the n-th kernel
of that thread, but only if there are equally many and no kernel started before its call.

Must not: guess (a count that does not match leaves every kernel of that thread unknown), or put a timestamp through a
float (W14).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from aorta.read.frames import Numbered
from aorta.read.ledger import COMM, Gap, lacking
from aorta.read.traces.claims import Claims, launches_of, reconciled
from aorta.read.traces.interval_table import NULL, IntervalClass, Intervals, Trace, kind_of, look_up
from aorta.read.traces.reader import Process, Ranges, TraceInput, checked, kernels, trace_of
from aorta.timeline.arrays import Int64
from aorta.timeline.classes import COMPUTE, computes
from aorta.timeline.overlap import DECIDED

Columns: TypeAlias = Mapping[str, Any]
_KIND: Final = {
    f"nccl{name}": kind_of(f"nccl{name}")
    for name in (
        *("AllReduce", "AllReduceWithBias", "ReduceScatter", "AllGather", "Broadcast", "Bcast", "Reduce"),
        *("AllToAll", "AllToAllv", "Gather", "Scatter", "Send", "Recv"),
    )
}
_NAMES: Final = {kind: name for name, kind in _KIND.items()}
"""RCCL's calls that launch work (rccl.h); the others (communicators, queries) launch none."""
NO_KERNELS: Final = "no kernel dispatches: record with --kernel-trace"
RCCL_API: Final = "RCCL_API"
HIP_API: Final = "HIP_RUNTIME_API"
"""Begin of the domain of HIP calls, which launch kernels; what follows (`_EXT`) differs between versions."""
MARKERS: Final = ("MARKER_CORE_API", "MARKER_CORE_RANGE_API")
"""Domains of ROCTx ranges: the first up to ROCm 6.4, the second since 7."""
_OUTPUT: Final = re.compile(r"_(results\.(json|db)|kernel_trace\.csv)(\.gz)?$")


def process_of(file: str) -> str:
    """Return the name of a file without what differs between the formats in which a process wrote the same kernels."""
    return _OUTPUT.sub("", file)


def trace_of_rocprof(
    source: TraceInput,
    format: str,  # noqa: A002 - the field's name
    process: Process,
    ran: Columns,
    names: Sequence[str],
    copied: Intervals,
    ranges: Ranges,
    launches: Columns,
    calls: Columns | None = None,
    *,
    copied_by: Int64,
    notes: Sequence[str] = (),
    gaps: Sequence[Gap] = (),
    **facts: Any,
) -> Trace:
    """Return the trace of one process: kinds of collectives from names or RCCL calls, steps from ROCTx ranges.

    Args:
        ran: the kernels: `start_ns`, `end_ns`, `device`, `stream`, `queue`, `thread`, `dispatch`, `name` (index into
            `names`), `correlation` of the call that launched each, and in `ancestor` of the call around that one.
        launches: calls of HIP, `correlation`, `start_ns`, `end_ns` and `text` (the function).
        calls: of RCCL, `text` (the function), `thread`, `correlation`, `start_ns` and `end_ns`.
        copied_by: the `correlation` of each copy.
        notes, gaps: of the reader.
        facts: further fields of `Trace`.
    """
    where = process.path
    checked(where, "HIP call", {"start_ns": launches["start_ns"]})
    if calls is not None:
        checked(where, "RCCL call", {"start_ns": calls["start_ns"], "end_ns": calls["end_ns"]})
    correlations = [ran[name] for name in ("correlation", "ancestor") if name in ran]
    launched = np.full(len(ran["start_ns"]), NULL, np.int64)
    for ids in correlations:  # 0: of no call
        by_correlation = look_up(ids, launches["correlation"], launches["start_ns"])
        launched = np.where((launched == NULL) & (ids > 0), by_correlation, launched)
    rows = kernels(
        where,
        source.classifier,
        ran["name"],
        names,
        start_ns=ran["start_ns"],
        end_ns=ran["end_ns"],
        device=ran["device"],
        # Handle 0 means "no stream known" (rocprofv3 before streams were traced, and null streams): use the queue then.
        stream=ran["stream"] if (ran["stream"] > 0).any() else ran["queue"],
        launch_ns=launched,
        origin=ran["dispatch"],
    )
    issued = _launches(calls) if calls is not None else {}
    sends = np.array([ident for some in issued.values() for *_, idents in some for ident in idents], np.int64)
    of_call = np.any([np.isin(ids, sends) & (ids > 0) for ids in correlations], axis=0)
    rows.cls[(rows.cls == IntervalClass.COMPUTE) & ~rows.named(computes) & of_call] = IntervalClass.COMM
    unnamed = np.flatnonzero((rows.cls == IntervalClass.COMM) & (rows.kind == NULL))
    ranged = set(ranges.texts)
    renamed = np.isin(ran["name"], [code for code, text in enumerate(names) if text in ranged])
    if renamed.sum() > DECIDED * len(renamed):
        why = f"{renamed.sum()} kernels have the names of ranges, not their own: record without --kernel-rename"
        gaps = (*gaps, *lacking(why, COMPUTE, COMM, seen=False))
    kinds, of_kinds = _kinds_from_calls(issued, ran, correlations, unnamed)
    rows.kind[unnamed] = kinds
    about: dict[str, Any] = {"clock": "BOOTTIME", "platform": "rocm", "unsized": "rocprofv3", "gaps": gaps}
    about |= {"notes": (*notes, *of_kinds), "counters": {"comm_unlinked": int((kinds == NULL).sum())}}
    trace = trace_of(source, format, process, [rows, copied], ranges, **about | facts)
    link = ran["correlation"]
    for ids in correlations[1:]:  # the calls know the kernel by either
        link = np.where(np.isin(ids, launches["correlation"]) & (ids > 0), ids, link)
    texts = Numbered()
    functions = np.array([texts[text] for text in launches["text"]], np.int64)
    claims = Claims(
        launches["start_ns"],
        launches["correlation"],
        launches_of(functions, tuple(texts)),
        functions,
        np.isin(launches["correlation"], sends),
        np.where((links := np.concatenate((link, copied_by))) > 0, links, NULL),  # 0: of no call
        launches["end_ns"] - launches["start_ns"],
        counted=np.concatenate((ran["dispatch"], np.full(len(copied), NULL))),
        issued=Counter(_NAMES[kind] for some in issued.values() for _, kind, _ in some if kind != NULL),
    )
    return reconciled(trace, claims)


def _kinds_from_calls(
    launches: Mapping[int, list[tuple[int, int, list[int]]]], ran: Columns, correlations: Sequence[Int64], rows: Int64
) -> tuple[NDArray[np.int8], list[str]]:
    """Return the kind of communication kernels whose names do not tell it, `NULL` where it stays unknown, and why."""
    kinds, notes = np.full(len(rows), NULL, np.int8), list[str]()
    if not launches:
        why = "no RCCL call was traced: record with --rccl-trace to learn which kernel ran which collective"
        return kinds, [why] if len(rows) else []
    of_id = {ident: kind for some in launches.values() for _, kind, idents in some for ident in idents}
    linked = np.zeros(len(kinds), np.bool_)
    for ids in correlations:
        for index, ident in enumerate(ids[rows].tolist()):
            if not linked[index] and ident in of_id:
                kinds[index], linked[index] = of_id[ident], True
    if linked.any():
        if lost := int((~linked).sum()):
            notes.append(f"{lost} RCCL kernel(s) have no RCCL call in the trace: kind not known")
        if mixed := int((linked & (kinds == NULL)).sum()):
            notes.append(f"{mixed} RCCL kernel(s) ran a group of different collectives: kind not known")
        return kinds, notes
    threads, dispatch, start_ns = ran["thread"][rows], ran["dispatch"][rows], ran["start_ns"][rows]
    for thread in np.unique(threads).tolist():
        own, launched = np.flatnonzero(threads == thread), launches.get(thread, [])
        order = dispatch[own]
        unique = len(np.unique(order)) == len(own) and NULL not in order
        own = own[np.argsort(order if unique else start_ns[own], kind="stable")]
        if len(launched) != len(own):
            notes.append(
                f"thread {thread}: {len(own)} RCCL kernels for {len(launched)} launching RCCL calls: which is which "
                "is ambiguous, kind not known"
            )
        elif (start_ns[own] < [start for start, *_ in launched]).any():
            notes.append(f"thread {thread}: an RCCL kernel started before its call: order not usable, kind not known")
        else:
            kinds[own] = [kind for _, kind, _ in launched]
    return kinds, notes


def _launches(calls: Columns) -> dict[int, list[tuple[int, int, list[int]]]]:
    """Return start, kind and correlation ids of the launches of each thread, in order. A group launches once, at its
    end; of nested calls the outer counts.
    """
    of_threads: dict[int, list[tuple[int, int, list[int]]]] = {}
    for thread in np.unique(calls["thread"]).tolist():
        rows = np.flatnonzero(calls["thread"] == thread)
        rows = rows[np.lexsort((-calls["end_ns"][rows], calls["start_ns"][rows]))]
        depth, busy_until = 0, -1
        kinds, idents, own = set[int](), list[int](), list[tuple[int, int, list[int]]]()
        columns = (calls[name][rows].tolist() for name in ("start_ns", "end_ns", "correlation"))
        for row, start, end, ident in zip(rows.tolist(), *columns, strict=True):
            name = calls["text"][row]
            if end <= busy_until:
                continue  # nested inside another call, which counts instead
            if name == "ncclGroupStart":
                depth += 1
            elif name == "ncclGroupEnd":
                depth = max(depth - 1, 0)
                if kinds and not depth:
                    own.append((start, kinds.pop() if len(kinds) == 1 else NULL, [*idents, ident]))
                    kinds, idents = set(), []
            elif name in _KIND:
                busy_until = end
                if depth:
                    kinds.add(_KIND[name])
                    idents.append(ident)
                else:
                    own.append((start, _KIND[name], [ident]))
        if own:
            of_threads[thread] = own
    return of_threads
