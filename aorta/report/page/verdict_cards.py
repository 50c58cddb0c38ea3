"""What stands at the top of the page: a word, a sentence, and the numbers behind them on cards.

Must not decide anything; the verdict is the comparison's, or there is none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from aorta.analysis.cautions import autopsy_title, sampling_line
from aorta.analysis.compare.headline import evidence, headline, is_comparable, numbers
from aorta.analysis.compare.verdict import DECIDED, SHIFTED
from aorta.analysis.pace import ONE_RANK
from aorta.documents import known
from aorta.documents.comparison import SIDES, Summary
from aorta.documents.dataset import MEANS, DatasetEntry
from aorta.documents.formatting import PAGE, NumberFormat, first_upper, rough_percent
from aorta.documents.metrics import JOB_STEP, RATIO_PARTS, SHOWN_FIRST, metric_named
from aorta.report.run_tables import LOOKS, change_of, signed


@dataclass(frozen=True)
class Card:
    """One metric, large: its value, or `before → after`. `line` stands below."""

    name: str
    title: str
    role: str
    value: str
    change: str
    tone: str
    line: str


@dataclass(frozen=True)
class PageVerdict:
    """`tone` is good, bad, even or open; `symbol` says the same without colour. `test`: the statistics behind it."""

    word: str
    tone: str
    symbol: str
    sentence: str
    cards: tuple[Card, ...]
    reason: str = ""
    test: str = ""


def verdict_of(summary: Summary) -> PageVerdict:
    """Return what the page says first."""
    comparison = known(summary.comparison)
    if comparison is None:
        return _numbers_only(summary.datasets)
    tested, comparable, verdict = comparison.tested, is_comparable(comparison), comparison.verdict
    tone, symbol = LOOKS[verdict] if tested else ("open", "")
    word, _, rest = headline(comparison).partition(": ")
    sentence = numbers(comparison)
    if comparable and verdict != SHIFTED:  # of these the numbers say what the headline would
        sentence = first_upper(f"{rest} {sentence}")
    reasons = []
    decided = verdict in DECIDED and not comparison.unlike
    if decided:
        reasons.append(str(comparison.verdict_reason))  # with the number of launches
    elif launches := comparison.launches:
        sides = (f"{PAGE.count(len(launches[side]), 'launch')} of {comparison.label(side)}" for side in SIDES)
        reasons.append(", ".join(sides))
    if comparison.launches:
        reasons.append(f"intervals at {100 * comparison.interval_level:g} %")
    if (losses := known(comparison.losses)) is not None and not comparison.unlike:
        reasons.append(f"losses {losses.sentence}")

    over_all = comparison.statistic == MEANS
    cards = []
    for name in dict.fromkeys((*SHOWN_FIRST, comparison.deciding)):
        pair = comparison.metrics.get(name)
        if pair is None or (pair.unknown and not pair.bounded):
            continue
        effect = change_of(pair) if comparable else None
        judged = (pair.verdict or str(pair.judgement)) if comparable and (effect or not pair.tested) else ""
        before, after = (PAGE.known(pair.side(side), pair.unit) for side in SIDES)
        change = ""
        if effect is not None and effect.value is not None:
            arrow = "" if not effect.value else "\u25b2 " if effect.value > 0 else "\u25bc "
            change = f"{arrow}{PAGE.effect(effect.value, effect.kind)}"
        if pair.tested:
            role = {"primary": "primary", "guard": "safeguard"}.get(pair.test.role, "secondary")
        else:
            role = ("ratio of sums" if name in RATIO_PARTS else "mean") if over_all else "median"
        card_tone = LOOKS[judged][0] if pair.tested and judged in LOOKS else "open"
        value = f"{before} \u2192 {after}"
        line = signed(judged) if pair.tested or not judged else "not tested"
        cards.append(Card(name, _title(name), role, value, change, card_tone, line))
    return PageVerdict(
        word,
        tone,
        symbol,
        sentence,
        tuple(cards),
        "; ".join(reasons),
        evidence(comparison),
    )


def _numbers_only(entries: Mapping[str, DatasetEntry]) -> PageVerdict:
    many = len(entries) > 1
    stuck = {
        label: stuck_title for label, entry in entries.items() if (stuck_title := autopsy_title(entry)) is not None
    }
    sentences, measured, cards = list[str](), list[str](), list[Card]()
    word = "Run summary"
    for label, entry in entries.items():
        prefix = f"{label}: " if many else ""
        if many:
            sentences.append(f"{label}: {result_of(entry)}.")
        elif label in stuck:
            sentences += [f"{first_upper(autopsy.summary)}." for autopsy in [known(entry.autopsy)] if autopsy]
        if not many:
            word = stuck.get(label) or result_of(entry)
        if entry.count:
            measured.append(f"{prefix}{measured_over(entry)}, warm-up left out")
        if label not in stuck:
            cards += [card for name in SHOWN_FIRST if (card := _median_card(name, label if many else "", entry))]
    if many or not stuck:
        sentences += [f"{first_upper('; '.join(measured))}."] if measured else []
        sentences.append("Nothing was compared: name a reference and a candidate for that.")
    tone, symbol = ("bad", "!") if stuck else ("open", "")
    return PageVerdict(word, tone, symbol, " ".join(sentences), tuple(cards))


def result_of(entry: DatasetEntry, form: NumberFormat = PAGE) -> str:
    """Return a run in a line: `67 % of communication hidden; 23 ms exposed in a step of 211 ms`."""
    if not entry.count:
        return "Nothing to measure"
    length, hidden, exposed = map(entry.value, ("job_step_ms", "overlap_ratio", "exposed_comm_ms"))
    steps = [] if length is None else [f"steps of {form.quantity(length, 'ms')}"]
    ratio, parts = entry.described.get("overlap_ratio"), []
    if why := _nothing_to_hide(entry):
        return "; ".join([f"{why}: nothing to hide", *steps])
    if hidden is not None:
        parts.append(f"{rough_percent(hidden).replace(' %', f'{form.space}%')} of communication hidden")
    elif ratio is not None and ratio.bounds:
        ends = dict.fromkeys(form.percent(end, 0) for end in (ratio.bounds.at_least, ratio.bounds.at_most))
        parts.append(f"{' to '.join(ends)} of communication hidden")
    if exposed is not None:
        step = "" if length is None else f" in a step of {form.quantity(length, 'ms')}"
        parts.append(f"{form.quantity(exposed, 'ms')} exposed{step}")
    return "; ".join(parts or ["Overlap not known", *steps])


def measured_over(entry: DatasetEntry, form: NumberFormat = PAGE) -> str:
    """Return what the numbers of a run rest on: `medians of 7 steps on 2 ranks`; of a set, also which launch it is."""
    of = f"{MEANS if entry.few_steps else 'medians'} of {form.steps_used(entry)}"
    if (line := sampling_line(entry)) is not None:
        of += f" ({line})"
    if entry.shown_launch is None:
        return of
    return f"{of} of launch {entry.shown_launch}, the nearest to the medians of {form.count(entry.launches, 'launch')}"


def _nothing_to_hide(entry: DatasetEntry) -> str:
    """Return why ranks exchanged nothing: one rank alone, whatever it calls, or no collective; empty where they did."""
    ratio, comm = entry.described.get("overlap_ratio"), entry.described.get("comm_ms")
    if ratio is not None and ratio.reason == ONE_RANK:
        return "One rank"
    return "No communication" if comm is not None and comm.max == 0 else ""


def _title(name: str) -> str:
    return first_upper(metric_named(name).title) or name


def _median_card(name: str, label: str, entry: DatasetEntry) -> Card | None:
    """Return the card of what heads a run (its `value`); None where there is neither value nor bound."""
    statistics = entry.described.get(name)
    if statistics is None or (name != JOB_STEP and _nothing_to_hide(entry)):
        return None
    heading, unit = ", ".join(filter(None, (_title(name), label))), metric_named(name).unit
    if statistics.bounds:
        return Card(name, heading, "bounds", PAGE.bounds(statistics.bounds, unit), "", "open", statistics.reason or "")
    if statistics.median is None:
        return None
    over_all = "mean" if known(statistics.ratio_of_sums) is None else "ratio of sums"
    of = over_all if entry.few_steps else "median"
    of += " of the steps measured by kernels" if statistics.source == "kernels" else ""
    spread = f"5th to 95th percentile: {PAGE.number(statistics.p5, unit)} to {PAGE.quantity(statistics.p95, unit)}"
    return Card(name, heading, of, PAGE.quantity(statistics.value, unit), "", "open", spread)
