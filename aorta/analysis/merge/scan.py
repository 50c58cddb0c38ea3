"""The text of one Chrome trace -> its events one at a time, and what stands round them.

Enters: decompressed chunks of bytes. Leaves: each event as a dictionary of undecoded values, so that what is not
changed is written back byte for byte. Must not: hold more than one event, or take a broken file for a whole one.

Format: Trace Event Format (Google, 2016): an object with a list `traceEvents`, or that list alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, TypeAlias

import msgspec

from aorta.errors import InputError

Event: TypeAlias = dict[str, msgspec.Raw]

MAX_VALUE_BYTES: Final = 64 << 20
"""One event or one top-level value longer than this is taken for a broken file: it bounds the memory."""

_SPACE = re.compile(rb"[ \t\r\n]*")
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_SCALAR = re.compile(rb"[^\s,\]}]+")
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[{}\[\]"]', re.DOTALL)
_MAYBE_END = re.compile(rb"\}(?=[ \t\r\n]*[,\]])")
_GUESSES = 8
_EVENT = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Scanner:
    """One trace, read once. `head` is there at once; `tail` when `events` has come to its end.

    Args:
        name: for messages.
        chunks: the text; its errors pass through.

    Raises:
        InputError: this is no trace, or it is cut off or broken; says where.
    """

    def __init__(self, name: str, chunks: Iterator[bytes]) -> None:
        self._name, self._chunks = name, chunks
        self._buffer, self._at, self._before = b"", 0, 0
        self.count = 0
        self.head: dict[str, msgspec.Raw] = {}
        self.tail: dict[str, msgspec.Raw] = {}
        first = self._peek()
        if first == b"{":
            self._at += 1
            self._in_object = True
            if not self._members(self.head, until="traceEvents"):
                raise InputError(f'{name}: not a trace: it has no "traceEvents"')
        elif first == b"[":
            self._in_object = False
        else:
            raise self._broken("expected { or [ at the beginning of a trace")
        self._expect(b"[")

    def events(self) -> Iterator[Event]:
        """Every event, in the order of the file."""
        if self._peek() == b"]":
            self._at += 1
        else:
            more = True
            while more:
                yield self._event()
                self.count += 1
                mark = self._peek()
                if mark not in (b",", b"]"):
                    raise self._broken("expected , or ] behind an event")
                more = mark == b","
                self._at += 1
        if self._in_object:
            if self._peek() == b",":
                self._at += 1
                self._members(self.tail, until=None)
            else:
                self._expect(b"}")
        if self._peek(end_allowed=True):
            raise self._broken("more text behind the end of the trace")

    def _event(self) -> Event:
        if self._peek() != b"{":
            raise self._broken("expected an event, an object")
        found = self._at
        # An object that decodes as a whole is the event: no shorter or longer text from here on can be one.
        for _ in range(_GUESSES):
            while (match := _MAYBE_END.search(self._buffer, found)) is None:
                # Whether the last brace ends the event may depend on what comes next.
                last = self._buffer.rfind(b"}", found)
                offset = (last if last >= 0 else len(self._buffer)) - self._at
                if not self._more():
                    break
                found = self._at + offset
            if match is None:
                break
            found = match.end()
            try:
                event = _EVENT.decode(self._buffer[self._at : found])
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
            self._at = found
            return event
        end = self._nested_end()
        try:
            event = _EVENT.decode(self._buffer[self._at : end])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self._broken(f"an event is not JSON ({error})") from error
        self._at = end
        return event

    def _members(self, into: dict[str, msgspec.Raw], until: str | None) -> bool:
        """Members of the outer object up to `until`, whose value comes next; False: the object has ended."""
        if self._peek() == b"}":
            self._at += 1
            return False
        while True:
            key = self._text(self._string_end())
            self._expect(b":")
            if key == until:
                self._peek()
                return True
            kind = self._peek()
            end = self._nested_end() if kind in (b"{", b"[") else self._scalar_end(kind)
            raw = self._buffer[self._at : end]
            try:
                msgspec.json.decode(raw)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise self._broken(f"the value of {key!r} is not JSON ({error})") from error
            into[key] = msgspec.Raw(raw)
            self._at = end
            mark = self._peek()
            if mark not in (b",", b"}"):
                raise self._broken(f"expected , or }} behind {key!r}")
            self._at += 1
            if mark == b"}":
                return False
            self._peek()

    def _text(self, end: int) -> str:
        try:
            text: str = msgspec.json.decode(self._buffer[self._at : end], type=str)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self._broken(f"a name is not JSON ({error})") from error
        self._at = end
        return text

    def _string_end(self) -> int:
        while (match := _STRING.match(self._buffer, self._at)) is None:
            if self._buffer[self._at : self._at + 1] != b'"':
                raise self._broken("expected a name in quotes")
            if not self._more():
                raise self._broken("cut off in the middle of a name")
        return match.end()

    def _scalar_end(self, kind: bytes) -> int:
        if kind == b'"':
            return self._string_end()
        while (match := _SCALAR.match(self._buffer, self._at)) is None or match.end() == len(self._buffer):
            if not self._more():
                raise self._broken("cut off in the middle of a value")
        return match.end()

    def _nested_end(self) -> int:
        """Where the object or list that begins here ends, counting brackets outside strings."""
        depth, found = 0, self._at
        while True:
            for match in _TOKEN.finditer(self._buffer, found):
                token = match.group()
                if token in (b"{", b"["):
                    depth += 1
                elif token in (b"}", b"]"):
                    depth -= 1
                    if not depth:
                        return match.end()
                elif token == b'"':
                    break  # a string that the end of the buffer cuts: looked at again from its beginning
                found = match.end()
            else:
                found = len(self._buffer)
            offset = found - self._at
            if not self._more():
                raise self._broken("cut off in the middle of an event or value")
            found = self._at + offset

    def _peek(self, *, end_allowed: bool = False) -> bytes:
        """The next byte that is not a space; nothing at the end of the text, where that is allowed."""
        while True:
            match = _SPACE.match(self._buffer, self._at)
            assert match is not None  # the pattern matches nothing at all
            self._at = match.end()
            if self._at < len(self._buffer):
                return self._buffer[self._at : self._at + 1]
            if not self._more():
                if end_allowed:
                    return b""
                raise self._broken("cut off")

    def _expect(self, mark: bytes) -> None:
        if self._peek() != mark:
            raise self._broken(f"expected {mark.decode()}")
        self._at += 1

    def _more(self) -> bool:
        """Read on; what was taken is let go."""
        chunk = next(self._chunks, b"")
        if len(self._buffer) - self._at > MAX_VALUE_BYTES:
            raise self._broken(f"a value of more than {MAX_VALUE_BYTES >> 20} MiB")
        self._before += self._at
        self._buffer, self._at = self._buffer[self._at :] + chunk, 0
        return bool(chunk)

    def _broken(self, what: str) -> InputError:
        place = f"byte {self._before + self._at} of its text, behind {self.count} events"
        return InputError(f"{self._name}: {what} ({place}); the file is cut off or corrupt, write it again")
