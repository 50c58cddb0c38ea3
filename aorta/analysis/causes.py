"""Says what made the step of one side longer: by how much each part of its account changed, and which make the change.

    compare_accounts(reference, candidate)      # the accounts of the launches of both sides

A *cause* is a part whose change is beyond its 95 % interval over launches (Student's t, in turns where these matter, of
factors where launches differ by factors), beyond `MARGIN` of the step, and of the sign of the step's change; parts are
named, the largest first, until they make `MOST` of the change or the next is much smaller. Waiting is suffered: it
leads to the rank that was waited for, and to what that rank does longer (docs/dev/attribution.md).

Must not: name a change that its interval does not exclude from 0, or draw an interval from one launch a side.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from aorta.analysis.account import (
    EXPOSED,
    IDLE,
    MARGIN,
    MOST,
    OUTSIDE,
    PARTS,
    WAITING,
    StepAccount,
    Words,
    in_words,
)
from aorta.documents.comparison import NOT_SET, AccountChange, AccountComparison, FactDifference
from aorta.documents.formatting import TEXT, first_upper, value_text

LEVEL: Final = 0.95
TOGETHER: Final = 0.98
"""Level at which the intervals of all parts hold together, and at which the step has to have changed before a part is
judged by its own: of fifty pairs of equal launches one may have a cause."""
_ALMOST: Final = 0.8
"""A part with this share of the last cause's change is a cause too: which of both is larger would be chance."""
_COMPARABLE: Final = 0.5
"""A part with less than this share of the largest cause's change is no cause beside it: others grow a little with it,
or with what else the machine does."""
_LEAST: Final = 1 / 3
"""Share of the change below which causes say nothing of it. Not `MOST`: the change of the step is the sum of all parts,
and less certain than the part that makes it."""
_ONE_RANK: Final = 0.7
"""Share of a change from which on it is said to be one rank's."""
_NONE: Final = "None is named: no part of the step changed so much more than the others that chance is ruled out."
_NO_SETTING: Final = ("label", "instrument.interceptor", "environment.LD_PRELOAD", "environment.LD_LIBRARY_PATH")
"""Differences that no setting makes: a name, what was compiled on the machine, and where libraries come from."""
_SHOWN_SETTINGS: Final = 3
_LEAST_OF_SCALE: Final = 4
"""Launches a side, as many as a verdict needs. Of fewer it is chance which scale has less spread."""


class PartChange(NamedTuple):
    """By how much a part changed, and how certain that is over launches; None with a launch on either side.

    Attributes:
        estimate, error, freedom: of the change, its standard error and degrees of freedom: in ms, or, `in_proportion`,
            of the logarithm of candidate over reference.
        p_of_share: probability by chance of as large a change of its share of the step, two-sided; 1 where the share
            changed in the other direction, or was not tested.
    """

    words: Words
    reference_ms: float
    candidate_ms: float
    estimate: float = 0.0
    error: float | None = None
    freedom: float = 1.0
    in_proportion: bool = False
    p_of_share: float = 1.0

    @property
    def ms(self) -> float:
        return self.candidate_ms - self.reference_ms

    @property
    def interval_ms(self) -> tuple[float, float] | None:
        """The interval of the change at `LEVEL`; it holds the change of the means, whichever scale it is from."""
        if self.error is None:
            return None
        from scipy.special import stdtrit  # a third of a second, which single runs do not need

        half = float(stdtrit(self.freedom, 0.5 + LEVEL / 2)) * self.error
        ends = self.estimate - half, self.estimate + half
        if self.in_proportion:
            ends = self.reference_ms * np.expm1(ends[0]), self.reference_ms * np.expm1(ends[1])
        return min(float(ends[0]), self.ms), max(float(ends[1]), self.ms)

    def certain(self, level: float = LEVEL) -> bool:
        """Return whether the interval of this level excludes 0."""
        return self.p < 1 - level

    def overlaps(self, other: PartChange) -> bool:
        """Return whether one of both has the other."""
        depth = min(len(self.words), len(other.words))
        return self.words[:depth] == other.words[:depth]

    @property
    def p(self) -> float:
        """Probability of as large a change by chance, two-sided; 1 where nothing is known of chance, or where the means
        changed the other way than the launches.
        """
        if self.error is None or self.ms * self.estimate <= 0:
            return 1.0
        if not self.error:
            return 0.0
        from scipy.special import stdtr

        return 2 * float(stdtr(self.freedom, -abs(self.estimate) / self.error))


Side: TypeAlias = Sequence[StepAccount]
"""The accounts of the launches of a side, in the order in which these ran."""


def change_of(words: Words, reference: Sequence[float], candidate: Sequence[float]) -> PartChange:
    """Return the change of the means over launches, candidate minus reference.

    A machine that is shared makes launches slower by a factor, a sleep takes as long in all of them. From
    `_LEAST_OF_SCALE` a side on the scale is that on which the launches of the sides spread less: milliseconds, or their
    logarithms times the geometric mean of all (Box and Cox, J. R. Statist. Soc. B 26, 1964).

    Of as many launches on both sides the i-th of each are a turn, in which the machine did to both what it did. Where
    that shows (their covariance is positive) the error is that of the differences within turns; else it is Welch's
    (Biometrika 34, 1947, degrees of freedom by Satterthwaite), as turns without a meaning cost half of the freedom.
    """
    before, after = (np.asarray(values, float) for values in (reference, candidate))
    means, least = (float(before.mean()), float(after.mean())), min(len(before), len(after))
    if least < 2:
        return PartChange(words, *means)
    in_proportion = False
    if least >= _LEAST_OF_SCALE and min(before.min(), after.min()) > 0:
        sides, logs = (before, after), (np.log(before), np.log(after))
        spread, of_logs = (
            sum(float(((side - side.mean()) ** 2).sum()) for side in on_scale) for on_scale in (sides, logs)
        )
        in_proportion = bool(np.exp(np.concatenate(logs).mean()) ** 2 * of_logs < spread)
        before, after = logs if in_proportion else sides
    freedom = 1.0
    if len(before) == len(after) and float(np.cov(before, after)[0, 1]) > 0:
        error, freedom = float((after - before).std(ddof=1)) / len(before) ** 0.5, len(before) - 1
    else:
        variances = [float(values.var(ddof=1)) / len(values) for values in (before, after)]
        total = sum(variances)
        error = total**0.5
        if total:
            freedom = total**2 / sum(v**2 / (len(side) - 1) for v, side in zip(variances, (before, after), strict=True))
    return PartChange(words, *means, float(after.mean() - before.mean()), error, freedom, in_proportion)


def changes(reference: Side, candidate: Side, depth: int, below: Words = ()) -> list[PartChange]:
    """Return the changes of the parts below a part, the largest first."""
    sides = [[account.ms(depth, below) for account in side] for side in (reference, candidate)]
    names = sorted({words for side in sides for of_launch in side for words in of_launch})
    parts = []
    for words in names:
        before, after = ([of_launch.get(words, 0.0) for of_launch in side] for side in sides)
        parts.append(change_of(words, before, after))
    return sorted(parts, key=lambda change: -abs(change.ms))


def causes(
    certain: Sequence[PartChange], change_ms: float, step_ms: float, on_a_rank: Callable[[PartChange], float]
) -> list[PartChange]:
    """Return the parts that make most of a change, the largest first; none where they make less than `_LEAST` of it.

    Args:
        certain: parts that changed; of a part and one that it has, the larger counts.
        step_ms: of the reference.
        on_a_rank: what a part adds on the rank where it changed most. Others wait for that rank, so the step changes by
            as much, and their communication is exposed for as long.
    """
    makes_ms = {part: max(abs(part.ms), abs(on_a_rank(part))) for part in certain if part.ms * change_ms > 0}

    def made(parts: Sequence[PartChange]) -> float:
        return max(abs(sum(part.ms for part in parts)), *(makes_ms[part] for part in parts), 0.0)

    named: list[PartChange] = []
    for part in _apart(sorted(makes_ms, key=lambda part: -makes_ms[part])):
        if makes_ms[part] < MARGIN * step_ms:
            break
        if named:
            make_most = made(named) >= MOST * abs(change_ms)
            least_ms = _ALMOST * makes_ms[named[-1]] if make_most else _COMPARABLE * makes_ms[named[0]]
            if makes_ms[part] < least_ms:
                break
        named.append(part)
    return named if made(named) >= _LEAST * abs(change_ms) else []


def compare_accounts(
    reference: Side | str,
    candidate: Side | str,
    differences: Sequence[FactDifference] = (),
    why_none: str | None = None,
    headline_ms: float | None = None,
) -> AccountComparison:
    """Compare the accounts of two sides: of each part its means and change, which add up to the step's; and the cause.

    Parts are judged by intervals that hold for all of them together, as a part often is certain where the step is not;
    where none is named so and the step changed, at `TOGETHER` and beyond `MARGIN`, by their own and that of their
    share: what slows all parts alike is the cause of none. Of a step that is not decided it is chance how much it
    changed, and which way: what has to be made up are then the parts beyond their own intervals, and a part that
    changed by more may have the other sign.

    Args:
        differences: of what was run; settings are named before the causes.
        why_none: the sentence that is said in place of causes, as where the sides did not do the same work.
        headline_ms: by how much the verdict says that the median step changed, 0 where it says that it did not; None
            where it is not decided.
    """
    sides = {"reference": reference, "candidate": candidate}
    unknown = [f"{name}: {side}" for name, side in sides.items() if isinstance(side, str)]
    if unknown or isinstance(reference, str) or isinstance(candidate, str):
        return AccountComparison(reason="; ".join(unknown))
    step = change_of((), *([account.step_ms for account in side] for side in (reference, candidate)))
    decided = step.certain() and abs(step.ms) >= MARGIN * step.reference_ms
    judged = _parts_that_cause(reference, candidate, MARGIN * step.reference_ms)
    by_itself = _whole_or_kinds([part for part in judged if part.certain()])
    together = _whole_or_kinds(_certain_together(judged))
    change_ms = step.ms
    if not decided:
        sign = headline_ms or step.ms
        together = [
            part for part in together if part.ms * sign > 0 or (not headline_ms and abs(part.ms) > abs(step.ms))
        ]
        change_ms = sum(part.ms for part in _apart(by_itself) if together and part.ms * together[0].ms > 0)

    def on_a_rank(part: PartChange) -> float:
        ms, rank = _on_most(reference, candidate, part)
        if rank is None or part.words[0] == EXPOSED:
            return 0.0
        exposed_ms = _growth(reference, candidate, (EXPOSED,))[rank]
        # A rank that waits less by as much as it does longer holds nobody up.
        return max(ms + min(exposed_ms, 0.0), 0.0) if ms > 0 else min(ms + max(exposed_ms, 0.0), 0.0)

    named = causes(together, change_ms, step.reference_ms, on_a_rank)
    if why_none is not None:
        named = []
    elif decided and step.certain(TOGETHER) and not named:
        more = [part for part in by_itself if part.p_of_share < 1 - LEVEL]
        named = causes(more, change_ms, step.reference_ms, on_a_rank)
    said = {part: cause for part in named if (cause := _said_of(reference, candidate, part)) is not None}
    named = [*said]
    # What a rank does longer is said once, also where it and the waiting for that rank are causes.
    texts = [*{(what, rank): sentence for what, rank, sentence in reversed(said.values())}.values()][::-1]
    text = why_none or (_NONE if decided else None)
    if texts:
        text = f"{_settings(differences)}{first_upper('; '.join(texts))}"
        of_step = "not decided" if headline_ms is None else "unchanged"
        text += "." if decided or headline_ms else f", while the step itself is {of_step}."
    return AccountComparison(
        reason=None,
        step=_as_document(step, ()),
        decided=decided,
        parts=[
            _as_document(part, named, changes(reference, candidate, 2, part.words))
            for part in sorted(changes(reference, candidate, 1), key=lambda part: PARTS.index(part.words[0]))
        ],
        causes=texts,
        sentence=text,
    )


def _settings(differences: Sequence[FactDifference]) -> str:
    """Return the settings in which the sides differ; keys that only one side has follow from others."""
    of_config = [(item.key.removeprefix("config."), item) for item in differences if not item.key.startswith("header.")]
    settings = [(key, item) for key, item in of_config if key not in _NO_SETTING]
    settings = [(key, item) for key, item in settings if NOT_SET not in (item.reference, item.candidate)] or settings
    shown = [
        f"{key} {value_text(item.reference)} -> {value_text(item.candidate)}"
        for key, item in settings[:_SHOWN_SETTINGS]
    ]
    more = f" and {len(settings) - len(shown)} more" if len(settings) > len(shown) else ""
    return f"Configuration: {', '.join(shown)}{more}. " if shown else ""


def _parts_that_cause(reference: Side, candidate: Side, least_ms: float) -> list[PartChange]:
    """Return the parts that can have changed by as much on a rank, the largest change first: computation as one part,
    other work by name, idle time both as one part and by place, exposed communication by kind and waiting or transfer,
    and as one part where most of its change is not waiting.
    """
    candidates = []
    for part in changes(reference, candidate, 1):
        depth = {EXPOSED: 3, OUTSIDE: 2, IDLE: 2}.get(part.words[0], 1)
        below = changes(reference, candidate, depth, part.words) if depth > 1 else []
        waiting_ms = sum(change.ms for change in below if change.words[-1] == WAITING)
        is_one = depth == 1 or (part.words[0] != OUTSIDE and abs(waiting_ms) < MOST * abs(part.ms))
        candidates += [*below, *([part] if is_one else [])]
    judged, ranks = [], max(len(account.ranks) for account in (*reference, *candidate))
    for part in sorted(candidates, key=lambda part: -abs(part.ms)):
        mean_ms = max(part.reference_ms, part.candidate_ms)
        if mean_ms >= least_ms or (
            abs(part.ms) * ranks >= least_ms
            and max(map(abs, _growth(reference, candidate, part.words).values()), default=0.0) >= least_ms
        ):
            # What slows all parts of a launch alike leaves their shares.
            shares = (
                [account.ms(len(part.words)).get(part.words, 0.0) / account.step_ms for account in side]
                for side in (reference, candidate)
            )
            share = change_of(part.words, *shares)
            judged.append(part._replace(p_of_share=share.p if share.ms * part.ms > 0 else 1.0))
    return judged


def _apart(parts: Sequence[PartChange]) -> list[PartChange]:
    """Return parts without those that an earlier one has, or is in."""
    apart: list[PartChange] = []
    for part in parts:
        if not any(map(part.overlaps, apart)):
            apart.append(part)
    return apart


def _whole_or_kinds(parts: Sequence[PartChange]) -> list[PartChange]:
    """Return parts with exposed communication either by kind or as one: as one where its kinds make less than most of
    its change, or took each other's place. A strategy changes kinds, of which none need be certain.
    """
    of_kind: defaultdict[Words, float] = defaultdict(float)
    for part in parts:
        if part.words[0] == EXPOSED and len(part.words) > 1:
            of_kind[part.words[:2]] += part.ms
    net_ms = sum(of_kind.values())
    moved = abs(sum(ms for ms in of_kind.values() if ms * net_ms < 0)) >= MOST * abs(net_ms) if of_kind else False
    return [
        part
        for part in parts
        if part.words[0] != EXPOSED or (moved or net_ms / part.ms < MOST if len(part.words) == 1 else not moved)
    ]


def _certain_together(parts: Sequence[PartChange]) -> list[PartChange]:
    """Return the parts that changed so that all are right with `TOGETHER` (Holm, Scand. J. Statist. 6, 1979): by their
    milliseconds, or by their share of the step where their own interval excludes 0 as well.
    """
    certain = set[PartChange]()
    for p in ([part.p for part in parts], [part.p_of_share if part.certain() else 1.0 for part in parts]):
        for tried, index in enumerate(sorted(range(len(parts)), key=p.__getitem__)):
            if p[index] >= (1 - TOGETHER) / (len(parts) - tried):
                break
            certain.add(parts[index])
    return [part for part in parts if part in certain]


def _as_document(change: PartChange, named: Sequence[PartChange], below: Sequence[PartChange] = ()) -> AccountChange:
    low, high = change.interval_ms or (None, None)
    depth = len(change.words)
    return AccountChange(
        name=change.words[-1] if change.words else "step",
        reference_ms=change.reference_ms,
        candidate_ms=change.candidate_ms,
        change_ms=change.ms,
        low_ms=low,
        high_ms=high,
        cause=depth > 0 and any(part.words[:depth] == change.words for part in named),
        parts=[_as_document(part, named) for part in below],
    )


def _said_of(reference: Side, candidate: Side, part: PartChange) -> tuple[Words, int | None, str] | None:
    """Return what changed, on which rank if on one, and the sentence that says so and by how much, one level deeper; of
    waiting, which is suffered, what the rank that is waited for does longer, and None where that is not known.
    """
    if part.words[-1] == WAITING:
        growth: defaultdict[int, float] = defaultdict(float)
        for sign, side in ((-1, reference), (1, candidate)):
            for account in side:
                for peer, total in account.waited_for.items():
                    growth[peer] += sign * total / account.rank_steps / len(side)
        late = _most_of(growth, part.ms)
        before, after = ([a.ranks[late] for a in side if late in a.ranks] for side in (reference, candidate))
        own = [part for part in changes(before, after, 1) if part.words != (EXPOSED,)] if before and after else []
        reason = next((change for change in own if change.certain() and change.ms * part.ms > 0), None)
        if reason is None:
            return None
        reason = _deeper(before, after, reason)
        its = f"its {in_words(reason.words)} {_amount(reason.ms)}"
        return reason.words, late, f"waiting for rank {late} {_amount(part.ms)}: {its}"
    part = _deeper(reference, candidate, part)
    rank, ms = _on_rank(reference, candidate, part)
    where = "" if rank is None else f" (rank {rank}: {_amount(ms)})"
    most_ms, _ = _on_most(reference, candidate, part)
    if rank is None and part.words[0] != EXPOSED and abs(part.ms) <= MOST * abs(most_ms):
        where = f" (up to {_amount(most_ms)} on a rank)"
    return part.words, rank, f"{in_words(part.words)} {_amount(part.ms)}{where}"


def _amount(ms: float) -> str:
    return TEXT.quantity(ms, "ms", signed=True)


def _deeper(reference: Side, candidate: Side, part: PartChange) -> PartChange:
    """Return the part below a part that makes most of its change, where the others neither changed in proportion nor
    made room for it; itself where none does.
    """
    for change in changes(reference, candidate, 2, part.words) if len(part.words) == 1 else []:
        own_ms, others_ms = (ms * np.sign(part.ms) for ms in (change.ms, part.ms - change.ms))
        # Growth of the others at most `_COMPARABLE` of its own, without a division by what may be 0.
        apart = others_ms * change.reference_ms <= _COMPARABLE * own_ms * (part.reference_ms - change.reference_ms)
        makes_most = own_ms >= MOST * abs(part.ms) >= -others_ms
        if change.certain() and makes_most and apart:
            return change
    return part


def _on_rank(reference: Side, candidate: Side, part: PartChange) -> tuple[int | None, float]:
    """Return on which of several ranks most of a change is, and how much it is there."""
    growth = _growth(reference, candidate, part.words)
    most = _most_of(growth, part.ms) if len(growth) > 1 else None
    return most, 0.0 if most is None else growth[most]


def _on_most(reference: Side, candidate: Side, part: PartChange) -> tuple[float, int | None]:
    """Return by how much a part changed on the rank where it changed most, and that rank; 0 and None without ranks."""
    growth = _growth(reference, candidate, part.words)
    return max(((ms, rank) for rank, ms in growth.items()), key=lambda of: of[0] * part.ms, default=(0.0, None))


def _growth(reference: Side, candidate: Side, words: Words) -> dict[int, float]:
    """Return by how much a part changed on each rank that all launches have."""
    growth = {}
    for rank in sorted(set.intersection(*(set(account.ranks) for account in (*reference, *candidate)))):
        before, after = (
            float(np.mean([account.ranks[rank].ms(len(words)).get(words, 0.0) for account in side]))
            for side in (reference, candidate)
        )
        growth[rank] = after - before
    return growth


def _most_of(growth: Mapping[int, float], sign: float) -> int | None:
    same = {rank: abs(value) for rank, value in growth.items() if value * sign > 0}
    rank = max(same, key=same.__getitem__, default=None)
    return rank if rank is not None and same[rank] >= _ONE_RANK * sum(same.values()) else None
