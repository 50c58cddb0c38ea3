"""Compares two datasets: differences and quotients, each with the direction that is better; where the host set the pace
of a side, bounds against bounds. It gives no verdict.

Must not: call a single launch a regression (W20: verdicts are `launch_comparison`'s), judge milliseconds of one
platform against those of another, or show an end of bounds as a value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

import msgspec
import numpy as np

from aorta.analysis.aggregate import LabelledRun
from aorta.analysis.documents import ABSENT, known
from aorta.analysis.documents.comparison import (
    SIDES,
    ComparedBounds,
    ComparedCollective,
    ComparedMetric,
    Comparison,
    FactDifference,
    HostBoundSide,
    Interval,
    LossDifference,
    Quotient,
)
from aorta.analysis.documents.dataset import CollectiveEntry, DatasetEntry, Described, Ends, PaceFacts
from aorta.analysis.formatting import TEXT
from aorta.analysis.host_bound import HOST_BOUND
from aorta.analysis.load.record_columns import FORMAT
from aorta.analysis.load.records import collective_library, config_of, interceptor
from aorta.analysis.metrics import Metric, in_order, metric_named
from aorta.analysis.run import Run
from aorta.records.run_files import flatten

VERDICT: Final = "inconclusive"
VERDICT_REASON: Final = "one {what} per side; a verdict needs four"
_OF_COLLECTIVES: Final = ("transfer_ms", "wait_ms", "queued_ms", "busbw_gb_per_s")
_HEADER_FACTS: Final = ("platform", "world_size", "parallel", "backend", "timer", "instrument_mode", "start_step")
_INTERCEPTOR: Final = "config.instrument.interceptor"
"""Not a configuration key: whether the instrument's compiled extension was available."""
LIBRARY: Final = "collective_library"
"""Not a configuration key either: the build of NCCL or RCCL that was loaded."""
_VARIABLE: Final = "environment."
_PRELOADED: Final = re.compile(r"[^\s:]*lib[nr]ccl[^\s:/-]*\.so[^\s:/]*")
"""NCCL or RCCL among the libraries of LD_PRELOAD, which are separated by spaces or colons (ld.so(8)); not a plugin
(libnccl-net.so)."""
_WHERE: Final = "config.training.output_dir"
_MUST_AGREE: Final = ("dtype", "precision", "batch_size", "gradient_accumulation", "sequence_length")
"""Configuration keys that change what is computed, wherever they occur."""
HEADER: Final = "header."
"""Prefix of facts from the header; facts of the configuration have another."""
UNNOTICED: Final = "different configurations would not be noticed"
NOT_USED: Final = "no such communication in this run"
"""Why a side has no value of a kind of collective that only the other issued."""
NOT_SET: Final = "(absent)"
ACROSS_PLATFORMS: Final = "only ratios are judged across platforms"
_PLATFORM_UNKNOWN: Final = "the platform of a side is not known, and only ratios are judged across platforms"


@dataclass(frozen=True)
class SideValue:
    """One metric of one side. `median`, of few steps the value over all of them, is None for `reason`; `bounds` say
    what is known none the less. Of launches also `extremes`, the lowest and the highest that any launch can have, and
    how many there are.
    """

    median: float | None
    reason: str | None
    bounds: Ends | None = None
    ratio_of_sums: float | None = ABSENT
    extremes: tuple[float, float] | None = None
    launches: int = 1

    @classmethod
    def of(cls, described: Described, *, over_all: bool = False) -> SideValue:
        """Return a metric of a single run; `over_all`: its mean or ratio of sums (`Described.over_all`)."""
        if over_all and described.median is not None:
            return cls(described.over_all, described.reason, known(described.bounds))
        return cls(described.median, described.reason, known(described.bounds), described.ratio_of_sums)

    @property
    def ends(self) -> Ends | None:
        """At least and at most; of a known value twice this value."""
        if self.bounds is not None or self.median is None:
            return self.bounds
        return Ends(self.median, self.median)


@dataclass(frozen=True)
class ComparedSide:
    """What a comparison takes of one side."""

    metrics: Mapping[str, SideValue]
    collectives: Sequence[CollectiveEntry] = ()
    pace: PaceFacts | None = None

    @classmethod
    def of(cls, entry: DatasetEntry, *, over_all: bool = False) -> ComparedSide:
        """Return a single run as a side."""
        metrics = {name: SideValue.of(described, over_all=over_all) for name, described in entry.described.items()}
        return cls(metrics, entry.matched, known(entry.pace))

    @property
    def overlap_ratio(self) -> float | None:
        """The overlap ratio."""
        return self.metrics["overlap_ratio"].median if "overlap_ratio" in self.metrics else None


def compare(
    reference: LabelledRun,
    candidate: LabelledRun,
    before: ComparedSide,
    after: ComparedSide,
    *,
    judge_milliseconds: bool = False,
    allows: Callable[[str], bool] = lambda _key: False,
) -> Comparison:
    """Compare the candidate with the reference.

    Args:
        before, after: the values of reference and candidate.
        judge_milliseconds: judge milliseconds across platforms too.
        allows: whether the runs may differ in a key although it changes the work. Keys that it does not allow are
            `unlike`.
    """
    left, right = before.overlap_ratio, after.overlap_ratio
    not_judged = why_ratios_alone(reference, candidate, judge_milliseconds=judge_milliseconds)
    known_of = facts(reference.run), facts(candidate.run)
    differences = differing(*known_of)
    traced = all(side.run.source.format != FORMAT for side in (reference, candidate))
    null = [dataset.label for dataset, value in ((reference, left), (candidate, right)) if value is None]
    unlike = [each.key for each in differences if changes_the_work(each) and not allows(each.key)]
    metrics, collectives = pairs(before, after, not_judged), _collectives(before, after, not_judged)
    if unlike:
        listed = [getattr(row, name) for row in collectives for name in _OF_COLLECTIVES]
        _withhold([*metrics.values(), *listed], f"the runs did not do the same work: {', '.join(unlike)}")
    return Comparison(
        reference=reference.label,
        candidate=candidate.label,
        reference_overlap_ratio=left,
        candidate_overlap_ratio=right,
        ratio_delta=None if left is None or right is None else right - left,
        ratio_delta_reason=f"overlap_ratio is not available for {' and '.join(null)}" if null else ABSENT,
        verdict=VERDICT,
        verdict_reason=VERDICT_REASON.format(what="capture" if traced else "launch"),
        host_bound=difference_in_lead([before.pace], [after.pace]),
        warnings=[
            *_warnings(reference.run, candidate.run, differences),
            *filter(None, (not_swapped(*known_of, variable) for variable in ("LD_PRELOAD", "LD_LIBRARY_PATH"))),
        ],
        manifest_differences=differences,
        losses=compared_losses(reference.run, candidate.run),
        unlike=unlike,
        statistic="median",
        metrics=metrics,
        collectives=collectives,
        collectives_on_one_side={
            "reference": len(before.collectives) - len(collectives),
            "candidate": len(after.collectives) - len(collectives),
        },
        attribution=None,
    )


def why_ratios_alone(reference: LabelledRun, candidate: LabelledRun, *, judge_milliseconds: bool) -> str | None:
    """Return why only ratios are judged; None if milliseconds are, too."""
    platforms = reference.run.source.platform, candidate.run.source.platform
    if judge_milliseconds or (platforms[0] == platforms[1] is not None):
        return None
    return _PLATFORM_UNKNOWN if None in platforms else ACROSS_PLATFORMS


def _withhold(pairs: Iterable[ComparedMetric], reason: str) -> None:
    """Withhold directions and verdicts between runs of different work; what was not judged keeps its own reason."""
    for pair in pairs:
        if pair.judgement != "not judged":
            pair.judgement, pair.judgement_reason = "not judged", reason


def pairs(before: ComparedSide, after: ComparedSide, not_judged: str | None = None) -> dict[str, ComparedMetric]:
    """Return every metric of two sides that is compared, side by side (`metrics` of the comparison).

    Args:
        not_judged: why only ratios are judged; None if all metrics are.
    """
    compared = {}
    for metric in map(metric_named, in_order({*before.metrics, *after.metrics})):
        left, right = (side.metrics.get(metric.name) or _absent(side) for side in (before, after))
        pair = compared[metric.name] = _pair(metric, left, right, not_judged)
        if ABSENT not in (left.ratio_of_sums, right.ratio_of_sums):
            pair.ratio_of_sums = _difference(left.ratio_of_sums, right.ratio_of_sums)
    return compared


def _absent(side: ComparedSide) -> SideValue:
    return SideValue(None, NOT_USED if side.metrics else "no step is used")


def _collectives(before: ComparedSide, after: ComparedSide, not_judged: str | None) -> list[ComparedCollective]:
    """Return the collectives that both sides issued, matched by kind, group name, group size and bytes."""
    others = {(row.kind, row.group, row.group_size, row.bytes): row for row in after.collectives}
    both = []
    for row in before.collectives:
        key = row.kind, row.group, row.group_size, row.bytes
        if key not in others:
            continue
        values = [[SideValue.of(getattr(each, name)) for name in _OF_COLLECTIVES] for each in (row, others[key])]
        found = [
            _pair(metric_named(name), left, right, not_judged)
            for name, left, right in zip(_OF_COLLECTIVES, *values, strict=True)
        ]
        if row.starts_open or others[key].starts_open:
            _withhold(found, HOST_BOUND)
        both.append(ComparedCollective(*key, *found))
    return both


def _pair(metric: Metric, left: SideValue, right: SideValue, not_judged: str | None) -> ComparedMetric:
    values = _difference(left.median, right.median)
    reasons = [f"{name}: {side.reason}" for name, side in zip(SIDES, (left, right), strict=True) if side.reason]
    judgement, why = "not judged", None
    if left.reason and left.reason == right.reason:
        why = left.reason
    elif reasons:
        why = "; ".join(reasons)
    elif metric.unit != "ratio" and not_judged is not None:
        why = not_judged
    elif not values.difference:
        judgement = "equal"
    elif metric.better is None:
        judgement, why = "neutral", "neither direction is good in itself"
    else:
        judgement = "better" if (values.difference > 0) == (metric.better == "higher") else "worse"
    bounds = bounded_pair(left, right)
    if bounds is not None and metric.unit != "ratio" and not_judged is not None:
        bounds, why = None, not_judged  # bounds of milliseconds decide no more across platforms than values do
    return ComparedMetric(
        unit=metric.unit,
        better=metric.better,
        **msgspec.structs.asdict(values),
        judgement=judgement,
        judgement_reason=why,
        bounds=ABSENT if bounds is None else bounds,
    )


def _difference(left: float | None, right: float | None) -> Quotient:
    """Return candidate minus reference, and candidate / reference; a quotient over 0 is undefined."""
    if left is None or right is None:
        return Quotient(left, right, None, None, "not available on one side")
    if not left:
        return Quotient(left, right, right - left, None, "the reference is 0")
    return Quotient(left, right, right - left, right / left, None)


def facts(run: Run) -> dict[str, object]:
    """Return facts of the header as `header.<name>`, and leaves of the configuration as `config.<dotted key>`."""
    header = {f"{HEADER}{name}": getattr(run.source, name) for name in _HEADER_FACTS}
    header[f"{HEADER}world_size"] = run.source.world_size or None
    library = collective_library(run.manifest)
    header |= {LIBRARY: library} if library is not None else {}
    configuration = dict(flatten(config_of(run.manifest), "config."))
    configuration.pop(_WHERE, None)  # where a run writes says nothing of what it did
    environment = (run.manifest or {}).get("environment")
    configuration |= flatten(environment if isinstance(environment, dict) else {}, _VARIABLE)
    timed_by = interceptor(run.manifest)
    return header | configuration | ({_INTERCEPTOR: timed_by} if timed_by is not None else {})


def not_swapped(left: Mapping[str, object], right: Mapping[str, object], variable: str) -> str | None:
    """Return that both sides loaded the same NCCL or RCCL although a variable asked for two; None where it did not, or
    they did not.

    Args:
        left, right: `facts` of reference and candidate.
        variable: LD_PRELOAD, of which the entries count that name such a library, or LD_LIBRARY_PATH.
    """
    said = [str(side.get(f"{_VARIABLE}{variable}", "")) for side in (left, right)]
    asked = [_PRELOADED.findall(each) if variable == "LD_PRELOAD" else each for each in said]
    loaded = left.get(LIBRARY)
    if asked[0] == asked[1] or loaded != right.get(LIBRARY) or (loaded is None and variable != "LD_PRELOAD"):
        return None
    return (
        f"{variable} is {said[0]!r} in the reference, {said[1]!r} in the candidate, but both sides loaded "
        f"{f'the same NCCL or RCCL, {loaded}' if loaded else 'no NCCL or RCCL'}"
    )


def compared_losses(reference: Run, candidate: Run) -> LossDifference | None:
    """Compare the losses of all steps, warm-up included; None where no rank has one of the same step on both sides."""
    sides = []
    for run in (reference, candidate):
        losses = run.steps.column("loss")
        places = zip(run.rank_of_step.tolist(), run.steps.global_step.tolist(), strict=True)
        sides.append({place: loss for place, loss in zip(places, losses, strict=True) if not np.isnan(loss)})
    shared = [place for place in sides[0] if place in sides[1]]
    if not shared:
        return None
    before, after = (np.array([side[place] for place in shared]) for side in sides)
    count, equal = len(shared), int((before == after).sum())
    if equal == count:
        return LossDifference(count, equal, None, None, None, f"bit-equal in all {TEXT.count(count, 'rank-step')}")
    differences = after - before
    at = int(np.argmax(np.abs(differences)))
    rank, step = shared[at]
    by = f"{abs(differences[at]):.2g}, {before[at]:.9g} -> {after[at]:.9g} (rank {rank}, step {step})"
    said = f"differ in {count - equal} of {TEXT.count(count, 'rank-step')}, most by {by}"
    return LossDifference(count, equal, float(differences[at]), rank, step, said)


def differing(left: Mapping[str, object], right: Mapping[str, object]) -> list[FactDifference]:
    """Return facts that differ: of headers always, of the configuration where both sides have one."""
    if any(all(key.startswith(HEADER) for key in side) for side in (left, right)):
        left, right = ({k: v for k, v in side.items() if k.startswith(HEADER)} for side in (left, right))
    return [
        FactDifference(key, left.get(key, NOT_SET), right.get(key, NOT_SET))
        for key in dict.fromkeys([*left, *right])
        if left.get(key, NOT_SET) != right.get(key, NOT_SET)
    ]


def _warnings(reference: Run, candidate: Run, differences: list[FactDifference]) -> list[str]:
    warnings = [
        not_alike(difference.key, difference.reference, difference.candidate)
        for difference in differences
        if changes_the_work(difference)
    ]
    sides = dict(zip(SIDES, (reference, candidate), strict=True))
    emulated = [side for side, run in sides.items() if run.health.fabric is not None]
    if emulated:
        where = "on both sides" if len(emulated) == 2 else f"in the {emulated[0]}"
        warnings.append(f"EMULATED FABRIC {where}: communication times are those of the emulation")
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
    for side, run in sides.items():
        if run.manifest is None:
            warnings.append(f"the {side} has no manifest: {UNNOTICED}")
    return warnings


def not_alike(key: str, reference: object, candidate: object) -> str:
    """Return the warning about a difference between the sides that changes the work."""
    return (
        f"NOT COMPARABLE: {key} is {reference!r} in the reference, {candidate!r} in the candidate: the runs did not do "
        "the same work"
    )


def changes_the_work(difference: FactDifference) -> bool:
    """Return whether runs with this difference (an entry of `differing`) did not do the same work."""
    key = difference.key
    if key.startswith("config.parallel.") and NOT_SET in (difference.reference, difference.candidate):
        return False  # a setting that only one strategy has; comparing two strategies is legitimate
    if key == f"{HEADER}world_size":
        return None not in (difference.reference, difference.candidate)  # a trace may not say it
    leaf = key.rpartition(".")[2]
    return key.startswith("config.workload") or any(word in leaf for word in _MUST_AGREE)


def bounded_pair(reference: SideValue, candidate: SideValue) -> ComparedBounds | None:
    """Compare the bounds of both sides of a metric (a value is both): over all pairs of launches the least and greatest
    difference, and relative change. None where neither side has bounds, or one is not known at all.
    """
    before, after = reference.ends, candidate.ends
    if (reference.bounds is None and candidate.bounds is None) or before is None or after is None:
        return None
    (low, high), (from_, to) = (
        side.extremes or (ends.at_least, ends.at_most) for side, ends in ((reference, before), (candidate, after))
    )
    return ComparedBounds(
        before,
        after,
        difference=Interval(from_ - high, to - low),
        change=Interval(from_ / high - 1 if high else None, to / low - 1 if low else None),
        launches={"reference": reference.launches, "candidate": candidate.launches},
    )


def difference_in_lead(
    reference: Sequence[PaceFacts | None], candidate: Sequence[PaceFacts | None]
) -> HostBoundSide | None:
    """Return which side is host-bound, by how much each host is ahead, and the sentence that says so; None where both
    are, neither is, or it is not known of one.

    Args:
        reference, candidate: `pace` of each launch of a side. A side is host-bound where most of its launches are.
    """
    before, after = _host_bound(reference), _host_bound(candidate)
    if before is None or after is None or before == after:
        return None
    leads: dict[str, float] = {
        name: median(pace.host_lead_ms for pace in launches if pace and pace.host_lead_ms is not None)
        for name, launches in zip(SIDES, (reference, candidate), strict=True)
    }
    side, other = SIDES[::-1] if after else SIDES
    own, against = (TEXT.quantity(leads[name], "ms") for name in (side, other))
    return HostBoundSide(
        side,
        leads,
        f"the {side} is host-bound: its host is {own} ahead of the device (median), the {other}'s {against}. "
        "The sides differ in launch speed of their hosts, not in overlap.",
    )


def _host_bound(launches: Sequence[PaceFacts | None]) -> bool | None:
    bound = [pace.host_bound for pace in launches if pace is not None and pace.host_bound is not None]
    return sum(bound) * 2 > len(bound) if bound else None
