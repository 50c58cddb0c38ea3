"""What stands at the top of the page: one word, one sentence, and the numbers behind them on cards.

Must not decide anything; the verdict is the comparison's, or there is none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from aorta.analysis.cautions import ONE_RANK, autopsy_title, pace_notes
from aorta.analysis.compare.headline import headline, is_comparable, numbers
from aorta.analysis.compare.run_comparison import not_alike
from aorta.analysis.compare.verdict import NOT_COMPARABLE, NOT_TESTED, SHIFTED
from aorta.analysis.documents import known
from aorta.analysis.documents.comparison import SIDES, ComparedMetric, Comparison, Effect, Summary
from aorta.analysis.documents.dataset import MEANS, DatasetEntry
from aorta.analysis.formatting import PAGE, first_upper, p_value, rough_ms, rough_percent
from aorta.analysis.metrics import RATIO_PARTS, metric_named
from aorta.analysis.report.run_tables import change_of, signed

_LOOKS: Final = {
    "regression": ("bad", "▼"),
    "improvement": ("good", "▲"),
    "equivalent": ("even", "="),
    "inconclusive": ("open", "?"),
    SHIFTED: ("open", "~"),
    NOT_TESTED: ("open", "○"),
    NOT_COMPARABLE: ("open", "?"),
}
"""Tone and sign of each verdict."""
_NO_VERDICT: Final = "Not enough launches for a verdict (1 of 4)"
_CARDS: Final = ("overlap_ratio", "exposed_comm_ms", "job_step_ms")
_TITLES: Final = {
    "overlap_ratio": "Overlap ratio",
    "job_step_ms": "Job step",
    "exposed_comm_ms": "Exposed communication",
}


@dataclass(frozen=True)
class Card:
    """One metric, large: its value, or `before → after`. `lines` stand below; `facts`, label and value, are folded."""

    name: str
    title: str
    role: str
    value: str
    change: str
    tone: str
    lines: tuple[str, ...]
    facts: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class PageVerdict:
    """`tone` is good, bad, even or open; `symbol` says the same without colour."""

    word: str
    tone: str
    symbol: str
    sentence: str
    reason: str
    basis: str
    cards: tuple[Card, ...]
    warnings: tuple[str, ...]


def verdict_of(summary: Summary) -> PageVerdict:
    """Return what the page says first."""
    comparison = known(summary.comparison)
    if comparison is None:
        return _numbers_only(summary.datasets)
    tested = comparison.tested
    found = comparison.verdict
    tone, symbol = _LOOKS[found] if tested else ("open", "")
    word, _, said = headline(comparison).partition(": ")
    word = word if tested or not is_comparable(comparison) else _NO_VERDICT
    stated = numbers(comparison)
    if not comparison.unlike and found != SHIFTED:  # of these the numbers say what the headline would
        stated = first_upper(f"{said} {stated}")
    primary = comparison.deciding
    names = dict.fromkeys((primary, *_CARDS))
    metrics = comparison.metrics
    stuck = [f"{label}: {told}" for label, entry in summary.datasets.items() if (told := autopsy_title(entry))]
    # The sentence says what was not alike already.
    unlike = {
        not_alike(each.key, each.reference, each.candidate)
        for each in comparison.manifest_differences
        if each.key in comparison.unlike
    }
    return PageVerdict(
        word,
        tone,
        symbol,
        stated,
        str(comparison.verdict_reason) if found in ("regression", "improvement") and not comparison.unlike else "",
        _basis(comparison),
        tuple(
            _card(name, metrics[name], comparison)
            for name in names
            if name in metrics and (metrics[name].bounded or not metrics[name].unknown)
        ),
        (*stuck, *(each for each in comparison.warnings if each not in unlike)),
    )


def _numbers_only(entries: Mapping[str, DatasetEntry]) -> PageVerdict:
    """Return the verdict of a report without a comparison: the result of each run."""
    many = len(entries) > 1
    results = {label: result_of(entry) for label, entry in entries.items()}
    stuck = {label: title for label, entry in entries.items() if (title := autopsy_title(entry)) is not None}
    cards = [
        card
        for label, entry in entries.items()
        for name in _CARDS
        if label not in stuck and (card := _median_card(name, label if many else "", entry)) is not None
    ]
    word = "Run summary" if many else next(iter([*stuck.values(), *results.values()]))
    told = [f"{label}: {result}. " for label, result in results.items()] if many else []
    measured = []
    for label, entry in entries.items():
        over = f"{MEANS if entry.few_steps else 'medians'} of {PAGE.steps_used(entry)}"
        if entry.launches:
            over += f" of launch {Path(entry.representative).name}, the nearest to the medians of {entry.launches}"
        measured += [f"{f'{label}: ' if many else ''}{over}, warm-up left out"] if entry.count else []
    said = f"{first_upper('; '.join(measured))}. " if measured else ""
    sentence = f"{''.join(told)}{said}Nothing was compared: name a reference and a candidate for that."
    if stuck and not many:
        sentence = " ".join(
            f"{first_upper(found.summary)}." for entry in entries.values() if (found := known(entry.autopsy))
        )
    notes = [f"{label}: {note}" for label, entry in entries.items() if entry.count for note in pace_notes(entry)]
    notes = [*(f"{label}: {title}" for label, title in stuck.items() if many), *notes]
    tone, symbol = ("bad", "!") if stuck else ("open", "")
    return PageVerdict(word, tone, symbol, sentence, "", "", tuple(cards), tuple(notes))


def result_of(entry: DatasetEntry) -> str:
    """Return the result of a run: `67 % hidden; 23 of 211 ms exposed`."""
    if not entry.count:
        return "Nothing to measure"
    length, hidden, exposed = map(entry.leading, ("job_step_ms", "overlap_ratio", "exposed_comm_ms"))
    steps = "" if length is None else f"steps of {rough_ms(length)}".replace(" ms", "\u00a0ms")
    if not _communicates(entry):
        why = "One rank" if _is_alone(entry) else "No communication"
        return f"{why}: nothing to hide" + (f"; {steps}" if steps else "")
    ratio, parts = entry.described.get("overlap_ratio"), []
    if hidden is not None:
        parts.append(f"{rough_percent(hidden)} hidden")
    elif ratio is not None and ratio.bounds:
        low, high = (PAGE.percent(end, 0) for end in (ratio.bounds.at_least, ratio.bounds.at_most))
        parts.append(f"{low} to {high} hidden")
    if exposed is not None:
        of = "" if length is None else f"{rough_ms(exposed).removesuffix(' ms')} of "
        parts.append(f"{of}{rough_ms(exposed if length is None else length)} exposed")
    return (
        "; ".join(parts).replace(" ms", "\u00a0ms").replace(" %", "\u00a0%")
        or f"Overlap not known{f'; {steps}' if steps else ''}"
    )


def _communicates(entry: DatasetEntry) -> bool:
    """Return whether ranks exchanged anything: not one rank alone, whatever it calls, nor without a collective."""
    comm = entry.described.get("comm_ms")
    return not _is_alone(entry) and not (comm is not None and comm.max == 0)


def _is_alone(entry: DatasetEntry) -> bool:
    ratio = entry.described.get("overlap_ratio")
    return ratio is not None and ratio.reason == ONE_RANK


def _median_card(name: str, label: str, entry: DatasetEntry) -> Card | None:
    """Return the card of what heads a run (`DatasetEntry.leading`); None where there is neither value nor bound."""
    found = entry.described.get(name)
    if found is None or (name != "job_step_ms" and not _communicates(entry)):
        return None
    title, unit = ", ".join(filter(None, (_TITLES[name], label))), metric_named(name).unit
    if found.bounds:
        return Card(name, title, "bounds", PAGE.bounds(found.bounds, unit), "", "open", (found.reason or "",), ())
    if found.median is None:
        return None
    over_all = "mean" if known(found.ratio_of_sums) is None else "ratio of sums"
    of = over_all if entry.few_steps else "median"
    of += " of the steps measured by kernels" if found.source == "kernels" else ""
    spread = f"5th to 95th percentile: {PAGE.number(found.p5, unit)} to {PAGE.quantity(found.p95, unit)}"
    return Card(name, title, of, PAGE.quantity(entry.leading(name), unit), "", "open", (spread,), ())


def _basis(comparison: Comparison) -> str:
    """Return what the verdict rests on."""
    launches, found = comparison.launches, known(comparison.losses)
    losses = "" if found is None or comparison.unlike else f"losses {found.sentence}"
    if not launches:
        return losses
    sides = ", ".join(f"{PAGE.count(len(launches[side]), 'launch')} of {comparison.label(side)}" for side in SIDES)
    return "; ".join(filter(None, (f"{sides}; intervals at {100 * comparison.interval_level:g} %", losses)))


def _card(name: str, pair: ComparedMetric, comparison: Comparison) -> Card:
    """Return both sides, large; the change and its verdict below; statistics folded."""
    found = change_of(pair) if is_comparable(comparison) else None
    word = (pair.verdict or str(pair.judgement)) if found is not None or not pair.tested else ""
    word = word if is_comparable(comparison) else ""
    before, after = (PAGE.side(pair, side) for side in SIDES)
    change = "" if found is None or found.value is None else PAGE.effect(found.value, found.kind)
    facts = _statistics(pair, found) if pair.tested and found is not None else []
    facts += (
        [("note", pair.judgement_reason)] if pair.judgement_reason and not pair.tested and found is not None else []
    )
    over_all = "ratio of sums" if name in RATIO_PARTS else "mean"
    middle = over_all if comparison.statistic == MEANS else "median over launches" if comparison.tested else "median"
    role = {"primary": "primary", "guard": "safeguard"}.get(pair.role or "", "secondary") if pair.tested else middle
    facts += [("of", "bounds" if pair.candidate is None and pair.bounded else middle)] if pair.tested else []
    tone = _LOOKS[word][0] if word in _LOOKS else "open"
    lines = (signed(word),) if word else ()
    return Card(name, _TITLES.get(name, name), role, f"{before} \u2192 {after}", change, tone, lines, tuple(facts))


def _statistics(pair: ComparedMetric, effect: Effect) -> list[tuple[str, str]]:
    """Return interval, margin, p and what could have been found."""
    told = pair.detectable
    detectable = told.reason or PAGE.unknown
    if told.effect is not None:
        size = PAGE.effect(told.effect, effect.kind).lstrip("+")
        detectable = f"{size} with power {PAGE.percent(told.power, 0)}"
    facts = [
        ("interval", PAGE.interval(effect)),
        ("margin", "±" + PAGE.effect(pair.margin, effect.kind).lstrip("+")),
        ("smallest detectable", detectable),
    ]
    if pair.p is not None:
        corrected = "" if pair.p_corrected in (None, pair.p) else f" ({p_value(pair.p_corrected, 3)} corrected)"
        facts.append(("p", p_value(pair.p, 3) + corrected))
    if pair.verdict == "inconclusive" and pair.launches_needed is not None:
        facts.append(("to find what was seen", f"{PAGE.count(pair.launches_needed, 'launch')} per side"))
    if pair.bounded:
        facts.append(("note", str(pair.verdict_reason)))
    if pair.role == "guard":
        facts.append(("safeguard", "a better ratio with a slower step is no improvement"))
    return facts
