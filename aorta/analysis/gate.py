"""The gate: conditions on a comparison, for example `exposed_comm_ms>5%` or `overlap_ratio<-0.02`, judged pass, fail or
inconclusive with the reason (docs/compare.md).

Must not: fail a candidate for what may be chance where there are launches to tell; claim more of two single runs than
that a threshold was crossed; or import pandas: conditions are parsed together with the other arguments.
"""

from __future__ import annotations

import argparse
import math
import re
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from aorta.analysis.compare.verdict import NOT_TESTED, WITHHELD, mean_alone, too_few
from aorta.documents.comparison import (
    ComparedMetric,
    Comparison,
    Effect,
    GateEntry,
    Interval,
    JudgedCondition,
    Summary,
)
from aorta.documents.formatting import TEXT, p_value
from aorta.documents.metrics import STEP_METRIC_NAMES, metric_named
from aorta.errors import EXIT_OK, GateFailed, Inconclusive, InputError, meant
from aorta.read.frames import KIND_METRICS
from aorta.terminal_style import PLAIN, Style

Outcome: TypeAlias = Literal["pass", "fail", "inconclusive"]
OUTCOMES: Final[Mapping[Outcome, str]] = {"fail": "failed", "inconclusive": "inconclusive", "pass": "passed"}
"""What is said of them. The first that a condition has is that of the gate."""
_CODES: Final = {"fail": GateFailed.exit_code, "inconclusive": Inconclusive.exit_code, "pass": EXIT_OK}
_WORDS: Final = {"fail": "FAIL", "inconclusive": "?   ", "pass": "pass"}
_TONES: Final = {"fail": "regression", "inconclusive": "inconclusive", "pass": "improvement"}
"""Outcome -> the verdict whose colour it has."""
ALIASES: Final = {"ratio_delta": "overlap_ratio"}
"""The first AORTA's name for the difference of the overlap ratios (SPEC D23)."""
_NUMBER: Final = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
_FORM: Final = "expected METRIC<NUMBER or METRIC>NUMBER, with % behind the number for a part of the reference"
SINGLE: Final = "one launch per side: threshold only, no statistics"


@dataclass(frozen=True)
class Condition:
    """One condition: the gate fails where candidate minus reference lies beyond `threshold`. The threshold is in the
    unit of the metric or, if `relative`, a fraction of the reference (0.05 for `5%`). `text` is the condition as it was
    given.
    """

    text: str
    metric: str
    sign: Literal["<", ">"]
    threshold: float
    relative: bool

    def beyond(self, value: float) -> bool:
        """Return whether a difference of `value` fails the condition."""
        return value < self.threshold if self.sign == "<" else value > self.threshold


def parse_condition(text: str) -> Condition:
    """Parse one condition on a metric of steps; `ratio_delta` is accepted as an alias of `overlap_ratio`.

    Raises:
        InputError: it is malformed; the message shows where, and what is allowed.
    """

    def wrong(at: int, what: str) -> InputError:
        shown = "".join(char if char.isprintable() else "?" for char in text)
        return InputError(f"condition {shown!r}: {what}\n    {shown}\n    {' ' * at}^")

    signs = [at for at, char in enumerate(text) if char in "<>"]
    if not signs:
        raise wrong(len(text), f"no < or > in it; {_FORM}")
    if len(signs) > 1:
        raise wrong(signs[1], f"a second comparison; {_FORM}. Give --fail-on once for each condition")
    at = signs[0]
    left, right = text[:at], text[at + 1 :]
    name, number = left.strip(), right.strip()
    if name.endswith("="):
        raise wrong(left.rindex("="), f"there is no ={text[at]}; {_FORM}")
    if not name:
        raise wrong(0, f"no metric before {text[at]}; {_FORM}")
    metric = ALIASES.get(name, name)
    if metric not in STEP_METRIC_NAMES:
        where = len(left) - len(left.lstrip())
        if hint := meant(name, [*STEP_METRIC_NAMES, *ALIASES], "; "):
            raise wrong(where, f"{name!r} is no metric{hint}")
        names = ", ".join([*(metric for metric in STEP_METRIC_NAMES if metric not in KIND_METRICS), *ALIASES])
        kinds = "KIND_ms, compute_KIND_ms, exposed_KIND_ms of a kind of collective"
        raise wrong(where, f"{name!r} is no metric. Known metrics: {names}, and {kinds}")
    start = at + 1 + len(right) - len(right.lstrip())
    if number.startswith("="):
        raise wrong(start, f"there is no {text[at]}=; {_FORM}")
    relative = number.endswith("%")
    digits = number[:-1].rstrip() if relative else number
    if not _NUMBER.fullmatch(digits):
        raise wrong(start, f"{number!r} is no number; {_FORM}")
    value = float(digits) / (100 if relative else 1)
    if not math.isfinite(value):
        raise wrong(start, f"{number} is too large a number")
    return Condition(text.strip(), metric, "<" if text[at] == "<" else ">", value, relative)


def evaluate(conditions: Sequence[Condition], comparison: Comparison) -> GateEntry:
    """Judge every condition.

    Args:
        comparison: rests on launch sets where it has `launches`, otherwise on two single runs.

    Returns:
        What `summary.json` holds of it. Fail outweighs inconclusive, which outweighs pass.
    """
    judged = [_judge(condition, comparison) for condition in conditions]
    outcome = next(outcome for outcome in OUTCOMES if outcome in {entry.outcome for entry in judged})
    return GateEntry(outcome, _CODES[outcome], "launches" if comparison.tested else "single runs", judged)


def _judge(condition: Condition, comparison: Comparison) -> JudgedCondition:
    entry = comparison.metrics.get(condition.metric)
    value, low, high, why = _measured(condition, entry)
    outcome: Outcome = "inconclusive"
    p = None
    if entry is None or value is None:
        reason = why
    elif comparison.unlike:
        reason = (
            f"the two runs did not do the same work: they differ in {', '.join(comparison.unlike)}. Compare runs that "
            f"did, or allow it with --allow-unlike {comparison.unlike[0]}"
        )
    elif comparison.verdict in WITHHELD:
        reason = f"{comparison.verdict}: {comparison.verdict_reason}"
    else:
        p = _p(entry, comparison.metrics) if comparison.tested else None
        outcome, reason = _decide(condition, (value, low, high), entry, p, comparison)
    unit = "ratio" if condition.relative else metric_named(condition.metric).unit
    of = condition.text, condition.metric, condition.relative, condition.threshold
    return JudgedCondition(*of, unit, value, low, high, p, outcome, reason)


def _measured(
    condition: Condition, entry: ComparedMetric | None
) -> tuple[float | None, float | None, float | None, str]:
    """Return the difference in the terms of the condition with the ends of its interval, or why it is not known. An
    absolute one is in the metric's unit, with the interval of the difference. A relative one is a fraction of the
    reference, with the interval of the quotient; for a ratio, with that of the difference divided by the reference's
    median.
    """
    if entry is None:
        return None, None, None, f"neither side has {condition.metric}"
    reference, difference = entry.reference.value, entry.difference
    if difference is None or reference is None:
        return None, None, None, entry.judgement_reason or entry.quotient_reason or "not available on one side"
    around: Interval | Effect = entry.test.difference_interval if entry.tested else Interval(None, None)
    if not condition.relative:
        return difference, around.low, around.high, ""
    if not reference:
        return None, None, None, "the reference is 0: no percentage of it"
    scale = 1 / abs(reference)
    value = difference * scale
    if entry.tested and entry.test.effect.kind == "quotient":
        around, scale = entry.test.effect, 1.0
    low, high = (None if end is None else end * scale for end in (around.low, around.high))
    return value, low, high, ""


def _p(entry: ComparedMetric, metrics: Mapping[str, ComparedMetric]) -> float | None:
    """Return the p-value by which a condition is judged: as it is for the primary metric, the guard and a metric of the
    sequence, corrected for all others.

    The sequence and step-down minP leave some metrics out (neither direction is better, milliseconds across platforms,
    the same value in all launches). A condition on such a metric adds one test to those that were made, so its p gets
    Bonferroni's factor for all of them, which holds however the tests depend on each other.
    """
    test = entry.test
    in_turn = test.role == "sequence" and entry.judgement != "not judged"
    if test.p is None or test.role in ("primary", "guard") or in_turn:
        return test.p
    if test.p_corrected is not None:
        return test.p_corrected
    return min(1.0, test.p * (1 + sum(other.test.p_corrected is not None for other in metrics.values())))


def _decide(
    condition: Condition,
    measured: tuple[float, float | None, float | None],
    entry: ComparedMetric,
    p: float | None,
    comparison: Comparison,
) -> tuple[Outcome, str]:
    """Judge a condition. Of launch sets it fails beyond the threshold, and not by chance; it passes where neither the
    value nor its interval is beyond it; everything else is inconclusive with these launches. Of two single runs the
    threshold alone decides.
    """
    value, low, high = measured
    # The comparison itself may not judge this metric: here it is judged because a condition asks for it.
    asked = entry.judgement == "not judged" and entry.judgement_reason
    note = f" (judged because it was asked for: {entry.judgement_reason})" if asked else ""
    if not comparison.tested:
        return ("fail" if condition.beyond(value) else "pass"), f"{SINGLE}{note}"
    lacking = too_few(entry.counts, comparison.alpha)
    if lacking is not None:
        return "inconclusive", lacking
    if low is None or high is None:
        return "inconclusive", "no interval: the reference is 0, or the interval would divide by 0"
    ends = {condition.beyond(low), condition.beyond(high)}
    if not condition.beyond(value):
        if True in ends:
            return "inconclusive", f"not beyond the threshold, but the interval reaches beyond it{note}"
        mean = mean_alone(comparison, condition.metric)
        if mean and condition.beyond(mean.change_ms / (mean.reference_ms if condition.relative else 1.0)):
            return "inconclusive", f"not beyond the threshold, but {entry.test.verdict_reason}{note}"
        return "pass", f"not beyond the threshold, and neither is its interval{note}"
    if condition.beyond(0.0):  # even a difference of 0 fails it, so significance against 0 says nothing here
        if False not in ends:
            return "fail", f"the whole interval is beyond the threshold{note}"
        return "inconclusive", f"beyond the threshold, but the interval reaches back across it{note}"
    if entry.verdict == NOT_TESTED:
        return "inconclusive", f"{NOT_TESTED}: {entry.test.verdict_reason}"
    assert p is not None, "both sides have values, or there would be no difference"
    alpha, needed = comparison.alpha, entry.test.power.launches
    if p > alpha:
        enough = needed is None or needed <= min(entry.counts)
        more = "" if enough else f"; {needed} launches per side would be needed"
        chance = f"beyond the threshold, but p {p_value(p, 3)} is above {alpha:g}: may be chance"
        return "inconclusive", f"{chance}{more}{note}"
    if low <= 0 <= high:
        return "inconclusive", f"beyond the threshold, but the interval holds 0{note}"
    return "fail", f"beyond the threshold, and significant: p {p_value(p, 3)} is at most {alpha:g}{note}"


def outcome_text(result: GateEntry) -> str:
    """Return the outcome, and how many conditions had each outcome."""
    number = Counter(judged.outcome for judged in result.conditions)
    counts = ", ".join(f"{number[outcome]} {text}" for outcome, text in OUTCOMES.items() if number[outcome])
    total = TEXT.count(len(result.conditions), "condition")
    return f"gate {OUTCOMES[result.outcome]}: {counts} of {total}"


def difference_text(judged: JudgedCondition, value: float | None) -> str:
    """Return a difference with its sign and unit; relative ones in per cent."""
    if judged.relative:
        return TEXT.percent(value, 2, signed=True)
    return TEXT.quantity(value, judged.unit, signed=True)


def interval_text(judged: JudgedCondition) -> str:
    """Return the interval of a difference."""
    if judged.low is None or judged.high is None:
        return TEXT.unknown
    return f"{difference_text(judged, judged.low)} to {difference_text(judged, judged.high)}"


def gate_text(result: GateEntry, style: Style = PLAIN) -> str:
    """Return the outcome, and one line per condition."""
    head = f"{outcome_text(result)} (exit code {result.exit_code})"
    lines = [style.verdict(_TONES[result.outcome], head, bold=True)]
    for judged in result.conditions:
        word = _WORDS[judged.outcome]
        around = "" if judged.low is None else f" ({interval_text(judged)})"
        plain = f"  {word}  {judged.condition}: {difference_text(judged, judged.value)}{around}: {judged.reason}"
        filled = textwrap.fill(plain, style.width, subsequent_indent=" " * 8, break_long_words=False)
        lines.append(filled.replace(word, style.verdict(_TONES[judged.outcome], word), 1))
    return "\n".join(lines)


def add_gate_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--fail-on` and `--markdown`. A malformed condition ends the command with exit code 2 before anything is
    read.
    """

    def condition(text: str) -> Condition:
        try:
            return parse_condition(text)
        except InputError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    group = parser.add_argument_group("gate", "exit code 3 if the candidate fails, 4 if the data cannot decide")
    group.add_argument(
        "--fail-on",
        action="append",
        default=[],
        type=condition,
        metavar="METRIC<NUMBER",
        help="fail where candidate - reference is below NUMBER (or above it: METRIC>NUMBER), in the metric's unit; "
        "NUMBER%% is a part of the reference; repeatable",
    )
    group.add_argument(
        "--markdown", metavar="FILE", help="append a summary in Markdown, as $GITHUB_STEP_SUMMARY wants it"
    )


def judge(options: argparse.Namespace, summary: Summary) -> None:
    """Judge the conditions and add the result to the summary as `gate`; without a condition no key is added."""
    if options.fail_on:
        summary.gate = evaluate(options.fail_on, summary.comparison)
