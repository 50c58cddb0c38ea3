"""The tables of runs and comparisons, and the facts and notes about their sources: what terminal and page show alike.

Must not compute anything but the duration that transfer and wait add up to, or show a difference of other work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, Final

from aorta.analysis.aggregate import NO_PIPELINE, LabelledRun
from aorta.analysis.cautions import cutoff_line, sampling_line
from aorta.analysis.compare.run_comparison import NOT_USED
from aorta.analysis.compare.verdict import NOT_COMPARABLE, NOT_SETTLED, NOT_TESTED, SHIFTED, is_comparable
from aorta.analysis.devices import device_line
from aorta.analysis.headline import verdict_label
from aorta.documents import as_json, known
from aorta.documents.comparison import SIDES, ComparedMetric, Comparison, Effect, MetricDefinition
from aorta.documents.dataset import MEANS, DatasetEntry
from aorta.documents.explanations import WhatIf
from aorta.documents.formatting import TEXT, is_zero, value_text
from aorta.documents.metrics import JOB_STEP, RATIO_PARTS, metric_named
from aorta.report.tables import ON_PAGE, TERMINAL, Column, Table, text_column
from aorta.terminal_style import mark_of
from aorta.timeline.classes import KINDS

_PAGE: Final = (ON_PAGE,)
SHOWN_MARGINALS: Final = 5
"""Parts of the communication whose gain, were they free, is listed; in `summary.json` all kinds of collectives are."""
_LONGEST_LABEL: Final = 16
"""Characters of a label that can stand above a column; above it stands `reference` or `candidate` instead."""


def _statistic(key: str, title: str | None = None, **more: Any) -> Column:
    return Column(key, title, itemgetter("unit"), f"entry.{key}", **more)


_METRICS: Final = (
    Column("metric", why="definition"),
    Column("median", None, itemgetter("unit"), "middle", why="basis"),
    text_column("interval", "95 % interval", tip="of the median over all steps"),
    _statistic("over_all", "over all", media=(TERMINAL,), drop=1),
    _statistic("p5"),
    _statistic("p95"),
    _statistic("mean", drop=2),
    _statistic("min", media=_PAGE),
    _statistic("max", media=_PAGE),
    _statistic("rank_spread", "rank spread", drop=1, tip="largest minus smallest of the medians of the ranks"),
    _statistic("ratio_of_sums", "ratio of sums", media=_PAGE, tip="of milliseconds summed over steps"),
    Column("count", "values", of="entry.count", media=_PAGE),
    Column("nulls", of="entry.nulls", media=_PAGE),
)


def metrics_table(label: str, entry: DatasetEntry) -> Table:
    """Return every metric of one dataset over its steps and ranks that has a value and is not 0 throughout."""
    metrics = entry.shown
    zeros = [name for name, metric in metrics.items() if metric.min == metric.max == metric.nulls == 0]
    middles = {
        name: known(metric.bounds) if metric.median is None else metric.median for name, metric in metrics.items()
    }
    shown = {name: metrics[name] for name, middle in middles.items() if middle is not None and name not in zeros}
    by_kernels = [name for name, metric in shown.items() if metric.source == "kernels"]
    rows = []
    for name, metric in shown.items():
        unit, ends = metric_named(name).unit, known(metric.interval)
        of_all = f"{TEXT.number(ends.at_least, unit)} to {TEXT.quantity(ends.at_most, unit)}" if ends else ""
        basis = "of the steps measured by the profiler's kernels" if name in by_kernels else metric.reason
        facts = {"unit": unit, "definition": metric_named(name).definition, "basis": basis}
        rows.append({"metric": name, "entry": metric, "middle": middles[name], "interval": of_all} | facts)
    notes = [
        *_unavailable({name: metrics[name].reason for name, middle in middles.items() if middle is None}),
        *_listed("0 throughout", zeros),
        *_listed("Of the steps measured by kernels alone", by_kernels),
    ]
    kinds = sum(shown[name].mean or 0 for kind in KINDS if (name := f"exposed_{kind}_ms") in shown)
    if "exposed_comm_ms" in shown and kinds > 1.001 * (shown["exposed_comm_ms"].mean or 0) > 0:
        notes.append("Kinds of collectives run at the same time: their exposed times overlap, and do not add up.")
    notes += _denominators(shown)
    with_these = {"over_all": entry.few_steps, "interval": known(entry.sampling)}
    columns = [column for column in _METRICS if with_these.get(column.key, True)]
    return Table(f"metrics-{label}", f"{label}: metrics over steps and ranks", columns, rows, " ".join(notes) or None)


def _unavailable(reasons: Mapping[str, str | None]) -> list[str]:
    by_reason: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        if reason not in (None, NO_PIPELINE):
            by_reason.setdefault(str(reason), []).append(name)
    return [f"Not available: {', '.join(names)}: {reason}." for reason, names in by_reason.items()]


def _listed(what: str, names: Sequence[str]) -> list[str]:
    return [f"{what}: {', '.join(names)}."] if names else []


def _denominators(names: Iterable[str]) -> list[str]:
    stated = [f"{name} = {' / '.join(RATIO_PARTS[name])}" for name in names if name in RATIO_PARTS]
    return [f"{'; '.join(stated)}."] if stated else []


LOOKS: Final = {
    **dict.fromkeys(("improvement", "better"), ("good", "✓")),
    **dict.fromkeys(("regression", "worse"), ("bad", "✗")),
    **dict.fromkeys(("equivalent", "equal"), ("even", "=")),
    **dict.fromkeys(("inconclusive", NOT_COMPARABLE, NOT_SETTLED), ("open", "?")),
    SHIFTED: ("open", "~"),
    NOT_TESTED: ("open", "○"),
}
"""Verdict, or direction of a difference -> its tone and sign."""


def signed(word: str) -> str:
    """Return a verdict or a direction with the sign that says the same without colour."""
    return f"{LOOKS[word][1]}\u00a0{word}" if word in LOOKS else word


def change_of(pair: ComparedMetric) -> Effect | None:
    """Return the effect of a pair; of one launch a side its difference in points, or its change in per cent."""
    if pair.tested:
        return pair.test.effect
    if pair.unit == "ratio":
        return None if pair.difference is None else Effect("difference", pair.difference, None, None)
    return None if pair.quotient is None else Effect("quotient", pair.quotient - 1, None, None)


def _pair_row(name: str, pair: ComparedMetric, comparison: Comparison) -> dict[str, Any]:
    """Return the row of a metric of both sides, without a change where these did other work or did not take turns."""
    change = change_of(pair) if is_comparable(comparison) else None
    test = known(pair.test)
    verdict, corrected = pair.verdict, test and test.p_corrected
    word = verdict or ("not judged" if test else str(pair.judgement))
    row: dict[str, Any] = {
        "metric": name,
        "pair": pair,
        "unit": pair.unit,
        "definition": metric_named(name).definition,
        "change": change,
        "interval": change and change.bounded,
        "test": test,
        "tested_p": test.p if test and verdict else None,
        "corrected": corrected and f"{corrected:.3g} among all that were tested together (minP)",
        "signed": signed(word) + (verdict_label(pair)[len(word) :] if verdict else ""),
        "marked": f"{mark_of(verdict)} {word}".strip(),
        "tone": LOOKS.get(word, (None, ""))[0],
        "reason": (test and test.verdict_reason) or pair.judgement_reason,
    }
    for side in SIDES:
        own = pair.side(side)
        unused = own.reason == NOT_USED  # this kind of communication
        row[side] = own.ends or ("none" if unused else own.value)
    return row


def comparison_table(comparison: Comparison) -> Table:
    """Return every metric of both sides that has a value, or bounds, and is not 0 on both: the primary and the job step
    first, then what has a verdict, then the rest.
    """
    tested, metrics = comparison.tested, comparison.shown
    labels = {side: comparison.label(side) for side in SIDES}
    titles = {side: label if len(label) <= _LONGEST_LABEL else side for side, label in labels.items()}
    tip = None if tested else "of the difference; not tested for significance"
    verdict = partial(text_column, "told", "verdict" if tested else "direction", tone=itemgetter("tone"), tip=tip)
    columns = (
        Column("metric", why="definition"),
        verdict(of="signed", why="reason", media=_PAGE),
        *(Column(side, titles[side], itemgetter("unit"), why="pair.judgement_reason") for side in SIDES),
        Column("change", unit="effect", why="pair.quotient_reason"),
        Column("interval", unit="interval"),
        Column("p", unit="p", of="tested_p", drop=1, tip="of the metric alone", why="corrected"),
        verdict(of="marked", media=(TERMINAL,)),
        Column("role", of="test.role", media=_PAGE if tested else ()),
    )

    def importance(name: str) -> tuple[bool, bool, bool]:
        return name != comparison.deciding, name != JOB_STEP, metrics[name].verdict is None

    order = sorted(metrics, key=importance)
    zeros = [name for name in order if is_zero(metrics[name])]
    absent = [name for name in order if metrics[name].unknown and not metrics[name].bounded]
    rows = [_pair_row(name, metrics[name], comparison) for name in order if name not in (*zeros, *absent)]
    tests = [pair.test for pair in metrics.values() if tested]
    needs = [test.least_launches for test in tests if test.least_launches is not None]
    notes = [
        *_listed("0 on both sides", zeros),
        *_unavailable({name: metrics[name].judgement_reason for name in absent}),
        *([f"Not tested: needs {max(needs)} launches per side."] if needs else []),
        *_denominators([row["metric"] for row in rows]),
    ]
    medians = "medians of the medians of launches" if tested else "medians"
    of = MEANS.rstrip(",") if comparison.statistic == MEANS else medians
    return Table("metrics", f"Metrics: {of}", columns, rows, " ".join(notes) or None)


def collectives_table(entries: Mapping[str, DatasetEntry]) -> Table | None:
    """Return the collectives of every dataset, by kind, group, size of the group and bytes. None without any.

    The duration is what mean transfer and mean wait add up to; where either is unknown, the mean duration.
    """
    rows: list[dict[str, Any]] = []
    reasons = set[str]()
    for label, dataset in entries.items():
        for entry in sorted(dataset.matched, key=lambda row: (row.duration_ms.mean or 0) * row.rows, reverse=True):
            transfer, wait, whole = entry.transfer_ms.mean, entry.wait_ms.mean, entry.duration_ms.mean
            why = "some ends are the end of the caller's wait"
            if entry.starts_open:
                why = "the host launches late, and the wait for a launch may be in it"
            bound = f"transfer is an upper bound: {why}" if entry.transfer_is_upper_bound else None
            if entry.transfer_ms.reason:
                reasons.add(f"No transfer time of {entry.kind}: {entry.transfer_ms.reason}.")
            elif bound:
                reasons.add(f"{entry.kind}: {bound}.")
            rows.append(
                {
                    "run": label,
                    "entry": entry,
                    "group": entry.group_title.removeprefix("group "),
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
        Column("kind", of="entry.kind"),
        text_column("run", media=(TERMINAL, ON_PAGE) if len(entries) > 1 else ()),
        Column("group", drop=1),
        Column("ranks", unit="count", of="entry.group_size"),
        Column("bytes", "size", lambda row: "exact bytes" if alike[row["alike"]] > 1 else "bytes", "entry.bytes"),
        Column("count", of="entry.collectives", drop=2),
        Column("duration_ms", "duration", why="all"),
        statistic("transfer_ms", "= transfer", why="bound"),
        statistic("wait_ms", "+ wait"),
        statistic("queued_ms", "queued before", drop=4),
        statistic("algbw_gb_per_s", "algbw", "median", drop=3),
        statistic("busbw_gb_per_s", "busbw", "median"),
    )
    caption = "Collectives: means per collective and rank, bandwidths medians, after warm-up"
    return Table("collectives", caption, columns, rows, " ".join(sorted(reasons)) or None)


def pairs_table(comparison: Comparison) -> Table | None:
    """Return the collectives that both sides issued, candidate against reference. None without any."""
    pairs = comparison.collectives
    if not pairs:
        return None

    def change(name: str) -> Column:
        return Column("change", unit="effect", of=lambda row: change_of(getattr(row, name)), drop=2)

    columns = [
        Column("kind"),
        Column("group", of=lambda row: row.group_title.removeprefix("group "), drop=3),
        Column("ranks", unit="count", of="group_size"),
        Column("bytes", "size"),
    ]
    for name, title, drop in (("transfer_ms", "transfer", 0), ("wait_ms", "wait", 0), ("busbw_gb_per_s", "busbw", 1)):
        why = f"{name}.judgement_reason"
        columns += [
            Column(name, f"{title} {comparison.label(side)}", unit="", of=f"{name}.{side}.value", why=why, drop=drop)
            for side in SIDES
        ]
        columns.append(change(name))
    alone = comparison.collectives_on_one_side
    note = f"On one side only: {alone['reference']} of the reference, {alone['candidate']} of the candidate."
    caption = "The same collectives on both sides: medians, in ms and GB/s"
    return Table("pairs", caption, columns, pairs, note if any(alone.values()) else None)


def gains_tables(label: str, gains: WhatIf) -> tuple[Table, Table]:
    """Return the changes that would gain most, and what a step would gain were one part of the communication free."""
    gain = Column("gain_ms", "gain per step", unit="gain", of=lambda row: row)
    changes = (
        text_column("name", title="change"),
        gain,
        Column("share", "of a step", unit="ratio"),
        text_column("change", title="--set"),
    )
    noted = "; ".join(f"{row.name}: {note}" for row in gains.gains for note in row.notes)
    note = noted or (None if gains.gains else "No change that was tried gains enough to mention.")
    free = (
        text_column("name", title="what is free"),
        text_column("what", title="is", media=_PAGE),
        gain,
        text_column("change", title="--set"),
    )
    parts = [*gains.marginals[:SHOWN_MARGINALS], *gains.bounds]
    return (
        Table(f"gains-{label}", "The changes that would gain most, each alone", changes, gains.gains, note),
        Table(
            f"marginals-{label}", "By how much a step would be shorter, if one part were free; then bounds", free, parts
        ),
    )


def gains_basis(gains: WhatIf) -> str:
    """Return what the gains rest on."""
    return (
        f"A replay of the last {gains.steps} steps of {TEXT.quantity(gains.step_ms, 'ms')} on {gains.ranks} ranks, "
        f"with {TEXT.percent(gains.level, 0)} intervals. Gains overlap: do not add them up."
    )


def facts_table(key: str, caption: str, sides: Mapping[str, Mapping[str, object]], *, mark: bool = False) -> Table:
    """Return the facts of several datasets beside each other, one row a fact; `mark`: name the rows whose values
    differ.
    """
    rows = []
    for name in dict.fromkeys(name for facts in sides.values() for name in facts):
        texts = {label: value_text(facts[name]) if name in facts else "(absent)" for label, facts in sides.items()}
        rows.append({"": name, "differs": "yes" if len(set(texts.values())) > 1 else ""} | texts)
    columns = [text_column(name) for name in ("", *sides)]
    if mark:
        columns.append(text_column("differs", tone=lambda row: "open" if row["differs"] else None))
    return Table(key, caption, columns, rows)


def differences_table(comparison: Comparison) -> Table:
    """Return the facts that differ between the sides."""
    sides = {
        comparison.label(side): {
            difference.key: difference.value(side) for difference in comparison.manifest_differences
        }
        for side in SIDES
    }
    return facts_table("differences", "What differs between the runs", sides)


def definitions_table(definitions: Mapping[str, MetricDefinition]) -> Table:
    """Return what each metric is."""
    rows = [{"metric": name} | as_json(definition) for name, definition in definitions.items()]
    better = text_column("better", of=lambda row: row["better"] or "neither")
    columns = [text_column("metric"), text_column("unit"), better, text_column("definition")]
    return Table("definitions", "What each metric is", columns, rows)


def facts_of(dataset: LabelledRun, entry: DatasetEntry) -> dict[str, Any]:
    """Return what was read of a run, and how completely."""
    health, steps, source = dataset.run.health, entry.steps, entry.source
    calibrated = steps.rank_steps_left_out_as_calibration
    gaps = sum(gap.steps or 0 for gap in health.gaps if not gap.observed)
    coverage = f"{gaps} gaps" if gaps else "complete"
    share = sampling.known_share if (sampling := known(entry.sampling)) is not None else None
    facts: dict[str, Any] = {
        "folder": source.path,
        "run": source.run_id,
        "platform": source.platform,
        "strategy": source.parallel,
        "backend": source.backend,
        "instrument mode": ", ".join(health.instrument_modes),
        "hosts": source.hosts,
        "ranks read": health.ranks,
        "used": TEXT.steps_used(entry),
        "sampling": sampling_line(entry),
        "AORTA's own work": None if not share else f"{TEXT.percent(share, 2)} of the step, on average",
        "left out as warm-up": TEXT.count(steps.rank_steps_left_out_as_warmup, "record"),
        "measured by kernels": TEXT.count(calibrated, "record") if calibrated else None,
        "isolated baselines": ", ".join(f"{count} {phase}" for phase, count in steps.isolated_rank_steps.items()),
        "coverage": "not known: a trace does not count what was issued" if entry.traces else coverage,
        "launches": entry.launches or None,
        "this launch": entry.representative or None,
        "launches left out": [f"{launch.path}: {launch.reason}" for launch in entry.left_out or ()],
        "devices": device_line(entry.devices),
        "stalls": cutoff_line(entry),
    }
    return {name: fact for name, fact in facts.items() if fact or name in ("run", "platform", "strategy", "backend")}
