"""Checks whether any effect precedes its cause by more than the error of the clocks.

Takes the collectives of every rank (and RPC calls with what they ran elsewhere), on one clock with error bounds, and
reports what was checked and every violation. Must not: call a pair checked whose bound is unknown without saying so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from aorta.analysis.collective_matching import match
from aorta.analysis.merge.tracks import MergedCollective
from aorta.timeline.classes import LOCKSTEP

_SHOWN: Final = 5


@dataclass(frozen=True)
class Violation:
    """One violation, described by `what`. The effect came `lead_ns` early, of which the clocks can explain at most
    `allowed_ns`.
    """

    what: str
    lead_ns: int
    allowed_ns: int


@dataclass
class Causality:
    """Result of a check. `unknown_bounds` counts pairs whose bound was taken as 0 because it was never measured."""

    pairs: int = 0
    unknown_bounds: int = 0
    worst_lead_ns: int | None = None
    violations: list[Violation] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=dict)

    def check(self, what: str, lead_ns: int, bounds: Iterable[int | None]) -> None:
        """Check one pair of cause and effect. The effect appears `lead_ns` before its cause (negative: after it)."""
        self.pairs += 1
        known = list(bounds)
        self.unknown_bounds += None in known
        allowed = sum(bound or 0 for bound in known)
        self.worst_lead_ns = lead_ns if self.worst_lead_ns is None else max(self.worst_lead_ns, lead_ns)
        if lead_ns > allowed:
            self.violations.append(Violation(what, lead_ns, allowed))

    def lines(self) -> list[str]:
        """The result and the worst violations, as text."""
        if not self.pairs:
            why = "; ".join(f"{reason} ({count})" for reason, count in self.skipped.items())
            return [f"causality: nothing to check{': ' + why if why else ''}"]
        found = f"{len(self.violations)} violation(s)" if self.violations else "no violation"
        text = [f"causality: {self.pairs} pairs of cause and effect, {found}"]
        if self.unknown_bounds:
            text.append(f"causality: the bound of {self.unknown_bounds} pairs is unknown and was taken as 0")
        worst = sorted(self.violations, key=lambda violation: violation.allowed_ns - violation.lead_ns)
        text += [
            f"  {v.what}: {v.lead_ns / 1e3:.1f} us too early, bound {v.allowed_ns / 1e3:.1f} us" for v in worst[:_SHOWN]
        ]
        text += [f"causality: not checked: {reason} ({count})" for reason, count in self.skipped.items()]
        return text

    def as_json(self) -> dict[str, Any]:
        """The result as it is stored in the merged file."""
        return {
            "pairs": self.pairs,
            "violations": len(self.violations),
            "unknown_bounds": self.unknown_bounds,
            "worst_lead_ns": self.worst_lead_ns,
            "not_checked": self.skipped,
        }


def check_collectives(
    found: Causality, seen: Mapping[int, Sequence[MergedCollective]], groups: Mapping[int, Mapping[str, Sequence[int]]]
) -> None:
    """Check that no rank ends a collective that waits for all ranks before the last of them has issued it.

    Collectives are matched by group, its members (from the footers), kind and sequence number. Kinds that a rank may
    end early are skipped: `timeline.classes.LOCKSTEP` names the others.
    """
    names: dict[tuple[str, tuple[int, ...], str], int] = {}
    rows: list[tuple[int, int, int, MergedCollective]] = []  # rank, number of the name, sequence number
    skipped: defaultdict[str, int] = defaultdict(int)
    for rank in sorted(seen):
        for row in seen[rank]:
            members = groups.get(rank, {}).get(row.group)
            if row.kind not in LOCKSTEP:
                skipped["a rank may end this kind before the others begin"] += 1
            elif members is None:
                skipped["the group's ranks are not in the record (no footer)"] += 1
            elif len(members) > 1:
                name = names.setdefault((row.group, tuple(sorted(members)), row.kind), len(names))
                rows.append((rank, name, row.seq, row))
    named = list(names)
    ranks, name_of, seq_of = (np.array([row[place] for row in rows], np.int64) for place in range(3))
    matches = match([name_of, seq_of], ranks)
    size = np.array([len(members) for _, members, _ in named], np.int64)[name_of[matches.order[matches.starts]]]
    complete = matches.once_on(size)
    for number, mine in enumerate(np.split(matches.order, matches.starts[1:]) if rows else []):
        if not complete[number]:
            skipped["not seen on every rank of its group"] += 1
            continue
        group, _, kind = named[rows[mine[0]][1]]
        of_rank = {rows[at][0]: rows[at][3] for at in mine.tolist()}
        _, cause = max((row.issue_ns, rank) for rank, row in of_rank.items())
        for rank, row in of_rank.items():
            if rank == cause or row.end_ns is None:
                continue
            found.check(
                f"{kind}#{row.seq} of group {group}: rank {rank} ends before rank {cause} begins",
                of_rank[cause].issue_ns - row.end_ns,
                (of_rank[cause].issue_bound_ns, row.end_bound_ns),
            )
    for reason, count in skipped.items():
        found.skipped[reason] = found.skipped.get(reason, 0) + count
