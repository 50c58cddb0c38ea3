"""Computes the statistics of one metric of two launch sets: effect, interval, p-value and statistical power.

The result is plain JSON values. Must not: judge, or correct a p-value for other metrics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final
from zlib import crc32

import numpy as np

from aorta.analysis.compare.bootstrap import median_interval
from aorta.analysis.compare.detectable_effect import CAP, POWER, detectable, launches_needed, pooled_sd
from aorta.analysis.compare.mann_whitney import mann_whitney
from aorta.analysis.compare.samples import SEED, Sample
from aorta.analysis.compare.shifts import Kind, estimated
from aorta.analysis.compare.verdict_rules import LEVEL, Rules
from aorta.analysis.metrics import metric_named
from aorta.analysis.tables import Floats

_BESIDE_OTHERS: Final = (
    "not defined for a secondary metric, which is judged by what all the others did; for the next launches, name it "
    "with --primary"
)
_INTERVALS: Final = ("difference_interval", "reference_interval", "candidate_interval")


def numbers(name: str, reference: Sequence[Sample], candidate: Sequence[Sample], rules: Rules) -> dict[str, Any]:
    """The statistics of a metric that do not depend on any other metric. Launches whose median is null do not count.

    Args:
        reference, candidate: the metric in each launch of a side.
    """
    sides = [
        [(sample.median, sample.pool) for sample in side if sample.median is not None]
        for side in (reference, candidate)
    ]
    left, right = (np.array([median for median, _ in side], np.float64) for side in sides)
    found: dict[str, Any] = {
        "role": rules.role(name),
        "launches": {"reference": len(left), "candidate": len(right)},
        "constant": len(np.unique(np.concatenate([left, right]))) == 1,
        "margin": rules.margin,
        "p": None,
        "p_corrected": None,
    }
    if not (len(left) and len(right)):
        empty = {"kind": _kind(name), "value": None, "low": None, "high": None}
        nothing = {"effect": empty, **{key: {"low": None, "high": None} for key in _INTERVALS}, "interval_level": None}
        return found | nothing | _not_estimated("not available on one side")
    seed = [SEED, crc32(name.encode())]
    for side, launches in zip(("reference", "candidate"), sides, strict=True):
        low, high = median_interval(launches, LEVEL, np.random.default_rng(seed))
        found[f"{side}_interval"] = {"low": low, "high": high}
    found["p"] = mann_whitney(left, right)
    found |= intervals(name, left, right, found["p"], rules.alpha)
    return found | _power(name, left, right, found["effect"], rules)


def intervals(name: str, reference: Floats, candidate: Floats, p: float, level: float) -> dict[str, Any]:
    """Effect and difference of a metric with the intervals that belong to a test at `level`, and their own level.

    Args:
        reference, candidate: one value per launch, at least one each.
        p: of the Mann-Whitney test of these values.
    """
    effect = estimated(_kind(name), reference, candidate, p, level)
    apart = estimated("difference", reference, candidate, p, level)
    return {
        "effect": {"kind": effect.kind, "value": effect.value, "low": effect.low, "high": effect.high},
        "difference_interval": {"low": apart.low, "high": apart.high},
        "interval_level": None if apart.low is None else 1 - level,
    }


def _kind(name: str) -> Kind:
    return "difference" if metric_named(name).unit == "ratio" else "quotient"


def _power(name: str, left: Floats, right: Floats, estimate: Mapping[str, Any], rules: Rules) -> dict[str, Any]:
    """The smallest effect that could have been found, and the launches needed to find the one observed."""
    sd = pooled_sd(left, right)
    scale = 1.0 if estimate["kind"] == "difference" else abs(float(np.median(left)))
    if sd is None:
        return _not_estimated("one launch per side shows nothing of the noise between launches")
    if estimate["value"] is None:
        return _not_estimated("the reference is 0: there is no ratio")
    relative = sd / scale
    if rules.role(name) == "secondary":
        return _not_estimated(_BESIDE_OTHERS) | {"launch_sd": relative}
    smallest = detectable(len(left), len(right), relative, rules.margin, rules.alpha)
    never = f"no effect of any size reaches p <= {rules.alpha:g} with so few launches"
    needed = launches_needed(max(abs(estimate["value"]), rules.margin), relative, rules.alpha)
    return {
        "launch_sd": relative,
        "detectable": {"power": POWER, "effect": smallest, "reason": never if smallest is None else None},
        "launches_needed": needed,
        "launches_needed_reason": None if needed is not None else f"more than {CAP} per side",
    }


def _not_estimated(reason: str) -> dict[str, Any]:
    return {
        "launch_sd": None,
        "detectable": {"power": POWER, "effect": None, "reason": reason},
        "launches_needed": None,
        "launches_needed_reason": reason,
    }
