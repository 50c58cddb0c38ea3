"""The answer in a few lines: the verdict, three metrics, the cause, and where the page is (`aorta report --brief`).

Must not compute a number, or state an undecided difference as a fact: every change stands beside its own verdict.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from aorta.analysis.formatting import TEXT, json_text, p_value
from aorta.analysis.metrics import JOB_STEP, metric_named
from aorta.analysis.report.html import PAGE_FILE

METRICS: Final = ("overlap_ratio", "exposed_comm_ms", JOB_STEP)
"""The share that is hidden, what is not, and what the step takes."""
_WIDTH: Final = 100
_LABEL: Final = 12
_SHOWN_DIFFERENCES: Final = 3


def brief_text(summary: Mapping[str, Any], files: Sequence[Path], notes: Mapping[str, Sequence[str]]) -> str:
    """At most 20 lines of a summary.

    Args:
        files: what the report wrote.
        notes: label -> what a reader of its numbers has to know; said where nothing is compared.
    """
    comparison = summary.get("comparison")
    blocks = [_dataset(label, entry, notes[label]) for label, entry in summary["datasets"].items()]
    if comparison is not None:
        blocks = [_compared(comparison)]
    page = next((path for path in files if path.name == PAGE_FILE), None)
    where = _labelled("summary", [str(files[0])]) if page is None else _labelled("page", [str(page)])
    return "\n".join([*blocks, where])


def _compared(comparison: Mapping[str, Any]) -> str:
    left, right = comparison["reference"], comparison["candidate"]
    counts = {side: len(found) for side, found in comparison.get("launches", {}).items()}
    launches = f", {counts['reference']} against {counts['candidate']} launches" if counts else ""
    lines = [f"{comparison['verdict'].upper()}: {comparison['verdict_reason']}"]
    sides = [name if name == side else f"{name} ({side})" for name, side in ((left, "reference"), (right, "candidate"))]
    lines.append(_labelled("compared", [f"{sides[0]} with {sides[1]}{launches}"]))
    lines += [_labelled("note", [warning]) for warning in comparison["warnings"]]
    lines += ["", f"{'':<18}{'reference':>11}{'candidate':>11}   change"]
    lines += [_row(name, comparison["metrics"][name]) for name in METRICS if name in comparison["metrics"]]
    changed = [
        f"{one['key'].removeprefix('config.')}: {json_text(one['reference'])} -> {json_text(one['candidate'])}"
        for one in comparison["manifest_differences"]
    ]
    more = [f"and {len(changed) - _SHOWN_DIFFERENCES} more"] if len(changed) > _SHOWN_DIFFERENCES else []
    why = comparison.get("attribution", {}).get("sentence")
    lines.append("")
    lines += [_labelled("why", [why])] if why else []
    lines += [_labelled("differs", ["; ".join([*changed[:_SHOWN_DIFFERENCES], *more])])] if changed else []
    return "\n".join(lines)


def _row(name: str, pair: Mapping[str, Any]) -> str:
    unit = metric_named(name).unit
    values = [TEXT.number(pair[side], unit, fewer=1) for side in ("reference", "candidate")]
    text = f"{name:<18}{values[0]:>11}{values[1]:>11}"
    effect = pair.get("effect")
    if effect is None:
        return f"{text}   {TEXT.number(pair['difference'], unit, signed=True, fewer=1)}"
    if effect["value"] is None:
        return f"{text}   {pair['verdict_reason']}"
    between = "" if effect["low"] is None else f" (95 % interval {TEXT.interval(effect)})"
    p = pair["p"] if pair["p_corrected"] is None else pair["p_corrected"]
    judged = "not tested" if pair["verdict"] is None else f"p = {p_value(p, unknown='-')}: {pair['verdict']}"
    return f"{text}   {TEXT.effect(effect['value'], effect['kind'])}{between}, {judged}"


def _dataset(label: str, entry: Mapping[str, Any], notes: Sequence[str]) -> str:
    steps = entry["steps"]
    lines = [f"{label}: {TEXT.count(steps['rank_steps_used'], 'rank-step')} of {entry['source']['path']}"]
    for name in METRICS:
        values = entry.get("metrics", {}).get(name)
        if values is None:
            continue
        unit = metric_named(name).unit
        if values["median"] is None:
            lines.append(f"  {name:<18}{'unknown':>11}   {values['reason']}")
            continue
        middle, low, high = (TEXT.number(values[key], unit, fewer=1) for key in ("median", "p5", "p95"))
        lines.append(f"  {name:<18}{middle:>11}   5th to 95th percentile {low} to {high}")
    if "reason" in entry:
        lines.append(f"  nothing to measure: {entry['reason']}")
    lines += [_labelled("note", [note]) for note in notes]
    return "\n".join(lines)


def _labelled(label: str, sentences: Sequence[str]) -> str:
    return textwrap.fill(
        " ".join(sentences),
        _WIDTH,
        initial_indent=f"{label:<{_LABEL}}",
        subsequent_indent=" " * _LABEL,
        break_long_words=False,
        break_on_hyphens=False,
    )
