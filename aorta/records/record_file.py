"""One rank's record: write it line by line, and read it back, whatever state its process left it in.

    with RecordWriter(path, rank) as record:
        record.write(header)
        record.write(step)
    record = RecordWriter.reopened(path, rank)      # in another process, which appends what the first has not written

    header_of(path).run_id                  # the first line alone
    for line in stream(path, problems):     # every line that can be read; sentences about those that cannot
        ...

A record need not fit into memory. `decode_line` gives a step as a `StepLine`: rows as tuples, and as JSON text what few
readers use.

    line.overlap["overlap_ratio"]           # decoded with the line
    decode_field(line, "coverage").seen     # decoded now

Must not buffer what is written (a killed run keeps what it measured), guess a value, accept a field that violates the
schema (one that is decoded late raises when it is read), fail on a line that a killed process left half-written, or
hold a line longer than `LINE_LIMIT` in memory.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar, get_args

import msgspec

from aorta.errors import InputError, RecordWriteError
from aorta.records.files import OF_THIS_PROCESS, above_streams, open_own, open_regular
from aorta.records.schema import SCHEMA_VERSION, Anchor, Calibration, Footer, Header, Line, Step
from aorta.redaction import redacted

Value = TypeVar("Value")
LINE_LIMIT: Final = 16 * 1024 * 1024
"""Longest line that is read, bytes. A step of 50 collectives takes some 8.5 kB;
this is over a thousand of those, and decoded it still fits into the memory of a laptop."""
_HEADER_BYTES: Final = 4096
"""Read at once where only the header is wanted, which is shorter: a folder may hold the records of a thousand ranks."""
PROBLEM_LIMIT: Final = 100
"""Sentences kept of one file; further bad lines are only counted."""
_LINES_TO_DROP: Final = 64
"""At most so many lines make room for the last one."""
_ROWS: Final = ("collectives", "compute", "aux")
"""Read as tuples of the fields of their structs, which are built in half the time."""
_LATE: Final = frozenset(
    [
        *("per_stream_ms", "utilization", "concurrency", "coverage", "active_segments"),
        *("reasons", "device", "ranges", "copies"),
    ]
)
"""Kept as JSON text: `coverage` and `reasons` are the same in most steps, the others are read of few."""


class RecordWriter(AbstractContextManager["RecordWriter", None]):
    """One open record. `write` either appends a whole line or leaves the file as it was and raises.

    Args:
        file: a descriptor of the record, which is there; None: it is created.

    Attributes:
        steps_written: how many steps the file holds.
        last_start_ns: when the last of them began, as `resume` found it; -1: there was none.
        has_ended: whether it found a footer as the last line.
        is_lent: another process writes to it meanwhile, and this one must not.

    Raises:
        RecordWriteError: the file cannot be created or extended; names rank, path and the system's reason.
    """

    def __init__(self, path: Path, rank: int, file: int | None = None) -> None:
        try:
            if file is None:
                path.parent.mkdir(parents=True, exist_ok=True)
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
                file = above_streams(os.open(path, flags, 0o644))
        except OSError as error:
            raise _unwritable(path, rank, error) from error
        self.path, self.rank, self._file = path, rank, file
        self._encoder = msgspec.json.Encoder()
        OF_THIS_PROCESS.add(file)
        self._size = self.steps_written = 0
        self.last_start_ns, self.has_ended, self.is_lent = -1, False, False
        self._last = b""
        self._before: deque[tuple[int, int]] = deque(maxlen=_LINES_TO_DROP)
        """Size and steps of the file before each of its last lines."""

    @classmethod
    def reopened(cls, path: Path, rank: int) -> RecordWriter:
        """Open a record that another process has begun; `resume` before it is written to.

        Raises:
            OSError: it cannot be opened, or is no file of its own (`files.open_own`).
        """
        with open_own(path, existing=True) as file:
            return cls(path, rank, above_streams(os.dup(file.fileno())))

    def resume(self, steps: int, last_start_ns: int) -> None:
        """Go on behind the last whole line, where another process has written: what a killed one left of a line is cut
        off. `steps`, `last_start_ns`: what that process said; where the file says otherwise its steps are counted.

        Raises:
            OSError: it cannot be read or cut.
        """
        size, tail = os.fstat(self._file).st_size, 1 << 16
        while True:
            begin = max(size - tail, 0)
            text = os.pread(self._file, size - begin, begin)
            lines = text[: text.rfind(b"\n") + 1].splitlines(keepends=True)[begin > 0 :]
            decoded = [_lenient(line) for line in lines]
            last = next((line for line in reversed(decoded) if isinstance(line, _TailStep)), None)
            if last is not None or begin == 0:
                break
            tail *= 8
        whole = begin + text.rfind(b"\n") + 1
        if whole < size:
            os.ftruncate(self._file, whole)
        self.has_ended = bool(decoded) and isinstance(decoded[-1], Footer)
        self.last_start_ns = -1 if last is None else last.start_mono_ns
        if self.last_start_ns != last_start_ns:
            with open(os.dup(self._file), "rb") as file:  # noqa: PTH123 - it is open already
                file.seek(0)
                steps = sum(isinstance(_lenient(line), _TailStep) for line in file)
        self._size, self.steps_written, self._last = whole, steps, lines[-1] if lines else b""
        before = []
        for line, record in zip(reversed(lines), reversed(decoded), strict=True):
            whole, steps = whole - len(line), steps - isinstance(record, _TailStep)
            before.append((whole, steps))
        self._before = deque(reversed(before), maxlen=_LINES_TO_DROP)

    def lock(self) -> bool:
        """Keep other processes from writing to it until `unlock`; False while another one does.

        Raises:
            OSError: its file system has no locks.
        """
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlock(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)

    @property
    def is_in_place(self) -> bool:
        """Whether the file is still that of its name: nobody has removed, renamed or replaced it, or its folder."""
        try:
            own, named = os.fstat(self._file), self.path.stat()
        except OSError:
            return False
        return (own.st_dev, own.st_ino) == (named.st_dev, named.st_ino)

    def write(self, line: Line) -> None:
        """Append `line`, without secrets; a line the disk takes only in part is cut off again."""
        self._append(self._encoded(line), steps=isinstance(line, Step))

    def write_last(self, footer: Callable[[int], Footer]) -> Footer:
        """Write and return the footer for as many steps as the file holds; on a full disk in place of as many of the
        lines before it as make room.
        """
        end = self._size
        while True:
            line = footer(self.steps_written)
            data = self._encoded(line)
            try:
                self._append(data)
                return line
            except RecordWriteError:
                if end - self._size >= len(data) or len(self._before) < 2:  # the header stays
                    raise
                self._drop()

    def replace_last(self, line: Line) -> None:
        """Write `line` in place of the last one; the last one stays where the disk does not take it."""
        last = self._last
        self._drop()
        try:
            self.write(line)
        except RecordWriteError:
            self._append(last)
            raise

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._file >= 0:
            OF_THIS_PROCESS.discard(self._file)
            os.close(self._file)
            self._file = -1

    def __exit__(self, *_how: object) -> None:
        self.close()

    def _encoded(self, line: Line) -> bytes:
        shown = line if isinstance(line, Step) else redacted(msgspec.to_builtins(line))
        return self._encoder.encode(shown) + b"\n"

    def _drop(self) -> None:
        self._size, self.steps_written = self._before.pop()
        with suppress(OSError):  # the disk is gone: the line stays, as a whole
            os.ftruncate(self._file, self._size)

    def _append(self, data: bytes, steps: int = 0) -> None:
        if self.is_lent:
            busy = OSError(errno.EBUSY, "another process still writes to it")
            raise _unwritable(self.path, self.rank, busy) from busy
        try:
            written = 0
            while written < len(data):
                written += os.write(self._file, data[written:])
        except OSError as error:
            with suppress(OSError):  # the disk is gone: the reader skips a line that is cut off
                os.ftruncate(self._file, self._size)
            raise _unwritable(self.path, self.rank, error) from error
        self._before.append((self._size, self.steps_written))
        self._size += len(data)
        self.steps_written += steps
        self._last = data


class _TailStep(msgspec.Struct, tag_field="record", tag="step", gc=False):
    """What `resume` asks of a step."""

    start_mono_ns: int


_TAIL: Final[msgspec.json.Decoder[Any]] = msgspec.json.Decoder(Header | _TailStep | Anchor | Calibration | Footer)


def _lenient(text: bytes) -> Any:
    """Return a line of the tail; None for one that cannot be read."""
    with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _TAIL.decode(text)
    return None


def _unwritable(path: Path, rank: int, error: OSError) -> RecordWriteError:
    return RecordWriteError(
        f"rank {rank} cannot write its record {path}: {error.strerror or error}; what was written stays readable. Free "
        "some space or choose another folder"
    )


def _reading_fields() -> list[tuple[str, Any, Any]]:
    fields = []
    for column in msgspec.structs.fields(Step):
        type_, default = column.type, msgspec.NODEFAULT if column.required else column.default
        if default is msgspec.NODEFAULT and not column.required:
            default = msgspec.Raw(b"{}")  # of a dictionary
        if column.name in _LATE:
            type_, default = msgspec.Raw, msgspec.Raw(b"") if default is msgspec.UNSET else default
        elif column.name in _ROWS:
            (row,) = get_args(type_)
            type_ = list[tuple[tuple(cell.type for cell in msgspec.structs.fields(row))]]  # type: ignore[misc]
        fields.append((column.name, type_, default))
    return fields


StepLine: Any = msgspec.defstruct(
    "StepLine", _reading_fields(), tag_field="record", tag="step", gc=False, module=__name__
)
"""A step as it is read, with the fields of `records.schema.Step`; those in `_LATE` hold JSON text, empty where the line
has none (`decode_field`)."""
ReadLine: TypeAlias = Any
"""`Header`, `StepLine`, `Anchor`, `Calibration` or `Footer`."""
# Unions, so that a line without `record` is refused: with a single type, msgspec accepts a missing tag.
_LINE: Final[msgspec.json.Decoder[ReadLine]] = msgspec.json.Decoder(Header | StepLine | Anchor | Calibration | Footer)
_WHOLE_LINE: Final[msgspec.json.Decoder[Line]] = msgspec.json.Decoder(Header | Step | Anchor | Calibration | Footer)
_LATE_DECODERS: Final[dict[str, msgspec.json.Decoder[Any]]] = {
    column.name: msgspec.json.Decoder(column.type) for column in msgspec.structs.fields(Step) if column.name in _LATE
}


def decode_line(text: bytes) -> ReadLine:
    """Decode one line of a record.

    Raises:
        ValueError: it is no line of the schema, or one of its numbers exceeds what a column holds.
    """
    return _decoded(_LINE, text)


def decode_field(line: Any, name: str) -> Any:
    """Decode a field of a `StepLine` that is kept as text; None where the line does not have it.

    Raises:
        ValueError: it violates the schema.
    """
    text = bytes(getattr(line, name))
    return _decoded(_LATE_DECODERS[name], text, name) if text else None


def _decoded(decoder: msgspec.json.Decoder[Value], text: bytes, name: str | None = None) -> Value:
    """Decode a line, or its field `name`, of which msgspec's paths count from the field."""
    try:
        return decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        if name is not None:
            message, at, path = why.rpartition(" - at `$")
            why = f"{message}{at}.{name}{path}" if at else f"{why} - at `$.{name}`"
        raise ValueError(f"not a line of this schema ({why})") from error


@dataclass
class Problems:
    """Sentences about one file, each with its line, at most `PROBLEM_LIMIT` of them; the rest is counted."""

    name: str
    sentences: list[str] = field(default_factory=list)
    more: int = 0

    def add(self, number: int, what: str) -> None:
        if len(self.sentences) < PROBLEM_LIMIT:
            self.sentences.append(f"{self.name}:{number}: {what}; ignored")
        else:
            self.more += 1

    def as_sentences(self) -> list[str]:
        """Return all problems, those beyond the limit as one sentence with their number."""
        rest = [f"{self.name}: {self.more} more line(s) could not be read; ignored"] if self.more else []
        return [*self.sentences, *rest]


def stream(path: Path, problems: list[str]) -> Iterator[Line]:
    """Yield the lines of one record with all their fields, as they are read; what is wrong with them is added to
    `problems` at the end.

    Raises:
        InputError: the file cannot be read, or is of another schema.
    """
    unread = Problems(path.name)
    try:
        for number, _, text in raw_lines(path, unread):
            if number == 1:
                _check_version(path, text)
            try:
                line = _decoded(_WHOLE_LINE, text)
            except ValueError as error:
                unread.add(number, str(error))
            else:
                yield line
    finally:
        problems += unread.as_sentences()


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


class _Version(msgspec.Struct, tag_field="record", tag="header"):
    schema_version: int


_VERSION: Final = msgspec.json.Decoder(_Version)


def _check_version(path: Path, text: bytes) -> None:
    try:
        version = _VERSION.decode(text).schema_version
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return  # not a header of any version: `read_header` says what it is
    if version != SCHEMA_VERSION:
        raise InputError(
            f"{path.name}:1: schema version {version}; this AORTA reads version {SCHEMA_VERSION} (in {path.parent})"
        )
