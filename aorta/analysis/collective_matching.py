"""Matches the same collective on different ranks, and derives transfer and waiting times from the match.

Rows of different ranks are one collective if process group (its name *and* its ranks), global step, sequence number,
kind and bytes are equal. `match` finds such rows whatever their source; `matched_pieces` does it for a whole run, a
range of steps of all ranks at a time, and gives the transfer of each collective, or why it is unknown.

    names = name_collectives(run)
    for rows, found in matched_pieces(run, names):
        found.transfer_ns[found.reason == OK]

Must not: take one rank's duration for the cost of a collective (W5), one group for another of the same name, or compare
times of clocks that ranks do not share.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from aorta.analysis.tables import NO_TIME, UNKNOWN, UNNUMBERED, Bools, Ints, Members, Run, global_steps
from aorta.records.clocks import RankClock
from aorta.timeline.classes import LOCKSTEP, UNKNOWN_KIND

KIND_UNKNOWN: Final = "its kind is not known"
LEAVES_EARLY: Final = "a rank may end this kind early, so no rank's duration is its transfer"
NOT_NUMBERED: Final = "the trace does not number it, so it cannot be found on other ranks"
REASONS: Final = (
    "",
    KIND_UNKNOWN,
    LEAVES_EARLY,
    "the ranks of its group are not known (a record with no footer, or a trace that does not record them)",
    "a collective was missed at or before this step: sequence numbers no longer match",
    NOT_NUMBERED,
    "not found exactly once on every rank of its group",
    "its start or its end was not seen on some rank",
)
"""Why a transfer is null; the first that applies. `MatchedCollectives.reason` is an index into this."""
OK: Final = 0
_KIND_UNKNOWN, _LEAVES_EARLY, _GROUP_UNKNOWN, _MISSED, _NOT_NUMBERED, _UNMATCHED, _NO_END = range(1, len(REASONS))
PIECE_ROWS: Final = 1 << 18
"""Collectives matched at a time: about 100 MiB including everything that matching needs besides."""
_MAX: Final = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Matches:
    """Rows that are the same collective on different ranks.

    Attributes:
        order: row indices grouped by match, within a match by rank; match `i` begins at `order[starts[i]]`.
        of_row: the match of each row.
        rows, ranks: number of rows and of distinct ranks of each match.
    """

    order: npt.NDArray[np.intp]
    starts: npt.NDArray[np.intp]
    of_row: npt.NDArray[np.intp]
    rows: Ints
    ranks: Ints

    def once_on(self, size: Ints | int) -> Bools:
        """Return whether each match has exactly one row on each of `size` ranks."""
        found: Bools = (self.ranks == size) & (self.rows == size)
        return found


def match(keys: Sequence[Ints], rank: Ints) -> Matches:
    """Match rows whose keys are all equal. Rows must be ordered by ascending rank."""
    key = _joined(keys)
    order = np.argsort(key, kind="stable")  # stable: within a match by rank
    fresh = np.concatenate([[True], key[order][1:] != key[order][:-1]])[: len(order)]
    starts = np.flatnonzero(fresh)
    ranks = rank[order]
    new_rank = fresh | np.concatenate([[True], ranks[1:] != ranks[:-1]])[: len(order)]
    of_row = np.empty_like(order)
    of_row[order] = np.cumsum(fresh) - 1
    counted = np.add.reduceat(new_rank.astype(np.int64), starts) if len(starts) else np.empty(0, np.int64)
    return Matches(order, starts, of_row, np.diff(starts, append=len(order)), counted)


def _joined(parts: Sequence[Ints]) -> Ints:
    """Return one number per row that is equal exactly where all parts are equal: the parts as digits, compacted where
    they would overflow.
    """
    key, span = np.zeros(len(parts[0]), np.int64), 1
    if not len(key):
        return key
    for part in parts:
        low = int(part.min())
        digits, width = part - low, int(part.max()) - low + 1
        if width > _MAX:
            _, digits = np.unique(part, return_inverse=True)
            width = int(digits.max()) + 1
        if span * width > _MAX:
            _, key = np.unique(key, return_inverse=True)
            span = int(key.max()) + 1
        if span * width > _MAX:
            _, digits = np.unique(digits, return_inverse=True)
            width = int(digits.max()) + 1
        key, span = key * width + digits, span * width
    return key


def group_members(run: Run) -> dict[tuple[int, str], Members]:
    """Return (rank, group name) -> the ranks of the group that this rank means by the name.

    A rank that does not say (no footer) belongs to the one group of that name in which a peer lists it; where peers
    list it in several, or in none, its group stays unknown. There is one tuple per group, so its identity serves as a
    number.
    """
    known: dict[tuple[int, str], Members] = {}
    distinct: dict[tuple[str, Members], Members] = {}
    for rank, tables in run.ranks.items():
        for name, ranks in tables.source.groups.items():
            members = tuple(sorted(ranks))
            known[rank, name] = distinct.setdefault((name, members), members)
    claimed: defaultdict[tuple[int, str], list[Members]] = defaultdict(list)
    for name, members in distinct:
        for member in members:
            claimed[member, name].append(distinct[name, members])
    for key, groups in claimed.items():
        if key not in known and len(groups) == 1:
            known[key] = groups[0]
    return known


@dataclass
class CollectiveKey:
    """Collectives of one kind, group name, group size and bytes: one entry of the summary. `members`:
    the groups in it.
    """

    kind: str
    group: str
    size: int | None
    bytes: int
    members: set[Members] = field(default_factory=set)

    @property
    def order(self) -> tuple[str, str, bool, int, int]:
        """Sort key of entries; those of unknown groups come last."""
        return self.kind, self.group, self.size is None, self.size or 0, self.bytes


@dataclass(frozen=True)
class NumberedNames:
    """Numbers for the names of collectives of all ranks, so that matching is arithmetic. Arrays are indexed by
    `first[rank]` plus the index into that rank's `Collectives.names`.
    """

    keys: list[CollectiveKey]
    first: dict[int, int]
    key: Ints
    group: Ints
    size: Ints
    """Number of ranks of the group, `UNKNOWN` where they are unknown."""
    groups: list[tuple[str, Members]]
    """Name and ranks of each number in `group`; the ranks are empty where unknown."""
    kind_and_bytes: Ints
    lockstep: Bools
    kind_known: Bools


def name_collectives(run: Run) -> NumberedNames:
    """Number everything that any rank issued. Two groups of the same name get two numbers."""
    members = group_members(run)
    keys: dict[tuple[str, str, int | None, int], CollectiveKey] = {}
    key_numbers: dict[tuple[str, str, int | None, int], int] = {}
    groups: dict[tuple[str, int], int] = {}
    group_names: list[tuple[str, Members]] = []
    kinds: dict[tuple[str, int], int] = {}
    first: dict[int, int] = {}
    table: list[tuple[int, int, int, int, bool, bool]] = []
    for rank, tables in run.ranks.items():
        first[rank] = len(table)
        for kind, group, size, _, _ in tables.collectives.names:
            ranks = members.get((rank, group))
            name = (kind, group, None if ranks is None else len(ranks), size)
            key = keys.setdefault(name, CollectiveKey(*name))
            if ranks is not None:
                key.members.add(ranks)
            if (group, id(ranks)) not in groups:
                groups[group, id(ranks)] = len(groups)
                group_names.append((group, ranks or ()))
            table.append(
                (
                    key_numbers.setdefault(name, len(key_numbers)),
                    groups[group, id(ranks)],
                    UNKNOWN if ranks is None else len(ranks),
                    kinds.setdefault((kind, size), len(kinds)),
                    kind in LOCKSTEP,
                    kind != UNKNOWN_KIND,
                )
            )
    key_of, group_of, size_of, kind_and_bytes, lockstep, known = np.array(table, np.int64).reshape(-1, 6).T
    return NumberedNames(
        list(keys.values()), first, key_of, group_of, size_of, group_names, kind_and_bytes, lockstep != 0, known != 0
    )


@dataclass(frozen=True)
class CollectiveRows:
    """The collectives of some steps of all ranks, by rank, then order of issue.

    Attributes:
        slices: the rows of each of `ranks`.
        first_rows: the index of the first of them among all rows of that rank.
        name: index into `NumberedNames`.
    """

    ranks: list[int]
    slices: list[slice]
    first_rows: list[int]
    rank: Ints
    name: Ints
    seq: Ints
    issue_ns: Ints
    start_ns: Ints
    end_ns: Ints
    step: Ints
    origin_ns: Ints
    """What the times of a row count from (its step's start), on the reference rank's clock where that is known."""
    used: Bools
    """Not warm-up."""
    safe: Bools
    """No collective was missed on this rank up to and including this step (R8)."""

    def __len__(self) -> int:
        return len(self.seq)

    @property
    def timed(self) -> Bools:
        """Whether both start and end were seen."""
        found: Bools = (self.start_ns != NO_TIME) & (self.end_ns != NO_TIME)
        return found


@dataclass(frozen=True)
class MatchedCollectives:
    """What the ranks of a group together show about each collective; one element per match. Times are 0 unless `reason`
    is `OK`.
    """

    matches: Matches
    key: Ints
    """Index into `NumberedNames.keys`."""
    reason: Ints
    """Index into `REASONS`."""
    used: Bools
    """It is not warm-up on at least one rank."""
    size: Ints
    transfer_ns: Ints
    longest_ns: Ints
    alone: Bools
    """The shortest duration occurs on one rank only: that rank alone arrived last."""
    whole: Bools
    """Every rank of the group, which has at least two, has it exactly once and not in warm-up."""
    last: Ints
    """Row with the shortest duration, that of the rank that arrived last."""
    wait_or_reason: Ints
    """One element per row: its wait in ns, or the negated reason why it is unknown."""


def rows_of(run: Run, names: NumberedNames, first: int, last: int) -> CollectiveRows:
    """Return the collectives of global steps `first` to `last` (exclusive) of all ranks."""
    ranks, slices, rows, steps, origins, used, safe, first_rows = [], [], [], [], [], [], [], []
    for rank, tables in run.ranks.items():
        number = tables.steps.global_step
        low, high = (int(place) for place in np.searchsorted(number, (first, last)))
        mine = tables.steps.rows_of(low, high)
        if mine.stop <= mine.start:
            continue
        counts = tables.steps.row_counts[low:high]
        ranks.append(rank)
        first_rows.append(mine.start)
        rows.append(tables.collectives.take(mine))
        steps.append(np.repeat(number[low:high], counts))
        origins.append(np.repeat(_on_reference(tables.steps.t_start_ns[low:high], run.clocks.get(rank)), counts))
        used.append(np.repeat(tables.steps.used[low:high], counts))
        missed = tables.covered.first_missed
        safe.append(np.ones(len(steps[-1]), bool) if missed is None else steps[-1] < missed)
    lengths = [len(part) for part in rows]
    edges = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    slices = [slice(int(left), int(right)) for left, right in pairwise(edges)]
    nothing = np.empty(0, np.int64)
    return CollectiveRows(
        ranks,
        slices,
        first_rows,
        rank=np.repeat(np.array(ranks, np.int64), lengths),
        name=np.concatenate([nothing, *(part.name for part in rows)])
        + np.repeat(np.array([names.first[rank] for rank in ranks], np.int64), lengths),
        seq=np.concatenate([nothing, *(part.seq for part in rows)]),
        issue_ns=np.concatenate([nothing, *(part.issue_ns for part in rows)]),
        start_ns=np.concatenate([nothing, *(part.start_ns for part in rows)]),
        end_ns=np.concatenate([nothing, *(part.end_ns for part in rows)]),
        step=np.concatenate([nothing, *steps]),
        origin_ns=np.concatenate([nothing, *origins]),
        used=np.concatenate([nothing.astype(bool), *used]),
        safe=np.concatenate([nothing.astype(bool), *safe]),
    )


def _on_reference(own_ns: Ints, clock: RankClock | None) -> Ints:
    """Convert ascending times of a rank to the reference rank's clock, if known. The correction is linear in time."""
    if clock is None or not clock.known or not len(own_ns):
        return own_ns
    ends = [int(own_ns[0]), int(own_ns[-1])]
    corrections = [clock.correction_ns(end) for end in ends]
    if ends[0] == ends[1]:
        return own_ns + corrections[0]
    share = (own_ns - ends[0]) / (ends[1] - ends[0])
    found: Ints = own_ns + corrections[0] + np.rint(share * (corrections[1] - corrections[0])).astype(np.int64)
    return found


def matched_pieces(
    run: Run, names: NumberedNames, steps: tuple[int, int] | None = None, rows: int = PIECE_ROWS
) -> Iterator[tuple[CollectiveRows, MatchedCollectives]]:
    """Match the collectives of a run piece by piece, in order of global step.

    A piece has about `rows` rows and at least one step of all ranks, so that a collective is never split. Pieces
    without collectives are left out.

    Args:
        steps: a half-open range of global steps; None: all.
    """
    every = global_steps(run.ranks.values())
    if steps is not None:
        every = every[(every >= steps[0]) & (every < steps[1])]
    each = max(1, int(rows * len(every) / max(1, run.row_count)))
    for start in range(0, len(every), each):
        piece = rows_of(run, names, int(every[start]), int(every[min(start + each, len(every)) - 1]) + 1)
        if len(piece):
            yield piece, match_rows(piece, names)


def match_rows(piece: CollectiveRows, names: NumberedNames) -> MatchedCollectives:
    """Match the rows of a piece, which must not be empty."""
    name = piece.name
    found = match([names.group[name], names.kind_and_bytes[name], piece.step, piece.seq], piece.rank)
    order, starts, number = found.order, found.starts, found.of_row[found.order]
    known = piece.timed[order]
    duration = np.where(known, (piece.end_ns - piece.start_ns)[order], _MAX)
    shortest = np.minimum.reduceat(duration, starts)
    longest = np.maximum.reduceat(np.where(known, duration, 0), starts)
    first = name[order[starts]]
    size = names.size[first]
    reason = np.full(len(starts), OK)
    for code, applies in (  # later ones overwrite: the first of `REASONS` comes last
        (_NO_END, np.add.reduceat(known.astype(np.int64), starts) != found.rows),
        (_UNMATCHED, ~found.once_on(size)),
        (_NOT_NUMBERED, piece.seq[order[starts]] <= UNNUMBERED),
        (_MISSED, ~np.logical_and.reduceat(piece.safe[order], starts)),
        (_GROUP_UNKNOWN, size < 0),
        (_LEAVES_EARLY, ~names.lockstep[first]),
        (_KIND_UNKNOWN, ~names.kind_known[first]),
    ):
        reason[applies] = code

    place = np.where(duration == shortest[number], np.arange(len(order)), len(order))
    last = np.minimum.reduceat(place, starts)
    others = duration.copy()
    others[last] = _MAX
    second = np.minimum.reduceat(others, starts)

    clear = reason == OK
    wait = np.where(clear[number], duration - shortest[number], -reason[number])
    wait_of_row = np.empty_like(wait)
    wait_of_row[order] = wait
    return MatchedCollectives(
        found,
        key=names.key[first],
        reason=reason,
        used=np.logical_or.reduceat(piece.used[order], starts),
        size=size,
        transfer_ns=np.where(clear, shortest, 0),
        longest_ns=np.where(clear, longest, 0),
        alone=clear & (second > shortest),
        whole=clear & (size > 1) & found.once_on(size) & np.logical_and.reduceat(piece.used[order], starts),
        last=order[last],
        wait_or_reason=wait_of_row,
    )
