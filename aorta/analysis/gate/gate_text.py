"""A gate's result as the lines a person reads at the end of a report.

Must not judge.
"""

from __future__ import annotations

from typing import Final

from aorta.analysis.formatting import TEXT
from aorta.analysis.gate.gate_checks import GateResult, Judged

OUTCOMES: Final = {"pass": "passed", "fail": "failed", "inconclusive": "inconclusive"}


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
