"""Collectives of single ranks -> what each cost: transfer, waiting for peers, bandwidth.

Enters: `frames.collective_rows` and the run they came from. Leaves: the same rows with `members`, `instance`,
`transfer_ms`, `wait_ms`, `arrival_skew_ms`, `arrival_skew_bound_ms`, `algbw_gb_per_s`, `busbw_gb_per_s` and the
reasons for those that are null. Must not: take one rank's duration for the cost of a collective (W5), the world size
for a group's (W19), or one group for another that bears its name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Final, TypeAlias

import numpy as np
import pandas as pd

from aorta.analysis.bandwidth import BUSBW_FACTOR, GROUP_OF_ONE, NO_BYTES, NO_SIZE, TOO_SHORT
from aorta.analysis.readers.run_folder import Run
from aorta.analysis.readers.scan import UNNUMBERED
from aorta.timeline.classes import LOCKSTEP, UNKNOWN_KIND

Members: TypeAlias = tuple[int, ...]
Reason: TypeAlias = "tuple[pd.Series[bool], str | pd.Series[str]]"
"""Where it applies, and the sentence (or one per row)."""

_KEY = ["group", "members", "global_step", "seq", "kind", "bytes"]
_UNKNOWN_KIND = "its kind is not known"
_LEAVES_EARLY = "a rank may end this kind early, so no rank's duration is its transfer"
_UNKNOWN_GROUP = "the ranks of its group are not known (a record with no footer, or a trace that does not tell)"
_MISSED = "a collective was missed at or before this step: sequence numbers no longer match"
_UNNUMBERED = "the trace does not number it, so it cannot be found on other ranks"
_UNMATCHED = "not found on every rank of its group"
_NO_END = "its start or its end was not seen on some rank"
REASONS: Final = (
    "",
    _UNKNOWN_KIND,
    _LEAVES_EARLY,
    _UNKNOWN_GROUP,
    _MISSED,
    _UNNUMBERED,
    _UNMATCHED,
    _NO_END,
)
"""Why a transfer is null, the first that applies; their places are the codes of `instances`."""


def matched(rows: pd.DataFrame, run: Run) -> pd.DataFrame:
    """Add what is known only across ranks. `members` is the group's ranks (None when unknown), `instance` numbers
    the collectives: rows of one instance are the same collective on different ranks.
    """
    frame = rows.copy()
    groups = group_members(run)
    missed = _first_missed(run)
    frame["members"] = pd.Series(
        [groups.get(key) for key in zip(frame["rank"], frame["group"], strict=True)], index=frame.index, dtype="object"
    )
    frame["group_size"] = frame["members"].map(len, na_action="ignore").astype("Int64")
    safe = frame["global_step"] < frame["rank"].map(lambda rank: missed.get(rank, np.inf))
    by_instance = frame.assign(safe=safe).groupby(_KEY, dropna=False, sort=False)
    frame["instance"] = by_instance.ngroup()

    shortest = by_instance["duration_ms"].transform("min")
    # Only where no rank ends before every rank has started is the shortest duration free of waiting.
    reasons: list[Reason] = [
        (frame["kind"] == UNKNOWN_KIND, _UNKNOWN_KIND),
        (~frame["kind"].isin(LOCKSTEP), _LEAVES_EARLY),
        (frame["members"].isna(), _UNKNOWN_GROUP),
        (~by_instance["safe"].transform("all"), _MISSED),
        (frame["seq"] <= UNNUMBERED, _UNNUMBERED),
        (by_instance["rank"].transform("nunique") != frame["group_size"].fillna(-1), _UNMATCHED),
        (by_instance["duration_ms"].transform("count") != by_instance["rank"].transform("size"), _NO_END),
    ]
    frame["transfer_reason"] = _first_reason(frame, reasons)
    frame["transfer_ms"] = shortest.where(frame["transfer_reason"].isna())
    frame["wait_ms"] = frame["duration_ms"] - frame["transfer_ms"]
    # No rank of a lockstep kind ends before the last has come: each duration is at least that rank's lead on the last.
    frame["arrival_skew_bound_ms"] = by_instance["duration_ms"].transform("max").where(frame["transfer_ms"].notna())
    frame["arrival_skew_ms"] = frame["arrival_skew_bound_ms"] - frame["transfer_ms"]
    return _with_bandwidth(frame)


def group_members(run: Run) -> dict[tuple[int, str], Members]:
    """(rank, group name) -> the ranks of the group that this rank means by the name, from the footers.

    A rank without a footer belongs to the one group of that name that a peer's footer lists it in; where peers list
    it in several, or in none, its group stays unknown.
    """
    known: dict[tuple[int, str], Members] = {}
    distinct: dict[tuple[str, Members], Members] = {}
    for rank, record in run.records.items():
        for name, ranks in (record.footer.groups if record.footer else {}).items():
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


def _first_missed(run: Run) -> Mapping[int, int]:
    """Rank -> first global step in which fewer or more collectives were seen than issued (R8)."""
    scans = {rank: stored.scan for rank, stored in run.columns.ranks.items()}
    return {rank: scan.first_missed for rank, scan in scans.items() if scan.first_missed is not None}


def _with_bandwidth(frame: pd.DataFrame) -> pd.DataFrame:
    """Add algbw and busbw in GB/s of 1e9 bytes, from `transfer_ms` alone."""
    size = frame["group_size"].astype("float64")
    reasons: list[Reason] = [
        (frame["transfer_reason"].notna(), frame["transfer_reason"]),
        (frame["bytes"] < 0, NO_SIZE),
        (frame["bytes"] == 0, NO_BYTES),
        (size == 1, GROUP_OF_ONE),
        (frame["transfer_ms"] == 0, TOO_SHORT),
    ]
    frame["bandwidth_reason"] = _first_reason(frame, reasons)
    transfer_s = (frame["transfer_ms"] / 1e3).where(frame["bandwidth_reason"].isna())
    frame["algbw_gb_per_s"] = frame["bytes"] / 1e9 / transfer_s
    frame["busbw_gb_per_s"] = frame["algbw_gb_per_s"] * frame["kind"].map(BUSBW_FACTOR) * (size - 1) / size
    return frame


def _first_reason(frame: pd.DataFrame, reasons: list[Reason]) -> pd.Series[str]:
    """Per row the first reason that applies, None where none does."""
    found = pd.Series(None, index=frame.index, dtype="object")
    for applies, reason in reversed(reasons):
        found = found.mask(applies.astype(bool), reason)
    return found
