"""The sections of the page in the order in which they are read, and the page as one file: template, styles with the
palette of both themes, scripts and data, and the policy that lets nothing else run.

The content security policy forbids every request, and every script but those whose hashes it names. A word of a record
that found its way into the page as markup could still do nothing. Must not load anything, in this process or in the
browser, put anything into the page that Jinja's escaping or `json_for_script` has not made harmless, judge evidence
(`aorta.autopsy.judge` does), or name a colour that `report.palette` does not have.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from aorta.analysis.aggregate import LabelledRun
from aorta.analysis.attribution.breakdown import sentence_rows
from aorta.analysis.cautions import DRAWN, HOST_BOUND, autopsy_title
from aorta.analysis.collective_metrics import straggler_sentences
from aorta.analysis.compare.headline import is_comparable
from aorta.analysis.documents import known
from aorta.analysis.documents.comparison import AttributedSide, Attribution, Summary
from aorta.analysis.documents.dataset import DatasetEntry, WhatIf
from aorta.analysis.formatting import PAGE, first_upper, json_text
from aorta.analysis.report.figure_data import Series
from aorta.analysis.report.html.bokeh_chart import Chart, document, script
from aorta.analysis.report.html.step_charts import MAPPED, map_charts, step_charts
from aorta.analysis.report.html.summary_charts import (
    breakdown_chart,
    comm_charts,
    effect_charts,
    kinds_drawn,
    launch_charts,
)
from aorta.analysis.report.html.timeline_chart import payload, switches, timeline_charts
from aorta.analysis.report.html.verdict_cards import verdict_of
from aorta.analysis.report.kernels import kernel_notes, kernel_tables
from aorta.analysis.report.palette import MEANINGS, SURFACES, text_on
from aorta.analysis.report.run_tables import (
    attribution_table,
    collectives_table,
    comparison_table,
    definitions_table,
    differences_table,
    exposed_tables,
    facts_table,
    gains_basis,
    gains_tables,
    metrics_table,
    named_ranks,
    pairs_table,
    rank_table,
)
from aorta.analysis.report.source_facts import environment_of, health_of, left_out, of_launches
from aorta.analysis.report.tables import ROW_LIMIT, Column, Table, page_table
from aorta.analysis.report.timeline import TimelineSpans, spans_of
from aorta.autopsy.judge import process_label
from aorta.autopsy.report import waiting_sentence
from aorta.command_line import rounded_time
from aorta.records.files import NOT_UTF8
from aorta.redaction import redact

PAGE_FILE: Final = "report.html"
SPAN_BUDGET: Final = 36_000
"""Of all timelines together: about 30 bytes each in the file."""
SHOWN_RANKS: Final = 2
"""Before anybody chooses, so that the first screen holds a timeline."""
PRINTED_ROWS: Final = 12
"""Of a table on paper; the style sheet hides the others."""


@dataclass(frozen=True)
class Legend:
    """One dataset: its number, and its place in the comparison."""

    number: int
    label: str
    side: str


def write_page(
    datasets: Mapping[str, LabelledRun],
    summary: Summary,
    path: Path,
    named: Callable[[Any], Any] = lambda found: found,
) -> None:
    """Write the page of a report to `path`, replacing what is there.

    Args:
        datasets: label -> dataset, as `summary.datasets` has them; the reference and the candidate among them.
        summary: the content of `summary.json`.
        named: puts the name of an archive in place of the temporary folder that it was unpacked to.

    Raises:
        OSError: `path` cannot be written.
    """
    path.write_text(page_html(datasets, summary, named), encoding="utf-8", errors=NOT_UTF8, newline="\n")


def page_html(datasets: Mapping[str, LabelledRun], summary: Summary, named: Callable[[Any], Any]) -> str:
    """Return the page as text; `named` as in `write_page`, for what comes from records and not from the summary."""
    entries = {label: summary.datasets[label] for label in datasets}
    comparison = known(summary.comparison)
    sides = [comparison.reference, comparison.candidate] if comparison else []
    order = [*sides, *(label for label in datasets if label not in sides)]  # their colours are those of every picture
    datasets, entries = {label: datasets[label] for label in order}, {label: entries[label] for label in order}
    share, spans = SPAN_BUDGET // max(1, len(datasets)), list[TimelineSpans]()
    for label, dataset in datasets.items():
        late = [found.rank for found in named_ranks(entries[label]) if found.rank is not None]
        spans.append(spans_of(dataset, share, SHOWN_RANKS, late))
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
        "breakdown": breakdown_chart(datasets),
        "timelines": timeline_charts(spans),
        "steps": over_steps,
        "maps": maps,
        "collectives": comm_charts(entries),
    }
    definitions, switched, gate = summary.metrics, switches(spans), known(summary.gate)
    sides_of = {comparison.reference: "reference", comparison.candidate: "candidate"} if comparison else {}
    if gate is not None:
        stated = "; ".join(f"{each.condition}: {each.reason}" for each in gate.conditions)
    context = {
        "version": summary.aorta_version,
        "printed_rows": PRINTED_ROWS,
        "title": f"{comparison.candidate} against {comparison.reference}" if comparison else ", ".join(datasets),
        "verdict": verdict_of(summary),
        "comparison": comparison,
        "gate": None if gate is None else f"Gate: {gate.outcome} (exit code {gate.exit_code}). {stated}",
        "autopsies": page_autopsies(entries),
        "findings": _findings(entries),
        "exposed": {label: exposed_tables(label, entry) for label, entry in entries.items()},
        "attribution": _attribution(comparison.attribution if comparison and is_comparable(comparison) else None),
        "ranks": [
            told for label, entry in entries.items() if named_ranks(entry) and (told := rank_table(label, entry))
        ],
        "gains": [_gains(label, entry.what_if) for label, entry in entries.items()],
        "answered": comparison.candidate if comparison else next(iter(entries)),
        "legends": [Legend(number, label, sides_of.get(label, "")) for number, label in enumerate(datasets)],
        "charts": charts,
        "spans": spans,
        "switches": switched,
        "mapped": [(name, *MAPPED[name]) for name in mapped],
        "steps_a_point": {label: each.steps_a_point for label, each in series.items() if each.steps_a_point > 1},
        "step_notes": step_notes,
        "no_job_step": {label: why for label, each in series.items() if (why := each.why_no_job_step) is not None},
        "of_launches": of_launches(entries),
        "kinds": kinds_drawn(entries),
        "metrics": comparison_table(comparison) if comparison else None,
        "distributions": [metrics_table(label, entry) for label, entry in entries.items() if entry.metrics],
        "collectives": collectives_table(entries),
        "pairs": pairs_table(comparison) if comparison else None,
        "differences": differences_table(comparison) if comparison else None,
        "left_out": left_out(comparison),
        "kernels": [
            {"label": label, "tables": kernel_tables(label, entry.traces), "notes": kernel_notes(entry.traces)}
            for label, entry in entries.items()
            if entry.traces
        ],
        "health": [named(health_of(dataset, entries[label])) for label, dataset in datasets.items()],
        "environment": named(environment_of(datasets)),
        "definitions": definitions_table(definitions),
        "conventions": summary.conventions,
    }
    data = {
        **for_scripts(),
        "timelines": payload(spans),
        "kindColors": {each["name"]: each["color"] for each in switched["kinds"]},
        "maps": mapped,
        "labels": list(datasets),
    }
    return assemble(context, [chart for each in charts.values() for chart in each], data)


def _findings(entries: Mapping[str, DatasetEntry]) -> list[str]:
    """Return which rank the others wait for, and what rules found, each with its place."""
    return [
        f"{label}: {sentence}" if len(entries) > 1 else first_upper(sentence)
        for label, entry in entries.items()
        for sentence in (*straggler_sentences(entry), *(each.sentence for each in known(entry.findings) or ()))
    ]


_MEANS: Final = ("exposed_comm_ms", "comm_ms", "compute_comm_ms", "compute_ms", "window_ms", "achieved_tflops")


def _attribution(attribution: Attribution | None) -> dict[str, Any] | None:
    """Return where the difference is: a sentence, its causes, and every way of breaking it down."""
    if attribution is None:
        return None
    sides = {"reference": attribution.reference, "candidate": attribution.candidate} if attribution.reference else {}
    means = {side: _means(row) for side, row in sides.items()}
    ways = [(name, rows, True) for name, rows in (attribution.dimensions or {}).items()]
    # No breakdowns: their shares would not add up to the difference.
    ways += [("stragglers", attribution.stragglers or [], False), ("computing", attribution.computing or [], False)]
    causes = sentence_rows(attribution)
    return {
        "sentence": attribution.sentence or attribution.reason,
        "definition": attribution.definition,
        "means": facts_table("attribution-means", "Each side, mean over steps and ranks", means) if means else None,
        "causes": attribution_table("attribution", "The numbers behind it: mean ms per step and rank", causes)
        if causes
        else None,
        "ways": [
            attribution_table(f"attribution-{name}", f"By {name}", rows, shares=shares)
            for name, rows, shares in ways
            if rows
        ],
    }


def _means(side: AttributedSide) -> dict[str, str]:
    """Return the means of one side that are known, and why there is no rate of its products."""
    known_means = {name: each for name in _MEANS if (each := getattr(side, name)) is not None}
    why = side.achieved_tflops_reason
    return {name: PAGE.number(each, "ms") for name, each in known_means.items()} | (
        {"achieved_tflops_reason": why} if why else {}
    )


def _gains(label: str, gains: WhatIf) -> dict[str, Any]:
    """Return what the page says of `what_if` of a dataset; with a `reason` nothing else."""
    if gains.reason is not None:
        return {"label": label, "reason": gains.reason}
    return {
        "label": label,
        "reason": None,
        "basis": gains_basis(gains),
        "tables": gains_tables(label, gains),
        "check": gains.check,
        "notes": [*gains.notes, *gains.flags],
        "command": gains.command,
    }


_RANK_COLUMNS: Final = (
    Column("rank", unit="text", of=lambda one: f"rank {one.rank}"),
    Column("state", unit="text", tone=lambda one: "bad" if one.state in ("dead", "stopped") else None),
    Column("doing", "does", "text", why=lambda one: "\n".join(one.stack) or None),
    Column("since_s", "for", "text", lambda one: None if one.since_s is None else rounded_time(one.since_s)),
    Column("step", unit="count"),
    Column("sources", "evidence", "text", lambda one: ", ".join(one.sources)),
)


def page_autopsies(entries: Mapping[str, DatasetEntry]) -> list[dict[str, Any]]:
    """Return a section for each run in which something was stuck, stopped or dead; `accused` has a reason and its
    evidence for each culprit, with the process to look at.
    """
    made = []
    for label, entry in entries.items():
        title, verdict = autopsy_title(entry), known(entry.autopsy)
        if title is None or verdict is None:
            continue
        missing = [f"no evidence of rank {rank}" for rank in verdict.missing[:ROW_LIMIT]]
        processes = {each.rank: process_label(each) for each in verdict.ranks}
        made.append(
            {
                "label": label,
                "title": title,
                "sentence": verdict.summary,
                "accused": [
                    (f"{first_upper(processes.get(one.rank, f'rank {one.rank}'))} {one.reason}", one.evidence)
                    for one in verdict.culprits
                ],
                "waits": [waiting_sentence(one) for one in verdict.waits],
                "limits": [*verdict.contradictions, *verdict.notes, *missing],
                "next": verdict.next,
                "ranks": Table(f"autopsy-{label}", "What every rank does", _RANK_COLUMNS, verdict.ranks),
            }
        )
    return made


def variables() -> str:
    """Return `--forward`, `--ink`, ... for the light theme, the dark one, and a system that asks for dark."""
    light, dark = (_theme(place, scheme) for place, scheme in enumerate(("light", "dark")))
    return (
        f":root {{ {light} }}\n"
        f':root[data-theme="dark"] {{ {dark} }}\n'
        f"@media (prefers-color-scheme: dark) {{ :root:not([data-theme]) {{ {dark} }} }}\n"
    )


def _theme(place: int, scheme: str) -> str:
    shades = {**SURFACES, **MEANINGS}
    return f"color-scheme: {scheme}; " + " ".join(f"--{name}: {shade[place]};" for name, shade in shades.items())


def for_scripts() -> dict[str, Mapping[str, Any]]:
    """Return `dark`: what a light colour of a chart becomes; `textOn`: black or white, for a label on a colour."""
    drawn = [*MEANINGS.values(), *(SURFACES[name] for name in ("page", "ink", "quiet", "grid", "band"))]
    return {
        "dark": {shade.light.lower(): shade.dark for shade in drawn},
        "textOn": {color: text_on(color) for shade in MEANINGS.values() for color in shade},
    }


_ASSETS: Final = files("aorta.analysis.report.html") / "assets"
_SCRIPTS: Final = ("theme.js", "tables.js", "timeline.js", "timeline_labels.js", "timeline_detail.js", "start.js")
_TEMPLATE: Final = "page.html.jinja"


def assemble(context: Mapping[str, Any], charts: Sequence[Chart], data: Mapping[str, Any]) -> str:
    """Render the template."""
    scripts = [script(), "\n".join(_asset(name) for name in _SCRIPTS)]
    drawn, ids = document([chart.model for chart in charts])
    roots = {chart.name: root for chart, root in zip(charts, ids, strict=True)}
    page = {**data, "document": drawn, "roots": roots}
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"shown": json_text, "cells": page_table}
    template = environment.from_string(_asset(_TEMPLATE))
    text = template.render(
        **context,
        policy=policy(scripts),
        style=variables() + _asset("page.css"),
        scripts=scripts,
        data=json_for_script(page),
    )
    before, bokeh, after = text.partition(f"<script>{scripts[0]}")  # the policy has the hashes of the scripts
    return redact(before) + bokeh + after


def policy(scripts: Sequence[str]) -> str:
    """Return the content security policy of a page with these inline scripts."""
    digests = (base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii") for script in scripts)
    hashes = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; "
        "form-action 'none'"
    )


def json_for_script(value: Any) -> str:
    """Return JSON that can be in a script element: nothing in it can end the element or begin a comment."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")
