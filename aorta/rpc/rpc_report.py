"""The command `aorta rpc`: reads a run folder of `workload=rpc`, prints the table, and writes one trace for Perfetto.

The table has the calls and operators of all workers, by node and name, in the layout first described for RPC profiling
in torch. The trace has a process per worker, a slice per call on both sides, and arrows between them; every remote
slice is checked to lie inside its call. Must not load torch or pandas, fail because a worker died (what it did not
write is reported as missing), print a number that is not known, drop an event of a worker's trace, or attribute an
operator to a call unless it lies inside the call's slice on the same thread.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from aorta.command_line import command, to_stderr, to_stdout
from aorta.documents.formatting import TEXT
from aorta.errors import EXIT_OK, CausalityViolated, Inconclusive
from aorta.merge.merge_traces import Causality
from aorta.merge.sources import RankAlignment, align_ranks, describe_alignment, find_clocks
from aorta.merge.tracks import (
    TIDS_PER_RANK,
    TraceWriter,
    TrackIdentity,
    copy_events,
    metadata_event,
    trace_file,
)
from aorta.read.traces.chrome_json import Event, ns_as_text, ns_of_value
from aorta.records.run_files import (
    CALL_MARK,
    TRACE_FILE,
    Call,
    CallMemory,
)
from aorta.rpc.rpc_records import TO_HERE, RemoteOperator, RpcRecords, is_wait, memory_of, read_operators, read_run
from aorta.terminal_style import table

_REMOTE_OP: Final = "#remote_op: "
_REMOTE_CALL: Final = "#remote_call"
_FIRST_ARROW: Final = 1 << 50
"""Ids of the arrows lie above those of any trace (`merge.tracks` numbers them from 0 by trace)."""


def write_trace(
    writer: TraceWriter, run: RpcRecords, alignments: Mapping[int, RankAlignment], base_ns: int
) -> tuple[Causality, int]:
    """Write all events. Returns the result of the causality check, and the number of remote slices found."""
    calls = {call.call_id: call for call in run.calls}
    slices: dict[str, tuple[int, int, int, int]] = {}  # call id -> worker, thread, begin, end
    for worker, name in run.workers.items():
        label = f"{name} (node {worker})"
        of_worker = {number: trace for number, trace in enumerate(run.traces) if trace.rank == worker}
        memory = {call_id: used for trace in of_worker.values() for call_id, used in memory_of(trace).items()}

        def see(event: Event, at: int | None, node: int = worker, memory: Mapping[str, CallMemory] = memory) -> None:
            if is_wait(event):
                event["name"] = msgspec.Raw(msgspec.json.encode(TO_HERE))
            title = msgspec.json.decode(event["name"], type=str) if "name" in event else ""
            if at is None or CALL_MARK not in title or bytes(event["ph"]) != b'"X"':
                return
            # The call's id goes into the arguments, so that calls of one function add up by name.
            title, _, call_id = title.rpartition(CALL_MARK)
            args = msgspec.json.decode(event["args"]) if "args" in event else {}
            caller = calls[call_id].caller if call_id in calls else None
            args |= {"call_id": call_id, "node_id": node, "caller": caller}
            if (used := memory.get(call_id)) is not None:
                args |= {key: getattr(used, key) for key in ("allocated_bytes", "freed_bytes", "peak_bytes")}
            event["name"] = msgspec.Raw(msgspec.json.encode(title + _REMOTE_CALL))
            event["args"] = msgspec.Raw(msgspec.json.encode(args))
            slices[call_id] = (node, int(bytes(event["tid"])), at, at + ns_of_value(bytes(event["dur"])))

        if of_worker:
            copy_events(
                writer, of_worker, TrackIdentity(worker, label, main_pid=worker), alignments[worker], base_ns, see
            )
        else:
            writer.write(metadata_event("process_name", worker, {"name": label}))
    return _write_calls(writer, run, alignments, base_ns, slices), len(slices)


def _write_calls(
    writer: TraceWriter,
    run: RpcRecords,
    alignments: Mapping[int, RankAlignment],
    base_ns: int,
    slices: Mapping[str, tuple[int, int, int, int]],
) -> Causality:
    """Write the calls as tracks of their callers, overlapping calls on separate ones, and check them."""
    check, arrow = Causality(), _FIRST_ARROW
    tracks: dict[tuple[int, int], tuple[int, int]] = {}  # caller and lane -> thread, and when it is free

    def us(instant_ns: int) -> msgspec.Raw:
        return msgspec.Raw(ns_as_text(instant_ns - base_ns))

    for call in run.calls:
        if call.reply_ns is None or call.caller not in alignments:
            check.skipped["a call without an answer" if call.reply_ns is None else "no trace of its caller"] += 1
            continue
        clock = alignments[call.caller]
        begin, end = clock.to_reference(call.issue_ns), clock.to_reference(call.reply_ns)
        lane = next(n for n in range(len(run.calls) + 1) if tracks.get((call.caller, n), (0, begin))[1] <= begin)
        tid = (call.caller + 1) * TIDS_PER_RANK + TIDS_PER_RANK - 1 - lane
        tracks[call.caller, lane] = tid, end
        here = {"pid": call.caller, "tid": tid}
        args = {"call_id": call.call_id, "node_id": call.caller, "callee": call.callee, "window": call.window}
        args |= {"parent": call.parent, "error": call.error}
        slice_ = {"ph": "X", "cat": "rpc", "name": call.name, **here, "ts": us(begin), "dur": us(base_ns + end - begin)}
        writer.write({**slice_, "args": args})
        if call.call_id not in slices:
            if call.traced:
                check.skipped["no slice of it on its callee"] += 1
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
        bounds = (clock.bound_ns(call.issue_ns), alignments[worker].bound_ns(call.issue_ns))
        check.check(f"{call.name} {call.call_id}: runs before it is issued", begin - start, bounds)
        check.check(f"{call.name} {call.call_id}: is answered before it has run", stop - end, bounds)
    for (caller, lane), (tid, _) in sorted(tracks.items()):
        label = {"name": "RPC calls" + (f" ({lane + 1})" if lane else "")}
        writer.write(metadata_event("thread_name", caller, label, tid))
    return check


@command()
def rpc_report(arguments: Sequence[str]) -> int:
    """Run `aorta rpc`; returns its exit code (argparse itself ends with 0 or 2).

    Raises:
        CausalityViolated: with `--check`, a remote slice lies outside its call.
        Inconclusive: with `--check`, there was nothing to check.
    """
    options = parser().parse_args(arguments)
    folder = Path(options.folder)
    run = read_run(folder)
    # One trace's operators in memory at a time.
    operators = ((trace.rank, row) for trace in run.traces for row in read_operators(trace, run.calls))
    to_stdout(_table(make_rows(run.calls, operators), run.workers))
    output = Path(options.output) if options.output else folder / TRACE_FILE
    notes: list[str] = [f"incomplete: {what}" for what in run.missing]
    clocks = find_clocks(None, run.traces, [run.path])
    alignments = align_ranks(run.traces, clocks, options.align, notes)
    base_ns = min((trace.base_ns or 0 for trace in run.traces), default=0)
    with trace_file(output, overwrite=options.overwrite) as writer:
        causality, slices = write_trace(writer, run, alignments, base_ns)
        writer.finish(
            {
                "schemaVersion": 1,
                "displayTimeUnit": "ms",
                "baseTimeNanoseconds": base_ns,
                "clockSync": clocks.as_json(options.align, alignments),
                "rpc": {
                    "workers": {str(worker): name for worker, name in run.workers.items()},
                    "calls": len(run.calls),
                    "remote_calls": slices,
                    "incomplete": bool(run.missing),
                    "missing": run.missing,
                    "causality": causality.as_json(),
                },
            }
        )
    for note in notes:
        to_stderr(f"note: {note}")
    last = f"{output}: {len(run.traces)} traces, {len(run.calls)} calls"
    if run.traces:
        last += f", {describe_alignment(options.align, alignments)}"
    to_stdout("\n".join([*causality.lines(), last]))
    if options.check and causality.violations:
        raise CausalityViolated(f"{len(causality.violations)} remote slices lie outside their calls")
    if options.check and not causality.pairs:
        raise Inconclusive("nothing to check: no pair of call and remote slice")
    return EXIT_OK


def parser() -> argparse.ArgumentParser:
    words = argparse.ArgumentParser(
        description="Every call of an RPC run and what it ran where: a table, and one trace with arrows for Perfetto.",
        epilog="Exit codes: 0 done (also if a worker is missing, with a note), 1 --check found a remote slice outside "
        "its call, 2 bad input, 4 --check found nothing to check.",
    )
    words.add_argument("folder", metavar="DIR", help="run folder of train.py workload=rpc profiling.enabled=true")
    words.add_argument("-o", "--output", metavar="FILE", help=f"the trace (default: DIR/{TRACE_FILE})")
    words.add_argument("--align", choices=("clock", "none", "start_profile"), default="clock", help="as aorta merge")
    words.add_argument("--check", action="store_true", help="fail when a remote slice lies outside its call")
    words.add_argument("--overwrite", action="store_true", help="replace the trace")
    return words


@dataclass
class CallRow:
    """One name on one node. The row of a call measures from issue to reply: its caller's CPU may do anything in that
    time, many calls may wait at once, and so it has no self time and no share of the CPU's time (`waits`).

    Bytes count what was allocated, not what was freed; None where no memory was measured.
    """

    name: str
    node: int
    self_ns: int = 0
    total_ns: int = 0
    count: int = 0
    unanswered: int = 0
    waits: bool = False
    allocated_bytes: int | None = None
    self_allocated_bytes: int | None = None

    def add_memory(self, allocated_bytes: int, self_allocated_bytes: int) -> None:
        self.allocated_bytes = (self.allocated_bytes or 0) + allocated_bytes
        self.self_allocated_bytes = (self.self_allocated_bytes or 0) + self_allocated_bytes


def make_rows(calls: Iterable[Call], operators: Iterable[tuple[int, RemoteOperator]]) -> list[CallRow]:
    """Return the rows by node, then total time, longest first. `operators` come with the node that they ran on."""
    rows: dict[tuple[int, str], CallRow] = {}

    def row(node: int, name: str) -> CallRow:
        return rows.setdefault((node, name), CallRow(name, node))

    for call in calls:
        entry = row(call.caller, call.name)
        entry.count += 1
        entry.waits = True
        if call.reply_ns is None:
            entry.unanswered += 1
        else:
            entry.total_ns += call.reply_ns - call.issue_ns
    for node, operator in operators:
        name = f"{operator.serves}{_REMOTE_OP}{operator.name}" if operator.serves else operator.name
        entry = row(node, name if operator.call_id is None else operator.name + _REMOTE_CALL)
        entry.count += 1
        entry.waits |= operator.waits
        entry.self_ns += operator.self_ns
        entry.total_ns += operator.end_ns - operator.start_ns
        if operator.memory is not None:
            inside = operator.memory.operators
            by_operators = sum(figures.self_allocated_bytes for figures in inside.values())
            entry.add_memory(operator.memory.allocated_bytes, operator.memory.allocated_bytes - by_operators)
            for name, figures in inside.items():
                served = row(node, f"{operator.name}{_REMOTE_OP}{name}")
                served.add_memory(figures.allocated_bytes, figures.self_allocated_bytes)
    return sorted(rows.values(), key=lambda row: (row.node, -row.total_ns, row.name))


def _table(rows: list[CallRow], names: dict[int, str]) -> str:
    """Return the table as text. Percentages are of the self time of all rows of all nodes. A wait has none, nor what
    adds up to more (an operator inside one of its own name). There are columns of memory where any was measured.
    """
    whole = sum(row.self_ns for row in rows)

    def share(part: int) -> str:
        return f"{100 * part / whole:.2f}%" if whole else "-"

    def time(ns: float) -> str:
        if ns >= 1e9:
            return f"{ns / 1e9:.3f}s"
        return f"{ns / 1e6:.3f}ms" if ns >= 1e6 else f"{ns / 1e3:.3f}us"

    heads = ["Name", "Self CPU total %", "Self CPU total", "CPU total %", "CPU total", "CPU time avg"]
    heads += ["Number of Calls", "Node ID", "Node", "CPU Mem", "Self CPU Mem"]
    cells = [heads]
    for row in rows:
        answered = row.count - row.unanswered
        cells.append(
            [
                row.name,
                share(row.self_ns),
                time(row.self_ns),
                "-" if row.waits or row.total_ns > whole else share(row.total_ns),
                time(row.total_ns),
                time(row.total_ns / answered) if answered else "-",
                f"{row.count}" + (f" ({row.unanswered} unanswered)" if row.unanswered else ""),
                str(row.node),
                names.get(row.node, "-"),
                *("-" if size is None else TEXT.size(size) for size in (row.allocated_bytes, row.self_allocated_bytes)),
            ]
        )
    columns = len(heads) if any(row.allocated_bytes is not None for row in rows) else len(heads) - 2
    cells = [line[:columns] for line in cells]
    first, *others = table(cells, right=range(1, columns))
    rule = "  ".join("-" * max(len(line[column]) for line in cells) for column in range(columns))
    return "\n".join([first, rule, *others, f"Self CPU time total: {time(whole)}"])
