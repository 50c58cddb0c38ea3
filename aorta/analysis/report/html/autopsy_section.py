"""The section of a run that hung or died: who is accused and why, who waits for whom, and what every rank does.

Takes the verdict of an autopsy as the summary has it. Must not judge evidence (`aorta.autopsy.judge` does).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from aorta.analysis.cautions import autopsy_title
from aorta.analysis.documents import known
from aorta.analysis.documents.dataset import DatasetEntry
from aorta.analysis.formatting import PAGE
from aorta.analysis.report.html.page_tables import ROW_LIMIT, Cell, Column, Table, word
from aorta.autopsy.verdict import RankDoing, Verdict
from aorta.autopsy.verdict_text import waiting_sentence
from aorta.command_line import rounded_time

_COLUMNS: Final = (
    Column("rank"),
    Column("state"),
    Column("does"),
    Column("for", True),
    Column("step", True),
    Column("evidence"),
)


@dataclass(frozen=True)
class PageAutopsy:
    """What the page says of one run. `accused` has a reason and its evidence for each culprit."""

    label: str
    title: str
    sentence: str
    accused: tuple[tuple[str, tuple[str, ...]], ...]
    waits: tuple[str, ...]
    limits: tuple[str, ...]
    next: tuple[str, ...]
    ranks: Table


def page_autopsies(entries: Mapping[str, DatasetEntry]) -> list[PageAutopsy]:
    """A section for each run in which something was stuck, stopped or dead."""
    return [
        _section(label, title, found)
        for label, entry in entries.items()
        if (title := autopsy_title(entry)) is not None and (found := known(entry.autopsy)) is not None
    ]


def _section(label: str, title: str, found: Verdict) -> PageAutopsy:
    missing = [f"no evidence of rank {rank}" for rank in found.missing[:ROW_LIMIT]]
    return PageAutopsy(
        label,
        title,
        found.summary,
        tuple((f"Rank {one.rank}: {one.reason}", tuple(one.evidence)) for one in found.culprits),
        tuple(waiting_sentence(one) for one in found.waits),
        (*found.contradictions, *found.notes, *missing),
        tuple(found.next),
        _ranks(label, found),
    )


def _ranks(label: str, found: Verdict) -> Table:
    more = len(found.ranks) - ROW_LIMIT
    note = f"{PAGE.whole(more)} more ranks in summary.json." if more > 0 else None
    rows = tuple(_rank(one) for one in found.ranks[:ROW_LIMIT])
    return Table(f"autopsy-{label}", "What every rank does", _COLUMNS, rows, note)


def _rank(one: RankDoing) -> tuple[Cell, ...]:
    since = PAGE.unknown if one.since_s is None else rounded_time(one.since_s)
    return (
        Cell(f"rank {one.rank}", f"{one.rank:08d}"),  # sorted as text, as the heading of a row is
        word(one.state, tone="bad" if one.state in ("dead", "stopped") else None),
        word(one.doing, "\n".join(one.stack) or None),
        Cell(since, one.since_s),
        Cell(PAGE.unknown if one.step is None else PAGE.whole(one.step), one.step),
        word(", ".join(one.sources)),
    )
