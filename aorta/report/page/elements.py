"""What the page shows as elements and no canvas, so that its numbers are text: the verdict with its cards, where the
mean step goes, and what made it longer or shorter.

    verdict_of(summary)             # a word, a sentence, and the numbers behind them on cards
    step_bars({"base": entry})      # a bar of parts for each run, the longest step as wide as the page
    waterfall(comparison.account)   # from the reference's step to the candidate's, part by part

Places and widths are per cent of the chart. Must not decide anything, or compute a part or an interval: the verdict is
the comparison's, or there is none; `account` and `causes` have the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from aorta.analysis.account import COMPUTATION, EXPOSED, HIDES, IDLE, OUTSIDE
from aorta.analysis.cautions import autopsy_title, sampling_line
from aorta.analysis.compare.verdict import DECIDED, SHIFTED, is_comparable
from aorta.analysis.headline import evidence, headline, numbers
from aorta.analysis.pace import ONE_RANK
from aorta.documents import known
from aorta.documents.comparison import SIDES, AccountChange, AccountComparison, Summary
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
    cards: list[Card]
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
    if verdict in DECIDED and not comparison.unlike:
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
        heading = first_upper(metric_named(name).title) or name
        cards.append(Card(name, heading, role, value, change, card_tone, line))
    return PageVerdict(word, tone, symbol, sentence, cards, "; ".join(reasons), evidence(comparison))


def _numbers_only(entries: Mapping[str, DatasetEntry]) -> PageVerdict:
    many = len(entries) > 1
    stuck = {label: title for label, entry in entries.items() if (title := autopsy_title(entry)) is not None}
    sentences, measured, cards = list[str](), list[str](), list[Card]()
    word = "Run summary"
    for label, entry in entries.items():
        prefix = f"{label}: " if many else ""
        if many:
            sentences.append(f"{label}: {result_of(entry)}.")
        elif label in stuck:
            sentences.append(f"{first_upper(entry.autopsy.summary)}.")
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
    return PageVerdict(word, tone, symbol, " ".join(sentences), cards)


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
        ends = [*dict.fromkeys(form.percent(end, 0) for end in (ratio.bounds.at_least, ratio.bounds.at_most))]
        if ends != [form.percent(end, 0) for end in (0.0, 1.0)]:  # which says nothing
            parts.append(f"{' to '.join(ends)} of communication hidden")
    if exposed is not None:
        step = "" if length is None else f" in a step of {form.quantity(length, 'ms')}"
        parts.append(f"{form.quantity(exposed, 'ms')} exposed{step}")
    return "; ".join(parts or ["Overlap not known", *steps])


def measured_over(entry: DatasetEntry, form: NumberFormat = PAGE) -> str:
    """Return what the numbers of a run rest on: `medians of 7 steps on 2 ranks`; of a set, also which launch it is."""
    of = f"{MEANS if entry.shows_means else 'medians'} of {form.steps_used(entry)}"
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


def _median_card(name: str, label: str, entry: DatasetEntry) -> Card | None:
    """Return the card of what heads a run (its `value`); None where there is neither value nor bound."""
    statistics = entry.described.get(name)
    if statistics is None or (name != JOB_STEP and _nothing_to_hide(entry)):
        return None
    title, unit = first_upper(metric_named(name).title) or name, metric_named(name).unit
    heading = ", ".join(filter(None, (title, label)))
    if statistics.bounds:
        return Card(name, heading, "bounds", PAGE.bounds(statistics.bounds, unit), "", "open", statistics.reason or "")
    if statistics.median is None:
        return None
    over_all = "mean" if known(statistics.ratio_of_sums) is None else "ratio of sums"
    of = over_all if entry.few_steps else "median"
    of += " of the steps measured by kernels" if statistics.source == "kernels" else ""
    spread = f"5th to 95th percentile: {PAGE.number(statistics.p5, unit)} to {PAGE.quantity(statistics.p95, unit)}"
    return Card(name, heading, of, PAGE.quantity(statistics.value, unit), "", "open", spread)


PARTS: Final = {
    "hidden": "communication hidden in computation",
    "compute": "computation alone",
    "exposed": "exposed communication",
    "other-work": "data, optimizer, copies",
    "idle": "idle",
}
"""Colour -> part of the step."""
_COLORS: Final = {COMPUTATION: "compute", EXPOSED: "exposed", OUTSIDE: "other-work", IDLE: "idle"}
_MARGIN: Final = 0.06
"""Of the range of a chart that does not begin at 0: room on either side."""


def parts(entry: DatasetEntry) -> list[float]:
    """Return the mean ms per step of each of `PARTS`, over all launches; empty where there is no account."""
    account = known(entry.account)
    if account is None or account.reason is not None:
        return []
    ms = {part.name: part.ms for part in account.parts}
    computation = next((part for part in account.parts if part.name == COMPUTATION), None)
    passes = computation.parts if computation else []
    hidden = sum(below.ms for of_pass in passes for below in of_pass.parts if below.name == HIDES)
    alone = ms.get(COMPUTATION, 0.0) - hidden
    return [hidden, alone, ms.get(EXPOSED, 0.0), ms.get(OUTSIDE, 0.0), ms.get(IDLE, 0.0)]


def step_bars(entries: Mapping[str, DatasetEntry]) -> list[dict[str, Any]]:
    """Return the mean step of each run whose account is known, with a segment for each part."""
    parts_of = {label: of_entry for label, entry in entries.items() if (of_entry := parts(entry))}
    longest = max(map(sum, parts_of.values()), default=0.0)
    bars = []
    for label, of_run in parts_of.items():
        segments = [
            {
                "color": color,
                "width": 100 * ms / longest,
                "ms": PAGE.quantity(ms, "ms"),
                "share": PAGE.percent(ms / sum(of_run), 0),
                "tip": f"{label}: {title}, mean {PAGE.quantity(ms, 'ms')} a step",
            }
            for (color, title), ms in zip(PARTS.items(), of_run, strict=True)
            if ms > 0
        ]
        bars.append({"label": label, "total": PAGE.quantity(sum(of_run), "ms"), "segments": segments})
    return bars


class Row(NamedTuple):
    """A row of a chart of intervals: a box from `left`, `width` wide, and the interval's ends; what is beside it."""

    name: str
    color: str
    left: float
    width: float
    interval: tuple[float, float] | None
    values: str
    change: str
    note: str
    tone: str = ""


def waterfall(account: AccountComparison | None) -> list[Row]:
    """Return the step of the reference, what each part adds to it or takes from it, and the step of the candidate;
    empty where that is not known. Steps begin at the left edge, which is not 0.
    """
    if account is None or account.reason is not None:
        return []
    steps = account.step.reference_ms, account.step.candidate_ms
    level_ms, shown_ms, placed = steps[0], [*steps], []
    for part in account.parts:
        ends = level_ms, level_ms + part.change_ms
        interval = None
        if part.low_ms is not None and part.high_ms is not None:
            interval = level_ms + part.low_ms, level_ms + part.high_ms
        placed.append((part, *ends, interval))
        shown_ms += [*ends, *(interval or ())]
        level_ms = ends[1]
    scale = scale_of(shown_ms)
    rows = [Row("reference", "reference", 0.0, scale(steps[0]), None, PAGE.quantity(steps[0], "ms"), "", "mean step")]
    for part, begin, end, interval in placed:
        caused = [below for below in part.parts if below.cause]
        note = "; ".join(f"{below.name} {_change(below)}" for below in caused if below.change_ms != part.change_ms)
        rows.append(
            Row(
                part.name,
                _COLORS[part.name],
                scale(min(begin, end)),
                scale(max(begin, end)) - scale(min(begin, end)),
                interval and (scale(interval[0]), scale(interval[1])),
                f"{PAGE.number(part.reference_ms, 'ms')} \u2192 {PAGE.quantity(part.candidate_ms, 'ms')}",
                _change(part),
                ("cause" if part.cause else "") + (f": {note}" if part.cause and note else ""),
                ("bad" if part.change_ms > 0 else "good") if part.cause else "",
            )
        )
    step_ms = PAGE.quantity(steps[1], "ms")
    rows.append(Row("candidate", "candidate", 0.0, scale(steps[1]), None, step_ms, _change(account.step), "mean step"))
    return rows


def _change(part: AccountChange) -> str:
    text = PAGE.quantity(part.change_ms, "ms", signed=True)
    if part.low_ms is None or part.high_ms is None:
        return text
    low, high = (PAGE.number(end, "ms", signed=True) for end in (part.low_ms, part.high_ms))
    return f"{text} ({low} to {high})"


def scale_of(values: Sequence[float]) -> Callable[[float], float]:
    """Return what places a value on a chart of these, in per cent of its width."""
    low, high = min(values), max(values)
    room = _MARGIN * (high - low) or 1.0
    return lambda value: 100 * (value - (low - room)) / (high - low + 2 * room)
