"""Builds the rows of a CPU trace, where communication runs on gloo's worker threads and compute on the others.

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
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from aorta.read.frames import Groups, Numbered
from aorta.read.ledger import COMM, LANES, Gap, lacking
from aorta.read.traces.consistency import EDGES, OTHERS, rounded
from aorta.read.traces.interval_table import KIND_CODE, NULL, IntervalClass, kind_of, known_dtype
from aorta.read.traces.kineto.events import (
    LARGEST_BYTES,
    OPERATORS,
    PARAMETERS,
    Cached,
    CollectiveColumns,
    Event,
    EventDecoder,
    Identifiers,
    by_category,
    inputs_of,
    times_of,
)
from aorta.read.traces.open import joined
from aorta.read.traces.reader import MARK
from aorta.timeline.arrays import Int64, IntervalArray, containing, covered_ns, intersect, measure, merge, self_times
from aorta.timeline.classes import COMPUTE
from aorta.timeline.overlap import AGREEMENT, DECIDED

HELD_BYTES: Final = 128 << 20
"""Most text of a trace that is kept until a row of a device appears."""
HOOKS: Final = ("FSDP::", "FullyShardedDataParallel.")
"""Ranges that FSDP2 and FSDP1 mark round their hooks. These run inside of autograd's operators, and what no operator
in them takes they stand waiting for a collective.
"""
LABEL: Final = "gloo:"
_OTHER_LABEL: Final = "nccl:"
_CALL: Final = "c10d::"
_FUNCTIONAL: Final = ("_c10d_functional::", "c10d_functional::")
_NO_COMPUTE: Final = (_CALL, *_FUNCTIONAL, *HOOKS)
_ENGINE: Final = ("autograd::engine::", "torch::autograd::")
_COMPILED: Final = ("CompiledFunction", "Torch-Compiled Region")
"""What torch.compile made: its own time is that of fused kernels, which are no operators; its collectives are
functional.
"""
_REDUCE_SCATTER, _ALL_REDUCE, _BARRIER = (KIND_CODE[kind] for kind in ("reducescatter", "allreduce", "barrier"))
_GATHERED: Final = (KIND_CODE["allgather"], KIND_CODE["gather"])
"""Kinds whose label has one rank's part of the full array as its input."""
_CROSSED: Final = 0.1
"""Part of their time, from which on operators that cross others of their thread are no matter of rounding. A choice."""
_DIMS: Final = msgspec.json.Decoder(list[list[int]])
_TYPES: Final = msgspec.json.Decoder(list[str])


class _Rows(NamedTuple):
    """Columns of operators or labels, ns. `argument`: the code of a label's inputs, `NULL` of an operator."""

    start: Int64
    end: Int64
    name: Int64
    thread: Int64
    argument: Int64


class HostWork:
    """Collects the operators of a trace, the ranges that FSDP marks round its hooks, and gloo's labels.

    A trace of a device needs none of them, but Kineto writes them before the device's rows. So pieces are kept as text
    until a row of a device appears, and read once none can come any more or `HELD_BYTES` are reached.
    """

    def __init__(self, decode: EventDecoder) -> None:
        self.names, self.inputs = Numbered(), Numbered()
        self.threads = Identifiers()
        self.counters: Counter[str] = Counter()
        self._decode = decode
        self._at_once = False
        self._held: list[bytes] = []
        self._held_bytes = 0
        self.processes = set[Any]()
        self._process: Any = None
        self._roles = Cached(_role)
        self._parts: list[dict[str, Int64]] = []

    def add(self, text: bytes | memoryview, host: dict[Any, list[Event]]) -> None:
        """Take a piece of the event array, as text, and its events of the host by their names."""
        if self._at_once:
            self._read(host)
            return
        self._held.append(bytes(text))
        self._held_bytes += len(text)
        if self._held_bytes > HELD_BYTES:
            self.read_kept()

    def read_kept(self) -> None:
        """Read what was kept as text, and from now on every piece at once."""
        self._at_once, self._decode.operators = True, "timed"
        for text in self._held:
            self._read(by_category(self._decode.with_operators(text, self.counters))[2])
        self._held.clear()

    @cached_property
    def rows(self) -> tuple[_Rows, _Rows]:
        """Return operators and hooks, and gloo's rows, once all pieces are read."""
        columns = joined(self._parts, *_Rows._fields)
        label = _begins(self.names, LABEL)[columns["name"]]
        operators, labels = (_Rows(*(columns[name][chosen] for name in _Rows._fields)) for chosen in (~label, label))
        return operators, labels

    def _read(self, host: dict[Any, list[Event]]) -> None:
        events, codes, labels = list[Event](), list[int](), list[int]()
        for name, named in host.items():
            role = self._roles[name]
            kept = [event for event in named if event.cat in OPERATORS] if role == "operator" else named
            if role and kept:
                if role == "label":
                    labels += range(len(events), len(events) + len(kept))
                events += kept
                codes += [self.names[name]] * len(kept)
        argument = np.full(len(events), NULL, np.int64)
        self.processes.update(events[index].pid for index in labels)
        inputs = inputs_of([events[index] for index in labels])
        argument[labels] = [self.inputs[bytes(given.dims), bytes(given.types)] for given in inputs]
        keep, start, end = times_of(events, self.counters)
        if self._process is None and keep.any():
            self._process = events[int(np.argmax(keep))].pid
        # Threads of other processes are told apart by their process.
        ids = [event.tid if event.pid == self._process else (event.pid, event.tid) for event in events]
        columns = {"name": np.array(codes, np.int64), "thread": self.threads.codes(ids), "argument": argument}
        columns = {name: column[keep] for name, column in columns.items()}
        self._parts.append({"start": start[keep], "end": end[keep], **columns})


def _role(name: object) -> str:
    """Return what an event is used for; empty if it is unused."""
    if not isinstance(name, str) or name == PARAMETERS or name.startswith(_OTHER_LABEL) or MARK.match(name):
        return ""
    return "hook" if name.startswith(HOOKS) else "label" if name.startswith(LABEL) else "operator"


def host_rows(
    host: HostWork, world_size: int | None, counters: Counter[str], notes: list[str], gaps: list[Gap]
) -> tuple[dict[str, Int64], CollectiveColumns]:
    """Return the rows of communication and of compute, without ranks and steps. Gloo's rows without an operator are
    counted.

    Args:
        counters, notes, gaps: where to put what is said of them.
    """
    (operators, labels), names = host.rows, tuple(host.names)
    kinds, issuer, early, lost = _issuers(operators, labels, names, world_size)
    counters["comm_unlinked"] += int((issuer == NULL).sum())
    comm = IntervalArray(labels.start, labels.end)
    row, work = _work(operators, labels, names, issuer)
    gaps.extend(_impossible(operators))
    if early > OTHERS:
        gaps.extend(lacking(f"{early} rows of gloo start before the operators that issued them", *LANES, seen=False))
    if lost > EDGES * len(kinds):
        gaps.extend(lacking(f"{lost} operators of communication have no row of gloo", COMM))
    if len(host.processes) > 1:
        gaps.extend(lacking(f"gloo ran in {len(host.processes)} processes of one trace", *LANES, seen=False))
    calling = np.isin(labels.thread, operators.thread[_begins(names, _CALL)[operators.name]])
    calling = calling[~np.isin(kinds, (KIND_CODE["send"], KIND_CODE["recv"]))]  # those may run where they are called
    if 2 * np.count_nonzero(calling) > len(calling):
        gaps.extend(lacking("gloo ran on a thread that called it, so threads are not known", COMPUTE, seen=False))
    if doubt := _doubt(comm, row, work, operators, names):
        notes.append(doubt)

    collectives = CollectiveColumns(len(kinds) + len(row))
    of_comm = slice(len(kinds))
    sizes = [_size(dims, types, world_size, collectives.dtypes) for dims, types in host.inputs]
    plain, gathered, dtype = np.array(sizes, np.int64).reshape(-1, 3)[labels.argument].T
    size = np.where(np.isin(kinds, _GATHERED), gathered, plain)
    collectives.kind[of_comm], collectives.dtype[of_comm] = kinds, dtype
    collectives.bytes[of_comm] = np.where((plain == NULL) & (kinds == _BARRIER), 0, size)
    threads, _ = host.threads.numbers()
    columns = {
        "start_ns": np.concatenate((comm.start, work.start)),
        "end_ns": np.concatenate((comm.end, work.end)),
        "stream": threads[np.concatenate((labels.thread, operators.thread[row]))],
        "name": np.concatenate((labels.name, operators.name[row])),
        "operator": np.concatenate((np.full(len(kinds), NULL, np.int64), row)),
        "cls": np.repeat([int(IntervalClass.COMM), int(IntervalClass.COMPUTE)], [len(kinds), len(row)]),
    }
    return columns, collectives


def _issuers(
    operators: _Rows, labels: _Rows, names: Sequence[str], world_size: int | None
) -> tuple[NDArray[np.int8], Int64, int, int]:
    """Return the kind of each gloo row, and the operator that issued it; `NULL` where none could be joined with it (its
    label is its kind, if no other runs as that). And how many rows start before their operator, and how many operators
    have none.
    """
    kind_of_name = np.array([kind_of(name) for name in names], np.int8)
    # Of nested calls of a thread the outermost counts.
    calls = np.flatnonzero(_begins(names, _CALL)[operators.name])
    calls = calls[np.lexsort((-operators.end[calls], operators.start[calls], operators.thread[calls]))]
    outermost = [calls[:0]]
    for own in Groups(operators.thread[calls]).parts(calls):
        reach = np.maximum.accumulate(operators.end[own])
        outermost.append(own[np.append(True, operators.start[own[1:]] >= reach[:-1])])
    calls = np.concatenate(outermost)
    calls = calls[np.argsort(operators.start[calls], kind="stable")]
    called = kind_of_name[operators.name[calls]]
    runs_as = np.where(called == _REDUCE_SCATTER, _ALL_REDUCE, called)  # torch: ProcessGroupGloo
    own = kind_of_name[labels.name]
    kinds, issuer, early, lost = own.copy(), np.full(len(own), NULL, np.int64), 0, 0
    for label in np.unique(np.append(own, runs_as)):
        rows = np.flatnonzero(own == label)
        rows = rows[np.argsort(labels.start[rows], kind="stable")]
        issued = calls[runs_as == label]
        if label == _ALL_REDUCE and (not len(issued) or (called == _REDUCE_SCATTER).any()):
            kinds[rows] = NULL
        # The list form of reduce-scatter runs as one all-reduce for each rank's part.
        parts = [world_size or 1 if names[code] == "c10d::reduce_scatter_" else 1 for code in operators.name[issued]]
        expected = np.repeat(issued, np.array(parts, np.int64))
        # Surplus rows were issued before the trace began; surplus calls had not run when it ended.
        rows = rows[max(len(rows) - len(expected), 0) :]
        lost += len(expected) - len(rows)
        expected = expected[: len(rows)]
        in_order = labels.start[rows] >= operators.start[expected]
        early += int(np.count_nonzero(~in_order))
        kinds[rows[in_order]] = kind_of_name[operators.name[expected[in_order]]]
        issuer[rows[in_order]] = expected[in_order]
    return kinds, issuer, early, lost


def _work(operators: _Rows, labels: _Rows, names: Sequence[str], issuer: Int64) -> tuple[Int64, IntervalArray]:
    """Return the self time of operators that compute, without what they waited for: the row of the operator that each
    piece belongs to, and the pieces. `issuer`: the operator that issued each collective, or `NULL`.

    Operators on gloo's threads and those inside a `c10d::` operator, where they copy for it, are communication. A
    `c10d::` operator returns when its collective is issued, and nothing marks `Work.wait()`. So an operator's own time
    ends at the last call it made, itself or in one nested in it, and goes on when that collective has ended.
    (Functional collectives have an operator that waits.)
    """
    start, end, thread = operators.start, operators.end, operators.thread
    is_call, functional = _begins(names, _CALL)[operators.name], _begins(names, _FUNCTIONAL)[operators.name]
    host = np.flatnonzero(~np.isin(thread, np.setdiff1d(labels.thread, thread[is_call])))
    owner, pieces = self_times(IntervalArray(start[host], end[host]), thread[host])
    owner = host[owner]
    kept = ~_begins(names, _NO_COMPUTE)[operators.name[owner]]
    owner, begin, finish = owner[kept], pieces.start[kept], pieces.end[kept]

    ended = np.full(len(start), NULL, np.int64)
    np.maximum.at(ended, issuer[issuer != NULL], labels.end[issuer != NULL])
    waits = np.zeros(len(owner), bool)
    for thread_id in np.unique(thread[is_call]):
        of_thread, here = thread == thread_id, np.flatnonzero(thread[owner] == thread_id)
        calls, explicit = np.flatnonzero(of_thread & is_call), np.flatnonzero(of_thread & functional)
        waits[here] = containing(begin[here], merge(IntervalArray(start[calls], end[calls]))) >= 0
        calls = calls[ended[calls] != NULL]
        calls = calls[containing(start[calls], merge(IntervalArray(start[explicit], end[explicit]))) < 0]
        if len(calls):
            calls = calls[np.argsort(start[calls], kind="stable")]
            last = calls[np.searchsorted(start[calls], begin[here], side="right") - 1]
            called = (start[last] <= begin[here]) & (start[last] >= start[owner[here]])
            begin[here] = np.where(called, np.maximum(begin[here], ended[last]), begin[here])
    kept = ~waits & (begin < finish)
    return owner[kept], IntervalArray(begin[kept], finish[kept])


def _impossible(operators: _Rows) -> Iterator[Gap]:
    """Yield what the lanes lack where operators have rounded times, overlap others of their thread without being nested
    in them, or have no length though others of their name have one.
    """
    length = operators.end - operators.start
    order = np.lexsort((-operators.end, operators.start, operators.thread))
    start, end, thread = operators.start[order], operators.end[order], operators.thread[order]
    crossed = np.where(end[1:] > end[:-1], np.maximum(end[:-1] - start[1:], 0), 0)[thread[1:] == thread[:-1]]
    if len(length) and (why := rounded(operators.start, length)):
        yield from lacking(why, *LANES, seen=False)
    if crossed.sum() > _CROSSED * length.sum():
        why = f"{np.count_nonzero(crossed)} operators overlap others of their thread, so times or threads are wrong"
        yield from lacking(why, COMPUTE, seen=False)
    counts = np.bincount(operators.name[length > 0], minlength=len(operators.name))
    sums = np.bincount(operators.name, length, minlength=len(counts))
    lost_ns = (sums / np.maximum(counts, 1))[operators.name[length == 0]].sum()
    if lost_ns > DECIDED * (lost_ns + length.sum()):
        yield from lacking(f"the length of {np.count_nonzero(length == 0)} operators is not known", COMPUTE)


def _begins(names: Iterable[str], prefix: str | tuple[str, ...]) -> NDArray[np.bool_]:
    return np.array([name.startswith(prefix) for name in names], bool)


def _doubt(comm: IntervalArray, row: Int64, work: IntervalArray, operators: _Rows, names: Sequence[str]) -> str | None:
    """Return what to say where much communication is hidden only by the own time of nodes of autograd and of
    `autograd.Function` (no namespace), which run Python and may have waited there for what others issued.
    """
    function = np.array([("::" not in name or name.startswith(_ENGINE)) for name in names], bool)
    code = operators.name[row]
    unsure = (function & ~_begins(names, _COMPILED))[code]
    lane, sure = merge(comm), merge(IntervalArray(work.start[~unsure], work.end[~unsure]))
    length, hidden, surely = measure(lane), measure(intersect(lane, merge(work))), measure(intersect(lane, sure))
    if hidden - surely <= AGREEMENT * length:
        return None
    most = names[int(np.argmax(np.bincount(code[unsure], covered_ns(work, lane)[unsure])))]
    return (
        f"{(hidden - surely) / 1e6:.1f} ms of communication cannot be classified: it overlaps autograd functions or "
        f"nodes, mostly {most!r}, which may compute or wait; the overlap ratio of the whole trace is between "
        f"{surely / length:.3f} and {hidden / length:.3f}"
    )


def _size(dims: bytes, types: bytes, world_size: int | None, dtypes: Numbered) -> tuple[int, int, int]:
    """Return bytes of inputs (present with `record_shapes`), of all ranks' inputs, and the code of their data type;
    each `NULL` where it is not known.
    """
    try:
        shapes, type_names = _DIMS.decode(dims), _TYPES.decode(types)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return NULL, NULL, NULL
    known = [known_dtype(name) for name in type_names[: len(shapes)]]
    if not known or any(width is None for _, width in known):
        return NULL, NULL, NULL
    code = dtypes[str(known[0][0])] if len({name for name, _ in known}) == 1 else NULL
    elements = [math.prod(max(length, 0) for length in shape) for shape in shapes]
    total = sum(count * (width or 0) for count, (_, width) in zip(elements, known, strict=False))
    of_all = total * world_size if world_size else NULL
    plain, gathered = (size if 0 <= size < LARGEST_BYTES else NULL for size in (total, of_all))
    return plain, gathered, code
