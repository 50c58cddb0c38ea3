"""Writes one trace of an RPC run: a process per worker, a slice per call on both sides, and arrows between them.

Also checks that every remote slice lies inside its call. Must not load torch, or drop an event of a worker's trace.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from aorta.analysis.load import microseconds
from aorta.analysis.merge.alignment import RankAlignment
from aorta.analysis.merge.causality import Causality
from aorta.analysis.merge.trace_choice import scanning
from aorta.analysis.merge.trace_writer import TIDS_PER_RANK, TraceWriter, TrackIdentity
from aorta.errors import InputError
from aorta.records.rpc_files import CALL_MARK, Call, CallMemory
from aorta.rpc.rpc_records import REMOTE_CALL, TO_HERE, RpcRecords, is_wait, memory_of

_FIRST_ARROW: Final = 1 << 50
"""Ids of the arrows lie above those of any trace (`merge.trace_writer` numbers them from 0 by trace)."""


def write_trace(
    writer: TraceWriter, run: RpcRecords, alignments: Mapping[int, RankAlignment], base_ns: int
) -> tuple[Causality, int]:
    """Write all events. Returns the result of the causality check, and the number of remote slices found."""
    found = Causality()
    calls = {call.call_id: call for call in run.calls}
    slices: dict[str, tuple[int, int, int, int]] = {}
    for worker, name in run.workers.items():
        identity = TrackIdentity(worker, f"{name} (node {worker})", main_pid=worker)
        for number, trace in enumerate(run.traces):
            if trace.rank != worker:
                continue
            memory = memory_of(trace)
            with scanning(trace.path) as scanner:
                for event in scanner.events():
                    try:
                        identity.rename(event, number)
                        at = alignments[worker].move(event, trace.base_ns or 0, base_ns)
                        if is_wait(event):
                            event["name"] = msgspec.Raw(msgspec.json.encode(TO_HERE))
                        title = msgspec.json.decode(event["name"], type=str) if "name" in event else ""
                        if at is not None and CALL_MARK in title and bytes(event["ph"]) == b'"X"':
                            call_id = _mark(event, title, worker, calls, memory)
                            length = microseconds.of_value(bytes(event["dur"]))
                            slices[call_id] = (worker, int(bytes(event["tid"])), at, at + length)
                    except (KeyError, ValueError, TypeError, RecursionError) as error:
                        raise InputError(
                            f"{trace.path}: event {scanner.count}: not a trace event ({error!r})"
                        ) from error
                    writer.write(event)
        for missing in identity.missing_names():
            writer.write(missing)
        if not any(trace.rank == worker for trace in run.traces):
            label = {"name": f"{name} (node {worker})"}
            writer.write({"ph": "M", "name": "process_name", "pid": worker, "tid": 0, "ts": 0, "args": label})
    _write_calls(writer, run, alignments, base_ns, slices, found)
    return found, len(slices)


def _mark(
    event: dict[str, msgspec.Raw],
    title: str,
    worker: int,
    calls: Mapping[str, Call],
    memory: Mapping[str, CallMemory],
) -> str:
    """Move the call's id from the name into the arguments, so that calls of one function add up under one name; what
    it did to memory is said there too.
    """
    name, _, call_id = title.rpartition(CALL_MARK)
    args = msgspec.json.decode(event["args"]) if "args" in event else {}
    call = calls.get(call_id)
    args |= {"call_id": call_id, "node_id": worker, "caller": None if call is None else call.caller}
    if (found := memory.get(call_id)) is not None:
        args |= {
            "allocated_bytes": found.allocated_bytes,
            "freed_bytes": found.freed_bytes,
            "peak_bytes": found.peak_bytes,
        }
    event["name"] = msgspec.Raw(msgspec.json.encode(name + REMOTE_CALL))
    event["args"] = msgspec.Raw(msgspec.json.encode(args))
    return call_id


def _write_calls(
    writer: TraceWriter,
    run: RpcRecords,
    alignments: Mapping[int, RankAlignment],
    base_ns: int,
    slices: Mapping[str, tuple[int, int, int, int]],
    found: Causality,
) -> None:
    """Write the calls as tracks of their callers, overlapping calls on separate ones."""
    free: dict[tuple[int, int], int] = {}
    arrow = _FIRST_ARROW

    def us(instant_ns: int) -> msgspec.Raw:
        return msgspec.Raw(microseconds.as_text(instant_ns - base_ns))

    for call in run.calls:
        if call.reply_ns is None or call.caller not in alignments:
            why = "a call without an answer" if call.reply_ns is None else "no trace of its caller"
            found.skipped[why] = found.skipped.get(why, 0) + 1
            continue
        clock = alignments[call.caller]
        begin, end = clock.to_reference(call.issue_ns), clock.to_reference(call.reply_ns)
        lane = next(n for n in range(len(run.calls) + 1) if free.get((call.caller, n), begin) <= begin)
        free[call.caller, lane] = end
        tid = (call.caller + 1) * TIDS_PER_RANK + TIDS_PER_RANK - 1 - lane
        here = {"pid": call.caller, "tid": tid}
        args = {
            "call_id": call.call_id,
            "node_id": call.caller,
            "callee": call.callee,
            "window": call.window,
            "parent": call.parent,
            "error": call.error,
        }
        writer.write(
            {
                "ph": "X",
                "cat": "rpc",
                "name": call.name,
                **here,
                "ts": us(begin),
                "dur": us(base_ns + end - begin),
                "args": args,
            }
        )
        if call.call_id not in slices:
            if call.traced:
                found.skipped["no slice of it on its callee"] = found.skipped.get("no slice of it on its callee", 0) + 1
            continue
        worker, thread, start, stop = slices[call.call_id]
        there = {"pid": worker, "tid": thread}
        # An arrow binds to the slice around its end, so the reply leaves at the last instant inside the remote slice.
        for name, source, leaves, target, arrives in (
            ("call", here, begin, there, start),
            ("reply", there, max(start, stop - 1), here, end),
        ):
            common: dict[str, Any] = {"cat": "rpc", "name": name, "id": arrow}
            writer.write({"ph": "s", **common, **source, "ts": us(leaves)})
            writer.write({"ph": "f", "bp": "e", **common, **target, "ts": us(arrives)})
            arrow += 1
        other = alignments[worker]
        bounds = (clock.bound_ns(call.issue_ns), other.bound_ns(call.issue_ns))
        found.check(f"{call.name} {call.call_id}: runs before it is issued", begin - start, bounds)
        found.check(f"{call.name} {call.call_id}: is answered before it has run", stop - end, bounds)
    for caller, lane in sorted(free):
        tid = (caller + 1) * TIDS_PER_RANK + TIDS_PER_RANK - 1 - lane
        label = {"name": "RPC calls" + (f" ({lane + 1})" if lane else "")}
        writer.write({"ph": "M", "name": "thread_name", "pid": caller, "tid": tid, "ts": 0, "args": label})
