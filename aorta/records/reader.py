"""Read one rank's record back, whatever state its process left it in.

    header_of(path).run_id                  # the first line alone
    for line in stream(path, problems):     # every line that can be read; sentences about those that cannot
        ...

A record need not fit into memory. Must not guess a value, fail on a line that a
killed process left half-written, or hold a line longer than `LINE_LIMIT` in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from aorta.errors import InputError
from aorta.records.files import open_regular
from aorta.records.schema import SCHEMA_VERSION, Header, Line
from aorta.records.step_line import decode_line, decode_whole_line

LINE_LIMIT: Final = 16 * 1024 * 1024
"""Longest line that is read, bytes. A step of 50 collectives takes at most 10 KiB (`benchmarks/record_size.py`);
this is over a thousand of those, and decoded it still fits into the memory of a laptop."""
_HEADER_BYTES: Final = 4096
"""Read at once where only the header is wanted, which is shorter: a folder may hold the records of a thousand ranks."""
PROBLEM_LIMIT: Final = 100
"""Sentences kept of one file; further bad lines are only counted."""


class _Version(msgspec.Struct, tag_field="record", tag="header"):
    """As much of a header as every version of the schema has."""

    schema_version: int


_VERSION_DECODER = msgspec.json.Decoder(_Version)


@dataclass
class Problems:
    """Sentences about one file, each with its line, at most `PROBLEM_LIMIT` of them; the rest is counted."""

    name: str
    sentences: list[str] = field(default_factory=list)
    more: int = 0

    def add(self, number: int, what: str) -> None:
        """Note what is wrong with line `number`."""
        if len(self.sentences) < PROBLEM_LIMIT:
            self.sentences.append(f"{self.name}:{number}: {what}; ignored")
        else:
            self.more += 1

    def as_sentences(self) -> list[str]:
        """Return all problems, those beyond the limit as one sentence with their number."""
        rest = [f"{self.name}: {self.more} more line(s) could not be read; ignored"] if self.more else []
        return [*self.sentences, *rest]


def stream(path: Path, problems: list[str]) -> Iterator[Line]:
    """Yield the lines of one record as they are read; what is wrong with them is added to `problems` at the end.

    Raises:
        InputError: the file cannot be read, or is of another schema.
    """
    found = Problems(path.name)
    try:
        for number, _, text in raw_lines(path, found):
            if number == 1:
                _check_version(path, text)
            try:
                line = decode_whole_line(text)
            except ValueError as error:
                found.add(number, str(error))
            else:
                yield line
    finally:
        problems += found.as_sentences()


def header_of(path: Path) -> Header:
    """Return the header alone: who wrote this record.

    Raises:
        InputError: the file cannot be opened, is empty, or does not begin with a header of this schema; or its first
            line is longer than `LINE_LIMIT`.
    """
    problems = Problems(path.name)
    return read_header(path, raw_lines(path, problems, buffer_bytes=_HEADER_BYTES), problems)


def read_header(path: Path, lines: Iterator[tuple[int, int, bytes]], problems: Problems) -> Header:
    """Return the first line, taken from `lines`.

    Raises:
        InputError: it is not a header of this schema.
    """
    seen = ""
    for number, _, text in lines:
        _check_version(path, text)
        try:
            line = decode_line(text)
        except ValueError as error:
            problems.add(number, str(error))
        else:
            if isinstance(line, Header):
                return line
            seen = "another line"
        break
    if problems.sentences:
        seen = problems.sentences[0]
    if not seen:
        raise InputError(
            f"{path.name}: the file is empty: its rank was killed before it wrote the first line, or there was no room "
            f"for one (in {path.parent})"
        )
    raise InputError(f"{path.name}:1: expected a header line of an AORTA record, saw {seen} (in {path.parent})")


def raw_lines(path: Path, problems: Problems, buffer_bytes: int = 1 << 20) -> Iterator[tuple[int, int, bytes]]:
    """Yield number (from 1), byte offset and text of each whole line; a last line without its end is a problem.

    Raises:
        InputError: the file cannot be read, or a line is longer than `LINE_LIMIT`.
    """
    try:
        with open_regular(path, buffer_bytes) as file:
            offset, number = 0, 0
            while text := file.readline(LINE_LIMIT + 1):
                number += 1
                if len(text) > LINE_LIMIT:
                    raise InputError(
                        f"{path.name}:{number}: this line is longer than {LINE_LIMIT} bytes; a line of a record holds "
                        f"one step. The file is not read (in {path.parent})"
                    )
                if not text.endswith(b"\n"):
                    problems.add(number, "cut off in mid-line")
                    return
                yield number, offset, text
                offset += len(text)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error


def no_footer(path: Path) -> str:
    """Return the sentence for a record that ends without a footer."""
    return f"{path.name}: no footer: the process was killed, or still runs"


def second_header(path: Path, number: int, line: Header) -> InputError:
    """Return the error for a header that is not the first line."""
    return InputError(f"{path.name}:{number}: a second header (run {line.run_id}): two runs are mixed in one file")


def _check_version(path: Path, text: bytes) -> None:
    try:
        version = _VERSION_DECODER.decode(text).schema_version
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return  # not a header of any version: `read_header` says what it is
    if version != SCHEMA_VERSION:
        raise InputError(
            f"{path.name}:1: schema version {version}; this AORTA reads version {SCHEMA_VERSION} (in {path.parent})"
        )
