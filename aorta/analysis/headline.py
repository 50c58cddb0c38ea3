"""States a comparison in a headline of at most 12 words and one line of numbers, both from the entries of its table.

    More exposed communication: 33.1 -> 76.4 ms; step time inconclusive.
    Hidden 48 % -> 0 % (significant); exposed +131 % (significant); step +24 % (inconclusive).

Step time and exposed time lead; the hidden share explains. Words behind a number are the verdict in the table, except
that a regression or an improvement is called significant: its sign says which. Must not decide anything (`verdict`
does), or state a number or a verdict that the table does not have.
"""

from __future__ import annotations

from typing import Final

from aorta.analysis.account import MARGIN
from aorta.analysis.compare.rank_tests import least_launches
from aorta.analysis.compare.verdict import (
    DECIDED,
    GUARD,
    NOT_COMPARABLE,
    NOT_SETTLED,
    NOT_TESTED,
    SEQUENCE,
    SHIFTED,
    WITHHELD,
    changes_of,
    is_comparable,
    mean_alone,
    slower,
)
from aorta.documents import known
from aorta.documents.comparison import ComparedMetric, Comparison
from aorta.documents.formatting import TEXT, first_upper, p_value, rough_ms

MOST_WORDS: Final = 12
NOT_ALIKE: Final = "not comparable"
_UNLIKE_MEAN: Final = 1 / 3
"""Of the larger of both changes: where those of mean and median are further apart, the mean's is said too."""
_EXPOSED, _RATIO = SEQUENCE[:2]
_TITLES: Final = {
    GUARD: ("slower", "faster"),
    _EXPOSED: ("more exposed communication", "less exposed communication"),
    "exposed_share": ("more exposed communication", "less exposed communication"),
    _RATIO: ("less communication hidden", "more communication hidden"),
    "compute_stall_ms": ("longer stalls", "shorter stalls"),
}
"""What a regression and an improvement of a metric are called; of others the metric is named."""
_NAMES: Final = {GUARD: "step", _EXPOSED: "exposed", _RATIO: "hidden"}
_STEP_TIME: Final = {"equivalent": "unchanged", "regression": "longer", "improvement": "shorter", None: "not judged"}
"""What the headline says of the step time where it does not lead, by its verdict; others say themselves."""


def verdict_label(pair: ComparedMetric) -> str:
    """Return the verdict of a metric, with the launches that one which is not tested needs."""
    needed = pair.test.least_launches
    return str(pair.verdict) if needed is None else f"{pair.verdict} (needs {needed} launches)"


def leading(comparison: Comparison) -> str:
    """Return the metric that the headline is of: step time where it is decided, else the one that decides."""
    step = comparison.metrics.get(GUARD)
    if comparison.verdict == SHIFTED:
        return _RATIO
    return GUARD if step is not None and step.verdict in DECIDED else comparison.deciding


def title(comparison: Comparison) -> str:
    """Return the verdict in one to four words, in lower case."""
    if comparison.unlike:
        return NOT_ALIKE
    if not comparison.tested:
        return NOT_TESTED
    word, name = comparison.verdict, leading(comparison)
    if word in DECIDED:
        return _TITLES.get(name, (f"worse {name}", f"better {name}"))[DECIDED.index(word)]
    entry = comparison.metrics.get(name)
    return NOT_TESTED if entry is not None and entry.verdict == NOT_TESTED else str(word)


def headline(comparison: Comparison) -> str:
    """Return what came out in at most `MOST_WORDS` words."""
    word, metrics = first_upper(title(comparison)), comparison.metrics
    if comparison.unlike:
        first, *others = (key.removeprefix("config.") for key in comparison.unlike)
        return f"{word}: {first} and {len(others)} more differ." if others else f"{word}: {first} differs."
    if comparison.verdict == NOT_COMPARABLE:
        order = known(comparison.launch_order)
        unknown = order is not None and order.comparable is None
        return f"{word}: {'when launches ran is not known' if unknown else 'the launches did not take turns'}."
    if comparison.verdict == NOT_SETTLED:
        return f"{word}: steps still change their level after the warm-up."
    name, step = leading(comparison), metrics.get(GUARD)
    if not comparison.tested:
        pairs = {metric: metrics[metric] for metric in dict.fromkeys((name, GUARD, _RATIO)) if metric in metrics}
        shown = [_value(metric, pair) for metric, pair in pairs.items() if pair.difference is not None]
        return f"{word}: {', '.join(shown[:2]) or 'no metric is known on both sides'}."
    text = f"{word}: {_value(name, metrics.get(name))}"
    if comparison.verdict == SHIFTED:
        gained = (metrics[_RATIO].difference or 0.0) > 0
        return f"{word}, nothing {'gained' if gained else 'lost'}: {_arrow(metrics[_RATIO])} hidden."
    if name == GUARD:
        exposed = metrics.get(_EXPOSED)
        if exposed is None or exposed.verdict not in DECIDED or exposed.difference is None:
            return f"{text}."
        joined = "" if exposed.verdict == comparison.verdict else " although"
        change = f"{rough_ms(exposed.difference)} {'more' if exposed.difference > 0 else 'less'} exposed"
        return f"{text},{joined} {change}."
    if (mean := mean_alone(comparison)) is not None:
        return f"{text}; mean step {_percent(mean.change_ms / mean.reference_ms)}."
    if step is None or step.test.effect.value is None:
        return f"{text}; step time not known."
    return f"{text}; step time {_STEP_TIME.get(step.verdict, step.verdict)}."


def numbers(comparison: Comparison) -> str:
    """Return the hidden share, exposed time and step time with their verdicts in one line; where nothing was decided
    for lack of launches, or between unlike runs, what is missing.
    """
    if comparison.unlike:
        differing = {difference.key: difference for difference in comparison.manifest_differences}
        listed = [
            f"{key.removeprefix('config.')} is {differing[key].reference} in the reference, {differing[key].candidate} "
            "in the candidate"
            for key in comparison.unlike
        ]
        return f"The runs did not do the same work: {'; '.join(listed)}."
    if comparison.verdict in WITHHELD:
        return f"{first_upper(str(comparison.verdict_reason))}."
    metrics, host = comparison.metrics, comparison.host_bound
    parts = []
    for name in dict.fromkeys((comparison.deciding, _RATIO, _EXPOSED, GUARD)):
        entry = metrics.get(name)
        if entry is None or entry.difference is None:
            continue
        sides = entry.unit == "ratio" or entry.quotient is None
        change = (1.0 if entry.quotient is None else entry.quotient) - 1
        number = f"{_NAMES.get(name, name)} {_arrow(entry) if sides else _percent(change)}"
        significance = "significant" if entry.verdict in DECIDED else entry.verdict or "not judged"
        parts.append(f"{number} ({significance})" if comparison.tested else number)
    parts.sort(key=lambda part: not part.startswith(_NAMES[_RATIO]))
    text = f"{first_upper('; '.join(parts))}." if parts else ""
    lead = metrics.get(leading(comparison))
    if not comparison.tested:
        text += f" {first_upper(str(comparison.verdict_reason))}."
    elif title(comparison) == NOT_TESTED:
        text += f" Needs {least_launches(comparison.alpha)} launches per side."
    elif lead is None or lead.difference is None:
        text += f" {first_upper(str(comparison.verdict_reason))}."
    elif lead.verdict == "inconclusive" and lead.test.p is not None and lead.test.p <= comparison.alpha:
        withheld = slower(metrics.get(GUARD), comparison.alpha)
        text += f" No gain: {withheld}." if withheld is not None and lead.test.effect.low is not None else ""
    if alone := [name for name in (GUARD, _EXPOSED) if mean_alone(comparison, name) is not None]:
        text += f" {first_upper(str(metrics[alone[0]].test.verdict_reason))}."
    elif (of_mean := _unlike_mean(comparison)) is not None:
        text += f" The mean step: {_percent(of_mean)}."
    if host is not None:
        other = "candidate" if host.side == "reference" else "reference"
        text = f"The {host.side} is host-bound, the {other} is not. {text}"
    return text.strip()


def _unlike_mean(comparison: Comparison) -> float | None:
    """Return by which share the mean step changed, where that of the median is far from it; None where it is not, or
    launches that are enough for a test leave open whether it changed.
    """
    step, account = comparison.metrics.get(GUARD), known(comparison.account)
    if step is None or step.quotient is None or account is None or account.reason is not None:
        return None
    few = not comparison.tested or step.verdict == NOT_TESTED
    mean = account.step
    if not mean.reference_ms or not (few or changes_of(comparison, GUARD)):
        return None
    of_mean, of_median = mean.change_ms / mean.reference_ms, step.quotient - 1
    least = max(_UNLIKE_MEAN * max(abs(of_mean), abs(of_median)), MARGIN if few else 0.0)
    return of_mean if abs(of_mean - of_median) > least else None


def evidence(comparison: Comparison) -> str:
    """Return the test behind the verdict: effect with its interval, p, launches, the reason, and what these launches
    could have found; empty where nothing was tested.
    """
    entry = comparison.metrics.get(leading(comparison))
    if not (comparison.tested and is_comparable(comparison)) or entry is None or entry.test.effect.value is None:
        return ""
    test, effect, power = entry.test, entry.test.effect, entry.test.power
    text = f"{leading(comparison)}: {TEXT.effect(effect.value, effect.kind)}"
    if effect.low is not None:
        text += f", {TEXT.percent(test.interval_level, 0)} interval {TEXT.interval(effect)}"
    text += f", p {p_value(test.p)}, {entry.counts[0]} against {entry.counts[1]} launches: {test.verdict_reason}."
    if power.smallest_effect is None:
        return f"{text} Smallest detectable effect: not known ({power.smallest_effect_reason})."
    share, smallest = TEXT.percent(power.probability, 0), TEXT.effect(power.smallest_effect, effect.kind).lstrip("+")
    text += f" Smallest detectable effect: {smallest} ({share} power)."
    if entry.verdict == "inconclusive" and test.p is not None and test.p > comparison.alpha:
        wanted = TEXT.effect(max(abs(effect.value or 0.0), test.margin), effect.kind).lstrip("+")
        count = power.launches_reason if power.launches is None else f"{power.launches} launches per side"
        text += f" To detect {wanted}: {count}."
    return text


def _value(name: str, entry: ComparedMetric | None) -> str:
    """Return both sides of a metric; without values, that only bounds or nothing is known."""
    named = _NAMES.get(name, name)
    if entry is None or entry.difference is None:
        return f"{named} {'known in bounds only' if entry is not None and entry.bounded else 'not known'}"
    arrow = _arrow(entry)
    return arrow if entry.verdict in DECIDED and name != GUARD else f"{named} {arrow}"


def _percent(change: float) -> str:
    return TEXT.percent(change, 0 if abs(change) >= 0.1 else 1, signed=True)


def _arrow(entry: ComparedMetric) -> str:
    """Return `33.1 -> 76.4 ms` or `48 % -> 0 %`, with more digits where these are the same on both sides."""
    sides = entry.reference.value or 0.0, entry.candidate.value or 0.0
    if entry.unit == "ratio":
        left, right = (TEXT.percent(side, 0 if abs(sides[0] - sides[1]) >= 0.02 else 1) for side in sides)
        return f"{left} -> {right}"
    left, right = (TEXT.number(side, entry.unit) for side in sides)
    if left == right and sides[0] != sides[1]:
        left, right = (f"{side:.6g}" for side in sides)
    return f"{left} -> {right} {entry.unit}"
