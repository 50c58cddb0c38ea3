"""The command `aorta merge` (`analysis/merge_traces.py`): one file of the traces and records of all ranks, or of the
records alone, on the clock of the reference rank and checked against causality.

Text goes to stdout, notes and `error: ...` to stderr. Must not: drop an event, or hold a trace.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from aorta.analysis.load.engines import progress
from aorta.analysis.merge.alignment import (
    Align,
    KnownClocks,
    RankAlignment,
    align_ranks,
    describe_alignment,
    find_clocks,
    record_of,
)
from aorta.analysis.merge.trace_choice import TraceFile, choose, describe, find_files, scanning
from aorta.analysis.merge.trace_writer import TraceWriter, TrackIdentity, trace_file
from aorta.analysis.merge.tracks import Causality, MergedCollective, RecordTracks, check_collectives
from aorta.command_line import command, to_stderr, to_stdout
from aorta.errors import EXIT_OK, CausalityViolated, Inconclusive, InputError

_NAMED_RANKS = 1024
"""Most missing ranks listed in a note."""


@dataclass
class Merged:
    """What was done, for people and for the metadata of the merged file."""

    traces: list[TraceFile]
    clocks: KnownClocks
    alignments: dict[int, RankAlignment]
    notes: list[str]
    counts: dict[int, Counter[str]] = field(default_factory=dict)
    """Rank -> `ph` -> number of events copied."""
    causality: Causality = field(default_factory=Causality)
    missing: list[int] = field(default_factory=list)
    steps: dict[int, int] = field(default_factory=dict)
    bounds: dict[int, int | None] = field(default_factory=dict)
    """Rank -> largest error in ns of a time of its record; None where it was not measured."""
    residual_us: dict[int, float] = field(default_factory=dict)
    """Rank -> median distance between a collective's label in the trace and its row in the record."""


def merge(
    paths: Sequence[Path],
    output: Path,
    *,
    align: Align = "clock",
    window: str | None = None,
    clock_sync: Path | None = None,
    overwrite: bool = False,
) -> Merged:
    """Write the merged file. The options are those of the command line.

    Raises:
        InputError: something cannot be read or written, or the choice between several traces of a rank is open; names
            the file.
    """
    notes: list[str] = []
    folders = [path for path in paths if path.is_dir()]
    files = [path for path in find_files(paths, notes) if path.absolute() != output.absolute()]
    if not files:
        raise InputError(f"{output}: the only trace given is the file to write")
    traces = choose([describe(path) for path in files], window, notes)
    if align == "start_profile" and (records := [trace.path for trace in traces if trace.is_record]):
        raise InputError(f"{records[0]}: --align start_profile goes by the starts of profilers, and a record has none")
    clocks = find_clocks(clock_sync, traces, folders)
    alignments = align_ranks(traces, clocks, align, notes)
    merged = Merged(traces, clocks, alignments, notes)
    _say_what_is_missing(merged)
    base_ns = min(trace.base_ns or 0 for trace in traces)
    seen: dict[int, list[MergedCollective]] = {}
    groups: dict[int, dict[str, list[int]]] = {}
    with trace_file(output, overwrite=overwrite) as writer, progress(len(traces), "merging") as done:
        for rank, alignment in alignments.items():
            mine = [(number, trace) for number, trace in enumerate(traces) if trace.rank == rank]
            label = f"rank {rank} ({_host(mine[0][1], clocks)})"
            record, span, labels = record_of(mine[0][1], folders), None, dict[str, int]()
            if not mine[0][1].is_record:
                span, labels = _take_over(writer, mine, TrackIdentity(rank, label), alignment, base_ns, merged)
                record = None if span is None else record
            for _ in mine:
                done()
            if record is None:
                continue
            tracks = RecordTracks(record, rank, alignment, span, label, base_ns)
            for event in tracks.events():
                writer.write(event)
            seen[rank], groups[rank], merged.steps[rank] = tracks.collectives, tracks.groups, tracks.steps
            merged.bounds[rank] = tracks.bound_ns
            notes += tracks.problems
            _compare_labels(merged, rank, labels, tracks.collectives)
        if not seen:
            merged.causality.skipped["no record (rank_<rank>_metrics.jsonl) beside the traces"] = len(alignments)
        check_collectives(merged.causality, seen, groups)
        writer.finish(_metadata(merged, output, align, base_ns))
    return merged


def _take_over(
    writer: TraceWriter,
    mine: Sequence[tuple[int, TraceFile]],
    identity: TrackIdentity,
    alignment: RankAlignment,
    base_ns: int,
    merged: Merged,
) -> tuple[tuple[int, int] | None, dict[str, int]]:
    """Copy every event of one rank's traces. Returns the time span they cover, and the start of each collective's
    label.
    """
    counts = merged.counts[identity.rank] = Counter[str]()
    labels: dict[str, int] = {}
    first = last = None
    for number, trace in mine:
        with scanning(trace.path) as scanner:
            for event in scanner.events():
                try:
                    phase = msgspec.json.decode(event["ph"], type=str)
                    identity.rename(event, number)
                    at = alignment.move(event, trace.base_ns or 0, base_ns)
                    if at is not None and phase == "X":
                        first, last = min(first or at, at), max(last or at, at)
                        if bytes(event.get("name", b"")).startswith(b'"comm:'):
                            labels[msgspec.json.decode(event["name"])] = at
                except (KeyError, ValueError, RecursionError) as error:
                    raise InputError(f"{trace.path}: event {scanner.count}: not a trace event ({error})") from error
                counts[phase] += 1
                writer.write(event)
    for missing in identity.missing_names():
        writer.write(missing)
    return (None if first is None or last is None else (first, last)), labels


def _host(trace: TraceFile, clocks: KnownClocks) -> str:
    known = clocks.of(trace.rank)
    return trace.host or (known.host if known is not None else "host unknown")


def _compare_labels(merged: Merged, rank: int, labels: dict[str, int], rows: Sequence[MergedCollective]) -> None:
    """Compare the clocks of trace and record: the same call of the backend is in both."""
    distances = sorted(
        abs(labels[name] - row.issue_ns)
        for row in rows
        if (name := f"comm:{row.kind}#{row.seq} group={row.group}") in labels
    )
    if distances:
        merged.residual_us[rank] = distances[len(distances) // 2] / 1e3


def _say_what_is_missing(merged: Merged) -> None:
    sizes = {trace.world_size for trace in merged.traces if trace.world_size}
    if merged.clocks.sync is not None and isinstance(merged.clocks.source, Path):  # the traces list only themselves
        sizes.add(len(merged.clocks.sync.ranks))
    if len(sizes) > 1:
        merged.notes.append(f"the traces name different world sizes: {', '.join(map(str, sorted(sizes)))}")
    if sizes:
        merged.missing = sorted(set(range(max(sizes))) - {trace.rank for trace in merged.traces})
    if merged.missing:
        more = len(merged.missing) - _NAMED_RANKS
        rest = f" and {more} more" if more > 0 else ""
        what = "record" if merged.traces[0].is_record else "trace"
        merged.notes.append(f"no {what} of rank {', '.join(map(str, merged.missing[:_NAMED_RANKS]))}{rest}")
    merged.notes += [
        f"{trace.path}: no baseTimeNanoseconds: its times are taken as absolute microseconds"
        for trace in merged.traces
        if trace.base_ns is None
    ]


def _metadata(merged: Merged, output: Path, align: Align, base_ns: int) -> dict[str, Any]:
    return {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": base_ns,
        "traceName": output.name,
        "clockSync": {
            **merged.clocks.as_json(align, merged.alignments),
            "durations": "the distance of the two corrected ends",
        },
        "aorta": {
            "merged_from": [
                {"rank": trace.rank, "window": trace.window, "path": str(trace.path), "base_ns": trace.base_ns}
                for trace in merged.traces
            ],
            "events": {str(rank): dict(counts) for rank, counts in merged.counts.items()},
            "ranks_missing": merged.missing,
            "causality": merged.causality.as_json(),
            "record_bounds_ns": {str(rank): bound for rank, bound in merged.bounds.items()},
            "trace_to_record_us": {str(rank): value for rank, value in merged.residual_us.items()},
            "notes": merged.notes,
        },
        "traces": [{"rank": trace.rank, **trace.head} for trace in merged.traces],
    }


@command()
def merge_traces(arguments: Sequence[str]) -> int:
    """Run `aorta merge`; returns its exit code (argparse itself ends with 0 or 2).

    Raises:
        CausalityViolated: with `--check`, an effect precedes its cause.
        Inconclusive: with `--check`, there was nothing to check.
    """
    options = parser().parse_args(arguments)
    merged = merge(
        [Path(path) for path in options.traces],
        options.output,
        align=options.align,
        window=options.window,
        clock_sync=Path(options.clock_sync) if options.clock_sync else None,
        overwrite=options.overwrite,
    )
    for note in merged.notes:
        to_stderr(f"note: {note}")
    to_stdout("\n".join(_report(merged, options.output, options.align)))
    if options.check and merged.causality.violations:
        count = len(merged.causality.violations)
        raise CausalityViolated(f"{count} effects come before their cause by more than the bound")
    if options.check and not merged.causality.pairs:
        raise Inconclusive("there was nothing to check causality by")
    return EXIT_OK


def _report(merged: Merged, output: Path, align: Align) -> list[str]:
    lines = []
    for rank in merged.alignments:
        clock, sync = merged.clocks.of(rank), merged.clocks.sync
        offset = "the host's clock" if merged.alignments[rank].one_host else "clock not measured"
        if clock is not None and sync is not None and rank == sync.reference_rank:
            offset = "the reference clock"
        elif clock is not None and clock.offset_ns is not None:
            bound = clock.worst_bound_ns()
            within = "bound unknown" if bound is None else f"within {bound / 1e3:.1f} us"
            drift = "drift unknown" if clock.drift_ppm is None else f"drift {clock.drift_ppm:+.2f} ppm"
            offset = f"offset {clock.offset_ns / 1e3:+.1f} us {within}, {drift}"
        counts = merged.counts.get(rank)
        parts = [f"{counts.total()} events ({counts['X']} complete)"] if counts is not None else []
        parts += [f"{merged.steps[rank]} steps of its record"] if rank in merged.steps else []
        lines.append(f"rank {rank}: {', '.join(parts)}; {offset}")
    if merged.residual_us:
        worst = max(merged.residual_us.values())
        lines.append(
            f"trace against record: collectives stand within {worst:.1f} us of each other (median, worst rank)"
        )
    if merged.bounds:
        known = [bound for bound in merged.bounds.values() if bound is not None]
        within = f"within {max(known) / 1e3:.1f} us" if len(known) == len(merged.bounds) else "within an unknown bound"
        lines.append(f"times of the records: {within} of the reference clock")
    lines += merged.causality.lines()
    lines.append(f"{output}: {len(merged.alignments)} rank(s), {describe_alignment(align, merged.alignments)}")
    return lines


def _window(text: str) -> str:
    if text != "all" and not re.fullmatch(r"\d{1,9}", text):
        raise argparse.ArgumentTypeError(f"{text!r}: all, or a number from 0")
    return text


def parser() -> argparse.ArgumentParser:
    """Return the options of the command."""
    words = argparse.ArgumentParser(
        description="Traces and records of several ranks -> one file for Perfetto, on the clock of rank 0. A folder "
        "without traces gives its records.",
        epilog="Exit codes: 0 done, 1 --check found an effect before its cause, 2 bad input, 4 --check found nothing "
        "to check.",
    )
    words.add_argument("traces", nargs="+", metavar="DIR|FILE", help="run folders, or .json, .json.gz, .tar.gz files")
    words.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="ends in .json or .json.gz")
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
    words.add_argument("--check", action="store_true", help="fail when an effect comes before its cause")
    words.add_argument("--overwrite", action="store_true", help="replace the output file")
    return words
