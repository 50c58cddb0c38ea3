"""Parses the gate's options, judges its conditions, and writes the result as text, JUnit XML and Markdown.

Two parts. *Options*: added to a parser; later they put `gate` into a summary and give an exit code and text. *Output*:
for a terminal; as JUnit XML with one test case per condition; with its summary, as GitHub-flavoured Markdown for the
page of a CI job ($GITHUB_STEP_SUMMARY). The XML follows the schema that Jenkins' xUnit plug-in publishes
(junit-10.xsd); GitHub, GitLab and Azure read the same. A failed condition is a `failure`, an inconclusive one an
`error`, or what `--inconclusive` makes of it: `failure` or `skipped`. Times are left out: nothing was timed.

Must not: judge or compute a number for the output, let text of a file or a label become markup, or a character that XML
does not allow, or import pandas: conditions are parsed together with the other arguments.
"""

from __future__ import annotations

import argparse
import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

from aorta.analysis.attribution.breakdown import sentence_rows
from aorta.analysis.compare.verdict import is_comparable, short_headline, title, verdict_label
from aorta.analysis.documents import known
from aorta.analysis.documents.comparison import AttributionRow, Comparison, GateEntry, JudgedCondition
from aorta.analysis.documents.summary import Summary
from aorta.analysis.formatting import TEXT, is_zero, p_value, whole_percent
from aorta.analysis.gate.gate_checks import Condition, evaluate, parse_condition
from aorta.errors import EXIT_OK, InputError
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
    """Return the headline, one line per condition, and a note where `--inconclusive` changed the exit code."""
    lines = [style.verdict(_TONES[result.outcome], f"{headline(result)} (exit code {result.exit_code})", bold=True)]
    for judged in result.conditions:
        word = style.verdict(_TONES[judged.outcome], _WORDS[judged.outcome])
        measured = quantity(judged, judged.value)
        around = "" if judged.low is None else f" ({interval(judged)})"
        plain = f"  {_WORDS[judged.outcome]}  {judged.condition}: {measured}{around}: {judged.reason}"
        filled = textwrap.fill(plain, style.width, subsequent_indent=" " * 8, break_long_words=False)
        lines.append(filled.replace(_WORDS[judged.outcome], word, 1))
    if result.outcome == "inconclusive" and result.on_inconclusive != "4":
        lines.append(f"  --inconclusive {result.on_inconclusive} was asked for")
    return "\n".join(lines)


_NOT_XML: Final = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Everything outside the production Char of XML 1.0, section 2.2."""
_UNDECIDED: Final = {"4": "error", "fail": "failure", "pass": "skipped"}


def junit_xml(result: GateEntry, comparison: Comparison) -> str:
    """Return the XML document with its declaration; ends with a newline."""
    names = {"pass": None, "fail": "failure", "inconclusive": _UNDECIDED[result.on_inconclusive]}
    elements = [names[judged.outcome] for judged in result.conditions]
    counts = {
        "tests": str(len(elements)),
        "failures": str(elements.count("failure")),
        "errors": str(elements.count("error")),
    }
    root = ElementTree.Element("testsuites", {"name": "aorta gate", **counts})
    suite = ElementTree.SubElement(
        root, "testsuite", {"name": _clean(_name(comparison)), **counts, "skipped": str(elements.count("skipped"))}
    )
    for judged, element in zip(result.conditions, elements, strict=True):
        case = ElementTree.SubElement(
            suite, "testcase", {"name": _clean(judged.condition), "classname": f"aorta.gate.{_clean(judged.metric)}"}
        )
        details = f"{quantity(judged, judged.value)}: {judged.reason}"
        if element is not None:
            attributes = {"message": _clean(details)} | ({} if element == "skipped" else {"type": judged.outcome})
            ElementTree.SubElement(case, element, attributes).text = _clean(_details(judged, comparison))
        ElementTree.SubElement(case, "system-out").text = _clean(details)
    ElementTree.SubElement(suite, "system-out").text = _clean(headline(result))
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _name(comparison: Comparison) -> str:
    return f"{comparison.candidate} against {comparison.reference}"


def _details(judged: JudgedCondition, comparison: Comparison) -> str:
    lines = [
        _name(comparison),
        f"condition: {judged.condition}",
        f"measured: {quantity(judged, judged.value)}, interval {interval(judged)}, "
        f"p {'null' if judged.p is None else format(judged.p, '.3g')}",
        f"reason: {judged.reason}",
    ]
    return "\n".join([*lines, *filter(None, [comparison.sentence])])


def _clean(text: str) -> str:
    """Replace characters that XML cannot hold even when escaped by the replacement character."""
    return _NOT_XML.sub("\ufffd", text)


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
    word, _, details = short_headline(comparison).partition(":")
    sides = f"{escaped(comparison.candidate)} against {escaped(comparison.reference)}"
    yield f"{sides}: **{escaped(word)}**: {escaped(details)}"


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
            *(
                [TEXT.number(entry.difference, entry.unit), TEXT.number(entry.quotient, "ratio", fewer=1)]
                if apart
                else []
            ),
            escaped(entry.unit),
            escaped((verdict_label(entry) if entry.verdict else "-") if entry.tested else entry.judgement),
        ]
        for name, entry in comparison.metrics.items()
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
    """Add `--fail-on`, `--inconclusive`, `--junit` and `--markdown`. A malformed condition ends the command with exit
    code 2 before anything is read.
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
        "--inconclusive",
        choices=("4", "pass", "fail"),
        default="4",
        help="what a gate ends with that cannot decide (default: exit code 4)",
    )
    group.add_argument("--junit", metavar="FILE", help="write the gate's result as JUnit XML")
    group.add_argument(
        "--markdown", metavar="FILE", help="append a summary in Markdown, as $GITHUB_STEP_SUMMARY wants it"
    )


def check_gate_options(options: argparse.Namespace) -> None:
    """Check the options against each other; to be called before anything is read.

    Raises:
        InputError: there are conditions but nothing to compare, or an option that needs a condition has none.
    """
    if options.fail_on and (options.reference is None or options.candidate is None):
        raise InputError("--fail-on judges a difference: give --reference and --candidate")
    if not options.fail_on and options.junit is not None:
        raise InputError("--junit writes the result of a gate: give at least one --fail-on")
    if not options.fail_on and options.inconclusive != "4":
        raise InputError(f"--inconclusive {options.inconclusive} is for a gate: give at least one --fail-on")


def judge(options: argparse.Namespace, summary: Summary) -> None:
    """Judge the conditions and put the result into the summary as `gate`. Without a condition adds no key."""
    if options.fail_on:
        summary.gate = evaluate(options.fail_on, summary.comparison, options.inconclusive)


def run_gate(options: argparse.Namespace, summary: Summary, style: Style = PLAIN) -> tuple[int, str]:
    """Write the files of `--junit` and `--markdown`.

    Args:
        summary: what `judge` was given.
        style: of the text.

    Returns:
        The exit code, and the text for the terminal (empty without a gate).

    Raises:
        InputError: a file cannot be written.
    """
    result, written = known(summary.gate), list[str]()
    if result is not None and options.junit is not None:
        _write(options.junit, junit_xml(result, summary.comparison), "w", "--junit")
        written.append(options.junit)
    if options.markdown is not None:
        _write(options.markdown, markdown_summary(summary), "a", "--markdown")
        written.append(options.markdown)
    if result is None:
        return EXIT_OK, "\n".join(written)
    return result.exit_code, "\n".join([gate_text(result, style), *written])


def _condition(text: str) -> Condition:
    try:
        return parse_condition(text)
    except InputError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _write(name: str, text: str, mode: str, option: str) -> None:
    path = Path(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open(mode, encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise InputError(
            f"{name}: cannot be written: {error.strerror or error}. Give another file to {option}"
        ) from error
