"""Where the numbers come from, for the end of the page: health, coverage, versions, configuration.

Must not repair or guess anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from aorta.analysis.aggregate import LabelledRun
from aorta.analysis.cautions import cautions
from aorta.analysis.devices import device_line, device_notes
from aorta.analysis.documents.comparison import Comparison
from aorta.analysis.documents.dataset import DatasetEntry
from aorta.analysis.expert_load import expert_sentences
from aorta.analysis.formatting import PAGE
from aorta.analysis.load.run_facts import config_of
from aorta.analysis.report.html.page_tables import facts_table
from aorta.analysis.stall_cutoffs import cutoff_line
from aorta.analysis.straggler import sentences
from aorta.records.run_files import flatten

_ENVIRONMENT: Final = ("versions", "environment", "environment_differences", "host_facts", "devices", "plan", "command")
_FINE: Final = "Complete: every rank was read, every collective was seen."
_FINE_TRACES: Final = "Every trace was read. Whether every collective is in them is not known."
_NO_MANIFEST: Final = "there is no manifest (run.json) beside its records"


def left_out(comparison: Comparison | None) -> list[str]:
    """Launches that do not count."""
    sides = comparison.left_out or {} if comparison else {}
    return [f"{side}: {each.path}: {each.reason}" for side, found in sides.items() for each in found]


def health_of(dataset: LabelledRun, entry: DatasetEntry) -> dict[str, Any]:
    """What was read of a run, and everything that is wrong with it."""
    health, steps, source = dataset.run.health, entry.steps, entry.source
    notes = [
        *health.notes(),
        *cautions(entry),
        *device_notes(entry.devices),
        *sentences(entry.stragglers or ()),
        *expert_sentences(entry),
    ]
    if entry.reason:
        notes.insert(0, f"nothing to measure: {entry.reason}")
    calibrated = steps.rank_steps_left_out_as_calibration
    facts: dict[str, Any] = {
        "folder": source.path,
        "run": source.run_id,
        "platform": source.platform,
        "strategy": source.parallel,
        "backend": source.backend,
        "instrument mode": ", ".join(health.instrument_modes),
        "hosts": source.hosts,
        "ranks read": f"{len(health.ranks_read)} of {health.world_size}" if health.world_size else "unknown",
        "steps used": f"{PAGE.whole(steps.rank_steps_used)} ({PAGE.count(steps.global_steps_used, 'global step')})",
        "left out as warm-up": PAGE.whole(steps.rank_steps_left_out_as_warmup),
        **({"measured by kernels": PAGE.whole(calibrated)} if calibrated else {}),
        "coverage": _coverage(dataset, entry),
    }
    if entry.launches:
        facts |= {"launches": entry.launches, "this launch": entry.representative}
    devices = device_line(entry.devices)
    facts |= {"devices": devices} if devices else {}
    cutoff = cutoff_line(entry)
    facts |= {"stalls": cutoff} if cutoff else {}
    fine = _FINE_TRACES if _of_traces(entry) else _FINE
    return {"label": dataset.label, "notes": notes, "fine": fine, "facts": facts}


def of_launches(entries: Mapping[str, DatasetEntry]) -> str:
    """Which launch stands for each launch set where the page shows one; empty without a set."""
    told = [
        f"{label}: of {PAGE.count(entry.launches, 'launch')} this is \u2026/{Path(entry.representative).name}"
        for label, entry in entries.items()
        if entry.launches
    ]
    rules = dict.fromkeys(entry.representative_rule for entry in entries.values() if entry.launches)
    return f"One launch of each set is drawn, {'; '.join(rules)}. {', '.join(told)}." if told else ""


def _of_traces(entry: DatasetEntry) -> bool:
    return bool(entry.traces)


def _coverage(dataset: LabelledRun, entry: DatasetEntry) -> str:
    uncovered = dataset.run.health.uncovered_steps
    if _of_traces(entry):
        return "not known: a trace does not count what was issued"
    return f"{sum(uncovered.values())} gaps" if uncovered else "complete"


def environment_of(datasets: Mapping[str, LabelledRun]) -> dict[str, Any]:
    """What the manifests say, side by side, and what they warn of."""
    facts: dict[str, dict[str, object]] = {}
    config: dict[str, dict[str, object]] = {}
    notes = []
    for label, dataset in datasets.items():
        manifest = dataset.run.manifest
        if manifest is None:
            notes.append(f"{label}: {_NO_MANIFEST}")
        told = manifest or {}
        facts[label] = dict(flatten({name: told[name] for name in _ENVIRONMENT if name in told}))
        config[label] = dict(flatten(config_of(manifest)))
        others = told.get("environment_differences")
        if isinstance(others, dict) and others:
            notes.append(f"{label}: another environment than that of rank 0 on rank {', '.join(others)}")
        warned = told.get("warnings")
        notes += [f"{label}: {warning}" for warning in (warned if isinstance(warned, list) else ())]
    both = len(datasets) > 1
    return {
        "notes": notes,
        "facts": facts_table("environment", "Versions, variables, hosts, devices", facts, mark=both),
        "config": facts_table("configuration", "Resolved configuration", config, mark=both),
    }
