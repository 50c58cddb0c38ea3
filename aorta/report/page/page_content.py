"""The page as one file: its sections in the order in which they are read, template, styles with the palette of both
themes, scripts and data, and the policy that lets nothing else run.

The content security policy forbids every request, and every script but those whose hashes it names. Must not put
anything into the page that Jinja's escaping or `assemble` has not made harmless, judge evidence, or name a
colour that `report.palette` does not have.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from aorta.analysis.aggregate import LabelledRun, job_step_times
from aorta.analysis.cautions import alerts, autopsy_title, diagnoses, notes_of
from aorta.analysis.compare.verdict import is_comparable
from aorta.analysis.pace import DRAWN
from aorta.autopsy.judge import process_label
from aorta.autopsy.report import waiting_sentence
from aorta.command_line import rounded_time
from aorta.documents import known
from aorta.documents.comparison import Summary
from aorta.documents.dataset import DatasetEntry
from aorta.documents.formatting import first_upper, value_text
from aorta.documents.metrics import HOST_BOUND
from aorta.read.record import config_of
from aorta.records.files import NOT_UTF8
from aorta.records.run_files import flatten
from aorta.redaction import redact
from aorta.report import account_tables, run_tables
from aorta.report.page import charts as page_charts
from aorta.report.page.charts import Chart, document, script
from aorta.report.page.elements import PARTS, step_bars, verdict_of, waterfall
from aorta.report.page.timelines import BLOCKED, TimelineSpans, lane_order, payload, spans_of
from aorta.report.palette import MEANINGS, SURFACES, text_on
from aorta.report.tables import ROW_LIMIT, Column, Table, page_table, text_column
from aorta.version import __version__

PAGE_FILE: Final = "report.html"
SPAN_BUDGET: Final = 36_000
"""Of all timelines together: about 30 bytes each in the file."""
SHOWN_RANKS: Final = 2
"""Before anybody chooses, so that the first screen holds a timeline."""
PRINTED_ROWS: Final = 12
"""Of a table on paper; the style sheet hides the others."""


def write_page(datasets: Mapping[str, LabelledRun], summary: Summary, path: Path) -> None:
    """Write the page of a report to `path`, replacing what is there.

    Raises:
        OSError: `path` cannot be written.
    """
    comparison, gate = known(summary.comparison), known(summary.gate)
    sides = {comparison.reference: "reference", comparison.candidate: "candidate"} if comparison else {}
    order = [*sides, *(label for label in datasets if label not in sides)]  # their colours are those of every picture
    datasets, entries = {label: datasets[label] for label in order}, {label: summary.datasets[label] for label in order}
    late = {label: [late.rank for late in account_tables.named_ranks(entry)] for label, entry in entries.items()}
    share = SPAN_BUDGET // max(1, len(datasets))
    spans = {label: spans_of(dataset, share, SHOWN_RANKS, late[label]) for label, dataset in datasets.items()}
    step_notes: list[str] = []
    for label, dataset in datasets.items():
        if dataset.pace.drawn_as_ranges:
            spans[label].notes.append(f"{label}: {DRAWN}")
        basis, why = dataset.pace.basis("overlap_ratio"), job_step_times(dataset)[2]
        if basis.source != "marks":
            step_notes.append(f"{label}: no overlap ratio over the steps: {basis.reason or HOST_BOUND}")
        if why is not None:
            step_notes.append(f"{label}: no job step is drawn: {why}")
    drawn = {label: f"{label}, launch {launch}" for label, entry in entries.items() if (launch := entry.shown_launch)}
    together = {label: page_charts.steps_a_point(dataset.global_steps) for label, dataset in datasets.items()}
    charts: dict[str, list[Chart]] = {
        "launches": page_charts.launch_charts(comparison) if comparison else [],
        "timelines": page_charts.timeline_charts([*spans.values()], drawn),
        "steps": page_charts.step_charts(datasets),
        "collectives": page_charts.comm_charts(entries),
    }
    legend: dict[str, list[str]] = {}  # a colour has one place, whatever it is the colour of
    colors = {kind: color for of_label in spans.values() for kind, color in of_label.kinds.items()}
    for kind, color in colors.items():
        legend.setdefault(BLOCKED if kind == BLOCKED else color, []).append(kind)
    lanes = sorted({lane for of_label in spans.values() for lane in of_label.lanes}, key=lane_order)
    health = []
    for label, dataset in datasets.items():
        entry = entries[label]
        complete = "Every trace was read. Whether every collective is in them is not known."
        if not entry.traces:
            complete = "Complete: every rank was read, every collective was seen."
        notes, facts = notes_of(dataset, entry), run_tables.facts_of(dataset, entry)
        health.append({"label": label, "notes": notes, "complete": complete, "facts": facts})
    left_out = (comparison.left_out or {}) if comparison else {}
    attribution = comparison.attribution if comparison and is_comparable(comparison) else None
    conditions = [] if gate is None else [f"{condition.condition}: {condition.reason}" for condition in gate.conditions]
    kinds = dict.fromkeys(row.kind for entry in entries.values() for row in entry.matched)
    verdict = verdict_of(summary)
    context = {
        "heading": verdict.word,
        "numbers_in": "summary.json",
        "title": f"{comparison.candidate} against {comparison.reference}" if comparison else ", ".join(datasets),
        "verdict": verdict,
        "alerts": alerts(summary.datasets, comparison),
        "gate": gate and f"Gate: {gate.outcome} (exit code {gate.exit_code}). {'; '.join(conditions)}",
        "autopsies": page_autopsies(entries),
        "findings": [
            f"{drawn.get(label, label)}: {sentence}" if len(entries) > 1 or drawn else first_upper(sentence)
            for label, entry in entries.items()
            for sentence in diagnoses(entry)
        ],
        "attribution": attribution,
        "bars": step_bars(entries),
        "waterfall": waterfall(known(comparison.account)) if comparison else [],
        "cause": comparison.sentence if comparison else None,
        "accounts": [*filter(None, (account_tables.account_table(*item) for item in entries.items()))],
        "ranks": [*filter(None, (account_tables.rank_table(*item) for item in entries.items()))],
        "answered": comparison.candidate if comparison else next(iter(entries)),
        "legends": [(number, label, sides.get(label, "")) for number, label in enumerate(datasets)],
        "charts": charts,
        "spans": [*spans.values()],
        "lanes": lanes,
        "kinds": [(kind, color, kind == BLOCKED) for kind, color in colors.items()],
        "legend": [(", ".join(kinds), color, color == BLOCKED) for color, kinds in legend.items()],
        "steps_a_point": {label: count for label, count in together.items() if count > 1},
        "step_notes": step_notes,
        "signs": [(kind, page_charts.marker_of(kind)[1]) for kind in kinds],
        "comparison": comparison,
        "entries": entries,
        "run_tables": run_tables,
        "account_tables": account_tables,
        "left_out": [
            f"{side}: {launch.path}: {launch.reason}" for side, launches in left_out.items() for launch in launches
        ],
        "health": health,
        "environment": environment_of(datasets),
        "summary": summary,
    }
    every_chart = [chart for of_section in charts.values() for chart in of_section]
    html = assemble("page.html.jinja", context, every_chart, [*spans.values()])
    path.write_text(html, encoding="utf-8", errors=NOT_UTF8, newline="\n")


_DIFFERENCES: Final = {"environment_differences": "environment", "collective_library_differences": "collective library"}
"""Facts of ranks that differ from rank 0, and what they are of."""
_ENVIRONMENT: Final = (
    *("versions", "environment", "collective_library", *_DIFFERENCES),
    *("host_facts", "devices", "plan", "command"),
)


def environment_of(datasets: Mapping[str, LabelledRun]) -> dict[str, Any]:
    """Return what the manifests say, side by side, and what they warn of."""
    facts: dict[str, dict[str, object]] = {}
    config: dict[str, dict[str, object]] = {}
    notes = []
    for label, dataset in datasets.items():
        manifest = dataset.run.manifest or {}
        if dataset.run.manifest is None:
            notes.append(f"{label}: there is no manifest (run.json) beside its records")
        facts[label] = dict(flatten({name: manifest[name] for name in _ENVIRONMENT if name in manifest}))
        config[label] = dict(flatten(config_of(dataset.run.manifest)))
        for name, what in _DIFFERENCES.items():
            others = manifest.get(name)
            if isinstance(others, dict) and others:
                notes.append(f"{label}: another {what} than that of rank 0 on rank {', '.join(others)}")
        warned = manifest.get("warnings")
        notes += [f"{label}: {warning}" for warning in (warned if isinstance(warned, list) else ())]
    both = len(datasets) > 1
    return {
        "notes": notes,
        "facts": run_tables.facts_table("environment", "Versions, variables, hosts, devices", facts, mark=both),
        "config": run_tables.facts_table("configuration", "Resolved configuration", config, mark=both),
    }


_RANK_COLUMNS: Final = (
    text_column("rank", of=lambda row: f"rank {row.rank}"),
    text_column("state", tone=lambda row: "bad" if row.state in ("dead", "stopped") else None),
    text_column("doing", "does", why=lambda row: "\n".join(row.stack) or None),
    text_column("since_s", "for", of=lambda row: None if row.since_s is None else rounded_time(row.since_s)),
    Column("step"),
    text_column("sources", "evidence", of=lambda row: ", ".join(row.sources)),
)


def page_autopsies(entries: Mapping[str, DatasetEntry]) -> list[dict[str, Any]]:
    """Return a section for each run in which something was stuck, stopped or dead; `accused` has a reason and its
    evidence for each culprit, with the process to look at.
    """
    sections = []
    for label, entry in entries.items():
        title, verdict = autopsy_title(entry), known(entry.autopsy)
        if title is None or verdict is None:
            continue
        processes = {row.rank: process_label(row) for row in verdict.ranks}
        missing = [f"no evidence of rank {rank}" for rank in verdict.missing[:ROW_LIMIT]]
        sections.append(
            {
                "label": label,
                "title": title,
                "sentence": verdict.summary,
                "accused": [
                    (
                        f"{first_upper(processes.get(culprit.rank, f'rank {culprit.rank}'))} {culprit.reason}",
                        culprit.evidence,
                    )
                    for culprit in verdict.culprits
                ],
                "waits": [waiting_sentence(wait) for wait in verdict.waits],
                "limits": [*verdict.contradictions, *verdict.notes, *missing],
                "next": verdict.next,
                "ranks": Table(f"autopsy-{label}", "What every rank does", _RANK_COLUMNS, verdict.ranks),
            }
        )
    return sections


def variables() -> str:
    """Return `--forward`, `--ink`, ... for the light theme, the dark one, and a system that asks for dark."""

    def theme(shade_index: int, scheme: str) -> str:
        shades = {name: shade[shade_index] for name, shade in {**SURFACES, **MEANINGS}.items()}
        shades |= {f"on-{part}": text_on(shades[part]) for part in PARTS}
        return f"color-scheme: {scheme}; " + " ".join(f"--{name}: {color};" for name, color in shades.items())

    light, dark = theme(0, "light"), theme(1, "dark")
    return (
        f":root {{ {light} }}\n"
        f':root[data-theme="dark"] {{ {dark} }}\n'
        f"@media (prefers-color-scheme: dark) {{ :root:not([data-theme]) {{ {dark} }} }}\n"
    )


def for_scripts() -> dict[str, Any]:
    """Return `dark`: what a light colour of a chart becomes; `textOn`: black or white, for a label on a colour."""
    drawn = [*MEANINGS.values(), *(SURFACES[name] for name in ("page", "ink", "quiet", "grid", "band"))]
    return {
        "dark": {shade.light.lower(): shade.dark for shade in drawn},
        "textOn": {color: text_on(color) for shade in MEANINGS.values() for color in shade},
    }


_SCRIPTS: Final = ("theme.js", "tables.js", "timeline.js", "timeline_labels.js", "timeline_detail.js", "start.js")


def assemble(
    template: str, context: Mapping[str, Any], charts: Sequence[Chart] = (), spans: Sequence[TimelineSpans] = ()
) -> str:
    """Render a template. The policy of the page names the scripts in it by their hashes; Bokeh's is there for
    charts.
    """
    assets = files("aorta.report.page") / "assets"
    scripts = [script()] if charts else []
    scripts.append("\n".join((assets / name).read_text(encoding="utf-8") for name in _SCRIPTS))
    digests = (base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii") for script in scripts)
    hashes = " ".join(f"'sha256-{digest}'" for digest in digests)
    policy = (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; "
        "form-action 'none'"
    )
    drawn, ids = document([chart.model for chart in charts])
    roots = {chart.model["name"]: root for chart, root in zip(charts, ids, strict=True)}
    colors = {kind: color for of_label in spans for kind, color in of_label.kinds.items()}
    data = for_scripts() | {"timelines": payload(spans), "kindColors": colors, "document": drawn, "roots": roots}
    text_of_data = json.dumps(data, allow_nan=False, separators=(",", ":"))
    # In a script element: nothing in it can end the element or begin a comment.
    text_of_data = text_of_data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    loader = FunctionLoader(lambda name: (assets / name).read_text(encoding="utf-8"))
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, loader=loader
    )
    environment.filters |= {"shown": value_text, "cells": page_table}
    text = environment.get_template(template).render(
        **context,
        version=__version__,
        printed_rows=PRINTED_ROWS,
        parts_of_a_step=PARTS,
        policy=policy,
        style=variables() + (assets / "page.css").read_text(encoding="utf-8"),
        scripts=scripts,
        data=text_of_data,
    )
    before, bokeh, after = text.partition(f"<script>{scripts[0]}")  # the policy has the hashes of the scripts
    return "".join([*map(redact, before.partition(text_of_data)), bokeh, after])
