"""What a report says of the sources of its numbers: health, coverage, versions, configuration.

Must not repair, guess or compute anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from aorta.analysis.aggregate import LabelledRun
from aorta.analysis.cautions import autopsy_notes, cautions, cutoff_line
from aorta.analysis.collective_metrics import straggler_sentences
from aorta.analysis.devices import device_line, device_notes
from aorta.analysis.documents import known
from aorta.analysis.documents.comparison import Comparison
from aorta.analysis.documents.dataset import DatasetEntry
from aorta.analysis.formatting import PAGE, TEXT
from aorta.analysis.load.records import config_of
from aorta.analysis.report.run_tables import facts_table
from aorta.records.run_files import flatten

_DIFFERENCES: Final = {"environment_differences": "environment", "collective_library_differences": "collective library"}
"""Facts of ranks that differ from rank 0, and what they are of."""
_ENVIRONMENT: Final = (
    *("versions", "environment", "collective_library", *_DIFFERENCES),
    *("host_facts", "devices", "plan", "command"),
)
_FINE: Final = "Complete: every rank was read, every collective was seen."
_FINE_TRACES: Final = "Every trace was read. Whether every collective is in them is not known."
_NO_MANIFEST: Final = "there is no manifest (run.json) beside its records"


def left_out(comparison: Comparison | None) -> list[str]:
    """Return the launches that do not count."""
    sides = comparison.left_out or {} if comparison else {}
    return [f"{side}: {each.path}: {each.reason}" for side, found in sides.items() for each in found]


def notes_of(dataset: LabelledRun, entry: DatasetEntry) -> list[str]:
    """Return what a reader of a dataset's numbers has to know: that it hung, and a slow rank, first."""
    nothing = [f"nothing to measure: {entry.reason}"] if entry.reason else []
    health = [*dataset.run.health.notes(), *cautions(entry), *device_notes(entry.devices)]
    said = ("throttled", "host_bound_launches")  # of a device or a whole run: these notes say them with more numbers
    found = [each.sentence for each in known(entry.findings) or () if each.rule not in said or each.stream is not None]
    return [*autopsy_notes(entry), *nothing, *straggler_sentences(entry), *found, *health]


def facts_of(dataset: LabelledRun, entry: DatasetEntry) -> dict[str, Any]:
    """Return what was read of a run, and how completely."""
    health, steps, source = dataset.run.health, entry.steps, entry.source
    calibrated, isolated = steps.rank_steps_left_out_as_calibration, steps.isolated_rank_steps
    left_out = [f"{each.path}: {each.reason}" for each in entry.left_out or ()]
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
        "left out as warm-up": TEXT.count(steps.rank_steps_left_out_as_warmup, "record"),
        "measured by kernels": TEXT.count(calibrated, "record") if calibrated else None,
        "isolated baselines": ", ".join(f"{count} {phase}" for phase, count in isolated.items()),
        "coverage": _coverage(dataset, entry),
        "launches": entry.launches or None,
        "this launch": entry.representative or None,
        "launches left out": left_out,
        "devices": device_line(entry.devices),
        "stalls": cutoff_line(entry),
    }
    return {name: fact for name, fact in facts.items() if fact or name in ("run", "platform", "strategy", "backend")}


def health_of(dataset: LabelledRun, entry: DatasetEntry) -> dict[str, Any]:
    """Return what was read of a run, and everything that is wrong with it."""
    fine = _FINE_TRACES if entry.traces else _FINE
    return {"label": dataset.label, "notes": notes_of(dataset, entry), "fine": fine, "facts": facts_of(dataset, entry)}


def of_launches(entries: Mapping[str, DatasetEntry]) -> str:
    """Return which launch stands for each launch set where the page shows one; empty without a set."""
    stated = [
        f"{label}: of {PAGE.count(entry.launches, 'launch')} this is \u2026/{Path(entry.representative).name}"
        for label, entry in entries.items()
        if entry.launches
    ]
    rules = dict.fromkeys(entry.representative_rule for entry in entries.values() if entry.launches)
    return f"One launch of each set is drawn, {'; '.join(rules)}. {', '.join(stated)}." if stated else ""


def _coverage(dataset: LabelledRun, entry: DatasetEntry) -> str:
    uncovered = dataset.run.health.uncovered_steps
    if entry.traces:
        return "not known: a trace does not count what was issued"
    return f"{sum(uncovered.values())} gaps" if uncovered else "complete"


def environment_of(datasets: Mapping[str, LabelledRun]) -> dict[str, Any]:
    """Return what the manifests say, side by side, and what they warn of."""
    facts: dict[str, dict[str, object]] = {}
    config: dict[str, dict[str, object]] = {}
    notes = []
    for label, dataset in datasets.items():
        manifest = dataset.run.manifest
        if manifest is None:
            notes.append(f"{label}: {_NO_MANIFEST}")
        stated = manifest or {}
        facts[label] = dict(flatten({name: stated[name] for name in _ENVIRONMENT if name in stated}))
        config[label] = dict(flatten(config_of(manifest)))
        for name, what in _DIFFERENCES.items():
            others = stated.get(name)
            if isinstance(others, dict) and others:
                notes.append(f"{label}: another {what} than that of rank 0 on rank {', '.join(others)}")
        warned = stated.get("warnings")
        notes += [f"{label}: {warning}" for warning in (warned if isinstance(warned, list) else ())]
    both = len(datasets) > 1
    return {
        "notes": notes,
        "facts": facts_table("environment", "Versions, variables, hosts, devices", facts, mark=both),
        "config": facts_table("configuration", "Resolved configuration", config, mark=both),
    }
