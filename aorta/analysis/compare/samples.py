"""Reduces one launch to the few numbers per metric that a comparison keeps of it.

For each metric: the median that `aggregate` publishes, and the medians of resampled steps. Must not: define that median
again, or keep a column.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from zlib import crc32

import numpy as np

from aorta.analysis.aggregate import LabelledRun, by_step, single_values
from aorta.analysis.compare.bootstrap import step_medians
from aorta.analysis.documents.dataset import MeasuredFrom
from aorta.analysis.frames import null_reasons
from aorta.analysis.metrics import JOB_STEP, metric_named
from aorta.analysis.tables import Floats

SEED: Final = 2027
"""Seed of every random choice here, so that the same records give the same summary."""
_NO_VALUES: Final = "no values"


@dataclass(frozen=True)
class Sample:
    """One metric of one launch. `pool` holds medians over resamples of its global steps. It is empty where there are no
    values; `reason` then says why, and `bounds` what is known none the less: at least and at most. `source`: what
    the median was measured from.
    """

    median: float | None
    pool: Floats
    reason: str | None
    source: MeasuredFrom | None = None
    bounds: tuple[float, float] | None = None

    @property
    def ends(self) -> tuple[float, float] | None:
        """At least and at most: the median twice where it is known."""
        return self.bounds if self.median is None else (self.median, self.median)

    def unknown(self) -> Sample:
        """The same as bounds, to stand beside launches of which no more is known."""
        return Sample(None, np.empty(0), self.reason, None, self.ends)


def samples(dataset: LabelledRun) -> Mapping[str, Sample]:
    """Every metric of one launch that is compared."""
    names = [name for name in dataset.metrics if metric_named(name).compared]
    found = {name: _sample(dataset, name) for name in (*names, JOB_STEP)}
    for name, entry in single_values(dataset.run).items():
        median = entry["median"]
        pool = np.empty(0) if median is None else np.full(1, float(median))
        found[name] = Sample(median, pool, entry["reason"])
    return found


def _sample(dataset: LabelledRun, name: str) -> Sample:
    values, steps, reason = by_step(dataset, name)
    known = ~np.isnan(values)
    basis = dataset.pace.basis(name)
    if not known.any():
        if reason is None:
            reasons = null_reasons(dataset.run, name)
            reason = max(reasons, key=reasons.__getitem__) if reasons else _NO_VALUES
        return Sample(None, np.empty(0), reason, None, basis.bounds)
    values, steps = values[known], steps[known]
    generator = np.random.default_rng([SEED, crc32(f"{dataset.run.source.identity}/{name}".encode())])
    return Sample(float(np.median(values)), step_medians(values, steps, generator), None, basis.source)
