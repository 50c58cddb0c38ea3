"""Puts the traces of all ranks on one clock.

Ranks of one host share its clock. Otherwise collectives tell it: one that no rank leaves before all are there ends on
all of them at about the same time. Either way these ends say how well the clocks agree. Must not use any other
coincidence.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

import numpy as np

from aorta.analysis.tables import Members
from aorta.analysis.whatif.traced_rank import TracedRank
from aorta.errors import InputError
from aorta.timeline.classes import KINDS, LOCKSTEP

APART: Final = 0.02
"""Ends of one collective on its ranks may lie this part of a step apart, in 95 % of collectives: assumed."""
_Ends: TypeAlias = Sequence[dict[int, int]]
"""Of each collective: rank -> its end."""


def on_one_clock(
    location: str, ranks: Sequence[TracedRank], groups: Mapping[int, Mapping[str, Members]]
) -> tuple[list[TracedRank], str]:
    """The ranks on the clock of the first, and a sentence about it.

    Args:
        groups: rank -> group -> its ranks.

    Raises:
        InputError: their clocks cannot be compared.
    """
    ends = _ends(ranks, groups)
    step_ns = float(np.median(np.concatenate([each.end_ns - each.begin_ns for each in ranks])))
    hosts = {each.host for each in ranks}
    raw_ns = _apart(ends, dict.fromkeys((each.rank for each in ranks), 0))
    if len(hosts) == 1 and None not in hosts and (raw_ns is None or raw_ns <= APART * step_ns):
        known = "" if raw_ns is None else f"; ends of collectives lie up to {raw_ns / 1000:.0f} us apart on them"
        return list(ranks), f"the ranks share a host and its clock{known}"
    offsets = _offsets(ends, [each.rank for each in ranks])
    if missing := [each.rank for each in ranks if each.rank not in offsets]:
        raise InputError(
            f"{location}: a replay is not possible: the clocks of the ranks cannot be compared: they are not known to "
            f"share a host, and no collective that waits for all its ranks joins rank(s) "
            f"{', '.join(map(str, missing[:8]))} to rank {ranks[0].rank}"
        )
    apart_ns = _apart(ends, offsets) or 0.0
    if apart_ns > APART * step_ns:
        raise InputError(
            f"{location}: a replay is not possible: the clocks of the ranks cannot be compared: aligned by the ends of "
            f"{len(ends)} collectives, these still lie up to {apart_ns / 1e6:.3f} ms apart, and more than {APART:.0%} "
            f"of a step of {step_ns / 1e6:.3f} ms is not accepted"
        )
    moved = [each.moved(offsets[each.rank]) for each in ranks]
    return moved, (
        f"the ranks' clocks were aligned by the ends of {len(ends)} collectives, which then lie up to "
        f"{apart_ns / 1000:.0f} us apart"
    )


def _ends(ranks: Sequence[TracedRank], groups: Mapping[int, Mapping[str, Members]]) -> _Ends:
    found: defaultdict[tuple[str, Members, int], dict[int, int]] = defaultdict(dict)
    lockstep = {code for code, kind in enumerate(KINDS) if kind in LOCKSTEP}
    for each in ranks:
        rows = each.collectives
        columns = (rows.kind.tolist(), rows.group.tolist(), rows.seq.tolist(), rows.end_ns.tolist())
        for kind, group, seq, end in zip(*columns, strict=True):
            members = groups[each.rank].get(rows.groups[group])
            if members is not None and kind in lockstep:
                found[rows.groups[group], members, seq][each.rank] = end
    return [of_ranks for of_ranks in found.values() if len(of_ranks) > 1]


def _offsets(ends: _Ends, ranks: Sequence[int]) -> dict[int, int]:
    """Rank -> what to add to its clock, for all ranks that a chain of collectives joins to the first."""
    offsets = {ranks[0]: 0}
    while True:
        shifts: defaultdict[int, list[int]] = defaultdict(list)
        for of_ranks in ends:
            joined = [end + offsets[rank] for rank, end in of_ranks.items() if rank in offsets]
            if joined:
                for rank, end in of_ranks.items():
                    if rank not in offsets:
                        shifts[rank].append(joined[0] - end)
        if not shifts:
            return offsets
        offsets |= {rank: round(float(np.median(found))) for rank, found in shifts.items()}


def _apart(ends: _Ends, offsets: Mapping[int, int]) -> float | None:
    """How far the ends of one collective lie apart, at most, in 95 % of collectives; None: there are none."""
    if not ends:
        return None
    spread = []
    for of_ranks in ends:
        moved = [end + offsets[rank] for rank, end in of_ranks.items()]
        spread.append(max(moved) - min(moved))
    return float(np.percentile(spread, 95))
