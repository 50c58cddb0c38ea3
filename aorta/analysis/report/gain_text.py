"""What would gain most, as lines for a terminal.

Must not compute a number, or say a gain without its interval.
"""

from __future__ import annotations

from aorta.analysis.documents.dataset import GainEntry, MarginalEntry, WhatIf
from aorta.analysis.formatting import rough_interval
from aorta.analysis.most_to_gain import SHOWN_MARGINALS
from aorta.analysis.report.metric_table import wrapped
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
