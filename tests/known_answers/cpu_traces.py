"""What the trace of a CPU says by plain loops over its JSON, for K2; uses nothing of the record or of AORTA's hooks.

`host_union` measures the whole trace. It shares the definition with the reader (docs/dev/trace-readers.md) and nothing
else. A thread computes while the innermost of the operators that run on it is no communication and does not wait for
any; gloo's threads never compute.

`Rows` and `windows` say of each step what the record has to say, as `aorta.gpu_check.check_table.KernelWindow`.
`c10d::*` rows on the training thread say when each collective was issued, `gloo:*` rows on gloo's worker threads when
it ran; both come in order of issue, one for one. A collective's start is the later of its issue and the end of the one
before it on its link (docs/dev/measuring.md, section 1), and a link here is a worker thread. The `gloo:*` row itself
begins later, by the time the worker took to wake up: 1 to 10 ms where others use the cores. A reduce-scatter ends for
its caller when gloo has copied the result out, inside of the caller's `wait()` (R6): with the `aten::copy_` row that
comes next on the training thread. Computation is operators and autograd nodes on the training thread, and marked
ranges, less the time inside of collectives, of FSDP's own work (its hooks run inside of autograd nodes) and of an
optimizer. In the call that issues an asynchronous collective the profiler cannot tell the host's own work, which is
computation to the record, from standing blocked inside of gloo, which is not; so there is a lower and an upper answer,
which differ by milliseconds where the machine is busy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from aorta.gpu_check.check_table import Interval, KernelWindow, span

HOOKS = ("FSDP::", "FullyShardedDataParallel.")
FUNCTIONAL = ("_c10d_functional::", "c10d_functional::")
NO_WORK = (*HOOKS, *FUNCTIONAL, "c10d::", "record_param_comms")
LABEL_OF = {
    "allreduce": "all_reduce",
    "reduce_scatter": "all_reduce",
    "allgather": "all_gather",
    "alltoall": "all_to_all",
}
"""How the name of a call begins -> gloo's label of what it issued; other names are labels themselves."""


class HostUnion(NamedTuple):
    """Lengths in nanoseconds. `by_name`: self time of the operators that compute."""

    compute_ns: int
    comm_ns: int
    hidden_ns: int
    by_name: dict[str, int]


class _Row(NamedTuple):
    start: int
    end: int
    name: str


def union(spans: Sequence[Interval]) -> list[Interval]:
    """Disjoint intervals that cover the same time; a plain loop, so that `aorta.timeline` is not judged by itself."""
    merged: list[Interval] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def host_union(trace: dict[str, Any]) -> HostUnion:
    """Measure the whole trace, as `json.load` reads it."""
    threads: dict[Any, list[_Row]] = defaultdict(list)
    gloo: list[tuple[_Row, Any]] = []
    for event in trace["traceEvents"]:
        if event.get("ph") != "X":
            continue
        row = _Row(*span(event, 0), event["name"])
        if row.name.startswith("gloo:"):
            gloo.append((row, event["tid"]))
        elif event["cat"] == "cpu_op" or (event["cat"] == "user_annotation" and row.name.startswith(HOOKS)):
            threads[event["tid"]].append(row)
    calls = {row for rows in threads.values() for row in rows if row.name.startswith("c10d::")}
    ends = _ends(calls, [row for row, _ in gloo])
    workers = {tid for _, tid in gloo} - {tid for tid, rows in threads.items() if calls.intersection(rows)}
    work: list[tuple[int, int, str]] = []
    for tid, rows in threads.items():
        if tid not in workers:
            work += _work(rows, ends)
    by_name: dict[str, int] = defaultdict(int)
    for start, end, name in work:
        by_name[name] += end - start
    compute, comm = union([(start, end) for start, end, _ in work]), union([(row.start, row.end) for row, _ in gloo])
    return HostUnion(_length(compute), _length(comm), _shared(compute, comm), dict(by_name))


def _ends(calls: set[_Row], gloo: list[_Row]) -> dict[_Row, int]:
    """When the collective of each call ended: calls and gloo's rows of one label come in the same order."""
    issued: dict[str, list[_Row]] = defaultdict(list)
    for call in sorted(calls):
        name = call.name.removeprefix("c10d::").strip("_")
        label = next((label for start, label in LABEL_OF.items() if name.startswith(start)), name)
        issued[f"gloo:{label}"].append(call)
    ends = {}
    for label, of_label in issued.items():
        ran = sorted(row for row in gloo if row.name == label)
        assert len(ran) == len(of_label), (label, len(ran), len(of_label))
        ends |= {call: row.end for call, row in zip(of_label, ran, strict=True)}
    return ends


def _work(rows: list[_Row], ends: dict[_Row, int]) -> list[tuple[int, int, str]]:
    """The pieces of one thread's time in which it computed, and the operator that did."""
    edges = [(row.start, 1, -row.end, row) for row in rows if row.end > row.start]
    edges += [(row.end, 0, -row.start, row) for row in rows if row.end > row.start]
    running: list[_Row] = []
    found: list[tuple[int, int, str]] = []
    called: _Row | None = None
    before = 0
    for at, begins, _, row in sorted(edges):
        if running and not running[-1].name.startswith(NO_WORK) and not any(each in ends for each in running):
            inner = running[-1]
            # What an operator does after a call, until the collective has ended, is waiting for it.
            since = max(before, ends[called]) if called and called.start >= inner.start else before
            if since < at:
                found.append((since, at, inner.name))
        if begins:
            if row in ends and not any(each.name.startswith(FUNCTIONAL) for each in running):
                called = row
            running.append(row)
        else:
            running.remove(row)
        before = at
    return found


def _length(spans: list[Interval]) -> int:
    return sum(end - start for start, end in spans)


def _shared(left: list[Interval], right: list[Interval]) -> int:
    """Length of what lies in both of two sorted disjoint lists."""
    at = length = 0
    for start, end in left:
        while at < len(right) and right[at][1] <= start:
            at += 1
        for low, high in right[at:]:
            if low >= end:
                break
            length += max(0, min(end, high) - max(start, low))
    return length


NOT_COMPUTING = ("c10d::", "_c10d_functional::", "fsdp::", "FSDP::", "Optimizer.")
ASYNCHRONOUS = "c10d::allreduce_"
"""As DDP issues it; FSDP issues its all-gathers inside of `FSDP::*` rows, and waits for its reduce-scatters."""


class Rows:
    """The rows of one rank's trace.

    Args:
        trace: as `json.load` reads it. mark: name of the `record_function` ranges that count as computation.
    """

    def __init__(self, trace: dict[str, Any], mark: str) -> None:
        base_ns = int(trace.get("baseTimeNanoseconds", 0))
        events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
        rows = [(*span(event, base_ns), event) for event in events]
        training = next(e["tid"] for e in events if e["name"].startswith("c10d::"))
        mine = sorted((a, b, e["name"], e.get("cat")) for a, b, e in rows if e["tid"] == training)
        calls = [(a, b, name) for a, b, name, _ in mine if name.startswith("c10d::")]
        copies = [(a, b) for a, b, name, _ in mine if name == "aten::copy_"]
        worked = sorted((a, b, e["tid"]) for a, b, e in rows if e["name"].startswith("gloo:"))
        self.issues = [(a, b) for a, b, _ in calls]
        self.spans: list[Interval] = []
        free_at: dict[int, int] = {}
        for (issue, _, name), (start, end, thread) in zip(calls, worked, strict=True):
            out = next(b for a, b in copies if a >= end) if "reduce_scatter" in name else end
            self.spans.append((min(max(issue, free_at.get(thread, 0)), start), out))
            free_at[thread] = end
        busy = [(a, b) for a, b, name, category in mine if name == mark or category == "cpu_op"]
        other = [(a, b, name) for a, b, name, _ in mine if name.startswith(NOT_COMPUTING)]
        blocked = [(a, b) for a, b, name in other if not name.startswith(ASYNCHRONOUS)]
        self.compute = _less(union(busy), union([(a, b) for a, b, _ in other]))
        self.compute_and_issuing = _less(union(busy), union(blocked))

    def issued_in(self, step: Interval) -> list[Interval]:
        """The calls that issued the collectives of a step, in order."""
        return [issue for issue in self.issues if step[0] <= issue[0] < step[1]]


def windows(rows: Rows, steps: Sequence[Interval], compute: Sequence[Interval]) -> list[KernelWindow]:
    """What the profiler saw in each of these steps, `[start, end)` in nanoseconds of the Unix epoch; `compute` is one
    of the two answers of `rows`.
    """
    return [
        KernelWindow(
            [span for issue, span in zip(rows.issues, rows.spans, strict=True) if low <= issue[0] < high],
            [(max(begin, low), min(end, high)) for begin, end in compute if begin < high and end > low],
            0,
        )
        for low, high in steps
    ]


def _less(spans: Sequence[Interval], holes: Sequence[Interval]) -> list[Interval]:
    """What of disjoint `spans` lies outside of disjoint `holes`; both sorted."""
    left = []
    for begin, end in spans:
        at = begin
        for low, high in holes:
            if low < end and high > at:
                left.append((at, low))
                at = high
        left.append((at, end))
    return [(low, high) for low, high in left if low < high]
