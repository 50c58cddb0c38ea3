"""Computation, communication and the hidden part of a CPU trace by plain loops over its JSON, for K2.

It shares the definition with the reader (docs/dev/trace-readers.md) and nothing else. A thread computes while the
innermost of the operators that run on it is no communication and does not wait for any; gloo's threads never compute.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from aorta.gpu_check.check_table import Interval, span

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
