"""Says which rank holds the others up, per step, without comparing clocks (docs/dev/metric-rules.md, K3).

Two quantities of each step and rank, in ms, each against the median of the other ranks:

- *cost*: how much less exposed waiting the rank has than the others, in all groups together;
- *lateness*: how much less it waits at the first collective of the step that anybody waited for.

A rank is named where either exceeds `MARGIN` of the mean step and what handing a collective over takes (the stall
cut-off) by the signed-rank test over steps, at `LEVEL` shared among ranks, from `LEAST_STEPS` steps on; nobody where
the two name different ranks, or where who waited is not known for as long. Cost finds ranks that are late at the end
of a backward pass, lateness those that are late at its beginning.

Must not: compare times of different clocks, or name a rank of a pipeline, whose sends and receives say nothing of who
waited.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import erfc, sqrt
from typing import Final

import numpy as np

from aorta.analysis.account import COMPUTATION, MARGIN, OUTSIDE, StepAccount, longer_than_others
from aorta.analysis.aggregate import LabelledRun
from aorta.analysis.collective_metrics import behind_others
from aorta.analysis.pace import doubled_ranks
from aorta.documents.explanations import Straggler, Stragglers
from aorta.documents.formatting import TEXT
from aorta.read.frames import Floats, Ints
from aorta.timeline.overlap import NS_PER_MS

LEAST_STEPS: Final = 16
"""With two even ranks a given one is first in 13 of 16 steps with probability 0.011 (binomial, p = 1/2)."""
LEVEL: Final = 0.01
_EXACT: Final = 60
"""Values up to which a signed-rank test counts all signs; above, the normal approximation is as good."""
UNEVEN: Final = 0.05
"""Of the mean step: a rank that computes longer than the others by more is said to, as something may use its core; one
that is named, from `MARGIN` on."""


def stragglers_of(dataset: LabelledRun, account: StepAccount) -> tuple[Stragglers, Ints, Floats]:
    """Return which ranks hold the others up, and what they do longer than these; the steps that all ranks recorded; and
    how much less exposed waiting each rank has in them than the median of the others, in ms.
    """
    run, first = dataset.run, dataset.collectives.first_waits
    numbers, ranks = run.steps.global_step, len(run.ranks)
    steps, counts = np.unique(numbers[dataset.used], return_counts=True)
    steps = steps[counts == ranks]
    common = dataset.used & np.isin(numbers, steps)  # by rank, then step
    waited_ns, unknown_ns = (
        of_step[common].reshape(ranks, len(steps)).T for of_step in (account.waited_ns, account.unknown_ns)
    )
    most_ns = int(unknown_ns.sum(axis=0).max(initial=0)) / max(len(steps), 1)  # no step may be on all ranks
    late_ms, cost_ms = first.late_ms[np.searchsorted(first.steps, steps)], behind_others(waited_ns / NS_PER_MS)
    unknown_ms, margin_ms, busy = most_ns / NS_PER_MS, first.margin_ns / NS_PER_MS, {}
    for rank, own in account.ranks.items():
        parts = own.ms(2)
        busy[rank] = sum(ms for (part, what), ms in parts.items() if part in (COMPUTATION, OUTSIDE) and what != "data")
    stragglers = name_stragglers(list(run.ranks), late_ms, cost_ms, unknown_ms, margin_ms, busy, account.step_ms)
    for straggler in stragglers.ranks:
        straggler.because = longer_than_others(account, straggler.rank)
    return stragglers, steps, cost_ms


def later_than(values: Floats, least: float, level: float) -> bool:
    """Return whether values are larger than `least`: their median is, and the signed-rank test (Wilcoxon, Biometrics
    Bulletin 1, 1945; one-sided, exact up to `_EXACT` values) rejects that they lie evenly about it. The median keeps
    out what is late in less than half of the steps.
    """
    beyond = values[values != least] - least
    if not len(beyond) or float(np.median(values)) <= least:
        return False
    doubled = doubled_ranks(np.abs(beyond))
    total = int(doubled[beyond > 0].sum())
    if len(beyond) > _EXACT:
        deviation = float(np.sqrt((doubled.astype(float) ** 2).sum())) / 2
        return erfc((total - doubled.sum() / 2) / deviation / sqrt(2)) / 2 <= level
    ways = np.zeros(int(doubled.sum()) + 1)  # of the signs, by the sum of those that are positive
    ways[0] = 1.0
    for rank in doubled.tolist():
        ways[rank:] += ways[:-rank].copy()
    return bool(ways[total:].sum() <= level * 2.0 ** len(beyond))


def name_stragglers(
    ranks: Sequence[int],
    late_ms: Floats,
    cost_ms: Floats,
    unknown_ms: float,
    margin_ms: float,
    busy_ms: Mapping[int, float],
    step_ms: float,
) -> Stragglers:
    """Apply the rule.

    Args:
        late_ms, cost_ms: of each step (rows) and rank; lateness is NaN where nobody waited.
        unknown_ms: exposed communication a step of the rank with most of it of which waiting is not known.
        margin_ms: what handing a collective over may take.
        busy_ms: rank -> mean of its computation and work outside of blocks, loading of data excepted.
        step_ms: the mean window.
    """
    if len(ranks) < 2:
        return Stragglers(reason="one rank: nobody waits for it", ranks=[])
    if len(cost_ms) < LEAST_STEPS:
        return Stragglers(reason=f"{len(cost_ms)} steps on all ranks, {LEAST_STEPS} are needed", ranks=[])
    least = max(MARGIN * step_ms, margin_ms)
    if unknown_ms > least:
        reason = f"who waited is not known in {TEXT.quantity(unknown_ms, 'ms')} of the exposed communication of a step"
        return Stragglers(reason=reason, ranks=[], uneven=_uneven(busy_ms, step_ms))
    late = np.nan_to_num(late_ms)
    named = [
        {index for index in range(len(ranks)) if later_than(values[:, index], least, LEVEL / len(ranks))}
        for values in (late, cost_ms)
    ]
    uneven = _uneven(busy_ms, step_ms, {ranks[index] for index in named[0] | named[1]})
    if named[0] and named[1] and not named[0] & named[1]:
        ways = [" and ".join(f"rank {ranks[index]}" for index in sorted(way)) for way in named]
        reason = f"{ways[0]} comes last to the first collective, {ways[1]} waits least over the step"
        return Stragglers(reason=reason, ranks=[], uneven=uneven)
    medians = [np.median(values, axis=0) for values in (late, cost_ms)]
    stragglers = [
        Straggler(
            rank=ranks[index],
            late_ms=float(medians[0][index]) if index in named[0] else float(medians[1][index]),
            cost_ms=float(medians[1][index]),
        )
        for index in sorted(named[0] | named[1])
    ]
    if stragglers:
        return Stragglers(reason=None, ranks=stragglers, uneven=uneven)
    most = int(np.argmax(np.maximum(*medians)))
    most_ms, limit = max(float(medians[0][most]), float(medians[1][most])), TEXT.quantity(least, "ms")
    reason = f"no rank is late by more than {limit} in the median step"
    if most_ms > least:
        reason = (
            f"rank {ranks[most]} is {TEXT.quantity(most_ms, 'ms')} late in the median step, but not often enough by "
            f"more than {limit} to be sure"
        )
    return Stragglers(reason=reason, ranks=[], uneven=uneven)


def _uneven(busy_ms: Mapping[int, float], step_ms: float, named: Collection[int] = ()) -> str | None:
    """Return which rank computes longer than the others; of several a named one first, then the one that does most."""
    if len(busy_ms) < 2 or not step_ms:
        return None
    shares = dict(zip(busy_ms, -behind_others(np.array([list(busy_ms.values())]))[0] / step_ms, strict=True))
    uneven = {rank: share for rank, share in shares.items() if share >= (MARGIN if rank in named else UNEVEN)}
    if not uneven:
        return None
    rank = max(uneven, key=lambda rank: (rank in named, uneven[rank]))
    longer = f"computes {TEXT.percent(float(uneven[rank]), 0)} of the step longer than the others"
    return f"rank {rank} {longer}: has it more work, or does something else use its core?"


def straggler_sentences(stragglers: Stragglers | None) -> list[str]:
    """Return one sentence per rank that holds the others up."""
    sentences = []
    for straggler in () if stragglers is None else stragglers.ranks:
        why = f": {straggler.because}" if straggler.because else "; why is not known"
        late = TEXT.quantity(max(straggler.late_ms, straggler.cost_ms), "ms")
        sentences.append(f"rank {straggler.rank} holds the others up {late} a step{why}")
    return sentences
