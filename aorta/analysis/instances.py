"""The same collective on different ranks, found by sorting one number a row.

Enters: a `Piece`: the collectives of some steps of all ranks. Leaves: `Instances`. Must not: depend on steps outside
the piece (a collective's step is part of what identifies it), or on a clock that ranks do not share.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from aorta.analysis.naming import Names
from aorta.analysis.readers.scan import NULL, UNNUMBERED, Ints
from aorta.timeline.classes import UNKNOWN_KIND

Bools = npt.NDArray[np.bool_]
_MAX = np.iinfo(np.int64).max
OK, NO_KIND, LEAVES_EARLY, UNKNOWN_GROUP, MISSED, NO_NUMBER, UNMATCHED, NO_END = range(8)
"""Index into `matching.REASONS`."""


@dataclass(frozen=True)
class Piece:
    """Rows by rank, then order of issue. `starts` are the rows of each rank, `first_rows` where they begin among all
    of that rank.
    """

    ranks: list[int]
    starts: list[slice]
    first_rows: list[int]
    rank: Ints
    what: Ints
    seq: Ints
    start_ns: Ints
    end_ns: Ints
    step: Ints
    used: Bools
    safe: Bools
    """No collective was missed on this rank up to this step (R8)."""


@dataclass(frozen=True)
class Instances:
    """`instance` has an element a row of the piece; the others one an instance. Times are null (0) unless `reason` is
    `OK`.
    """

    instance: Ints
    entry: Ints
    reason: Ints
    used: Bools
    """Some rank counts it: it is not warm-up there."""
    size: Ints
    transfer_ns: Ints
    longest_ns: Ints
    alone: Bools
    """No other rank's duration is as short: one rank alone came last."""
    whole: Bools
    """Every rank of the group, of two or more, has it once and counts it."""
    last: Ints
    """Row of the shortest duration: of the rank that came last."""
    wait_or_reason: Ints
    """A row of the piece: waiting in ns, or the reason negated where there is none."""


def find_instances(piece: Piece, names: Names) -> Instances:
    """Match the rows of a piece. Rows are one instance if group, step, sequence number, kind and bytes are equal."""
    what = piece.what
    key = _key([names.group[what], names.kind_and_bytes[what], piece.step, piece.seq])
    order = np.argsort(key, kind="stable")  # stable: within an instance by rank
    ordered = key[order]
    fresh = np.concatenate([[True], ordered[1:] != ordered[:-1]])
    starts = np.flatnonzero(fresh)
    number = np.cumsum(fresh) - 1
    rows = np.diff(starts, append=len(order))

    known = ((piece.start_ns != NULL) & (piece.end_ns != NULL))[order]
    duration = np.where(known, (piece.end_ns - piece.start_ns)[order], _MAX)
    shortest = np.minimum.reduceat(duration, starts)
    longest = np.maximum.reduceat(np.where(known, duration, 0), starts)
    rank = piece.rank[order]
    new_rank = fresh | np.concatenate([[True], rank[1:] != rank[:-1]])
    first = what[order[starts]]
    kind_unknown = np.array([entry.kind == UNKNOWN_KIND for entry in names.entries], np.bool_)
    reason = np.full(len(starts), OK)
    for code, applies in (  # the first of `matching.REASONS` that applies stands: written last
        (NO_END, np.add.reduceat(known.astype(np.int64), starts) != rows),
        (UNMATCHED, np.add.reduceat(new_rank.astype(np.int64), starts) != names.size[first]),
        (NO_NUMBER, piece.seq[order[starts]] <= UNNUMBERED),
        (MISSED, ~np.logical_and.reduceat(piece.safe[order], starts)),
        (UNKNOWN_GROUP, names.size[first] < 0),
        (LEAVES_EARLY, ~names.lockstep[first]),
        (NO_KIND, kind_unknown[names.entry[first]]),
    ):
        reason[applies] = code

    place = np.where(duration == shortest[number], np.arange(len(order)), len(order))
    last = np.minimum.reduceat(place, starts)
    others = duration.copy()
    others[last] = _MAX
    second = np.minimum.reduceat(others, starts)

    clear, size = reason == OK, names.size[first]
    wait = np.where(clear[number], duration - shortest[number], -reason[number])
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    return Instances(
        instance=number[back],
        entry=names.entry[first],
        reason=reason,
        used=np.logical_or.reduceat(piece.used[order], starts),
        size=size,
        transfer_ns=np.where(clear, shortest, 0),
        longest_ns=np.where(clear, longest, 0),
        alone=clear & (second > shortest),
        whole=clear & (size > 1) & (rows == size) & np.logical_and.reduceat(piece.used[order], starts),
        last=order[last],
        wait_or_reason=wait[back],
    )


def _key(parts: list[Ints]) -> Ints:
    """One number per row that is equal where all parts are: the parts as digits, made small where they do not fit."""
    key, span = np.zeros(len(parts[0]), np.int64), 1
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
