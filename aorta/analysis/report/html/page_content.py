"""The sections of the page in the order in which they are read, from datasets and a summary.

Must not reach for the network, or put anything into the page that Jinja's escaping or `assembly.json_for_script` has
not made harmless.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from aorta.analysis.aggregate import LabelledRun
from aorta.analysis.attribution.breakdown import sentence_rows
from aorta.analysis.compare.verdict import is_comparable
from aorta.analysis.documents import as_json, known
from aorta.analysis.documents.comparison import Attribution, Comparison, GateEntry
from aorta.analysis.documents.dataset import DatasetEntry
from aorta.analysis.documents.summary import Summary
from aorta.analysis.formatting import PAGE
from aorta.analysis.host_bound import DRAWN, HOST_BOUND
from aorta.analysis.report.html import page_tables
from aorta.analysis.report.html.assembly import assemble, for_scripts
from aorta.analysis.report.html.autopsy_section import page_autopsies
from aorta.analysis.report.html.bokeh_chart import Chart
from aorta.analysis.report.html.source_tables import environment_of, health_of, left_out, of_launches, page_kernels
from aorta.analysis.report.html.step_charts import MAPPED, map_charts, step_charts
from aorta.analysis.report.html.summary_charts import (
    breakdown_chart,
    comm_charts,
    effect_charts,
    kinds_drawn,
    launch_charts,
)
from aorta.analysis.report.html.timeline_chart import payload, switches, timeline_charts
from aorta.analysis.report.html.timeline_data import TimelineSpans, spans_of
from aorta.analysis.report.html.verdict_cards import verdict_of
from aorta.analysis.report.palette import SERIES
from aorta.analysis.report.step_curves import Series

SPAN_BUDGET: Final = 36_000
"""Of all timelines together: about 30 bytes each in the file."""
SHOWN_RANKS: Final = 2
"""Before anybody chooses, so that the first screen holds a timeline."""
PRINTED_ROWS: Final = 12
"""Of a table on paper; the style sheet hides the others."""


@dataclass(frozen=True)
class Legend:
    """One dataset: its number, its place in the comparison, and its colour."""

    number: int
    label: str
    side: str
    color: str


def page_html(
    datasets: Mapping[str, LabelledRun], summary: Summary, named: Callable[[Any], Any] = lambda found: found
) -> str:
    """The whole page as text; `named` as in `write_page`, for what comes from the records and not from the summary."""
    entries = {label: summary.datasets[label] for label in datasets}
    comparison = known(summary.comparison)
    order = _in_order(list(datasets), comparison)
    datasets, entries = {label: datasets[label] for label in order}, {label: entries[label] for label in order}
    spans = _spans(datasets, entries)
    for label, each in zip(datasets, spans, strict=True):
        each.notes.extend([f"{label}: {DRAWN}"] if datasets[label].pace.drawn_as_ranges else [])
    series = {label: Series(dataset) for label, dataset in datasets.items()}
    ranks = [(len(dataset.run.ranks), dataset.run.health.world_size) for dataset in datasets.values()]
    over_steps, step_notes = step_charts(series)
    for label, dataset in datasets.items():
        basis = dataset.pace.basis("overlap_ratio")
        if basis.source != "marks":
            step_notes.append(f"{label}: no overlap ratio over the steps: {basis.reason or HOST_BOUND}")
    maps, mapped = map_charts(series, ranks)
    charts: dict[str, list[Chart]] = {
        "effects": effect_charts(comparison) if comparison else [],
        "launches": launch_charts(comparison) if comparison else [],
        "breakdown": _some(breakdown_chart(datasets)),
        "timelines": timeline_charts(spans),
        "steps": over_steps,
        "maps": maps,
        "collectives": comm_charts(entries),
    }
    definitions = summary.metrics
    context = {
        "version": summary.aorta_version,
        "printed_rows": PRINTED_ROWS,
        "title": _title(list(datasets), comparison),
        "verdict": verdict_of(summary),
        "comparison": comparison,
        "gate": _gate(known(summary.gate)),
        "autopsies": page_autopsies(entries),
        "exposed": {label: page_tables.exposed_tables(label, entry) for label, entry in entries.items()},
        "attribution": _attribution(comparison.attribution if comparison and is_comparable(comparison) else None),
        "gains": [page_tables.page_gains(label, entry.what_if) for label, entry in entries.items()],
        "answered": comparison.candidate if comparison else next(iter(entries)),
        "legends": [_legend(number, label, comparison) for number, label in enumerate(datasets)],
        "charts": charts,
        "spans": spans,
        "switches": switches(spans),
        "mapped": [(name, *MAPPED[name]) for name in mapped],
        "steps_a_point": {label: each.steps_a_point for label, each in series.items() if each.steps_a_point > 1},
        "step_notes": step_notes,
        "no_job_step": {label: why for label, each in series.items() if (why := each.why_no_job_step) is not None},
        "of_launches": of_launches(entries),
        "kinds": kinds_drawn(entries),
        "metrics": page_tables.metrics_table(comparison, definitions) if comparison else None,
        "distributions": [
            page_tables.dataset_table(label, entry, definitions) for label, entry in entries.items() if entry.metrics
        ],
        "collectives": page_tables.collectives_table(entries, definitions),
        "pairs": page_tables.pairs_table(comparison) if comparison else None,
        "differences": page_tables.differences_table(comparison) if comparison else None,
        "left_out": left_out(comparison),
        "kernels": [made for label, entry in entries.items() if (made := page_kernels(label, entry.traces))],
        "health": [named(health_of(dataset, entries[label])) for label, dataset in datasets.items()],
        "environment": named(environment_of(datasets)),
        "definitions": page_tables.definitions_table(definitions),
        "conventions": summary.conventions,
    }
    data = {
        **for_scripts(),
        "timelines": payload(spans),
        "kindColors": {each["name"]: each["color"] for each in context["switches"]["kinds"]},
        "maps": mapped,
        "labels": list(datasets),
    }
    return assemble(context, [chart for each in charts.values() for chart in each], data)


def _some(chart: Chart | None) -> list[Chart]:
    return [] if chart is None else [chart]


def _in_order(labels: Sequence[str], comparison: Comparison | None) -> list[str]:
    """The reference first, then the candidate: the colours of both are those of every picture."""
    sides = [comparison.reference, comparison.candidate] if comparison else []
    return [*sides, *(label for label in labels if label not in sides)]


def _title(labels: Sequence[str], comparison: Comparison | None) -> str:
    return f"{comparison.candidate} against {comparison.reference}" if comparison else ", ".join(labels)


def _legend(number: int, label: str, comparison: Comparison | None) -> Legend:
    sides = {comparison.reference: "reference", comparison.candidate: "candidate"} if comparison else {}
    return Legend(number, label, sides.get(label, ""), SERIES[number % len(SERIES)][0])


def _spans(datasets: Mapping[str, LabelledRun], entries: Mapping[str, DatasetEntry]) -> list[TimelineSpans]:
    share = SPAN_BUDGET // max(1, len(datasets))
    named = {
        label: [found.rank for found in entry.stragglers or () if found.rank is not None]
        for label, entry in entries.items()
    }
    return [spans_of(dataset, share, SHOWN_RANKS, named[label]) for label, dataset in datasets.items()]


def _gate(gate: GateEntry | None) -> str | None:
    """What a gate said, in a sentence."""
    if gate is None:
        return None
    told = "; ".join(f"{each.condition}: {each.reason}" for each in gate.conditions)
    return f"Gate: {gate.outcome} (exit code {gate.exit_code}). {told}"


_MEANS: Final = ("exposed_comm_ms", "comm_ms", "compute_comm_ms", "compute_ms", "window_ms", "achieved_tflops")
_REASONS: Final = ("achieved_tflops_reason",)
_SHOWN: Final = ("what", "reference_ms", "candidate_ms", "difference_ms", "share")


def _attribution(found: Attribution | None) -> dict[str, Any] | None:
    """Where the difference is: a sentence, its causes, and every way of breaking it down."""
    if found is None:
        return None
    parts = as_json(sentence_rows(found))
    ways = as_json(found.dimensions or {})
    for name, rows in (("stragglers", found.stragglers), ("computing", found.computing)):
        # No breakdowns: their shares would not add up to the difference.
        ways[name] = [{key: each for key, each in row.items() if key != "share"} for row in as_json(rows or [])]
    sides = {"reference": as_json(found.reference), "candidate": as_json(found.candidate)} if found.reference else {}
    means = {
        side: {key: PAGE.number(told[key], "ms") for key in _MEANS if told[key] is not None}
        | {key: told[key] for key in _REASONS if told[key]}
        for side, told in sides.items()
    }
    return {
        "sentence": found.sentence or found.reason,
        "definition": found.definition,
        "means": page_tables.facts_table(
            "attribution-means", "Each side, mean over steps and ranks", means, numbers=True
        )
        if means
        else None,
        "causes": _rows("attribution", "The numbers behind it: mean ms per step and rank", parts),
        "ways": [_rows(f"attribution-{name}", f"By {name}", rows) for name, rows in ways.items() if rows],
    }


def _rows(key: str, caption: str, rows: Sequence[Mapping[str, Any]]) -> page_tables.Table | None:
    shown = [{name: row.get(name) for name in _SHOWN if name in row} for row in rows]
    return page_tables.generic_table(key, caption, shown) if shown else None
