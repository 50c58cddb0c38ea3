"""Numbers for what collectives are called, so that matching them across ranks is arithmetic.

Enters: a `Run`. Leaves: `Names`: per rank and per item of its `Scan.whats`, the numbers of its entry in the summary,
of its group, and of its kind and bytes. Must not: give two groups of one name one number.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from aorta.analysis.matching import Members, group_members
from aorta.analysis.readers.run_folder import Run
from aorta.analysis.readers.scan import Ints
from aorta.timeline.classes import LOCKSTEP


@dataclass
class Entry:
    """One entry of the summary: collectives of one kind, group name, group size and size. `members`: groups in it."""

    kind: str
    group: str
    size: int | None
    bytes: int
    members: set[Members] = field(default_factory=set)

    @property
    def order(self) -> tuple[str, str, bool, int, int]:
        """Sorts entries; those of unknown groups last."""
        return self.kind, self.group, self.size is None, self.size or 0, self.bytes


@dataclass(frozen=True)
class Names:
    """Arrays are indexed by `first_what[rank]` plus the index into the `whats` of that rank's scan."""

    entries: list[Entry]
    first_what: dict[int, int]
    entry: Ints
    group: Ints
    size: Ints
    """Ranks of the group, -1 where they are not known."""
    groups: list[tuple[str, Members]]
    """Name and ranks of each number in `group`; no ranks where they are not known."""
    kind_and_bytes: Ints
    lockstep: npt.NDArray[np.bool_]


def name_all(run: Run) -> Names:
    """Number everything that any rank issued."""
    members = group_members(run)
    entries: dict[tuple[str, str, int | None, int], Entry] = {}
    entry_numbers: dict[tuple[str, str, int | None, int], int] = {}
    groups: dict[tuple[str, int], int] = {}
    group_names: list[tuple[str, Members]] = []
    kinds: dict[tuple[str, int], int] = {}
    first_what: dict[int, int] = {}
    table: list[tuple[int, int, int, int, bool]] = []
    for rank, stored in run.columns.ranks.items():
        first_what[rank] = len(table)
        for kind, group, size, _, _ in stored.scan.whats:
            ranks = members.get((rank, group))
            key = (kind, group, None if ranks is None else len(ranks), size)
            entry = entries.setdefault(key, Entry(*key))
            if ranks is not None:
                entry.members.add(ranks)
            if (group, id(ranks)) not in groups:
                groups[group, id(ranks)] = len(groups)
                group_names.append((group, ranks or ()))
            table.append(
                (
                    entry_numbers.setdefault(key, len(entry_numbers)),
                    # one tuple per group (`group_members`), so its identity serves, at any size
                    groups[group, id(ranks)],
                    -1 if ranks is None else len(ranks),
                    kinds.setdefault((kind, size), len(kinds)),
                    kind in LOCKSTEP,
                )
            )
    columns = np.array(table, np.int64).reshape(-1, 5).T
    entry_of, group_of, size_of, kind_and_bytes, lockstep = columns
    named = list(entries.values())
    return Names(named, first_what, entry_of, group_of, size_of, group_names, kind_and_bytes, lockstep != 0)
