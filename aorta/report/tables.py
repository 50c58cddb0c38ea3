"""One table, and its two renderers: lines of a terminal (`text_lines`) and cells of the page (`page_table`).

    gaps = Table("gaps", "Gaps between kernels", (Column("stream"), Column("gap_ms", "gaps")), rows)
    print("\\n".join(text_lines(gaps, style)))

A column says where its value is in a row and in which unit it is written; `aorta.documents.formatting` writes it. Must
not compute a value, or leave a row out without a sentence that says how many.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import Any, Final, NamedTuple

from aorta.documents import known
from aorta.documents.comparison import Effect
from aorta.documents.dataset import Ends
from aorta.documents.explanations import GainEntry
from aorta.documents.formatting import PAGE, TEXT, NumberFormat, p_value, rough_interval
from aorta.terminal_style import PLAIN, Style, table, wrapped

TERMINAL, ON_PAGE = "terminal", "page"
ROW_LIMIT: Final = 400
"""Rows that the page lists; a browser sorts that many without a pause."""
_LEAST_NAME: Final = 24
_LEAST_HEAD: Final = 4
_CELLS: Final = replace(TEXT, unknown="-")
_UNITS: Final = {
    **dict.fromkeys(("metric", "role", "kind", "group", "name", "cls", "operator"), "text"),
    **dict.fromkeys(("count", "nulls", "stream", "kernels", "gaps", "gaps_known", "launch_bound"), "count"),
    "bytes": "bytes",
}
_SUFFIXES: Final = {"_count": "count", "_ms": "ms", "_gb_per_s": "GB/s"}
"""Unit of a column by its key, or by the end of its key; a plain number otherwise."""
_VERDICTS: Final = {"bad": "regression", "good": "improvement", "even": "equivalent", "open": "inconclusive"}
"""Tone -> the verdict whose colour a terminal shows."""


class Cell(NamedTuple):
    """A cell of the page; `tip` says more, as a title."""

    text: str
    sort: float | str | None
    tip: str | None
    tone: str | None


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        key: of the column in its table, and by default the attribute of a row that holds the value.
        title: above the column; by default the key without its unit.
        unit: `text`, `count`, `bytes`, `exact bytes`, `ms`, `GB/s`, `ratio`, `p`, `interval` or `` for a plain number;
            by default from the key. A function of a row where rows differ: cells then name their unit.
        of: where the value is in a row: a path of attributes and keys, or a function of the row; by default the key.
        tip, why: say more about the column, and about a cell (of an unknown value, why).
        tone: of a cell: good, bad, even or open.
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
    media: Collection[str] = (TERMINAL, ON_PAGE)
    drop: int = 0
    signed: bool = False
    cut: bool = False

    def value(self, row: Any) -> Any:
        """Return the value of a row; None where it is unknown."""
        return _at(row, self.of or self.key)

    @property
    def kind(self) -> str:
        """Its unit, where all rows have the same; empty otherwise."""
        if self.unit is not None:
            return "" if callable(self.unit) else self.unit
        ends = (unit for end, unit in _SUFFIXES.items() if self.key.endswith(end))
        return _UNITS.get(self.key) or next(ends, "")

    @property
    def heading(self) -> str:
        """What stands above it, with the unit that its cells do not name."""
        title = self.key.removesuffix("_ms").removesuffix("_gb_per_s") if self.title is None else self.title
        return f"{title}, {self.kind}" if self.kind in ("ms", "GB/s") else title

    @property
    def numeric(self) -> bool:
        """Whether its cells stand to the right, and are sorted as numbers."""
        return self.kind != "text"

    def cell(self, row: Any, form: NumberFormat) -> tuple[str, float | str | None]:
        """Return the value of a row as a person writes it, and what the column is sorted by; None sorts last."""
        value, named = self.value(row), callable(self.unit)
        unit = self.unit(row) if callable(self.unit) else self.kind
        match value:
            case None:
                return form.unknown, None
            case str():
                return value, value.casefold()
            case Ends():
                return form.bounds(value, unit, named=named), value.at_most
            case Effect():
                if unit == "interval":
                    return form.interval(value), value.low
                return form.effect(value.value, value.kind), value.value
            case GainEntry():
                gain = rough_interval(value.gain_ms, value.low_ms, value.high_ms)
                return f"at most {gain}" if value.upper_bound else gain, value.gain_ms
        match unit:
            case "bytes" | "exact bytes":
                return form.size(value, exact=unit == "exact bytes"), value
            case "count":
                return form.whole(value), value
            case "p":
                return p_value(value, 3), value
        return (form.quantity if named else form.number)(value, unit, signed=self.signed), value


text_column: Final = partial(Column, unit="text")


def _at(row: Any, path: str | Callable[[Any], Any]) -> Any:
    """Return what is at a place of a row; None where it, or what it is part of, is unknown."""
    if callable(path):
        return known(path(row))
    if isinstance(row, Mapping) and path in row:
        return known(row[path])
    for name in path.split("."):
        row = None if row is None else known(row.get(name) if isinstance(row, Mapping) else getattr(row, name))
    return row


@dataclass(frozen=True)
class Table:
    """`key` is unique on the page; the first cell of a row is its heading. `note` stands below; of the rows the page
    has `limit` at most.
    """

    key: str
    caption: str
    columns: Sequence[Column]
    rows: Sequence[Any]
    note: str | None = None
    limit: int = ROW_LIMIT

    def printed_columns(self, rows: Sequence[Any]) -> list[Column]:
        """Return the columns of a terminal and of Markdown that have a value in any of these rows."""
        columns = [column for column in self.columns if TERMINAL in column.media]
        return [column for column in columns if any(column.value(row) not in (None, "") for row in rows)]


def shortened(name: str, width: int) -> str:
    """Return a kernel's name on one line: what cannot be printed as `?`, of a long one its beginning and end."""
    plain = "".join(letter if letter.isprintable() else "?" for letter in name) or "(no name)"
    if len(plain) <= width:
        return plain
    end = (width - 3) // 3
    return f"{plain[: width - 3 - end]}...{plain[-end:]}"


def _shortened_apart(names: Sequence[str], width: int) -> dict[str, str]:
    """Return names of at most `width` characters; those that would look the same are cut where they differ."""
    cut = {name: shortened(name, width) for name in names}
    head = width // 4
    for text in set(cut.values()):
        alike = [name for name in cut if cut[name] == text]
        if len(alike) > 1 and head >= _LEAST_HEAD:
            same = sum(1 for _ in takewhile(lambda letters: len(set(letters)) == 1, zip(*alike, strict=False)))
            ends = _shortened_apart([name[same:] for name in alike], width - head - 3)
            cut |= {name: f"{shortened(name[:head], head)}...{ends[name[same:]]}" for name in alike}
    return cut


def text_lines(
    shown: Table, style: Style = PLAIN, *, most: int | None = None, only: Collection[str] = (), titled: bool = True
) -> list[str]:
    """Return a table as lines of a terminal: columns that say nothing, or for which there is no room, are left out, and
    rows after the first `most`, whose number is said. `only`: keys of the columns; `titled`: with caption and note.
    """
    rows = shown.rows[:most]
    columns = [column for column in shown.printed_columns(rows) if not only or column.key in only]
    lines = [style.bold(shown.caption)] if titled else []
    while rows:
        heads = [column.heading for column in columns]
        cells = [[column.cell(row, _CELLS)[0] for column in columns] for row in rows]
        widths = [max(map(len, texts)) for texts in zip(heads, *cells, strict=True)]
        room = style.terminal_width - sum(widths) - 2 * (len(widths) - 1)
        cut = next((index for index, column in enumerate(columns) if column.cut), None)
        if cut is not None:
            room += widths[cut]
            names = _shortened_apart([line[cut] for line in cells], max(room, _LEAST_NAME))
            for line in cells:
                line[cut] = names[line[cut]]
            room -= _LEAST_NAME
        drop = max(column.drop for column in columns)
        if room < 0 and drop:
            columns = [column for column in columns if column.drop != drop]
            continue
        for line, row in zip(cells, rows, strict=True):
            for index, column in enumerate(columns):
                if column.tone and (tone := column.tone(row)):
                    line[index] = style.verdict(_VERDICTS[tone], line[index])
        right = [index for index, column in enumerate(columns) if column.numeric]
        head, *body = table([heads, *cells], right=right, width=style.terminal_width)
        lines += [style.bold(head), *body]
        break
    if len(shown.rows) > len(rows):
        lines.append(f"and {len(shown.rows) - len(rows)} more")
    if shown.note and titled:
        lines.append(wrapped([shown.note], style.width, indent=""))
    return lines if rows or shown.note else []


def page_table(shown: Table) -> Table:
    """Return a table whose rows are `Cell`s, for the page's template."""
    columns = [column for column in shown.columns if ON_PAGE in column.media]
    count = len(shown.rows)

    def cell(column: Column, row: Any) -> Cell:
        tip, tone = _at(row, column.why) if column.why else None, column.tone(row) if column.tone else None
        return Cell(*column.cell(row, PAGE), tip, tone)

    cells = [[cell(column, row) for column in columns] for row in shown.rows[: shown.limit]]
    more = f"The first {shown.limit} of {PAGE.whole(count)} rows." if count > shown.limit else ""
    return replace(shown, columns=columns, rows=cells, note=" ".join(filter(None, (more, shown.note))) or None)
