"""The command `aorta merge` (`analysis/merge_traces.py`): one file of the traces and records of all ranks, or of the
records alone, on the clock of the reference rank and checked against causality.

Text goes to stdout, notes and `error: ...` to stderr. Must not: drop an event, or hold a trace.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Mapping, Sequence
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
from aorta.analysis.merge.tracks import Causality, RecordTracks, check_collectives
from aorta.command_line import command, to_stderr, to_stdout
from aorta.errors import EXIT_OK, CausalityViolated, Inconclusive, InputError

_NAMED_RANKS = 1024
"""Most missing ranks listed in a note."""


@dataclass
class MergedRank:
    """What one rank gave. `events`: `ph` -> number of events copied from its traces. `residual_us`: median distance
    between the label of a collective in the trace and its row in the record; None without both.
    """

    alignment: RankAlignment
    events: Counter[str] = field(default_factory=Counter)
    tracks: RecordTracks | None = None
    residual_us: float | None = None


@dataclass
class Merged:
    """What was done, for people and for the metadata of the merged file."""

    traces: list[TraceFile]
    clocks: KnownClocks
    ranks: dict[int, MergedRank]
    notes: list[str]
    causality: Causality = field(default_factory=Causality)
    missing: list[int] = field(default_factory=list)

    @property
    def alignments(self) -> dict[int, RankAlignment]:
        """How the clock of each rank is corrected."""
        return {number: rank.alignment for number, rank in self.ranks.items()}

    @property
    def tracks(self) -> dict[int, RecordTracks]:
        """The record of each rank that has one."""
        return {number: rank.tracks for number, rank in self.ranks.items() if rank.tracks is not None}


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
    merged = Merged(traces, clocks, {rank: MergedRank(alignment) for rank, alignment in alignments.items()}, notes)
    _say_what_is_missing(merged)
    base_ns = min(trace.base_ns or 0 for trace in traces)
    with trace_file(output, overwrite=overwrite) as writer, progress(len(traces), "merging") as done:
        for number, rank in merged.ranks.items():
            mine = {at: trace for at, trace in enumerate(traces) if trace.rank == number}
            first, known = next(iter(mine.values())), clocks.of(number)
            label = f"rank {number} ({first.host or (known.host if known is not None else 'host unknown')})"
            span, labels, record = None, dict[str, int](), record_of(first, folders)
            if not first.is_record:
                span, labels = _copy_events(writer, mine, TrackIdentity(number, label), rank, base_ns)
            for _ in mine:
                done()
            if record is None or (span is None and not first.is_record):
                continue
            tracks = rank.tracks = RecordTracks(record, number, rank.alignment, span, label, base_ns)
            for event in tracks.events():
                writer.write(event)
            notes += tracks.problems
            # The same call of the backend is in both.
            names = ((f"comm:{row.kind}#{row.seq} group={row.group}", row.issue_ns) for row in tracks.collectives)
            distances = sorted(abs(labels[name] - issue_ns) for name, issue_ns in names if name in labels)
            rank.residual_us = distances[len(distances) // 2] / 1e3 if distances else None
        if not merged.tracks:
            merged.causality.skipped["no record (rank_<rank>_metrics.jsonl) beside the traces"] = len(alignments)
        check_collectives(
            merged.causality,
            {number: tracks.collectives for number, tracks in merged.tracks.items()},
            {number: tracks.groups for number, tracks in merged.tracks.items()},
        )
        writer.finish(_metadata(merged, output, align, base_ns))
    return merged


def _copy_events(
    writer: TraceWriter, mine: Mapping[int, TraceFile], identity: TrackIdentity, rank: MergedRank, base_ns: int
) -> tuple[tuple[int, int] | None, dict[str, int]]:
    """Copy every event of one rank's traces.

    Args:
        mine: number of a trace in the whole merge -> the trace.

    Returns:
        The time that their complete events begin in, and the start of each collective's label.
    """
    labels: dict[str, int] = {}
    first = last = None
    for number, trace in mine.items():
        with scanning(trace.path) as scanner:
            for event in scanner.events():
                try:
                    phase = msgspec.json.decode(event["ph"], type=str)
                    identity.rename(event, number)
                    at = rank.alignment.move(event, trace.base_ns or 0, base_ns)
                    if at is not None and phase == "X":
                        first, last = min(first or at, at), max(last or at, at)
                        if bytes(event.get("name", b"")).startswith(b'"comm:'):
                            labels[msgspec.json.decode(event["name"])] = at
                except (KeyError, ValueError, RecursionError) as error:
                    raise InputError(f"{trace.path}: event {scanner.count}: not a trace event ({error})") from error
                rank.events[phase] += 1
                writer.write(event)
    for missing in identity.missing_names():
        writer.write(missing)
    return (None if first is None or last is None else (first, last)), labels


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
            "events": {str(number): dict(rank.events) for number, rank in merged.ranks.items() if rank.events},
            "ranks_missing": merged.missing,
            "causality": merged.causality.as_json(),
            "record_bounds_ns": {str(number): tracks.bound_ns for number, tracks in merged.tracks.items()},
            "trace_to_record_us": {
                str(number): rank.residual_us for number, rank in merged.ranks.items() if rank.residual_us is not None
            },
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
    for number, rank in merged.ranks.items():
        clock, sync = merged.clocks.of(number), merged.clocks.sync
        offset = "the host's clock" if rank.alignment.one_host else "clock not measured"
        if clock is not None and sync is not None and number == sync.reference_rank:
            offset = "the reference clock"
        elif clock is not None and clock.offset_ns is not None:
            bound = clock.worst_bound_ns()
            within = "bound unknown" if bound is None else f"within {bound / 1e3:.1f} us"
            drift = "drift unknown" if clock.drift_ppm is None else f"drift {clock.drift_ppm:+.2f} ppm"
            offset = f"offset {clock.offset_ns / 1e3:+.1f} us {within}, {drift}"
        parts = [f"{rank.events.total()} events ({rank.events['X']} complete)"] if rank.events else []
        parts += [f"{rank.tracks.steps} steps of its record"] if rank.tracks is not None else []
        lines.append(f"rank {number}: {', '.join(parts)}; {offset}")
    if residuals := [rank.residual_us for rank in merged.ranks.values() if rank.residual_us is not None]:
        worst = max(residuals)
        lines.append(
            f"trace against record: collectives stand within {worst:.1f} us of each other (median, worst rank)"
        )
    if bounds := [tracks.bound_ns for tracks in merged.tracks.values()]:
        known = [bound for bound in bounds if bound is not None]
        within = f"within {max(known) / 1e3:.1f} us" if len(known) == len(bounds) else "within an unknown bound"
        lines.append(f"times of the records: {within} of the reference clock")
    lines += merged.causality.lines()
    lines.append(f"{output}: {len(merged.ranks)} rank(s), {describe_alignment(align, merged.alignments)}")
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
