"""What would gain most, as lines for a terminal; and the answer in a few lines (`aorta report --brief`): the verdict,
three metrics, the cause, and where the page is.

Must not compute a number, say a gain without its interval, or state an undecided difference as a fact: every change
stands beside its own verdict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from aorta.analysis.compare.verdict import short_headline
from aorta.analysis.documents import known
from aorta.analysis.documents.comparison import Comparison
from aorta.analysis.documents.dataset import DatasetEntry, GainEntry, MarginalEntry, WhatIf
from aorta.analysis.documents.summary import Summary
from aorta.analysis.formatting import TEXT, json_text, rough_interval
from aorta.analysis.metrics import JOB_STEP, metric_named
from aorta.analysis.most_to_gain import SHOWN_MARGINALS
from aorta.analysis.report.html import PAGE_FILE
from aorta.analysis.report.metric_table import metric_table, wrapped
from aorta.analysis.report.terminal_text import led, notes_of, verdict_line
from aorta.terminal_style import PLAIN, Style


def gain_block(label: str, found: WhatIf, style: Style = PLAIN) -> str:
    """The changes that would gain most, what parts of the communication cost, and bounds."""
    head = f"{label}: what would gain most"
    if found.reason is not None:
        return wrapped([f"{head}: no prediction: {found.reason}"], style.width)
    lines = [f"{head} (replay of the last {found.steps} steps on {found.ranks} ranks)"]
    lines += [f"  {number}. {gain_line(each)}" for number, each in enumerate(found.gains, start=1)]
    lines += [] if found.gains else ["  none of the changes that were tried gains anything worth naming"]
    lines.append("  a step would gain, were one part of the communication free:")
    lines += [_row(each) for each in found.marginals[:SHOWN_MARGINALS]]
    lines += ["  bounds:", *map(_row, found.bounds)]
    lines += [] if found.check is None else [f"  check: {found.check}"]
    lines += [f"  ! {note}" for note in (*found.notes, *found.flags)]
    return f"{wrapped(lines, style.width)}\n  ask further: {found.command}"  # to be copied: in one line


def gain_line(gain: GainEntry) -> str:
    """One change: by how much, and whether that is significant."""
    return "".join([gain.sentence, *(f" (note: {note})" for note in gain.notes)])


def _row(found: MarginalEntry) -> str:
    return f"    {rough_interval(found.gain_ms, found.low_ms, found.high_ms):<24}  {found.name}"


METRICS: Final = ("overlap_ratio", "exposed_comm_ms", JOB_STEP)
"""The share that is hidden, what is not, and what the step takes."""
_SHOWN_DIFFERENCES: Final = 3


def brief_text(
    summary: Summary, files: Sequence[Path], notes: Mapping[str, Sequence[str]], style: Style = PLAIN
) -> str:
    """At most 20 lines of a summary.

    Args:
        files: what the report wrote.
        notes: label -> what a reader of its numbers has to know; said where nothing is compared.
    """
    comparison = known(summary.comparison)
    blocks = [_dataset(label, entry, notes[label], style) for label, entry in summary.datasets.items()]
    if comparison is not None:
        blocks = [
            _compared(comparison, style),
            _gain(summary.datasets[comparison.candidate], style, " in the candidate"),
        ]
    page = next((path for path in files if path.name == PAGE_FILE), None)
    where = led("Summary:", str(files[0]), style) if page is None else led("Page:", str(page), style)
    return "\n".join([*blocks, where])


def _compared(comparison: Comparison, style: Style) -> str:
    lines = [verdict_line(comparison, short_headline(comparison), style)]
    cause = comparison.sentence
    lines += [led("Cause:", cause, style)] if cause else []
    lines += [led("Note:", warning, style, style.warning) for warning in notes_of(comparison)]
    lines += ["", *metric_table(comparison, [name for name in METRICS if name in comparison.metrics], style)]
    changed = [
        f"{one.key.removeprefix('config.')}: {json_text(one.reference)} -> {json_text(one.candidate)}"
        for one in comparison.manifest_differences
    ]
    more = [f"and {len(changed) - _SHOWN_DIFFERENCES} more"] if len(changed) > _SHOWN_DIFFERENCES else []
    sides = (comparison.reference, comparison.candidate)
    lines += [] if sides == ("reference", "candidate") else [led("Compared:", " with ".join(sides), style)]
    if changed and "Configuration: " not in (cause or ""):
        lines.append(led("Differs:", "; ".join([*changed[:_SHOWN_DIFFERENCES], *more]), style))
    return "\n".join(lines)


def _dataset(label: str, entry: DatasetEntry, notes: Sequence[str], style: Style) -> str:
    steps = entry.steps
    used = f"{TEXT.count(steps.global_steps_used, 'step')}, {TEXT.count(steps.rank_steps_used, 'record')}"
    lines = [f"{style.bold(label)}: {used} of {entry.source.path}"]
    for name in METRICS:
        values = entry.described.get(name)
        if values is None:
            continue
        unit = metric_named(name).unit
        if values.median is None:
            ends = known(values.bounds)
            said = f"{'unknown':>11}" if ends is None else f"   {TEXT.bounds(ends, unit, fewer=1)}"
            lines.append(f"  {name:<18}{said}   {values.reason}")
            continue
        middle, low, high = (TEXT.number(value, unit, fewer=1) for value in (values.median, values.p5, values.p95))
        lines.append(f"  {name:<18}{middle:>11}   5th to 95th percentile {low} to {high}")
    if entry.reason:
        lines.append(f"  nothing to measure: {entry.reason}")
    lines += [led("Note:", note, style, style.warning) for note in notes]
    return "\n".join([*lines, _gain(entry, style)])


def _gain(entry: DatasetEntry, style: Style, where: str = "") -> str:
    """The change that would gain most, or why there is no prediction."""
    found = entry.what_if
    if found.reason is not None:
        return led(f"Most to gain{where}:", f"no prediction: {found.reason}", style)
    said = gain_line(found.gains[0]) if found.gains else "nothing that was tried gains anything worth naming"
    return led(f"Most to gain{where}:", said, style)
