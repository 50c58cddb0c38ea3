"""Joins the frames of all ranks of a run.

Ranks are added as they are read, by ascending rank; each column grows in place, so that nothing stands twice. What only
all ranks together can tell is made here: which names of groups mean the same ranks, and numbers for words that ranks
share. What breaks an invariant is null from here on (`ledger.audit`). Must not: hold a rank that was added.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from aorta.read.frames import (
    NO_TIME,
    UNKNOWN,
    Codes,
    CollectiveName,
    Collectives,
    Exposed,
    Frame,
    Numbered,
    Steps,
    declared,
)
from aorta.read.ledger import audit
from aorta.read.run import NO_STEPS, Frames, Members, RankTables

_FILLED: Final = {"epoch": UNKNOWN, "step": UNKNOWN, "backend_end_ns": NO_TIME}
"""What stands in a column that a rank lacks and another has; NaN in all others."""
_METRIC, _LOSS, _LOW, _HIGH = "metric", "loss", "at least", "at most"


class _Joined:
    """A frame that grows rank by rank. Room for `parts` parts like the first is reserved, which costs memory only once
    used. Keys of its columns are names, or of metrics a pair of a kind and a name.
    """

    def __init__(self, parts: int) -> None:
        self._parts, self.length = parts, 0
        self.columns: dict[Any, npt.NDArray[Any]] = {}

    def add(self, columns: dict[Any, npt.NDArray[Any]], length: int) -> None:
        """Add rows. A column that they lack, or that the rows before lack, is filled in."""
        end = self.length + length
        for key in dict.fromkeys((*self.columns, *columns)):
            before = self.columns.get(key)
            if before is None or end > len(before):
                dtype = columns[key].dtype if before is None else before.dtype
                wider = np.empty(max(end * 5 // 4, length * self._parts), dtype)
                if self.length:
                    wider[: self.length] = self.filled(key) if before is None else before[: self.length]
                self.columns[key] = wider
            self.columns[key][self.length : end] = columns.get(key, _FILLED.get(key, np.nan))
        self.length = end

    def filled(self, key: Any) -> Any:
        """Return what the rows that were added so far have in a column that they lack."""
        return _FILLED.get(key, np.nan)

    def named(self) -> dict[str, npt.NDArray[Any]]:
        return {key: column[: self.length] for key, column in self.columns.items() if isinstance(key, str)}


class _JoinedSteps(_Joined):
    def __init__(self, parts: int) -> None:
        super().__init__(parts)
        self._reasons, self._coverages = Numbered(), Numbered()

    def add_rank(self, steps: Steps) -> None:
        reason = [self._reasons[tuple(reasons.items())] for reasons in steps.reasons]
        coverage = [self._coverages[coverage] for coverage in steps.coverages]
        columns: dict[Any, npt.NDArray[Any]] = {**_columns(steps)}
        columns["reason"] = np.array(reason or [0], np.int32)[steps.reason]
        columns["coverage"] = np.array([*coverage, UNKNOWN], np.int32)[steps.coverage]  # the last for `UNKNOWN`
        for kind, own in ((_METRIC, steps.metrics), (_LOSS, steps.losses)):
            columns |= {(kind, name): steps.column(name) for name in dict.fromkeys([*self._names(kind), *own])}
        for name in dict.fromkeys([*self._names(_LOW), *steps.bounds]):
            columns[_LOW, name], columns[_HIGH, name] = steps.ends(name)
        self.add(columns, len(steps))

    def filled(self, key: Any) -> Any:
        """Return what the steps so far have in a column that they lack: 0 in one of a kind that was not used."""
        return self.frame().column(key[1]) if key[0] in (_METRIC, _LOSS) else super().filled(key)

    def _names(self, kind: str) -> list[str]:
        return [key[1] for key in self.columns if key[0] == kind]

    def frame(self) -> Steps:
        if not self.columns:
            return NO_STEPS

        def of(kind: str) -> dict[str, Any]:
            return {name: self.columns[kind, name][: self.length] for name in self._names(kind)}

        high = of(_HIGH)
        return Steps(
            **self.named(),
            reasons=tuple(map(dict, self._reasons)),
            coverages=tuple(self._coverages),
            metrics=of(_METRIC),
            losses=of(_LOSS),
            bounds={name: (low, high[name]) for name, low in of(_LOW).items()},
        )


def join_steps(parts: Sequence[Steps]) -> Steps:
    """Put the steps of several windows of one rank under one another."""
    joined = _JoinedSteps(len(parts))
    for part in parts:
        joined.add_rank(part)
    return joined.frame()


def _columns(frame: Frame) -> dict[str, npt.NDArray[Any]]:
    return {name: column for name in declared(type(frame)) if (column := getattr(frame, name)) is not None}


class _Names:
    """Numbers the names of collectives of all ranks. Two groups of one name have two numbers. A rank that does not list
    its groups (no footer) belongs to the one group of that name in which a peer lists it; where peers list it in
    several, or in none, its group stays unknown.
    """

    def __init__(self) -> None:
        self._codes = Numbered()
        self._listed: dict[tuple[str, Members], None] = {}

    def add(self, rank: int, groups: Mapping[str, Sequence[int]], names: Sequence[CollectiveName]) -> Codes:
        """Return the number of each name of a rank."""
        members = {name: tuple(sorted(ranks)) for name, ranks in groups.items()}
        self._listed.update(dict.fromkeys(members.items()))
        codes = [self._codes[name, members.get(name.group, rank)] for name in names]
        return np.array(codes or [UNKNOWN], np.int32)

    def tables(self) -> tuple[tuple[CollectiveName, ...], tuple[Members, ...]]:
        """Return names and members by number."""
        claims: defaultdict[tuple[int, str], list[Members]] = defaultdict(list)
        for group, members in self._listed:
            for member in members:
                claims[member, group].append(members)
        members_of = []
        for name, listed in self._codes:
            claimed = claims[listed, name.group] if isinstance(listed, int) else [listed]
            members_of.append(claimed[0] if len(claimed) == 1 else ())
        return tuple(name for name, _ in self._codes), tuple(members_of)


def join(parts: Iterable[RankTables], count: int) -> Frames:
    """Join ranks as they come, by ascending rank.

    Args:
        count: about how many there will be.
    """
    steps, isolated, rows, exposed = _JoinedSteps(count), _JoinedSteps(count), _Joined(count), _Joined(count)
    names, regions = _Names(), Numbered()
    kept: list[RankTables] = []
    edges = [(0, 0, 0)]
    for tables in parts:
        audited, broken = audit(tables.steps)
        columns: dict[Any, npt.NDArray[Any]] = {**_columns(tables.collectives)}
        columns["step"] = columns["step"] + np.int32(steps.length)
        columns["name"] = names.add(tables.source.rank, tables.source.groups, tables.collectives.names)[columns["name"]]
        if tables.exposed is not None:
            pieces: dict[Any, npt.NDArray[Any]] = {**_columns(tables.exposed)}
            codes = [regions[region] for region in tables.exposed.regions]
            pieces["row"] = pieces["row"] + np.int32(rows.length)
            pieces["region"] = np.array(codes, np.int32)[pieces["region"]]
            exposed.add(pieces, len(tables.exposed))
        steps.add_rank(audited)
        rows.add(columns, len(tables.collectives))
        isolated.add_rank(tables.isolated)
        tables = replace(tables, steps=NO_STEPS, collectives=NO_ROWS, isolated=NO_STEPS, exposed=None)
        kept.append(replace(tables, gaps=(*tables.gaps, *broken)))
        edges.append((steps.length, rows.length, isolated.length))
        del tables, audited, columns  # before the next rank is read
    all_names, members = names.tables()
    together, alone = steps.frame(), isolated.frame()
    collectives = Collectives(**rows.named(), names=all_names) if rows.columns else NO_ROWS
    ranks = {}
    for tables, (first, last) in zip(kept, pairwise(edges), strict=True):
        of_steps, of_rows, of_isolated = map(slice, first, last)
        own = collectives.take(of_rows)
        ranks[tables.source.rank] = replace(
            tables,
            steps=together.take(of_steps),
            collectives=replace(own, step=own.step - np.int32(of_steps.start)),
            isolated=alone.take(of_isolated),
        )
    first_step, first_row, _ = np.array(edges).T
    every = exposed.columns and all(tables.exposed_sums is not None for tables in kept)
    return Frames(
        ranks,
        together,
        collectives,
        first_step,
        first_row,
        members,
        Exposed(**exposed.named(), regions=tuple(regions)) if every else None,
    )


NO_ROWS: Final = Collectives(
    **{name: np.empty(0, dtype) for name, dtype in declared(Collectives).items() if name != "backend_end_ns"}  # type: ignore[arg-type]
)
