"""Accounts for the mean step, so that its parts add up, and says which of them make a difference between two sides.

Every nanosecond of a window (one step on one rank) belongs to one leaf: computation of a phase, hiding communication or
alone; exposed communication of a kind, waiting for peers or transfer; work outside the blocks (data, optimizer,
copies); idle time by what ran before and after. Leaves are sums of whole nanoseconds, and means are over rank-steps (of
several launches: the mean over launches of these), so parts add up at every level. Medians do not: the account is of
mean windows, while `job_step_ms` is the median of the slowest rank's.

    account = account_of(dataset)               # a StepAccount, or why there is none
    as_document(account)                        # what summary.json has of it
    compare_accounts(reference, candidate)      # lists of the accounts of launches

*Cause*: a part whose change is beyond its 95 % interval over launches (Welch's t), beyond `MARGIN` of the step, and of
the sign of the step's change; parts are named, the largest first, until they make `MOST` of the change. Waiting is
suffered: it leads to the rank that was waited for, and to what that rank does longer.

Must not: round before sums are formed, name a change that its interval does not exclude from 0, or draw one launch as
an interval.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from aorta.analysis.aggregate import LabelledRun
from aorta.documents.comparison import NOT_SET, AccountChange, AccountComparison, FactDifference
from aorta.documents.dataset import Account, AccountPart, RankTimes
from aorta.documents.formatting import TEXT, first_upper, json_text
from aorta.read.exposed import exposed_of
from aorta.read.frames import Exposed
from aorta.read.run import ExposedSums, Run
from aorta.timeline.overlap import NS_PER_MS

Words: TypeAlias = tuple[str, ...]
"""A part of the step: its name, then of what it is a part, from the whole down."""
COMPUTATION, EXPOSED, OUTSIDE, IDLE = "computation", "exposed communication", "outside blocks", "idle"
PARTS: Final = (COMPUTATION, EXPOSED, OUTSIDE, IDLE)
HIDES, WAITING, TRANSFER, NOT_KNOWN, BUBBLE = (
    "hides communication",
    "waiting for peers",
    "transfer",
    "waiting or transfer, not known which",
    "bubble",
)
AGREES: Final = 0.001
"""Of the step: what the record counts as computation or exposed may differ by so much from what its rows show."""
MARGIN: Final = 0.02
"""Of the reference's step: smaller changes are not named; the margin of verdicts."""
MOST: Final = 0.5
"""Share of the step's change that the causes have to make up together."""
_ALMOST: Final = 0.8
"""A part with this share of the last cause's change is a cause too: which of both is larger would be chance."""
ONE_RANK: Final = 0.7
"""Share of a change from which on it is said to be one rank's."""
LEVEL: Final = 0.95
_NO_SETTING: Final = ("label", "instrument.interceptor", "environment.LD_PRELOAD", "environment.LD_LIBRARY_PATH")
"""Differences that no setting makes: a name, what was compiled on the machine, and where libraries come from."""
_SHOWN_SETTINGS: Final = 3
_RESTS_ON: Final = ("exposed_comm_ms", "compute_ms")
_BY_KERNELS: Final = "host-bound: the profiler's kernels say how long it computed, but not in which block"


@dataclass
class StepAccount:
    """Sums over the rank-steps of one launch.

    Attributes:
        leaves: nanoseconds of each leaf; they add up to `window_ns`.
        waited_for: rank that arrived last -> nanoseconds for which others waited exposed.
        ranks: the same of each rank.
    """

    rank_steps: int = 0
    window_ns: int = 0
    leaves: Counter[Words] = field(default_factory=Counter)
    waited_for: Counter[int] = field(default_factory=Counter)
    ranks: dict[int, StepAccount] = field(default_factory=dict)

    def ms(self, depth: int = 1, below: Words = ()) -> dict[Words, float]:
        """Return the mean of each part with `depth` words, below a part."""
        sums: Counter[Words] = Counter()
        for leaf, total in self.leaves.items():
            if leaf[: len(below)] == below:
                sums[leaf[:depth]] += total
        return {words: total / self.rank_steps / NS_PER_MS for words, total in sums.items()}

    @property
    def step_ms(self) -> float:
        """The mean window."""
        return self.window_ns / self.rank_steps / NS_PER_MS


def exposed_pieces(run: Run) -> Iterator[tuple[Exposed, Mapping[int, ExposedSums]]]:
    """Yield the exposed communication of a run with the sums of its ranks: all at once where it was read with the
    steps, else rank by rank, made of their details.
    """
    if run.frames.exposed is not None:
        sums = {rank: tables.exposed_sums for rank, tables in run.ranks.items() if tables.exposed_sums is not None}
        yield run.frames.exposed, sums
        return
    for (rank, tables), first in zip(run.ranks.items(), run.frames.first_row[:-1].tolist(), strict=True):
        spans = tables.details.spans(np.arange(len(tables.steps)))
        pieces, of_rank = exposed_of(tables.steps, tables.collectives, spans)
        yield replace(pieces, row=pieces.row + np.int32(first)), {rank: of_rank}


def account_of(dataset: LabelledRun) -> StepAccount | str:
    """Return the account of one launch, or why there is none.

    Raises:
        InputError: a record cannot be read again.
    """
    for basis in map(dataset.pace.basis, _RESTS_ON):
        if basis.source != "marks":
            return basis.reason or _BY_KERNELS
    whole = StepAccount()
    for exposed, sums in exposed_pieces(dataset.run):
        for rank, of_rank in sums.items():
            if of_rank.rank_steps:
                whole.ranks[rank] = _of_rank(of_rank)
            if (differs := _differs(of_rank)) is not None:
                return f"rank {rank}: {differs}"
        _add_exposed(whole, dataset, exposed)
    if dataset.run.health.is_alone:  # its calls communicate with nobody
        for own in whole.ranks.values():
            own.leaves = _without_peers(own.leaves)
    for own in whole.ranks.values():
        whole.rank_steps += own.rank_steps
        whole.window_ns += own.window_ns
        whole.leaves += own.leaves
    return whole if whole.rank_steps else "no step after warm-up whose exposed communication is known"


def _without_peers(leaves: Counter[Words]) -> Counter[Words]:
    """Return leaves in which communication hides nothing and is exposed nowhere: it is other work."""
    found: Counter[Words] = Counter()
    for words, total in leaves.items():
        match words:
            case (part, phase, how) if part == COMPUTATION and how == HIDES:
                words = (part, phase, "alone")
            case (part, *_) if part == EXPOSED:
                words = (OUTSIDE, "collectives of one rank")
        found[words] += total
    return found


def _differs(sums: ExposedSums) -> str | None:
    """Return what the record counts otherwise than its rows show."""
    seen = sum(total for leaf, total in sums.leaves.items() if leaf.part == "computation")
    for name, counted, rows in (
        ("computation", sums.compute_ns, seen),
        ("exposed communication", sums.exposed_ns, sums.exposed_ns - sums.unexplained_ns),
    ):
        if abs(counted - rows) > AGREES * sums.window_ns:
            ms = (TEXT.quantity(value / sums.rank_steps / NS_PER_MS, "ms") for value in (counted, rows))
            return f"{name} of a step is {next(ms)}, and its rows show {next(ms)}"
    return None


def _of_rank(sums: ExposedSums) -> StepAccount:
    account = StepAccount(sums.rank_steps, sums.window_ns)
    for leaf, total in sums.leaves.items():
        match leaf.part:
            case "computation":
                words: Words = (COMPUTATION, leaf.name or "any phase", HIDES if leaf.hides else "alone")
            case "outside blocks":
                words = (OUTSIDE, leaf.name or "any work")
            case "copies":
                words = (OUTSIDE, "copies")
            case "bubble":
                words = (IDLE, BUBBLE)
            case _:
                words = (IDLE, leaf.name)
        account.leaves[words] += total
    return account


def _add_exposed(whole: StepAccount, dataset: LabelledRun, exposed: Exposed) -> None:
    """Add exposed communication to the accounts of ranks: by kind, and whether the rank was then waiting for a peer."""
    run, matched = dataset.run, dataset.collectives
    name, wait_ns, last = run.collectives.name[exposed.row], matched.wait_ns[exposed.row], matched.last[exposed.row]
    length_ns = exposed.to_ns - exposed.from_ns
    known = ~exposed.bubble & (wait_ns >= 0)
    waited_ns = np.where(known, np.clip(wait_ns - exposed.from_ns, 0, length_ns), 0)
    kinds = list(dict.fromkeys(what.kind for what in run.collectives.names))
    kind = np.array([kinds.index(what.kind) for what in run.collectives.names] or [0])[name]
    rank = run.rank_of_step[run.collectives.step[exposed.row]]
    parts = {
        WAITING: waited_ns,
        TRANSFER: np.where(known, length_ns - waited_ns, 0),
        BUBBLE: np.where(exposed.bubble, length_ns, 0),
        NOT_KNOWN: np.where(~known & ~exposed.bubble, length_ns, 0),
    }
    for own in np.unique(rank).tolist():
        of_rank = rank == own
        for part, lengths_ns in parts.items():
            sums = np.zeros(len(kinds), np.int64)
            np.add.at(sums, kind[of_rank], lengths_ns[of_rank])
            for code in np.flatnonzero(sums).tolist():
                whole.ranks[own].leaves[EXPOSED, kinds[code], part] += int(sums[code])
    for late in np.unique(last[last >= 0]).tolist():
        whole.waited_for[late] += int(waited_ns[last == late].sum())


def rank_times(rank: int, own: StepAccount) -> RankTimes:
    """Return the account of one rank as `summary.json` has it."""
    ms = own.ms()
    return RankTimes(rank, own.step_ms, *(ms.get((part,), 0.0) for part in PARTS))


def longer_than_others(account: StepAccount, rank: int) -> str | None:
    """Return what a rank does longer than the median of the others, and where in the step; None where no part is longer
    by `MARGIN` of the step. Exposed communication is what the others suffer.
    """
    own, others = account.ranks[rank], [other for name, other in account.ranks.items() if name != rank]

    def longest(depth: int, below: Words) -> tuple[float, Words]:
        means = [other.ms(depth, below) for other in others]
        more = {
            words: ms - float(np.median([of_other.get(words, 0.0) for of_other in means]))
            for words, ms in own.ms(depth, below).items()
            if words[0] != EXPOSED
        }
        return max(((ms, words) for words, ms in more.items()), default=(0.0, ()))

    more_ms, part = longest(1, ())
    if not others or more_ms < MARGIN * account.step_ms:
        return None
    deeper_ms, deeper = longest(2, part)
    amount = f"{TEXT.quantity(more_ms, 'ms')} more per step"
    return f"{amount}: {in_words(deeper if deeper_ms >= MOST * more_ms else part)}"


def in_words(words: Words) -> str:
    """Return a part of the step as people call it."""
    part, *more = words
    if part == EXPOSED and more:
        return f"exposed {', '.join(more)}"
    if part == IDLE and more:
        return f"idle between {' and '.join(more[0].split(' .. '))} (outside timed blocks)"
    if part == OUTSIDE and more:
        return "waiting for the DataLoader" if more[0] == "data" else more[0]
    return f"{more[0]} computation" if more else part


def as_document(accounts: Sequence[StepAccount] | str) -> Account:
    """Return what `summary.json` has of the launches of one dataset; means over them."""
    if isinstance(accounts, str):
        return Account(reason=accounts)
    step_ms = _mean([account.step_ms for account in accounts])
    return Account(
        reason=None,
        launches=len(accounts),
        rank_steps=sum(account.rank_steps for account in accounts),
        step_ms=step_ms,
        parts=[part for name in PARTS for part in _document(accounts, step_ms, 1, (), (name,))],
    )


def _document(
    accounts: Sequence[StepAccount], step_ms: float, depth: int, below: Words, only: Words | None = None
) -> list[AccountPart]:
    """Return the parts below a part, the largest first."""
    found = []
    means = [account.ms(depth, below) for account in accounts]
    for words in dict.fromkeys(words for of_launch in means for words in of_launch):
        if len(words) < depth or (only is not None and words != only):
            continue
        ms = _mean([of_launch.get(words, 0.0) for of_launch in means])
        found.append(AccountPart(words[-1], ms, ms / step_ms, _document(accounts, step_ms, depth + 1, words)))
    return sorted(found, key=lambda part: -part.ms)


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))


class Change(NamedTuple):
    """By how much a part changed, and the interval of that over launches; None with a launch on either side."""

    words: Words
    reference_ms: float
    candidate_ms: float
    interval_ms: tuple[float, float] | None

    @property
    def ms(self) -> float:
        return self.candidate_ms - self.reference_ms

    @property
    def certain(self) -> bool:
        """Whether the interval excludes 0."""
        return self.interval_ms is not None and (self.interval_ms[0] > 0 or self.interval_ms[1] < 0)


Side: TypeAlias = Sequence[StepAccount]


def welch(reference: Sequence[float], candidate: Sequence[float], level: float = LEVEL) -> tuple[float, float] | None:
    """Return the interval of the difference of means, candidate minus reference, variances unequal (Welch, Biometrika
    34, 1947, degrees of freedom by Satterthwaite); None with fewer than two values on a side.
    """
    sides = [np.asarray(values, float) for values in (reference, candidate)]
    if min(map(len, sides)) < 2:
        return None
    from scipy.special import stdtrit  # a third of a second, which single runs do not need

    difference = float(sides[1].mean() - sides[0].mean())
    variances = [float(values.var(ddof=1)) / len(values) for values in sides]
    total = sum(variances)
    if total == 0:
        return difference, difference
    freedom = total**2 / sum(v**2 / (len(values) - 1) for v, values in zip(variances, sides, strict=True))
    half = float(stdtrit(freedom, 0.5 + level / 2)) * total**0.5
    return difference - half, difference + half


def changes(reference: Side, candidate: Side, depth: int, below: Words = (), *, together: bool = False) -> list[Change]:
    """Return the changes of the parts below a part, the largest first.

    Args:
        together: all intervals hold at once (Bonferroni).
    """
    sides = [[account.ms(depth, below) for account in side] for side in (reference, candidate)]
    names = sorted({words for side in sides for of_launch in side for words in of_launch})
    level = 1 - (1 - LEVEL) / max(len(names), 1) if together else LEVEL
    found = []
    for words in names:
        before, after = ([of_launch.get(words, 0.0) for of_launch in side] for side in sides)
        found.append(Change(words, _mean(before), _mean(after), welch(before, after, level)))
    return sorted(found, key=lambda change: -abs(change.ms))


def causes(parts: Sequence[Change], change_ms: float, step_ms: float) -> list[Change]:
    """Return the parts that make most of a change, the largest first; none where they do not get there.

    Args:
        parts: the largest change first.
        step_ms: of the reference.
    """
    able = [part for part in parts if part.certain and part.ms * change_ms > 0 and abs(part.ms) >= MARGIN * step_ms]
    for count in range(1, len(able) + 1):
        if abs(sum(part.ms for part in able[:count])) >= MOST * abs(change_ms):
            return able[:count] + [part for part in able[count:] if abs(part.ms) >= _ALMOST * abs(able[count - 1].ms)]
    return []


def compare_accounts(
    reference: Side | str, candidate: Side | str, differences: Sequence[FactDifference] = ()
) -> AccountComparison:
    """Compare the accounts of two sides: of each part its means and change, which add up to the step's; and the cause.

    Where the step changed by more than its interval and `MARGIN`, a part is judged by its own interval; else by
    intervals that hold for all parts together, as a part is often certain where the step is not.

    Args:
        differences: of what was run; settings are named before the causes.
    """
    unknown = [
        f"{name}: {side}"
        for name, side in (("reference", reference), ("candidate", candidate))
        if isinstance(side, str)
    ]
    if unknown or isinstance(reference, str) or isinstance(candidate, str):
        return AccountComparison(reason="; ".join(unknown))
    before, after = ([account.step_ms for account in side] for side in (reference, candidate))
    step = Change((), _mean(before), _mean(after), welch(before, after))
    decided = step.certain and abs(step.ms) >= MARGIN * step.reference_ms
    parts = changes(reference, candidate, 1)
    named: list[Change] = []
    for together in (False, True) if decided else (True,):
        judged = _parts_that_cause(reference, candidate, together=together)
        if named := causes(judged, step.ms, step.reference_ms):
            break
    said = [_sentence(reference, candidate, part, step.reference_ms) for part in named]
    text = f"{first_upper('; '.join(said))}." if said else None
    if text is not None and not decided:
        text = f"{text.removesuffix('.')}, while the step itself is not decided."
    return AccountComparison(
        reason=None,
        step=_as_document(step, ()),
        decided=decided,
        parts=[
            _as_document(part, named, changes(reference, candidate, 2, part.words))
            for part in sorted(parts, key=lambda part: PARTS.index(part.words[0]))
        ],
        causes=said,
        sentence=f"{_settings(differences)}{text}" if text else None,
    )


def _settings(differences: Sequence[FactDifference]) -> str:
    """Return the settings in which the sides differ; keys that only one side has follow from others."""
    settings = [
        each
        for each in differences
        if not each.key.startswith("header.") and each.key.removeprefix("config.") not in _NO_SETTING
    ]
    settings = [each for each in settings if NOT_SET not in (each.reference, each.candidate)] or settings
    shown = [
        f"{each.key.removeprefix('config.')} {json_text(each.reference)} -> {json_text(each.candidate)}"
        for each in settings[:_SHOWN_SETTINGS]
    ]
    more = f" and {len(settings) - len(shown)} more" if len(settings) > len(shown) else ""
    return f"Configuration: {', '.join(shown)}{more}. " if shown else ""


def _parts_that_cause(reference: Side, candidate: Side, *, together: bool) -> list[Change]:
    """Return computation as one part, exposed communication by kind and waiting or transfer, the rest by name."""
    found = []
    for part in changes(reference, candidate, 1, together=together):
        match part.words[0]:
            case "exposed communication":
                found += changes(reference, candidate, 3, part.words, together=together)
            case "outside blocks":
                found += changes(reference, candidate, 2, part.words, together=together)
            case _:
                found.append(part)
    return sorted(found, key=lambda part: -abs(part.ms))


def _as_document(change: Change, named: Sequence[Change], below: Sequence[Change] = ()) -> AccountChange:
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


def _sentence(reference: Side, candidate: Side, part: Change, step_ms: float) -> str:
    """Say what changed by how much, one level deeper, and on which rank."""
    amount = TEXT.quantity(part.ms, "ms", signed=True)
    if part.words[-1] == WAITING:
        late = _waited_for(reference, candidate)
        if late is None:
            return f"{in_words(part.words)} {amount}, for no rank in particular"
        before, after = ([a.ranks[late] for a in side if late in a.ranks] for side in (reference, candidate))
        own = [part for part in changes(before, after, 1) if part.words != (EXPOSED,)] if before and after else []
        reason = causes(own, 1.0, step_ms)[:1] or [part for part in own if part.certain and part.ms > 0][:1]
        if not reason:
            return f"waiting for rank {late} {amount}; why it is late is not known"
        longer = TEXT.quantity(reason[0].ms, "ms", signed=True)
        return f"waiting for rank {late} {amount}: its {_deeper(before, after, reason[0])} {longer}"
    rank = _on_rank(reference, candidate, part)
    return f"{_deeper(reference, candidate, part)} {amount}{rank}"


def _deeper(reference: Side, candidate: Side, part: Change) -> str:
    """Return a part's name with the part below it that makes most of its change."""
    if len(part.words) > 1:
        return in_words(part.words)
    lead = causes(changes(reference, candidate, 2, part.words), part.ms, abs(part.ms))[:1]
    if not lead:
        return in_words(part.words)
    return in_words(lead[0].words)


def _waited_for(reference: Side, candidate: Side) -> int | None:
    """Return the rank that makes most of the growth of exposed waiting."""
    growth: defaultdict[int, float] = defaultdict(float)
    for sign, side in ((-1, reference), (1, candidate)):
        for account in side:
            for rank, total in account.waited_for.items():
                growth[rank] += sign * total / account.rank_steps / len(side)
    return _most_of(growth, 1.0)


def _on_rank(reference: Side, candidate: Side, part: Change) -> str:
    """Return on which rank most of a change is, and how much it is there."""
    growth = {}
    for rank in sorted(set.intersection(*(set(account.ranks) for account in (*reference, *candidate)))):
        before, after = (
            _mean([account.ranks[rank].ms(len(part.words)).get(part.words, 0.0) for account in side])
            for side in (reference, candidate)
        )
        growth[rank] = after - before
    most = _most_of(growth, part.ms) if len(growth) > 1 else None
    return "" if most is None else f" (rank {most}: {TEXT.quantity(growth[most], 'ms', signed=True)})"


def _most_of(growth: Mapping[int, float], sign: float) -> int | None:
    same = {rank: abs(value) for rank, value in growth.items() if value * sign > 0}
    rank = max(same, key=same.__getitem__, default=None)
    return rank if rank is not None and same[rank] >= ONE_RANK * sum(same.values()) else None
