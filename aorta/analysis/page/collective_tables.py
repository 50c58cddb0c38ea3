"""The collectives of a summary -> tables: those of every dataset, and those that both sides issued.

Enters: plain JSON values. Leaves: `Table`s. Must not: leave a row out without a sentence that says how many.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from aorta.analysis.formatting import PAGE
from aorta.analysis.metrics import metric_named
from aorta.analysis.page.tables import SIDES, Cell, Column, Table, titled, value, word

ROW_LIMIT: Final = 400
"""Collectives of one dataset that a table lists; a browser sorts that many without a pause."""
_TIMES: Final = ("duration_ms", "transfer_ms", "wait_ms", "queued_ms")
_RATES: Final = ("algbw_gb_per_s", "busbw_gb_per_s")
_HIDING: Final = ("hidden_ms", "exposed_ms")


def collectives_table(entries: Mapping[str, Mapping[str, Any]], definitions: Mapping[str, Any]) -> Table | None:
    """Collectives of every dataset, by kind, group, size of the group and bytes. None without any."""
    listed = [(label, row) for label, entry in entries.items() for row in entry.get("collectives", ())]
    if not listed:
        return None
    hiding = [name for name in _HIDING if any(name in row for _, row in listed)]
    columns = [Column("kind"), Column("run"), Column("group"), Column("ranks", True), Column("bytes", True)]
    columns.append(Column("count", True))
    names = (*_TIMES, *_RATES, *hiding)
    columns += [Column(titled(name), True, definitions.get(name, {}).get("definition")) for name in names]
    rows, notes = [], []
    for label, entry in entries.items():
        mine = sorted(entry.get("collectives", ()), key=_total_ms, reverse=True)
        rows += [_collective(label, row, names) for row in mine[:ROW_LIMIT]]
        if len(mine) > ROW_LIMIT:
            left, whole = (sum(map(_total_ms, part)) for part in (mine[ROW_LIMIT:], mine))
            share = f", {PAGE.percent(left / whole)} of the time in collectives" if whole else ""
            notes.append(f"{label}: {len(mine) - ROW_LIMIT} more{share}, all in summary.json")
    caption = "Collectives: medians, after warm-up"
    return Table("collectives", caption, tuple(columns), tuple(rows), ". ".join(notes) or None)


def _total_ms(row: Mapping[str, Any]) -> float:
    """Time on all ranks, as far as it is known."""
    return float((row["duration_ms"]["mean"] or 0) * row["rows"])


def _collective(label: str, row: Mapping[str, Any], names: Iterable[str]) -> tuple[Cell, ...]:
    bound = "an upper bound: some ends are those of the caller's wait" if row["transfer_is_upper_bound"] else None
    cells = [word(row["kind"]), word(label), word(row["group"])]
    cells.append(Cell(PAGE.unknown if row["group_size"] is None else str(row["group_size"]), row["group_size"]))
    cells.append(Cell(PAGE.size(row["bytes"]), row["bytes"]))
    cells.append(Cell(PAGE.whole(row["collectives"]), row["collectives"]))
    for name in names:
        found = row.get(name) or {}
        tip = found.get("reason") or (bound if name == "transfer_ms" else None)
        cells.append(value(found.get("median"), metric_named(name).unit, tip))
    return tuple(cells)


def pairs_table(comparison: Mapping[str, Any]) -> Table | None:
    """Collectives that both sides issued, candidate against reference. None without any."""
    found = comparison.get("collectives")
    if not found:
        return None
    names = ("transfer_ms", "wait_ms", "queued_ms", "busbw_gb_per_s")
    columns = [Column("kind"), Column("group"), Column("ranks", True), Column("bytes", True)]
    for name in names:
        columns += [Column(f"{titled(name)}, {comparison[side]}", True) for side in SIDES]
        columns.append(Column("quotient", True, f"{name}: candidate / reference"))
    rows = []
    for row in found[:ROW_LIMIT]:
        cells = [word(row["kind"]), word(row["group"])]
        cells.append(Cell(PAGE.unknown if row["group_size"] is None else str(row["group_size"]), row["group_size"]))
        cells.append(Cell(PAGE.size(row["bytes"]), row["bytes"]))
        for name in names:
            pair = row[name]
            cells += [value(pair[side], pair["unit"], pair["judgement_reason"]) for side in SIDES]
            cells.append(Cell(PAGE.number(pair["quotient"], "ratio"), pair["quotient"], pair["quotient_reason"]))
        rows.append(tuple(cells))
    alone = comparison["collectives_on_one_side"]
    notes = []
    if len(found) > ROW_LIMIT:
        notes.append(f"{len(found) - ROW_LIMIT} more that both sides issued, all in summary.json")
    if any(alone.values()):
        notes.append(f"On one side only: {alone['reference']} of the reference, {alone['candidate']} of the candidate")
    return Table("pairs", "The same collectives on both sides", tuple(columns), tuple(rows), ". ".join(notes) or None)
