"""Assembles the content of `summary.json` from labelled inputs, and the comparison of two of them.

Must not: compute a value that `aggregate`, `compare` or `attribution` defines.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from aorta.analysis.aggregate import aggregate
from aorta.analysis.attribution.attribute import DEFINITION, attribute
from aorta.analysis.compare.inputs import Subject, shown_by
from aorta.analysis.compare.launch_comparison import compare_launches, left_out
from aorta.analysis.compare.run_comparison import compare
from aorta.analysis.compare.verdict_rules import Rules
from aorta.analysis.compare.verdict_sentences import headline, is_comparable, title
from aorta.analysis.load.engines import Engine
from aorta.analysis.metrics import COLLECTIVE_METRIC_NAMES, metric_named
from aorta.analysis.most_to_gain import most_to_gain, with_marginals
from aorta.analysis.stats import PERCENTILE_METHOD
from aorta.version import __version__

SUMMARY_VERSION: Final = 1
SUMMARY_FILE: Final = "summary.json"


def summarize(
    subjects: Mapping[str, Subject],
    reference: str | None = None,
    candidate: str | None = None,
    rules: Rules | None = None,
    engine: Engine | None = None,
) -> dict[str, Any]:
    """The content of `summary.json` as plain JSON values, in a stable order; unknown values are null with a reason.
    With both labels it has a comparison.

    Args:
        rules: how launch sets are judged.
        engine: where launches are read again.

    Raises:
        InputError: the launches to compare did different work, or cannot be read again.
    """
    entries = {
        label: aggregate(subject.dataset)
        | dict(subject.dataset.run.extras)
        | _of_set(subject, rules or Rules())
        | {"what_if": most_to_gain(subject.dataset.run)}
        for label, subject in subjects.items()
    }
    summary: dict[str, Any] = {
        "summary_version": SUMMARY_VERSION,
        "aorta_version": __version__,
        "conventions": {
            "definitions": "docs/dev/measuring.md, section 1",
            "unit_of_count": "one step on one rank",
            "percentiles": PERCENTILE_METHOD,
            "median_of_a_ratio": "the median of the ratios of single steps; `overlap_ratio` of a dataset is it",
            "ratio_of_sums": "milliseconds summed over steps of ranks, then divided",
            "rank_spread": "largest minus smallest of the medians of the ranks",
            "gb": "1e9 bytes",
        },
        "datasets": entries,
    }
    if reference is not None and candidate is not None:
        sides = subjects[reference], subjects[candidate]
        numbers = entries[reference], entries[candidate]
        compared = _compared(sides, numbers, rules or Rules())
        if is_comparable(compared):
            before, after = (side.datasets(engine) for side in sides)
            found = attribute(before, after, engine, compared["manifest_differences"])
        else:
            found = {"definition": DEFINITION, "sentence": None, "reason": title(compared)}
        if compared["host_bound"] is not None and is_comparable(compared):
            found["sentence"] = compared["host_bound"]["sentence"]  # a cause before any in the collectives
        summary["comparison"] = compared | {"attribution": with_marginals(found, numbers[1]["what_if"])}
    return summary | {"metrics": _definitions(entries)}


def _compared(
    sides: tuple[Subject, Subject], entries: tuple[dict[str, Any], dict[str, Any]], rules: Rules
) -> dict[str, Any]:
    """The comparison of two sides; it has verdicts where a side is a launch set."""
    before, after = (side.dataset for side in sides)
    if not any(side.launches for side in sides):
        found = compare(before, after, *entries, judge_milliseconds=rules.judge_milliseconds, allows=rules.allows)
        return found | {"headline": headline(found)}
    collectives = (entries[0].get("collectives", []), entries[1].get("collectives", []))
    return compare_launches((before, after), (sides[0].as_set(), sides[1].as_set()), collectives, rules)


def _of_set(subject: Subject, rules: Rules) -> dict[str, Any]:
    """What the entry of a launch set has in addition to the values of its representative launch."""
    if subject.launches is None:
        return {}
    return {
        "launches": len(subject.launches.launches),
        "representative": subject.dataset.run.location,
        "representative_rule": f"the launch nearest the medians of {' and '.join(shown_by(rules))}",
        "launch_set": str(subject.launches.path),
        "left_out": left_out(subject.launches),
    }


def _definitions(entries: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Unit, better direction and definition of each metric in the summary."""
    names = [name for entry in entries.values() for name in entry.get("metrics", ())]
    if any(entry.get("collectives") for entry in entries.values()):
        names += COLLECTIVE_METRIC_NAMES
    return {
        name: {"unit": metric.unit, "better": metric.better, "definition": metric.definition}
        for name in dict.fromkeys(names)
        for metric in (metric_named(name),)
    }
