"""The bars of the page that are elements and no canvas, so that their numbers are text: where the mean step goes, what
made it longer or shorter, and the candidates of a plan beside their reference.

    step_bars({"base": entry})      # a bar of parts for each run, the longest step as wide as the page
    waterfall(comparison.account)   # from the reference's step to the candidate's, part by part

Places and widths are per cent of the chart. Must not compute a part or an interval: `account`, `causes` and the
verdicts do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from aorta.analysis.account import COMPUTATION, EXPOSED, HIDES, IDLE, OUTSIDE
from aorta.documents import known
from aorta.documents.comparison import AccountChange, AccountComparison, Effect
from aorta.documents.dataset import DatasetEntry
from aorta.documents.formatting import PAGE

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


class BarSegment(NamedTuple):
    """A part of a bar."""

    color: str
    width: float
    ms: str
    share: str
    tip: str


class Bar(NamedTuple):
    """The mean step of a run."""

    label: str
    total: str
    segments: list[BarSegment]


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


def step_bars(entries: Mapping[str, DatasetEntry]) -> list[Bar]:
    """Return the mean step of each run whose account is known."""
    parts_of = {label: of_entry for label, entry in entries.items() if (of_entry := parts(entry))}
    longest = max(map(sum, parts_of.values()), default=0.0)
    bars = []
    for label, of_run in parts_of.items():
        segments = [
            BarSegment(
                color,
                100 * ms / longest,
                PAGE.quantity(ms, "ms"),
                PAGE.percent(ms / sum(of_run), 0),
                f"{label}: {title}, mean {PAGE.quantity(ms, 'ms')} a step",
            )
            for (color, title), ms in zip(PARTS.items(), of_run, strict=True)
            if ms > 0
        ]
        bars.append(Bar(label, PAGE.quantity(sum(of_run), "ms"), segments))
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
    level_ms, begins = account.step.reference_ms, []
    for part in account.parts:
        begins.append(level_ms)
        level_ms += part.change_ms
    ends = [begin + part.change_ms for begin, part in zip(begins, account.parts, strict=True)]
    whiskers = [
        None if part.low_ms is None or part.high_ms is None else (begin + part.low_ms, begin + part.high_ms)
        for part, begin in zip(account.parts, begins, strict=True)
    ]
    scale = _Scale([*begins, *ends, account.step.candidate_ms, *(end for pair in whiskers if pair for end in pair)])
    steps = account.step.reference_ms, account.step.candidate_ms
    rows = [Row("reference", "reference", 0.0, scale(steps[0]), None, PAGE.quantity(steps[0], "ms"), "", "mean step")]
    for part, begin, end, interval in zip(account.parts, begins, ends, whiskers, strict=True):
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


class Candidate(NamedTuple):
    """What is drawn of a candidate: the change of its step, and what is beside it."""

    name: str
    effect: Effect | None
    values: str
    note: str
    tone: str


def effect_rows(
    reference: Candidate, candidates: Sequence[Candidate], margin: float
) -> tuple[list[Row], tuple[float, float]]:
    """Return the reference at 0 and a dot with its interval for the change of each candidate; and the band of changes
    up to `margin`: where it begins, and how wide it is.
    """
    effects = [side.effect for side in candidates if side.effect is not None]
    ends = [end for side in effects for end in (side.value, side.low, side.high) if end is not None]
    scale = _Scale([-margin, margin, *ends])
    rows = [Row(reference.name, "reference", scale(0.0), 0.0, None, reference.values, "", reference.note)]
    for side in candidates:
        effect, interval = side.effect, None
        if effect is None or effect.value is None:
            rows.append(Row(side.name, "", 0.0, 0.0, None, side.values, "", side.note, side.tone))
            continue
        change = PAGE.effect(effect.value, effect.kind)
        if effect.low is not None and effect.high is not None:
            interval, change = (scale(effect.low), scale(effect.high)), f"{change} ({PAGE.interval(effect)})"
        left = scale(effect.value)
        rows.append(Row(side.name, "candidate", left, 0.0, interval, side.values, change, side.note, side.tone))
    return rows, (scale(-margin), scale(margin) - scale(-margin))


class _Scale:
    """Values -> per cent of the chart's width."""

    def __init__(self, values: Sequence[float]) -> None:
        self._low, high = min(values), max(values)
        room = _MARGIN * (high - self._low) or 1.0
        self._low, self._range = self._low - room, high - self._low + 2 * room

    def __call__(self, value: float) -> float:
        return 100 * (value - self._low) / self._range
