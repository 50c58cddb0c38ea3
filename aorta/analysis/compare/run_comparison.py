"""Compares two datasets: differences and quotients, each with the direction that is better. It gives no verdict.

Takes two datasets and their aggregates and gives plain JSON values. Must not: call a single launch a regression (W20:
verdicts are `launch_comparison`'s), or judge milliseconds of one platform against those of another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from aorta.analysis.aggregate import LabelledRun
from aorta.analysis.collective_metrics import starts_open
from aorta.analysis.compare.host_bound_sides import bounded_pair, difference_in_lead
from aorta.analysis.host_bound import HOST_BOUND
from aorta.analysis.load.run_facts import config_of, flatten, interceptor
from aorta.analysis.metrics import Metric, in_order, metric_named
from aorta.analysis.tables import Run

VERDICT: Final = "inconclusive"
VERDICT_REASON: Final = (
    "one launch per side; at least four are needed (the smallest possible two-sided p of the exact Mann-Whitney test "
    "is 0.029 with four, 0.10 with three)"
)
_OF_COLLECTIVES: Final = ("transfer_ms", "wait_ms", "queued_ms", "busbw_gb_per_s")
_HEADER_FACTS: Final = ("platform", "world_size", "parallel", "backend", "timer", "instrument_mode", "start_step")
_INTERCEPTOR: Final = "config.instrument.host_tap"  # the key of summary.json stays
"""Not a configuration key: whether the instrument's compiled extension was available."""
_WHERE: Final = "config.training.output_dir"
_MUST_AGREE: Final = ("dtype", "precision", "batch_size", "gradient_accumulation", "sequence_length")
"""Configuration keys that change what is computed, wherever they occur."""
HEADER: Final = "header."
"""Prefix of facts from the header; facts of the configuration have another."""
UNNOTICED: Final = "different configurations would not be noticed"
ABSENT: Final = "(absent)"
ACROSS_PLATFORMS: Final = "only ratios are judged across platforms"
_PLATFORM_UNKNOWN: Final = "the platform of a side is not known, and only ratios are judged across platforms"


def compare(
    reference: LabelledRun,
    candidate: LabelledRun,
    before: dict[str, Any],
    after: dict[str, Any],
    *,
    judge_milliseconds: bool = False,
    allows: Callable[[str], bool] = lambda _key: False,
) -> dict[str, Any]:
    """Compare the candidate with the reference.

    Args:
        before, after: the aggregates of reference and candidate, or dictionaries with the same keys.
        judge_milliseconds: judge milliseconds across platforms too.
        allows: whether the runs may differ in a key although it changes the work. Keys that it does not allow are
            `unlike`.
    """
    left, right = before.get("overlap_ratio"), after.get("overlap_ratio")
    platforms = reference.run.source.platform, candidate.run.source.platform
    not_judged = None if judge_milliseconds else _not_judged(*platforms)
    differences = differing(facts(reference.run), facts(candidate.run))
    result: dict[str, Any] = {
        "reference": reference.label,
        "candidate": candidate.label,
        "reference_overlap_ratio": left,
        "candidate_overlap_ratio": right,
        "ratio_delta": None if left is None or right is None else right - left,
    }
    if result["ratio_delta"] is None:
        null = [dataset.label for dataset, value in ((reference, left), (candidate, right)) if value is None]
        result["ratio_delta_reason"] = f"overlap_ratio is not available for {' and '.join(null)}"
    unlike = [each["key"] for each in differences if changes_the_work(each) and not allows(each["key"])]
    metrics, collectives = pairs(before, after, not_judged), _collectives(before, after, not_judged)
    if unlike:
        listed = [row[name] for row in collectives["collectives"] for name in _OF_COLLECTIVES]
        _withhold([*metrics.values(), *listed], f"the runs did not do the same work: {', '.join(unlike)}")
    return result | {
        "verdict": VERDICT,
        "verdict_reason": VERDICT_REASON,
        "host_bound": difference_in_lead([before.get("pace")], [after.get("pace")]),
        "warnings": _warnings(reference.run, candidate.run, differences),
        "manifest_differences": differences,
        "unlike": unlike,
        "statistic": "median",
        "metrics": metrics,
        **collectives,
    }


def _withhold(entries: Iterable[dict[str, Any]], reason: str) -> None:
    """No direction is better between runs of different work; what was not judged keeps its own reason."""
    for entry in entries:
        if entry["judgement"] != "not judged":
            entry |= {"judgement": "not judged", "judgement_reason": reason}


def _not_judged(left: str | None, right: str | None) -> str | None:
    """Why only ratios are judged; None if both sides ran on the same platform."""
    if left is None or right is None:
        return _PLATFORM_UNKNOWN
    return None if left == right else ACROSS_PLATFORMS


def pairs(before: Mapping[str, Any], after: Mapping[str, Any], not_judged: str | None = None) -> dict[str, Any]:
    """Every metric of two aggregates that is compared, side by side (`metrics` of the comparison).

    Args:
        not_judged: why only ratios are judged; None if all metrics are.
    """
    left, right = before.get("metrics", {}), after.get("metrics", {})
    compared = {}
    for metric in map(metric_named, in_order({*left, *right})):
        if not metric.compared:
            continue
        name = metric.name
        sides = [side.get(name, _absent(side)) for side in (left, right)]
        compared[name] = _pair(metric, sides[0], sides[1], not_judged)
        if all("ratio_of_sums" in side for side in sides):
            compared[name]["ratio_of_sums"] = _difference(sides[0]["ratio_of_sums"], sides[1]["ratio_of_sums"])
    return compared


def _absent(side: Mapping[str, Any]) -> dict[str, Any]:
    return {"median": None, "reason": "no such communication in this run" if side else "no step is used"}


def _collectives(before: dict[str, Any], after: dict[str, Any], not_judged: str | None) -> dict[str, Any]:
    """Collectives that both sides issued, matched by kind, group name, group size and bytes; and how many had no
    counterpart.
    """
    key_names = ("kind", "group", "group_size", "bytes")
    left = {tuple(row[name] for name in key_names): row for row in before.get("collectives", ())}
    right = {tuple(row[name] for name in key_names): row for row in after.get("collectives", ())}
    both = [
        dict(zip(key_names, key, strict=True))
        | {name: _pair(metric_named(name), row[name], right[key][name], not_judged) for name in _OF_COLLECTIVES}
        for key, row in left.items()
        if key in right
    ]
    for row in both:
        key = tuple(row[name] for name in key_names)
        if starts_open(left[key]) or starts_open(right[key]):
            _withhold((row[name] for name in _OF_COLLECTIVES), HOST_BOUND)
    alone = {"reference": len(left) - len(both), "candidate": len(right) - len(both)}
    return {"collectives": both, "collectives_on_one_side": alone}


def _pair(metric: Metric, left: dict[str, Any], right: dict[str, Any], not_judged: str | None) -> dict[str, Any]:
    values = _difference(left["median"], right["median"])
    reasons = [
        f"{side}: {entry['reason']}" for side, entry in (("reference", left), ("candidate", right)) if entry["reason"]
    ]
    if left["reason"] and left["reason"] == right["reason"]:
        judgement, why = "not judged", left["reason"]
    elif reasons:
        judgement, why = "not judged", "; ".join(reasons)
    elif metric.unit != "ratio" and not_judged is not None:
        judgement, why = "not judged", not_judged
    elif values["difference"] == 0:
        judgement, why = "equal", None
    elif metric.better is None:
        judgement, why = "neutral", "neither direction is good in itself"
    else:
        judgement, why = ("better" if (values["difference"] > 0) == (metric.better == "higher") else "worse"), None
    bounds = bounded_pair(left, right)
    if bounds is not None and metric.unit != "ratio" and not_judged is not None:
        bounds, why = None, not_judged  # bounds of milliseconds decide no more across platforms than values do
    found = {"unit": metric.unit, "better": metric.better, **values, "judgement": judgement, "judgement_reason": why}
    return found if bounds is None else found | {"bounds": bounds}


def _difference(left: float | None, right: float | None) -> dict[str, Any]:
    """Candidate minus reference, and candidate / reference. A quotient over 0 is undefined; the difference remains."""
    known = left is not None and right is not None
    quotient = right / left if left and right is not None else None
    return {
        "reference": left,
        "candidate": right,
        "difference": right - left if left is not None and right is not None else None,
        "quotient": quotient,
        "quotient_reason": None
        if quotient is not None
        else "the reference is 0"
        if known
        else "not available on one side",
    }


def facts(run: Run) -> dict[str, object]:
    """What was run: facts of the header as `header.<name>`, leaves of the configuration as `config.<dotted key>`."""
    header = {f"{HEADER}{name}": getattr(run.source, name) for name in _HEADER_FACTS}
    header[f"{HEADER}world_size"] = run.source.world_size or None
    configuration = dict(flatten(config_of(run.manifest), "config."))
    configuration.pop(_WHERE, None)  # where a run writes says nothing of what it did
    timed_by = interceptor(run.manifest)
    return header | configuration | ({_INTERCEPTOR: timed_by} if timed_by is not None else {})


def differing(left: Mapping[str, object], right: Mapping[str, object]) -> list[dict[str, Any]]:
    """Facts that differ: those of the headers always, those of the configuration where both sides have one."""
    if any(all(key.startswith(HEADER) for key in side) for side in (left, right)):
        left, right = ({k: v for k, v in side.items() if k.startswith(HEADER)} for side in (left, right))
    return [
        {"key": key, "reference": left.get(key, ABSENT), "candidate": right.get(key, ABSENT)}
        for key in dict.fromkeys([*left, *right])
        if left.get(key, ABSENT) != right.get(key, ABSENT)
    ]


def _warnings(reference: Run, candidate: Run, differences: list[dict[str, Any]]) -> list[str]:
    warnings = [
        not_alike(difference["key"], difference["reference"], difference["candidate"])
        for difference in differences
        if changes_the_work(difference)
    ]
    emulated = [side for side, run in _sides(reference, candidate) if run.health.fabric is not None]
    if emulated:
        where = "on both sides" if len(emulated) == 2 else f"in the {emulated[0]}"
        warnings.append(f"EMULATED FABRIC {where}: communication times are those of the emulation")
    if reference.source.instrument_mode != candidate.source.instrument_mode:
        warnings.append("the runs were instrumented differently, which can change what is measured (R3)")
    timed_by = interceptor(reference.manifest), interceptor(candidate.manifest)
    if None not in timed_by and timed_by[0] != timed_by[1]:
        warnings.append(
            f"collectives were timed by {timed_by[0]} in the reference, by {timed_by[1]} in the candidate: "
            "Python sees their ends later, and lengthens the step (R6); have the compiled part for both or for none"
        )
    if reference.source.identity == candidate.source.identity:
        warnings.append(f"both sides are the same run {reference.source.identity!r}")
    for side, run in _sides(reference, candidate):
        if run.manifest is None:
            warnings.append(f"the {side} has no manifest: {UNNOTICED}")
    return warnings


def _sides(reference: Run, candidate: Run) -> tuple[tuple[str, Run], ...]:
    return ("reference", reference), ("candidate", candidate)


def not_alike(key: str, reference: object, candidate: object) -> str:
    """The warning about a difference between the sides that changes the work."""
    return (
        f"NOT COMPARABLE: {key} is {reference!r} in the reference, {candidate!r} in the candidate: the runs did not do "
        "the same work"
    )


def changes_the_work(difference: Mapping[str, Any]) -> bool:
    """Whether runs with this difference (an entry of `differing`) did not do the same work."""
    key: str = difference["key"]
    if key.startswith("config.parallel.") and ABSENT in (difference["reference"], difference["candidate"]):
        return False  # a setting that only one strategy has; comparing two strategies is legitimate
    if key == f"{HEADER}world_size":
        return None not in (difference["reference"], difference["candidate"])  # a trace may not say it
    leaf = key.rpartition(".")[2]
    return key.startswith("config.workload") or any(word in leaf for word in _MUST_AGREE)
