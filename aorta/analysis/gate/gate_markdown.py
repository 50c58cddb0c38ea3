"""A summary and its gate as GitHub-flavoured Markdown, for the page of a CI job ($GITHUB_STEP_SUMMARY).

The outcome comes first. Must not let a word of a file or a label become markup, or compute a number.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from aorta.analysis.attribution.causes import told_rows
from aorta.analysis.compare.verdict_sentences import is_comparable, short_headline, title, verdict_words
from aorta.analysis.formatting import TEXT, is_zero, p_value, whole_percent
from aorta.analysis.gate.gate_checks import GateResult
from aorta.analysis.gate.gate_text import OUTCOMES, headline, interval, quantity

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


def markdown_summary(summary: Mapping[str, Any], result: GateResult | None) -> str:
    """The page: outcome, conditions, where the difference lies, and warnings; metrics and manifest differences are
    collapsed.
    """
    comparison = summary.get("comparison")
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


def _head(comparison: Mapping[str, Any] | None, result: GateResult | None) -> Iterator[str]:
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
    word, _, said = short_headline(comparison).partition(":")
    sides = f"{escaped(comparison['candidate'])} against {escaped(comparison['reference'])}"
    yield f"{sides}: **{escaped(word)}**: {escaped(said)}"


def _comparison(comparison: Mapping[str, Any]) -> Iterator[str]:
    attribution = comparison.get("attribution") or {}
    if attribution.get("sentence"):
        yield from ("", f"**Where:** {escaped(attribution['sentence'])}")
    for warning in comparison.get("warnings", ()):
        yield from ("", f"> ⚠️ {escaped(warning)}")
    yield from _folded("All metrics", _metrics(comparison))
    yield from _folded("Where the exposed communication differs", _causes(told_rows(attribution)))
    differences = comparison.get("manifest_differences") or ()
    rows = [[escaped(row[name]) for name in ("key", "reference", "candidate")] for row in differences]
    yield from _folded(f"{len(rows)} differences of the manifests", _table(["key", "reference", "candidate"], rows))


def _metrics(comparison: Mapping[str, Any]) -> list[str]:
    changes = ("difference", "quotient") if is_comparable(comparison) else ()  # else of other work, or of a drift
    rows = [
        [
            escaped(name),
            *(TEXT.number(entry[key], entry["unit"]) for key in ("reference", "candidate", *changes[:1])),
            *(TEXT.number(entry[key], "ratio", fewer=1) for key in changes[1:]),
            escaped(entry["unit"]),
            escaped((verdict_words(entry) if entry["verdict"] else "-") if "verdict" in entry else entry["judgement"]),
        ]
        for name, entry in comparison["metrics"].items()
        if not (entry["reference"] is entry["candidate"] is None or is_zero(entry))
    ]
    named = {"quotient": "ratio"}
    heads = ["metric", "reference", "candidate", *(named.get(key, key) for key in changes), "unit", "verdict"]
    return _table(heads, rows)


def _causes(causes: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [
        [
            escaped(row["what"]),
            *(TEXT.number(row[key], "ms") for key in ("reference_ms", "candidate_ms", "difference_ms")),
            "-" if row["share"] is None else whole_percent(row["share"]),
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
