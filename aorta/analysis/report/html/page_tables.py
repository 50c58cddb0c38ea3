"""The tables of the page, cell by cell: text, and what each cell is sorted by.

Metrics, collectives, differences, causes and gains each have a function of their own. Must not leave a row out without
a sentence that says how many.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from aorta.analysis.compare.headline import is_comparable, verdict_label
from aorta.analysis.compare.run_comparison import NOT_USED
from aorta.analysis.documents import known
from aorta.analysis.documents.comparison import SIDES, AttributionRow, ComparedMetric, Comparison, Side
from aorta.analysis.documents.dataset import CollectiveEntry, DatasetEntry, Described, GainEntry, MarginalEntry, WhatIf
from aorta.analysis.documents.summary import MetricDefinition
from aorta.analysis.formatting import PAGE, is_zero, json_text, p_value, rough_interval
from aorta.analysis.metrics import metric_named
from aorta.analysis.report.html.verdict_cards import signed
from aorta.analysis.summary import SHOWN_MARGINALS

_BY_KERNELS: Final = "of the steps measured by the profiler's kernels"
ROW_LIMIT: Final = 400
"""Collectives of one dataset that a table lists; a browser sorts that many without a pause."""
_TIMES: Final = ("duration_ms", "transfer_ms", "wait_ms", "queued_ms")
_RATES: Final = ("algbw_gb_per_s", "busbw_gb_per_s")


@dataclass(frozen=True)
class Cell:
    """`sort` is what the column is ordered by; None sorts last. `tip` says more, as a title."""

    text: str
    sort: float | str | None = None
    tip: str | None = None
    tone: str | None = None


@dataclass(frozen=True)
class Column:
    """`numeric` cells are set to the right and sorted as numbers."""

    title: str
    numeric: bool = False
    tip: str | None = None


@dataclass(frozen=True)
class Table:
    """`key` is unique on the page; the first cell of each row is its heading. `note` stands below."""

    key: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str | None = None


def word(text: str, tip: str | None = None, tone: str | None = None) -> Cell:
    """Return a cell sorted by its text."""
    return Cell(text, text.casefold(), tip, tone)


def value(number: float | None, unit: str, tip: str | None = None) -> Cell:
    """Return a cell with a value of a metric; the tip of a null is why."""
    return Cell(PAGE.number(number, unit), number, tip)


def metrics_table(comparison: Comparison, definitions: Mapping[str, MetricDefinition]) -> Table:
    """Return every metric of both sides; with launch sets also effect, interval, p and verdict."""
    tested = comparison.tested
    sides = [Column(comparison.label(side), True) for side in SIDES]
    plain = [Column("difference", True), Column("ratio", True, "candidate / reference")]
    if tested:  # the verdict beside its metric, where a narrow page shows it
        judged = [Column("verdict"), Column("effect", True), Column("interval", True)]
        columns = [Column("metric"), *judged, Column("p", True, "of the metric alone"), *sides, Column("unit"), *plain]
        columns.append(Column("role"))
    else:
        direction = Column("direction", tip="of the difference; not tested for significance")
        columns = [Column("metric"), direction, *sides, Column("unit"), *plain]
    rows, nulls, zeros, apart = [], [], [], is_comparable(comparison)
    for name, pair in comparison.shown.items():
        if pair.unknown and not pair.bounded:
            nulls.append(f"{name}: {pair.judgement_reason}")
            continue
        if is_zero(pair):
            zeros.append(name)
            continue
        unit = pair.unit
        row = [word(name, _definition(definitions, name))]
        values = [*(_side(pair, side) for side in SIDES), word(unit)]
        change = [
            Cell(PAGE.number(pair.difference, unit, signed=True), pair.difference),
            Cell(PAGE.number(pair.quotient), pair.quotient, pair.quotient_reason),
        ]
        if not apart:  # a difference would be one of other work, or of a drift
            change = [Cell(PAGE.unknown), Cell(PAGE.unknown)]
        if tested:
            row += [*_tested(pair, apart=apart), *values, *change, word(pair.role or "")]
        else:
            judgement = str(pair.judgement)
            row += [word(signed(judgement), pair.judgement_reason, _TONE.get(judgement)), *values, *change]
        rows.append(tuple(row))
    notes = [f"0 on both sides: {', '.join(zeros)}."] if zeros else []
    notes += [f"Not available on either side: {'; '.join(nulls)}."] if nulls else []
    note = " ".join(notes) or None
    of_runs = "medians" if comparison.statistic == "median" else comparison.statistic.rstrip(",")
    caption = f"Metrics: {'medians of the medians of launches' if tested else of_runs}"
    return Table("metrics", caption, tuple(columns), tuple(rows), note)


def _side(pair: ComparedMetric, side: Side) -> Cell:
    """Return the value of a side, or its bounds, which sort by at most."""
    ends = pair.ends(side)
    if ends is not None:
        return Cell(PAGE.bounds(ends, pair.unit, named=False), ends.at_most, pair.judgement_reason)
    if f"{side}: {NOT_USED}" in (pair.judgement_reason or ""):
        return Cell("none", None, NOT_USED)
    return value(pair.value(side), pair.unit, pair.judgement_reason)


_TONE: Final = {"better": "good", "worse": "bad", "improvement": "good", "regression": "bad", "equivalent": "even"}


def _tested(pair: ComparedMetric, *, apart: bool) -> list[Cell]:
    found, p, corrected = pair.effect, pair.p, pair.p_corrected
    together = None if corrected is None else f"{p_value(corrected, 3)} among all that were tested together (minP)"
    verdict = pair.verdict or "not judged"
    label = signed(verdict) if pair.needs_launches is None else signed(verdict) + verdict_label(pair)[len(verdict) :]
    effect = [Cell(PAGE.unknown), Cell(PAGE.unknown)]
    if apart:
        effect = [Cell(PAGE.effect(found.value, found.kind), found.value), Cell(PAGE.interval(found), found.low)]
    cells = [word(label, pair.verdict_reason, _TONE.get(verdict)), *effect]
    cells.append(Cell(p_value(p, 3, unknown=PAGE.unknown), p, together))
    return cells


def dataset_table(label: str, entry: DatasetEntry, definitions: Mapping[str, MetricDefinition]) -> Table:
    """Return every metric of one dataset over its rank-steps."""
    shape = ("median", "p5", "p95", "mean", "min", "max")
    columns = (
        Column("metric"),
        Column("unit"),
        *(Column(name, True) for name in shape),
        Column("spread of ranks", True, "largest minus smallest of the medians of the ranks"),
        Column("sums", True, "ratio of milliseconds summed over steps"),
        Column("values", True),
        Column("nulls", True),
    )
    rows, nulls = [], []
    for name, found in entry.shown.items():
        ends = known(found.bounds)
        if found.median is None and not ends:
            nulls.append(f"{name}: {found.reason}")
            continue
        unit = metric_named(name).unit
        rows.append(
            (
                word(name, _definition(definitions, name)),
                word(unit),
                Cell(PAGE.bounds(ends, unit, named=False), ends.at_most, found.reason)
                if ends
                else value(found.median, unit, _BY_KERNELS if found.source == "kernels" else None),
                *(value(getattr(found, each), unit) for each in shape[1:]),
                value(known(found.rank_spread), unit, known(found.rank_spread_reason)),
                value(known(found.ratio_of_sums), "ratio", known(found.ratio_of_sums_reason)),
                Cell(PAGE.whole(found.count), found.count),
                Cell(PAGE.whole(found.nulls), found.nulls),
            )
        )
    note = f"Not available: {'; '.join(nulls)}." if nulls else None
    return Table(f"distribution-{label}", f"{label}: every metric over steps and ranks", columns, tuple(rows), note)


def _definition(definitions: Mapping[str, MetricDefinition], name: str) -> str | None:
    return definitions[name].definition if name in definitions else None


def titled(name: str) -> str:
    for end, unit in (("_ms", "ms"), ("_gb_per_s", "GB/s")):
        if name.endswith(end):
            return f"{name.removesuffix(end)}, {unit}"
    return name


def collectives_table(entries: Mapping[str, DatasetEntry], definitions: Mapping[str, MetricDefinition]) -> Table | None:
    """Return the collectives of every dataset, by kind, group, size of the group and bytes. None without any."""
    listed = [(label, row) for label, entry in entries.items() for row in entry.matched]
    if not listed:
        return None
    columns = [Column("kind"), Column("run"), Column("group"), Column("ranks", True), Column("bytes", True)]
    columns.append(Column("count", True))
    names = (*_TIMES, *_RATES)
    columns += [Column(titled(name), True, _definition(definitions, name)) for name in names]
    rows, notes = [], []
    for label, entry in entries.items():
        mine = sorted(entry.matched, key=_total_ms, reverse=True)
        rows += [_collective(label, row, names) for row in mine[:ROW_LIMIT]]
        if len(mine) > ROW_LIMIT:
            left, whole = (sum(map(_total_ms, part)) for part in (mine[ROW_LIMIT:], mine))
            share = f", {PAGE.percent(left / whole)} of the time in collectives" if whole else ""
            notes.append(f"{label}: {len(mine) - ROW_LIMIT} more{share}, all in summary.json")
    caption = "Collectives: medians, after warm-up"
    return Table("collectives", caption, tuple(columns), tuple(rows), ". ".join(notes) or None)


def _total_ms(row: CollectiveEntry) -> float:
    """Return the time on all ranks, as far as it is known."""
    return float((row.duration_ms.mean or 0) * row.rows)


def _collective(label: str, row: CollectiveEntry, names: Iterable[str]) -> tuple[Cell, ...]:
    bound = f"an upper bound: {row.why_upper_bound}" if row.transfer_is_upper_bound else None
    cells = [word(row.kind), word(label), word(row.group)]
    cells.append(Cell(PAGE.unknown if row.group_size is None else str(row.group_size), row.group_size))
    cells.append(Cell(PAGE.size(row.bytes), row.bytes))
    cells.append(Cell(PAGE.whole(row.collectives), row.collectives))
    for name in names:
        found: Described = getattr(row, name)
        tip = found.reason or (bound if name == "transfer_ms" else None)
        cells.append(value(found.median, metric_named(name).unit, tip))
    return tuple(cells)


_EXPOSED: Final = {
    "group": "Process group",
    "collective": "Collective",
    "region": "Region of the step",
    "part": "Transfer or waiting",
    "rank": "Rank",
}
"""Field of `ExposedBreakdown` -> what its rows are."""


def exposed_tables(label: str, entry: DatasetEntry) -> list[Table]:
    """Return where the communication of a run is exposed, in every way that the summary breaks it down; none where
    nothing is exposed, or where that is not known.
    """
    found = known(entry.exposed)
    if found is None or found.reason is not None or not found.exposed_ms:
        return []
    made = []
    for name, title in _EXPOSED.items():
        columns = Column(title.lower()), Column("exposed, ms", True), Column("share", True)
        # Rows of ranks are parts of the mean over all of them; a rank exposes that many times more in its own steps.
        times, per = (len(entry.health.ranks_read), "step of the rank") if name == "rank" else (1, "step and rank")
        rows = tuple(
            (word(row.what), value(row.exposed_ms * times, "ms"), Cell(PAGE.percent(row.share), row.share))
            for row in getattr(found, name)
        )
        made.append(Table(f"exposed-{name}-{label}", f"{title}: mean exposed ms per {per}", columns, rows))
    return made


def pairs_table(comparison: Comparison) -> Table | None:
    """Return the collectives that both sides issued, candidate against reference. None without any."""
    found = comparison.collectives
    if not found:
        return None
    names = ("transfer_ms", "wait_ms", "queued_ms", "busbw_gb_per_s")
    columns = [Column("kind"), Column("group"), Column("ranks", True), Column("bytes", True)]
    for name in names:
        columns += [Column(f"{titled(name)}, {comparison.label(side)}", True) for side in SIDES]
        columns.append(Column("ratio", True, f"{name}: candidate / reference"))
    rows = []
    for row in found[:ROW_LIMIT]:
        cells = [word(row.kind), word(row.group)]
        cells.append(Cell(PAGE.unknown if row.group_size is None else str(row.group_size), row.group_size))
        cells.append(Cell(PAGE.size(row.bytes), row.bytes))
        for name in names:
            pair: ComparedMetric = getattr(row, name)
            cells += [value(pair.value(side), pair.unit, pair.judgement_reason) for side in SIDES]
            cells.append(Cell(PAGE.number(pair.quotient), pair.quotient, pair.quotient_reason))
        rows.append(tuple(cells))
    alone = comparison.collectives_on_one_side
    notes = []
    if len(found) > ROW_LIMIT:
        notes.append(f"{len(found) - ROW_LIMIT} more that both sides issued, all in summary.json")
    if any(alone.values()):
        notes.append(f"On one side only: {alone['reference']} of the reference, {alone['candidate']} of the candidate")
    return Table("pairs", "The same collectives on both sides", tuple(columns), tuple(rows), ". ".join(notes) or None)


def attribution_table(key: str, caption: str, rows: Sequence[AttributionRow], *, shares: bool = True) -> Table:
    """Return parts of a difference in exposed communication, mean ms per step and rank; `shares`: of the difference."""
    columns = [Column("what"), *(Column(f"{name}, ms", True) for name in (*SIDES, "difference"))]
    columns += [Column("share", any(row.share is not None for row in rows))] if shares else []
    cells = []
    for row in rows:
        means = [value(each, "ms") for each in (row.reference_ms, row.candidate_ms, row.difference_ms)]
        share = [Cell(PAGE.percent(row.share), row.share)] if shares else []
        cells.append((word(row.what), *means, *share))
    return Table(key, caption, tuple(columns), tuple(cells))


def differences_table(comparison: Comparison) -> Table:
    """Return the facts that differ between the sides."""
    columns = (Column("key"), *(Column(comparison.label(side)) for side in SIDES))
    rows = tuple(
        (word(each.key), *(word(json_text(each.value(side))) for side in SIDES))
        for each in comparison.manifest_differences
    )
    return Table("differences", "What differs between the runs", columns, rows)


def facts_table(
    key: str, caption: str, sides: Mapping[str, Mapping[str, object]], *, mark: bool = False, numbers: bool = False
) -> Table:
    """Return the facts of several datasets beside each other, one row a fact.

    Args:
        mark: name the rows whose values differ.
        numbers: the facts are numbers, and stand to the right.
    """
    names = list(dict.fromkeys(name for facts in sides.values() for name in facts))
    columns = [Column(""), *(Column(label, numbers) for label in sides), *([Column("differs")] if mark else [])]
    rows = []
    for name in names:
        texts = [json_text(facts[name]) if name in facts else "(absent)" for facts in sides.values()]
        cells = [word(name), *map(word, texts)]
        if mark:
            cells.append(word("yes" if len(set(texts)) > 1 else "", tone="open" if len(set(texts)) > 1 else None))
        rows.append(tuple(cells))
    return Table(key, caption, tuple(columns), tuple(rows))


def definitions_table(definitions: Mapping[str, MetricDefinition]) -> Table:
    """Return what each metric is."""
    columns = (Column("metric"), Column("unit"), Column("better"), Column("definition"))
    rows = tuple(
        (word(name), word(metric.unit), word(metric.better or "neither"), word(metric.definition))
        for name, metric in definitions.items()
    )
    return Table("definitions", "What each metric is", columns, rows)


@dataclass(frozen=True)
class PageGains:
    """The section of one dataset. With a `reason` there is nothing else in it."""

    label: str
    reason: str | None
    basis: str = ""
    tables: tuple[Table, ...] = ()
    check: str | None = None
    notes: tuple[str, ...] = ()
    command: str = ""


def page_gains(label: str, gains: WhatIf) -> PageGains:
    """Return what the page says of `what_if` of a dataset."""
    if gains.reason is not None:
        return PageGains(label, gains.reason)
    basis = (
        f"A replay of the last {gains.steps} steps on {gains.ranks} ranks. Intervals: "
        f"{PAGE.percent(gains.level, 0)}; a gain is significant where its whole interval is one. Gains overlap: do "
        "not add them up."
    )
    tables = (_gains(label, gains.gains), _marginals(label, gains.marginals[:SHOWN_MARGINALS], gains.bounds))
    return PageGains(label, None, basis, tables, gains.check, (*gains.notes, *gains.flags), gains.command)


def _gains(label: str, rows: Sequence[GainEntry]) -> Table:
    columns = (Column("change"), _GAIN, Column("of a step", True), Column("significant"), Column("--set"))
    cells = tuple(
        (
            word(each.words + ("" if each.setting else " (hypothetical)"), "; ".join(each.notes) or None),
            _gain(each),
            Cell(PAGE.percent(each.share), each.share),
            word("upper bound" if each.upper_bound else "yes" if each.significant else "no"),
            word(each.change),
        )
        for each in rows
    )
    noted = "; ".join(f"{each.words}: {note}" for each in rows for note in each.notes)
    note = noted or (None if cells else "None of the changes that were tried gains anything worth naming.")
    return Table(f"gains-{label}", "The changes that would gain most, each alone", columns, cells, note)


def _marginals(label: str, parts: Iterable[MarginalEntry], bounds: Iterable[MarginalEntry]) -> Table:
    columns = (Column("what is free"), Column("is"), _GAIN)
    cells = tuple((word(each.name), word(each.what), _gain(each)) for each in (*parts, *bounds))
    caption = "By how much a step would be shorter, if one part were free; then bounds"
    return Table(f"marginals-{label}", caption, columns, cells)


_GAIN = Column("gain per step", True)


def _gain(gain: GainEntry | MarginalEntry) -> Cell:
    return Cell(rough_interval(gain.gain_ms, gain.low_ms, gain.high_ms), gain.gain_ms)
