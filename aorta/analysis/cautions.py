"""What a reader of a dataset's numbers has to bear in mind: a host that sets the pace, few steps, denominators of 0,
impossible efficiencies.

Takes the entry of a dataset in `summary.json`, gives sentences. Must not repeat what `health` says of the record, or
change a number.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from aorta.analysis.documents.dataset import DatasetEntry
from aorta.analysis.formatting import TEXT
from aorta.analysis.host_bound import HOST_BOUND, pace_notes
from aorta.analysis.metrics import RATIO_PARTS

FEW_STEPS: Final = 20
"""Up to this, the 5th and the 95th percentile are the smallest and the largest value, or lie between these and the next
(numpy's linear interpolation: position 0.05 (n - 1) is below 1 up to n = 20)."""
_SHARES: Final = ("overlap_ratio", "exposed_share", "overlap_efficiency")
"""Metrics that are shares of a whole, and so lie between 0 and 1 where their parts fit together."""


def cautions(entry: DatasetEntry) -> list[str]:
    """One sentence for each; none for a dataset without a usable step, which says so itself."""
    if not entry.count:
        return []
    return [*pace_notes(entry), *_steps(entry), *_denominators(entry), *_outside(entry)]


def _steps(entry: DatasetEntry) -> Iterator[str]:
    count, values = entry.steps.global_steps_used, entry.steps.rank_steps_used
    if count <= FEW_STEPS:
        extremes = "percentiles of so few are their extremes, and " if values <= FEW_STEPS else ""
        yield (
            f"only {TEXT.count(count, 'step')} after warm-up: {extremes}a single slow step moves a mean; record more "
            f"than {FEW_STEPS}"
        )


def _denominators(entry: DatasetEntry) -> Iterator[str]:
    for name, values in entry.metrics.items():
        left_out = values.nulls - values.null_reasons.get(HOST_BOUND, 0)
        whole = RATIO_PARTS.get(name, ("", ""))[1]
        if whole and left_out and values.median is not None:
            yield (
                f"{name} rests on {values.count} of {values.count + left_out} values, one per step and rank: in "
                f"the others {whole} is 0 or not known, and the ratio undefined"
            )


def _outside(entry: DatasetEntry) -> Iterator[str]:
    for name in _SHARES:
        values = entry.metrics.get(name)
        ends = () if values is None else (values.min, values.max)
        seen = [value for value in ends if value is not None and not 0 <= value <= 1]
        if seen:
            shown = " and ".join(TEXT.number(value, "ratio", fewer=1) for value in dict.fromkeys(seen))
            yield (
                f"{name} is {shown}, which no share of a whole can be: the parts it is made of were measured at "
                "different times and do not add up; take it for noise, and record more steps"
            )
