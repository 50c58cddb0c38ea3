"""What stands at the top of the page: one word, one sentence, and the numbers behind them on cards.

Must not decide anything; the verdict is the comparison's, or there is none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from aorta.analysis.compare.verdict import NOT_COMPARABLE, NOT_TESTED, is_comparable, title, why_unlike
from aorta.analysis.documents import known
from aorta.analysis.documents.comparison import SIDES, ComparedMetric, Comparison, Effect
from aorta.analysis.documents.dataset import DatasetEntry
from aorta.analysis.documents.summary import Summary
from aorta.analysis.formatting import PAGE, p_value
from aorta.analysis.host_bound import pace_notes

_WORDS: Final = {
    "regression": ("Regression", "bad", "▼"),
    "improvement": ("Improvement", "good", "▲"),
    "equivalent": ("Equivalent", "even", "="),
    "inconclusive": ("Inconclusive", "open", "?"),
    NOT_TESTED: ("Not tested", "open", "○"),
    NOT_COMPARABLE: ("Not comparable in time", "open", "?"),
}
_SIGNS: Final = {name: sign for name, (_, _, sign) in _WORDS.items()} | {"better": "▲", "worse": "▼", "equal": "="}
_NO_VERDICT: Final = ("Not enough launches for a verdict (1 of 4)", "open", "#")
_CARDS: Final = ("overlap_ratio", "job_step_ms", "exposed_comm_ms")
_TITLES: Final = {
    "overlap_ratio": "Overlap ratio",
    "job_step_ms": "Job step",
    "exposed_comm_ms": "Exposed communication",
}


def signed(word: str) -> str:
    """A verdict or a direction with the sign that says the same without colour."""
    return f"{_SIGNS[word]}\u00a0{word}" if word in _SIGNS else word


@dataclass(frozen=True)
class Card:
    """One metric, large. `facts` are label and value."""

    name: str
    title: str
    role: str
    value: str
    change: str
    tone: str
    facts: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Verdict:
    """`tone` is good, bad, even or open; `symbol` says the same without colour."""

    word: str
    tone: str
    symbol: str
    sentence: str
    reason: str
    basis: str
    cards: tuple[Card, ...]
    warnings: tuple[str, ...]


def verdict_of(summary: Summary) -> Verdict:
    """What the page says first."""
    comparison = known(summary.comparison)
    if comparison is None:
        return _numbers_only(summary.datasets)
    tested = comparison.tested
    found = comparison.verdict
    word, tone, symbol = _WORDS.get(found, (str(found), "open", "?")) if tested else _NO_VERDICT
    if tested or not is_comparable(comparison):
        word = _first_upper(title(comparison))
    primary = comparison.deciding
    names = dict.fromkeys((primary, *_CARDS))
    metrics = comparison.metrics
    return Verdict(
        word,
        tone,
        symbol,
        _sentence(comparison, primary),
        "" if comparison.unlike else str(comparison.verdict_reason),
        _basis(comparison),
        tuple(_card(name, metrics[name], comparison) for name in names if name in metrics),
        tuple(comparison.warnings),
    )


def _numbers_only(entries: Mapping[str, DatasetEntry]) -> Verdict:
    """A report without a comparison."""
    cards = []
    for label, entry in entries.items():
        for name in _CARDS[:2]:
            found = entry.described.get(name)
            if found is None:
                continue
            unit = "ms" if name.endswith("_ms") else "ratio"
            facts = tuple((key, PAGE.number(getattr(found, key), unit)) for key in ("p5", "p95", "min", "max"))
            value, of = PAGE.quantity(found.median, unit), "median"
            if found.source == "kernels":
                of = "median of the steps measured by kernels"
            if found.bounds:
                value, of, facts = PAGE.bounds(found.bounds, unit, fewer=1), "bounds", (("note", str(found.reason)),)
            elif found.median is None:
                value = f"not available: {found.reason}"
            cards.append(Card(name, f"{_TITLES[name]}, {label}", of, value, "", "open", facts))
    labels = " and ".join(entries)
    sentence = f"Run summary: {labels}. Nothing was compared: name a reference and a candidate for that."
    notes = [f"{label}: {note}" for label, entry in entries.items() if entry.count for note in pace_notes(entry)]
    return Verdict("Run summary", "open", "#", sentence, "", "", tuple(cards), tuple(notes))


def _sentence(comparison: Comparison, primary: str) -> str:
    """Both sides of the primary metric, and of the job step, in words. What is not decided is not said as a fact."""
    if comparison.unlike:
        return f"{_first_upper(why_unlike(comparison))}."
    metrics = comparison.metrics
    parts = [_primary(comparison, primary, metrics.get(primary))]
    step = metrics.get("job_step_ms")
    if primary != "job_step_ms" and step is not None and step.quotient is not None:
        parts.append(_job_step(step))
    only = "" if comparison.tested else "In this one pair of launches: "
    host = comparison.host_bound
    return ("" if host is None else f"{_first_upper(host.sentence)} ") + only + "; ".join(parts) + "."


def _primary(comparison: Comparison, primary: str, pair: ComparedMetric | None) -> str:
    reference, candidate = comparison.reference, comparison.candidate
    if pair is not None and pair.bounded:
        sides = [PAGE.side(pair, side) for side in SIDES[::-1]]
        return f"{primary} is {sides[0]} in {candidate}, {sides[1]} in {reference}"
    if pair is None or pair.reference is None or pair.candidate is None:
        why = "it is in neither record" if pair is None else pair.judgement_reason or pair.quotient_reason
        return f"{primary} cannot be compared: {why}"
    if _not_judged(pair):
        return f"{primary} is not judged: {pair.verdict_reason}"
    if pair.verdict == NOT_TESTED:
        sides = [PAGE.quantity(value, pair.unit) for value in (pair.candidate, pair.reference)]
        return f"{primary}, {sides[0]} in {candidate} and {sides[1]} in {reference}, was not tested"
    if _undecided(pair):
        sides = [PAGE.quantity(value, pair.unit) for value in (pair.candidate, pair.reference)]
        return (
            f"no difference in {primary} was shown between {candidate} and {reference}{_p_of(pair)}: "
            f"{sides[0]} against {sides[1]}"
        )
    if primary != "overlap_ratio" or comparison.host_bound is not None:
        return (
            f"{primary}: {PAGE.quantity(pair.candidate, pair.unit)} in {candidate}, "
            f"{PAGE.quantity(pair.reference, pair.unit)} in {reference}"
        )
    change, hidden = pair.difference, PAGE.percent(pair.candidate)
    if not change:
        return f"{candidate} hides as much of its communication as {reference}: {hidden}"
    amount = f"{PAGE.points(abs(change))} {'more' if change > 0 else 'less'}"
    against = PAGE.percent(pair.reference)
    return f"{candidate} hides {amount} of its communication than {reference}: {hidden} against {against}"


def _first_upper(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def _undecided(pair: ComparedMetric) -> bool:
    """Whether launches were tested, and the difference may be chance. One pair of launches tests nothing: its sentence
    says so by itself.
    """
    return pair.tested and pair.verdict not in (None, "regression", "improvement", "equivalent")


def _not_judged(pair: ComparedMetric) -> bool:
    """Whether there were launches to test, and none were."""
    return pair.tested and pair.verdict is None


def _p_of(pair: ComparedMetric) -> str:
    p = pair.p if pair.p_corrected is None else pair.p_corrected
    return "" if p is None else f" (p\u00a0=\u00a0{p_value(p, 3)})"


def _job_step(step: ComparedMetric) -> str:
    if step.judgement == "not judged":
        return f"job steps are not compared: {step.judgement_reason}"
    if _not_judged(step):
        return f"job steps are not judged: {step.verdict_reason}"
    if step.verdict == NOT_TESTED:
        return "job step time was not tested"
    if _undecided(step):
        return f"no difference in job step time was shown{_p_of(step)}"
    ratio = step.quotient or 0.0
    if ratio == 1:
        return "job steps take as long"
    if ratio >= 2:
        return f"its job step takes {ratio:.1f} times as long"
    return f"its job step takes {PAGE.percent(abs(ratio - 1))} {'longer' if ratio > 1 else 'shorter'}"


def _basis(comparison: Comparison) -> str:
    """What the verdict rests on."""
    launches = comparison.launches
    if not launches:
        return ""
    sides = ", ".join(f"{PAGE.count(len(launches[side]), 'launch')} of {comparison.label(side)}" for side in SIDES)
    return f"{sides}; intervals at {100 * comparison.interval_level:g} %"


def _card(name: str, pair: ComparedMetric, comparison: Comparison) -> Card:
    unit, found = pair.unit, pair.effect
    word = pair.verdict or str(pair.judgement)
    facts = [(comparison.label(side), PAGE.side(pair, side)) for side in SIDES]
    change = ""
    if pair.bounded and pair.tested:
        facts.append(("note", str(pair.verdict_reason)))
    if not is_comparable(comparison):
        facts.append(("note", pair.verdict_reason or pair.judgement_reason or title(comparison)))
    elif pair.tested:
        change = PAGE.effect(found.value, found.kind)
        facts += [("interval", PAGE.interval(found)), ("margin", _margin(pair, found))]
        if pair.p is not None:
            facts.append(("p", p_value(pair.p, 3) + _corrected(pair)))
        facts.append(("smallest detectable", _detectable(pair, found)))
        if word == "inconclusive" and pair.launches_needed is not None:
            facts.append(("to find what was seen", f"{PAGE.count(pair.launches_needed, 'launch')} per side"))
    else:
        change = "" if pair.difference is None else PAGE.quantity(pair.difference, unit, signed=True)
        if pair.quotient is not None:
            facts.append(("ratio", PAGE.number(pair.quotient, "ratio")))
        if pair.judgement_reason:
            facts.append(("note", pair.judgement_reason))
    middle = "median over launches" if comparison.tested else "median"
    middle = "bounds" if pair.candidate is None and pair.bounded else middle
    role = {"primary": "primary metric", "guard": "safeguard: a better ratio with a slower step is no improvement"}
    return Card(
        name,
        _TITLES.get(name, name),
        ", ".join(filter(None, (role.get(pair.role or "", "secondary" if pair.tested else ""), middle))),
        PAGE.side(pair, "candidate"),
        change,
        _WORDS[word][1] if word in _WORDS else "open",
        (("verdict" if pair.verdict else "direction", signed(word)), *facts),
    )


def _margin(pair: ComparedMetric, found: Effect) -> str:
    return "±" + PAGE.effect(pair.margin, found.kind).lstrip("+")


def _corrected(pair: ComparedMetric) -> str:
    corrected = pair.p_corrected
    return "" if corrected is None or corrected == pair.p else f" ({p_value(corrected, 3)} corrected)"


def _detectable(pair: ComparedMetric, found: Effect) -> str:
    told = pair.detectable
    if told.effect is None:
        return told.reason or PAGE.unknown
    return f"{PAGE.effect(told.effect, found.kind).lstrip('+')} with power {PAGE.percent(told.power, 0)}"
