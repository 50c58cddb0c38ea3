"""What was seen of a record's collectives as a whole: coverage, and how their ends were learnt.

Enters: a number a step or a collective, and what the numbers stand for. Leaves: facts of a `Scan`. Must not: take a
step of unknown coverage for one in which a collective was missed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from aorta.telemetry.schema import Coverage


def coverage_facts(coverages: Sequence[Coverage], codes: npt.NDArray[Any], steps: npt.NDArray[Any]) -> dict[str, Any]:
    """`uncovered` steps, `coverage_reasons` with their counts, and the first step in which a collective was missed.

    Args:
        coverages: the distinct ones. codes: a step's place among them. steps: its global step; both in order of step.
    """
    reasons, uncovered, first = Counter[str](), 0, None
    for code, coverage in enumerate(coverages):
        at = np.flatnonzero(codes == code) if not coverage.complete or _missed(coverage) else codes[:0]
        if not coverage.complete and len(at):
            uncovered += len(at)
            reason = coverage.reason or f"{coverage.seen} collectives seen, {coverage.issued} issued"
            reasons[reason] += len(at)
        if _missed(coverage) and len(at):
            first = int(steps[at[0]]) if first is None else min(first, int(steps[at[0]]))
    return {"uncovered": uncovered, "coverage_reasons": dict(reasons), "first_missed": first}


def end_sources(sources: Sequence[str | None], codes: npt.NDArray[Any]) -> dict[str | None, int]:
    """How ends were learnt -> collectives. `codes`: the place of each one's among `sources`, which may repeat."""
    found = Counter[str | None]()
    for source, count in zip(sources, np.bincount(codes, minlength=len(sources)).tolist(), strict=True):
        found[source] += count
    return {source: count for source, count in found.items() if count}


def _missed(coverage: Coverage) -> bool:
    return coverage.issued is not None and coverage.seen != coverage.issued
