"""Run folders -> `summary.json`, pictures and the text of the terminal: the one place that puts a report together.

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
from aorta.analysis.metrics import COLLECTIVE_METRIC_NAMES, metric_named
from aorta.analysis.plots import pictures
from aorta.analysis.readers.engines import Engine
from aorta.analysis.sources import load_source
from aorta.analysis.stats import PERCENTILE_METHOD
from aorta.analysis.table import comparison_table, dataset_table, files_block, health_block
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
) -> Report:
    """Read, aggregate, compare (when both names are given), draw and write. Files of an earlier report are replaced.

    Args:
        sources: label -> run folder, or where traces are (`sources.load_source`). reference, candidate: labels among
            them. engine: where files are read. comm_patterns: more patterns of communication kernels' names.

    Raises:
        InputError: a folder cannot be read, or `output` cannot be written.
    """
    datasets = {label: Dataset(label, load_source(where, engine, comm_patterns)) for label, where in sources.items()}
    summary = summarize(datasets, reference, candidate)
    try:
        output.mkdir(parents=True, exist_ok=True)
        not_drawn: dict[str, str] = {}
        written = [output / SUMMARY_FILE]
        written[0].write_text(json.dumps(summary, indent=2, allow_nan=False) + "\n", encoding="utf-8")
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
    blocks = [health_block(dataset, summary["datasets"][label]) for label, dataset in datasets.items()]
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


def summarize(datasets: Mapping[str, Dataset], reference: str | None, candidate: str | None) -> dict[str, Any]:
    """The content of `summary.json`: plain JSON values in a stable order, unknown as null with a reason."""
    entries = {label: aggregate(dataset) | _of_traces(dataset) for label, dataset in datasets.items()}
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
        sides = datasets[reference], datasets[candidate]
        summary["comparison"] = compare(*sides, entries[reference], entries[candidate])
    return summary | {"metrics": _definitions(entries)}


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
