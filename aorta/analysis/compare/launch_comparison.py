"""Builds the `comparison` of `summary.json` for two launch sets: every metric with its verdict, and the overall
verdict.

Launches that did not do the same work are refused: a difference in the work is an error that names the key and both
values, unless the caller allowed it; then it is listed. Must not: let one side mix configurations, which would pass for
noise; decide anything itself (`verdict` does), or show the value of one launch as that of its side.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from aorta.analysis.aggregate import LabelledRun
from aorta.analysis.causes import compare_accounts
from aorta.analysis.compare.launch_set import Launch, LaunchSet, Subject, launch_order
from aorta.analysis.compare.rank_tests import LEAST_LAUNCHES
from aorta.analysis.compare.run_comparison import (
    LIBRARY,
    OBSERVED,
    UNNOTICED,
    WORK,
    changes_the_work,
    compare,
    differing,
    not_alike,
    not_swapped,
    unlike_work,
    why_ratios_alone,
)
from aorta.analysis.compare.verdict import (
    DECIDED,
    GUARD,
    NOT_COMPARABLE,
    NOT_SETTLED,
    SEQUENCE,
    Rules,
    heed_means,
    is_comparable,
    judge,
    launch_test,
    too_few,
)
from aorta.documents import known
from aorta.documents.comparison import (
    NOT_SET,
    SIDES,
    AllowedDifference,
    ComparedMetric,
    Comparison,
    FactDifference,
    LaunchEntry,
    LaunchOrderFacts,
)
from aorta.documents.dataset import CollectiveEntry
from aorta.documents.formatting import TEXT, first_upper, value_text
from aorta.errors import InputError

_ONE_SIDE: Final = ("header.", LIBRARY, "config.parallel.", "config.fabric.", "config.instrument.")
"""Keys that may differ between the sides, where they are what is being compared, but not within one side."""
_VARIES: Final = ".seed"
"""Independent launches may well draw their own jitter, so seeds may differ within a side."""
_NS_PER_S: Final = 10**9
_FEW: Final = 3
"""Keys that an error names."""


def refuse_mixed(side: LaunchSet, rules: Rules) -> None:
    """Check that all launches of a set did the same work in the same way.

    Raises:
        InputError: they did not; with what differs, in which folders.
    """
    keys = list(dict.fromkeys(difference.key for _, difference in _within(side) if not rules.allows(difference.key)))
    if not keys:
        return
    folders: dict[str, list[str]] = {}
    for launch in side.launches:
        values = [f"{key.removeprefix('config.')}={value_text(launch.facts.get(key, NOT_SET))}" for key in keys[:_FEW]]
        values += [f"{len(keys) - _FEW} more"] if len(keys) > _FEW else []
        folders.setdefault(", ".join(values), []).append(str(launch.path))
    listed = "".join(f"\n  {', '.join(paths)}: {values}" for values, paths in folders.items())
    allowing = keys if len(keys) <= _FEW else ["all"]
    raise InputError(
        f"NOT COMPARABLE: the runs in {side.path} are not launches of one job:{listed}\nChoose one: "
        f"{', '.join(paths[0] for paths in folders.values())}; or compare two (aorta report A B), move unlike "
        f"runs elsewhere, or allow it with {' '.join(f'--allow-unlike {key}' for key in allowing)}"
    )


def refuse_unlike(reference: LaunchSet, candidate: LaunchSet, rules: Rules) -> list[AllowedDifference]:
    """Check that all launches did the same work.

    Returns:
        The differences that would have been refused had the caller not allowed them: `where` is `reference` or
            `candidate` for a difference within that side, else `between`.

    Raises:
        InputError: launches differ in workload, shapes, world size or dtype; or, within a side, in how they ran; or
            the sides preload two libraries for collectives and loaded one.
    """
    allowed: dict[tuple[str, str], AllowedDifference] = {}
    for where, side in zip(SIDES, (reference, candidate), strict=True):
        refuse_mixed(side, rules)
        for other, difference in _within(side):
            paths = [str(_yardstick(side).path), str(other.path)]
            values = [difference.reference, difference.candidate]
            allowed.setdefault((where, difference.key), AllowedDifference(where, difference.key, values, paths))
    left, right = _yardstick(reference), _yardstick(candidate)
    same_library = not_swapped(left.facts, right.facts, "LD_PRELOAD")
    if same_library is not None and not rules.allows(LIBRARY):
        raise InputError(
            f"NOT COMPARABLE: {same_library} ({left.path}, {right.path}): nothing was swapped. Check that both files "
            "exist where the ranks run, and are two builds (sha256sum), or allow it with "
            f"--allow-unlike {LIBRARY}"
        )
    for difference in filter(changes_the_work, differing(left.facts, right.facts)):
        key, values = difference.key, [difference.reference, difference.candidate]
        if not rules.allows(key):
            why = "the two sides did not do the same work. Compare launches that did"
            if key == OBSERVED:
                why = "measuring costs each step of one side, few of the other. Use one instrument.every for both"
            raise InputError(
                f"NOT COMPARABLE: {key} is {values[0]!r} in {left.path}, {values[1]!r} in {right.path}: {why}, "
                f"or allow it with --allow-unlike {key}"
            )
        allowed["between", key] = AllowedDifference("between", key, values, [str(left.path), str(right.path)])
    return list(allowed.values())


def _within(side: LaunchSet) -> Iterator[tuple[Launch, FactDifference]]:
    """Yield in what a launch of a side differs from its yardstick, but may not."""
    first = _yardstick(side)
    for other in side.launches:
        for difference in differing(first.facts, other.facts):
            key = difference.key
            if changes_the_work(difference) or (key.startswith(_ONE_SIDE) and not key.endswith(_VARIES)):
                yield other, difference


def _yardstick(side: LaunchSet) -> Launch:
    """Return the launch that the others of a side are compared with: the first whose configuration is known, or else
    the first.
    """
    return next((launch for launch in side.launches if launch.has_configuration), side.launches[0])


def compare_launches(
    datasets: tuple[LabelledRun, LabelledRun],
    sides: tuple[LaunchSet, LaunchSet],
    collectives: tuple[list[CollectiveEntry], list[CollectiveEntry]],
    rules: Rules,
) -> Comparison:
    """Extend the result of `run_comparison.compare`: its values become medians over launches, and it gains verdicts and
    effects.

    Args:
        datasets: the representative launch of the reference and of the candidate.
        collectives: the collectives of each, as in their aggregates.

    Raises:
        InputError: the launches did different work (`refuse_unlike`).
    """
    allowed = refuse_unlike(*sides, rules)
    if why_ratios_alone(*datasets, judge_milliseconds=rules.judge_milliseconds) and rules.primary == SEQUENCE[0]:
        rules = replace(rules, primary=SEQUENCE[1])  # exposed milliseconds are not judged across platforms
    comparison = compare(
        datasets,
        (sides[0].statistics, sides[1].statistics),
        collectives,
        [[launch.pace for launch in side.launches] for side in sides],
        rules,
        single=False,
    )
    order = launch_order(*sides, assume_no_drift=rules.assume_no_drift)
    named: dict[str, LaunchSet] = dict(zip(SIDES, sides, strict=True))
    unsettled = [f"the {name}: {why}" for name, side in named.items() if (why := side.unsettled) is not None]
    withheld = None
    # That launches are too few is what a reader has to hear first.
    if too_few((len(sides[0].launches), len(sides[1].launches)), rules.alpha):
        comparison.warnings += [f"steps have not settled. {first_upper(why)}" for why in unsettled]
    elif not (order.comparable or rules.assume_no_drift):
        again = "Alternate the launches (docs/compare.md), or judge them anyway with --assume-no-drift"
        withheld = NOT_COMPARABLE, f"{order.reason}. {again}"
    elif unsettled:
        again = "Record more steps, or leave more out as warm-up (telemetry.warmup_steps, warmup_steps=)"
        withheld = NOT_SETTLED, f"{'; '.join(unsettled)}. {again}"
    comparison.verdict, comparison.verdict_reason = judged(comparison.metrics, *sides, rules, withheld)
    comparison.warnings = list(dict.fromkeys([*comparison.warnings, *_warnings(named, allowed, order, rules)]))
    comparison.statistic = "median over launches of the median over steps of all ranks"
    comparison.launches = {
        name: [
            LaunchEntry(
                path=str(launch.path),
                run_id=launch.run_id,
                began_unix_s=None if launch.span_ns is None else launch.span_ns[0] / _NS_PER_S,
                overlap_ratio=launch.median("overlap_ratio"),
                job_step_ms=launch.median(GUARD),
                throttled_ranks=list(launch.throttled_ranks),
            )
            for launch in side.launches
        ]
        for name, side in named.items()
    }
    comparison.launch_order = order
    comparison.left_out = {name: side.left_out for name, side in named.items()}
    comparison.primary, comparison.alpha, comparison.margin = rules.primary, rules.alpha, rules.margin
    comparison.interval_level, comparison.sequence = 1 - rules.alpha, list(rules.sequence)
    comparison.judge_milliseconds, comparison.refused = rules.judge_milliseconds, allowed
    return comparison


def judged(
    metrics: Mapping[str, ComparedMetric],
    reference: LaunchSet,
    candidate: LaunchSet,
    rules: Rules,
    withheld: tuple[str, str] | None = None,
) -> tuple[str, str]:
    """Add test and verdict to every metric.

    Args:
        metrics: those of a comparison of medians (`run_comparison.pairs`).
        withheld: as `judge` takes it.

    Returns:
        The verdict of the comparison, and the reason for it.
    """
    values = {}
    for name, pair in metrics.items():
        values[name] = reference.medians(name), candidate.medians(name)
        left, right = (side[~np.isnan(side)] for side in values[name])
        pair.test = launch_test(name, left, right, rules)
    return judge(metrics, rules, values, withheld)


def add_account(comparison: Comparison, sides: tuple[Subject, Subject], rules: Rules) -> None:
    """Add by how much each part of the step changed, and the cause, to a comparison, whose verdict heeds the means;
    nothing where the sides cannot be compared. A cause needs as many launches as a verdict at 5 %, in turns, also where
    more candidates ask for more launches and a verdict for that reason says nothing of turns.
    """
    if not is_comparable(comparison):
        return
    before, after = (side.as_set() for side in sides)
    few, order = min(len(before.launches), len(after.launches)), known(comparison.launch_order)
    why_none = None if rules.allows(WORK) else unlike_work(*(side.dataset.run for side in sides))
    if 1 < few < LEAST_LAUNCHES:
        why_none = f"None is named: it takes {LEAST_LAUNCHES} launches per side."
    elif few > 1 and order is not None and not (order.comparable or rules.assume_no_drift):
        why_none = f"None is named: {order.reason}."
    step = comparison.metrics.get(GUARD)
    headline_ms = None
    if step is not None and step.verdict in (*DECIDED, "equivalent"):
        headline_ms = step.difference if step.verdict in DECIDED else 0.0
    comparison.account = compare_accounts(
        before.accounts, after.accounts, comparison.manifest_differences, why_none, headline_ms
    )
    heed_means(comparison)


def _warnings(
    sides: Mapping[str, LaunchSet], allowed: Sequence[AllowedDifference], order: LaunchOrderFacts, rules: Rules
) -> Iterator[str]:
    for entry in allowed:
        if entry.where == "between":
            yield not_alike(entry.key, *entry.values)
        else:
            yield f"launches of the {entry.where} differ in {entry.key} ({entry.values[0]!r} and {entry.values[1]!r})"
    for name, side in sides.items():
        silent = [launch.path.name for launch in side.launches if not launch.has_configuration]
        if silent:
            yield (
                f"{len(silent)} of {len(side.launches)} launches of the {name} have no manifest with a configuration "
                f"({', '.join(silent)}): {UNNOTICED}"
            )
    throttled = {name: sum(bool(launch.throttled_ranks) for launch in side.launches) for name, side in sides.items()}
    for name, other in (SIDES, SIDES[::-1]):
        if throttled[name] and not throttled[other]:
            yield (
                f"only the {name} was throttled, in {throttled[name]} of {len(sides[name].launches)} launches: the "
                "cause may be cooling or power, not the stack"
            )
    runs = [{launch.run_id for launch in side.launches} for side in sides.values()]
    shared = runs[0] & runs[1]
    if shared:
        yield f"on both sides: {TEXT.count(len(shared), 'run')} ({min(shared)!r} is one), where nothing can differ"
    if rules.assume_no_drift and not order.comparable:
        yield f"judged as asked (--assume-no-drift), although {order.reason}"
    hosts = [sorted({host for launch in side.launches for host in launch.hosts}) for side in sides.values()]
    if all(hosts) and not set(hosts[0]) & set(hosts[1]):
        left, right = (f"{first} and {len(more)} more" if more else first for first, *more in hosts)
        yield (
            f"the reference ran on {left}, the candidate on {right}: the machines may cause the difference "
            "(docs/compare.md)"
        )
    for name in rules.sequence:  # of kernels in some launches, of marks in others (W29)
        by_kernels = {
            side: [
                launch.samples[name].source == "kernels"
                for launch in launches.launches
                if launch.median(name) is not None
            ]
            for side, launches in sides.items()
        }
        if len(set().union(*by_kernels.values())) > 1:
            counts = ", ".join(f"{sum(flags)} of {len(flags)} of the {side}" for side, flags in by_kernels.items())
            yield (
                f"{name} is measured by kernels in some launches ({counts}), by marks in the others: the profiler's "
                "cost is part of the difference"
            )
