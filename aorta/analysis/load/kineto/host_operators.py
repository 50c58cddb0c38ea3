"""Builds the interval table of a CPU trace, where communication runs on gloo's worker threads and compute on the
others.

`gloo:all_reduce` rows are the intervals. Which collective one was stands on the caller's `c10d::` operator, because
reduce-scatter runs under the label of all-reduce. The two are joined by their order, label by label (their ids differ).
Compute is the self time of operators, of those with others inside them too (W30). Must not: count as work what an
operator stands waiting for communication (W6).

Self time is when a row of a thread was the innermost one: an operator from 0 to 9 with another from 2 to 5 inside has
0 to 2 and 5 to 9.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from aorta.analysis.load.interval_table import (
    KIND_CODE,
    NULL,
    Interner,
    IntervalClass,
    Intervals,
    intervals,
)
from aorta.analysis.load.kernel_classifier import MARK, kind_of, known_dtype
from aorta.analysis.load.kernels import GEMM_OPERATORS
from aorta.analysis.load.kineto.event_structs import (
    HOST,
    OPERATORS,
    PARAMETERS,
    Arguments,
    EventDecoder,
    Identifiers,
    Piece,
    Rows,
    arguments_of,
    chosen,
    usable,
    where,
)
from aorta.analysis.load.kineto.kernel_links import LARGEST_BYTES, CollectiveColumns, externals_of, links_of
from aorta.timeline.arrays import Int64, Spans, covered_ns, intersect, measure, merge, self_times
from aorta.timeline.overlap import AGREEMENT

HELD_BYTES: Final = 128 << 20
"""Most text of a trace that is kept until a row of a device appears."""
HOOKS: Final = ("FSDP::", "FullyShardedDataParallel.")
"""Ranges that FSDP2 and FSDP1 mark round their hooks. These run inside of autograd's operators, and what no operator
in them takes they stand waiting for a collective.
"""
_LABELS: Final = ("gloo:", "nccl:")
_CALL: Final = "c10d::"
_FUNCTIONAL: Final = ("_c10d_functional::", "c10d_functional::")
_NO_COMPUTE: Final = (_CALL, *_FUNCTIONAL, *HOOKS, PARAMETERS, *_LABELS)
_LABEL: Final = "gloo:"
_ENGINE: Final = ("autograd::engine::", "torch::autograd::")
_COMPILED: Final = ("CompiledFunction", "Torch-Compiled Region")
"""What torch.compile made: its own time is that of fused kernels, which are no operators; its collectives are
functional.
"""
_RUNS_AS: Final = {KIND_CODE["reducescatter"]: KIND_CODE["allreduce"]}
"""Kinds that gloo runs under the label of another kind (torch: ProcessGroupGloo, reduce-scatter)."""
_GATHERED: Final = frozenset({KIND_CODE["allgather"], KIND_CODE["gather"]})
"""Kinds whose label has one rank's part of the full array as its input."""
_DIMS: Final = msgspec.json.Decoder(list[list[int]])
_TYPES: Final = msgspec.json.Decoder(list[str])


class HostWork:
    """Collects the operators of a trace, the ranges that FSDP marks round its hooks, and the labels of communication.

    A trace of a device needs none of them, but Kineto writes them before the device's rows. So pieces are kept as text
    until a row of a device appears, and read once none can come any more or `HELD_BYTES` are reached.

    Attributes:
        at_once: whether every piece is read when it comes, for which its operators need their times.
        operators: rows of operators and hooks, by name, thread, and `origin` where they are matrix products.
        operator_arguments: row -> arguments, of `c10d::` operators.
        labels: rows of labels, by name and thread. label_arguments: row -> arguments.
        names: of both. threads: what their ids are numbered by, those of a second process too.
        counters: rows that cannot be used.
    """

    def __init__(self, decoder: EventDecoder) -> None:
        self.at_once = False
        self.operators, self.labels = Rows("name", "thread", "origin"), Rows("name", "thread")
        self.operator_arguments: dict[int, Arguments] = {}
        self.label_arguments: dict[int, Arguments] = {}
        self.names = Interner()
        self.counters: Counter[str] = Counter()
        self._decoder = decoder
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._roles: dict[Any, str] = {}
        self.threads, self._process = Identifiers(), None

    def add(self, text: bytes | memoryview, events: Piece) -> None:
        """Take a piece of the event array, as text and decoded."""
        if self.at_once:
            self._read(text, events)
            return
        self._held.append(bytes(text))
        self._held_bytes += len(text)
        if self._held_bytes > HELD_BYTES:
            self.read_kept()

    def read_kept(self) -> None:
        """Read what was kept as text, and from now on every piece at once."""
        self.at_once = True
        for text in self._held:
            self._read(text, self._decoder.decode(text))
        self._held.clear()

    def _read(self, text: bytes | memoryview, events: Piece) -> None:
        host = [event for event in chosen(events, [event.cat for event in events], HOST) if event.ph == "X"]
        names = [event.name for event in host]
        for name in set(names) - self._roles.keys():
            self._roles[name] = _role(name)
        roles = list(map(self._roles.__getitem__, names))
        operators = [event for event in chosen(host, roles, {"operator"}) if event.cat in OPERATORS]
        operators += chosen(host, roles, {"hook"})
        labels = chosen(host, roles, {"label"})
        times = self._decoder.times(operators), self._decoder.times(labels)
        if times[0] is None or times[1] is None:
            self._decoder.exact = True
            self._read(text, self._decoder.decode(text))
            return
        if operators:
            self._add_operators(*usable(operators, times[0], self.counters))
        if labels:
            labels, start, length = usable(labels, times[1], self.counters)
            arguments = arguments_of([event.args for event in labels])
            self.label_arguments.update(enumerate(arguments, start=self.labels.count))
            self._add(self.labels, labels, start, length)

    def _add_operators(self, events: list[Any], start: Int64, length: Int64) -> None:
        names = [event.name for event in events]
        distinct = set(names)
        calls = where(names, {name for name in distinct if name.startswith(_CALL)})
        arguments = arguments_of([events[at].args for at in calls])
        self.operator_arguments.update(zip((self.operators.count + at for at in calls), arguments, strict=True))
        products = where(names, GEMM_OPERATORS & distinct)
        origin = np.full(len(events), NULL, np.int64)
        origin[products] = externals_of(links_of([events[at].args for at in products]))
        self._add(self.operators, events, start, length, origin=origin)

    def _add(self, rows: Rows, events: list[Any], start: Int64, length: Int64, **columns: Int64) -> None:
        names = [event.name for event in events]
        if self._process is None and events:
            self._process = events[0].pid
        code_of = {name: self.names(name) for name in dict.fromkeys(names)}
        rows.add(
            start,
            length,
            name=list(map(code_of.__getitem__, names)),
            thread=self.threads.codes(
                [event.tid if event.pid == self._process else (event.pid, event.tid) for event in events]
            ),
            **columns,
        )


def _role(name: object) -> str:
    """Return what an event is used for; empty if it is unused."""
    if not isinstance(name, str) or name == PARAMETERS or MARK.match(name):
        return ""
    if name.startswith(HOOKS):
        return "hook"
    return "label" if name.startswith(_LABELS) else "operator"


def host_intervals(
    host: HostWork, world_size: int | None, counters: Counter[str], notes: list[str]
) -> tuple[Intervals, CollectiveColumns]:
    """Build the rows of compute and of communication, without ranks and steps. Gloo rows without an operator are
    counted.
    """
    operators, labels, operator_arguments, names = (
        host.operators,
        host.labels,
        host.operator_arguments,
        host.names.strings,
    )
    is_label = np.array([name.startswith(_LABEL) for name in names], bool)
    communication = np.flatnonzero(is_label[labels.name]) if len(labels.name) else np.zeros(0, np.int64)
    calls = np.array(sorted(operator_arguments), np.int64)
    gloo_threads = np.setdiff1d(labels.thread[communication], operators.thread[calls])
    kinds, joined = _kinds(operators, operator_arguments, labels, communication, names, world_size)
    counters["comm_unlinked"] += int((joined == NULL).sum())
    comm = Spans(labels.start[communication], labels.end[communication])
    row, work = _work(operators, names, gloo_threads, joined, comm.end)
    if doubt := _doubt(comm, row, work, operators, names):
        notes.append(doubt)

    columns = CollectiveColumns.empty(len(communication) + len(row))
    columns.kind[: len(communication)] = kinds
    for at, label in enumerate(communication.tolist()):
        _size(columns, at, host.label_arguments.get(label), world_size)
    table = intervals(
        start_ns=np.concatenate((comm.start, work.start)),
        end_ns=np.concatenate((comm.end, work.end)),
        stream=host.threads.numbers(np.concatenate((labels.thread[communication], operators.thread[row]))),
        name=np.concatenate((labels.name[communication], operators.name[row])),
        operator=np.concatenate((np.full(len(communication), NULL, np.int64), row)),
        cls=np.repeat([int(IntervalClass.COMM), int(IntervalClass.COMPUTE)], [len(communication), len(row)]),
        names=names,
    )
    return table, columns


def _work(
    operators: Rows, names: tuple[str, ...], gloo_threads: Int64, joined: Int64, comm_end: Int64
) -> tuple[Int64, Spans]:
    """Return the self time of operators that compute, without what they waited for.

    Operators on gloo's threads and those inside a `c10d::` operator, where they copy for it, are communication. A
    `c10d::` operator returns when its collective is issued, and nothing marks `Work.wait()`. So what is called an
    operator's own time ends at the last call it made, itself or in one nested in it, and goes on when that collective
    has ended. (Functional collectives have an operator that waits.)

    Args:
        joined: the operator that issued each of the collectives, or `NULL`. comm_end: when each of them ended.

    Returns:
        The row of the operator that each piece belongs to, and the pieces.
    """
    codes, start, end, thread = operators.name, operators.start, operators.end, operators.thread
    computes = np.array([not name.startswith(_NO_COMPUTE) for name in names], bool)
    is_call = np.array([name.startswith(_CALL) for name in names], bool)
    functional = np.array([name.startswith(_FUNCTIONAL) for name in names], bool)
    host = np.flatnonzero(~np.isin(thread, gloo_threads))
    owner, pieces = self_times(Spans(start[host], end[host]), thread[host])
    owner = host[owner]
    kept = computes[codes[owner]]
    owner, begin, finish = owner[kept], pieces.start[kept], pieces.end[kept]

    ended = np.full(len(start), NULL, np.int64)
    np.maximum.at(ended, joined[joined != NULL], comm_end[joined != NULL])
    waits = np.zeros(len(owner), bool)
    for each in np.unique(thread[is_call[codes]]) if len(codes) else ():
        mine, here = np.flatnonzero(thread == each), np.flatnonzero(thread[owner] == each)
        calling, explicit = mine[is_call[codes[mine]]], mine[functional[codes[mine]]]
        waits[here] = _lies_in(begin[here], merge(Spans(start[calling], end[calling])))
        calls = calling[ended[calling] != NULL]
        calls = calls[~_lies_in(start[calls], merge(Spans(start[explicit], end[explicit])))]
        if len(calls):
            calls = calls[np.argsort(start[calls], kind="stable")]
            last = calls[np.searchsorted(start[calls], begin[here], side="right") - 1]
            called = (start[last] <= begin[here]) & (start[last] >= start[owner[here]])
            begin[here] = np.where(called, np.maximum(begin[here], ended[last]), begin[here])
    kept = ~waits & (begin < finish)
    return owner[kept], Spans(begin[kept], finish[kept])


def _is_function(name: str) -> bool:
    """Return whether an operator may run any Python: a node of autograd, or an `autograd.Function` (no namespace)."""
    return ("::" not in name or name.startswith(_ENGINE)) and not name.startswith(_COMPILED)


def _lies_in(instants: Int64, merged: Spans) -> NDArray[np.bool_]:
    """Return which instants lie inside of merged spans."""
    if not len(merged.start):
        return np.zeros(len(instants), bool)
    at = np.searchsorted(merged.start, instants, side="right") - 1
    return (at >= 0) & (instants < merged.end[at])


def _doubt(comm: Spans, row: Int64, work: Spans, operators: Rows, names: tuple[str, ...]) -> str | None:
    """Return what to say where much communication is hidden only by the own time of functions, which run Python and may
    have waited there for what others issued.
    """
    function = np.array([_is_function(name) for name in names], bool)
    code = operators.name[row]
    unsure = function[code] if len(code) else np.zeros(0, bool)
    lane, sure = merge(comm), merge(Spans(work.start[~unsure], work.end[~unsure]))
    length, hidden, surely = measure(lane), measure(intersect(lane, merge(work))), measure(intersect(lane, sure))
    if hidden - surely <= AGREEMENT * length:
        return None
    most = names[int(np.argmax(np.bincount(code[unsure], covered_ns(work, lane)[unsure])))]
    return (
        f"{(hidden - surely) / 1e6:.1f} ms of communication lie beside nothing but the own time of autograd functions "
        f"and nodes, most of it {most!r}: if they waited there for a collective that something else had issued, which "
        f"the trace does not tell, the overlap ratio of the whole trace is as low as {surely / length:.3f}, not "
        f"{hidden / length:.3f}"
    )


def _kinds(
    operators: Rows,
    operator_arguments: Mapping[int, Arguments],
    labels: Rows,
    communication: Int64,
    names: tuple[str, ...],
    world_size: int | None,
) -> tuple[NDArray[np.int8], Int64]:
    """Return the kind of each gloo row, and the operator that issued it; `NULL` where none could be joined with it (its
    label is its kind).
    """
    label_kind = np.array([kind_of(name) for name in names], np.int8)
    own = label_kind[labels.name[communication]] if len(communication) else np.zeros(0, np.int8)
    kinds, joined = own.copy(), np.full(len(own), NULL, np.int64)
    calls = _outermost(operators, np.array(sorted(operator_arguments), np.int64))
    called = label_kind[operators.name[calls]] if len(calls) else np.zeros(0, np.int8)
    runs_as = np.array([_RUNS_AS.get(int(kind), int(kind)) for kind in called], np.int8)
    for label in np.unique(own):
        rows = np.flatnonzero(own == label)
        rows = rows[np.argsort(labels.start[communication[rows]], kind="stable")]
        issued = calls[runs_as == label]
        issued = issued[np.argsort(operators.start[issued], kind="stable")]
        # The list form of reduce-scatter runs as one all-reduce for each rank's part.
        parts = [world_size or 1 if names[code] == "c10d::reduce_scatter_" else 1 for code in operators.name[issued]]
        expected = np.repeat(issued, parts) if len(issued) else issued
        # Surplus rows were issued before the trace began; surplus calls had not run when it ended.
        rows_joined = rows[max(len(rows) - len(expected), 0) :]
        expected = expected[: len(rows_joined)]
        in_order = labels.start[communication[rows_joined]] >= operators.start[expected]
        kinds[rows_joined[in_order]] = label_kind[operators.name[expected[in_order]]]
        joined[rows_joined[in_order]] = expected[in_order]
    return kinds, joined


def _outermost(operators: Rows, calls: Int64) -> Int64:
    """Return the calls that no other call of the same thread contains."""
    start, end, thread = operators.start[calls], operators.end[calls], operators.thread[calls]
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
    sizes = [math.prod(max(length, 0) for length in shape) for shape in dims]
    total = sum(size * (width or 0) for size, (_, width) in zip(sizes, known, strict=False))
    if kind in _GATHERED:
        total = total * world_size if world_size else NULL
    columns.bytes[at] = total if 0 <= total < LARGEST_BYTES else NULL
