"""The command `analysis/rpc_report.py`: the table of an RPC run on stdout, and its trace in a file.

Must not read a trace or match calls itself.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from aorta.analysis.merge.alignment import align_ranks, find_clock_sync
from aorta.analysis.merge.causality import Causality
from aorta.analysis.merge.trace_writer import trace_file
from aorta.analysis.rpc.rpc_records import RpcRecords, read_run
from aorta.analysis.rpc.rpc_rows import read_rows
from aorta.analysis.rpc.rpc_table import make_rows, render
from aorta.analysis.rpc.rpc_trace import write_trace
from aorta.command_line import command
from aorta.errors import EXIT_OK, GateFailed, Inconclusive


@command()
def rpc_report(arguments: Sequence[str]) -> int:
    """Run `analysis/rpc_report.py`; returns its exit code (argparse itself ends with 0 or 2)."""
    options = parser().parse_args(arguments)
    folder = Path(options.folder)
    run = read_run(folder)
    # One trace's operators in memory at a time.
    operators = ((trace.rank, row) for trace in run.traces for row in read_rows(trace).operators)
    rows = make_rows(run.calls, operators)
    memory = any(row.allocated_bytes for row in rows)
    sys.stdout.write(render(rows, run.workers, memory=memory) + "\n")
    output = Path(options.output) if options.output else folder / "rpc_trace.json.gz"
    notes: list[str] = [f"incomplete: {what}" for what in run.missing]
    if not memory and any(_is_true(trace.head.get("profile_memory")) for trace in run.traces):
        notes.append("profile_memory: the traces hold no allocation (torch 2.13 writes none for all threads)")
    found = _merge(run, output, options, notes)
    for note in notes:
        sys.stderr.write(f"note: {note}\n")
    sys.stdout.write("\n".join([*found.lines(), f"{output}: {len(run.traces)} traces, {len(run.calls)} calls"]) + "\n")
    if options.check and found.violations:
        raise GateFailed(f"{len(found.violations)} calls do not enclose what they ran")
    if options.check and not found.pairs:
        raise Inconclusive("there was nothing to check causality by")
    return EXIT_OK


def _merge(run: RpcRecords, output: Path, options: argparse.Namespace, notes: list[str]) -> Causality:
    sync = find_clock_sync(None, run.traces, [run.path])
    alignments = align_ranks(run.traces, sync, options.align, notes)
    base_ns = min((trace.base_ns or 0 for trace in run.traces), default=0)
    with trace_file(output, overwrite=options.overwrite) as writer:
        found, slices = write_trace(writer, run, alignments, base_ns)
        writer.finish(
            {
                "schemaVersion": 1,
                "displayTimeUnit": "ms",
                "baseTimeNanoseconds": base_ns,
                "clockSync": {"align": options.align, **({"ranks": None} if sync is None else sync.summary())},
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
    return found


def _is_true(raw: msgspec.Raw | None) -> bool:
    return raw is not None and bytes(raw) not in (b"0", b"false", b"null")


def parser() -> argparse.ArgumentParser:
    """The words that the command takes."""
    words = argparse.ArgumentParser(
        prog="rpc_report.py",
        description="Every call of an RPC run and what it ran where: a table, and one trace with arrows for Perfetto.",
        epilog="Exit codes: 0 done (also where a worker is missing: that is said), 2 bad input, 3 --check found a call "
        "that does not enclose what it ran, 4 --check found nothing to check.",
    )
    words.add_argument("folder", metavar="DIR", help="run folder of train.py workload=rpc profiling.enabled=true")
    words.add_argument("-o", "--output", metavar="FILE", help="the trace; default: DIR/rpc_trace.json.gz")
    words.add_argument(
        "--align", choices=("clock", "none", "start_profile"), default="clock", help="as merge_traces.py"
    )
    words.add_argument("--check", action="store_true", help="fail when a remote slice lies outside its call")
    words.add_argument("--overwrite", action="store_true", help="replace the trace")
    return words
