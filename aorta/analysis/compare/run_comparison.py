"""Compares two datasets: differences and quotients, each with the direction that is better. It gives no verdict.

Must not: call a single launch a regression (W20: verdicts are `launch_comparison`'s), judge milliseconds of one
platform against those of another, or show an end of bounds as a value.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypeAlias

import msgspec
import numpy as np

from aorta.analysis.aggregate import LabelledRun
from aorta.analysis.compare.verdict import Rules
from aorta.analysis.pace import difference_in_lead
from aorta.documents import ABSENT
from aorta.documents.comparison import (
    NOT_SET,
    SIDES,
    ComparedCollective,
    ComparedMetric,
    Comparison,
    FactDifference,
    LossDifference,
)
from aorta.documents.dataset import CollectiveEntry, PaceFacts, Statistics
from aorta.documents.formatting import TEXT
from aorta.documents.metrics import HOST_BOUND, Metric, in_order, metric_named
from aorta.documents.statistics import unknown
from aorta.read.record import collective_library, config_of, interceptor
from aorta.read.record_columns import FORMAT
from aorta.read.run import Run
from aorta.records.run_files import flatten

_OF_COLLECTIVES: Final = ("transfer_ms", "wait_ms", "queued_ms", "busbw_gb_per_s")
HEADER: Final = "header."
"""Prefix of facts from the header; facts of the configuration have another."""
_HEADER_FACTS: Final = ("platform", "world_size", "parallel", "backend", "timer", "instrument_mode", "start_step")
OBSERVED: Final = f"{HEADER}observed_steps"
"""Which steps are observed (`instrument.every`); absent where nothing is looked at."""
LIBRARY: Final = "collective_library"
"""Not a configuration key: the build of NCCL or RCCL that was loaded."""
_VARIABLE: Final = "environment."
_PRELOADED: Final = re.compile(r"[^\s:]*lib[nr]ccl[^\s:/-]*\.so[^\s:/]*")
"""NCCL or RCCL among the libraries of LD_PRELOAD, which are separated by spaces or colons (ld.so(8)); not a plugin
(libnccl-net.so)."""
_MUST_AGREE: Final = ("dtype", "precision", "batch_size", "gradient_accumulation", "sequence_length")
"""Configuration keys that change what is computed, wherever they occur."""
WORK: Final = "work"
"""What `--allow-unlike` is given where programs are unlike by what they communicate."""
_REDUCE: Final = ("allreduce", "reducescatter")
_SAME_WORK: Final = 0.01
"""Of the values that a step reduces: losses, norms and counts are reduced too, in some steps and not in others."""
UNNOTICED: Final = "different configurations would not be noticed"
_NOT_OBSERVED_ALIKE: Final = (
    "measuring costs each step of the one and few of the other; use the same instrument.every for both, or auto and "
    "any number above 1"
)
_SHOWN: Final = 0.0005
"""Of a ratio, or of the reference: a smaller difference is shown as 0."""
NOT_USED: Final = "no such communication in this run"
"""Why a side has no value of a kind of collective that only the other issued."""


Values: TypeAlias = Mapping[str, Statistics]
"""Metric -> its statistics on one side."""


def over_all(values: Values) -> Values:
    """Return metrics whose value is that over all steps, as they are compared where a side has few."""
    return {name: msgspec.structs.replace(described, value=described.over_all) for name, described in values.items()}


def compare(
    datasets: tuple[LabelledRun, LabelledRun],
    values: tuple[Values, Values],
    collectives: tuple[Sequence[CollectiveEntry], Sequence[CollectiveEntry]],
    paces: Sequence[Sequence[PaceFacts | None]],
    rules: Rules,
    *,
    single: bool = True,
) -> Comparison:
    """Compare the candidate with the reference, which comes first in every pair of arguments.

    Args:
        paces: `pace` of each launch of a side.
        rules: keys that change the work, and in which they do not allow the runs to differ, are `unlike`.
        single: a side is its run, and does not stand for launches that the caller warns of.
    """
    reference, candidate = (dataset.run for dataset in datasets)
    left, right = (side["overlap_ratio"].value if "overlap_ratio" in side else None for side in values)
    not_judged = why_ratios_alone(*datasets, judge_milliseconds=rules.judge_milliseconds)
    facts_of = facts(reference), facts(candidate)
    differences = differing(*facts_of)
    null = [dataset.label for dataset, value in zip(datasets, (left, right), strict=True) if value is None]
    unlike = [
        difference.key
        for difference in differences
        if changes_the_work(difference) and not rules.allows(difference.key)
    ]
    metrics, of_both = pairs(*values, not_judged), _collectives(*collectives, not_judged)
    if unlike:
        listed = [getattr(row, name) for row in of_both for name in _OF_COLLECTIVES]
        why = "the runs did not do the same work" if unlike != [OBSERVED] else _NOT_OBSERVED_ALIKE
        _withhold([*metrics.values(), *listed], f"{why}: {', '.join(unlike)}")
    warnings = _warnings(reference, candidate, differences, unlike)
    if single:
        silent = [side for side, run in zip(SIDES, (reference, candidate), strict=True) if run.manifest is None]
        who = "neither side has a" if len(silent) > 1 else f"the {silent[0]} has no" if silent else ""
        warnings += [f"{who} manifest: {UNNOTICED}"] if silent else []
    swaps = (not_swapped(*facts_of, variable) for variable in ("LD_PRELOAD", "LD_LIBRARY_PATH"))
    return Comparison(
        reference=datasets[0].label,
        candidate=datasets[1].label,
        reference_overlap_ratio=left,
        candidate_overlap_ratio=right,
        ratio_delta=None if left is None or right is None else right - left,
        ratio_delta_reason=f"overlap_ratio is not available for {' and '.join(null)}" if null else ABSENT,
        verdict="inconclusive",
        verdict_reason="one launch per side; a verdict needs four"
        if reference.source.format == candidate.source.format == FORMAT
        else "no verdict from traces: it needs four launches per side, recorded by AORTA",
        host_bound=difference_in_lead(*paces),
        warnings=[*warnings, *filter(None, swaps)],
        manifest_differences=differences,
        losses=compared_losses(reference, candidate),
        unlike=unlike,
        statistic="median",
        metrics=metrics,
        collectives=of_both,
        collectives_on_one_side={side: len(rows) - len(of_both) for side, rows in zip(SIDES, collectives, strict=True)},
    )


def why_ratios_alone(reference: LabelledRun, candidate: LabelledRun, *, judge_milliseconds: bool) -> str | None:
    """Return why only ratios are judged; None if milliseconds are, too."""
    platforms = reference.run.source.platform, candidate.run.source.platform
    if judge_milliseconds or (platforms[0] == platforms[1] is not None):
        return None
    ratios = "only ratios are judged across platforms"
    return f"the platform of a side is not known, and {ratios}" if None in platforms else ratios


def _withhold(pairs: Iterable[ComparedMetric], reason: str) -> None:
    """Withhold directions and verdicts between runs of different work; what was not judged keeps its own reason."""
    for pair in pairs:
        if pair.judgement != "not judged":
            pair.judgement, pair.judgement_reason = "not judged", reason


def pairs(before: Values, after: Values, not_judged: str | None = None) -> dict[str, ComparedMetric]:
    """Return every metric of two sides that is compared, side by side (`metrics` of the comparison).

    Args:
        not_judged: why only ratios are judged; None if all metrics are.
    """
    nothing = [unknown(NOT_USED if side else "no step is used") for side in (before, after)]
    return {
        name: _pair(metric_named(name), before.get(name, nothing[0]), after.get(name, nothing[1]), not_judged)
        for name in in_order({*before, *after})
    }


def _collectives(
    before: Sequence[CollectiveEntry], after: Sequence[CollectiveEntry], not_judged: str | None
) -> list[ComparedCollective]:
    others = {(row.kind, row.group, row.group_size, row.bytes): row for row in after}
    both = []
    for row in before:
        key = row.kind, row.group, row.group_size, row.bytes
        other = others.get(key)
        if other is None:
            continue
        compared = [
            _pair(metric_named(name), getattr(row, name), getattr(other, name), not_judged) for name in _OF_COLLECTIVES
        ]
        if row.starts_open or other.starts_open:
            _withhold(compared, HOST_BOUND)
        both.append(ComparedCollective(row.kind, row.group, row.group_title, row.group_size, row.bytes, *compared))
    return both


def _pair(metric: Metric, left: Statistics, right: Statistics, not_judged: str | None) -> ComparedMetric:
    difference, quotient, undefined = None, None, None
    if left.value is None or right.value is None:
        undefined = "not available on one side"
    else:
        difference = right.value - left.value
        quotient, undefined = (right.value / left.value, None) if left.value else (None, "the reference is 0")
    reasons = [f"{name}: {side.reason}" for name, side in zip(SIDES, (left, right), strict=True) if side.reason]
    judgement, why = "not judged", None
    if left.reason and left.reason == right.reason:
        why = left.reason
    elif reasons:
        why = "; ".join(reasons)
    elif metric.unit != "ratio" and not_judged is not None:
        why = not_judged
    elif not difference or abs(difference) < _SHOWN * (1.0 if metric.unit == "ratio" else abs(left.value or 0.0)):
        judgement = "equal"
    elif metric.better is None:
        judgement, why = "neutral", "neither direction is good in itself"
    else:
        judgement = "better" if (difference > 0) == (metric.better == "higher") else "worse"
    # A comparison repeats everything of a dataset but the medians of its ranks.
    of_ranks = dict.fromkeys(("per_rank_median", "rank_spread", "rank_spread_reason"), ABSENT)
    return ComparedMetric(
        unit=metric.unit,
        better=metric.better,
        reference=msgspec.structs.replace(left, **of_ranks),
        candidate=msgspec.structs.replace(right, **of_ranks),
        difference=difference,
        quotient=quotient,
        quotient_reason=undefined,
        judgement=judgement,
        judgement_reason=why,
    )


def facts(run: Run) -> dict[str, object]:
    """Return what was run: `header.<name>` of the record, `config.<dotted key>` of the configuration, variables of the
    environment, `LIBRARY`, and what timed collectives.
    """
    of_header = {f"{HEADER}{name}": getattr(run.source, name) for name in _HEADER_FACTS}
    of_header[f"{HEADER}world_size"] = run.source.world_size or None
    if run.source.every is not None:
        of_header[OBSERVED] = observed_steps(run.source.every)
    configuration = dict(flatten(config_of(run.manifest), "config."))
    configuration.pop("config.training.output_dir", None)  # where a run writes says nothing of what it did
    if configuration.get("config.telemetry.steps_end_by") == "the optimizer":
        del of_header[f"{HEADER}start_step"]  # recording begins once all ranks have met, whatever step that is
    environment = (run.manifest or {}).get("environment")
    configuration |= flatten(environment if isinstance(environment, dict) else {}, _VARIABLE)
    library, timed_by = collective_library(run.manifest), interceptor(run.manifest)
    return {
        **of_header,
        **({} if library is None else {LIBRARY: library}),
        **configuration,
        **({} if timed_by is None else {"config.instrument.interceptor": timed_by}),
    }


def observed_steps(every: str) -> str:
    """Return which steps `instrument.every` observes, as a fact."""
    return "all" if every == "1" else "a sample"


def differing(left: Mapping[str, object], right: Mapping[str, object]) -> list[FactDifference]:
    """Return facts that differ: of headers always, of the configuration where both sides have one."""
    if any(all(key.startswith(HEADER) for key in side) for side in (left, right)):
        left, right = ({k: v for k, v in side.items() if k.startswith(HEADER)} for side in (left, right))
    return [
        FactDifference(key, left.get(key, NOT_SET), right.get(key, NOT_SET))
        for key in dict.fromkeys([*left, *right])
        if left.get(key, NOT_SET) != right.get(key, NOT_SET)
    ]


def changes_the_work(difference: FactDifference) -> bool:
    """Return whether runs with this difference (an entry of `differing`) did not do the same work, or of one each step
    was observed and of the other a sample: then measuring costs their steps different times.
    """
    key = difference.key
    if key == OBSERVED:
        return NOT_SET not in (difference.reference, difference.candidate)
    if key.startswith("config.parallel.") and NOT_SET in (difference.reference, difference.candidate):
        return False  # a setting that only one strategy has; comparing two strategies is legitimate
    if key == f"{HEADER}world_size":
        return None not in (difference.reference, difference.candidate)  # a trace may not say it
    leaf = key.rpartition(".")[2]
    return key.startswith("config.workload") or any(word in leaf for word in _MUST_AGREE)


def unlike_work(reference: Run, candidate: Run) -> str | None:
    """Return that two programs did not do the same work, by what they communicate: a strategy reduces as many values a
    step as its model has parameters, in buckets of whatever number and type. None where nothing tells: of two
    strategies, of none, or where the configuration says what was computed (`changes_the_work`).
    """
    runs = reference, candidate
    if len(strategies := {run.source.parallel for run in runs}) > 1 or strategies & {None, "none"}:
        return None
    if reference.source.world_size != candidate.source.world_size or any(
        config_of(run.manifest).get("workload") is not None for run in runs
    ):
        return None
    left, right = map(_reduced_values, runs)
    if left is None or right is None or abs(left - right) <= _SAME_WORK * max(left, right):
        return None
    counts = [TEXT.count(round(values), "value") for values in (left, right)]
    return (
        f"None is named, as the programs did not do the same work: a step reduces {counts[0]} over ranks in the "
        f"reference, {counts[1]} in the candidate (--allow-unlike {WORK} names it all the same)."
    )


def _reduced_values(run: Run) -> float | None:
    """Return how many values a rank reduces over ranks a step; None where it reduces none, or a size or type is not
    known.
    """
    rows, used = run.collectives, run.steps.used
    values = []
    for name in rows.names:
        bits = re.search(r"\d+", name.dtype or "")  # float32, bfloat16, float8_e4m3fn
        known = np.nan if bits is None or name.bytes < 0 else name.bytes * 8 / int(bits[0])
        values.append(known if name.kind in _REDUCE else 0.0)
    total = float(np.array(values or [0.0])[rows.name[used[rows.step]]].sum())
    return total / int(used.sum()) if total > 0 else None


def not_alike(key: str, reference: object, candidate: object) -> str:
    """Return the warning about a difference between the sides that changes the work."""
    differ = f"NOT COMPARABLE: {key} is {reference!r} in the reference, {candidate!r} in the candidate: "
    return differ + (_NOT_OBSERVED_ALIKE if key == OBSERVED else "the runs did not do the same work")


def not_swapped(left: Mapping[str, object], right: Mapping[str, object], variable: str) -> str | None:
    """Return that both sides loaded the same NCCL or RCCL although a variable asked for two; None where it did not, or
    they did not.

    Args:
        left, right: `facts` of reference and candidate.
        variable: LD_PRELOAD, of which the entries count that name such a library, or LD_LIBRARY_PATH.
    """
    values = [str(side.get(f"{_VARIABLE}{variable}", "")) for side in (left, right)]
    asked = [_PRELOADED.findall(text) if variable == "LD_PRELOAD" else text for text in values]
    loaded = left.get(LIBRARY)
    if asked[0] == asked[1] or loaded != right.get(LIBRARY) or (loaded is None and variable != "LD_PRELOAD"):
        return None
    return (
        f"{variable} is {values[0]!r} in the reference, {values[1]!r} in the candidate, but both sides loaded "
        f"{f'the same NCCL or RCCL, {loaded}' if loaded else 'no NCCL or RCCL'}"
    )


def compared_losses(reference: Run, candidate: Run) -> LossDifference | None:
    """Compare the losses of all steps, warm-up included; None where no rank has one of the same step on both sides."""
    sides = []
    for run in (reference, candidate):
        losses = run.steps.column("loss")
        rank_steps = zip(run.rank_of_step.tolist(), run.steps.global_step.tolist(), strict=True)
        sides.append(
            {rank_step: loss for rank_step, loss in zip(rank_steps, losses, strict=True) if not np.isnan(loss)}
        )
    shared = [rank_step for rank_step in sides[0] if rank_step in sides[1]]
    if not shared:
        return None
    before, after = (np.array([side[rank_step] for rank_step in shared]) for side in sides)
    count, equal = len(shared), int((before == after).sum())
    if equal == count:
        return LossDifference(count, equal, None, None, None, f"bit-equal in all {TEXT.count(count, 'rank-step')}")
    differences = after - before
    index = int(np.argmax(np.abs(differences)))
    rank, step = shared[index]
    by = f"{abs(differences[index]):.2g}, {before[index]:.9g} -> {after[index]:.9g} (rank {rank}, step {step})"
    text = f"differ in {count - equal} of {TEXT.count(count, 'rank-step')}, most by {by}"
    return LossDifference(count, equal, float(differences[index]), rank, step, text)


def _warnings(reference: Run, candidate: Run, differences: list[FactDifference], unlike: list[str]) -> list[str]:
    """Return what else than the change may make the difference; that the work is unlike, the headline says."""
    warnings = [
        not_alike(difference.key, difference.reference, difference.candidate)
        for difference in differences
        if changes_the_work(difference) and difference.key not in unlike
    ]
    warnings += [
        f"steps may not mean the same: {difference.reference} ends them in the reference, "
        f"{difference.candidate} in the candidate"
        for difference in differences
        if difference.key == "config.telemetry.steps_end_by"
        and NOT_SET not in (difference.reference, difference.candidate)
    ]
    modes = reference.source.instrument_mode, candidate.source.instrument_mode
    if modes[0] != modes[1]:
        warnings.append(f"the runs used different instrument modes: {', '.join(modes)}")
    timed_by = interceptor(reference.manifest), interceptor(candidate.manifest)
    if None not in timed_by and timed_by[0] != timed_by[1]:
        warnings.append(
            f"collectives were timed by {timed_by[0]} in the reference, by {timed_by[1]} in the candidate: timing from "
            "Python lengthens the step; use the compiled extension for both or for neither"
        )
    if reference.source.identity == candidate.source.identity:
        warnings.append(f"both sides are the same run {reference.source.identity!r}")
    return warnings
