"""What would gain most, as tables of the page.

Must not compute a number, or show a gain without its interval.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from aorta.analysis.documents.dataset import GainEntry, MarginalEntry, WhatIf
from aorta.analysis.formatting import PAGE, rough_interval
from aorta.analysis.most_to_gain import SHOWN_MARGINALS
from aorta.analysis.report.html.page_tables import Cell, Column, Table, word


@dataclass(frozen=True)
class PageGains:
    """The section of one dataset. With a `reason` there is nothing else in it."""

    label: str
    reason: str | None
    basis: str = ""
    tables: tuple[Table, ...] = ()
    check: str | None = None
    notes: tuple[str, ...] = ()
    command: str = ""


def page_gains(label: str, found: WhatIf) -> PageGains:
    """What the page says of `what_if` of a dataset."""
    if found.reason is not None:
        return PageGains(label, found.reason)
    basis = (
        f"A replay of the last {found.steps} steps on {found.ranks} ranks. Intervals: "
        f"{PAGE.percent(found.level, 0)}; a gain is significant where its whole interval is one. Gains overlap: do "
        "not add them up."
    )
    tables = (_gains(label, found.gains), _marginals(label, found.marginals[:SHOWN_MARGINALS], found.bounds))
    return PageGains(label, None, basis, tables, found.check, (*found.notes, *found.flags), found.command)


def _gains(label: str, rows: Sequence[GainEntry]) -> Table:
    columns = (Column("change"), _GAIN, Column("of a step", True), Column("significant"), Column("--set"))
    cells = tuple(
        (
            word(each.words + ("" if each.setting else " (hypothetical)"), "; ".join(each.notes) or None),
            _gain(each),
            Cell(PAGE.percent(each.share), each.share),
            word("yes" if each.significant else "no"),
            word(each.change),
        )
        for each in rows
    )
    noted = "; ".join(f"{each.words}: {note}" for each in rows for note in each.notes)
    note = noted or (None if cells else "None of the changes that were tried gains anything worth naming.")
    return Table(f"gains-{label}", "The changes that would gain most, each alone", columns, cells, note)


def _marginals(label: str, parts: Iterable[MarginalEntry], bounds: Iterable[MarginalEntry]) -> Table:
    columns = (Column("what is free"), Column("is"), _GAIN)
    cells = tuple((word(each.name), word(each.what), _gain(each)) for each in (*parts, *bounds))
    caption = "By how much a step would be shorter if one part were free; then bounds"
    return Table(f"marginals-{label}", caption, columns, cells)


_GAIN = Column("gain per step", True)


def _gain(found: GainEntry | MarginalEntry) -> Cell:
    return Cell(rough_interval(found.gain_ms, found.low_ms, found.high_ms), found.gain_ms)
