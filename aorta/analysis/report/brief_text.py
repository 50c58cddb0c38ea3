"""The answer of a report in at most `MOST_LINES` lines: of a comparison the verdict, six metrics, the cause and what
would gain most; of one run its own numbers first. `aorta report --all` shows everything else.

Must not compute a number, say a gain without its interval, or state an undecided difference as a fact: every change
stands beside its own verdict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from aorta.analysis.documents import known
from aorta.analysis.documents.comparison import Comparison
from aorta.analysis.documents.dataset import MEANS, DatasetEntry, Described, MarginalEntry, WhatIf
from aorta.analysis.documents.summary import Summary
from aorta.analysis.formatting import TEXT, json_text, rough_interval, rough_ms
from aorta.analysis.host_bound import ONE_RANK
from aorta.analysis.metrics import JOB_STEP, metric_named
from aorta.analysis.report.html import PAGE_FILE
from aorta.analysis.report.terminal_text import led, metric_table, notes_of, shown_first, verdict_lines
from aorta.analysis.summary import SHOWN_MARGINALS
from aorta.terminal_style import PLAIN, Style, table, wrapped

MOST_LINES: Final = 25
"""Of an answer, with the lines that the command adds; a long headline, cause or gain is never cut."""
_ADDED: Final = 2
_COMPARED: Final = ("overlap_ratio", "exposed_comm_ms", JOB_STEP, "compute_stall_ms", "comm_ms", "compute_ms")
_SHOWN: Final[tuple[str, ...]] = (JOB_STEP, "exposed_comm_ms", "overlap_ratio", "comm_ms", "compute_ms", "idle_ms")
_SHOWN_METRICS: Final = 6
_SHOWN_GAINS: Final = 3
_SHOWN_DIFFERENCES: Final = 3
_SHOWN_EXPOSED: Final = 3


def gain_block(label: str, gains: WhatIf, style: Style = PLAIN) -> str:
    """Return the changes that would gain most, what parts of the communication cost, and bounds."""
    head = f"{label}: what would gain most"
    if gains.reason is not None:
        return wrapped([f"{head}: no prediction: {gains.reason}"], style.width)
    lines = [f"{head} (replay of the last {gains.steps} steps on {gains.ranks} ranks)"]
    for number, gain in enumerate(gains.gains, start=1):
        lines.append("".join([f"  {number}. {gain.sentence}", *(f" (note: {note})" for note in gain.notes)]))
    lines += [] if gains.gains else ["  none of the changes that were tried gains anything worth naming"]
    shown = gains.marginals[:SHOWN_MARGINALS]
    rows = _rows([*shown, *gains.bounds])
    lines += ["  a step would gain, if this alone were free:", *rows[: len(shown)], "  bounds:", *rows[len(shown) :]]
    lines += [] if gains.check is None else [f"  check: {gains.check}"]
    lines += [f"  ! {note}" for note in (*gains.notes, *gains.flags)]
    return f"{wrapped(lines, style.width)}\n  more: {gains.command}"  # to be copied: in one line


def _rows(marginals: Sequence[MarginalEntry]) -> list[str]:
    return table(
        [(rough_interval(each.gain_ms, each.low_ms, each.high_ms), each.name) for each in marginals], indent="    "
    )


def brief_text(
    summary: Summary, files: Sequence[Path], notes: Mapping[str, Sequence[str]], style: Style = PLAIN
) -> str:
    """Return the answer of a summary.

    Args:
        files: what the report wrote.
        notes: label -> what a reader of its numbers has to know; said where nothing is compared.
    """
    comparison = known(summary.comparison)
    if comparison is None:
        most = (MOST_LINES - _ADDED) // max(1, len(summary.datasets)) - 1
        parts = [_dataset(label, entry, notes[label], style, most) for label, entry in summary.datasets.items()]
    else:
        parts = [_compared(comparison, summary.datasets[comparison.candidate], style)]
    page = next((path for path in files if path.name == PAGE_FILE), None)
    where = led("Summary:", str(files[0]), style) if page is None else led("Page:", str(page), style)
    return "\n".join([*parts, where])


def _compared(comparison: Comparison, candidate: DatasetEntry, style: Style) -> str:
    """Return verdict, metrics, cause, as many notes as fit, what differs, and gains."""
    first = shown_first(comparison)
    names = [name for name in dict.fromkeys((comparison.deciding, *_COMPARED)) if name in first][:_SHOWN_METRICS]
    above = [verdict_lines(comparison, style)]
    above += ["", *metric_table(comparison, names, style), ""] if names else []
    cause = comparison.sentence
    above += [led("Cause:", cause, style)] if cause else []
    changed = [
        f"{one.key.removeprefix('config.')}: {json_text(one.reference)} -> {json_text(one.candidate)}"
        for one in comparison.manifest_differences
    ]
    more = [f"and {len(changed) - _SHOWN_DIFFERENCES} more"] if len(changed) > _SHOWN_DIFFERENCES else []
    sides = (comparison.reference, comparison.candidate)
    below = [] if sides == ("reference", "candidate") else [led("Compared:", " with ".join(sides), style)]
    if changed and not any(one in (cause or "") for one in ("Configuration: ", changed[0].replace(": ", " ", 1))):
        below.append(led("Differs:", "; ".join([*changed[:_SHOWN_DIFFERENCES], *more]), style))
    below.append(_gains(candidate, style, " in the candidate"))
    room = MOST_LINES - _ADDED - 1 - _height([*above, *below])
    return "\n".join([*above, *_notes(notes_of(comparison), room, style), *below])


def _dataset(label: str, entry: DatasetEntry, notes: Sequence[str], style: Style, most: int) -> str:
    """Return what one run measured, then what to bear in mind and what would gain most, in about `most` lines."""
    values = {name: entry.described[name] for name in _SHOWN if name in entry.described}
    statistics = (["over_all"] if entry.few_steps else []) + ["median", "p5", "p95"]
    above = [led(f"{label}:", _numbers(entry) or f"nothing to measure: {entry.reason}", style)]
    above.append(f"{MEANS if entry.few_steps else 'medians'} of {TEXT.steps_used(entry)} of {entry.source.path}")
    rows = [
        (name, *(TEXT.number(getattr(each, of), metric_named(name).unit) for of in statistics))
        for name, each in values.items()
        if each.median is not None
    ]
    head = ("metric", *(name.replace("_", " ") for name in statistics))
    above += ["", *table([head, *rows], right=range(1, len(head))), ""] if rows else []
    above += [wrapped([_unknown(name, each)]) for name, each in values.items() if each.median is None]
    below = [] if entry.reason else [*_exposed(entry, style), _gains(entry, style)]
    return "\n".join([*above, *_notes(notes, most - _height([*above, *below]), style), *below])


def _exposed(entry: DatasetEntry, style: Style) -> list[str]:
    """Return where the exposed communication is: the groups, and the regions of the step, that have most of it."""
    found = known(entry.exposed)
    if found is None or found.reason is not None or not found.exposed_ms:
        return []
    return [
        led(
            f"Exposed by {name} (mean):",
            "; ".join(f"{row.what} {rough_ms(row.exposed_ms)}" for row in rows[:_SHOWN_EXPOSED]),
            style,
        )
        for name, rows in (("group", found.group), ("layer", found.region))
    ]


def _numbers(entry: DatasetEntry) -> str:
    """Step time, exposed communication and overlap in a phrase, as far as they are known."""
    step, exposed, ratio = map(entry.leading, _SHOWN[:3])
    said = [] if step is None else [f"step time {rough_ms(step)}"]
    shared = entry.described.get("overlap_ratio")
    alone = shared is not None and shared.reason == ONE_RANK
    said += [] if exposed is None or alone else [f"{rough_ms(exposed)} of exposed communication"]
    said += [] if ratio is None else [f"{TEXT.percent(ratio)} of communication hidden"]
    return ", ".join(said)


def _unknown(name: str, values: Described) -> str:
    bounds = known(values.bounds)
    said = "unknown" if bounds is None else TEXT.bounds(bounds, metric_named(name).unit)
    return f"{name}: {said}: {values.reason}"


def _notes(notes: Sequence[str], height: int, style: Style) -> list[str]:
    """Return the first note, the others as far as there is room, and how many there are more."""
    lines: list[str] = []
    for number, note in enumerate(notes):
        line = led("Note:", note, style, style.warning)
        last = number == len(notes) - 1
        if lines and _height([*lines, line]) > height - (not last):
            more = len(notes) - number
            return [*lines, f"and {TEXT.count(more, 'more note')}: --all shows them"]
        lines.append(line)
    return lines


def _height(lines: Sequence[str]) -> int:
    return sum(1 + line.count("\n") for line in lines)


def _gains(entry: DatasetEntry, style: Style, where: str = "") -> str:
    """Return the changes that would gain most, or why there is no prediction."""
    found, head = entry.what_if, f"Most to gain{where}:"
    if found.reason is not None:
        return led(head, f"no prediction: {found.reason}", style)
    if not found.gains:
        return led(head, "nothing that was tried gains anything worth naming", style)
    lines = [f"  {number}. {gain.sentence}" for number, gain in enumerate(found.gains[:_SHOWN_GAINS], start=1)]
    return "\n".join([style.bold(head), wrapped(lines, style.width, indent="     ")])
