"""One table, and its three renderers: lines of a terminal (`text_lines`), cells of the page (`page_table`) and a data
frame that `table_files` writes (`frame`).

    TABLE = Table("gaps", "Gaps between kernels", (Column("stream", unit="count"), Column("gap_ms", "gaps")), rows)
    print("\\n".join(text_lines(TABLE, style)))

A column says where its value is in a row and in which unit it is written; `aorta.analysis.formatting` writes it. Must
not compute a value, or leave a row out without a sentence that says how many.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Final

from aorta.analysis.documents import known
from aorta.analysis.documents.comparison import Effect
from aorta.analysis.documents.dataset import Ends, GainEntry, MarginalEntry
from aorta.analysis.formatting import PAGE, TEXT, NumberFormat, p_value, rough_interval
from aorta.terminal_style import PLAIN, Style, table, wrapped

if TYPE_CHECKING:
    import pandas as pd

TERMINAL, ON_PAGE, IN_FILE = "terminal", "page", "file"
PEOPLE: Final = (TERMINAL, ON_PAGE)
ROW_LIMIT: Final = 400
"""Rows that the page lists; a browser sorts that many without a pause."""
_LEAST_NAME: Final = 24
_LEAST_HEAD: Final = 4
_TYPES: Final = {"text": "string", "count": "Int64", "bytes": "Int64", "flag": "bool"}
"""Unit -> type of a column in a file; a number otherwise."""
_SUFFIXES: Final = {"_ms": "ms", "_gb_per_s": "GB/s", "_share": "ratio", "_reason": "text"}
_VERDICTS: Final = {"bad": "regression", "good": "improvement", "even": "equivalent", "open": "inconclusive"}
"""Tone -> the verdict whose colour a terminal shows."""


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        key: its name in files, and by default the attribute of a row that holds the value.
        title: above the column, where people read it; by default the key without its unit.
        unit: `text`, `count`, `bytes`, `flag`, `ms`, `GB/s`, `ratio`, `p`, `interval` or `` for a plain number; by
            default from the end of the key. A function of a row where rows differ: cells then name their unit.
        of: where the value is in a row: a path of attributes and keys, or a function of the row; by default the key.
        tip: says more about the column.
        why: says more about a cell; of an unknown value, why.
        tone: good, bad, even or open.
        media: where it is shown.
        drop: a terminal without room leaves the columns with the highest number out first; 0 stays.
        cut: a long name is cut in the middle, so that it still differs from the others.
    """

    key: str
    title: str | None = None
    unit: str | Callable[[Any], str] | None = None
    of: str | Callable[[Any], Any] | None = None
    tip: str | None = None
    why: str | Callable[[Any], str | None] | None = None
    tone: Callable[[Any], str | None] | None = None
    media: Collection[str] = (TERMINAL, ON_PAGE, IN_FILE)
    drop: int = 0
    signed: bool = False
    cut: bool = False

    def value(self, row: Any) -> Any:
        """Return the value of a row; None where it is unknown."""
        return _at(row, self.of or self.key)

    def unit_of(self, row: Any) -> str:
        """Return the unit of the value of a row."""
        return self.unit(row) if callable(self.unit) else self.kind

    @property
    def kind(self) -> str:
        """Its unit, where all rows have the same; empty otherwise."""
        if self.unit is None:
            return next((unit for end, unit in _SUFFIXES.items() if self.key.endswith(end)), "text")
        return "" if callable(self.unit) else self.unit

    @property
    def heading(self) -> str:
        """What stands above it, with the unit that its cells do not name."""
        title = self.key.removesuffix("_ms").removesuffix("_gb_per_s") if self.title is None else self.title
        return f"{title}, {self.kind}" if self.kind in ("ms", "GB/s") else title

    @property
    def numeric(self) -> bool:
        """Whether its cells stand to the right, and are sorted as numbers."""
        return self.kind not in ("text", "flag")


def _at(row: Any, place: str | Callable[[Any], Any]) -> Any:
    """Return what is at a place of a row; None where it, or what it is part of, is unknown."""
    if callable(place):
        return known(place(row))
    if isinstance(row, Mapping) and place in row:
        return known(row[place])
    for name in place.split("."):
        row = None if row is None else known(row.get(name) if isinstance(row, Mapping) else getattr(row, name))
    return row


@dataclass(frozen=True)
class Table:
    """`key` is unique on the page; the first cell of a row is its heading. `shown` chooses the rows for people; files
    have all. `note` stands below, `limit` rows at most are on the page.
    """

    key: str
    caption: str
    columns: Sequence[Column]
    rows: Sequence[Any]
    note: str | None = None
    shown: Callable[[Any], bool] | None = None
    limit: int = ROW_LIMIT

    def visible(self) -> list[Any]:
        """Return the rows for people."""
        return [row for row in self.rows if self.shown is None or self.shown(row)]


def written(value: Any, unit: str, form: NumberFormat, *, signed: bool = False, named: bool = False) -> str:
    """Return a value as a person writes it.

    Args:
        value: None, text, a number, bounds, an effect or a gain.
        named: with `ms` and `GB/s`.
    """
    match value:
        case None:
            return form.unknown
        case str():
            return value
        case bool():
            return "yes" if value else "no"
        case Ends():
            return form.bounds(value, unit, named=named)
        case Effect():
            return form.interval(value) if unit == "interval" else form.effect(value.value, value.kind)
        case GainEntry() | MarginalEntry():
            return rough_interval(value.gain_ms, value.low_ms, value.high_ms)
    match unit:
        case "bytes":
            return form.size(value)
        case "count":
            return form.whole(value)
        case "p":
            return p_value(value, 3)
    return (form.quantity if named else form.number)(value, unit, signed=signed)


def shortened(name: str, width: int) -> str:
    """Return a kernel's name on one line: what cannot be printed as `?`, of a long one its beginning and end."""
    plain = "".join(letter if letter.isprintable() else "?" for letter in name) or "(no name)"
    if len(plain) <= width:
        return plain
    end = (width - 3) // 3
    return f"{plain[: width - 3 - end]}...{plain[-end:]}"


def shortened_apart(names: Sequence[str], width: int) -> dict[str, str]:
    """Return the names of at most `width` characters each; those that would look the same are cut where they differ."""
    cut = {name: shortened(name, width) for name in names}
    head = width // 4
    for text in set(cut.values()):
        alike = [name for name in cut if cut[name] == text]
        if len(alike) > 1 and head >= _LEAST_HEAD:
            same = sum(1 for _ in takewhile(lambda letters: len(set(letters)) == 1, zip(*alike, strict=False)))
            ends = shortened_apart([name[same:] for name in alike], width - head - 3)
            cut |= {name: f"{shortened(name[:head], head)}...{ends[name[same:]]}" for name in alike}
    return cut


def text_lines(
    told: Table, style: Style = PLAIN, *, most: int | None = None, only: Collection[str] = (), titled: bool = True
) -> list[str]:
    """Return a table as lines of a terminal: columns that say nothing, or for which there is no room, are left out.

    Args:
        most: rows at most; how many there are more is said.
        only: keys of the columns.
        titled: with the caption, and the note.
    """
    rows = told.visible()
    shown = rows if most is None else rows[:most]
    columns = [each for each in told.columns if TERMINAL in each.media and (not only or each.key in only)]
    columns = [each for each in columns if any(each.value(row) not in (None, "") for row in shown)]
    lines = [style.bold(told.caption)] if titled else []
    while shown:
        cells = [[_cell(column, row) for column in columns] for row in shown]
        widths = [max(map(len, each)) for each in zip([column.heading for column in columns], *cells, strict=True)]
        cut = next((place for place, column in enumerate(columns) if column.cut), None)
        room = style.terminal_width - sum(widths) - 2 * (len(widths) - 1)
        if cut is not None:
            room += widths[cut]
            names = shortened_apart([each[cut] for each in cells], max(room, _LEAST_NAME))
            for each in cells:
                each[cut] = names[each[cut]]
            room -= _LEAST_NAME
        last = max(columns, key=lambda column: column.drop)
        if room >= 0 or not last.drop:
            for each, row in zip(cells, shown, strict=True):
                for place, column in enumerate(columns):
                    tone = column.tone and column.tone(row)
                    each[place] = style.verdict(_VERDICTS[tone], each[place]) if tone else each[place]
            right = [place for place, column in enumerate(columns) if column.numeric]
            head, *body = table(
                [[column.heading for column in columns], *cells], right=right, width=style.terminal_width
            )
            lines += [style.bold(head), *body]
            break
        columns = [column for column in columns if column.drop != last.drop]
    if len(rows) > len(shown):
        lines.append(f"and {len(rows) - len(shown)} more")
    if told.note and titled:
        lines.append(wrapped([told.note], style.width, indent=""))
    return lines if shown or told.note else []


def _cell(column: Column, row: Any) -> str:
    value = column.value(row)
    if value is None:
        return "-"
    return written(value, column.unit_of(row), TEXT, signed=column.signed, named=callable(column.unit))


@dataclass(frozen=True)
class Cell:
    """`sort` is what the column is ordered by; None sorts last. `tip` says more, as a title."""

    text: str
    sort: float | str | None
    tip: str | None
    tone: str | None


@dataclass(frozen=True)
class PageTable:
    """A table as the page's template shows it."""

    key: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str | None


def page_table(told: Table) -> PageTable:
    """Return a table with its cells as text of the page."""
    columns = tuple(column for column in told.columns if ON_PAGE in column.media)
    rows = told.visible()
    cells = tuple(tuple(_page_cell(column, row) for column in columns) for row in rows[: told.limit])
    more = f"The first {told.limit} of {PAGE.whole(len(rows))} rows." if len(rows) > told.limit else ""
    return PageTable(told.key, told.caption, columns, cells, " ".join(filter(None, (more, told.note))) or None)


def _page_cell(column: Column, row: Any) -> Cell:
    value, unit = column.value(row), column.unit_of(row)
    sort: float | str | None
    match value:
        case str():
            sort = value.casefold()
        case Ends():
            sort = value.at_most
        case Effect():
            sort = value.low if unit == "interval" else value.value
        case GainEntry() | MarginalEntry():
            sort = value.gain_ms
        case _:
            sort = value
    text = written(value, unit, PAGE, signed=column.signed, named=callable(column.unit))
    return Cell(text, sort, _at(row, column.why) if column.why else None, column.tone and column.tone(row))


def frame(told: Table) -> pd.DataFrame:
    """Return every row of a table as a file has it: values as they are, with the same columns and types whatever the
    rows hold.
    """
    import pandas as pd

    columns = [column for column in told.columns if IN_FILE in column.media]
    rows = [[column.value(row) for column in columns] for row in told.rows]
    return typed(pd.DataFrame(rows, columns=[column.key for column in columns]), columns)


def typed(rows: pd.DataFrame, columns: Sequence[Column]) -> pd.DataFrame:
    """Give columns their types: integers and text that may be missing, else floats."""
    return rows.astype({column.key: _TYPES.get(column.kind, "float64") for column in columns if column.key in rows})
