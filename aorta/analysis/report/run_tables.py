"""The tables of runs and comparisons: metrics, ranks, collectives, where communication is exposed, what would gain,
what differs. Terminal, page and files show the same ones; those of kernels are in `kernels`.

Must not compute anything but the duration that transfer and wait add up to, or show a difference of other work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NamedTuple

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
    Side,
)
from aorta.analysis.documents.dataset import (
    MEANS,
    CollectiveEntry,
    DatasetEntry,
    Described,
    Ends,
    ExposedRow,
    Straggler,
    WhatIf,
)
from aorta.analysis.documents.summary import MetricDefinition
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


def _text(key: str, **more: Any) -> Column:
    return Column(key, unit="text", **more)


class MetricRow(NamedTuple):
    """A metric of a dataset."""

    label: str
    metric: str
    entry: Described
    definition: str | None = None

    @property
    def unit(self) -> str:
        return metric_named(self.metric).unit

    @property
    def middle(self) -> float | Ends | None:
        return known(self.entry.bounds) if self.entry.median is None else self.entry.median

    @property
    def better(self) -> str | None:
        return metric_named(self.metric).better

    @property
    def basis(self) -> str | None:
        by_kernels = self.entry.source == "kernels"
        return "of the steps measured by the profiler's kernels" if by_kernels else self.entry.reason

    @property
    def says(self) -> bool:
        """Whether people are shown it: it has a value, and is not 0 throughout."""
        return self.middle is not None and not self.zero

    @property
    def zero(self) -> bool:
        return self.entry.min == self.entry.max == self.entry.nulls == 0


def _statistic(key: str, title: str | None = None, media: Sequence[str] = PEOPLE, **more: Any) -> Column:
    """Return the column of a statistic, in the unit of the metric."""
    return Column(key, title, lambda row: row.unit, f"entry.{key}", media=media, **more)


def _in_files(prefix: str, *keys: str, unit: str = "") -> list[Column]:
    return [Column(key, unit=unit, of=f"{prefix}{key}", media=_FILE) for key in keys]


METRICS: Final = (
    *_in_files("", "label", unit="text"),
    _text("metric", why="definition"),
    *_in_files("", "unit", "better", unit="text"),
    Column("median", None, lambda row: row.unit, "middle", why="basis", media=PEOPLE),
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


def metrics_table(label: str, entry: DatasetEntry, definitions: Mapping[str, MetricDefinition]) -> Table:
    """Return every metric of one dataset over its steps and ranks."""
    rows = [MetricRow(label, name, each, _definition(definitions, name)) for name, each in entry.shown.items()]
    told = [row for row in rows if row.says]
    kinds = [row for row in told if row.metric in {f"exposed_{kind}_ms" for kind in KINDS}]
    exposed = entry.described.get("exposed_comm_ms")
    notes = _notes({row.metric: row.entry.reason for row in rows if row.middle is None})
    notes += (
        [f"0 throughout: {', '.join(row.metric for row in rows if row.zero)}."] if any(r.zero for r in rows) else []
    )
    by_kernels = [row.metric for row in told if row.entry.source == "kernels"]
    notes += [f"Of the steps measured by kernels alone: {', '.join(by_kernels)}."] if by_kernels else []
    if exposed and exposed.mean and sum(row.entry.mean or 0 for row in kinds) > 1.001 * exposed.mean:
        notes.append("Kinds of collectives run at the same time: their exposed times overlap, and do not add up.")
    notes += _denominators([row.metric for row in told])
    caption = f"{label}: metrics over steps and ranks"
    columns = [column for column in METRICS if column.key != "over_all" or entry.few_steps]
    return Table(f"metrics-{label}", caption, columns, rows, " ".join(notes) or None, lambda row: row.says)


def _notes(reasons: Mapping[str, str | None]) -> list[str]:
    """Return which metrics have no value, by reason."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        if reason not in (None, NO_PIPELINE):
            by_reason.setdefault(str(reason), []).append(name)
    return [f"Not available: {', '.join(names)}: {reason}." for reason, names in by_reason.items()]


_DENOMINATORS: Final = {
    "overlap_ratio": "hidden/comm",
    "exposed_share": "exposed/step",
    "overlap_efficiency": "saved/min(Tc,Tm)",
    "compute_slowdown": "added/isolated",
}


def _denominators(names: Sequence[str]) -> list[str]:
    told = "; ".join(f"{name} = {_DENOMINATORS[name]}" for name in names if name in _DENOMINATORS)
    return [f"{told}."] if told else []


def _definition(definitions: Mapping[str, MetricDefinition], name: str) -> str | None:
    return definitions[name].definition if name in definitions else None


_SIGNS: Final = {"improvement": "▲", "regression": "▼", "better": "▲", "worse": "▼", "equivalent": "=", "equal": "="}
_SIGNS_OF_THE_OPEN: Final = {"inconclusive": "?", "not tested": "○", "not comparable in time": "?"}
_TONES: Final = {"better": "good", "worse": "bad", "improvement": "good", "regression": "bad", "equivalent": "even"}


def signed(word: str) -> str:
    """Return a verdict or a direction with the sign that says the same without colour."""
    sign = (_SIGNS | _SIGNS_OF_THE_OPEN).get(word)
    return word if sign is None else f"{sign}\u00a0{word}"


@dataclass(frozen=True)
class PairRow:
    """A metric of both sides of a comparison."""

    metric: str
    pair: ComparedMetric
    comparison: Comparison
    definition: str | None = None

    @property
    def reference(self) -> Any:
        return self._side("reference")

    @property
    def candidate(self) -> Any:
        return self._side("candidate")

    def _side(self, side: Side) -> Any:
        """Return the value of a side, its bounds, or `none` where this kind was not used."""
        value, ends = self.pair.value(side), self.pair.ends(side)
        if value is None and ends is None and f"{side}: {NOT_USED}" in (self.pair.judgement_reason or ""):
            return "none"
        return value if ends is None else ends

    @property
    def change(self) -> Effect | None:
        return change_of(self.pair) if is_comparable(self.comparison) else None

    @property
    def interval(self) -> Effect | None:
        return None if self.change is None or self.change.low is None else self.change

    @property
    def corrected(self) -> str | None:
        corrected = known(self.pair.p_corrected)
        return None if corrected is None else f"{corrected:.3g} among all that were tested together (minP)"

    @property
    def told(self) -> str:
        if self.pair.tested:
            return verdict_label(self.pair) if self.pair.verdict else "not judged"
        return str(self.pair.judgement)

    @property
    def signed(self) -> str:
        return signed(self.pair.verdict or self.told) + self.told[len(self.pair.verdict or self.told) :]

    @property
    def marked(self) -> str:
        return f"{mark_of(self.pair.verdict)} {self.pair.verdict}" if self.pair.verdict else self.told

    @property
    def reason(self) -> str | None:
        return self.pair.verdict_reason or self.pair.judgement_reason

    @property
    def reference_label(self) -> str:
        return self.comparison.reference

    @property
    def candidate_label(self) -> str:
        return self.comparison.candidate

    @property
    def reference_launches(self) -> int | None:
        return (self.pair.launches or {}).get("reference")

    @property
    def candidate_launches(self) -> int | None:
        return (self.pair.launches or {}).get("candidate")


def change_of(pair: ComparedMetric) -> Effect | None:
    """Return the effect of a pair; of one launch a side its difference in points, or its change in per cent."""
    if pair.tested:
        return pair.effect
    if pair.unit == "ratio":
        return None if pair.difference is None else Effect("difference", pair.difference, None, None)
    return None if pair.quotient is None else Effect("quotient", pair.quotient - 1, None, None)


def comparison_table(comparison: Comparison, definitions: Mapping[str, MetricDefinition]) -> Table:
    """Return every metric of both sides: the primary and the job step first, then what has a verdict, then the rest."""
    tested, metrics = comparison.tested, comparison.shown
    sides = [
        Column(side, _title(comparison, side), lambda row: row.pair.unit, why="pair.judgement_reason", media=PEOPLE)
        for side in SIDES
    ]
    direction = None if tested else "of the difference; not tested for significance"
    title = "verdict" if tested else "direction"
    columns = (
        *_in_files("", "reference_label", "candidate_label", unit="text"),
        _text("metric", why="definition"),
        _text("told", title=title, of="signed", tip=direction, why="reason", tone=_tone, media=_PAGE),
        *_in_files("pair.", "unit", "better", "role", unit="text"),
        *_in_files("pair.", *SIDES, "difference"),
        *(
            Column(f"difference_{end}", unit="", of=f"pair.difference_interval.{end}", media=_FILE)
            for end in ("low", "high")
        ),
        *_in_files("pair.", "quotient", "p", "p_corrected", "margin"),
        *sides,
        Column("change", unit="effect", media=PEOPLE, why="pair.quotient_reason"),
        Column("interval", unit="interval", media=PEOPLE),
        Column("p", unit="p", of="pair.p", media=PEOPLE, drop=1, tip="of the metric alone", why="corrected"),
        _text("told", title=title, of="marked", tone=_tone, media=(TERMINAL,)),
        *_in_files("", "reference_launches", "candidate_launches", unit="count"),
        *_in_files("pair.", "verdict", unit="text"),
        *_in_files("", "reason", unit="text"),
        _text("role", of="pair.role", media=_PAGE if tested else ()),
    )
    primary = comparison.deciding
    order = sorted(metrics, key=lambda name: (name != primary, name != JOB_STEP, known(metrics[name].verdict) is None))
    rows = [PairRow(name, metrics[name], comparison, _definition(definitions, name)) for name in order]
    zeros = [row.metric for row in rows if is_zero(row.pair)]
    notes = [f"0 on both sides: {', '.join(zeros)}."] if zeros else []
    notes += _notes({row.metric: row.pair.judgement_reason for row in rows if not _says(row) and not is_zero(row.pair)})
    needs = [needed for row in rows if (needed := known(row.pair.needs_launches)) is not None]
    notes += [f"Not tested: needs {max(needs)} launches per side."] if needs else []
    notes += _denominators([row.metric for row in rows if _says(row)])
    of = (
        "medians of the medians of launches"
        if tested
        else "medians"
        if comparison.statistic == "median"
        else MEANS.rstrip(",")
    )
    return Table("metrics", f"Metrics: {of}", columns, rows, " ".join(notes) or None, _says)


def _title(comparison: Comparison, side: Side) -> str:
    label = comparison.label(side)
    return label if len(label) <= _LONGEST_LABEL else side


def _says(row: PairRow) -> bool:
    return row.pair.bounded or not (row.pair.unknown or is_zero(row.pair))


def _tone(row: PairRow) -> str | None:
    word = row.pair.verdict if row.pair.tested else row.pair.judgement
    return _TONES.get(word or "", "open" if row.pair.verdict else None)


_RANK_COLUMNS: Final = (
    _text("rank", of=lambda row: f"rank {row.rank}"),
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
    columns = [
        replace(_RANK_COLUMNS[0], tone=lambda row: "bad" if row.rank in late else None),
        *(column for column in _RANK_COLUMNS[1:] if any(column.value(row) is not None for row in rows)),
    ]
    caption = f"{label}: a step of each rank, medians"
    return Table(f"ranks-{label}", caption, columns, rows) if len(rows) > 1 and len(columns) > 1 else None


class CollectiveRow(NamedTuple):
    """Collectives of one kind, group and size of a run."""

    run: str
    entry: CollectiveEntry
    exact: bool
    """Whether another row would look the same, were its size rounded."""

    @property
    def duration_ms(self) -> float | None:
        """What mean transfer and mean wait add up to; where either is unknown, the mean duration."""
        transfer, wait = self.entry.transfer_ms.mean, self.entry.wait_ms.mean
        return self.entry.duration_ms.mean if transfer is None or wait is None else transfer + wait

    @property
    def over_all(self) -> str | None:
        mean = self.entry.duration_ms.mean
        return None if mean is None else f"of all, matched on every rank or not: {TEXT.quantity(mean, 'ms')}"

    @property
    def bound(self) -> str | None:
        entry = self.entry
        bound = f"transfer is an upper bound: {entry.why_upper_bound}" if entry.transfer_is_upper_bound else None
        return entry.transfer_ms.reason or bound


def collectives_table(entries: Mapping[str, DatasetEntry], definitions: Mapping[str, MetricDefinition]) -> Table | None:
    """Return the collectives of every dataset, by kind, group, size of the group and bytes. None without any."""
    alike = Counter(_named(label, row) for label, entry in entries.items() for row in entry.matched)
    rows = [
        CollectiveRow(label, row, alike[_named(label, row)] > 1)
        for label, entry in entries.items()
        for row in sorted(entry.matched, key=lambda row: (row.duration_ms.mean or 0) * row.rows, reverse=True)
    ]
    if not rows:
        return None

    def column(name: str, title: str, statistic: str = "mean", drop: int = 0) -> Column:
        tip = _definition(definitions, name)
        return Column(name, title, of=f"entry.{name}.{statistic}", why=f"entry.{name}.reason", tip=tip, drop=drop)

    columns = (
        _text("kind", of="entry.kind"),
        _text("run", media=PEOPLE if len(entries) > 1 else _PAGE),
        _text("group", of=lambda row: group_title(row.entry.group).removeprefix("group "), drop=1),
        Column("ranks", unit="count", of="entry.group_size"),
        Column("bytes", "size", lambda row: "B" if row.exact else "bytes", "entry.bytes"),
        Column("count", unit="count", of="entry.collectives", drop=2),
        Column("duration_ms", "duration", why="over_all"),
        Column(
            "transfer_ms",
            "= transfer",
            of="entry.transfer_ms.mean",
            why="bound",
            tip=_definition(definitions, "transfer_ms"),
        ),
        column("wait_ms", "+ wait"),
        column("queued_ms", "queued before", drop=4),
        column("algbw_gb_per_s", "algbw", "median", 3),
        column("busbw_gb_per_s", "busbw", "median"),
    )
    entries_of = [row.entry for row in rows]
    reasons = {f"No transfer time of {e.kind}: {e.transfer_ms.reason}." for e in entries_of if e.transfer_ms.reason}
    reasons |= {f"{row.entry.kind}: {row.bound}." for row in rows if row.bound and not row.entry.transfer_ms.reason}
    caption = "Collectives: means per collective and rank, bandwidths medians, after warm-up"
    return Table("collectives", caption, columns, rows, " ".join(sorted(reasons)) or None)


def _named(label: str, row: CollectiveEntry) -> tuple[object, ...]:
    return label, row.kind, row.group, row.group_size, TEXT.size(row.bytes)


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
            _text("what", title=title.lower()),
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
    columns = [_text(""), *map(_text, sides), *([_text("differs", tone=_if_yes)] if mark else [])]
    return Table(key, caption, columns, rows)


def _if_yes(row: Mapping[str, str]) -> str | None:
    return "open" if row["differs"] else None


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
    note = noted or (None if gains.gains else "None of the changes that were tried gains anything worth naming.")
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
