"""A summary as a person reads it in a terminal: the verdict, the table of metrics, then details.

    metric           reference      candidate      delta                    p      verdict
    overlap_ratio    0.815 ± 0.010  0.615 ± 0.010  -0.200 [-0.213, -0.187]  0.029  x regression

Lines have at most as many columns as the style has, paths aside; every change stands beside its own verdict. Must not
compute a number but the larger distance from a value to an end of its interval, or show a ratio without its
denominator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from aorta.analysis.aggregate import NO_PIPELINE, LabelledRun
from aorta.analysis.cautions import autopsy_notes, cautions, cutoff_line
from aorta.analysis.compare.headline import UNLIKE, evidence, headline, is_comparable, numbers, verdict_label
from aorta.analysis.compare.run_comparison import NOT_USED
from aorta.analysis.devices import device_line, device_notes
from aorta.analysis.documents import ABSENT, known
from aorta.analysis.documents.comparison import (
    SIDES,
    ComparedCollective,
    ComparedMetric,
    Comparison,
    Effect,
    Quotient,
    Side,
)
from aorta.analysis.documents.dataset import MEANS, CollectiveEntry, DatasetEntry
from aorta.analysis.formatting import TEXT, is_zero, json_text, p_value
from aorta.analysis.metrics import JOB_STEP, metric_named
from aorta.analysis.straggler import sentences
from aorta.terminal_style import PLAIN, WIDTH, Style, mark_of, table, wrapped

_SHOWN_COLLECTIVES: Final = 10
_SHOWN_DIFFERENCES: Final = 12
_SHOWN_LEFT_OUT: Final = 6
_PAIR_HEAD: Final = ("reference", "candidate", "difference", "ratio", "direction")
_JUDGED: Final = (
    "Medians over launches, ±: 95 % interval; [low, high]: what the test does not reject ({level}, more where several "
    "metrics were tested together); p: exact Mann-Whitney test over launches, of the metric alone."
)
_NOT_JUDGED: Final = (
    "{statistic} over steps of one launch per side. Better and worse name the direction of a difference, not tested "
    "for significance."
)
_POOLED: Final = "  as ratio of sums over steps"
_DENOMINATOR: Final = {
    "overlap_ratio": "hidden/comm",
    "exposed_share": "exposed/step",
    "overlap_efficiency": "saved/min(Tc,Tm)",
    "compute_slowdown": "added/isolated",
}
_HEAD: Final = ("metric", "reference", "candidate", "delta", "p", "verdict")
_HEAD_OF_RUNS: Final = ("metric", "reference", "candidate", "delta", "ratio", "direction")
_GAP: Final = 2
_POOLED_OF_RUNS: Final = "  as ratio of sums"
_LEAST_NAME: Final = 13
_UNKNOWN: Final = "-"
_NONE: Final = "none"


def verdict_block(comparison: Comparison, style: Style = PLAIN) -> str:
    """Return what a reader sees first: the verdict in a sentence, its cause, and what both have to be read with."""
    tested = evidence(comparison)
    lines = [verdict_lines(comparison, style), *([led("Test:", tested, style)] if tested else [])]
    cause = comparison.sentence
    lines += [led("Cause:", cause, style)] if cause else []
    lines += [led("Note:", warning, style, style.warning) for warning in notes_of(comparison)]
    return "\n".join(lines)


def notes_of(comparison: Comparison) -> list[str]:
    """Return the warnings of a comparison, but for what its headline says already."""
    said = [] if is_comparable(comparison) else [f"{UNLIKE.upper()}: {key} " for key in comparison.unlike]
    return [warning for warning in comparison.warnings if not warning.startswith(tuple(said))]


def verdict_lines(comparison: Comparison, style: Style = PLAIN) -> str:
    """Return the headline behind its mark, its first words in the colour of the verdict, and its line of numbers."""
    word, _, rest = f"[{mark_of(comparison.verdict)}] {headline(comparison)}".partition(":")
    first = led(word, f":{rest}", style, lambda text: style.verdict(comparison.verdict, text, bold=True))
    return f"{first}\n{wrapped([f'    {numbers(comparison)}'], style.width)}"


def led(first: str, sentence: str, style: Style, paint: Callable[[str], str] | None = None) -> str:
    """Return a sentence behind words that stand out, in bold unless `paint` shows them otherwise."""
    space = "" if sentence.startswith(":") else " "
    return (paint or style.bold)(first) + wrapped([f"{first}{space}{sentence}"], style.width).removeprefix(first)


def health_block(dataset: LabelledRun, entry: DatasetEntry) -> str:
    """Return where a dataset came from, what it rests on, and everything wrong with it."""
    source, steps, health = entry.source, entry.steps, dataset.run.health
    named = {"run": source.run_id, "platform": source.platform, "parallel": source.parallel}
    stated = ", ".join(f"{what} {value or 'unknown'}" for what, value in named.items())
    calibrated = steps.rank_steps_left_out_as_calibration
    lines = [
        f"{dataset.label}: {source.path}",
        f"  {stated}, instrument {'/'.join(health.instrument_modes)}, {health.ranks}",
        f"  {TEXT.steps_used(entry)} used, {TEXT.count(steps.rank_steps_left_out_as_warmup, 'record')} left out as "
        "warm-up" + (f", {TEXT.count(calibrated, 'record')} measured by kernels" if calibrated else ""),
    ]
    lines += _set_lines(entry) if entry.launches else []
    if steps.isolated_rank_steps:
        counts = ", ".join(f"{count} {phase}" for phase, count in steps.isolated_rank_steps.items())
        lines.append(f"  isolated baselines: {counts} steps, in no metric but the two that rest on them")
    lines += [f"  {fact}" for fact in (device_line(entry.devices), cutoff_line(entry)) if fact is not None]
    if entry.reason:
        lines.append(f"  ! nothing to measure: {entry.reason}")
    lines += [f"  ! {note}" for note in dataset_notes(dataset, entry)]
    return wrapped(lines)


def dataset_notes(dataset: LabelledRun, entry: DatasetEntry) -> list[str]:
    """Return what a reader of a dataset's numbers has to know: that it hung, and a slow rank, first."""
    return [
        *autopsy_notes(entry),
        *sentences(entry),
        *dataset.run.health.notes(),
        *cautions(entry),
        *device_notes(entry.devices),
    ]


def _set_lines(entry: DatasetEntry) -> list[str]:
    """Return how many launches stand behind a dataset, and which do not count."""
    left_out = entry.left_out
    where = f"{entry.launches} in {entry.launch_set}"
    lines = [f"  this is {entry.representative_rule}, of {where}: pictures and details are of this launch alone"]
    if left_out:
        lines.append(f"  ! {len(left_out)} of {entry.launches + len(left_out)} launches left out:")
        lines += [f"  !   {launch.path}: {launch.reason}" for launch in left_out[:_SHOWN_LEFT_OUT]]
        lines += _left_over(len(left_out), _SHOWN_LEFT_OUT, "launches")
    return lines


def dataset_table(label: str, entry: DatasetEntry) -> str:
    """Return every metric of one dataset over its steps and ranks."""
    metrics = entry.shown
    rows: list[tuple[str, ...]] = [(label, "median", "p5", "p95", "mean", "rank spread")]
    zeros = [name for name, values in metrics.items() if values.min == values.max == values.nulls == 0]
    for name, values in metrics.items():
        unit = metric_named(name).unit
        if values.bounds:
            rows.append((_titled(name), TEXT.bounds(values.bounds, unit), "", "", "", ""))
        if values.median is None or name in zeros:
            continue
        cells = [TEXT.number(value, unit) for value in (values.median, values.p5, values.p95, values.mean)]
        spread = known(values.rank_spread)
        rows.append((_titled(name), *cells, "-" if spread is None else TEXT.number(spread, unit)))
        if known(values.ratio_of_sums) is not None:
            rows.append((_POOLED, TEXT.number(values.ratio_of_sums, "ratio"), "", "", "", ""))
    lines = [*_numbers_table(rows), *_zeros("0 throughout", zeros), *_collective_rows(entry.matched)]
    reasons = {
        name: values.reason for name, values in metrics.items() if values.reason != NO_PIPELINE and not values.bounds
    }
    by_kernels = [name for name, values in metrics.items() if values.source == "kernels" and name not in zeros]
    said = "of the steps measured by kernels alone"
    return "\n".join([*lines, *_zeros(said, by_kernels), *_nulls(reasons)])


def comparison_table(comparison: Comparison, style: Style = PLAIN) -> str:
    """Return reference against candidate: every metric that has a value, and what the columns are."""
    names = shown_first(comparison)
    lines = metric_table(comparison, names, style)
    notes = [f"reference: {comparison.reference}; candidate: {comparison.candidate}."]
    tested = _JUDGED.format(level=TEXT.percent(known(comparison.interval_level), 0))
    statistic = MEANS.capitalize() if comparison.statistic == MEANS else "Medians"
    notes.append(tested if comparison.tested else _NOT_JUDGED.format(statistic=statistic))
    if comparison.primary:
        notes.append(
            f"{JOB_STEP} decides the verdict, then {comparison.primary}; nothing counts as improved while steps are "
            "longer."
        )
    shares = "; ".join(f"{name} = {_DENOMINATOR[name]}" for name in names if name in _DENOMINATOR)
    notes += [f"{shares}."] if shares else []
    return "\n".join([*lines, style.faint(wrapped([" ".join(notes)], style.width, indent=""))])


def metric_table(comparison: Comparison, names: Sequence[str], style: Style = PLAIN) -> list[str]:
    """Return a head, and a row for each of these metrics."""
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
    """Return the cells of each line, the head first, and its verdict."""
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
            rows.append(((_POOLED_OF_RUNS, *_change("ratio", pair.ratio_of_sums), ""), None))
    return rows


def _without_deltas(pair: ComparedMetric) -> ComparedMetric:
    """Return the sides of a metric whose difference would be one of other work, or of a drift."""
    nothing = Effect("difference", None, None, None)
    return replace(pair, difference=None, quotient=None, effect=nothing, ratio_of_sums=ABSENT)


def _least_width(rows: Sequence[tuple[tuple[str, ...], str | None]], gap: int) -> int:
    """Return the columns of a table whose longer names stand on lines of their own."""
    others = sum(max(len(cells[place]) for cells, _ in rows) for place in range(1, len(_HEAD)))
    return _LEAST_NAME + others + gap * (len(_HEAD) - 1)


def shown_first(comparison: Comparison) -> list[str]:
    """Return the names of the metrics, but those without a value on both sides and those of 0 on both: the primary and
    the job step first, then what has a verdict, then the rest.
    """
    metrics = comparison.shown
    names = [name for name, pair in metrics.items() if pair.bounded or not (pair.unknown or is_zero(pair))]
    primary = comparison.deciding
    return sorted(names, key=lambda name: (name != primary, name != JOB_STEP, known(metrics[name].verdict) is None))


def _judged(name: str, pair: ComparedMetric, *, around: bool) -> tuple[str, ...]:
    verdict = pair.verdict
    sides = [_side(pair, side, _UNKNOWN) + (_around(pair, side) if around else "") for side in SIDES]
    effect = pair.effect
    delta = _UNKNOWN if effect.value is None else TEXT.effect(effect.value, effect.kind)
    if effect.low is not None:
        delta += f" [{TEXT.interval(effect).rpartition(' ')[0]}]"
    if verdict is None:
        return name, *sides, delta, _UNKNOWN, "not judged"
    return name, *sides, delta, p_value(pair.p, unknown=_UNKNOWN), f"{mark_of(verdict)} {verdict_label(pair)}"


def _around(pair: ComparedMetric, side: Side) -> str:
    """Return how far the farther end of the interval of a side's value is; empty without one."""
    value, interval = pair.value(side), pair.interval(side)
    if value is None or interval is None or interval.low is None or interval.high is None:
        return ""
    return f" ± {TEXT.number(max(interval.high - value, value - interval.low), pair.unit)}"


def _of_runs(name: str, pair: ComparedMetric) -> tuple[str, ...]:
    _, _, *change = _change(pair.unit, pair)
    return name, *(_side(pair, side) for side in SIDES), *change, str(pair.judgement)


def _change(unit: str, pair: ComparedMetric | Quotient) -> tuple[str, str, str, str]:
    """Return both values, their difference and their quotient."""
    difference = _UNKNOWN if pair.difference is None else TEXT.number(pair.difference, unit, signed=True)
    ratio = _UNKNOWN if pair.quotient is None else TEXT.number(pair.quotient)
    return TEXT.number(pair.reference, unit), TEXT.number(pair.candidate, unit), difference, ratio


def _side(pair: ComparedMetric, side: Side, unknown: str = TEXT.unknown) -> str:
    """Return the value of one side, its bounds, or what stands for a value: `none` where this kind was not used."""
    ends, value = pair.ends(side), pair.value(side)
    if ends is not None:
        return TEXT.bounds(ends, pair.unit, named=False)
    if value is None:
        return _NONE if f"{side}: {NOT_USED}" in (pair.judgement_reason or "") else unknown
    return TEXT.number(value, pair.unit)


def comparison_details(comparison: Comparison) -> str:
    """Return what else differs: collectives, configuration, and metrics that neither side has; empty if nothing."""
    lines = []
    shown = comparison.collectives[:_SHOWN_COLLECTIVES]
    rows = [
        _pair_row(f"{title} {name}", getattr(row, name))
        for title, row in zip(_collective_names(comparison.collectives), shown, strict=False)
        for name in ("transfer_ms", "wait_ms", "busbw_gb_per_s")
        if not getattr(row, name).unknown and not is_zero(getattr(row, name))
    ]
    if rows:
        title = "collectives of the launches shown" if comparison.primary else "collectives"
        lines += _numbers_table([(title, *_PAIR_HEAD), *rows])
    lines += _left_over(len(comparison.collectives), len(shown), "collectives")
    unshared = comparison.collectives_on_one_side
    if any(unshared.values()):
        counts = f"{unshared['reference']} of the reference, {unshared['candidate']} of the candidate"
        lines.append(f"  collectives (kind, group, size, bytes) that the other side does not have: {counts}")
    metrics = comparison.shown
    lines += _zeros(
        "median 0 on both sides",
        [name for name, pair in metrics.items() if pair.reference == pair.candidate == 0],
    )
    lines += _nulls(
        {name: pair.judgement_reason for name, pair in metrics.items() if pair.unknown and not pair.bounded}
    )
    differences = comparison.manifest_differences
    for difference in differences[:_SHOWN_DIFFERENCES]:
        values = f"{json_text(difference.reference)} -> {json_text(difference.candidate)}"
        lines.append(wrapped([f"  differs: {difference.key}: {values}"]))
    lines += _left_over(len(differences), _SHOWN_DIFFERENCES, "differences")
    return "\n".join(lines)


def _collective_rows(rows: Sequence[CollectiveEntry]) -> list[str]:
    if not rows:
        return []
    cells: list[tuple[str, ...]] = [
        ("collectives, medians", "transfer ms", "wait ms", "algbw GB/s", "busbw GB/s", "count")
    ]
    for title, row in zip(_collective_names(rows), rows[:_SHOWN_COLLECTIVES], strict=False):
        medians = (
            TEXT.number(getattr(row, name).median, metric_named(name).unit)
            for name in ("transfer_ms", "wait_ms", "algbw_gb_per_s", "busbw_gb_per_s")
        )
        cells.append((title, *medians, str(row.collectives)))
    reasons = {f"{row.kind}: {row.transfer_ms.reason}" for row in rows if row.transfer_ms.reason}
    lines = [*_numbers_table(cells), *_left_over(len(rows), _SHOWN_COLLECTIVES, "collectives")]
    notes = [f"  no transfer time of {reason}" for reason in sorted(reasons)]
    bounds = sorted(
        {(row.kind, row.why_upper_bound) for row in rows if row.transfer_is_upper_bound and not row.transfer_ms.reason}
    )
    notes += [f"  {kind}: {why}; its transfer is an upper bound" for kind, why in bounds]
    return lines + wrapped(notes).splitlines()


def _collective_names(rows: Sequence[CollectiveEntry | ComparedCollective]) -> list[str]:
    """Return kind, size and number of ranks; with exact bytes and the group where several rows share these."""
    names = [f"{row.kind} {TEXT.size(row.bytes)} n={row.group_size or '?'}" for row in rows]
    counts = Counter(names)
    return [
        name if counts[name] == 1 else f"{row.kind} {row.bytes} B n={row.group_size or '?'} group {row.group}"
        for name, row in zip(names, rows, strict=True)
    ]


def _pair_row(title: str, pair: ComparedMetric) -> tuple[str, ...]:
    values = [TEXT.number(value, pair.unit) for value in (pair.reference, pair.candidate, pair.difference)]
    return (title, *values, TEXT.number(pair.quotient), str(pair.judgement))


def _titled(name: str) -> str:
    return f"{name} ({_DENOMINATOR[name]})" if name in _DENOMINATOR else name


def _numbers_table(rows: Sequence[Sequence[str]]) -> list[str]:
    return table(rows, right=range(1, len(rows[0])), width=WIDTH)


def _nulls(reasons: Mapping[str, str | None]) -> list[str]:
    by_reason: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        if reason is not None:
            by_reason.setdefault(reason, []).append(name)
    return wrapped(
        [f"  not available: {', '.join(names)}: {reason}" for reason, names in by_reason.items()]
    ).splitlines()


def _zeros(said: str, names: Sequence[str]) -> list[str]:
    return wrapped([f"  {said}: {', '.join(names)}"]).splitlines() if names else []


def _left_over(total: int, shown: int, what: str) -> list[str]:
    return [f"  and {total - shown} more {what}, all in summary.json"] if total > shown else []
