"""The command `aorta merge` (`analysis/merge_traces.py`): parses its arguments, merges, and prints the result.

Text goes to stdout, notes and `error: ...` to stderr. Must not: do the merging itself.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from aorta.analysis.merge.alignment import in_words
from aorta.analysis.merge.merge_traces import Choices, Merged, merge
from aorta.command_line import command
from aorta.errors import EXIT_OK, CausalityViolated, Inconclusive


@command()
def merge_traces(arguments: Sequence[str]) -> int:
    """Run `aorta merge`; returns its exit code (argparse itself ends with 0 or 2)."""
    options = parser().parse_args(arguments)
    choices = Choices(
        output=Path(options.output),
        align=options.align,
        window=options.window,
        clock_sync=Path(options.clock_sync) if options.clock_sync else None,
        records=not options.no_records,
        overwrite=options.overwrite,
    )
    merged = merge([Path(path) for path in options.traces], choices)
    for note in merged.notes:
        sys.stderr.write(f"note: {note}\n")
    sys.stdout.write("\n".join(_report(merged, choices)) + "\n")
    if options.check:
        _gate(merged)
    return EXIT_OK


def _gate(merged: Merged) -> None:
    """Raises:
    CausalityViolated: an effect precedes its cause.
    Inconclusive: there was nothing to check.
    """
    if merged.causality.violations:
        count = len(merged.causality.violations)
        raise CausalityViolated(f"{count} effects come before their cause by more than the bound")
    if not merged.causality.pairs:
        raise Inconclusive("there was nothing to check causality by")


def _report(merged: Merged, choices: Choices) -> list[str]:
    lines = []
    for rank, counts in merged.counts.items():
        clock, sync = merged.clocks.of(rank), merged.clocks.sync
        offset = "clock not measured"
        if clock is not None and sync is not None and rank == sync.reference_rank:
            offset = "the reference clock"
        elif clock is not None and clock.offset_ns is not None:
            bound = clock.worst_bound_ns()
            within = "bound unknown" if bound is None else f"within {bound / 1e3:.1f} us"
            drift = "drift unknown" if clock.drift_ppm is None else f"drift {clock.drift_ppm:+.2f} ppm"
            offset = f"offset {clock.offset_ns / 1e3:+.1f} us {within}, {drift}"
        steps = f", {merged.steps[rank]} steps of its record" if rank in merged.steps else ""
        lines.append(f"rank {rank}: {counts.total()} events ({counts['X']} complete){steps}; {offset}")
    if merged.residual_us:
        worst = max(merged.residual_us.values())
        lines.append(
            f"trace against record: collectives stand within {worst:.1f} us of each other (median, worst rank)"
        )
    lines += merged.causality.lines()
    lines.append(f"{choices.output}: {len(merged.counts)} rank(s), {in_words(choices.align, merged.alignments)}")
    return lines


def _window(text: str) -> str:
    if text != "all" and not re.fullmatch(r"\d{1,9}", text):
        raise argparse.ArgumentTypeError(f"{text!r}: all, or a number from 0")
    return text


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    words = argparse.ArgumentParser(
        description="Chrome traces of several ranks -> one file for Perfetto, on the clock of rank 0.",
        epilog="Exit codes: 0 done, 1 --check found an effect before its cause, 2 bad input, 4 --check found nothing "
        "to check.",
    )
    words.add_argument("traces", nargs="+", metavar="DIR|FILE", help="run folders, or .json, .json.gz, .tar.gz files")
    words.add_argument("-o", "--output", required=True, metavar="FILE", help="ends in .json or .json.gz")
    words.add_argument(
        "--align",
        choices=("clock", "none", "start_profile"),
        default="clock",
        help="by measured offset and drift (default), not at all, or by the starts of the profilers",
    )
    words.add_argument("--window", type=_window, metavar="N|all", help="which trace, where a rank has several")
    words.add_argument(
        "--clock-sync", metavar="FILE", help="default: clock_sync.json of the run, else as the traces say"
    )
    words.add_argument("--no-records", action="store_true", help="leave out the tracks of rank_<rank>_metrics.jsonl")
    words.add_argument("--check", action="store_true", help="fail when an effect comes before its cause")
    words.add_argument("--overwrite", action="store_true", help="replace the output file")
    return words
