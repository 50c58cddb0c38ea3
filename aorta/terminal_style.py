"""What commands write: colour and weight on a terminal, plain text everywhere else; tables and paragraphs.

Colour only repeats what a word and a mark (`MARKS`) say. Must not change a character of the text: a pipe gets the same.
"""

from __future__ import annotations

import os
import re
import secrets
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TextIO

from aorta.redaction import redact

MARKS: Final = {"regression": "x", "improvement": "+", "equivalent": "=", "shifted": "~", "not tested": "-"}
"""Verdict -> a character that tells it from the others without colour; any other verdict is `UNDECIDED`."""
UNDECIDED: Final = "?"
_OURS: Final = secrets.randbits(62)
"""Marks escape sequences of this process until they are printed: a name in a file has none that pass for ours."""
# SGR parameters of ECMA-48, section 8.3.117.
_ESCAPE: Final = re.compile(rf"\033\[{_OURS};([0-9;]*m)")
_BOLD, _FAINT, _RED, _GREEN, _YELLOW = "1", "2", "31", "32", "33"
_VERDICTS: Final = {"regression": _RED, "improvement": _GREEN, "equivalent": _GREEN}
WIDTH: Final = 100
"""Columns of text at most, however wide the terminal: longer lines are hard to read."""
LEAST_WIDTH: Final = 80
"""Columns of text at least, however narrow the terminal."""


@dataclass(frozen=True)
class Style:
    """How text is shown. `enabled`: with escape sequences, for `printable`; without, every method returns its text."""

    enabled: bool = False
    width: int = WIDTH  # columns of sentences and tables
    terminal_width: int = WIDTH  # columns of a line that ends in a name, at least `LEAST_WIDTH`

    def bold(self, text: str) -> str:
        return self._sgr(text, _BOLD)

    def faint(self, text: str) -> str:
        return self._sgr(text, _FAINT)

    def warning(self, text: str) -> str:
        return self._sgr(text, _YELLOW)

    def error(self, text: str) -> str:
        return self._sgr(text, f"{_BOLD};{_RED}")

    def verdict(self, word: str, text: str, *, bold: bool = False) -> str:
        """Colour text as its verdict is: red is worse, green is not, yellow is undecided; none without a verdict."""
        colour = _VERDICTS.get(word, _YELLOW)
        return self._sgr(text, f"{_BOLD};{colour}" if bold else colour)

    def _sgr(self, text: str, parameters: str) -> str:
        return f"\033[{_OURS};{parameters}m{text}\033[{_OURS};0m" if self.enabled and text else text


PLAIN: Final = Style()


def style_of(stream: TextIO, environment: Mapping[str, str] | None = None) -> Style:
    """Return the style for a stream, as wide as its terminal. NO_COLOR (https://no-color.org) wins, then FORCE_COLOR
    and CLICOLOR_FORCE, then CLICOLOR=0 and TERM=dumb; otherwise there is colour where the stream is a terminal.
    """
    words = os.environ if environment is None else environment
    try:
        terminal = stream.isatty()
        columns = os.get_terminal_size(stream.fileno()).columns if terminal else WIDTH
    except (OSError, ValueError):  # closed, or no file
        terminal, columns = False, WIDTH
    if words.get("NO_COLOR"):
        coloured = False
    elif any(words.get(name, "0") not in {"", "0"} for name in ("FORCE_COLOR", "CLICOLOR_FORCE")):
        coloured = True
    else:
        coloured = terminal and words.get("CLICOLOR") != "0" and words.get("TERM") != "dumb"
    columns = max(columns, LEAST_WIDTH) if columns else WIDTH
    return Style(coloured, min(WIDTH, columns), columns)


def mark_of(verdict: str | None) -> str:
    """Return the character before a verdict; "" without a verdict."""
    return "" if verdict is None else MARKS.get(verdict, UNDECIDED)


_GAP: Final = 2
"""Columns between those of a table."""
_LEAST_LAST: Final = 30
"""Columns that a sentence takes at least."""


def table(
    rows: Sequence[Sequence[str]],
    *,
    right: Collection[int] = (),
    indent: str = "",
    width: int | None = None,
) -> list[str]:
    """Return a line for each row, columns as wide as their widest cell; escape sequences have no width.

    Args:
        right: right-aligned columns.
        width: of a line at most: the words of a last column go on below where it has `_LEAST_LAST` columns for them;
            a first cell without room is followed by a line break.
    """
    widths = [max(len(_ESCAPE.sub("", row[column])) for row in rows) for column in range(len(rows[0]))]
    last, before_last = len(widths) - 1, len(indent) + sum(widths[:-1]) + _GAP * (len(widths) - 1)
    if width is not None:
        if last and last not in right and width - before_last >= _LEAST_LAST:
            widths[last] = min(widths[last], width - before_last)
        widths[0] = min(widths[0], max(0, width - len(indent) - sum(widths[1:]) - _GAP * last))
    lines = []
    for row in rows:
        cells = []
        for column, cell in enumerate(row):
            space = " " * (widths[column] - len(_ESCAPE.sub("", cell)))
            cells.append(f"{space}{cell}" if column in right else f"{cell}{space}")
        if last and len(_ESCAPE.sub("", row[last])) > widths[last]:
            words = textwrap.wrap(row[last], widths[last], break_long_words=False, break_on_hyphens=False)
            cells[last] = f"\n{'':<{before_last}}".join(words)
        if len(_ESCAPE.sub("", row[0])) > widths[0]:
            cells[0] += f"\n{indent}{'':<{widths[0]}}"
        lines.append(f"{indent}{(' ' * _GAP).join(cells)}".rstrip())
    return lines


_UNPRINTABLE: Final = re.compile(r"[^\n\t\x20-\x7e\xa0-\u2029\u202f-\u2065\u206a-\U0010ffff]")


def printable(text: str) -> str:
    """Return text without secrets, and with control characters other than `Style`'s as JSON writes them: a name in a
    trace could move a terminal's cursor, or turn the direction of writing.
    """
    parts = _ESCAPE.split(redact(text))  # every other is the end of a sequence of `Style`'s
    parts[::2] = [_UNPRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", part) for part in parts[::2]]
    return "".join(f"\033[{part}" if index % 2 else part for index, part in enumerate(parts))


def wrapped(lines: Iterable[str], width: int = WIDTH, indent: str = "    ") -> str:
    """Return each line, without secrets, in at most `width` columns, continued with an indent."""
    return "\n".join(
        textwrap.fill(redact(line), width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        for line in lines
    )
