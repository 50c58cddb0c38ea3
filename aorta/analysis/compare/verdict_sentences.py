"""States the verdict of a comparison in sentences that an engineer can act on.

    OVERLAP LOST: 0.510 -> 0.000 of communication hidden (-0.510, 95 % interval -0.552 to -0.468, p 0.029, 4 against 4
    launches). Step time: no difference resolved (263 -> 235 ms, -10.6 %, 95 % interval -52.0 % to +46.0 %, p 0.34).

REGRESSION and IMPROVEMENT alone are of step time; of anything else the headline names what was lost or gained, and
what the step time did. Must not say a number that is not in the summary, or a ratio without its denominator.
"""

from __future__ import annotations

from typing import Final

from aorta.analysis.compare.verdict import GUARD, NOT_COMPARABLE, NOT_TESTED
from aorta.analysis.documents import known
from aorta.analysis.documents.comparison import ComparedMetric, Comparison
from aorta.analysis.formatting import TEXT, p_value, significant
from aorta.analysis.metrics import metric_named

_TITLES: Final = {
    GUARD: ("regression", "improvement"),
    "overlap_ratio": ("overlap lost", "overlap gained"),
    "exposed_comm_ms": ("more exposed communication", "less exposed communication"),
    "exposed_share": ("more exposed communication", "less exposed communication"),
    "compute_stall_ms": ("longer stalls", "shorter stalls"),
}
"""What a regression and an improvement of a metric are called; of others the metric is named."""
_SHARE_OF: Final = {
    "overlap_ratio": "of communication hidden",
    "exposed_share": "of the step exposed",
    "overlap_efficiency": "of what overlap could save",
    "compute_slowdown": "added / isolated computing",
}
UNLIKE: Final = "not comparable"


def title(comparison: Comparison) -> str:
    """The verdict in one to four words, in lower case."""
    if comparison.unlike:
        return UNLIKE
    if not comparison.tested:
        return NOT_TESTED
    word, name = comparison.verdict, comparison.deciding
    if word in ("regression", "improvement"):
        worse, better = _TITLES.get(name, (f"{name} worse", f"{name} better"))
        return worse if word == "regression" else better
    entry = comparison.metrics.get(name)
    return NOT_TESTED if entry is not None and entry.verdict == NOT_TESTED else str(word)


def is_comparable(comparison: Comparison) -> bool:
    """Whether a difference between the sides is one of what they ran: they did the same work, and took turns."""
    return not comparison.unlike and comparison.verdict != NOT_COMPARABLE


def verdict_words(pair: ComparedMetric) -> str:
    """The verdict of a metric, with the launches that one which is not tested needs."""
    needed = known(pair.needs_launches)
    return str(pair.verdict) if needed is None else f"{pair.verdict} (needs {needed} launches)"


def headline(comparison: Comparison) -> str:
    """The short headline, and what could have been found."""
    primary = comparison.metrics.get(comparison.deciding)
    said = short_headline(comparison)
    tested = comparison.tested and is_comparable(comparison)
    if not tested or primary is None or primary.effect.value is None:
        return said
    return f"{said} {_could(primary, comparison)}"


def short_headline(comparison: Comparison) -> str:
    """The verdict, the effect with its interval, p, the launches; why, where nothing was decided; and step time."""
    word = title(comparison).upper()
    if comparison.unlike:
        return f"{word}: {why_unlike(comparison)}."
    metrics = comparison.metrics
    tested = comparison.tested
    name, host = comparison.deciding, comparison.host_bound
    primary = metrics.get(name)
    lead = "" if host is None else f"the {host.side} is host-bound, and the other is not; "
    reason = f"{comparison.verdict_reason}."
    if comparison.verdict == NOT_COMPARABLE:
        return f"{word}: {lead}{reason}"  # a drift may be all of any difference
    if primary is None or primary.reference is None or primary.candidate is None:
        parts = [f"{word}: {lead}{reason}"]
    else:
        parts = [f"{word}: {lead}{_change(name, primary, counts=tested)}."]
        if comparison.verdict not in ("regression", "improvement"):
            parts.append(f"Why: {reason}")
    if name != GUARD:
        parts.append(_step_time(metrics.get(GUARD)))
    return " ".join(parts)


def why_unlike(comparison: Comparison) -> str:
    """Which work the two runs did not share."""
    values = {each.key: each for each in comparison.manifest_differences}
    listed = [
        f"{key.removeprefix('config.')} is {values[key].reference} in the reference, {values[key].candidate} in "
        "the candidate"
        for key in comparison.unlike
    ]
    return f"{'; '.join(listed)}: the runs did not do the same work"


def _change(name: str, entry: ComparedMetric, *, counts: bool) -> str:
    """Both values in words, with interval, p and launches in parentheses."""
    unit = metric_named(name).unit
    sides = entry.reference, entry.candidate
    if unit == "ratio":
        said = f"{TEXT.ratio(sides[0])} -> {TEXT.ratio(sides[1])} {_SHARE_OF.get(name, name)}"
    else:
        called = "step time" if name == GUARD else name
        said = f"{called} {significant(sides[0] or 0.0)} -> {significant(sides[1] or 0.0)} {unit}"
    told = _evidence(entry)
    if counts:
        told += ["{} against {} launches".format(*entry.counts)]
    return f"{said} ({', '.join(told)})" if told else said


def _evidence(entry: ComparedMetric) -> list[str]:
    """The effect with its interval, and p, as far as they are known."""
    effect = entry.effect
    if not entry.tested:
        return []
    told = [] if effect.value is None else [TEXT.effect(effect.value, effect.kind)]
    if told and effect.low is not None:
        level = TEXT.percent(entry.interval_level, 0)
        told = [
            f"{told[0]}, {level} interval {TEXT.effect(effect.low, effect.kind)} to "
            f"{TEXT.effect(effect.high, effect.kind)}"
        ]
    return told + ([] if entry.p is None else [f"p {p_value(entry.p)}"])


def _step_time(guard: ComparedMetric | None) -> str:
    if guard is None or guard.reference is None or guard.candidate is None:
        why = "not in the record" if guard is None else guard.verdict_reason or guard.judgement_reason
        return f"Step time: unknown ({why})."
    numbers = f"{significant(guard.reference)} -> {significant(guard.candidate)} ms"
    if not guard.tested:
        change = "" if guard.quotient is None else f" ({TEXT.percent(guard.quotient - 1, signed=True)})"
        return f"Step time: {numbers}{change}."
    numbers = ", ".join([numbers, *_evidence(guard)])
    match guard.verdict:
        case "regression" | "improvement":
            longer = "longer" if guard.verdict == "regression" else "shorter"
            return f"Step time: {TEXT.percent(abs(guard.effect.value or 0))} {longer} ({numbers})."
        case "inconclusive":
            return f"Step time: no difference resolved ({numbers})."
        case None:
            return f"Step time: not judged ({numbers}): {guard.verdict_reason}."
        case word:
            return f"Step time: {word} ({numbers})."


def _could(primary: ComparedMetric, comparison: Comparison) -> str:
    found, effect = primary.detectable, primary.effect
    if found.effect is None:
        said = f"What could have been found is not known: {found.reason}."
    else:
        size = TEXT.effect(found.effect, effect.kind).lstrip("+")
        power = TEXT.percent(found.power, 0)
        said = f"The smallest effect these launches could have found, with {power} power: {size}."
    if comparison.verdict == "inconclusive" and primary.p is not None and primary.p > comparison.alpha:
        wanted = max(abs(effect.value or 0.0), primary.margin)
        needed = primary.launches_needed
        count = primary.launches_needed_reason if needed is None else f"{needed} launches per side"
        said += f" To find {TEXT.effect(wanted, effect.kind).lstrip('+')} with that power: {count}."
    return said
