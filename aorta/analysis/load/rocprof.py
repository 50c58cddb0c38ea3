"""Builds a `Trace` from what all outputs of rocprofv3 have in common: kernels, copies, RCCL calls and markers of a
process.

Times are nanoseconds of CLOCK_BOOTTIME (rocprofiler-sdk: `default_clock_id`), not comparable between machines. Records
come in buffer order, not in time order. Must not: know how a file stores them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from aorta.analysis.load.interval_table import (
    NULL,
    CounterValues,
    Interner,
    IntervalClass,
    Intervals,
    Trace,
    concatenate,
    intervals,
    step_of,
)
from aorta.analysis.load.kernel_classifier import NameClassifier
from aorta.analysis.load.microseconds import check_devices, check_instants
from aorta.analysis.load.rank_inference import InferredRank
from aorta.analysis.load.rccl_order import Calls, Unnamed, kinds_from_calls
from aorta.analysis.load.sqlite_files import look_up
from aorta.analysis.load.step_markers import step_windows
from aorta.timeline.arrays import Int64

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
    """Kernel dispatches by column; `parents` are the correlation ids of the calls around the launch."""

    thread: Int64
    device: Int64
    queue: Int64
    stream: Int64
    dispatch: Int64
    correlation: Int64
    parents: tuple[Int64, ...]
    start_ns: Int64
    end_ns: Int64
    name: Int64
    names: Sequence[str]


@dataclass(frozen=True)
class Copies:
    """Memory copies by column; `bytes` is `NULL` for CSV files, which have no such column."""

    device: Int64
    stream: Int64
    bytes: Int64
    start_ns: Int64
    end_ns: Int64
    name: Int64
    names: Sequence[str]


@dataclass(frozen=True)
class Launches:
    """Calls that may launch kernels, by column: a kernel has the correlation id of its call."""

    correlation: Int64
    start_ns: Int64


@dataclass(frozen=True)
class Marks:
    """ROCTx ranges by column; a mark is a range of length 0."""

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
    marks: Marks,
    classifier: NameClassifier,
    *,
    launches: Launches,
    counters: CounterValues | None = None,
    host: str | None = None,
    copies_observed: bool = True,
    notes: Sequence[str] = (),
) -> Trace:
    """Assemble the trace of one process: classes from names, kinds from names or RCCL calls, steps from markers."""
    for what, times in (("kernel", kernels), ("memory copy", copies), ("RCCL call", calls), ("marker", marks)):
        check_instants(path, what, times.start_ns, times.end_ns)
    check_instants(path, "HIP call", launches.start_ns, launches.start_ns)
    check_devices(path, "kernel", kernels.device)
    check_devices(path, "memory copy", copies.device)
    table, kind_notes, unlinked = _kernel_rows(kernels, calls, launches, classifier)
    names = Interner()
    copy_names = np.array([*map(names, copies.names), NULL], dtype=np.int32)
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
                name=copy_names[copies.name],
                names=names.strings,
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
    kernels: Kernels, calls: Calls, launches: Launches, classifier: NameClassifier
) -> tuple[Intervals, tuple[str, ...], int]:
    classes, kinds = classifier.kernels(kernels.names)
    # A kernel whose symbol is missing has no name: its code is NULL, the last entry, and its class is not known.
    classes, kinds = np.append(classes, np.int8(IntervalClass.UNKNOWN)), np.append(kinds, np.int8(NULL))
    cls, kind = classes[kernels.name], kinds[kernels.name]
    unnamed = np.flatnonzero((cls == IntervalClass.COMM) & (kind == NULL))
    found, notes = kinds_from_calls(
        calls,
        Unnamed(
            kernels.thread[unnamed],
            tuple(ids[unnamed] for ids in (kernels.correlation, *kernels.parents)),
            kernels.dispatch[unnamed],
            kernels.start_ns[unnamed],
        ),
    )
    kind[unnamed] = found
    names = Interner()
    codes = np.array([*map(names, kernels.names), NULL], dtype=np.int32)
    # Handle 0 means "no stream known" (rocprofv3 before streams were traced, and null streams): use the queue then.
    stream = kernels.stream if (kernels.stream > 0).any() else kernels.queue
    launched = np.full(len(kernels.start_ns), NULL, np.int64)
    for ids in (kernels.correlation, *kernels.parents):  # 0: of no call
        found_at = look_up(ids, launches.correlation, launches.start_ns)
        launched = np.where((launched == NULL) & (ids > 0), found_at, launched)
    table = intervals(
        start_ns=kernels.start_ns,
        end_ns=kernels.end_ns,
        device=kernels.device,
        stream=stream,
        cls=cls,
        kind=kind,
        name=codes[kernels.name],
        launch_ns=launched,
        origin=kernels.dispatch,
        names=names.strings,
    )
    return table, notes, int((found == NULL).sum())
