"""A gate's result as the lines a person reads at the end of a report.

Must not judge.
"""

from __future__ import annotations

import textwrap
from typing import Final

from aorta.analysis.formatting import TEXT
from aorta.analysis.gate.gate_checks import GateResult, Judged
from aorta.terminal_style import PLAIN, Style

OUTCOMES: Final = {"pass": "passed", "fail": "failed", "inconclusive": "inconclusive"}
_WORDS: Final = {"pass": "pass", "fail": "FAIL", "inconclusive": "?   "}
_TONES: Final = {"pass": "improvement", "fail": "regression", "inconclusive": "inconclusive"}
"""Outcome -> the verdict whose colour it has."""


def headline(result: GateResult) -> str:
    """The outcome, and how many conditions had each outcome."""
    counts = [
        f"{number} {word}"
        for outcome, word in (("fail", "failed"), ("inconclusive", "inconclusive"), ("pass", "passed"))
        if (number := result.count(outcome))  # type: ignore[arg-type]  # the keys of OUTCOMES
    ]
    total = TEXT.count(len(result.conditions), "condition")
    return f"gate {OUTCOMES[result.outcome]}: {', '.join(counts)} of {total}"


def quantity(judged: Judged, value: float | None) -> str:
    """A difference with its sign and unit; relative ones in per cent."""
    if judged.relative:
        return TEXT.percent(value, 2, signed=True)
    return TEXT.quantity(value, judged.unit, signed=True)


def interval(judged: Judged) -> str:
    """The interval of a condition's value, or null."""
    if judged.low is None or judged.high is None:
        return TEXT.unknown
    return f"{quantity(judged, judged.low)} to {quantity(judged, judged.high)}"


def gate_text(result: GateResult, style: Style = PLAIN) -> str:
    """The headline, one line per condition, and a note where `--inconclusive` changed the exit code."""
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
