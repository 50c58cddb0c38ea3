"""The command `analysis/rpc_report.py`: the table of an RPC run on stdout, and its trace in a file.

Must not read a trace or match calls itself.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from aorta.analysis.merge.alignment import KnownClocks, RankAlignment, align_ranks, find_clocks, in_words
from aorta.analysis.merge.causality import Causality
from aorta.analysis.merge.trace_writer import trace_file
from aorta.analysis.rpc.rpc_records import RpcRecords, read_run
from aorta.analysis.rpc.rpc_rows import nested_waits, read_rows
from aorta.analysis.rpc.rpc_table import make_rows, render
from aorta.analysis.rpc.rpc_trace import write_trace
from aorta.command_line import command
from aorta.errors import EXIT_OK, CausalityViolated, Inconclusive
from aorta.records.rpc_files import TRACE_FILE


@command()
def rpc_report(arguments: Sequence[str]) -> int:
    """Run `aorta rpc`; returns its exit code (argparse itself ends with 0 or 2)."""
    options = parser().parse_args(arguments)
    folder = Path(options.folder)
    run = read_run(folder)
    nested = nested_waits(run.calls)
    # One trace's operators in memory at a time.
    operators = ((trace.rank, row) for trace in run.traces for row in read_rows(trace, nested).operators)
    rows = make_rows(run.calls, operators)
    sys.stdout.write(render(rows, run.workers) + "\n")
    output = Path(options.output) if options.output else folder / TRACE_FILE
    notes: list[str] = [f"incomplete: {what}" for what in run.missing]
    clocks = find_clocks(None, run.traces, [run.path])
    alignments = align_ranks(run.traces, clocks, options.align, notes)
    found = _merge(run, output, options, clocks, alignments)
    for note in notes:
        sys.stderr.write(f"note: {note}\n")
    last = f"{output}: {len(run.traces)} traces, {len(run.calls)} calls"
    if run.traces:
        last += f", {in_words(options.align, alignments)}"
    sys.stdout.write("\n".join([*found.lines(), last]) + "\n")
    if options.check and found.violations:
        raise CausalityViolated(f"{len(found.violations)} calls do not enclose what they ran")
    if options.check and not found.pairs:
        raise Inconclusive("there was nothing to check causality by")
    return EXIT_OK


def _merge(
    run: RpcRecords,
    output: Path,
    options: argparse.Namespace,
    clocks: KnownClocks,
    alignments: Mapping[int, RankAlignment],
) -> Causality:
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
    return found


def parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    words = argparse.ArgumentParser(
        description="Every call of an RPC run and what it ran where: a table, and one trace with arrows for Perfetto.",
        epilog="Exit codes: 0 done (also where a worker is missing: that is said), 1 --check found a call that does "
        "not enclose what it ran, 2 bad input, 4 --check found nothing to check.",
    )
    words.add_argument("folder", metavar="DIR", help="run folder of train.py workload=rpc profiling.enabled=true")
    words.add_argument("-o", "--output", metavar="FILE", help=f"the trace; default: DIR/{TRACE_FILE}")
    words.add_argument("--align", choices=("clock", "none", "start_profile"), default="clock", help="as aorta merge")
    words.add_argument("--check", action="store_true", help="fail when a remote slice lies outside its call")
    words.add_argument("--overwrite", action="store_true", help="replace the trace")
    return words
