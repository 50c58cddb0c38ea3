"""The command `aorta rpc` (`analysis/rpc_report.py`): the table of an RPC run on stdout, and its trace in a file.

The table has the calls and operators of all workers, by node and name, in the layout first described for RPC profiling
in torch. The trace has a process per worker, a slice per call on both sides, and arrows between them; every remote
slice is checked to lie inside its call. Must not load torch or pandas, print a number that is not known, or drop an
event of a worker's trace.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from aorta.analysis.formatting import TEXT
from aorta.analysis.load.chrome_json import ns_as_text, ns_of_value
from aorta.analysis.merge.alignment import RankAlignment, align_ranks, describe_alignment, find_clocks
from aorta.analysis.merge.trace_choice import scanning
from aorta.analysis.merge.trace_writer import TIDS_PER_RANK, TraceWriter, TrackIdentity, metadata_event, trace_file
from aorta.analysis.merge.tracks import Causality
from aorta.command_line import command, to_stderr, to_stdout
from aorta.errors import EXIT_OK, CausalityViolated, Inconclusive, InputError
from aorta.records.run_files import CALL_MARK, TRACE_FILE, Call, CallMemory
from aorta.rpc.rpc_records import (
    REMOTE_CALL,
    REMOTE_OP,
    TO_HERE,
    RemoteOperator,
    RpcRecords,
    is_wait,
    memory_of,
    nested_waits,
    read_operators,
    read_run,
)
from aorta.terminal_style import table

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
                            length = ns_of_value(bytes(event["dur"]))
                            slices[call_id] = (worker, int(bytes(event["tid"])), at, at + length)
                    except (KeyError, ValueError, TypeError, RecursionError) as error:
                        raise InputError(
                            f"{trace.path}: event {scanner.count}: not a trace event ({error!r})"
                        ) from error
                    writer.write(event)
        for missing in identity.missing_names():
            writer.write(missing)
        if not any(trace.rank == worker for trace in run.traces):
            writer.write(metadata_event("process_name", worker, {"name": f"{name} (node {worker})"}))
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
    check: Causality,
) -> None:
    """Write the calls as tracks of their callers, overlapping calls on separate ones."""
    free: dict[tuple[int, int], int] = {}
    arrow = _FIRST_ARROW

    def us(instant_ns: int) -> msgspec.Raw:
        return msgspec.Raw(ns_as_text(instant_ns - base_ns))

    for call in run.calls:
        if call.reply_ns is None or call.caller not in alignments:
            why = "a call without an answer" if call.reply_ns is None else "no trace of its caller"
            check.skipped[why] = check.skipped.get(why, 0) + 1
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
                check.skipped["no slice of it on its callee"] = check.skipped.get("no slice of it on its callee", 0) + 1
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
        check.check(f"{call.name} {call.call_id}: runs before it is issued", begin - start, bounds)
        check.check(f"{call.name} {call.call_id}: is answered before it has run", stop - end, bounds)
    for caller, lane in sorted(free):
        tid = (caller + 1) * TIDS_PER_RANK + TIDS_PER_RANK - 1 - lane
        label = {"name": "RPC calls" + (f" ({lane + 1})" if lane else "")}
        writer.write(metadata_event("thread_name", caller, label, tid))


_HEADS = (
    "Name",
    "Self CPU total %",
    "Self CPU total",
    "CPU total %",
    "CPU total",
    "CPU time avg",
    "Number of Calls",
    "Node ID",
    "Node",
)


@command()
def rpc_report(arguments: Sequence[str]) -> int:
    """Run `aorta rpc`; returns its exit code (argparse itself ends with 0 or 2)."""
    options = parser().parse_args(arguments)
    folder = Path(options.folder)
    run = read_run(folder)
    nested = nested_waits(run.calls)
    # One trace's operators in memory at a time.
    operators = ((trace.rank, row) for trace in run.traces for row in read_operators(trace, nested))
    rows = make_rows(run.calls, operators)
    to_stdout(render(rows, run.workers))
    output = Path(options.output) if options.output else folder / TRACE_FILE
    notes: list[str] = [f"incomplete: {what}" for what in run.missing]
    clocks = find_clocks(None, run.traces, [run.path])
    alignments = align_ranks(run.traces, clocks, options.align, notes)
    base_ns = min((trace.base_ns or 0 for trace in run.traces), default=0)
    with trace_file(output, overwrite=options.overwrite) as writer:
        found, slices = write_trace(writer, run, alignments, base_ns)
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
                    "incomplete": run.incomplete,
                    "missing": run.missing,
                    "causality": found.as_json(),
                },
            }
        )
    for note in notes:
        to_stderr(f"note: {note}")
    last = f"{output}: {len(run.traces)} traces, {len(run.calls)} calls"
    if run.traces:
        last += f", {describe_alignment(options.align, alignments)}"
    to_stdout("\n".join([*found.lines(), last]))
    if options.check and found.violations:
        raise CausalityViolated(f"{len(found.violations)} calls do not enclose what they ran")
    if options.check and not found.pairs:
        raise Inconclusive("there was nothing to check causality by")
    return EXIT_OK


def parser() -> argparse.ArgumentParser:
    words = argparse.ArgumentParser(
        description="Every call of an RPC run and what it ran where: a table, and one trace with arrows for Perfetto.",
        epilog="Exit codes: 0 done (also where a worker is missing: that is said), 1 --check found a call that does "
        "not enclose what it ran, 2 bad input, 4 --check found nothing to check.",
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
    """Return the rows by node, then total time, longest first. Each of `operators` comes with the node it ran on."""
    rows: dict[tuple[int, str], CallRow] = {}

    def row(node: int, name: str) -> CallRow:
        return rows.setdefault((node, name), CallRow(name, node))

    for call in calls:
        mine = row(call.caller, call.name)
        mine.count += 1
        mine.waits = True
        if call.reply_ns is None:
            mine.unanswered += 1
        else:
            mine.total_ns += call.reply_ns - call.issue_ns
    for node, operator in operators:
        mine = row(node, shown_name(operator))
        mine.count += 1
        mine.waits |= operator.waits
        mine.self_ns += operator.self_ns
        mine.total_ns += operator.end_ns - operator.start_ns
        if operator.memory is not None:
            by_operators = sum(each.self_allocated_bytes for each in operator.memory.operators.values())
            mine.add_memory(operator.memory.allocated_bytes, operator.memory.allocated_bytes - by_operators)
            for name, figures in operator.memory.operators.items():
                inside = row(node, f"{operator.name}{REMOTE_OP}{name}")
                inside.add_memory(figures.allocated_bytes, figures.self_allocated_bytes)
    return sorted(rows.values(), key=lambda row: (row.node, -row.total_ns, row.name))


def shown_name(operator: RemoteOperator) -> str:
    """Return the name shown for a call's slice on its callee, for an operator that served a call, or for any other
    operator.
    """
    if operator.call_id is not None:
        return operator.name + REMOTE_CALL
    return f"{operator.serves}{REMOTE_OP}{operator.name}" if operator.serves else operator.name


def render(rows: list[CallRow], names: dict[int, str]) -> str:
    """Return the table as text. Percentages are of the self time of all rows of all nodes; a wait has none, nor what
    adds up to more (an operator inside one of its own name). There are columns of memory where any was measured.
    """
    whole = sum(row.self_ns for row in rows)
    memory = any(row.allocated_bytes is not None for row in rows)
    heads = (*_HEADS, "CPU Mem", "Self CPU Mem") if memory else _HEADS
    cells: list[tuple[str, ...]] = [heads]
    for row in rows:
        answered = row.count - row.unanswered
        line = (
            row.name,
            _share(row.self_ns, whole),
            _time(row.self_ns),
            "-" if row.waits or row.total_ns > whole else _share(row.total_ns, whole),
            _time(row.total_ns),
            _time(row.total_ns / answered) if answered else "-",
            f"{row.count}" + (f" ({row.unanswered} unanswered)" if row.unanswered else ""),
            str(row.node),
            names.get(row.node, "-"),
        )
        sizes = ["-" if size is None else TEXT.size(size) for size in (row.allocated_bytes, row.self_allocated_bytes)]
        cells.append((*line, *sizes) if memory else line)
    first, *others = table(cells, right=range(1, len(heads)))
    rule = "  ".join("-" * max(len(line[column]) for line in cells) for column in range(len(heads)))
    return "\n".join([first, rule, *others, f"Self CPU time total: {_time(whole)}"])


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.2f}%" if whole else "-"


def _time(ns: float) -> str:
    if ns >= 1e9:
        return f"{ns / 1e9:.3f}s"
    return f"{ns / 1e6:.3f}ms" if ns >= 1e6 else f"{ns / 1e3:.3f}us"
