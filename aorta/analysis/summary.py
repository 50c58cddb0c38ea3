"""Assembles the content of `summary.json` from labelled inputs, and the comparison of two of them.

Must not: compute a value that `aggregate`, `compare` or `attribution` defines.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from aorta.analysis.aggregate import aggregate
from aorta.analysis.attribution.attribute import DEFINITION, attribute, exposed_breakdown
from aorta.analysis.compare.launch_comparison import compare_launches, left_out
from aorta.analysis.compare.launch_set import Subject, shown_by
from aorta.analysis.compare.run_comparison import ComparedSide, compare
from aorta.analysis.compare.verdict import Rules, headline, is_comparable, title
from aorta.analysis.documents.comparison import Attribution, Comparison
from aorta.analysis.documents.dataset import DatasetEntry
from aorta.analysis.documents.summary import MetricDefinition, Summary
from aorta.analysis.load.engines import Engine
from aorta.analysis.metrics import COLLECTIVE_METRIC_NAMES, metric_named
from aorta.analysis.most_to_gain import add_marginals, most_to_gain
from aorta.analysis.stats import PERCENTILE_METHOD
from aorta.autopsy.report import read_autopsy
from aorta.version import __version__

SUMMARY_VERSION: Final = 1
_CONVENTIONS: Final = {
    "definitions": "docs/dev/measuring.md, section 1",
    "unit_of_count": "one step on one rank",
    "percentiles": PERCENTILE_METHOD,
    "median_of_a_ratio": "the median of the ratios of single steps; `overlap_ratio` of a dataset is it",
    "ratio_of_sums": "milliseconds summed over steps of ranks, then divided",
    "rank_spread": "largest minus smallest of the medians of the ranks",
    "gb": "1e9 bytes",
}
SUMMARY_FILE: Final = "summary.json"


def summarize(
    subjects: Mapping[str, Subject],
    reference: str | None = None,
    candidate: str | None = None,
    rules: Rules | None = None,
    engine: Engine | None = None,
) -> Summary:
    """The content of `summary.json`; unknown values are null with a reason. With both labels it has a comparison.

    Args:
        rules: how launch sets are judged.
        engine: where launches are read again.

    Raises:
        InputError: the launches to compare did different work, or cannot be read again.
    """
    rules = rules or Rules()
    entries = {label: _entry(subject, rules) for label, subject in subjects.items()}
    summary = Summary(
        summary_version=SUMMARY_VERSION,
        aorta_version=__version__,
        conventions=dict(_CONVENTIONS),
        datasets=entries,
        metrics=_definitions(entries),
    )
    if reference is not None and candidate is not None:
        sides = subjects[reference], subjects[candidate]
        compared = summary.comparison = _compared(sides, (entries[reference], entries[candidate]), rules)
        compared.attribution = _attribution(compared, sides, engine)
        add_marginals(compared.attribution, entries[candidate].what_if)
    else:
        for label, subject in subjects.items():
            entries[label].exposed = exposed_breakdown(subject.dataset, engine)
    return summary


def _entry(subject: Subject, rules: Rules) -> DatasetEntry:
    """The entry of a dataset; of a launch set that of its representative launch, and what is said of the set."""
    entry = aggregate(subject.dataset)
    entry.what_if = most_to_gain(subject.dataset.run)
    autopsy = read_autopsy(Path(subject.dataset.run.location))
    if autopsy is not None:
        entry.autopsy = autopsy
    if subject.launches is not None:
        entry.launches = len(subject.launches.launches)
        entry.representative = subject.dataset.run.location
        entry.representative_rule = f"the launch nearest the medians of {' and '.join(shown_by(rules))}"
        entry.launch_set, entry.left_out = str(subject.launches.path), left_out(subject.launches)
    return entry


def _compared(sides: tuple[Subject, Subject], entries: tuple[DatasetEntry, DatasetEntry], rules: Rules) -> Comparison:
    """The comparison of two sides; it has verdicts where a side is a launch set."""
    before, after = (side.dataset for side in sides)
    if any(side.launches for side in sides):
        collectives = entries[0].matched, entries[1].matched
        return compare_launches((before, after), (sides[0].as_set(), sides[1].as_set()), collectives, rules)
    left, right = map(ComparedSide.of, entries)
    found = compare(before, after, left, right, judge_milliseconds=rules.judge_milliseconds, allows=rules.allows)
    found.headline = headline(found)
    return found


def _attribution(compared: Comparison, sides: tuple[Subject, Subject], engine: Engine | None) -> Attribution:
    """Where the difference is; of sides that cannot be compared, why that is not said."""
    if not is_comparable(compared):
        return Attribution(definition=DEFINITION, sentence=None, reason=title(compared))
    before, after = (side.datasets(engine) for side in sides)
    found = attribute(before, after, engine, compared.manifest_differences)
    if compared.host_bound is not None:
        found.sentence = compared.host_bound.sentence  # a cause before any in the collectives
    return found


def _definitions(entries: Mapping[str, DatasetEntry]) -> dict[str, MetricDefinition]:
    """Unit, better direction and definition of each metric in the summary."""
    names = [name for entry in entries.values() for name in entry.described]
    if any(entry.matched for entry in entries.values()):
        names += COLLECTIVE_METRIC_NAMES
    return {
        name: MetricDefinition(metric.unit, metric.better, metric.definition)
        for name in dict.fromkeys(names)
        for metric in (metric_named(name),)
    }
