"""Reads the text of a Chrome trace: its event array piece by piece, and the members around it.

A trace is one JSON object with a list `traceEvents`, or that list alone (Trace Event Format, Google, 2016). Decoded at
once it needs its whole text and one object per event. Here the array is cut between two events, so that memory does not
grow with the trace. A cut is tried at the last `},{` of a block, and is right if the piece decodes: `[piece]` is valid
JSON only if the removed comma stood between two elements of the array itself, whatever strings and nested values hold.
So the layout of the file does not matter.

    with opened("trace.json.gz") as stream, reading("trace.json.gz"):
        trace = RawEvents(stream, "trace.json.gz")
        phases = Counter(bytes(event["ph"]) for event in trace.events())

Must not: know what an event means, or accept a truncated file as complete.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from typing import Final, Generic, TypeAlias, TypeVar

import msgspec

from aorta.errors import InputError

Piece = TypeVar("Piece")
Event: TypeAlias = dict[str, msgspec.Raw]
"""An event whose values are not decoded, so that unchanged values can be written back byte for byte."""

BLOCK: Final = 1 << 20
"""Bytes read at a time. The decoded events are several times as large, and should stay in a processor's cache."""
LIMIT: Final = 32 << 20
"""Most bytes buffered while searching for the next cut, or for the beginning or end of the array."""
_EVENTS: Final = "traceEvents"
_ARRAY: Final = re.compile(rb'"traceEvents"\s*:\s*\[')
_MORE_MEMBERS: Final = re.compile(rb',\s*"')
_BETWEEN: Final = re.compile(rb"\}\s*,\s*$")
_TRUNCATED: Final = "Input data was truncated"
_TRAILING: Final = re.compile(r"trailing characters \(byte (\d+)\)")
_TRIES: Final = 32
_ADJACENT_TRIES: Final = 16
"""This many cuts are tried one after the other; then the distance doubles, as all may lie inside one event."""
_OPEN, _CLOSE, _COMMA = b"[],"
_MALFORMED: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_MEMBERS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_RAW_EVENTS: Final = msgspec.json.Decoder(list[Event])


class NoEventArray(InputError):
    """A complete JSON object that is not a trace."""


class EventArray(Generic[Piece]):
    """The event array of one trace, read once.

    Args:
        stream: the inflated text. Everything before the events is read at once.
        decode: decodes a JSON list of events. It may keep references into the text until the next piece is requested.
        place: names the trace in errors.

    Attributes:
        head: members of the outer object before the events, undecoded.
        tail: members behind the events, once `pieces` is exhausted.

    Raises:
        NoEventArray: it is JSON, but no trace.
        InputError: it is no trace, or what stands before the events is broken.
    """

    def __init__(
        self,
        stream: io.BufferedReader,
        decode: Callable[[bytes | memoryview], Piece],
        place: str,
    ) -> None:
        self._stream, self._decode, self._place = stream, decode, place
        self._read = 0
        self.head: dict[str, msgspec.Raw] = {}
        self.tail: dict[str, msgspec.Raw] = {}
        self._in_object = True
        self._first = self._begin()

    def pieces(self) -> Iterator[Piece]:
        """Yield the array piece by piece, decoded, in the order of the file.

        Raises:
            InputError: the trace is cut off, malformed, or has an event of a wrong type; names the position.
        """
        rest: bytes | memoryview = self._first
        while True:
            # A new buffer for each piece, because decoded values still point into the last one. It begins with "[".
            buffer = bytearray(1 + len(rest) + max(BLOCK, len(rest)))
            view = memoryview(buffer)  # a slice of a bytearray is set by way of a copy, one of a view is not
            buffer[0] = _OPEN
            view[1 : 1 + len(rest)] = rest
            got = self._stream.readinto(view[1 + len(rest) :])
            self._read += got
            size = 1 + len(rest) + got
            rest = view[1:size]
            if not got:
                yield self._last(bytes(view[:size]))
                return
            for at in _places_to_cut(buffer, size):
                kept, buffer[at] = buffer[at], _CLOSE
                try:
                    piece = self._decode(view[: at + 1])
                except _MALFORMED as error:
                    buffer[at] = kept
                    if str(error) == _TRUNCATED:
                        continue  # the comma stood inside an event
                    if _TRAILING.search(str(error)):  # the array ended before this cut
                        yield self._last(bytes(view[:size]) + self._remainder())
                        return
                    raise self._broken(error, size) from error
                rest = view[(at if kept == _COMMA else buffer.index(b",", at)) + 1 : size]
                # The piece keeps its closing bracket while the caller has it: it may decode it again for exact digits.
                yield piece
                break
            if len(rest) > LIMIT:
                raise InputError(
                    f"{self._place}: {len(rest) >> 20} MiB without a place between two events; this is no trace that "
                    "can be read in bounded memory"
                )

    def _begin(self) -> bytes:
        """Read up to the events. Returns the part of the events that was read along with it."""
        text = bytearray()
        while not text.strip() and self._more(text):
            pass
        start = text.lstrip()[:1]
        if start == b"[":
            self._in_object = False
            return bytes(text[text.index(b"[") + 1 :])
        if not start:
            raise InputError(f'{self._place}: cut off: it is empty; expected a Chrome trace, with "{_EVENTS}"')
        if start != b"{":
            raise InputError(f'{self._place}: expected {{ or [ at the beginning of a Chrome trace, with "{_EVENTS}"')
        seen = tries = 0
        while True:
            for match in _ARRAY.finditer(text, seen):
                head = self._object(bytes(text[: match.end()]) + b"]}")
                if head is not None and bytes(head.pop(_EVENTS, b"")) == b"[]":
                    self.head = head
                    return bytes(text[match.end() :])
                seen, tries = match.end(), tries + 1
                if tries > _TRIES:
                    raise InputError(f'{self._place}: "{_EVENTS}" stands {tries} times in it; a trace has one')
            if len(text) > LIMIT or not self._more(text):
                raise self._no_array(bytes(text))

    def _more(self, text: bytearray) -> bool:
        block = self._stream.read(BLOCK)
        self._read += len(block)
        text += block
        return bool(block)

    def _no_array(self, text: bytes) -> InputError:
        if len(text) > LIMIT:
            return InputError(f'{self._place}: no "{_EVENTS}" in its first {self._read} bytes: no Chrome trace')
        try:
            found = _MEMBERS.decode(text)
        except _MALFORMED as error:
            if str(error) == _TRUNCATED:
                return InputError(f'{self._place}: cut off before its "{_EVENTS}", after {self._read} bytes')
            return InputError(
                f'{self._place}: no "{_EVENTS}" array in {self._read} bytes, or what stands before it is not JSON '
                f"({_reason(error)}); expected a Chrome trace"
            )
        if _EVENTS in found:
            return InputError(f'{self._place}: its "{_EVENTS}" is no list: expected [')
        return NoEventArray(f'{self._place}: not a trace: it has no "{_EVENTS}"')

    def _remainder(self) -> bytes:
        """Return everything from here to the end of the file, where the end of the array has already been seen."""
        text = self._stream.read(LIMIT + 1)
        self._read += len(text)
        if len(text) > LIMIT:
            raise InputError(f"{self._place}: more than {LIMIT >> 20} MiB behind the events: this is no trace")
        return text

    def _last(self, text: bytes) -> Piece:
        """Decode the rest of the array, and the members behind it to the end of the file."""
        try:
            try:
                piece, end = self._decode(text), len(text)
            except msgspec.DecodeError as error:
                match = _TRAILING.search(str(error))
                if match is None:
                    raise
                end = text.rindex(b"]", 0, int(match[1]) - 1) + 1  # bytes are counted from 1
                piece = self._decode(memoryview(text)[:end])
        except _MALFORMED as error:
            raise self._broken(error, len(text)) from error
        behind = text[end:].strip()
        if self._in_object:
            if not behind:
                raise InputError(f"{self._place}: cut off behind its events, after {self._read} bytes (inflated)")
            tail = None
            if behind == b"}" or _MORE_MEMBERS.match(behind):
                tail = self._object(b"{" + behind.removeprefix(b","))
            if tail is None or _EVENTS in tail:
                raise InputError(f"{self._place}: what follows the events is not JSON: the file is cut off or damaged")
            self.tail = tail
        elif behind:
            raise InputError(f"{self._place}: more text behind the list of events: the file is damaged")
        return piece

    def _object(self, text: bytes) -> dict[str, msgspec.Raw] | None:
        try:
            return _MEMBERS.decode(text)
        except _MALFORMED:
            return None

    def _broken(self, error: Exception, pending: int) -> InputError:
        where = f"within the last {pending} of the first {self._read} bytes (inflated)"
        if str(error) == _TRUNCATED:
            return InputError(f"{self._place}: ends in the middle of an event: the file is cut off; write it again")
        return InputError(f"{self._place}: not a trace event: {_reason(error)}, {where}")


class RawEvents:
    """The events of one trace one at a time, with undecoded values.

    Args:
        stream: the inflated text.
        place: names the trace in errors.

    Attributes:
        count: number of events before the one yielded last.

    Raises:
        InputError: as `EventArray`.
    """

    def __init__(self, stream: io.BufferedReader, place: str) -> None:
        self._array, self._place = EventArray(stream, _raw_events, place), place
        self.count = 0
        self._check(self.head)

    @property
    def head(self) -> dict[str, msgspec.Raw]:
        """Members of the outer object before the events."""
        return self._array.head

    @property
    def tail(self) -> dict[str, msgspec.Raw]:
        """Members behind the events, once `events` is exhausted."""
        return self._array.tail

    def events(self) -> Iterator[Event]:
        """Yield every event, in the order of the file.

        Raises:
            InputError: the trace is cut off or malformed; names the position.
        """
        for piece in self._array.pieces():
            for event in piece:
                yield event
                self.count += 1
        self._check(self.tail)

    def _check(self, members: dict[str, msgspec.Raw]) -> None:
        for name, value in members.items():
            try:
                str(value, "utf-8")
            except UnicodeDecodeError as error:
                raise InputError(f"{self._place}: its {name} is {_reason(error)}") from error


def _raw_events(text: bytes | memoryview) -> list[Event]:
    found = _RAW_EVENTS.decode(text)
    str(text, "utf-8")  # undecoded values are written back unchecked, so they must be valid UTF-8
    return found


def _places_to_cut(text: bytearray, size: int) -> Iterator[int]:
    """Yield the indices just behind the `}` of a `},{` before `size`, from the last one backwards."""
    before, step = size, 1
    for tries in range(_TRIES):
        before = _boundary(text, before)
        if before < 0:
            return
        yield before
        if tries >= _ADJACENT_TRIES:
            step *= 2
            before = max(before - step * 64, 0)


def _boundary(text: bytearray, before: int) -> int:
    """Return the index just behind the `}` of the last `},{` whose `{` lies before `before`; -1 if there is none."""
    for _ in range(1 << 16):
        before = text.rfind(b"{", 0, before)
        if before < 0:
            return -1
        match = _BETWEEN.search(text, max(before - 256, 0), before)
        if match is not None:
            return match.start() + 1
    return -1


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8: byte {error.object[error.start]:#04x}"
    return str(error)
