"""Matches the same collective on different ranks, and derives transfer and waiting times from the match.

Rows of different ranks are one collective if process group (its name *and* its ranks), global step, sequence number,
kind and bytes are equal. `matched_pieces` finds such rows, a range of steps of all ranks at a time, and gives the
transfer of each collective, or why it is unknown.

    for rows, found in matched_pieces(run, NumberedNames(run)):
        found.transfer_ns[found.reason == OK]

Must not: take one rank's duration for the cost of a collective (W5), one group for another of the same name, or compare
times of clocks that ranks do not share.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from aorta.read.frames import UNKNOWN, UNNUMBERED, Bools, Collectives, Groups, Ints, Rows
from aorta.read.run import Members, Run
from aorta.timeline.arrays import ranges
from aorta.timeline.classes import LOCKSTEP, UNKNOWN_KIND

REASONS: Final = (
    "",
    "its kind is not known",
    "a rank may end this kind early, so no rank's duration is its transfer",
    "the ranks of its group are not known (a record with no footer, or a trace that does not record them)",
    "a collective was missed at or before this step: sequence numbers no longer match",
    "the trace does not number it, so it cannot be found on other ranks",
    "not found exactly once on every rank of its group",
    "its start or its end was not seen on some rank",
)
"""Why a transfer is null; the first that applies. `MatchedCollectives.reason` is an index into this."""
OK: Final = 0
_KIND_UNKNOWN, _LEAVES_EARLY, _GROUP_UNKNOWN, _MISSED, _NOT_NUMBERED, _UNMATCHED, _NO_END = range(1, len(REASONS))
PIECE_ROWS: Final = 1 << 17
"""Collectives matched at a time: about 50 MiB including everything that matching needs besides."""
_MAX: Final = np.iinfo(np.int64).max


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


class NumberedNames:
    """Numbers for the names of the collectives of a run, so that matching is arithmetic; all arrays are indexed by
    `Collectives.name`. Two groups of one name have two numbers.

    Attributes:
        keys: entries of the summary; `key` is an index into it.
        groups: name and ranks of each number in `group`; the ranks are empty where unknown.
        size: number of ranks of the group, `UNKNOWN` where they are unknown.
    """

    def __init__(self, run: Run) -> None:
        keys: dict[tuple[str, str, int | None, int], CollectiveKey] = {}
        groups: dict[tuple[str, Members], int] = {}
        numbers: dict[object, int] = {}
        table = []
        for name, members in zip(run.collectives.names, run.members, strict=True):
            size = len(members) or None
            entry = (name.kind, name.group, size, name.bytes)
            key = keys.setdefault(entry, CollectiveKey(*entry))
            key.members.update([members] if members else [])
            table.append(
                (
                    numbers.setdefault(entry, len(keys) - 1),
                    groups.setdefault((name.group, members), len(groups)),
                    UNKNOWN if size is None else size,
                    numbers.setdefault((name.kind, name.bytes), len(numbers)),
                    name.kind in LOCKSTEP,
                    name.kind != UNKNOWN_KIND,
                )
            )
        self.keys, self.groups = list(keys.values()), list(groups)
        columns = np.array(table, np.int64).reshape(-1, 6).T
        self.key, self.group, self.size, self.kind_and_bytes = columns[:4]
        self.lockstep, self.kind_known = columns[4:] != 0


@dataclass(frozen=True)
class CollectiveRows:
    """The collectives of some steps of all ranks, by rank, then order of issue.

    Attributes:
        at: their rows in the run's frame.
        rank, global_step: of each row.
        used: its step counts in aggregates.
        safe: no collective was missed on this rank up to and including its step (R8).
    """

    at: Rows
    frame: Collectives
    rank: npt.NDArray[np.int32]
    global_step: Ints
    used: Bools
    safe: Bools


class MatchedCollectives:
    """One element per collective, matched across the ranks of its group. Times are 0 unless `reason` is `OK`.

    Attributes:
        by: the rows of each collective, by rank.
        key: index into `NumberedNames.keys`.
        reason: index into `REASONS`.
        used: it counts on at least one rank.
        whole: every rank of the group, which has at least two, has it exactly once and counts it.
        last: row with the shortest duration, that of the rank that arrived last.
        alone: the shortest duration occurs on that rank only.
        wait_or_reason: one element per row: its wait in ns, or the negated reason why it is unknown.
    """

    def __init__(self, rows: CollectiveRows, names: NumberedNames) -> None:
        frame, name = rows.frame, rows.frame.name
        by = self.by = Groups(names.group[name], names.kind_and_bytes[name], rows.global_step, frame.seq)
        order, starts, number = by.order, by.starts, by.number
        known = frame.timed[order]
        duration = np.where(known, (frame.end_ns - frame.start_ns)[order], _MAX)
        shortest = np.minimum.reduceat(duration, starts)
        longest = np.maximum.reduceat(np.where(known, duration, 0), starts)
        first = name[by.first]
        self.key, self.size = names.key[first], names.size[first]
        once = (by.distinct(rows.rank) == self.size) & (by.sizes == self.size)
        reason = self.reason = np.full(len(by), OK)
        for code, applies in (  # later ones overwrite: the first of `REASONS` comes last
            (_NO_END, np.add.reduceat(known.astype(np.int64), starts) != by.sizes),
            (_UNMATCHED, ~once),
            (_NOT_NUMBERED, frame.seq[by.first] <= UNNUMBERED),
            (_MISSED, ~np.logical_and.reduceat(rows.safe[order], starts)),
            (_GROUP_UNKNOWN, self.size < 0),
            (_LEAVES_EARLY, ~names.lockstep[first]),
            (_KIND_UNKNOWN, ~names.kind_known[first]),
        ):
            reason[applies] = code

        position = np.where(duration == shortest[number], np.arange(len(order)), len(order))
        last = np.minimum.reduceat(position, starts)
        self.last = order[last]
        others = duration.copy()
        others[last] = _MAX
        clear = reason == OK
        used = rows.used[order]
        self.used = np.logical_or.reduceat(used, starts)
        self.alone = clear & (np.minimum.reduceat(others, starts) > shortest)
        self.whole = clear & (self.size > 1) & once & np.logical_and.reduceat(used, starts)
        self.transfer_ns, self.longest_ns = np.where(clear, shortest, 0), np.where(clear, longest, 0)
        self.wait_or_reason = np.empty(len(order), np.int64)
        self.wait_or_reason[order] = np.where(clear[number], duration - shortest[number], -reason[number])


def matched_pieces(
    run: Run, names: NumberedNames, steps: tuple[int, int] | None = None, rows: int = PIECE_ROWS
) -> Iterator[tuple[CollectiveRows, MatchedCollectives]]:
    """Match the collectives of a run piece by piece, in order of global step.

    A piece has about `rows` rows and at least one step of all ranks, so that a collective is never split. Pieces
    without collectives are left out.

    Args:
        steps: a half-open range of global steps; None: all.
    """
    numbers = run.steps.global_step
    every = np.unique(numbers)
    if steps is not None:
        every = every[(every >= steps[0]) & (every < steps[1])]
    first_step, first_row = run.first_step, np.searchsorted(run.collectives.step, np.arange(len(numbers) + 1))
    missed = np.array([coverage.issued not in (None, coverage.seen) for coverage in run.steps.coverages] + [False])
    at_missed = missed[run.steps.coverage]
    safe = np.ones(len(numbers), bool)  # before the first step of the rank in which more or fewer were seen than issued
    for low, high in itertools.pairwise(first_step.tolist()):
        own = at_missed[low:high]
        safe[low + int(np.argmax(own)) if own.any() else high : high] = False
    steps_of_piece = max(1, int(rows * len(every) / max(1, len(run.collectives))))
    for start in range(0, len(every), steps_of_piece):
        low, high = every[start], every[min(start + steps_of_piece, len(every)) - 1]
        inside = (numbers >= low) & (numbers <= high)
        chosen_rows: Rows = slice(None)
        if not inside.all():
            chosen = np.flatnonzero(inside)
            _, chosen_rows = ranges(first_row[chosen], first_row[chosen + 1])
        frame = run.collectives.take(chosen_rows)
        step = frame.step
        piece = CollectiveRows(
            chosen_rows, frame, run.rank_of_step[step], numbers[step], run.steps.used[step], safe[step]
        )
        if len(frame):
            yield piece, MatchedCollectives(piece, names)
