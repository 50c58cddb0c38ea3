"""Parses the gate's options, judges its conditions, and writes the result as text, and with the summary as
GitHub-flavoured Markdown for the page of a CI job ($GITHUB_STEP_SUMMARY).

Must not: judge or compute a number for the output, let text of a file or a label become markup, or import pandas:
conditions are parsed together with the other arguments.
"""

from __future__ import annotations

import argparse
import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from aorta.analysis.attribution.breakdown import sentence_rows
from aorta.analysis.compare.headline import headline as compared_headline
from aorta.analysis.compare.headline import is_comparable, numbers, title, verdict_label
from aorta.analysis.documents import known
from aorta.analysis.documents.comparison import AttributionRow, Comparison, GateEntry, JudgedCondition, Summary
from aorta.analysis.formatting import TEXT, is_zero, p_value, whole_percent
from aorta.analysis.gate.gate_checks import Condition, evaluate, parse_condition
from aorta.errors import EXIT_OK, InputError
from aorta.redaction import redact
from aorta.terminal_style import PLAIN, Style

OUTCOMES: Final = {"pass": "passed", "fail": "failed", "inconclusive": "inconclusive"}
_WORDS: Final = {"pass": "pass", "fail": "FAIL", "inconclusive": "?   "}
_TONES: Final = {"pass": "improvement", "fail": "regression", "inconclusive": "inconclusive"}
"""Outcome -> the verdict whose colour it has."""


def headline(result: GateEntry) -> str:
    """Return the outcome, and how many conditions had each outcome."""
    number = Counter(judged.outcome for judged in result.conditions)
    counts = [
        f"{number[outcome]} {OUTCOMES[outcome]}" for outcome in ("fail", "inconclusive", "pass") if number[outcome]
    ]
    total = TEXT.count(len(result.conditions), "condition")
    return f"gate {OUTCOMES[result.outcome]}: {', '.join(counts)} of {total}"


def quantity(judged: JudgedCondition, value: float | None) -> str:
    """Return a difference with its sign and unit; relative ones in per cent."""
    if judged.relative:
        return TEXT.percent(value, 2, signed=True)
    return TEXT.quantity(value, judged.unit, signed=True)


def interval(judged: JudgedCondition) -> str:
    """Return the interval of a condition's value, or null."""
    if judged.low is None or judged.high is None:
        return TEXT.unknown
    return f"{quantity(judged, judged.low)} to {quantity(judged, judged.high)}"


def gate_text(result: GateEntry, style: Style = PLAIN) -> str:
    """Return the headline, and one line per condition."""
    lines = [style.verdict(_TONES[result.outcome], f"{headline(result)} (exit code {result.exit_code})", bold=True)]
    for judged in result.conditions:
        word = style.verdict(_TONES[judged.outcome], _WORDS[judged.outcome])
        measured = quantity(judged, judged.value)
        around = "" if judged.low is None else f" ({interval(judged)})"
        plain = f"  {_WORDS[judged.outcome]}  {judged.condition}: {measured}{around}: {judged.reason}"
        filled = textwrap.fill(plain, style.width, subsequent_indent=" " * 8, break_long_words=False)
        lines.append(filled.replace(_WORDS[judged.outcome], word, 1))
    return "\n".join(lines)


_MARKS: Final = {"pass": "✅", "fail": "❌", "inconclusive": "❔"}
_ACTIVE: Final = re.compile(r"([\\`*_{}\[\]()#+\-.!|~:@/])")
"""Characters that GitHub reads as markup, links, mentions or references unless a backslash stands before them."""
LIMIT_BYTES: Final = 1_000_000
"""GitHub accepts a summary of up to 1 MiB per step (GitHub Docs, "Adding a job summary")."""


def escaped(text: object) -> str:
    """Escape text so that GitHub shows it literally, on one line."""
    line = " ".join(str(text).split())
    line = "".join(char if char.isprintable() else "\ufffd" for char in line)
    line = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _ACTIVE.sub(lambda found: "\\" + found[1], line)


def markdown_summary(summary: Summary) -> str:
    """Return the page: outcome, conditions, where the difference lies, and warnings; metrics and manifest differences
    are collapsed.
    """
    comparison, result = known(summary.comparison), known(summary.gate)
    lines = list(_head(comparison, result))
    if result is not None:
        rows = [
            [
                f"{_MARKS[judged.outcome]} {OUTCOMES[judged.outcome]}",
                escaped(judged.condition),
                quantity(judged, judged.value),
                interval(judged),
                p_value(judged.p, 3),
                escaped(judged.reason),
            ]
            for judged in result.conditions
        ]
        lines += ["", *_table(["outcome", "condition", "difference", "interval", "p", "reason"], rows)]
    if comparison is not None:
        lines += list(_comparison(comparison))
    text = "\n".join(lines) + "\n"
    if len(text.encode()) > LIMIT_BYTES:  # labels may have any length: the outcome must not be lost to GitHub's limit
        return "\n".join(_head(comparison, result))[:10_000] + "\n\nThe rest is in summary.json: it is too long.\n"
    return text


def _head(comparison: Comparison | None, result: GateEntry | None) -> Iterator[str]:
    if result is not None:
        yield f"### {_MARKS[result.outcome]} AORTA {escaped(headline(result))}"
    if comparison is None:
        if result is None:
            yield "### AORTA report"
        yield ""
        yield "No comparison was asked for."
        return
    if result is None:
        yield f"### AORTA: {escaped(title(comparison))}"
    yield ""
    sides = f"{escaped(comparison.candidate)} against {escaped(comparison.reference)}"
    yield f"{sides}: **{escaped(compared_headline(comparison))}** {escaped(numbers(comparison))}"


def _comparison(comparison: Comparison) -> Iterator[str]:
    if comparison.sentence:
        yield from ("", f"**Where:** {escaped(comparison.sentence)}")
    for warning in comparison.warnings:
        yield from ("", f"> ⚠️ {escaped(warning)}")
    yield from _folded("All metrics", _metrics(comparison))
    yield from _folded("Where the exposed communication differs", _causes(sentence_rows(comparison.attribution)))
    rows = [
        [escaped(row.key), escaped(row.reference), escaped(row.candidate)] for row in comparison.manifest_differences
    ]
    yield from _folded(f"{len(rows)} differences of the manifests", _table(["key", "reference", "candidate"], rows))


def _metrics(comparison: Comparison) -> list[str]:
    apart = is_comparable(comparison)  # else a difference would be one of other work, or of a drift
    rows = [
        [
            escaped(name),
            *(TEXT.number(value, entry.unit) for value in (entry.reference, entry.candidate)),
            *([TEXT.number(entry.difference, entry.unit, signed=True), TEXT.number(entry.quotient)] if apart else []),
            escaped(entry.unit),
            escaped((verdict_label(entry) if entry.verdict else "-") if entry.tested else entry.judgement),
        ]
        for name, entry in comparison.shown.items()
        if not (entry.unknown or is_zero(entry))
    ]
    changes = ["difference", "ratio"] if apart else []
    heads = ["metric", "reference", "candidate", *changes, "unit", "verdict"]
    return _table(heads, rows)


def _causes(causes: Sequence[AttributionRow]) -> list[str]:
    rows = [
        [
            escaped(row.what),
            *(TEXT.number(value, "ms") for value in (row.reference_ms, row.candidate_ms, row.difference_ms)),
            "-" if row.share is None else whole_percent(row.share),
        ]
        for row in causes
    ]
    return _table(["what", "reference ms", "candidate ms", "difference ms", "share"], rows)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    if not rows:
        return []
    lines = [heads, ["---"] * len(heads), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def _folded(title: str, lines: Sequence[str]) -> Iterator[str]:
    if lines:
        yield from ("", "<details>", f"<summary>{title}</summary>", "", *lines, "", "</details>")


def add_gate_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--fail-on` and `--markdown`. A malformed condition ends the command with exit code 2 before anything is
    read.
    """
    group = parser.add_argument_group("gate", "exit code 3 if the candidate fails, 4 if the data cannot decide")
    group.add_argument(
        "--fail-on",
        action="append",
        default=[],
        type=_condition,
        metavar="METRIC<NUMBER",
        help="fail where candidate - reference is below NUMBER (or above it: METRIC>NUMBER), in the metric's unit; "
        "NUMBER%% is a part of the reference; repeatable",
    )
    group.add_argument(
        "--markdown", metavar="FILE", help="append a summary in Markdown, as $GITHUB_STEP_SUMMARY wants it"
    )


def judge(options: argparse.Namespace, summary: Summary) -> None:
    """Judge the conditions and put the result into the summary as `gate`. Without a condition adds no key."""
    if options.fail_on:
        summary.gate = evaluate(options.fail_on, summary.comparison)


def run_gate(options: argparse.Namespace, summary: Summary, style: Style = PLAIN) -> tuple[int, str]:
    """Write the file of `--markdown`.

    Args:
        summary: what `judge` was given.
        style: of the text.

    Returns:
        The exit code, and the text for the terminal (empty without a gate).

    Raises:
        InputError: the file cannot be written.
    """
    result, name = known(summary.gate), options.markdown
    if name is not None:
        try:
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            with Path(name).open("a", encoding="utf-8") as file:
                file.write(redact(markdown_summary(summary)))
        except OSError as error:
            raise InputError(
                f"{name}: cannot be written: {error.strerror or error}. Give another file to --markdown"
            ) from error
    code, text = (EXIT_OK, "") if result is None else (result.exit_code, gate_text(result, style))
    return code, "\n".join(filter(None, [text, name]))


def _condition(text: str) -> Condition:
    try:
        return parse_condition(text)
    except InputError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
