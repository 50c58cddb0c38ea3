"""Builds the interval table of a CPU trace, where communication runs on gloo's worker threads and compute on the
others.

`gloo:all_reduce` rows are the intervals. Which collective one was stands on the caller's `c10d::` operator, because
reduce-scatter runs under the label of all-reduce. The two are joined by their order, label by label (their ids differ).
Must not: count an operator that contains another one as work: its time would include waits (W6).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from aorta.analysis.load.dtypes import known_dtype
from aorta.analysis.load.interval_table import KIND_CODE, NULL, IntervalClass, Intervals, intervals
from aorta.analysis.load.kernel_classifier import kind_of
from aorta.analysis.load.kineto.collective_arguments import LARGEST_BYTES, CollectiveColumns
from aorta.analysis.load.kineto.event_structs import Arguments
from aorta.analysis.load.kineto.trace_events import Rows
from aorta.timeline.arrays import Int64, Spans, merge

_NO_COMPUTE: Final = ("c10d::", "_c10d_functional::", "c10d_functional::", "record_param_comms", "gloo:", "nccl:")
_LABEL: Final = "gloo:"
_RUNS_AS: Final = {KIND_CODE["reducescatter"]: KIND_CODE["allreduce"]}
"""Kinds that gloo runs under the label of another kind (torch: ProcessGroupGloo, reduce-scatter)."""
_GATHERED: Final = frozenset({KIND_CODE["allgather"], KIND_CODE["gather"]})
"""Kinds whose label has one rank's part of the full array as its input."""
_DIMS: Final = msgspec.json.Decoder(list[list[int]])
_TYPES: Final = msgspec.json.Decoder(list[str])


def host_intervals(
    operators: Rows,
    labels: Rows,
    operator_arguments: Mapping[int, Arguments],
    label_arguments: Mapping[int, Arguments],
    names: tuple[str, ...],
    world_size: int | None,
    counters: Counter[str],
) -> tuple[Intervals, CollectiveColumns]:
    """Build the rows of compute and of communication, without ranks and steps. Gloo rows without an operator are
    counted.
    """
    is_label = np.array([name.startswith(_LABEL) for name in names], bool)
    communication = np.flatnonzero(is_label[labels["name"]]) if len(labels["name"]) else np.zeros(0, np.int64)
    issuing = operators["thread"][np.array(sorted(operator_arguments), np.int64)]
    gloo_threads = np.setdiff1d(labels["thread"][communication], issuing)
    leaves = _leaves(operators, names, gloo_threads)

    kinds, unlinked = _kinds(operators, operator_arguments, labels, communication, names, world_size)
    counters["comm_unlinked"] += unlinked
    columns = CollectiveColumns.empty(len(communication) + int(leaves.sum()))
    columns.kind[: len(communication)] = kinds
    for at, row in enumerate(communication.tolist()):
        _size(columns, at, label_arguments.get(row), world_size)
    table = intervals(
        start_ns=np.concatenate((labels.start[communication], operators.start[leaves])),
        end_ns=np.concatenate((labels.end[communication], operators.end[leaves])),
        stream=np.concatenate((labels["thread"][communication], operators["thread"][leaves])),
        name=np.concatenate((labels["name"][communication], operators["name"][leaves])),
        origin=np.concatenate((np.full(len(communication), NULL, np.int64), operators["origin"][leaves])),
        cls=np.repeat([int(IntervalClass.COMM), int(IntervalClass.COMPUTE)], [len(communication), int(leaves.sum())]),
        names=names,
    )
    return table, columns


def _leaves(operators: Rows, names: tuple[str, ...], gloo_threads: Int64) -> NDArray[np.bool_]:
    """Operators that are compute: nothing is nested in them, they are not on a gloo thread, and they are no
    communication.
    """
    start, end, thread = operators.start, operators.end, operators["thread"]
    order = np.lexsort((-end, start, thread))
    leaf = np.ones(len(order), bool)
    if len(order) > 1:
        this, following = order[:-1], order[1:]
        inside = (thread[this] == thread[following]) & (start[following] < end[this])
        leaf[this[inside]] = False
    computes = np.array([not name.startswith(_NO_COMPUTE) for name in names], bool)
    if len(order):
        leaf &= computes[operators["name"]]
    return leaf & ~np.isin(thread, gloo_threads) & ~_inside_communication(operators, names)


def _inside_communication(operators: Rows, names: tuple[str, ...]) -> NDArray[np.bool_]:
    """Operators that start inside a `c10d::` operator of their thread: what it copies there belongs to it."""
    start, end, thread = operators.start, operators.end, operators["thread"]
    calls = np.array([name.startswith("c10d::") for name in names], bool)
    inside = np.zeros(len(start), bool)
    if not len(start):
        return inside
    called = calls[operators["name"]]
    for each in np.unique(thread[called]):
        mine = np.flatnonzero(thread == each)
        spans = merge(Spans(start[called & (thread == each)], end[called & (thread == each)]))
        at = np.searchsorted(spans.start, start[mine], side="right") - 1
        inside[mine] = (at >= 0) & (start[mine] < spans.end[at])
    return inside


def _kinds(
    operators: Rows,
    operator_arguments: Mapping[int, Arguments],
    labels: Rows,
    communication: Int64,
    names: tuple[str, ...],
    world_size: int | None,
) -> tuple[NDArray[np.int8], int]:
    """Kind of each gloo row, and the number of rows that were not joined with an operator (their label
    is their kind).
    """
    label_kind = np.array([kind_of(name) for name in names], np.int8)
    own = label_kind[labels["name"][communication]] if len(communication) else np.zeros(0, np.int8)
    kinds, unlinked = own.copy(), 0
    calls = _outermost(operators, np.array(sorted(operator_arguments), np.int64))
    called = label_kind[operators["name"][calls]] if len(calls) else np.zeros(0, np.int8)
    runs_as = np.array([_RUNS_AS.get(int(kind), int(kind)) for kind in called], np.int8)
    for label in np.unique(own):
        rows = np.flatnonzero(own == label)
        rows = rows[np.argsort(labels.start[communication[rows]], kind="stable")]
        issued = calls[runs_as == label]
        issued = issued[np.argsort(operators.start[issued], kind="stable")]
        # The list form of reduce-scatter runs as one all-reduce for each rank's part.
        parts = [world_size or 1 if names[code] == "c10d::reduce_scatter_" else 1 for code in operators["name"][issued]]
        expected = np.repeat(issued, parts) if len(issued) else issued
        # Surplus rows were issued before the trace began; surplus calls had not run when it ended.
        rows_joined = rows[max(len(rows) - len(expected), 0) :]
        expected = expected[: len(rows_joined)]
        in_order = labels.start[communication[rows_joined]] >= operators.start[expected]
        unlinked += len(rows) - int(in_order.sum())
        kinds[rows_joined[in_order]] = label_kind[operators["name"][expected[in_order]]]
    return kinds, unlinked


def _outermost(operators: Rows, calls: Int64) -> Int64:
    """Calls that no other call of the same thread contains."""
    start, end, thread = operators.start[calls], operators.end[calls], operators["thread"][calls]
    keep = np.ones(len(calls), bool)
    for each in np.unique(thread):
        mine = np.flatnonzero(thread == each)
        mine = mine[np.lexsort((-end[mine], start[mine]))]
        reach = np.maximum.accumulate(end[mine])
        keep[mine[1:]] = start[mine[1:]] >= reach[:-1]
    return calls[keep]


def _size(columns: CollectiveColumns, at: int, arguments: Arguments | None, world_size: int | None) -> None:
    """Set bytes and data type of one row from the shapes of its inputs (present with `record_shapes`)."""
    kind = int(columns.kind[at])
    if kind == KIND_CODE["barrier"]:
        columns.bytes[at] = 0
    if arguments is None:
        return
    try:
        dims, types = _DIMS.decode(arguments.dims), _TYPES.decode(arguments.types)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return
    known = [known_dtype(name) for name in types[: len(dims)]]
    if not known or any(width is None for _, width in known):
        return
    names = {name for name, _ in known}
    if len(names) == 1:
        columns.dtype[at] = columns.dtypes(str(known[0][0]))
    total = sum(_product(shape) * (width or 0) for shape, (_, width) in zip(dims, known, strict=False))
    if kind in _GATHERED:
        total = total * world_size if world_size else NULL
    columns.bytes[at] = total if 0 <= total < LARGEST_BYTES else NULL


def _product(shape: list[int]) -> int:
    found = 1
    for length in shape:
        found *= max(length, 0)
    return found
