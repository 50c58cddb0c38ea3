"""The command `aorta merge`: one file of the traces and records of all ranks, or of the
records alone, on the clock of the reference rank and checked against causality.

The check takes collectives of every rank (of `aorta rpc`: calls and what they ran elsewhere) on one clock with error
bounds, and reports every effect that precedes its cause by more than the error. Must not: drop an event, hold a trace,
or call a pair checked whose bound is unknown without saying so.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from aorta.command_line import command, to_stderr, to_stdout
from aorta.documents.formatting import TEXT
from aorta.errors import EXIT_OK, CausalityViolated, Inconclusive, InputError
from aorta.merge.sources import align_ranks, choose, describe, describe_alignment, find_clocks, find_files, record_of
from aorta.merge.tracks import MergedCollective, RecordTracks, TrackIdentity, copy_events, trace_file
from aorta.read.engines import progress
from aorta.read.traces.chrome_json import Event
from aorta.timeline.classes import LOCKSTEP

_NAMED_RANKS: Final = 1024
"""Most missing ranks listed in a note."""
_SHOWN: Final = 5
"""Worst violations that are printed."""


@dataclass
class Causality:
    """Result of a check. `unknown_bounds` counts pairs whose bound was taken as 0 because it was never measured.

    `violations`: both effects in words, by how much the effect came early, and how much of it the clocks can explain.
    """

    pairs: int = 0
    unknown_bounds: int = 0
    worst_lead_ns: int | None = None
    violations: list[tuple[str, int, int]] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)

    def check(self, what: str, lead_ns: int, bounds: Iterable[int | None]) -> None:
        """Check one pair of cause and effect. The effect appears `lead_ns` before its cause (negative: after it)."""
        self.pairs += 1
        known = list(bounds)
        self.unknown_bounds += None in known
        allowed = sum(bound or 0 for bound in known)
        self.worst_lead_ns = lead_ns if self.worst_lead_ns is None else max(self.worst_lead_ns, lead_ns)
        if lead_ns > allowed:
            self.violations.append((what, lead_ns, allowed))

    def lines(self) -> list[str]:
        """Return the result and the worst violations, as text."""
        if not self.pairs:
            return [f"causality: nothing to check{': ' + '; '.join(self.skipped) if self.skipped else ''}"]
        result = TEXT.count(len(self.violations), "violation") if self.violations else "no violation"
        text = [f"causality: {self.pairs} pairs of cause and effect, {result}"]
        if self.unknown_bounds:
            text.append(f"causality: the bound of {self.unknown_bounds} pairs is unknown and was taken as 0")
        worst = sorted(self.violations, key=lambda violation: violation[2] - violation[1])[:_SHOWN]
        text += [
            f"  {what}: {lead_ns / 1e3:.1f} us too early, bound {allowed_ns / 1e3:.1f} us"
            for what, lead_ns, allowed_ns in worst
        ]
        return text + [
            f"causality: {TEXT.count(count, 'collective')} cannot be checked ({reason})"
            for reason, count in self.skipped.items()
        ]

    def as_json(self) -> dict[str, Any]:
        """Return the result as it is stored in the merged file."""
        return {
            "pairs": self.pairs,
            "violations": len(self.violations),
            "unknown_bounds": self.unknown_bounds,
            "worst_lead_ns": self.worst_lead_ns,
            "not_checked": dict(self.skipped),
        }


def check_collectives(
    result: Causality,
    seen: Mapping[int, Sequence[MergedCollective]],
    groups: Mapping[int, Mapping[str, Sequence[int]]],
) -> None:
    """Check that no rank ends a collective that waits for all ranks before the last of them has issued it.

    Collectives are matched by group, its members (from the footers), kind and sequence number. Kinds that a rank may
    end early are skipped: `timeline.classes.LOCKSTEP` names the others.
    """
    names: dict[tuple[str, tuple[int, ...], str], int] = {}
    rows_of: defaultdict[tuple[int, int], list[tuple[int, MergedCollective]]] = defaultdict(list)  # by name and number
    unchecked: dict[tuple[object, ...], str] = {}  # a collective -> why
    for rank in sorted(seen):
        for row in seen[rank]:
            members = groups.get(rank, {}).get(row.group)
            if row.kind not in LOCKSTEP:
                sender = rank if row.kind in ("send", "recv") else None  # each rank counts its own
                unchecked[row.kind, row.group, row.seq, sender] = f"{row.kind} may end early on one rank"
            elif members is None:
                unchecked[row.kind, row.group, row.seq] = "the group's ranks are not in the record (no footer)"
            elif len(members) > 1:
                name = names.setdefault((row.group, tuple(sorted(members)), row.kind), len(names))
                rows_of[name, row.seq].append((rank, row))
    result.skipped.update(unchecked.values())
    named = list(names)
    for (name, _), rows in sorted(rows_of.items(), key=lambda item: item[0]):
        group, members, kind = named[name]
        of_rank = dict(rows)
        if not len(of_rank) == len(rows) == len(members):
            result.skipped["not seen on every rank of its group"] += 1
            continue
        _, cause = max((row.issue_ns, rank) for rank, row in of_rank.items())
        for rank, row in of_rank.items():
            if rank == cause or row.end_ns is None:
                continue
            result.check(
                f"{kind}#{row.seq} of group {group}: rank {rank} ends before rank {cause} begins",
                of_rank[cause].issue_ns - row.end_ns,
                (of_rank[cause].issue_bound_ns, row.end_bound_ns),
            )


@dataclass
class CopiedEvents:
    """What the traces of one rank hold.

    Attributes:
        counts: `ph` -> number of events.
        labels_ns: label of a collective -> its start.
        span_ns: first and last start of a complete event; None without any.
    """

    counts: Counter[str] = field(default_factory=Counter)
    labels_ns: dict[str, int] = field(default_factory=dict)
    span_ns: tuple[int, int] | None = None

    def see(self, event: Event, at_ns: int | None) -> None:
        phase = msgspec.json.decode(event["ph"], type=str)
        self.counts[phase] += 1
        if at_ns is not None and phase == "X":
            first, last = self.span_ns or (at_ns, at_ns)
            self.span_ns = min(first, at_ns), max(last, at_ns)
            if bytes(event.get("name", b"")).startswith(b'"comm:'):
                self.labels_ns[msgspec.json.decode(event["name"])] = at_ns


def merge(options: argparse.Namespace) -> tuple[list[str], list[str], Causality]:
    """Write the merged file, and return notes, the lines of a report, and the check.

    Raises:
        InputError: something cannot be read or written, or the choice between several traces of a rank is open; names
            the file.
    """
    notes, output, align = list[str](), options.output, options.align
    paths = [Path(path) for path in options.traces]
    folders = [path for path in paths if path.is_dir()]
    files = [path for path in find_files(paths, notes) if path.absolute() != output.absolute()]
    if not files:
        raise InputError(f"{output}: the only trace given is the file to write")
    traces = choose([describe(path) for path in files], options.window, notes)
    if align == "start_profile" and (records := [trace.path for trace in traces if trace.is_record]):
        raise InputError(f"{records[0]}: --align start_profile goes by the starts of profilers, and a record has none")
    clocks = find_clocks(Path(options.clock_sync) if options.clock_sync else None, traces, folders)
    alignments = align_ranks(traces, clocks, align, notes)
    sizes = {trace.world_size for trace in traces if trace.world_size}
    if clocks.sync is not None and isinstance(clocks.source, Path):  # the traces list only themselves
        sizes.add(len(clocks.sync.ranks))
    if len(sizes) > 1:
        notes.append(f"the traces name different world sizes: {', '.join(map(str, sorted(sizes)))}")
    if missing := sorted(set(range(max(sizes, default=0))) - set(alignments)):
        more = len(missing) - _NAMED_RANKS
        rest = f" and {more} more" if more > 0 else ""
        what = "record" if traces[0].is_record else "trace"
        notes.append(f"no {what} of rank {', '.join(map(str, missing[:_NAMED_RANKS]))}{rest}")
    notes += [
        f"{trace.path}: no baseTimeNanoseconds: its times are taken as absolute microseconds"
        for trace in traces
        if trace.base_ns is None
    ]
    base_ns = min(trace.base_ns or 0 for trace in traces)
    causality, lines = Causality(), list[str]()
    counts: dict[int, Counter[str]] = {}
    tracks: dict[int, RecordTracks] = {}
    residual_us: dict[int, float] = {}
    with trace_file(output, overwrite=options.overwrite) as writer, progress(len(traces), "merging") as done:
        for rank, alignment in alignments.items():
            captures = {index: trace for index, trace in enumerate(traces) if trace.rank == rank}
            first, clock = next(iter(captures.values())), alignment.clock
            label = f"rank {rank} ({first.host or (clock.host if clock is not None else 'host unknown')})"
            record, parts = record_of(first, folders), list[str]()
            copied = CopiedEvents()
            if not first.is_record:
                copy_events(writer, captures, TrackIdentity(rank, label), alignment, base_ns, copied.see)
            if copied.counts:
                counts[rank] = copied.counts
                parts.append(f"{copied.counts.total()} events ({copied.counts['X']} complete)")
            for _ in captures:
                done()
            if record is not None and (copied.span_ns is not None or first.is_record):
                of_record = tracks[rank] = RecordTracks(record, rank, alignment, copied.span_ns, label, base_ns)
                for event in of_record.events():
                    writer.write(event)
                notes += of_record.problems
                parts.append(f"{of_record.steps} steps of its record")
                # The same call of the backend is in both.
                rows = of_record.collectives
                names = ((f"comm:{row.kind}#{row.seq} group={row.group}", row.issue_ns) for row in rows)
                labels = copied.labels_ns
                distances = sorted(abs(labels[name] - issue_ns) for name, issue_ns in names if name in labels)
                if distances:
                    residual_us[rank] = distances[len(distances) // 2] / 1e3
            offset = "the host's clock" if alignment.one_host else "clock not measured"
            if clock is not None and clocks.sync is not None and rank == clocks.sync.reference_rank:
                offset = "the reference clock"
            elif clock is not None and clock.offset_ns is not None:
                bound = clock.worst_bound_ns()
                within = "bound unknown" if bound is None else f"within {bound / 1e3:.1f} us"
                drift = "drift unknown" if clock.drift_ppm is None else f"drift {clock.drift_ppm:+.2f} ppm"
                offset = f"offset {clock.offset_ns / 1e3:+.1f} us {within}, {drift}"
            lines.append(f"rank {rank}: {', '.join(parts)}; {offset}")
        if not tracks:
            causality.skipped["no record (rank_<rank>_metrics.jsonl) beside the traces"] = len(alignments)
        check_collectives(
            causality,
            {rank: of_record.collectives for rank, of_record in tracks.items()},
            {rank: of_record.groups for rank, of_record in tracks.items()},
        )
        writer.finish(
            {
                "schemaVersion": 1,
                "displayTimeUnit": "ms",
                "baseTimeNanoseconds": base_ns,
                "traceName": output.name,
                "clockSync": {
                    **clocks.as_json(align, alignments),
                    "durations": "the distance of the two corrected ends",
                },
                "aorta": {
                    "merged_from": [
                        {"rank": trace.rank, "window": trace.window, "path": str(trace.path), "base_ns": trace.base_ns}
                        for trace in traces
                    ],
                    "events": {str(rank): dict(by_phase) for rank, by_phase in counts.items()},
                    "ranks_missing": missing,
                    "causality": causality.as_json(),
                    "record_bounds_ns": {str(rank): of_record.bound_ns for rank, of_record in tracks.items()},
                    "trace_to_record_us": {str(rank): apart_us for rank, apart_us in residual_us.items()},
                    "notes": notes,
                },
                "traces": [{"rank": trace.rank, **trace.head} for trace in traces],
            }
        )
    if residual_us:
        worst = max(residual_us.values())
        lines.append(f"trace against record: collectives are within {worst:.1f} us of each other (median, worst rank)")
    if tracks:
        bounds = [of_record.bound_ns for of_record in tracks.values()]
        known = [bound for bound in bounds if bound is not None]
        within = f"within {max(known) / 1e3:.1f} us" if len(known) == len(bounds) else "within an unknown bound"
        lines.append(f"times of the records: {within} of the reference clock")
    lines += causality.lines()
    lines.append(f"{output}: {TEXT.count(len(alignments), 'rank')}, {describe_alignment(align, alignments)}")
    return notes, lines, causality


@command()
def merge_traces(arguments: Sequence[str]) -> int:
    """Run `aorta merge`; returns its exit code (argparse itself ends with 0 or 2).

    Raises:
        CausalityViolated: with `--check`, an effect precedes its cause.
        Inconclusive: with `--check`, there was nothing to check.
    """
    options = parser().parse_args(arguments)
    if options.output is None:
        raise InputError("no file to write: give -o FILE (.json or .json.gz), as -o merged.json.gz")
    notes, lines, causality = merge(options)
    for note in notes:
        to_stderr(f"note: {note}")
    to_stdout("\n".join(lines))
    if options.check and causality.violations:
        count = len(causality.violations)
        raise CausalityViolated(f"{count} effects come before their cause by more than the bound")
    if options.check and not causality.pairs:
        raise Inconclusive("nothing to check: no pair of cause and effect")
    return EXIT_OK


def parser() -> argparse.ArgumentParser:
    """Return the options of the command."""

    def window(text: str) -> str:
        if text != "all" and not re.fullmatch(r"\d{1,9}", text):
            raise argparse.ArgumentTypeError(f"{text!r}: all, or a number from 0")
        return text

    words = argparse.ArgumentParser(
        description="Traces and records of several ranks -> one file for Perfetto, on the clock of rank 0. A folder "
        "without traces gives its records.",
        epilog="Exit codes: 0 done, 1 --check found an effect before its cause, 2 bad input, 4 --check found nothing "
        "to check.",
    )
    words.add_argument("traces", nargs="+", metavar="DIR|FILE", help="run folders, or .json, .json.gz, .tar.gz files")
    words.add_argument("-o", "--output", type=Path, metavar="FILE", help="to write; ends in .json or .json.gz")
    words.add_argument(
        "--align",
        choices=("clock", "none", "start_profile"),
        default="clock",
        help="by measured offset and drift (default), not at all, or by the starts of the profilers",
    )
    words.add_argument("--window", type=window, metavar="N|all", help="which trace, where a rank has several")
    words.add_argument(
        "--clock-sync", metavar="FILE", help="default: clock_sync.json of the run, else as the traces say"
    )
    words.add_argument("--check", action="store_true", help="fail when an effect comes before its cause")
    words.add_argument("--overwrite", action="store_true", help="replace the output file")
    return words
