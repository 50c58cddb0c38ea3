"""Accounts for the mean step of a run, so that its parts add up.

Every nanosecond of a window (one step on one rank) belongs to one leaf: computation of a phase, hiding communication or
alone; exposed communication of a kind, waiting for peers or transfer; work outside the blocks (data, optimizer,
copies); idle time by the range that the loop named there, or by what ran before and after. Leaves are sums of whole
nanoseconds, and means are over rank-steps (of several launches: the mean over launches of these), so parts add up at
every level. Medians do not: the account is of mean windows, while `job_step_ms` is the median of the slowest rank's.

    account = account_of(dataset)               # a StepAccount, or why there is none
    as_document([account])                      # what summary.json has of it, of one launch or of several

Must not: round before sums are formed, or compare two sides (`causes` does).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np

from aorta.analysis.aggregate import LabelledRun
from aorta.analysis.collective_metrics import ends_on_their_own
from aorta.documents.explanations import Account, AccountPart, RankTimes
from aorta.documents.formatting import TEXT
from aorta.read.frames import Exposed, Ints
from aorta.read.run import ExposedSums
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
ANY_PHASE: Final = "any phase"
"""Of computation, where the source tells no passes of blocks: traces."""
AGREES: Final = 0.001
"""Of the step: what the record counts as computation or exposed may differ by so much from what its rows show."""
MARGIN: Final = 0.02
"""Of the step: what differs by less is not named; the margin of verdicts."""
MOST: Final = 0.5
"""Share of a difference that what is named for it has to make up."""
_RESTS_ON: Final = ("exposed_comm_ms", "compute_ms")
_BY_KERNELS: Final = "host-bound: the profiler's kernels say how much, but not in which block or collective"
NOTHING: Final = "no step after warm-up whose exposed communication is known"


@dataclass
class StepAccount:
    """Sums over the rank-steps of one launch.

    Attributes:
        leaves: nanoseconds of each leaf; they add up to `window_ns`.
        waited_for: rank that arrived last -> nanoseconds for which others waited exposed.
        waited_ns, unknown_ns: of each step of the run, exposed waits for collectives that end on their own, and exposed
            communication of which that is not known.
        ranks: the same of each rank.
    """

    rank_steps: int = 0
    window_ns: int = 0
    leaves: Counter[Words] = field(default_factory=Counter)
    waited_for: Counter[int] = field(default_factory=Counter)
    waited_ns: Ints = field(default_factory=lambda: np.zeros(0, np.int64), compare=False)
    unknown_ns: Ints = field(default_factory=lambda: np.zeros(0, np.int64), compare=False)
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


def account_of(dataset: LabelledRun) -> StepAccount | str:
    """Return the account of one launch, or why there is none.

    Raises:
        InputError: a record cannot be read again.
    """
    if (unknown := why_open(dataset)) is not None:
        return unknown
    whole = StepAccount()
    whole.waited_ns, whole.unknown_ns = (np.zeros(len(dataset.run.steps), np.int64) for _ in range(2))
    for exposed, sums in dataset.exposed:
        for rank, of_rank in sums.items():
            if of_rank.rank_steps:
                whole.ranks[rank] = _of_rank(of_rank)
            if (differs := differs_from_rows(of_rank)) is not None:
                return f"rank {rank}: {differs}"
        _add_exposed(whole, dataset, exposed)
    for own in whole.ranks.values():
        if dataset.run.health.is_alone:  # its calls communicate with nobody
            own.leaves = _without_peers(own.leaves)
        whole.rank_steps += own.rank_steps
        whole.window_ns += own.window_ns
        whole.leaves += own.leaves
    return whole if whole.rank_steps else NOTHING


def why_open(dataset: LabelledRun) -> str | None:
    """Return why marks do not tell where the time of a step went; None where they do."""
    bases = map(dataset.pace.basis, _RESTS_ON)
    return next((basis.reason or _BY_KERNELS for basis in bases if basis.source != "marks"), None)


def _without_peers(leaves: Counter[Words]) -> Counter[Words]:
    """Return leaves in which communication hides nothing and is exposed nowhere: it is other work."""
    totals: Counter[Words] = Counter()
    for words, total in leaves.items():
        match words:
            case (part, phase, how) if part == COMPUTATION and how == HIDES:
                words = (part, phase, "alone")
            case (part, *_) if part == EXPOSED:
                words = (OUTSIDE, "collectives of one rank")
        totals[words] += total
    return totals


def differs_from_rows(sums: ExposedSums) -> str | None:
    """Return what the record counts otherwise than its rows show."""
    computed = sum(total for leaf, total in sums.leaves.items() if leaf.part == "computation")
    counted = {"computation": (sums.compute_ns, sums.compute_ns - computed)}
    counted["exposed communication"] = sums.exposed_ns, sums.unexplained_ns
    for name, (total_ns, beyond_ns) in counted.items():
        if abs(beyond_ns) > AGREES * sums.window_ns:
            ms = [TEXT.quantity(ns / sums.rank_steps / NS_PER_MS, "ms") for ns in (total_ns, total_ns - beyond_ns)]
            return f"{name} of a step is {ms[0]}, and its rows show {ms[1]}"
    return None


def _of_rank(sums: ExposedSums) -> StepAccount:
    account = StepAccount(sums.rank_steps, sums.window_ns)
    for leaf, total in sums.leaves.items():
        match leaf.part:
            case "computation":
                words: Words = (COMPUTATION, leaf.name or ANY_PHASE, HIDES if leaf.hides else "alone")
            case "outside blocks":
                words = (OUTSIDE, leaf.name or "any work")
            case "copies":
                words = (OUTSIDE, "copies")
            case "bubble":
                words = (IDLE, BUBBLE)
            case "range":
                words = (IDLE, f'range "{leaf.name}"')
            case _:
                words = (IDLE, leaf.name)
        account.leaves[words] += total
    return account


def parts_of(exposed: Exposed, wait_ns: Ints) -> dict[str, Ints]:
    """Return how many nanoseconds of each piece of exposed communication are which part of it: the rank waits for peers
    first, and the transfer comes then.

    Args:
        wait_ns: of the collective of each piece; negative where it is unknown.
    """
    length_ns = exposed.to_ns - exposed.from_ns
    known = ~exposed.bubble & (wait_ns >= 0)
    waited_ns = np.where(known, np.clip(wait_ns - exposed.from_ns, 0, length_ns), 0)
    return {
        WAITING: waited_ns,
        TRANSFER: np.where(known, length_ns - waited_ns, 0),
        BUBBLE: np.where(exposed.bubble, length_ns, 0),
        NOT_KNOWN: np.where(~known & ~exposed.bubble, length_ns, 0),
    }


def _add_exposed(whole: StepAccount, dataset: LabelledRun, exposed: Exposed) -> None:
    run, matched = dataset.run, dataset.collectives
    name, last, wait_ns = (column[exposed.row] for column in (run.collectives.name, matched.last, matched.wait_ns))
    step, parts = run.collectives.step[exposed.row], parts_of(exposed, wait_ns)
    own_end = ends_on_their_own(run)[name]
    np.add.at(whole.waited_ns, step, np.where(own_end, parts[WAITING], 0))
    np.add.at(whole.unknown_ns, step, np.where(own_end & (wait_ns >= 0), 0, exposed.to_ns - exposed.from_ns))
    kinds = list(dict.fromkeys(what.kind for what in run.collectives.names))
    kind = np.array([kinds.index(what.kind) for what in run.collectives.names] or [0])[name]
    rank = run.rank_of_step[step]
    for own in np.unique(rank).tolist():
        of_rank = rank == own
        for part, lengths_ns in parts.items():
            sums = np.zeros(len(kinds), np.int64)
            np.add.at(sums, kind[of_rank], lengths_ns[of_rank])
            for code in np.flatnonzero(sums).tolist():
                whole.ranks[own].leaves[EXPOSED, kinds[code], part] += int(sums[code])
    for late in np.unique(last[last >= 0]).tolist():
        whole.waited_for[late] += int(parts[WAITING][last == late].sum())


def rank_times(accounts: Sequence[StepAccount]) -> list[RankTimes]:
    """Return the account of each rank, means over the launches that have it."""
    rows = []
    for rank in sorted({rank for account in accounts for rank in account.ranks}):
        own = [account.ranks[rank] for account in accounts if rank in account.ranks]
        parts = [[of_launch.ms().get((part,), 0.0) for of_launch in own] for part in PARTS]
        means = np.mean([[of_launch.step_ms for of_launch in own], *parts], axis=1)
        rows.append(RankTimes(rank, *means.tolist()))
    return rows


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
    what = in_words(deeper if deeper_ms >= MOST * more_ms else part)
    return f"{what}, {TEXT.quantity(more_ms, 'ms')} a step more than the others"


def in_words(words: Words) -> str:
    """Return a part of the step as people call it."""
    part, *more = words
    if part == EXPOSED and more:
        return f"exposed {', '.join(more)}"
    if part == IDLE and more and not is_unexplained(more[0]):
        return f"idle in {more[0]}"
    if part == IDLE and more:
        return f"idle between {' and '.join(more[0].split(' .. '))} (outside timed blocks)"
    if part == OUTSIDE and more:
        return "waiting for the DataLoader" if more[0] == "data" else more[0]
    return f"{more[0]} computation" if more and more[0] != ANY_PHASE else part


def is_unexplained(idle: str) -> bool:
    """Return whether of idle time only its place is known: no range that the loop named, and no bubble."""
    return idle != BUBBLE and not idle.startswith("range ")


def as_document(accounts: Sequence[StepAccount] | str) -> Account:
    """Return what `summary.json` has of the launches of one dataset; means over them."""
    if isinstance(accounts, str):
        return Account(reason=accounts)
    step_ms = float(np.mean([account.step_ms for account in accounts]))
    return Account(
        reason=None,
        launches=len(accounts),
        rank_steps=sum(account.rank_steps for account in accounts),
        step_ms=step_ms,
        parts=sorted(_document(accounts, step_ms, ()), key=lambda part: PARTS.index(part.name)),
    )


def _document(accounts: Sequence[StepAccount], step_ms: float, below: Words) -> list[AccountPart]:
    parts, means = [], [account.ms(len(below) + 1, below) for account in accounts]
    for words in dict.fromkeys(words for of_launch in means for words in of_launch):
        if words != below:
            ms = float(np.mean([of_launch.get(words, 0.0) for of_launch in means]))
            parts.append(AccountPart(words[-1], ms, ms / step_ms, _document(accounts, step_ms, words)))
    return sorted(parts, key=lambda part: -part.ms)
