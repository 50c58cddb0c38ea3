"""The metrics of a comparison as one aligned table: reference and candidate with intervals, delta, p, verdict.

    metric           reference      candidate      delta                    p      verdict
    overlap_ratio    0.815 ± 0.010  0.615 ± 0.010  -0.200 [-0.213, -0.187]  0.029  x regression

At most as many columns as the style has; every change stands beside its own verdict. Must not compute a number but the
larger distance from a value to an end of its interval, or show a ratio whose denominator `denominators` does not name.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import Final

from msgspec.structs import replace

from aorta.analysis.compare.run_comparison import NOT_USED
from aorta.analysis.compare.verdict import is_comparable, verdict_words
from aorta.analysis.documents import ABSENT, known
from aorta.analysis.documents.comparison import SIDES, ComparedMetric, Comparison, Effect, Quotient, Side
from aorta.analysis.formatting import TEXT, is_zero, p_value
from aorta.analysis.metrics import JOB_STEP
from aorta.terminal_style import PLAIN, WIDTH, Style, mark_of, table

DENOMINATOR: Final = {
    "overlap_ratio": "hidden/comm",
    "overlap_over_compute": "hidden/compute",
    "exposed_share": "exposed/step",
    "overlap_efficiency": "saved/min(Tc,Tm)",
    "compute_slowdown": "added/isolated",
}
_HEAD: Final = ("metric", "reference", "candidate", "delta", "p", "verdict")
_HEAD_OF_RUNS: Final = ("metric", "reference", "candidate", "delta", "ratio", "direction")
_GAP: Final = 2
_POOLED: Final = "  as ratio of sums"
_LEAST_NAME: Final = 13
_UNKNOWN: Final = "-"
_NONE: Final = "none"


def metric_table(comparison: Comparison, names: Sequence[str], style: Style = PLAIN) -> list[str]:
    """A head, and a row for each of these metrics."""
    judged = comparison.tested
    rows, gap = _rows(comparison, names, judged=judged, around=True), _GAP
    if _least_width(rows, gap) > style.width:  # intervals of the sides go: that of the delta is the one that decides
        rows, gap = _rows(comparison, names, judged=judged, around=False), 1
    if _least_width(rows, gap) > style.width:  # then the launches that a metric needs
        rows = [((*cells[:-1], cells[-1].partition(" (")[0]), verdict) for cells, verdict in rows]
    shown = [
        (*cells[:-1], cells[-1] if verdict is None else style.verdict(verdict, cells[-1])) for cells, verdict in rows
    ]
    head, *lines = table(shown, gap=gap, width=max(style.width, _least_width(rows, gap)))
    return [style.bold(head), *lines]


def _rows(
    comparison: Comparison, names: Sequence[str], *, judged: bool, around: bool
) -> list[tuple[tuple[str, ...], str | None]]:
    """The cells of each line, the head first, and its verdict."""
    rows: list[tuple[tuple[str, ...], str | None]] = [(_HEAD if judged else _HEAD_OF_RUNS, None)]
    for name in names:
        pair = comparison.metrics[name]
        if not is_comparable(comparison):
            pair = _without_deltas(pair)
        if judged:
            rows.append((_judged(name, pair, around=around), pair.verdict))
            continue
        rows.append((_of_runs(name, pair), None))
        if pair.ratio_of_sums:
            rows.append(((_POOLED, *_change("ratio", pair.ratio_of_sums), ""), None))
    return rows


def _without_deltas(pair: ComparedMetric) -> ComparedMetric:
    """The sides of a metric whose difference would be one of other work, or of a drift."""
    nothing = Effect("difference", None, None, None)
    return replace(pair, difference=None, quotient=None, effect=nothing, ratio_of_sums=ABSENT)


def _least_width(rows: Sequence[tuple[tuple[str, ...], str | None]], gap: int) -> int:
    """Columns of a table whose longer names stand on lines of their own."""
    others = sum(max(len(cells[place]) for cells, _ in rows) for place in range(1, len(_HEAD)))
    return _LEAST_NAME + others + gap * (len(_HEAD) - 1)


def shown_first(comparison: Comparison) -> list[str]:
    """Names of the metrics, but those without a value on both sides and those of 0 on both: the primary
    and the job step first, then what has a verdict, then the rest.
    """
    metrics = comparison.metrics
    names = [name for name, pair in metrics.items() if pair.bounded or not (pair.unknown or is_zero(pair))]
    primary = comparison.deciding
    return sorted(names, key=lambda name: (name != primary, name != JOB_STEP, known(metrics[name].verdict) is None))


def denominators(names: Iterable[str]) -> str:
    """What each ratio among the metrics is a share of; empty without one."""
    return "; ".join(f"{name} = {DENOMINATOR[name]}" for name in names if name in DENOMINATOR)


def wrapped(lines: Iterable[str], width: int = WIDTH, indent: str = "    ") -> str:
    """Each line in at most `width` columns, continued with an indent."""
    return "\n".join(
        textwrap.fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        for line in lines
    )


def _judged(name: str, pair: ComparedMetric, *, around: bool) -> tuple[str, ...]:
    verdict = pair.verdict
    sides = [_side(pair, side, _UNKNOWN, fewer=1) + (_around(pair, side) if around else "") for side in SIDES]
    effect = pair.effect
    delta = _UNKNOWN if effect.value is None else TEXT.effect(effect.value, effect.kind)
    if effect.low is not None:
        low, high = (TEXT.effect(end, effect.kind).removesuffix(" %") for end in (effect.low, effect.high))
        delta += f" [{low}, {high}]"
    if verdict is None:
        return name, *sides, delta, _UNKNOWN, "not judged"
    return name, *sides, delta, p_value(pair.p, unknown=_UNKNOWN), f"{mark_of(verdict)} {verdict_words(pair)}"


def _around(pair: ComparedMetric, side: Side) -> str:
    """How far the farther end of the interval of a side's value is; empty without one."""
    value, interval = pair.value(side), pair.interval(side)
    if value is None or interval is None or interval.low is None or interval.high is None:
        return ""
    return f" ± {TEXT.number(max(interval.high - value, value - interval.low), pair.unit, fewer=1)}"


def _of_runs(name: str, pair: ComparedMetric) -> tuple[str, ...]:
    _, _, *change = _change(pair.unit, pair)
    return name, *(_side(pair, side) for side in SIDES), *change, str(pair.judgement)


def _change(unit: str, pair: ComparedMetric | Quotient) -> tuple[str, str, str, str]:
    """Both values, their difference and their quotient."""
    difference = _UNKNOWN if pair.difference is None else TEXT.number(pair.difference, unit, signed=True)
    ratio = _UNKNOWN if pair.quotient is None else TEXT.number(pair.quotient, "ratio", fewer=1)
    return TEXT.number(pair.reference, unit), TEXT.number(pair.candidate, unit), difference, ratio


def _side(pair: ComparedMetric, side: Side, unknown: str = TEXT.unknown, *, fewer: int = 0) -> str:
    """The value of one side, its bounds, or what stands for a value: `none` where this kind was not used."""
    ends, value = pair.ends(side), pair.value(side)
    if ends is not None:
        return TEXT.bounds(ends, pair.unit, fewer=fewer, named=False)
    if value is None:
        return _NONE if f"{side}: {NOT_USED}" in (pair.judgement_reason or "") else unknown
    return TEXT.number(value, pair.unit, fewer=fewer)
