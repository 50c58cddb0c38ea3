"""Runs and launch sets -> `summary.json`, pictures and the text of the terminal: where a report is put together.

Enters: labelled folders and where to write. Leaves: files in that folder, and a `Report`. Must not: leave a picture
of an earlier report beside the numbers of this one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from aorta import __version__
from aorta.analysis.aggregate import Dataset, aggregate
from aorta.analysis.compare import compare
from aorta.analysis.launches.compared import compare_launches, left_out
from aorta.analysis.launches.rules import Rules
from aorta.analysis.launches.sets import LaunchSet, launch_of, read_set
from aorta.analysis.metrics import COLLECTIVE_METRIC_NAMES, metric_named
from aorta.analysis.plots import pictures
from aorta.analysis.readers.engines import Engine
from aorta.analysis.readers.run_folder import load_run
from aorta.analysis.sources import launch_folders, load_source
from aorta.analysis.stats import PERCENTILE_METHOD
from aorta.analysis.table import comparison_table, dataset_table, files_block, headline_block, health_block
from aorta.analysis.traces.run import TraceRun
from aorta.errors import InputError

SUMMARY_FILE: Final = "summary.json"
SUMMARY_VERSION: Final = 1


@dataclass(frozen=True)
class Report:
    """`text` is for people, `summary` is what `summary.json` holds, `not_drawn` says why a picture is missing."""

    text: str
    summary: dict[str, Any]
    files: tuple[Path, ...]
    not_drawn: Mapping[str, str]


def write_report(
    sources: Mapping[str, str | Path],
    output: Path,
    reference: str | None = None,
    candidate: str | None = None,
    *,
    engine: Engine | None = None,
    comm_patterns: Sequence[str] = (),
    rules: Rules | None = None,
) -> Report:
    """Read, aggregate, compare (when both names are given), draw and write. Files of an earlier report are replaced.

    Args:
        sources: label -> run folder, launch set, or where traces are (`sources`). reference, candidate: labels among
            them. engine: where files are read. comm_patterns: more patterns of communication kernels' names. rules: how
            launch sets are judged.

    Raises:
        InputError: a folder cannot be read, launches are not alike, or `output` cannot be written.
    """
    rules = rules or Rules()
    datasets: dict[str, Dataset] = {}
    sets: dict[str, LaunchSet] = {}
    for label, where in sources.items():
        folders = launch_folders(where)
        if folders:
            sets[label] = read_set(Path(where), folders, lambda folder: load_run(folder, engine))
            datasets[label] = Dataset(label, load_run(sets[label].representative(rules.primary).path, engine))
        else:
            datasets[label] = Dataset(label, load_source(where, engine, comm_patterns))
    summary = summarize(datasets, reference, candidate, sets, rules)
    try:
        output.mkdir(parents=True, exist_ok=True)
        not_drawn: dict[str, str] = {}
        written = [output / SUMMARY_FILE]
        written[0].write_text(json.dumps(summary, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        # Further outputs join here: a name, and what draws to a path and returns None, or why there is nothing to draw.
        for name, draw in pictures(list(datasets.values())):
            path = output / name
            reason = draw(path)
            if reason is None:
                written.append(path)
            else:
                path.unlink(missing_ok=True)
                not_drawn[name] = reason
    except OSError as error:
        raise InputError(
            f"{error.filename or output}: cannot be written: {error.strerror or error}. Choose another folder with "
            "--output DIR"
        ) from error
    blocks = [headline_block(summary["comparison"])] if "headline" in summary.get("comparison", ()) else []
    blocks += [health_block(dataset, summary["datasets"][label]) for label, dataset in datasets.items()]
    blocks += [
        dataset_table(label, summary["datasets"][label])
        for label in datasets
        if "metrics" in summary["datasets"][label]
        and ("comparison" not in summary or label not in (reference, candidate))
    ]
    if "comparison" in summary:
        blocks.append(comparison_table(summary["comparison"]))
    blocks.append(files_block(map(str, written), not_drawn))
    return Report("\n\n".join(blocks), summary, tuple(written), not_drawn)


def summarize(
    datasets: Mapping[str, Dataset],
    reference: str | None,
    candidate: str | None,
    sets: Mapping[str, LaunchSet] | None = None,
    rules: Rules | None = None,
) -> dict[str, Any]:
    """The content of `summary.json`: plain JSON values in a stable order, unknown as null with a reason.

    Args:
        datasets: a run each, or the representative launch of a set. sets: label -> launch set, for those that are one.

    Raises:
        InputError: launches that are compared are not alike.
    """
    sets = sets or {}
    entries = {
        label: aggregate(dataset) | _of_traces(dataset) | _of_set(sets.get(label), dataset)
        for label, dataset in datasets.items()
    }
    summary: dict[str, Any] = {
        "summary_version": SUMMARY_VERSION,
        "aorta_version": __version__,
        "conventions": {
            "definitions": "docs/measuring.md, section 1",
            "unit_of_count": "rank-step: one step on one rank",
            "percentiles": PERCENTILE_METHOD,
            "median_of_a_ratio": "the median of the ratios of single rank-steps; `overlap_ratio` of a dataset is it",
            "ratio_of_sums": "milliseconds summed over rank-steps, then divided",
            "rank_spread": "largest minus smallest of the medians of the ranks",
            "gb": "1e9 bytes",
        },
        "datasets": entries,
    }
    if reference is not None and candidate is not None:
        summary["comparison"] = _compared(datasets, entries, (reference, candidate), sets, rules or Rules())
    return summary | {"metrics": _definitions(entries)}


def _compared(
    datasets: Mapping[str, Dataset],
    entries: Mapping[str, dict[str, Any]],
    labels: tuple[str, str],
    sets: Mapping[str, LaunchSet],
    rules: Rules,
) -> dict[str, Any]:
    """Numbers of two runs; with a launch set on a side (a run beside it is one launch) also verdicts. Findings that
    rest on the two datasets, such as where a difference lies, join the dictionary here.
    """
    before, after = (datasets[label] for label in labels)
    if not any(label in sets for label in labels):
        return compare(
            before, after, *(entries[label] for label in labels), judge_milliseconds=rules.judge_milliseconds
        )
    left, right = (
        sets.get(label) or LaunchSet(datasets[label].run.path, (launch_of(datasets[label]),), ()) for label in labels
    )
    collectives = [entries[label].get("collectives", []) for label in labels]
    return compare_launches((before, after), (left, right), (collectives[0], collectives[1]), rules)


def _of_set(launches: LaunchSet | None, representative: Dataset) -> dict[str, Any]:
    """What the entry of a launch set has beside the numbers of its representative launch."""
    if launches is None:
        return {}
    return {
        "launches": len(launches.launches),
        "representative": str(representative.run.path),
        "launch_set": str(launches.path),
        "left_out": left_out(launches),
    }


def _of_traces(dataset: Dataset) -> dict[str, Any]:
    """What only traces of other tools have: each as one window, costs by kind, group and size, slow-down by kernel."""
    return {"traces": dataset.run.as_json()} if isinstance(dataset.run, TraceRun) else {}


def _definitions(entries: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Unit, better direction and definition of each metric that the summary holds."""
    names = [name for entry in entries.values() for name in entry.get("metrics", ())]
    if any(entry.get("collectives") for entry in entries.values()):
        names += COLLECTIVE_METRIC_NAMES
    return {
        name: {"unit": metric.unit, "better": metric.better, "definition": metric.definition}
        for name in dict.fromkeys(names)
        for metric in (metric_named(name),)
    }
