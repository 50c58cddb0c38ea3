"""The tables of runs and comparisons: metrics, ranks, collectives, where communication is exposed, what would gain,
what differs. Terminal, page and files show the same ones; those of kernels are in `kernels`.

Must not compute anything but the duration that transfer and wait add up to, or show a difference of other work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, Final

from aorta.analysis.aggregate import NO_PIPELINE
from aorta.analysis.compare.headline import is_comparable, verdict_label
from aorta.analysis.compare.run_comparison import NOT_USED
from aorta.analysis.documents import as_json, known
from aorta.analysis.documents.comparison import (
    SIDES,
    AttributionRow,
    ComparedCollective,
    ComparedMetric,
    Comparison,
    Effect,
    MetricDefinition,
)
from aorta.analysis.documents.dataset import MEANS, DatasetEntry, Described, ExposedRow, Straggler, WhatIf
from aorta.analysis.formatting import PAGE, TEXT, group_title, is_zero, json_text
from aorta.analysis.metrics import JOB_STEP, metric_named
from aorta.analysis.report.tables import IN_FILE, ON_PAGE, PEOPLE, TERMINAL, Column, Table
from aorta.analysis.summary import SHOWN_MARGINALS
from aorta.terminal_style import mark_of
from aorta.timeline.classes import KINDS

_FILE: Final = (IN_FILE,)
_PAGE: Final = (ON_PAGE,)
_LONGEST_LABEL: Final = 16
"""Above a column; a longer label is not that of a column."""
_DENOMINATORS: Final = {
    "overlap_ratio": "hidden/comm",
    "exposed_share": "exposed/step",
    "overlap_efficiency": "saved/min(Tc,Tm)",
    "compute_slowdown": "added/isolated",
}


def _text(key: str, title: str | None = None, of: Any = None, **more: Any) -> Column:
    return Column(key, title, "text", of, **more)


def _in_files(prefix: str, *keys: str, unit: str = "") -> list[Column]:
    return [Column(key, unit=unit, of=f"{prefix}{key}", media=_FILE) for key in keys]


def _statistic(key: str, title: str | None = None, media: Sequence[str] = PEOPLE, **more: Any) -> Column:
    """Return the column of a statistic, in the unit of the metric."""
    return Column(key, title, itemgetter("unit"), f"entry.{key}", media=media, **more)


METRICS: Final = (
    *_in_files("", "label", unit="text"),
    _text("metric", why="definition"),
    *_in_files("", "unit", "better", unit="text"),
    Column("median", None, itemgetter("unit"), "middle", why="basis", media=PEOPLE),
    _statistic("over_all", "over all", (TERMINAL,), drop=1),
    _statistic("p5"),
    _statistic("p95"),
    _statistic("mean", drop=2),
    _statistic("min", media=_PAGE),
    _statistic("max", media=_PAGE),
    _statistic("rank_spread", "rank spread", drop=1, tip="largest minus smallest of the medians of the ranks"),
    _statistic("ratio_of_sums", "ratio of sums", _PAGE, tip="of milliseconds summed over steps"),
    Column("count", "values", "count", "entry.count", media=(ON_PAGE, IN_FILE)),
    Column("nulls", None, "count", "entry.nulls", media=(ON_PAGE, IN_FILE)),
    *_in_files("entry.", "median", "p5", "p95", "mean", "min", "max", "rank_spread", "ratio_of_sums"),
    *_in_files("entry.", "source", unit="text"),
    *_in_files("entry.bounds.", "at_least", "at_most"),
    *_in_files("entry.", "reason", unit="text"),
)


def metric_row(label: str, name: str, entry: Described) -> dict[str, Any]:
    """Return the row of a metric; people are shown those that have a value, and are not 0 throughout."""
    metric, bounds = metric_named(name), known(entry.bounds)
    middle = bounds if entry.median is None else entry.median
    zero = entry.min == entry.max == entry.nulls == 0
    basis = "of the steps measured by the profiler's kernels" if entry.source == "kernels" else entry.reason
    facts = {"unit": metric.unit, "better": metric.better, "definition": metric.definition, "basis": basis}
    shown = {"middle": middle, "zero": zero, "shown": middle is not None and not zero}
    return {"label": label, "metric": name, "entry": entry} | facts | shown


def metrics_table(label: str, entry: DatasetEntry) -> Table:
    """Return every metric of one dataset over its steps and ranks."""
    rows = [metric_row(label, name, each) for name, each in entry.shown.items()]
    told = {row["metric"]: row["entry"] for row in rows if row["shown"]}
    exposed = sum(told[name].mean or 0 for kind in KINDS if (name := f"exposed_{kind}_ms") in told)
    notes = _unavailable({row["metric"]: row["entry"].reason for row in rows if row["middle"] is None})
    notes += _listed("0 throughout", [row["metric"] for row in rows if row["zero"]])
    by_kernels = [name for name, each in told.items() if each.source == "kernels"]
    notes += _listed("Of the steps measured by kernels alone", by_kernels)
    if "exposed_comm_ms" in told and exposed > 1.001 * (told["exposed_comm_ms"].mean or 0) > 0:
        notes.append("Kinds of collectives run at the same time: their exposed times overlap, and do not add up.")
    notes += _denominators(told)
    columns = [column for column in METRICS if column.key != "over_all" or entry.few_steps]
    caption = f"{label}: metrics over steps and ranks"
    return Table(f"metrics-{label}", caption, columns, rows, " ".join(notes) or None, itemgetter("shown"))


def _unavailable(reasons: Mapping[str, str | None]) -> list[str]:
    """Return which metrics have no value, by reason."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        if reason not in (None, NO_PIPELINE):
            by_reason.setdefault(str(reason), []).append(name)
    return [f"Not available: {', '.join(names)}: {reason}." for reason, names in by_reason.items()]


def _listed(what: str, names: Sequence[str]) -> list[str]:
    return [f"{what}: {', '.join(names)}."] if names else []


def _denominators(names: Collection[str]) -> list[str]:
    told = "; ".join(f"{name} = {_DENOMINATORS[name]}" for name in names if name in _DENOMINATORS)
    return [f"{told}."] if told else []


_SIGNS: Final = {"improvement": "▲", "regression": "▼", "better": "▲", "worse": "▼", "equivalent": "=", "equal": "="}
_SIGNS_OF_THE_OPEN: Final = {"inconclusive": "?", "not tested": "○", "not comparable in time": "?"}
_TONES: Final = {"better": "good", "worse": "bad", "improvement": "good", "regression": "bad", "equivalent": "even"}


def signed(word: str) -> str:
    """Return a verdict or a direction with the sign that says the same without colour."""
    sign = (_SIGNS | _SIGNS_OF_THE_OPEN).get(word)
    return word if sign is None else f"{sign}\u00a0{word}"


def change_of(pair: ComparedMetric) -> Effect | None:
    """Return the effect of a pair; of one launch a side its difference in points, or its change in per cent."""
    if pair.tested:
        return pair.effect
    if pair.unit == "ratio":
        return None if pair.difference is None else Effect("difference", pair.difference, None, None)
    return None if pair.quotient is None else Effect("quotient", pair.quotient - 1, None, None)


def pair_row(name: str, pair: ComparedMetric, comparison: Comparison) -> dict[str, Any]:
    """Return the row of a metric of both sides, without a change where the sides did other work or did not take turns.
    People are shown those with a value, or bounds, that is not 0 on both sides.
    """
    change = change_of(pair) if is_comparable(comparison) else None
    verdict, corrected = known(pair.verdict), known(pair.p_corrected)
    word = verdict or ("not judged" if pair.tested else str(pair.judgement))
    values: dict[str, Any] = {side: pair.value(side) if pair.ends(side) is None else pair.ends(side) for side in SIDES}
    for side in SIDES:
        if values[side] is None and f"{side}: {NOT_USED}" in (pair.judgement_reason or ""):
            values[side] = "none"  # this kind of communication
    return values | {
        "metric": name,
        "pair": pair,
        "unit": pair.unit,
        "definition": metric_named(name).definition,
        "change": change,
        "interval": None if change is None or change.low is None else change,
        "p": known(pair.p) if verdict else None,
        "corrected": corrected and f"{corrected:.3g} among all that were tested together (minP)",
        "signed": signed(word) + (verdict_label(pair)[len(word) :] if verdict else ""),
        "marked": f"{mark_of(verdict)} {word}".strip(),
        "tone": _TONES.get(word, "open" if verdict else None),
        "reason": pair.verdict_reason or pair.judgement_reason,
        "labels": {f"{side}_label": comparison.label(side) for side in SIDES},
        "launches": {f"{side}_launches": (pair.launches or {}).get(side) for side in SIDES},
        "interval_of_difference": {
            f"difference_{end}": pair.difference_interval and getattr(pair.difference_interval, end)
            for end in ("low", "high")
        },
        "shown": pair.bounded or not (pair.unknown or is_zero(pair)),
    }


def comparison_table(comparison: Comparison) -> Table:
    """Return every metric of both sides: the primary and the job step first, then what has a verdict, then the rest."""
    tested, metrics = comparison.tested, comparison.shown
    labels = {side: comparison.label(side) for side in SIDES}
    titles = {side: label if len(label) <= _LONGEST_LABEL else side for side, label in labels.items()}
    tip = None if tested else "of the difference; not tested for significance"
    verdict = partial(_text, "told", "verdict" if tested else "direction", tone=itemgetter("tone"), tip=tip)
    columns = (
        *_in_files("labels.", "reference_label", "candidate_label", unit="text"),
        _text("metric", why="definition"),
        verdict("signed", why="reason", media=_PAGE),
        *_in_files("pair.", "unit", "better", "role", unit="text"),
        *_in_files("pair.", *SIDES, "difference"),
        *_in_files("interval_of_difference.", "difference_low", "difference_high"),
        *_in_files("pair.", "quotient", "p", "p_corrected", "margin"),
        *(Column(side, titles[side], itemgetter("unit"), why="pair.judgement_reason", media=PEOPLE) for side in SIDES),
        Column("change", unit="effect", media=PEOPLE, why="pair.quotient_reason"),
        Column("interval", unit="interval", media=PEOPLE),
        Column("p", unit="p", media=PEOPLE, drop=1, tip="of the metric alone", why="corrected"),
        verdict("marked", media=(TERMINAL,)),
        *_in_files("launches.", "reference_launches", "candidate_launches", unit="count"),
        *_in_files("pair.", "verdict", unit="text"),
        *_in_files("", "reason", unit="text"),
        _text("role", of="pair.role", media=_PAGE if tested else ()),
    )
    primary = comparison.deciding
    order = sorted(metrics, key=lambda name: (name != primary, name != JOB_STEP, known(metrics[name].verdict) is None))
    rows = [pair_row(name, metrics[name], comparison) for name in order]
    zeros = [name for name in order if is_zero(metrics[name])]
    absent = [row["metric"] for row in rows if not row["shown"] and row["metric"] not in zeros]
    needs = [needed for pair in metrics.values() if (needed := known(pair.needs_launches)) is not None]
    notes = _listed("0 on both sides", zeros) + _unavailable({name: metrics[name].judgement_reason for name in absent})
    notes += [f"Not tested: needs {max(needs)} launches per side."] if needs else []
    notes += _denominators([row["metric"] for row in rows if row["shown"]])
    of = (
        MEANS.rstrip(",")
        if comparison.statistic == MEANS
        else "medians of the medians of launches"
        if tested
        else "medians"
    )
    return Table("metrics", f"Metrics: {of}", columns, rows, " ".join(notes) or None, itemgetter("shown"))


_RANK_COLUMNS: Final = (
    Column("compute_ms"),
    Column("idle_ms"),
    Column("wait_ms", tip="blocked on a collective"),
    Column("aux_ms", "optimizer, data", tip="optimizer, clipping, loss read and data"),
    Column("exposed_ms"),
)


def named_ranks(entry: DatasetEntry) -> list[Straggler]:
    """Return the stragglers of a run that are named."""
    return [each for each in known(entry.stragglers) or () if each.rank is not None]


def rank_table(label: str, entry: DatasetEntry) -> Table | None:
    """Return where the step of each rank goes, the named stragglers first; None for one rank."""
    late = {each.rank for each in named_ranks(entry)}
    rows = sorted(known(entry.rank_times) or (), key=lambda row: (row.rank not in late, row.rank))
    times = [column for column in _RANK_COLUMNS if any(column.value(row) is not None for row in rows)]
    rank = _text("rank", of=lambda row: f"rank {row.rank}", tone=lambda row: "bad" if row.rank in late else None)
    told = Table(f"ranks-{label}", f"{label}: a step of each rank, medians", [rank, *times], rows)
    return told if times and len(rows) > 1 else None


def collectives_table(entries: Mapping[str, DatasetEntry]) -> Table | None:
    """Return the collectives of every dataset, by kind, group, size of the group and bytes. None without any.

    The duration is what mean transfer and mean wait add up to; where either is unknown, the mean duration.
    """
    rows: list[dict[str, Any]] = []
    for label, dataset in entries.items():
        for entry in sorted(dataset.matched, key=lambda row: (row.duration_ms.mean or 0) * row.rows, reverse=True):
            transfer, wait, whole = entry.transfer_ms.mean, entry.wait_ms.mean, entry.duration_ms.mean
            bound = f"transfer is an upper bound: {entry.why_upper_bound}" if entry.transfer_is_upper_bound else None
            rows.append(
                {
                    "run": label,
                    "entry": entry,
                    "group": group_title(entry.group).removeprefix("group "),
                    "alike": (label, entry.kind, entry.group, entry.group_size, TEXT.size(entry.bytes)),
                    "duration_ms": whole if transfer is None or wait is None else transfer + wait,
                    "all": whole and f"of all, matched on every rank or not: {TEXT.quantity(whole, 'ms')}",
                    "bound": entry.transfer_ms.reason or bound,
                }
            )
    if not rows:
        return None
    alike = Counter(row["alike"] for row in rows)

    def statistic(name: str, title: str, of: str = "mean", why: str | None = None, drop: int = 0) -> Column:
        tip = metric_named(name).definition
        return Column(name, title, of=f"entry.{name}.{of}", why=why or f"entry.{name}.reason", tip=tip, drop=drop)

    columns = (
        _text("kind", of="entry.kind"),
        _text("run", media=PEOPLE if len(entries) > 1 else _PAGE),
        _text("group", drop=1),
        Column("ranks", unit="count", of="entry.group_size"),
        Column("bytes", "size", lambda row: "B" if alike[row["alike"]] > 1 else "bytes", "entry.bytes"),
        Column("count", unit="count", of="entry.collectives", drop=2),
        Column("duration_ms", "duration", why="all"),
        statistic("transfer_ms", "= transfer", why="bound"),
        statistic("wait_ms", "+ wait"),
        statistic("queued_ms", "queued before", drop=4),
        statistic("algbw_gb_per_s", "algbw", "median", drop=3),
        statistic("busbw_gb_per_s", "busbw", "median"),
    )
    reasons = {
        f"No transfer time of {row['entry'].kind}: {row['entry'].transfer_ms.reason}."
        for row in rows
        if row["entry"].transfer_ms.reason
    }
    reasons |= {
        f"{row['entry'].kind}: {row['bound']}." for row in rows if row["bound"] and not row["entry"].transfer_ms.reason
    }
    caption = "Collectives: means per collective and rank, bandwidths medians, after warm-up"
    return Table("collectives", caption, columns, rows, " ".join(sorted(reasons)) or None)


def pairs_table(comparison: Comparison) -> Table | None:
    """Return the collectives that both sides issued, candidate against reference. None without any."""
    found = comparison.collectives
    if not found:
        return None
    columns = [
        _text("kind"),
        _text("group", of=lambda row: group_title(row.group).removeprefix("group "), drop=3),
        Column("ranks", unit="count", of="group_size"),
        Column("bytes", "size", "bytes"),
    ]
    for name, title, drop in (("transfer_ms", "transfer", 0), ("wait_ms", "wait", 0), ("busbw_gb_per_s", "busbw", 1)):
        why = f"{name}.judgement_reason"
        columns += [
            Column(name, f"{title} {comparison.label(side)}", unit="", of=f"{name}.{side}", why=why, drop=drop)
            for side in SIDES
        ]
        columns.append(Column("change", unit="effect", of=partial(_change_in, name), drop=2))
    alone = comparison.collectives_on_one_side
    note = f"On one side only: {alone['reference']} of the reference, {alone['candidate']} of the candidate."
    caption = "The same collectives on both sides: medians, in ms and GB/s"
    return Table("pairs", caption, columns, found, note if any(alone.values()) else None)


def _change_in(name: str, row: ComparedCollective) -> Effect | None:
    return change_of(getattr(row, name))


_EXPOSED: Final = {
    "group": "Process group",
    "collective": "Collective",
    "region": "Region of the step",
    "part": "Transfer or waiting",
    "rank": "Rank",
}
"""Field of `ExposedBreakdown` -> what its rows are."""


def exposed_rows(entry: DatasetEntry, name: str) -> list[ExposedRow]:
    """Return where the communication of a run is exposed; empty where nothing is, or that is not known."""
    found = known(entry.exposed)
    known_rows = found is not None and found.reason is None and found.exposed_ms
    return getattr(found, name) if known_rows else []


def exposed_tables(label: str, entry: DatasetEntry) -> list[Table]:
    """Return the exposed communication in every way that the summary breaks it down."""
    made = []
    for name, title in _EXPOSED.items():
        # Rows of ranks are parts of the mean over all of them; a rank exposes that many times more in its own steps.
        times, per = (len(entry.health.ranks_read), "step of the rank") if name == "rank" else (1, "step and rank")
        columns = (
            _text("what", title.lower()),
            Column("exposed_ms", "exposed", of=partial(_times, times)),
            Column("share", unit="ratio"),
        )
        rows = exposed_rows(entry, name)
        made += [Table(f"exposed-{name}-{label}", f"{title}: mean exposed ms per {per}", columns, rows)] if rows else []
    return made


def _times(times: int, row: ExposedRow) -> float:
    return row.exposed_ms * times


def attribution_table(key: str, caption: str, rows: Sequence[AttributionRow], *, shares: bool = True) -> Table:
    """Return parts of a difference in exposed communication, mean ms per step and rank; `shares`: of the difference."""
    columns = [
        _text("what"),
        *(Column(f"{side}_ms", side) for side in SIDES),
        Column("difference_ms", "difference", signed=True),
        *([Column("share", unit="ratio")] if shares else []),
    ]
    return Table(key, caption, columns, rows)


def differences_table(comparison: Comparison) -> Table:
    """Return the facts that differ between the sides."""
    sides = {
        comparison.label(side): {each.key: each.value(side) for each in comparison.manifest_differences}
        for side in SIDES
    }
    return facts_table("differences", "What differs between the runs", sides)


def facts_table(key: str, caption: str, sides: Mapping[str, Mapping[str, object]], *, mark: bool = False) -> Table:
    """Return the facts of several datasets beside each other, one row a fact; `mark`: name the rows whose values
    differ.
    """
    rows = []
    for name in dict.fromkeys(name for facts in sides.values() for name in facts):
        texts = {label: json_text(facts[name]) if name in facts else "(absent)" for label, facts in sides.items()}
        rows.append({"": name, "differs": "yes" if len(set(texts.values())) > 1 else ""} | texts)
    columns = [
        _text(""),
        *map(_text, sides),
        *([_text("differs", tone=lambda row: "open" if row["differs"] else None)] if mark else []),
    ]
    return Table(key, caption, columns, rows)


def definitions_table(definitions: Mapping[str, MetricDefinition]) -> Table:
    """Return what each metric is."""
    rows = [{"metric": name, "better": "neither"} | as_json(each) for name, each in definitions.items()]
    return Table("definitions", "What each metric is", [*map(_text, ("metric", "unit", "better", "definition"))], rows)


def gains_tables(label: str, gains: WhatIf) -> tuple[Table, Table]:
    """Return the changes that would gain most, and what a step would gain were one part of the communication free."""
    gain = Column("gain_ms", "gain per step", unit="gain", of=lambda row: row)
    changes = (
        _text("words", title="change", of=lambda row: row.words + ("" if row.setting else " (hypothetical)")),
        gain,
        Column("share", "of a step", unit="ratio"),
        _text("significant", of=lambda row: "upper bound" if row.upper_bound else "yes" if row.significant else "no"),
        _text("change", title="--set"),
    )
    noted = "; ".join(f"{row.words}: {note}" for row in gains.gains for note in row.notes)
    note = noted or (None if gains.gains else "No change that was tried gains enough to mention.")
    free = (_text("name", title="what is free"), _text("what", title="is", media=_PAGE), gain)
    return (
        Table(f"gains-{label}", "The changes that would gain most, each alone", changes, gains.gains, note),
        Table(
            f"marginals-{label}",
            "By how much a step would be shorter, if one part were free; then bounds",
            free,
            [*gains.marginals[:SHOWN_MARGINALS], *gains.bounds],
        ),
    )


def gains_basis(gains: WhatIf) -> str:
    """Return what the gains rest on."""
    return (
        f"A replay of the last {gains.steps} steps on {gains.ranks} ranks. Intervals: {PAGE.percent(gains.level, 0)}; "
        "a gain is significant where its whole interval is one. Gains overlap: do not add them up."
    )
