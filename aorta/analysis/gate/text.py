"""Formats a gate's result as the lines at the end of a report on the terminal.

Must not: judge.
"""

from __future__ import annotations

from typing import Final

from aorta.analysis.amounts import DIGITS
from aorta.analysis.gate.judging import GateResult, Judged

OUTCOMES: Final = {"pass": "passed", "fail": "failed", "inconclusive": "inconclusive"}


def headline(result: GateResult) -> str:
    """The outcome, and how many conditions had each outcome."""
    counts = [
        f"{number} {word}"
        for outcome, word in (("fail", "failed"), ("inconclusive", "inconclusive"), ("pass", "passed"))
        if (number := result.count(outcome))  # type: ignore[arg-type]  # the keys of OUTCOMES
    ]
    total = len(result.conditions)
    return f"gate {OUTCOMES[result.outcome]}: {', '.join(counts)} of {total} condition{'s' if total != 1 else ''}"


def quantity(judged: Judged, value: float | None) -> str:
    """A difference with its sign and unit; a relative one in per cent."""
    if value is None:
        return "null"
    if judged.relative:
        return f"{100 * value:+.2f} %"
    number = f"{value:+.{DIGITS[judged.unit]}f}"
    return number if judged.unit == "ratio" else f"{number} {judged.unit}"


def interval(judged: Judged) -> str:
    """The interval of a condition's value, or null."""
    if judged.low is None or judged.high is None:
        return "null"
    return f"{quantity(judged, judged.low)} to {quantity(judged, judged.high)}"


def gate_text(result: GateResult) -> str:
    """The headline, one line per condition, and a note where `--inconclusive` changed the exit code."""
    lines = [f"{headline(result)} (exit code {result.exit_code})"]
    for judged in result.conditions:
        word = {"pass": "pass", "fail": "FAIL", "inconclusive": "?   "}[judged.outcome]
        measured = quantity(judged, judged.value)
        around = "" if judged.low is None else f" ({interval(judged)})"
        lines.append(f"  {word}  {judged.condition}: {measured}{around}: {judged.reason}")
    if result.outcome == "inconclusive" and result.on_inconclusive != "4":
        lines.append(f"  --inconclusive {result.on_inconclusive} was asked for")
    return "\n".join(lines)
