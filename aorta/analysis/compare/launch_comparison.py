"""Builds the `comparison` of `summary.json` for two launch sets: every metric with its verdict, and the overall
verdict.

The result is plain JSON values. Must not: decide anything itself (`effect`, `metric_verdicts` and `verdict` do), or
show the value of one launch as that of its side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from aorta.analysis.aggregate import LabelledRun
from aorta.analysis.compare.comparability import refuse_unlike
from aorta.analysis.compare.effect import numbers
from aorta.analysis.compare.host_bound_sides import difference_in_lead
from aorta.analysis.compare.launch_order import LaunchOrder, launch_order
from aorta.analysis.compare.launch_set import Launch, LaunchSet
from aorta.analysis.compare.metric_verdicts import judge
from aorta.analysis.compare.run_comparison import UNNOTICED, compare, not_alike
from aorta.analysis.compare.samples import Sample
from aorta.analysis.compare.verdict import Word, too_few
from aorta.analysis.compare.verdict_rules import GUARD, Rules
from aorta.analysis.compare.verdict_sentences import headline

NS_PER_S: Final = 10**9
SIDES: Final = ("reference", "candidate")


def compare_launches(
    datasets: tuple[LabelledRun, LabelledRun],
    sides: tuple[LaunchSet, LaunchSet],
    collectives: tuple[list[Any], list[Any]],
    rules: Rules,
) -> dict[str, Any]:
    """Extend the result of `run_comparison.compare`: its values become medians over launches, and it gains verdicts and
    effects.

    Args:
        datasets: the representative launch of the reference and of the candidate.
        collectives: the collectives of each, as in their aggregates.

    Raises:
        InputError: the launches did different work (`comparability.refuse_unlike`).
    """
    allowed = refuse_unlike(*sides, rules)
    before, after = (medians_entry(side) | {"collectives": rows} for side, rows in zip(sides, collectives, strict=True))
    found = compare(*datasets, before, after, judge_milliseconds=rules.judge_milliseconds, allows=rules.allows)
    order = launch_order(*sides)
    metrics, verdict, reason = judged(found["metrics"], *sides, rules, _withheld(order, sides, rules))
    named = dict(zip(SIDES, sides, strict=True))
    found |= {
        "verdict": verdict,
        "verdict_reason": reason,
        # `compare` saw one launch per side; missing manifests are reported for all launches below.
        "warnings": list(
            dict.fromkeys(
                [
                    *(warning for warning in found["warnings"] if not warning.endswith(UNNOTICED)),
                    *_warnings(named, allowed),
                    *_in_time(order, named, rules),
                    *_measured_from(named, rules),
                ]
            )
        ),
        "host_bound": difference_in_lead(*([launch.pace for launch in side.launches] for side in sides)),
        "statistic": "median over launches of the median over steps of all ranks",
        "launches": {name: [_launch_entry(launch) for launch in side.launches] for name, side in named.items()},
        "launch_order": order.as_json() | {"assume_no_drift": rules.assume_no_drift},
        "left_out": {name: left_out(side) for name, side in named.items()},
        "primary": rules.primary,
        "alpha": rules.alpha,
        "margin": rules.margin,
        "interval_level": 1 - rules.alpha,
        "sequence": list(rules.sequence),
        "judge_milliseconds": rules.judge_milliseconds,
        "refused": allowed,
        "metrics": metrics,
    }
    return found | {"headline": headline(found)}


def medians_entry(side: LaunchSet) -> dict[str, Any]:
    """Medians over the launches, under the keys of an aggregate that `compare` reads."""
    metrics: dict[str, Any] = {}
    for name in dict.fromkeys(name for launch in side.launches for name in launch.samples):
        samples = side.of(name)
        known = [sample.median for sample in samples if sample.median is not None]
        reason = None if known else next(sample.reason for sample in samples if sample.reason is not None)
        metrics[name] = {"median": float(np.median(known)) if known else None, "reason": reason, **_ends(samples)}
    return {"overlap_ratio": metrics.get("overlap_ratio", {}).get("median"), "metrics": metrics}


def _ends(samples: Sequence[Sample]) -> dict[str, Any]:
    """Bounds of a metric, medians over the launches, where it has no values; and the extremes of all launches."""
    ends = [sample.ends for sample in samples if sample.ends is not None]
    if not ends:
        return {}
    low, high = zip(*ends, strict=True)
    bounded = any(sample.bounds is not None for sample in samples)
    bounds = {"at_least": float(np.median(low)), "at_most": float(np.median(high))} if bounded else None
    return {"bounds": bounds, "extremes": (min(low), max(high)), "launches": len(ends)}


def judged(
    pairs: Mapping[str, Any], reference: LaunchSet, candidate: LaunchSet, rules: Rules, withheld: str | None = None
) -> tuple[dict[str, Any], Word, str]:
    """Compute the statistics and verdict of every metric.

    Args:
        pairs: metrics as under `metrics` in the result of `run_comparison.compare`.
        withheld: why there may be no verdict; None if there may.

    Returns:
        The metrics, the verdict of the comparison, and the reason for it.
    """
    metrics = {
        name: pair | numbers(name, reference.of(name), candidate.of(name), rules) for name, pair in pairs.items()
    }
    values = {name: (reference.medians(name), candidate.medians(name)) for name in metrics}
    return metrics, *judge(metrics, rules, values, withheld)


def left_out(side: LaunchSet) -> list[dict[str, str]]:
    """Launches that do not count, with the reason."""
    return [{"path": str(path), "reason": why} for path, why in side.left_out]


def _launch_entry(launch: Launch) -> dict[str, Any]:
    return {
        "path": str(launch.path),
        "run_id": launch.run_id,
        "began_unix_s": None if launch.span_ns is None else launch.span_ns[0] / NS_PER_S,
        "overlap_ratio": launch.median("overlap_ratio"),
        GUARD: launch.median(GUARD),
        "throttled_ranks": list(launch.throttled_ranks),
    }


def _withheld(order: LaunchOrder, sides: tuple[LaunchSet, LaunchSet], rules: Rules) -> str | None:
    """Why the order of the launches forbids a verdict; None where it does not, or where they are too few for one
    anyway, which is what a reader has to hear first.
    """
    if order.comparable or rules.assume_no_drift:
        return None
    if too_few((len(sides[0].launches), len(sides[1].launches)), rules.alpha) is not None:
        return None
    return f"{order.reason}. Alternate the launches (docs/compare.md), or judge them anyway with --assume-no-drift"


def _in_time(order: LaunchOrder, sides: Mapping[str, LaunchSet], rules: Rules) -> list[str]:
    """Warnings about what the machines may have done meanwhile."""
    warnings = []
    if rules.assume_no_drift and not order.comparable:
        warnings.append(f"judged as asked (--assume-no-drift), although {order.reason}")
    hosts = [frozenset[str]().union(*(launch.hosts for launch in side.launches)) for side in sides.values()]
    if all(hosts) and hosts[0].isdisjoint(hosts[1]):
        warnings.append(
            f"the reference ran on {_names(hosts[0])}, the candidate on {_names(hosts[1])}: what each machine does "
            "by itself meanwhile is part of the difference, in whatever order they ran (docs/compare.md)"
        )
    return warnings


def _measured_from(sides: Mapping[str, LaunchSet], rules: Rules) -> list[str]:
    """A warning where the metrics that are tested are of kernels in some launches, and of marks in others (W29)."""
    warnings = []
    for name in rules.sequence:
        sources = {side: [each.source for each in launches.of(name) if each.source] for side, launches in sides.items()}
        if len({source for found in sources.values() for source in found}) > 1:
            counts = ", ".join(f"{found.count('kernels')} of {len(found)} of the {s}" for s, found in sources.items())
            warnings.append(
                f"{name} is of steps measured by kernels in these launches, and of marks in the others: {counts}; what "
                "the profiler does to its steps is part of the difference"
            )
    return warnings


def _names(hosts: frozenset[str]) -> str:
    first, *others = sorted(hosts)
    return f"{first} and {len(others)} more" if others else first


def _warnings(sides: Mapping[str, LaunchSet], allowed: list[dict[str, Any]]) -> list[str]:
    warnings = [
        not_alike(entry["key"], *entry["values"])
        if entry["where"] == "between"
        else f"launches of the {entry['where']} differ in {entry['key']} "
        f"({entry['values'][0]!r} and {entry['values'][1]!r})"
        for entry in allowed
    ]
    for name, side in sides.items():
        silent = [launch.path.name for launch in side.launches if not launch.tells_configuration]
        if silent:
            warnings.append(
                f"{len(silent)} of {len(side.launches)} launches of the {name} have no manifest with a configuration "
                f"({', '.join(silent)}): {UNNOTICED}"
            )
    throttled = {name: sum(bool(launch.throttled_ranks) for launch in side.launches) for name, side in sides.items()}
    for name, other in (SIDES, SIDES[::-1]):
        if throttled[name] and not throttled[other]:
            count = len(sides[name].launches)
            warnings.append(
                f"only the {name} was throttled, in {throttled[name]} of {count} launches: the difference may be "
                "that of cooling or power, not of the stack"
            )
    runs = [{launch.run_id for launch in side.launches} for side in sides.values()]
    shared = runs[0] & runs[1]
    if shared:
        warnings.append(f"{len(shared)} run(s) stand on both sides, {min(shared)!r} for one: they cannot differ")
    return warnings
